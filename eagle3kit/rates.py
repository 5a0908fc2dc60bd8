"""How many hours a plan takes: at rates that this machine has shown before, else at the best that its arithmetic allows."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3kit import fingerprint
from eagle3kit.figures import Kind

if TYPE_CHECKING:
    from eagle3kit.params import Params
    from eagle3kit.target import Geometry

# Which stage tells of which work, and under which names its result says how many tokens a second it did.
WORK = {"extracting hidden states": ("03_hidden_states", "tokens_per_second"), "training": ("06_training", "tokens_per_second")}


@dataclass(frozen=True)
class Rate:
    """Tokens a second of one kind of work: "measured" by an earlier run, or "modelled", and then no machine is faster."""

    tokens_per_second: float
    kind: Kind
    source: str


@dataclass(frozen=True)
class Hours:
    """One kind of work: tokens to go through, hours at the rate; `bound`: it takes at least that long, probably longer."""

    work: str
    tokens: int
    hours: float
    bound: bool
    source: str


def pace(params: "Params", geometry: "Geometry", *, states: int, machine: dict[str, Any], outputs: Path) -> dict[str, Rate]:
    """The rate of each kind of work: as an earlier run in `outputs` measured it on a `machine` like this, else at best.

    `states`: hidden states kept of a token, the last one included.
    """
    weights, draft_weights = weights_met(geometry, params.vocabulary.size, params.training.draft_layers, states)
    best = at_best(arithmetic(geometry.hidden_size, params.target.dtype), weights=weights, draft_weights=draft_weights,
                   draft_steps=params.training.draft_steps)  # fmt: skip
    like = {"cores": machine["cores"], "gpus": [gpu["name"] for gpu in machine["gpus"]]}
    same = {"target.model": params.target.model, "target.dtype": params.target.dtype}
    return best | earlier(outputs, machine=like, target=same)


def earlier(outputs: Path, *, machine: dict[str, Any], target: dict[str, Any]) -> dict[str, Rate]:
    """The newest rates that runs in `outputs` measured on a machine like `machine`, for the same `target` parameters.

    Args:
        machine: any of system, processor, cores and gpus, as a result's provenance has them.
        target: names and values of parameters that must be the same, such as {"target.model": …}.

    What is read here is no input of a stage: a plan is an estimate, and a faster run since makes no result stale.
    """
    found: dict[str, tuple[str, Rate]] = {}
    for work, (stage, name) in WORK.items():
        for path in outputs.glob(f"*/{stage}/result.json"):
            done = fingerprint.result(path.parent) or {}
            there, rate = done.get("provenance", {}).get("machine", {}), done.get("numbers", {}).get(name)
            like = all(there.get(key) == value for key, value in machine.items())
            same = all(done.get("params", {}).get(key) == value for key, value in target.items())
            if not (rate and like and same) or done["finished"] <= found.get(work, ("",))[0]:
                continue
            source = f"run {done['run']} of {done['finished'][:10]} on this machine"
            found[work] = (done["finished"], Rate(float(rate), "measured", source))
    return {work: rate for work, (_, rate) in found.items()}


def arithmetic(width: int, dtype: str, seconds: float = 0.6) -> float:
    """Operations a second of matrix products [1024, width] x [width, 4 · width] here, measured for about `seconds`.

    A product of m x k and k x n is 2mkn operations. The best repeat counts: it is used as a bound.
    """
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    left = torch.ones(1024, width, dtype=getattr(torch, dtype), device=device)
    right = torch.ones(width, 4 * width, dtype=getattr(torch, dtype), device=device)
    best, until = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < until or best == float("inf"):
        started = time.perf_counter()
        left @ right
        if device == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
    return 2 * 1024 * width * 4 * width / best


def at_best(operations_per_second: float, *, weights: int, draft_weights: int, draft_steps: int) -> dict[str, Rate]:
    """Rates that arithmetic alone allows: a token costs 2 operations a weight to read, and 6 to learn from.

    Extracting: the target's `weights` that a token meets. Training: `draft_weights`, once a draft step, forward (2), and
    backward (4). (Kaplan et al. 2020, arXiv 2001.08361, section 2.1.) Attention, memory and everything else come on top.
    """
    source = f"at best, from {operations_per_second / 1e9:,.0f} G operations a second measured here"
    return {"extracting hidden states": Rate(operations_per_second / (2 * weights), "modelled", source),
            "training": Rate(operations_per_second / (6 * draft_weights * draft_steps), "modelled", source)}  # fmt: skip


def weights_met(geometry: "Geometry", draft_vocab_size: int, draft_layers: int, states: int) -> tuple[int, int]:
    """(target's, draft's) weights that a token meets, roughly: 12 H² a layer (attention 4, MLP 8), the heads, and the draft's
    projection of joined states. For a dense target; a mixture of experts meets fewer than it has, and of these more a layer."""
    square = geometry.hidden_size**2
    target = 12 * square * geometry.layers + geometry.vocab_size * geometry.hidden_size
    draft = 12 * square * draft_layers + (states - 1) * square + draft_vocab_size * geometry.hidden_size
    return target, draft


def hours(rates: dict[str, Rate], *, tokens: int, epochs: int) -> list[Hours]:
    """What the plan's `tokens` cost: once to extract, `epochs` times to train. 51,200 tokens at 800 a second -> 0.018 h."""
    times = {"extracting hidden states": 1, "training": epochs}
    return [Hours(work, tokens * times[work], tokens * times[work] / rate.tokens_per_second / 3600, rate.kind == "modelled",
                  rate.source) for work, rate in rates.items()]  # fmt: skip
