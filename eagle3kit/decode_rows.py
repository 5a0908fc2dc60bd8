"""The tables of notebook 01, as rows ready to be shown: every number with what it is (measured, published, modelled)."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import pandas as pd

from eagle3kit import fabric, figures, speedup, story, traces
from eagle3kit.figures import Figure
from eagle3kit.verdict import Cost
from eagle3kit.words import three

if TYPE_CHECKING:
    from eagle3kit.collective import Measured
    from eagle3kit.decode_plan import Subject
    from eagle3kit.decode_profile import Profiled
    from eagle3kit.verdict import Verdict

Windows = list[tuple[list[traces.RankProfile], traces.Comparison]]
NVLINK_US = 8.0  # a one-shot all-reduce of a small message over NVLink (published, B200 and H100)


def frame(rows: Sequence[Mapping[str, Any]], why: str = "not asked for") -> pd.DataFrame:
    """`rows` as a table; where there are none, one row that says so and why."""
    return pd.DataFrame(rows or [{"not measured": why}])


def geometry(subject: "Subject", messages: Mapping[int, int]) -> pd.DataFrame:
    """What is profiled, and what its all-reduces send."""
    shape = subject.geometry
    rows = {"profiled": subject.name, "number type": subject.dtype, "layers": shape.layers, "width": shape.hidden_size,
            "attention heads": shape.attention_heads, "vocabulary": shape.vocab_size,
            "experts": f"{shape.experts}, {shape.experts_per_token} a token" if shape.experts else "none: dense",
            "all-reduces a step, if spread over ranks": fabric.all_reduces_per_step(shape.layers)}  # fmt: skip
    rows |= {f"message of {tokens:,} token{'s' if tokens > 1 else ''}": f"{size:,} bytes" for tokens, size in messages.items()}
    return pd.DataFrame(rows.items(), columns=["what", "value"]).astype(str)


def collectives(alone: "Measured", lines: Mapping[str, fabric.Line]) -> pd.DataFrame:
    """A row a way and size, with what the latency + bandwidth line says instead."""
    rows = [{"way": t.way, "bytes": t.size, "least, µs": 1e6 * t.minimum, "median, µs": 1e6 * t.median,
             "95 % within, µs": 1e6 * t.p95, "line, µs": lines[t.way].us(t.size) if t.way in lines else None}
            for t in alone.timings]  # fmt: skip
    return frame(rows, "; ".join(f"{way}: {why}" for way, why in alone.missing.items()) or "nothing was timed")


def collective_words(ranks: int) -> str:
    """What the table of all-reduces holds."""
    return (f"One all-reduce between {ranks} ranks, measured at the slowest of them; line: modelled" if ranks
            else "No all-reduce was timed")  # fmt: skip


def links(alone: "Measured", lines: Mapping[str, fabric.Line]) -> pd.DataFrame:
    """The lines in numbers, what joins the ranks, and what could not be timed."""
    rows = {f"{way}: latency": f"{line.alpha_us:.1f} µs" for way, line in lines.items()}
    rows |= {f"{way}: bandwidth": f"{line.gb_per_second:.2f} GB/s" if line.gb_per_second else "no limit seen"
             for way, line in lines.items()}  # fmt: skip
    rows |= {f"{way}: largest residual": f"{max(map(abs, line.residuals_us)):.1f} µs" for way, line in lines.items()}
    rows |= {name: value if isinstance(value, str) else str(value) for name, value in alone.links.items() if name != "settings"}
    rows |= alone.links.get("settings", {})
    rows |= {f"not timed: {way}": why for way, why in alone.missing.items()}
    return frame([{"what": what, "value": value} for what, value in rows.items()])


def engines(profiled: Sequence["Profiled"]) -> pd.DataFrame:
    """What each engine gave, or why it did not."""
    return frame([{"engine": p.engine.name, "ranks": p.engine.tensor_parallel, "started in, s": p.start_seconds,
                   "step times": len(p.points), "traces": len(p.traces), "not measured": p.missing or None}
                  for p in profiled])  # fmt: skip


def windows(profiled: Sequence["Profiled"]) -> Windows:
    """The traced decode steps of every rank, the first left out where three or more were traced: in it one rank waits for the
    other's profiler.

    Where this vLLM annotates steps in other words the whole trace is taken; ranks that did not see the same steps are looked at
    one by one, so that nothing is said of transfer and waiting. Either is told in `Comparison.remark`.
    """
    found: Windows = []
    for trace in (trace for one in profiled for trace in one.traces):
        skip = 1 if trace.steps >= 3 else 0
        try:
            found += _together(trace.files, traces.DECODE_STEP, skip)
        except traces.NoSteps as error:
            found += [(profiles, replace(comparison, remark=f"the whole trace, start and end of it included: {error}"))
                      for profiles, comparison in _together(trace.files, None, 0)]  # fmt: skip
    return found


def _together(files: Sequence[str], annotation: str | None, skip: int) -> Windows:
    """One window of all ranks; one a rank, with a remark, where they cannot be compared."""
    try:
        return [traces.profile_ranks(files, annotation, skip=skip)]
    except traces.UnequalRanks as error:
        each = [traces.profile_ranks([file], annotation, skip=skip) for file in files]
        return [(profiles, replace(comparison, remark=str(error))) for profiles, comparison in each]


def traced_words(profiled: Sequence["Profiled"]) -> str:
    """Which engine was traced at what, in words, and how long its steps take when nobody traces them: the profiler's own work
    shows as idle."""
    parts = []
    for one, trace in [(engine, each) for engine in profiled for each in engine.traces]:
        alone = one.at(trace.batch, trace.context)
        mean = f"; untraced {three(1000 * sum(alone.seconds) / len(alone.seconds))} ms a step" if alone else ""
        parts.append(f"sequences {trace.batch}, prompt tokens {trace.context:,}, ranks {one.engine.tensor_parallel}{mean}")
    return "; ".join(parts) or "none"


def shares(found: Windows) -> list[dict[str, Any]]:
    """Rows of `plots_decode.where_time_goes`: a bar a rank."""
    return [{"name": f"rank {p.rank if p.rank is not None else 0}",
             "shares": {**{bucket: time.exposed_ms / p.wall_ms for bucket, time in p.buckets.items()},
                        "idle": p.idle_ms / p.wall_ms}} for profiles, _ in found for p in profiles]  # fmt: skip


def traced(found: Windows) -> pd.DataFrame:
    """A row a rank: its window, busy time, all-reduces, transfer and waiting, and whether its parts add up."""
    rows = []
    for profiles, comparison in found:
        for place, p in enumerate(profiles):
            waited = float(comparison.waiting_us[place].sum()) / 1000 if len(profiles) > 1 else None
            rows.append({"rank": p.rank if p.rank is not None else 0, "steps": p.steps, "ms a step": p.step_ms,
                         "busy, %": 100 * p.busy_ms / p.wall_ms, "all-reduces": len(p.all_reduce_us),
                         "all-reduce, ms": p.all_reduce_ms, "transfer, ms": comparison.transfer_ms, "waiting, ms": waited,
                         "unknown kernels, ms": sum(k.ms for k in p.unknown), "unaccounted, %": 100 * p.unaccounted}
                        | ({"remark": comparison.remark} if comparison.remark else {}))  # fmt: skip
    return frame(rows)


def unknown(found: Windows) -> pd.DataFrame:
    """Kernels that no rule knows."""
    rows = [{"rank": p.rank if p.rank is not None else 0, "kernel": k.name, "times": k.count, "ms": k.ms}
            for profiles, _ in found for p in profiles for k in p.unknown]  # fmt: skip
    return pd.DataFrame(rows or [{"kernel": "none: every kernel has a bucket" if found else "nothing was traced"}])


def saving(profiled: Sequence["Profiled"], count: int) -> fabric.Saving | None:
    """The A/B of the plain engine with and without vLLM's own all-reduce, at its first point; None where it was not run."""
    with_own = next((p for p in profiled if p.engine.baseline and p.points), None)
    without = next((p for p in profiled if not p.engine.custom_allreduce and p.points), None)
    if with_own is None or without is None:
        return None
    point = with_own.points[0]
    other = without.at(point.batch, point.context)
    if other is None:
        return None
    ms = [figures.mean([1000 * s for s in one.seconds], unit="ms", source="plain steps") for one in (other, point)]
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
                          "this is": one.kind if one else none, "the story, %": 100 * by_record[name].value,
                          "that is": by_record[name].kind} for name, one in here.items()])  # fmt: skip


