"""The all-reduce alone and decode steps of vLLM with and without speculation, on whatever this machine has; no weights needed.

    PYTHONPATH=. python tests/benchmarks/measure_decode.py --out DIR [--only collective,llama-3.1-8b,kimi-k2.5,FOLDER/config.json]

Prints what it has after every engine, and writes DIR/summary.json and DIR/summary.md anew each time, so that an end before the
end loses nothing. Two GPUs: the A/B of vLLM's own all-reduce against NCCL. One: step times and r, no all-reduce. On a CPU it
runs too, on smaller cuts of the same geometries (--layers).
"""

import argparse
import dataclasses
import json
import time
from pathlib import Path

from eagle3kit import (
    collective,
    cpu,
    decode_plan,
    decode_profile,
    decode_rows,
    decode_shares,
    dummy_target,
    fabric,
    machine,
    speedup,
)
from eagle3kit.errors import KitError
from eagle3kit.params import Params

SIZES = [1024, 4096, 14_336, 65_536, 172_032, 458_752, 2**20, 2**22]
CUT = {"kimi-k2.5": (6, 128)}  # layers and experts kept: what two GPUs of 140 GB hold


class Summary:
    """What has been found so far, in one table and one JSON file."""

    def __init__(self, out: Path):
        self.out, self.rows, self.data, self.started = out, [], {}, time.monotonic()
        out.mkdir(parents=True, exist_ok=True)

    def add(self, what: str, /, **columns) -> None:
        self.rows.append({"what": what} | columns)
        said = ", ".join(f"{name} {value}" for name, value in columns.items())
        print(f"[{time.monotonic() - self.started:5.0f} s] {what}: {said}", flush=True)
        self.write()

    def write(self) -> None:
        lines = [f"| {row['what']} | " + ", ".join(f"{k} {v}" for k, v in row.items() if k != "what") + " |" for row in self.rows]
        (self.out / "summary.md").write_text("\n".join(["| what | figures |", "|---|---|", *lines]) + "\n", encoding="utf-8")
        data = json.dumps(self.data | {"rows": self.rows}, indent=1, default=str)
        (self.out / "summary.json").write_text(data, encoding="utf-8")


def reduce_alone(summary: Summary, ranks: int, dtype: str, repeats: int) -> None:
    """Every size, every way."""
    device = "cpu" if cpu.is_cpu() else "cuda"
    try:
        found = collective.measure(collective.Request(sizes=SIZES, ranks=ranks, device=device, dtype=dtype, repeats=repeats),
                                   summary.out / "collective", timeout_s=240)  # fmt: skip
    except KitError as error:
        return summary.add("all-reduce alone", failed=error)
    summary.data["links"] = found.links
    for way in found.ways:
        timings = found.of(way)
        summary.data.setdefault("collective", {})[way] = [[t.size, t.minimum, t.median, t.p95] for t in timings]
        summary.add(f"{way}, {ranks} ranks, median µs", **{f"{t.size:,} B:": f"{1e6 * t.median:.1f}" for t in timings})
        if len(timings) > 1:
            line = fabric.fit([(t.size, 1e6 * t.median) for t in timings])
            summary.add(f"{way}, line", latency=f"{line.alpha_us:.1f} µs",
                        bandwidth=f"{line.gb_per_second:.1f} GB/s" if line.gb_per_second else "none seen",
                        worst_residual=f"{max(map(abs, line.residuals_us)):.1f} µs")  # fmt: skip
    for way, why in found.missing.items():
        summary.add(f"{way}: not timed", because=why)


def engines(options: argparse.Namespace, name: str, out: Path) -> list[decode_profile.Engine]:
    """The plain engine (traced too), the same by NCCL only, one with an untrained draft for each K, the plain one alone, and of a
    cut geometry the plain and the drafting ones again with fewer layers."""
    layers, experts = CUT.get(name, (None, None))
    layers, experts = options.layers or layers, options.experts or experts
    plan = group(options, dummy_target.config(name, layers=layers, experts=experts), out)
    if options.ranks > 1:
        plan.insert(1, dataclasses.replace(plan[0], name="plain, NCCL only", traced=plan[0].traced[:1], custom_allreduce=False))
    if options.ranks > 1 and options.single:
        plan.append(dataclasses.replace(plan[0], name="plain, one rank", traced=[], tensor_parallel=1))
    if options.fewer:
        less = group(options, dummy_target.config(name, layers=options.fewer, experts=experts), out / "fewer")
        plan += [dataclasses.replace(one, name=f"{one.name}, {options.fewer} layers", traced=[], group="fewer") for one in less]
    return plan


