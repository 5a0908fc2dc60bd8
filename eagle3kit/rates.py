"""How many hours a plan takes: at rates that this machine has shown in an earlier run, else timed on the spot for some seconds,
else at the best that its arithmetic allows."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from eagle3kit import fingerprint
from eagle3kit.errors import KitError
from eagle3kit.figures import Figure
from eagle3kit.speedup import state_bytes_per_token

if TYPE_CHECKING:
    from eagle3kit.params import Params
    from eagle3kit.target import Geometry

How = Literal["measured by an earlier run", "measured on the spot", "modelled"]
ANSWERS, EXTRACTING, WRITING, TRAINING = "writing answers", "extracting hidden states", "writing them to disk", "training"
# Which stage tells of which work, and under which names its result says how many tokens a second it did. Extraction has the
# writing of its files with it.
WORK = {ANSWERS: ("02_dataset", "new_tokens_per_second"), EXTRACTING: ("03_hidden_states", "tokens_per_second"),
        TRAINING: ("06_training", "tokens_per_second")}  # fmt: skip
# Parameters that set the pace of training; a rate of others says nothing of this one.
PACE_OF_TRAINING = ("training.draft_layers", "training.draft_steps", "training.tokens_per_step", "training.attention",
                    "training.dtype", "training.optimizer", "training.loss", "training.compile", "training.processes",
                    "vocabulary.size")  # fmt: skip


@dataclass(frozen=True)
class Rate:
    """Tokens a second of one kind of work, and how that is known. "modelled": no machine is faster, most are slower.

    `bound`: the work itself is no faster than this. So it is with what arithmetic allows, and with what is timed on the spot
    where the work is done the same way, by this machine and one process; on a GPU vLLM and compiled training are faster.
    """

    figure: Figure
    how: How
    bound: bool = False

    @property
    def tokens_per_second(self) -> float:
        """The rate itself."""
        return self.figure.value

    @property
    def source(self) -> str:
        """Where it is from, in words."""
        return self.figure.source


@dataclass(frozen=True)
class Hours:
    """One kind of work: tokens to go through, hours at the rate with their interval (95 % over the `n` repeats, or from the
    fastest to the slowest of `n` earlier runs; None: one run, or no interval); `bound`: so many tokens take at least that long,
    for the work is no faster than the rate (`Rate`)."""

    work: str
    tokens: int
    hours: float
    low: float | None
    high: float | None
    n: int | None
    bound: bool
    how: How
    source: str


def pace(
    params: "Params", geometry: "Geometry", model: Path, *, layers: list[int], machine: dict[str, Any], outputs: Path,
    folder: Path,
) -> tuple[dict[str, Rate], dict[str, str]]:  # fmt: skip
    """(the rate of each kind of work; {work: why it was not timed}).

    First choice is what an earlier run in `outputs` measured on a `machine` like this; what none has shown is timed now, for
    about `profile.plan_seconds`, on the disk of `folder` and with the shapes of the target in the folder `model`; what cannot
    be timed is modelled, where arithmetic gives a bound. `layers`: auxiliary states kept of a token, beside the last one.
    """
    like = {"cores": machine["cores"], "gpus": [gpu["name"] for gpu in machine["gpus"]]}
    same = {"target.model": params.target.model, "target.dtype": params.target.dtype}
    leaves = params.leaves()
    known = earlier(outputs, machine=like, target=same, recipe={name: leaves[name] for name in PACE_OF_TRAINING})
    needed = {EXTRACTING, WRITING, TRAINING} | ({ANSWERS} if params.dataset.regenerate else set())
    needed -= {WRITING} if EXTRACTING in known else set()
    timed, why = on_the_spot(params, geometry, model, layers, folder, needed - set(known))
    found = timed | known
    if needed & {EXTRACTING, TRAINING} - set(found):
        weights, drafts = weights_met(geometry, params.vocabulary.size, params.training.draft_layers, len(layers) + 1)
        found = at_best(arithmetic(geometry.hidden_size, params.target.dtype), weights=weights, draft_weights=drafts,
                        draft_steps=params.training.draft_steps) | found  # fmt: skip
    return {work: found[work] for work in (ANSWERS, EXTRACTING, WRITING, TRAINING) if work in found and work in needed}, why


def on_the_spot(
    params: "Params", geometry: "Geometry", model: Path, layers: list[int], folder: Path, works: set[str]
) -> tuple[dict[str, Rate], dict[str, str]]:  # fmt: skip
    """(rates of `works`, timed now; {work: why not}). On one GPU where there are several, for one is what a plan can count on."""
    seconds, seed = params.profile.plan_seconds, params.seed
    if not seconds:
        return {}, dict.fromkeys(sorted(works), "profile.plan_seconds is 0")
    from eagle3kit import trial, trial_passes  # late: with them come torch and transformers
    from eagle3kit.machine import DTYPE_BYTES

    found: dict[str, Figure] = {}
    why: dict[str, str] = {}
    if works & {ANSWERS, EXTRACTING}:
        at_once = min(params.dataset.in_flight, params.server.max_num_seqs)
        try:
            found[EXTRACTING], found[ANSWERS] = trial_passes.passes(
                model, dtype=params.target.dtype, prompt=params.dataset.max_length, at_once=at_once, seconds=0.4 * seconds,
                seed=seed)  # fmt: skip
        except KitError as error:
            why |= dict.fromkeys(sorted(works & {ANSWERS, EXTRACTING}), str(error))
    if WRITING in works:
        speed = trial.disk(folder, 0.1 * seconds, seed=seed)
        size = state_bytes_per_token(len(layers), geometry.hidden_size, DTYPE_BYTES[params.target.dtype])
        found[WRITING] = Figure(value=speed.value / size, low=speed.least / size, high=speed.most / size, n=speed.n,
                                unit="tokens/s", kind="measured",
                                source=f"{speed.source}: {speed.value / 2**20:,.0f} MiB/s")  # fmt: skip
    if TRAINING in works:
        try:
            found[TRAINING] = trial.steps(
                model, params.training, layer_ids=layers, vocab_size=geometry.vocab_size, length=params.dataset.max_length,
                draft_vocab_size=min(params.vocabulary.size, geometry.vocab_size), seconds=0.5 * seconds, seed=seed,
                trust_remote_code=params.target.trust_remote_code)  # fmt: skip
        except KitError as error:
            why[TRAINING] = str(error)
    here = trial.device() == "cpu"
    alone = {WRITING: True, ANSWERS: here and not params.server.url, EXTRACTING: here and not params.server.url,
             TRAINING: (here or params.training.compile == "none") and params.training.processes == 1}  # fmt: skip
    bound = set() if params.cluster else {work for work, no_faster in alone.items() if no_faster}
    return {work: Rate(figure, "measured on the spot", work in bound) for work, figure in found.items() if work in works}, why


def earlier(
    outputs: Path, *, machine: dict[str, Any], target: dict[str, Any], recipe: dict[str, Any] | None = None
) -> dict[str, Rate]:  # fmt: skip
    """The newest rates that runs in `outputs` measured on a machine like `machine`, for the same `target` parameters; the
    interval is from the slowest to the fastest of these runs.

    Args:
        machine: any of system, processor, cores and gpus, as a result's provenance has them.
        target: names and values of parameters that must be the same, such as {"target.model": …}.
        recipe: more of them, for training alone.

    What is read here is no input of a stage: a plan is an estimate, and a faster run since makes no result stale.
    """
    found: dict[str, Rate] = {}
    for work, (stage, name) in WORK.items():
        wanted, rows = target | (recipe or {} if work == TRAINING else {}), []
        for path in outputs.glob(f"*/{stage}/result.json"):
            done = fingerprint.result(path.parent) or {}
            there, rate = done.get("provenance", {}).get("machine", {}), done.get("numbers", {}).get(name)
            like = all(there.get(key) == value for key, value in machine.items())
            if rate and like and all(done.get("params", {}).get(key) == value for key, value in wanted.items()):
                rows.append((done["finished"], done["run"], float(rate)))
        if rows:
            finished, run, newest = max(rows)
            every = [rate for *_, rate in rows]
            several = f", the newest of {len(rows)}" if len(rows) > 1 else ""
            found[work] = Rate(Figure(value=newest, unit="tokens/s", kind="measured", n=len(rows),
                                      low=min(every) if several else None, high=max(every) if several else None,
                                      source=f"run {run} of {finished[:10]} on this machine{several}"),
                               "measured by an earlier run")  # fmt: skip
    return found


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
    costs = {EXTRACTING: 2 * weights, TRAINING: 6 * draft_weights * draft_steps}
    return {work: Rate(Figure(value=operations_per_second / cost, unit="tokens/s", kind="modelled", source=source), "modelled",
                       bound=True)
            for work, cost in costs.items()}  # fmt: skip


def weights_met(geometry: "Geometry", draft_vocab_size: int, draft_layers: int, states: int) -> tuple[int, int]:
    """(target's, draft's) weights that a token meets, roughly: 12 H² a layer (attention 4, MLP 8), the heads, and the draft's
    projection of joined states. For a dense target; a mixture of experts meets fewer than it has, and of these more a layer."""
    square = geometry.hidden_size**2
    target = 12 * square * geometry.layers + geometry.vocab_size * geometry.hidden_size
    draft = 12 * square * draft_layers + (states - 1) * square + draft_vocab_size * geometry.hidden_size
    return target, draft


def hours(rates: dict[str, Rate], *, tokens: int, epochs: int, answers: int = 0) -> list[Hours]:
    """What the plan's `tokens` cost: once to extract and to write, `epochs` times to train; and `answers` tokens to be written by
    the target. 51,200 tokens at 800 a second -> 0.018 h."""
    amounts = {ANSWERS: answers, TRAINING: tokens * epochs}
    found = []
    for work, rate in rates.items():
        amount, figure = amounts.get(work, tokens), rate.figure
        low, high = (None if end is None else amount / end / 3600 for end in (figure.high, figure.low))
        found.append(Hours(work, amount, amount / figure.value / 3600, low, high, figure.n, rate.bound, rate.how, rate.source))
    return found
