"""Drafts with one planted fault each: of config or weights of a sound draft, or of what it was taught."""

import json
import shutil
from pathlib import Path

import tinydraft
import tinystates
import torch
from safetensors.torch import load_file, save_file

from eagle3kit import checkpoint, draft, training, vocabulary
from eagle3kit.conversations import make_sample
from eagle3kit.samples import Store


def changed(tiny, folder: Path, *, config=None, layer=None, tensors=None) -> Path:
    """A copy of the draft with one thing changed."""
    shutil.copytree(tiny.draft, folder)
    said = json.loads((folder / "config.json").read_text())
    said.update(config or {})
    said["transformer_layer_config"].update(layer or {})
    (folder / "config.json").write_text(json.dumps(said))
    if tensors:
        content = load_file(folder / "model.safetensors")
        save_file({**content, **tensors(content)}, folder / "model.safetensors")
    return folder


def absolute(content):
    return {"d2t": content["d2t"] + torch.arange(len(content["d2t"]))}


def other_mapping(size: int, vocab: int = 512) -> tuple[torch.Tensor, torch.Tensor]:
    """t2d and d2t of data in which other words are frequent; none of those from 512 on."""
    counts = torch.zeros(vocab, dtype=torch.int64)
    counts[:512] = torch.randint(50, (512,), generator=torch.Generator().manual_seed(9))
    return vocabulary.build(counts, size, [0, 1, 2])


def of_other_data(content):
    return dict(zip(("t2d", "d2t"), other_mapping(len(content["d2t"]), len(content["t2d"])), strict=True))


FAULTS = {
    "d2t holds target ids": {"tensors": absolute},
    "vocabulary from other data": {"tensors": of_other_data},
    "layers shifted": {"config": {"eagle_aux_hidden_state_layer_ids": [3, 5, 6]}},
    "RoPE": {"layer": {"rope_parameters": {"rope_type": "default", "rope_theta": 3.0}}},
    "a norm flag": {"config": {"norm_before_residual": False}},
}


def taught(tiny, folder: Path, *, final_norm: bool = True, late: int = 0, mapping=None, epochs: int = 4
           ) -> tuple[Path, training.Fitted, Store]:
    """(servable draft, how training went, its held-out store) where the teaching was wrong: `final_norm` False takes the
    target's words from states that missed their final norm; masks lie `late` tokens late, and the manifest believes them."""
    samples = [make_sample(one.id, one.source, one.input_ids, [(start + late, min(end + late, len(one.input_ids)))
                                                               for start, end in one.turns])
               for one in tiny.samples]  # fmt: skip
    train = tinystates.fill(Store(folder / "train", "pt"), tiny.model, tiny.target, samples * (60 // len(samples)))
    held_out = tinystates.fill(Store(folder / "held", "pt"), tiny.model, tiny.target, samples)
    new = draft.build(tiny.target, *(mapping or tiny.mapping), tinydraft.RECIPE, layer_ids=tinydraft.LAYERS, seed=0)
    if not final_norm:
        new.verifier_norm.weight.data.fill_(1.0)  # what a trainer without the norm sees: the same argmax as head(state)
    recipe = tinydraft.RECIPE.model_copy(update={"epochs": epochs})
    fitted = tinydraft.learn(folder / "checkpoints", new, train, held_out, recipe)
    return checkpoint.export(fitted.last, folder / "draft", target=tiny.target, dtype=torch.float32), fitted, held_out