def group(options: argparse.Namespace, found: dict, out: Path) -> list[decode_profile.Engine]:
    """The plain engine and the drafting ones of one config."""
    model = dummy_target.write(out / "target", found)
    shape = dummy_target.geometry(found)
    points = [(batch, context) for context in options.contexts for batch in options.batches]
    usual = {"model": str(model), "dtype": options.dtype, "steps": options.steps, "tensor_parallel": options.ranks,
             "enforce_eager": options.eager, "gpu_memory_utilization": options.memory, "points": points}  # fmt: skip
    plan = [decode_profile.Engine(name="plain", traced=[points[0], points[-1]], **usual)]
    for depth in options.draft_tokens:
        ids = dummy_target.layer_ids(shape.layers)
        draft = dummy_target.untrained_draft(out / f"draft-{depth}", model, Params().training, layer_ids=ids,
                                             draft_vocab_size=min(32_000, shape.vocab_size), draft_tokens=depth)  # fmt: skip
        plan.append(decode_profile.Engine(name=f"{depth} draft tokens", draft=str(draft), draft_tokens=depth,
                                          synthetic_length=(depth + 2) / 2, **usual))  # fmt: skip
    return plan


def profile(summary: Summary, options: argparse.Namespace, name: str) -> None:
    """One geometry: every engine, then r, the A/B, and what the traces say."""
    out = summary.out / name.strip("/").replace("/", "-")
    done: list[decode_profile.Profiled] = []
    for engine in engines(options, name, out):
        try:
            done += decode_profile.measure([engine], out, timeout_s=options.timeout)
        except KitError as error:
            summary.add(f"{name}, {engine.name}", failed=str(error).splitlines()[0])
            continue
        last = done[-1]
        summary.data.setdefault(name, {})[engine.name] = dataclasses.asdict(last)
        for row in decode_plan.step_rows([last], resamples=2000, seed=0):
            ms = [1000 * s for s in last.at(row["batch"], row["context"]).seconds]
            where = f"{engine.tensor_parallel} ranks, {row['batch']} at once, context {row['context']}"
            summary.add(f"{name}, {engine.name}, {where}",
                        step=f"{row['ms']:.3f} ms ({row['low']:.3f} to {row['high']:.3f}, median {sorted(ms)[len(ms) // 2]:.3f})",
                        tokens_a_step=f"{row['tokens_per_step']:.2f}")  # fmt: skip
        if last.missing:
            summary.add(f"{name}, {engine.name}", missing=last.missing)
        try:
            traced(summary, name, last)
        except Exception as error:  # what was timed is worth more than how its traces are told
            summary.add(f"{name}, {engine.name}, traces", failed=repr(error))
    ratios, refused = decode_plan.ratios(done, resamples=2000, seed=0)
    for (batch, context, depth), r in ratios.items():
        summary.add(f"{name}, r with {depth} draft tokens, {batch} at once, context {context}",
                    r=f"{r.value:.3f} ({r.low:.3f} to {r.high:.3f})",
                    needed_rate=f"{speedup.needed_rate(r, depth).value:.3f}")  # fmt: skip
    for reason in refused:
        summary.add(f"{name}, r refused", because=reason)
    found = json.loads((out / "target" / "config.json").read_text())
    shape, layers = dummy_target.geometry(found), dummy_target.geometry(dummy_target.config(name)).layers
    if options.fewer:
        subject = decode_plan.Subject(out / "target", found, name, options.dtype, layers, options.fewer)
        told, refused = decode_plan.whole_ratios(done, subject, resamples=2000, seed=0)
        for (batch, context, depth), r in told.items():
            where = f"with {depth} draft tokens, {batch} at once, context {context}"
            summary.add(f"{name}, r of all {layers} layers (modelled) {where}", r=f"{r.value:.3f} ({r.low:.3f} to {r.high:.3f})",
                        of=r.source)  # fmt: skip
        for reason in refused:
            summary.add(f"{name}, r of all {layers} layers refused", because=reason)
    count = fabric.all_reduces_per_step(shape.layers)
    switched = decode_shares.saving(done, count)
    if switched:
        summary.add(f"{name}, A/B of vLLM's own all-reduce against NCCL", saved=f"{switched.saved_ms:.3f} ms a step",
                    share=f"{100 * switched.share.value:.1f} %", each=f"{switched.saved_us_each:.2f} µs")  # fmt: skip


