"""Rungs: the same parameter file with 10 samples, then 1,000, then all. What the smaller ones took says what the next will take.

A rung is a finished run that differs in `dataset.samples` alone, as far as a stage reads its parameters, on a machine like this.
All that is foretold here is a forecast, and its ends are bounds, not a confidence interval: see `foretell`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3kit import fingerprint
from eagle3kit.params import Params

# What a stage's time grows with; a stage that is not named takes the same time in every rung.
GROWS_WITH = {"02_dataset": "answers", "03_hidden_states": "tokens", "04_vocabulary": "tokens", "05_formats": "tokens",
              "06_training": "tokens", "08_acceptance": "prompts"}  # fmt: skip
TAKEN_OVER = ("02_dataset", "03_hidden_states")  # what a smaller rung made of it is not made again


@dataclass(frozen=True)
class Rung:
    """A run as far as it has come: conversations used and usable, and its results by stage."""

    run: str
    samples: int
    usable: int
    results: Mapping[str, Mapping[str, Any]]

    def numbers(self, stage: str) -> Mapping[str, Any]:
        """What a stage's result says, {} where it has none."""
        return self.results.get(stage, {}).get("numbers", {})


@dataclass(frozen=True)
class Span:
    """A forecast with its bounds."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Foretold:
    """One stage of a rung of `samples`: seconds, bytes its folder will hold, and bytes of these that take new room on the disk
    (states of a smaller rung are linked). `of`: the runs it is foretold from; None where they do not tell."""

    stage: str
    samples: int
    seconds: Span | None
    disk: Span | None
    new_disk: Span | None
    of: tuple[str, ...]


def own_run(file: Path | str, overrides: dict[str, str]) -> str | None:
    """The run's name of a rung: "cpu" with `-p dataset.samples=10` is "cpu-10", beside the file's own run and not in its place.

    None where the command line names a run, or no number of samples, or the file's own.
    """
    if "dataset.samples" not in overrides or "run" in overrides:
        return None
    rest = Params.load(file, {name: value for name, value in overrides.items() if name != "dataset.samples"})
    samples = Params.load(file, overrides).dataset.samples
    return None if rest.dataset.samples == samples else f"{rest.run[:85]}-{samples}"


def collect(outputs: Path, params: Params, machine: Mapping[str, Any]) -> list[Rung]:
    """All rungs of the parameters in `outputs`, the smallest first; of `params` nothing is noted as read.

    `machine`: cores and gpus, as a result's provenance has them. Like `rates.earlier`, this is no input of a stage.
    """
    values, found = params.leaves(), []
    for place in sorted(outputs.glob("*/02_dataset/result.json")):
        done = {path.parent.name: fingerprint.result(path.parent) or {} for path in place.parent.parent.glob("*/result.json")}
        like = {stage: result for stage, result in done.items() if _alike(result, values, machine)}
        sources = like.get("02_dataset", {}).get("numbers", {}).get("sources")
        if sources and "tokens_per_sample" in like["02_dataset"]["numbers"]:
            used, usable = (sum(row[name] for row in sources.values()) for name in ("used", "usable"))
            found.append(Rung(place.parent.parent.name, used, usable, like))
    return sorted(found, key=lambda rung: (rung.samples, rung.run))


def _alike(result: Mapping[str, Any], values: Mapping[str, Any], machine: Mapping[str, Any]) -> bool:
    """Whether a result is of the same parameters but for the number of samples, and of a machine like this."""
    read, there = result.get("fingerprint", {}).get("params"), result.get("provenance", {}).get("machine", {})
    if read is None or any(there.get(key) != value for key, value in machine.items()):
        return False
    return all(values.get(name) == value for name, value in read.items() if name != "dataset.samples")


def next_samples(rung: Rung) -> list[int]:
    """The rungs to foretell after this one: ten and a hundred times as many, and all that its sources hold."""
    more = [count for count in (10 * rung.samples, 100 * rung.samples) if count < rung.usable]
    return [*more, rung.usable] if rung.usable > rung.samples else []


def foretell(rungs: Sequence[Rung], samples: int) -> list[Foretold]:
    """What each stage of a rung of `samples` will take, from smaller `rungs`, the largest of which counts most.

    A stage's seconds are a start, which every rung pays alike, and what grows with its work (`GROWS_WITH`). Where the stage has
    timed the growing part by itself (answers, extraction, training steps), that is used; else two rungs give a line. Bounds:

    from: as if all that was not seen to grow were start; of answers and states, as if requests that run at once cost no more
        than one (a rung smaller than `in_flight` fills no batch); and samples as short as their 95 % interval allows.
    to: as if the whole stage grew with its work; and samples as long as that interval allows.

    Where nothing tells the start from what grows, the forecast is the middle of its bounds by ratio (the root of their product).
    A stage that does not grow is bounded by the quickest and the slowest of the rungs; by one alone it is not. All of it takes
    the machine to be as busy as it was.

    Work that a smaller rung has done already (answers, states) is not done again and is not counted.
    Example: 9 s for 1,000 tokens, 1 s of it timed as growing; 5,000 tokens more: 8 + 1 · 5 = 13 s, at most 9 · 5 = 45 s.
    """
    below = [rung for rung in rungs if rung.samples < samples]
    stages = sorted({stage for rung in below for stage in rung.results})
    return [_stage(stage, [rung for rung in below if stage in rung.results], samples) for stage in stages]


def _stage(stage: str, rungs: list[Rung], samples: int) -> Foretold:
    base = rungs[-1]
    disk, new_disk = _disk(stage, base, samples)
    points = [(rung, _new(stage, rung), rung.results[stage]["seconds"]) for rung in rungs]
    points = [point for point in points if point[1] > 0]  # a run that took everything from others tells no pace
    if stage not in GROWS_WITH:
        every = [float(rung.results[stage]["seconds"]) for rung in rungs]
        return Foretold(stage, samples, Span(every[-1], min(every), max(every)), disk, new_disk, tuple(r.run for r in rungs))
    if not points:
        return Foretold(stage, samples, None, disk, new_disk, (base.run,))
    rung, done, took = points[-1]
    ahead = _ahead(stage, base, samples)
    inner, filled = _growing(stage, rung)
    told = True
    if inner is not None:
        start, slope = max(0.0, took - inner), inner / done
        low = start + inner * max(min(1.0, ahead.low / done), ahead.low / done * filled)
    elif len(points) > 1 and points[-2][1] < done:
        slope = min(max(0.0, (took - points[-2][2]) / (done - points[-2][1])), took / done)
        start = took - slope * done
        low = min(took, start + slope * ahead.low)
    else:
        told, start, slope, low = False, 0.0, took / done, min(took, took * ahead.low / done)
    high = max(start + slope * ahead.value, start + slope * ahead.high, took * ahead.high / done)
    value = start + slope * ahead.value if told else math.sqrt(low * high)
    used = tuple(dict.fromkeys(one.run for one, *_ in (points[-2:] if inner is None else points[-1:])))
    return Foretold(stage, samples, Span(value, min(low, value), high), disk, new_disk, used)


def _total(stage: str, rung: Rung) -> float:
    """All the work of a stage in a rung, done by whomever."""
    numbers = rung.numbers("02_dataset")
    kind = GROWS_WITH[stage]
    if kind == "prompts":
        return rung.numbers(stage).get("prompts", 0)
    answers = numbers["answers_written"] + numbers["answers_kept"]
    return answers if kind == "answers" and answers else numbers["tokens"]


def _new(stage: str, rung: Rung) -> float:
    """The part of the work that the stage itself did."""
    if stage == "03_hidden_states":
        return rung.numbers(stage).get("tokens", 0)
    if stage == "02_dataset" and rung.numbers(stage)["answers_kept"]:
        return rung.numbers(stage)["answers_written"]
    return _total(stage, rung) if stage in GROWS_WITH else 1


def _ahead(stage: str, base: Rung, samples: int) -> Span:
    """The work that a rung of `samples` has ahead, less what `base` has done of it."""
    total, numbers = _total(stage, base), base.numbers("02_dataset")
    if stage == "08_acceptance":
        most = base.results[stage]["params"]["acceptance.prompts"]
        held = numbers["held_out"] * samples / base.samples
        return Span(*(max(total, min(most, count)) for count in (held, total, max(held, most))))
    length = numbers["tokens_per_sample"]
    grown = total * samples / base.samples
    done = total if stage in TAKEN_OVER and (stage != "02_dataset" or numbers["answers_written"]) else 0
    ends = [grown, grown * length["low"] / length["value"], grown * length["high"] / length["value"]]
    return Span(*(max(0.0, end - done) for end in ends))


def _growing(stage: str, rung: Rung) -> tuple[float | None, float]:
    """(seconds of the stage that were timed as growing with the work; how full its batches were, from 0 to 1)."""
    numbers, params = rung.numbers(stage), rung.results[stage]["params"]
    if stage == "02_dataset":
        return numbers.get("seconds_answering") or None, min(1.0, numbers["answers_written"] / params["dataset.in_flight"])
    if stage == "03_hidden_states":
        return numbers.get("seconds_extracting") or None, min(1.0, numbers["written"] / params["hidden_states.in_flight"])
    if stage == "06_training" and numbers.get("tokens_per_second"):
        of = rung.numbers("02_dataset")
        learned = of["tokens"] * of["train"] / (of["train"] + of["held_out"]) * params["training.epochs"]
        return min(learned / numbers["tokens_per_second"], rung.results[stage]["seconds"]), 1.0
    return None, 1.0


def _disk(stage: str, base: Rung, samples: int) -> tuple[Span | None, Span | None]:
    """(bytes of the stage's folder, bytes of new room): answers and states grow with the tokens, all else stays as it is."""
    groups = base.results[stage].get("fingerprint", {}).get("artefacts")
    if groups is None:
        return None, None
    size = float(sum(size for _, size in groups.values()))
    if stage not in TAKEN_OVER:
        return Span(size, size, size), Span(size, size, size)
    length = base.numbers("02_dataset")["tokens_per_sample"]
    grown = size * samples / base.samples
    least = grown * length["low"] / length["value"]
    # A small file of samples is mostly its own head.
    whole = Span(grown, least if stage == "03_hidden_states" else min(size, least), grown * length["high"] / length["value"])
    linked = size if stage == "03_hidden_states" else 0.0
    return whole, Span(*(max(0.0, end - linked) for end in (whole.value, whole.low, whole.high)))
