"""A tiny draft that has learned some answers of a tiny target by heart, made once and shared by the tests that look at drafts."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tinystates
import torch

from eagle3kit import checkpoint, draft, predict, target, training, vocabulary
from eagle3kit.params import Training
from eagle3kit.samples import Store

LAYERS, DEPTH = tinystates.LAYERS, 3
RECIPE = Training(draft_steps=DEPTH, epochs=4, tokens_per_step=128, learning_rate=4e-3, muon_learning_rate=2e-2)


@dataclass
class Tiny:
    """The target's folder and model, the samples and their store, the servable draft, and what prediction needs of them."""

    target: Path
    model: Any
    samples: list
    store: Store
    draft: Path
    mapping: tuple[torch.Tensor, torch.Tensor]
    fitted: training.Fitted

    @property
    def known(self) -> dict[str, Any]:
        return {"weights": target.weights(self.target), "geometry": target.geometry(self.target)}

    @property
    def frequencies(self) -> torch.Tensor:
        """How often each token is supervised."""
        return vocabulary.count_tokens([(row.input_ids, row.loss_mask) for row in self.samples], len(self.mapping[0]))

    def answers(self, most: int = 100) -> list:
        return list(predict.answers(self.store, most, 1000))

    def states(self, ids, layers):
        """The target's states by another way than the kit's own."""
        return tinystates.states_of(self.model, list(ids), list(layers))


def uneven_norm(folder: Path) -> None:
    """A final norm that matters: with weights of one, leaving it out changes no argmax."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        draw = torch.randn(len(model.model.norm.weight), generator=torch.Generator().manual_seed(5))
        model.model.norm.weight.copy_((0.8 * draw).exp())
    model.save_pretrained(folder)


def learn(folder: Path, new, train: Store, held_out: Store, recipe: Training = RECIPE) -> training.Fitted:
    return training.fit(new, train, held_out, folder, recipe, seed=0, report=lambda row: None, told=lambda line: None)


_made: list[Tiny] = []


def tiny(folder: Path) -> Tiny:
    """The draft, made in `folder` when first asked for and then shared by all tests of this process."""
    if not _made:
        _made.append(make(folder))
    return _made[0]


def make(folder: Path, hidden: int = 64, vocab: int = 512, said: int | None = None, count: int = 6) -> Tiny:
    """A target in `folder` (`tinystates.lively_target`), `count` of its own answers, and a draft that has learned them. On a CPU
    vLLM serves heads of 32 numbers and more: a width of 128 has them."""
    torch.set_num_threads(1)
    place = tinystates.lively_target(folder / "target", hidden, vocab, said)
    uneven_norm(place)
    model = tinystates.load(place)
    samples = tinystates.own_answers(model, place, count, 48)
    copies = tinystates.fill(Store(folder / "train", "pt"), model, place, samples * (60 // count))
    store = tinystates.fill(Store(folder / "held", "pt"), model, place, samples)
    counts = vocabulary.count_tokens([(row.input_ids, row.loss_mask) for row in samples], vocab)
    mapping = vocabulary.build(counts, 256, [0, 1, 2])
    new = draft.build(place, *mapping, RECIPE, layer_ids=LAYERS, seed=0)
    fitted = learn(folder / "checkpoints", new, copies, store)
    exported = checkpoint.export(fitted.best, folder / "draft", target=place, dtype=torch.float32)
    return Tiny(place, model, samples, store, exported, mapping, fitted)
