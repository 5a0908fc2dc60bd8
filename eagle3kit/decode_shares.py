"""The all-reduce's cost in three readings, beside the story's; what an A/B saved where a microbenchmark foretold more; and
what another fabric would change."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

from eagle3kit import fabric, figures, speedup, story
from eagle3kit.decode_rows import Windows, frame
from eagle3kit.figures import Figure
from eagle3kit.words import between

if TYPE_CHECKING:
    from eagle3kit.collective import Measured
    from eagle3kit.decode_profile import Profiled

NVLINK_US = 8.0  # a one-shot all-reduce of a small message over NVLink (published, B200 and H100)
# What an all-reduce of one token might take instead: µs by what joins the GPUs (published; the last as the story's A/B says).
FABRICS = {"NVLink": NVLINK_US, "PCIe, one-shot": story.CUSTOM_US, "PCIe, NCCL": story.usual_us()}
# Which two ways of `collective` an A/B switches between: the usual one, and vLLM's own.
SWITCHED = (("gloo", "vLLM shared memory"), ("NCCL in a graph", "vLLM custom in a graph"), ("NCCL", "vLLM custom"))


def saving(profiled: Sequence["Profiled"], count: int) -> fabric.Saving | None:
    """The A/B of a plain engine with and without vLLM's own all-reduce, at its first point; None where it was not run."""
    without = next((p for p in profiled if not p.engine.custom_allreduce and p.points), None)
    if without is None:
        return None
    with_own = next((p for p in profiled if p.engine.baseline and p.engine.group == without.engine.group and p.points), None)
    if with_own is None:
        return None
    point = with_own.points[0]
    other = without.at(point.batch, point.context)
    if other is None:
        return None
    ms = [figures.mean([1000 * s for s in one.seconds], unit="ms", source=f"plain steps, {point.batch} at once")
          for one in (other, point)]  # fmt: skip
    return fabric.Saving(usual_ms=ms[0], other_ms=ms[1], count=count)


def readings(found: Windows, switched: fabric.Saving | None) -> dict[str, Figure | None]:
    """The all-reduce's share, three ways, None where it was not measured."""
    names = ("of kernel time, waiting included", "without waiting", "saved by switching it (A/B)")
    if not found or not found[0][1].instances:
        return dict(zip(names, (None, None, switched and switched.share), strict=True))
    _, comparison = found[0]
    three = fabric.three_shares(comparison.all_reduce_ms, comparison.busy_ms, comparison.transfer_ms, switched)
    return dict(zip(names, (three.of_kernel_time, three.without_waiting, three.saved), strict=True))


def share_rows(here: Mapping[str, Figure | None], found: Windows) -> pd.DataFrame:
    """The three readings here, and the story's claim by the same rulers."""
    none = "one rank: no all-reduce" if found and not found[0][1].instances else "not measured"
    told = story.readings()
    by_record = dict(zip(here, (told.claimed, told.cost, told.saved), strict=True))
    return pd.DataFrame([{"share of decode time": name, "here, %": one and 100 * one.value,
                          "spread": "" if one is None or one.low is None else between(100 * one.low, 100 * one.high),
                          "this is": one.kind if one else none, "the story, %": 100 * by_record[name].value,
                          "that is": by_record[name].kind} for name, one in here.items()])  # fmt: skip


def ab_rows(switched: fabric.Saving | None, alone: "Measured", size: int) -> pd.DataFrame:
    """What the all-reduce alone says that switching it saves, and what an engine saved: here at messages of `size` bytes, and in
    the story's public record (5.42 ms foretold, 1.06 came)."""
    rows: list[dict[str, Any]] = []
    if switched is not None:
        low, high = switched.share.low, switched.share.high
        spread = "" if low is None or high is None else between(low * switched.usual_ms.value, high * switched.usual_ms.value)
        rows.append({"engine": "here", "all-reduces": switched.count, "foretold": foretold_ms(switched, alone, size),
                     "saved": switched.saved_ms, "95 % interval": spread, "of a step of": switched.usual_ms.value,
                     "kind": switched.share.kind})  # fmt: skip
    record = story.saving()
    rows.append({"engine": "the story", "all-reduces": record.count,
                 "foretold": record.count * (story.USUAL_US - story.CUSTOM_US) / 1000, "saved": record.saved_ms,
                 "95 % interval": "", "of a step of": record.usual_ms.value, "kind": "published"})  # fmt: skip
    return frame(rows)