def traced(summary: Summary, name: str, one: decode_profile.Profiled) -> None:
    """Buckets of every rank, and the all-reduce in its readings."""
    windows = []
    for trace in one.traces:
        try:
            windows += [(trace, *found) for found in decode_rows.windows([dataclasses.replace(one, traces=[trace])])]
        except KitError as error:
            summary.add(f"{name}, {one.engine.name}, traces", failed=error)
    for trace, profiles, comparison in windows:
        where = f"{name}, {one.engine.name}, traced at {trace.batch} at once, context {trace.context}"
        if comparison.remark:
            summary.add(where, remark=comparison.remark)
        for place, p in enumerate(profiles):
            parts = {bucket: f"{100 * part.exposed_ms / p.wall_ms:.1f} %" for bucket, part in p.buckets.items() if part.count}
            summary.add(f"{where}, rank {place if p.rank is None else p.rank}",
                        step=f"{p.step_ms or p.wall_ms / trace.steps:.3f} ms", **parts,
                        idle=f"{100 * p.idle_ms / p.wall_ms:.1f} %", all_reduces=len(p.all_reduce_us),
                        of_busy=f"{100 * p.all_reduce_ms / p.busy_ms:.1f} %",
                        unknown_kernels=[k.name[:60] for k in p.unknown[:4]])  # fmt: skip
        if comparison.instances:
            three = decode_shares.readings([(profiles, comparison)], None)
            summary.add(f"{where}, all-reduce share", **{k: f"{100 * v.value:.1f} %" for k, v in three.items() if v},
                        transfer=f"{1000 * (comparison.transfer_ms or 0) / comparison.instances:.2f} µs each",
                        waiting=f"{1000 * (comparison.waiting_ms or 0) / comparison.instances:.2f} µs each")  # fmt: skip


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the summary, logs and traces")
    parser.add_argument("--only", default="collective,llama-3.1-8b,kimi-k2.5",
                        help="parts to run, in this order: collective, bundled geometries, config.json files")  # fmt: skip
    parser.add_argument("--ranks", type=int, default=0, help="ranks; 0: two if there are two GPUs (or cores), else one")
    parser.add_argument("--batches", type=numbers, default=[1, 16, 64])
    parser.add_argument("--contexts", type=numbers, default=[64])
    parser.add_argument("--draft-tokens", type=numbers, default=[3])
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=100, help="all-reduces timed of each size")
    parser.add_argument("--layers", type=int, help="layers kept of every geometry")
    parser.add_argument("--fewer", type=int, help="layers of a second cut, at least 3: r of the whole geometry follows from both")
    parser.add_argument("--experts", type=int, help="experts kept")
    parser.add_argument("--dtype", default="float32" if cpu.is_cpu() else "bfloat16")
    parser.add_argument("--eager", action="store_true", default=cpu.is_cpu(), help="no CUDA graphs: starts sooner, slower steps")
    parser.add_argument("--memory", type=float, default=0.2 if cpu.is_cpu() else 0.85, help="vLLM's gpu_memory_utilization")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one engine")
    parser.add_argument("--single", action="store_true", help="the plain engine on one rank too")
    options = parser.parse_args()
    if not options.ranks:
        options.ranks = min(2, len(cpu.cores()) if cpu.is_cpu() else len(machine.gpus()))
    summary = Summary(options.out)
    found = machine.inventory(options.out)
    summary.data |= {"machine": found, "versions": machine.versions(), "options": vars(options)}
    summary.add("machine", cores=found["cores"], gpus=[gpu["name"] for gpu in found["gpus"]], **machine.versions())
    for part in options.only.split(","):
        if part == "collective":
            if options.ranks > 1:
                reduce_alone(summary, options.ranks, options.dtype, options.repeats)
            else:
                summary.add("all-reduce alone", skipped="one rank has none")
        else:
            try:
                profile(summary, options, part)
            except KitError as error:
                summary.add(part, failed=error)
    print(f"\n{(options.out / 'summary.md').read_text()}")


if __name__ == "__main__":
    main()