def ratio_rows(ratios: Mapping[tuple[int, int, int], Figure], refused: Sequence[str]) -> pd.DataFrame:
    """r, which is the length that breaks even, and the mean acceptance rate that it asks for."""
    rows = [{"at once": b, "context": c, "draft tokens": k, "r = break-even length": r.value, "from": r.low, "to": r.high,
             "acceptance rate needed": speedup.needed_rate(r, k).value, "steps": r.n, "kind": r.kind, "refused": None}
            for (b, c, k), r in ratios.items()]  # fmt: skip
    return frame(rows + [{"refused": reason} for reason in refused])


def expert_rows(subject: "Subject", ratios: Mapping[tuple[int, int, int], Figure]) -> pd.DataFrame:
    """How many experts a plain and a verify step wake, if tokens choose independently: N(t) = E(1 - (1 - k/E)^t)."""
    shape = subject.geometry
    if not shape.experts:
        return frame([], "a dense target reads the same weights for any number of tokens")
    count, each = shape.experts, shape.experts_per_token
    return frame([{"at once": b, "draft tokens": k, "experts, plain step": speedup.distinct_experts(count, each, b),
                   "experts, verify step": speedup.distinct_experts(count, each, b * (k + 1)),
                   "times as many": speedup.experts_ratio(count, each, b, k), "kind": "modelled"}
                  for b, k in sorted({(b, k) for b, _, k in ratios})], "no r was measured")  # fmt: skip