def foretold_ms(switched: fabric.Saving, alone: "Measured", size: int) -> float | None:
    """count · (usual - own) by the medians of `collective` at `size` bytes; None where not both ways were timed there."""
    for ways in SWITCHED:
        each = [next((t.median for t in alone.of(way) if t.size == size), None) for way in ways]
        if None not in each:
            return switched.count * 1000 * (each[0] - each[1])
    return None


def faster_here(
    found: Windows, profiled: Sequence["Profiled"], lines: Mapping[str, fabric.Line], new_us: float
) -> fabric.WhatIf | None:  # fmt: skip
    """This engine if each all-reduce of a plain step took `new_us`: what they take now is the transfer in its trace.

    A verify step's messages take longer by what the first of `lines` says. None where the timed engine was not traced on several
    ranks.
    """
    plain = next((p for p in profiled if p.engine.baseline and not p.engine.group and p.traces), None)
    draft = next((p for p in profiled if p.engine.draft and not p.engine.group and p.points), None)
    if plain is None or draft is None:
        return None
    mine = next((comparison for profiles, comparison in found if str(profiles[0].path) in plain.traces[0].files), None)
    if mine is None or len(mine.ranks) < 2 or not mine.instances:
        return None
    at, now = (plain.traces[0].batch, plain.traces[0].context), float(mine.transfer_us.mean())
    points = [one.at(*at) for one in (plain, draft)]
    if None in points:
        return None
    line, depth = next(iter(lines.values()), None), draft.engine.depth
    longer = 1.0
    if line is not None and line.us(line.points[0][0]) > 0:
        size = line.points[0][0] * at[0]  # the first point is one token
        longer = max(1.0, line.us(size * (depth + 1)) / line.us(size))
    count = round(mine.instances / (mine.steps or plain.traces[0].steps))
    ms = [figures.mean([1000 * s for s in point.seconds], unit="ms", source="steps") for point in points]
    return fabric.faster_fabric(ms[0], ms[1], [fabric.Traffic(count=count, old_us=now, new_us=new_us)],
                                [fabric.Traffic(count=count, old_us=now * longer, new_us=new_us * longer)])  # fmt: skip


def what_if_rows(
    found: Windows, profiled: Sequence["Profiled"], lines: Mapping[str, fabric.Line], length: Figure
) -> pd.DataFrame:  # fmt: skip
    """Other fabrics, for this engine where it can be told, and for the story's, which is joined by PCIe and reduces by NCCL.

    A faster one raises r, so speculation buys less; a slower one the other way round.
    """
    told = Figure(value=story.LENGTH, unit="tokens", kind="published", source=story.SOURCE)
    rows = []
    for fabric_name, each in FABRICS.items():
        for where, then, tokens in (("here", faster_here(found, profiled, lines, each), length),
                                    ("the story", None if each == story.usual_us() else story.faster(each), told)):  # fmt: skip
            if then is not None:
                now, later = (speedup.predicted_speedup(tokens, r) for r in (then.r_now, then.r_then))
                rows.append({"engine": where, "joined by": fabric_name, "µs each": each,
                             "step, ms": then.plain_ms.value, "r now": then.r_now.value, "r then": then.r_then.value,
                             "length": tokens.value, "speedup now": now.value, "speedup then": later.value,
                             "kind": "modelled"})  # fmt: skip
    return pd.DataFrame(sorted(rows, key=lambda row: row["engine"]))
