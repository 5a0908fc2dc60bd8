"""The tables of notebook 01, as rows ready to be shown: every number with what it is (measured, published, modelled)."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from eagle3kit import fabric, machine, rates, speedup, traces
from eagle3kit.figures import Figure
from eagle3kit.verdict import Cost
from eagle3kit.words import three

if TYPE_CHECKING:
    from eagle3kit.collective import Measured
    from eagle3kit.decode_plan import Subject
    from eagle3kit.decode_profile import Profiled
    from eagle3kit.params import Params
    from eagle3kit.verdict import Verdict

Windows = list[tuple[list[traces.RankProfile], traces.Comparison]]


def frame(rows: Sequence[Mapping[str, Any]], why: str = "not asked for") -> pd.DataFrame:
    """`rows` as a table; where there are none, one row that says so and why."""
    return pd.DataFrame(rows or [{"not measured": why}])


def geometry(subject: "Subject", messages: Mapping[int, int]) -> pd.DataFrame:
    """What is profiled, and what its all-reduces send."""
    shape = subject.geometry
    rows = {"profiled": subject.name, "number type": subject.dtype, "layers": shape.layers, "width": shape.hidden_size,
            "attention heads": shape.attention_heads, "vocabulary": f"{shape.vocab_size:,}",
            "experts": f"{shape.experts}, {shape.experts_per_token} a token" if shape.experts else "none: dense",
            "all-reduces a step, if spread over ranks": fabric.all_reduces_per_step(shape.layers)}  # fmt: skip
    rows |= {f"message of {tokens:,} token{'s' if tokens > 1 else ''}": f"{size:,} bytes" for tokens, size in messages.items()}
    return pd.DataFrame(rows.items(), columns=["what", "value"]).astype(str)


def collectives(alone: "Measured", lines: Mapping[str, fabric.Line]) -> pd.DataFrame:
    """A row a way and size, at the slowest rank and, last, the latency + bandwidth line and what is left beside it."""
    rows = [{"way": t.way, "bytes": t.size, "least": 1e6 * t.minimum, "median": 1e6 * t.median,
             "95 % within": 1e6 * t.p95, "quickest rank": 1e6 * t.quickest,
             "line": lines[t.way].us(t.size) if t.way in lines else None,
             "residual": 1e6 * t.median - lines[t.way].us(t.size) if t.way in lines else None}
            for t in alone.timings]  # fmt: skip
    return frame(rows, "; ".join(f"{way}: {why}" for way, why in alone.missing.items()) or "nothing was timed")


def collective_words(ranks: int) -> str:
    """What the table of all-reduces holds."""
    return (f"One all-reduce between {ranks} ranks, µs, measured at the slowest of them; line and residual: modelled" if ranks
            else "No all-reduce was timed")  # fmt: skip


def links(alone: "Measured", lines: Mapping[str, fabric.Line]) -> pd.DataFrame:
    """The lines in numbers, what joins the ranks, and what could not be timed."""
    rows = {f"{way}: latency": f"{line.alpha_us:.1f} µs" if line.alpha_us > 0 else "hidden by noise"
            for way, line in lines.items()}  # fmt: skip
    untold = "not told: the line misses the points by as much as it grows"
    rows |= {f"{way}: bandwidth": f"{line.gb_per_second:.2f} GB/s" if line.gb_per_second else untold
             for way, line in lines.items()}  # fmt: skip
    rows |= {f"{way}: largest residual": f"{max(map(abs, line.residuals_us)):.1f} µs" for way, line in lines.items()}
    rows |= _joined(alone.links)
    rows |= alone.links.get("settings", {})
    rows |= {f"not timed: {way}": why for way, why in alone.missing.items()}
    return frame([{"what": what, "value": value} for what, value in rows.items()])


def _joined(links: Mapping[str, Any]) -> dict[str, str]:
    """What joins the ranks, but for the settings, in words."""
    rows = {name: str(value) for name, value in links.items() if name not in ("settings", "gpus", "peer_access")}
    if "gpus" in links:
        rows["GPUs"] = ", ".join(f"{count} × {name}" for name, count in Counter(links["gpus"]).items())
    if "peer_access" in links:
        reached = links["peer_access"]
        apart = [f"{one} to {other}" for one, row in enumerate(reached) for other, reaches in enumerate(row) if not reaches]
        rows["peer access"] = f"not from GPU {', '.join(apart)}" if apart else "from every GPU to every other"
    return rows


def engines(profiled: Sequence["Profiled"]) -> pd.DataFrame:
    """What each engine is, and what it gave, or why it did not."""
    rows = [{"engine": p.engine.name, "ranks": p.engine.tensor_parallel, "its steps": _kind(p), "start, s": p.start_seconds,
             "timed at": len(p.points), "traced at": len(p.traces)} | ({"not measured": p.missing} if p.missing else {})
            for p in profiled]  # fmt: skip
    return frame(rows)


def _kind(one: "Profiled") -> str:
    """What its steps are; of an untrained draft how many of its tokens were taken, really or as vLLM was told to pretend."""
    if one.engine.stands_for:
        return f"plain, {one.engine.stands_for + 1} times as many sequences for a verify step"
    if not one.engine.draft:
        return "plain"
    kept = sum(point.tokens_per_step for point in one.points) / len(one.points) if one.points else 1.0
    return f"untrained draft, {three(kept)} tokens a step" + (", as vLLM was told to pretend" if one.pretended else "")


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


def ratio_rows(ratios: Mapping[tuple[int, int, int], Figure], refused: Sequence[str]) -> pd.DataFrame:
    """r, which is the length that breaks even, and the mean acceptance rate that it asks for."""
    rows = [{"at once": b, "context": c, "draft tokens": k, "r = break-even length": r.value, "from": r.low, "to": r.high,
             "rate needed": speedup.needed_rate(r, k).value, "steps": r.n, "kind": r.kind}
            for (b, c, k), r in ratios.items()]  # fmt: skip
    return frame(rows + [{"refused": reason} for reason in refused])


def whole_rows(ratios: Mapping[tuple[int, int, int], Figure], refused: Sequence[str], subject: "Subject") -> pd.DataFrame:
    """r of the whole of a cut geometry, or why there is none."""
    rows = [{"at once": b, "context": c, "draft tokens": k, "r of the whole": r.value, "from": r.low, "to": r.high,
             "kind": r.kind} for (b, c, k), r in ratios.items()]  # fmt: skip
    kept = subject.geometry.layers
    why = "nothing was cut: r above is of the whole" if kept == subject.layers else \
        f"one cut of {kept} layers tells nothing of {subject.layers}: keep more than 3 (profile.geometry_layers)"  # fmt: skip
    return frame(rows + [{"refused": reason} for reason in refused], why)


def told(subject: "Subject", whole: Mapping[tuple[int, int, int], Figure], sentence: str) -> str:
    """The verdict's sentence with what it is of, where that is not the run's own target as it stands."""
    kept = subject.geometry.layers
    if kept == subject.layers or sentence.startswith("No verdict"):
        return sentence if "geometry only" not in subject.name else f"{subject.name}. {sentence}"
    if whole:
        return f"{subject.name}, r of all {subject.layers} layers from two cuts. {sentence}"
    return (f"{subject.name}: NOT OF THE WHOLE, for against {kept} layers the draft weighs more than against {subject.layers}, "
            f"so r is too high. {sentence}")  # fmt: skip


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


def cost(planned: Mapping[str, Any]) -> Cost:
    """What a draft costs by the plan in the numbers of `00_machine`: hours there, told by the least sure of them, and disk."""
    hours = planned["hours"]
    kinds = {row["how"] for row in hours}
    timed = "rates timed there for some seconds"
    how = ("the best rates that its arithmetic allows" if "modelled" in kinds else timed if kinds == {"measured on the spot"}
           else f"measured rates and {timed}" if "measured on the spot" in kinds else "measured rates")  # fmt: skip
    return Cost(gpu_hours=sum(row["hours"] for row in hours), disk_gib=planned["needed_gib"],
                hours_of="GPU" if planned["inventory"]["gpus"] else "machine",
                source=f"00_machine's plan of making states and training: the most tokens there can be, at {how}")  # fmt: skip


def geometry_cost(params: "Params", subject: "Subject", folder: Path) -> Cost:
    """What a draft for a named geometry, the whole of it, would cost: `00_machine`'s formulas with this machine's arithmetic, for
    the conversations that `params` ask for."""
    shape, states = replace(subject.geometry, layers=subject.layers), 4
    size, recipe = min(params.vocabulary.size, shape.vocab_size), params.training
    plan = machine.plan(samples=params.dataset.samples, max_length=params.dataset.max_length, states=states,
                        hidden_size=shape.hidden_size, vocab_size=shape.vocab_size, draft_vocab_size=size,
                        dtype=params.target.dtype, folder=folder)  # fmt: skip
    weights, draft_weights = rates.weights_met(shape, size, recipe.draft_layers, states)
    best = rates.at_best(rates.arithmetic(shape.hidden_size, subject.dtype), weights=weights, draft_weights=draft_weights,
                         draft_steps=recipe.draft_steps)  # fmt: skip
    hours = sum(row.hours for row in rates.hours(best, tokens=plan.tokens, epochs=recipe.epochs))
    return Cost(gpu_hours=hours, disk_gib=plan.needed_gib, hours_of="GPU" if machine.gpus() else "machine",
                source=f"modelled, for {params.dataset.samples:,} conversations of {params.dataset.max_length:,} tokens; hours "
                       "at least, answers not included; disk at most")  # fmt: skip


def numbers(
    alone: "Measured", lines: Mapping[str, fabric.Line], found: Windows, here: Mapping[str, Figure | None],
    ratios: Mapping[tuple[int, int, int], Figure], refused: Sequence[str], whole: Mapping[tuple[int, int, int], Figure],
) -> dict[str, Any]:  # fmt: skip
    """What result.json keeps of the measurements."""
    return {
        "collectives": [{"way": t.way, "bytes": t.size, "least_us": 1e6 * t.minimum, "median_us": 1e6 * t.median,
                         "p95_us": 1e6 * t.p95, "quickest_us": 1e6 * t.quickest} for t in alone.timings],
        "lines": {way: asdict(line) for way, line in lines.items()}, "links": alone.links, "not_timed": alone.missing,
        "traced": [{"rank": p.rank, "steps": p.steps, "wall_ms": p.wall_ms, "idle_ms": p.idle_ms,
                    "buckets": {bucket: asdict(time) for bucket, time in p.buckets.items()}, "remark": comparison.remark or None}
                   for profiles, comparison in found for p in profiles],
        "all_reduce_share": {name: one and asdict(one) for name, one in here.items()},
        "ratios": [{"concurrency": b, "context": c, "draft_tokens": k, "r": asdict(r)} for (b, c, k), r in ratios.items()],
        "refused": list(refused),
        "whole": [{"concurrency": b, "context": c, "draft_tokens": k, "r": asdict(r)} for (b, c, k), r in whole.items()],
    }  # fmt: skip