def map_rows(verdict: "Verdict") -> pd.DataFrame:
    """The verdict, cell by cell."""
    return pd.DataFrame([{"at once": j.cell.concurrency, "context": j.cell.context, "draft tokens": j.cell.draft_tokens,
                          "length": j.cell.length.value, "length is": j.cell.length.kind, "r": j.cell.r.value,
                          "r is": j.cell.r.kind, "speedup": j.cell.speedup.value, "from": j.cell.speedup.low,
                          "to": j.cell.speedup.high, "verdict": j.word} for j in verdict.cells])  # fmt: skip


def cost(machine: Mapping[str, Any]) -> Cost:
    """What a draft costs by the plan in the numbers of `00_machine`: hours there, and disk."""
    hours = machine["hours"]
    bound = any(row["bound"] for row in hours)
    how = "hours at the best that its arithmetic allows, so at least" if bound else "hours as measured"
    return Cost(gpu_hours=sum(row["hours"] for row in hours), disk_gib=machine["needed_gib"],
                hours_of="GPU" if machine["inventory"]["gpus"] else "machine",
                source=f"00_machine's plan of extracting and training: {how}; disk at most")  # fmt: skip


def faster_here(found: Windows, profiled: Sequence["Profiled"], lines: Mapping[str, fabric.Line]) -> fabric.WhatIf | None:
    """This engine if each all-reduce of a plain step took NVLINK_US: what they take now is the transfer in its trace.

    A verify step's messages take longer by what the first of `lines` says. None where the timed engine was not traced on several
    ranks, or reduces that fast already.
    """
    plain = next((p for p in profiled if p.engine.baseline and p.traces), None)
    draft = next((p for p in profiled if p.engine.draft and p.points), None)
    if plain is None or draft is None:
        return None
    mine = next((comparison for profiles, comparison in found if str(profiles[0].path) in plain.traces[0].files), None)
    if mine is None or len(mine.ranks) < 2 or not mine.instances:
        return None
    at, now = (plain.traces[0].batch, plain.traces[0].context), float(mine.transfer_us.mean())
    points = [one.at(*at) for one in (plain, draft)]
    if None in points or now <= NVLINK_US:
        return None
    line, depth = next(iter(lines.values()), None), draft.engine.depth
    longer = 1.0
    if line is not None and line.us(line.points[0][0]) > 0:
        size = line.points[0][0] * at[0]  # the first point is one token
        longer = max(1.0, line.us(size * (depth + 1)) / line.us(size))
    count = round(mine.instances / (mine.steps or plain.traces[0].steps))
    ms = [figures.mean([1000 * s for s in point.seconds], unit="ms", source="steps") for point in points]
    return fabric.faster_fabric(ms[0], ms[1], [fabric.Traffic(count=count, old_us=now, new_us=NVLINK_US)],
                                [fabric.Traffic(count=count, old_us=now * longer, new_us=NVLINK_US * longer)])  # fmt: skip


def what_if_rows(here: fabric.WhatIf | None, length: Figure) -> pd.DataFrame:
    """A faster fabric, for this engine where it can be told, and for the story's: r rises, so speculation buys less."""
    told = Figure(value=story.LENGTH, unit="tokens", kind="published", source=story.SOURCE)
    rows = []
    for where, then, tokens in (("here", here, length), ("the story", story.faster(NVLINK_US), told)):
        if then is not None:
            now, later = (speedup.predicted_speedup(tokens, r) for r in (then.r_now, then.r_then))
            rows.append({"engine": where, "plain step then, ms": then.plain_ms.value, "r now": then.r_now.value,
                         "r then": then.r_then.value, "length": tokens.value, "speedup now": now.value,
                         "speedup then": later.value, "kind": "modelled"})  # fmt: skip
    return pd.DataFrame(rows)


def numbers(
    alone: "Measured", lines: Mapping[str, fabric.Line], found: Windows, here: Mapping[str, Figure | None],
    ratios: Mapping[tuple[int, int, int], Figure], refused: Sequence[str],
) -> dict[str, Any]:  # fmt: skip
    """What result.json keeps of the measurements."""
    return {
        "collectives": [{"way": t.way, "bytes": t.size, "least_us": 1e6 * t.minimum, "median_us": 1e6 * t.median,
                         "p95_us": 1e6 * t.p95} for t in alone.timings],
        "lines": {way: asdict(line) for way, line in lines.items()}, "links": alone.links, "not_timed": alone.missing,
        "traced": [{"rank": p.rank, "steps": p.steps, "wall_ms": p.wall_ms, "idle_ms": p.idle_ms,
                    "buckets": {bucket: asdict(time) for bucket, time in p.buckets.items()}, "remark": comparison.remark or None}
                   for profiles, comparison in found for p in profiles],
        "all_reduce_share": {name: one and asdict(one) for name, one in here.items()},
        "ratios": [{"concurrency": b, "context": c, "draft_tokens": k, "r": asdict(r)} for (b, c, k), r in ratios.items()],
        "refused": list(refused),
    }  # fmt: skip
