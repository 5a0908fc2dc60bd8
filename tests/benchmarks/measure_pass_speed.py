"""Tokens a second with the draft, without, and with n-gram lookup, at several concurrencies; one engine each, started together.

    PYTHONPATH=. python tests/benchmarks/measure_pass_speed.py --out DIR --run outputs/RUN

RUN has been through 07_checkpoint. Its held-out prompts are answered greedily in waves, the whole of a wave at once; a wave ends
with its slowest answer. Intervals: 95 %, by bootstrap over waves, and rough where these are few. length: tokens a step,
(new tokens - answers) / (new tokens - answers - accepted), since an answer's first token comes with its prompt and each later
step adds one of the target's own to what it accepted; steps without a draft, as n-grams have where nothing matches, count. a
draft: over drafts alone, as vLLM counts. implied r: length / speedup, what a step then cost in plain steps, all around it
included. Prints after each concurrency; DIR/summary.* keeps all.
"""

import argparse
import random
from pathlib import Path

import engines
from measure_decode import Summary, numbers

from eagle3kit import cpu, machine, served, target
from eagle3kit.conversations import read_samples

ENOUGH = {1: 16, 16: 96, 64: 192}  # prompts asked at a concurrency; of others, three waves


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--run", type=Path, required=True, help="the folder of a run of the kit")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="the run's target: a bundled name or a folder")
    parser.add_argument("--draft", type=Path, help="a draft to serve; default: the run's")
    parser.add_argument("--draft-tokens", type=int, default=3)
    parser.add_argument("--in-flight", type=numbers, default=[1, 16, 64])
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--max-length", type=int, default=2048)
    parser.add_argument("--only", default="plain,draft,n-gram")
    parser.add_argument("--cache", type=int, default=8, help="GiB for keys and values of each engine on a GPU")
    parser.add_argument("--memory", type=float, default=0.2 if cpu.is_cpu() else 0.03)
    parser.add_argument("--dtype", default="float32" if cpu.is_cpu() else "bfloat16")
    parser.add_argument("--eager", action="store_true", default=cpu.is_cpu())
    parser.add_argument("--lock", type=Path, help="a file that is locked while this measures")
    parser.add_argument("--start-timeout", type=float, default=300)
    options = parser.parse_args()
    options.out, options.model = options.out.absolute(), target.locate(options.model)
    summary = Summary(options.out)
    most = max(max(ENOUGH.get(size, 3 * size) for size in options.in_flight), 1)
    prompts = served.prompts(read_samples(options.run / "02_dataset" / "held_out.parquet"), most)
    prompts = [p.token_ids for p in prompts if len(p.token_ids) + options.max_new_tokens < options.max_length - 8]
    summary.data |= {"versions": machine.versions(), "options": vars(options), "prompts": len(prompts)}
    summary.add("machine", gpus=[gpu["name"] for gpu in machine.gpus()], cores=len(cpu.cores()), **machine.versions())
    depth = {"num_speculative_tokens": options.draft_tokens}
    folder = (options.draft or options.run / "07_checkpoint" / "draft").absolute()
    ways = {"plain": None, "draft": {"method": "eagle3", "model": str(folder), **depth},
            "n-gram": {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4, **depth}}  # fmt: skip
    common = {"model": str(options.model), "dtype": options.dtype, "max_model_len": options.max_length,
              "max_num_seqs": max(options.in_flight), "gpu_memory_utilization": options.memory, "enable_prefix_caching": False,
              "enforce_eager": options.eager, "disable_log_stats": False}  # fmt: skip
    if not cpu.is_cpu():
        common["kv_cache_memory_bytes"] = options.cache << 30  # engines that start together cannot tell each other's memory
    environment = cpu.vllm_environment(threads=None, kv_cache_gib=1) if cpu.is_cpu() else {}
    settings = {way: common | ({"speculative_config": how} if how else {}) for way, how in ways.items()}
    running = {way: engines.Engine(way, settings[way], options.out, environment) for way in options.only.split(",")}
    try:
        engines.ready(running, options.start_timeout, summary.add)
        with engines.alone(options.lock):
            for size in options.in_flight:
                measure(summary, running, prompts, size, options.max_new_tokens)
    finally:
        engines.stop(list(running.values()))
    print(f"\n{(options.out / 'summary.md').read_text()}")


def measure(summary: Summary, running: dict, prompts: list[list[int]], size: int, most: int) -> None:
    """All ways at one concurrency."""
    asked = prompts[: ENOUGH.get(size, 3 * size)]
    asked = asked[: max(size, len(asked) // size * size)]  # whole waves
    found = {}
    for way, engine in list(running.items()):
        warm = engine.ask({"job": "decode", "prompts": asked[:size], "max_tokens": 16, "in_flight": size})
        got = warm if "failed" in warm else engine.ask({"job": "decode", "prompts": asked, "max_tokens": most, "in_flight": size})
        if "failed" in got:
            summary.add(f"{way}, {size} at once", **got)
            running.pop(way).stop()
        else:
            found[way] = got["waves"]
    summary.data.setdefault("waves", {})[size] = found
    for way, waves in found.items():
        columns = {"tokens_per_second": spread(speed, waves), "prompts": len(asked), "waves": len(waves),
                   "new_tokens": sum(wave[1] for wave in waves)}  # fmt: skip
        if way != "plain" and sum(wave[2][0] for wave in waves):
            drafts = sum(wave[2][0] for wave in waves)
            positions = [sum(wave[2][1 + k] for wave in waves if len(wave[2]) > 1 + k) / drafts
                         for k in range(max(len(wave[2]) for wave in waves) - 1)]  # fmt: skip
            of = [(*wave, len(asked) / len(waves)) for wave in waves]
            columns |= {"length": spread(length, of), "a_draft": f"{1 + sum(positions):.3f}", "drafts": drafts,
                        "accepted": [f"{share:.3f}" for share in positions]}  # fmt: skip
        if way != "plain" and "plain" in found:
            pairs = list(zip(waves, found["plain"], strict=True))
            columns["speedup"] = spread(lambda of: speed([one for one, _ in of]) / speed([other for _, other in of]), pairs)
            if "length" in columns:
                columns["implied_r"] = f"{length(of) * speed(found['plain']) / speed(waves):.2f}"
        summary.add(f"{way}, {size} at once", **columns)


def speed(waves: list) -> float:
    return sum(wave[1] for wave in waves) / sum(wave[0] for wave in waves)


def length(waves: list) -> float:
    """Tokens a step of waves (seconds, new tokens, counts, answers)."""
    later, accepted = sum(wave[1] - wave[3] for wave in waves), sum(sum(wave[2][1:]) for wave in waves)
    return later / max(1, later - accepted)


def spread(of, waves: list) -> str:
    """The figure with its interval over waves, where there are at least three."""
    value = of(waves)
    shown = f"{value:,.0f}" if value > 100 else f"{value:.3f}"
    if len(waves) < 3:
        return f"{shown} (of {len(waves)} waves)"
    draw = random.Random(0)
    drawn = sorted(of(draw.choices(waves, k=len(waves))) for _ in range(1000))
    low, high = drawn[25], drawn[974]
    return f"{shown} ({low:,.0f} to {high:,.0f})" if value > 100 else f"{shown} ({low:.3f} to {high:.3f})"


if __name__ == "__main__":
    main()
