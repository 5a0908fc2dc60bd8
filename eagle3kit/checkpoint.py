"""From a training checkpoint to a draft directory that vLLM serves, and the check that it is one."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3kit.conventions import phrase
from eagle3kit.errors import KitError
from eagle3kit.files import publish, read_json
from eagle3kit.samples import load

if TYPE_CHECKING:
    import torch

    from eagle3kit.target import Geometry

CONFIG, WEIGHTS = "config.json", "model.safetensors"
SERVED_KINDS = ("llama", "qwen3")  # vLLM, model_executor/models: llama_eagle3.py and its qwen3 sibling


@dataclass(frozen=True)
class Check:
    """One thing looked at: what was `expected`, what was `found`, whether that is `right`, what a fault would cause."""

    what: str
    expected: str
    found: str
    right: bool
    otherwise: str


def read_config(folder: Path) -> dict[str, Any]:
    """The config.json of an EAGLE-3 draft directory.

    Raises:
        KitError: the folder is not one: missing, without config or weights, or of another kind of model.
    """
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            state = "does not exist" if not folder.exists() else f"has no {name}"
            raise KitError(f"{folder} {state}, so it is not a draft directory; the stage 07_checkpoint makes one")
    config = read_json(folder / CONFIG)
    kind = config.get("speculators_model_type")
    if kind != "eagle3":
        raise KitError(f"{folder / CONFIG}: speculators_model_type is {kind!r}, not 'eagle3' (architectures: "
                       f"{config.get('architectures')}); it is another kind of model")  # fmt: skip
    for key in ("transformer_layer_config", "eagle_aux_hidden_state_layer_ids", "draft_vocab_size", "speculators_config"):
        if key not in config:
            raise KitError(f"{folder / CONFIG} lacks {key}, so it is no whole EAGLE-3 draft; the stage 07_checkpoint makes one")
    return config


def export(source: Path, destination: Path, *, target: Path, dtype: "torch.dtype") -> Path:
    """Publish the draft in training checkpoint `source` as `destination`: config and weights, nothing of the optimizer.

    Weights are stored as `dtype`, the number type they are served in; the config names `target` as the model it drafts for.
    """
    import torch
    from safetensors.torch import save_file

    config = read_config(source)
    name = str(dtype).removeprefix("torch.")
    config["speculators_config"]["verifier"]["name_or_path"] = str(target)
    for key in {"dtype", "torch_dtype"} & config.keys():
        config[key] = name
    tensors = {key: tensor.to(dtype) if tensor.is_floating_point() else tensor
               for key, tensor in load(source / WEIGHTS).items()}  # fmt: skip
    if any(not torch.isfinite(tensor).all() for tensor in tensors.values() if tensor.is_floating_point()):
        raise KitError(f"{source / WEIGHTS} holds NaN or infinite weights; lower training.learning_rate and train again")
    with publish(destination) as inner:
        inner.mkdir()
        save_file(tensors, inner / WEIGHTS, metadata={"format": "pt"})
        (inner / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return destination


def check(
    folder: Path, *, geometry: "Geometry", weights: dict[str, "torch.Tensor"], t2d: "torch.Tensor", d2t: "torch.Tensor",
    layer_ids: list[int], dtype: "torch.dtype",
) -> list[Check]:  # fmt: skip
    """Everything that vLLM will take for granted, looked at one by one; KitError only when there is nothing to look at."""
    import torch

    config, tensors = read_config(folder), load(folder / WEIGHTS)
    layer = config["transformer_layer_config"]
    width, hidden, size = geometry.hidden_size, layer["hidden_size"], len(d2t)
    ids = config["eagle_aux_hidden_state_layer_ids"]
    shapes = {"fc.weight": [width, len(layer_ids) * width], "lm_head.weight": [size, width], "norm.weight": [width],
              "embed_tokens.weight": [geometry.vocab_size, width], "d2t": [size], "t2d": [geometry.vocab_size]}  # fmt: skip
    checks = [
        Check("kind of layer", " or ".join(SERVED_KINDS), str(layer["model_type"]), layer["model_type"] in SERVED_KINDS,
              "vLLM refuses the draft"),
        Check("hidden size", str(width), str(hidden), hidden == width, "vLLM cannot join the draft to the target"),
        Check("target's vocabulary", str(geometry.vocab_size), str(layer["vocab_size"]),
              layer["vocab_size"] == geometry.vocab_size, "wrong embeddings, acceptance near nothing"),
        Check("draft's vocabulary", str(size), str(config["draft_vocab_size"]), config["draft_vocab_size"] == size,
              "vLLM reads a head of another size and fails"),
        Check("layer ids", str(layer_ids), phrase(ids) if ids == layer_ids else str(ids), ids == layer_ids,
              "the draft is fed other states than it learned from"),
        Check("position limit", f"at least {geometry.max_positions}", str(layer["max_position_embeddings"]),
              layer["max_position_embeddings"] >= geometry.max_positions, "acceptance collapses past the limit"),
    ]  # fmt: skip
    for key, shape in shapes.items():
        found = list(tensors[key].shape) if key in tensors else "missing"
        checks.append(Check(f"{key} shape", str(shape), str(found), found == shape, "vLLM fails to load the draft"))
    floating = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values() if tensor.is_floating_point()}
    wanted = str(dtype).removeprefix("torch.")
    checks.append(Check("number type", wanted, ", ".join(sorted(floating)), floating == {wanted},
                        "served in other numbers than trained"))  # fmt: skip
    same_map = all(key in tensors and torch.equal(tensors[key], mine) for key, mine in (("d2t", d2t), ("t2d", t2d)))
    checks.append(Check("d2t and t2d", "those of 04_vocabulary", "the same" if same_map else "others", same_map,
                        "draft tokens are taken for other words"))  # fmt: skip
    embedding, mine = tensors.get("embed_tokens.weight"), weights["embed"].to(dtype)
    same = embedding is not None and embedding.shape == mine.shape and torch.equal(embedding, mine)
    checks.append(Check("embedding", "the target's, bit for bit", "equal" if same else "different", same,
                        "the draft reads other words than it learned"))  # fmt: skip
    rows = weights["head"][t2d].to(dtype)
    head = tensors.get("lm_head.weight")
    same = head is not None and head.shape == rows.shape and torch.equal(head, rows)
    checks.append(Check("head", "the target's rows that t2d keeps", "equal" if same else "different", same,
                        "the draft says other words than it means"))  # fmt: skip
    return checks


def faults(checks: list[Check], folder: Path) -> None:
    """Raise KitError with every check that failed; nothing when all hold."""
    wrong = [f"{c.what}: expected {c.expected}, found {c.found} ({c.otherwise})" for c in checks if not c.right]
    if wrong:
        raise KitError(f"{folder} is not the draft that was trained:\n" + "\n".join(wrong) +
                       "\nRun the stages 06_training and 07_checkpoint again")  # fmt: skip


def require_drafted(drafts: int, folder: Path) -> None:
    """KitError when vLLM served with the draft in `folder` but never drafted."""
    if not drafts:
        raise KitError(f"vLLM loaded {folder} but drafted nothing; its log is beside the stage's result")
