"""What is foretold of a rung, and how that stands beside what was then measured, as rows of tables and sentences."""

from collections.abc import Mapping, Sequence
from typing import Any

from eagle3kit.rungs import Foretold, Rung, Span

GIB = 2**30
# The rungs of the story that this kit began with, in its own words: Kimi-K2.5 on 8x RTX PRO 6000.
STORY = [{"samples": 10, "training took": "3 epochs in about 1 minute", "kind": "published"},
         {"samples": 1000, "training took": "27.7 minutes at 6 steps a second", "kind": "published"}]  # fmt: skip


def whole(stages: Sequence[Foretold]) -> Foretold | None:
    """The sum of all stages that are foretold, its bounds the sums of theirs; None where there are none."""
    if not stages:
        return None
    parts = [[getattr(one, name) for one in stages if getattr(one, name) is not None] for name in ("seconds", "disk", "new_disk")]
    sums = [Span(*(sum(getattr(part, end) for part in of) for end in ("value", "low", "high"))) if of else None for of in parts]
    return Foretold("all of these", stages[0].samples, *sums, tuple(dict.fromkeys(run for one in stages for run in one.of)))


def rows(stages: Sequence[Foretold]) -> list[dict[str, Any]]:
    """A row a stage and one for their sum: minutes and GiB with their bounds, and from which runs."""
    total = whole(stages)
    return [{"rung": one.samples, "stage": one.stage, **_ends("minutes", one.seconds, 60), **_ends("GiB", one.disk, GIB),
             "of it new, GiB": one.new_disk and one.new_disk.value / GIB, "kind": "forecast", "from": ", ".join(one.of)}
            for one in (*stages, *([total] if total else []))]  # fmt: skip


def _ends(unit: str, span: Span | None, scale: float) -> dict[str, float | None]:
    names = (unit, f"{unit}, at least", f"{unit}, at most")
    values = (None,) * 3 if span is None else (span.value / scale, span.low / scale, span.high / scale)
    return dict(zip(names, values, strict=True))


def against(foretold: Sequence[Mapping[str, Any]], rung: Rung) -> list[dict[str, Any]]:
    """What 00 foretold of this rung before it ran (`Foretold` as result.json has it), beside what its stages took.

    `within`: the measured value lies between the bounds, None where there are none; `off`: measured over foretold, less 1, in
    percent.
    """
    found = []
    for one in foretold:
        done = rung.results.get(one["stage"])
        if done is None or one["seconds"] is None:
            continue
        told = Span(**one["seconds"])
        took = float(done["seconds"])
        row = {"stage": one["stage"], "foretold, s": told.value, "at least, s": told.low, "at most, s": told.high,
               "measured, s": took, "within": told.low <= took <= told.high if told.low < told.high else None,
               "off, %": 100 * (took / told.value - 1)}  # fmt: skip
        groups = done.get("fingerprint", {}).get("artefacts")
        if groups is not None and one["disk"] is not None:
            size = sum(size for _, size in groups.values())
            row |= {"foretold, MiB": one["disk"]["value"] / 2**20, "measured, MiB": size / 2**20}
        found.append(row)
    return found


def ladder(rungs: Sequence[Rung]) -> list[dict[str, Any]]:
    """A row a rung: what it was made of, what it took over from other runs, what it took in all and for training."""
    found = []
    for rung in rungs:
        data, states, trained = (rung.numbers(stage) for stage in ("02_dataset", "03_hidden_states", "06_training"))
        taken = {**data.get("answers_taken", {})}, {**states.get("taken", {})}
        found.append({
            "run": rung.run, "samples": rung.samples, "tokens": data["tokens"],
            "answers taken over": sum(taken[0].values()), "states taken over": sum(taken[1].values()),
            "taken from": ", ".join(sorted({*taken[0], *taken[1]})) or None,
            "stages": len(rung.results), "minutes": sum(done["seconds"] for done in rung.results.values()) / 60,
            "training, minutes": rung.results["06_training"]["seconds"] / 60 if trained else None,
            "length, served": rung.numbers("08_acceptance").get("acceptance_length"), "kind": "measured",
        })  # fmt: skip
    return found


def words(stages: Sequence[Foretold]) -> str:
    """The forecast of a rung in a sentence."""
    total = whole(stages)
    if total is None or total.seconds is None:
        return "no smaller rung of these parameters has been run on this machine, so nothing is foretold of this one"
    minutes = [end / 60 for end in (total.seconds.value, total.seconds.low, total.seconds.high)]
    silent = [one.stage for one in stages if one.seconds is None]
    disk = f", {total.disk.value / GIB:.2g} GiB" if total.disk else ""
    return (f"forecast for {total.samples:,} samples, from {', '.join(total.of)}: {minutes[0]:.3g} minutes "
            f"({minutes[1]:.3g} to {minutes[2]:.3g}){disk}" + (f"; nothing is known of {', '.join(silent)}" if silent else ""))
