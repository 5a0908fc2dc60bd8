"""Hidden states against plain prefill: the same prompts, the same settings, prefix caching off everywhere, one engine each.

    PYTHONPATH=. python tests/benchmarks/measure_extraction.py --out DIR [--model FOLDER] [--only plain,batched,memory]
    … --geometry llama-3.1-8b --ranks 2: a shape with random weights, over two GPUs

plain: prefill and no more. vllm: vLLM's own connector. batched: this kit's, its files on the disk of DIR. memory: this kit's, its
files in memory, as 03_hidden_states has them where they fit. nowhere: the states are computed and kept in the cache, but handed
to nobody: what any connector could reach at most. memory+block_size=128+writers=2: a way with something changed, vLLM's block
size or the number of processes that write; of_plain is of the fastest plain one.

Engines start together and are asked in turn, so that a slow minute of the machine hits all of them. Seconds run until the last
file is whole. Prints after each round; DIR/summary.* keeps all, with an account of where time went: its columns are those of
`BatchedHiddenStatesConnector.account` and `engines.Account`. With several ranks leave out vllm below 0.26: its connector waits
for ever.

The cache of every engine (--cache) must hold several steps (--batched-tokens), for the blocks of a step are free two steps after
those of plain prefill; a row of each engine says how many tokens fit.
"""

import argparse
import random
import re
import signal
import sys
from contextlib import ExitStack
from pathlib import Path

import engines
from measure_decode import Summary

from eagle3kit import arriving, cpu, dummy_target, hidden_states, machine, target


def lengths(count: int, mean: int, longest: int, seed: int) -> list[int]:
    """Lengths as those of chats: log-normal (sigma 0.6), cut at `longest`."""
    draw = random.Random(seed)
    return [max(8, min(longest, round(draw.lognormvariate(0, 0.6) * mean / 1.197))) for _ in range(count)]


def kind(named: str) -> str:
    """The way, whatever is changed in it: memory+writers=2 is memory."""
    return named.split("+")[0]


def settings(options: argparse.Namespace, named: str, ids: list[int], layers: int) -> dict:
    """What LLM() is called with."""
    way, changes = kind(named), named.split("+")[1:]
    changed = {name: int(value) for name, value in (change.split("=") for change in changes)}
    if set(changed) - {"block_size", "writers"}:
        raise SystemExit(f"--only {named}: block_size and writers can be changed")
    common = {
        "model": str(options.model), "dtype": options.dtype, "max_model_len": options.longest + 1, "max_num_seqs": options.seqs,
        "max_num_batched_tokens": options.batched_tokens, "enable_prefix_caching": False, "enforce_eager": options.eager,
        "gpu_memory_utilization": options.memory, "disable_log_stats": True, "tensor_parallel_size": options.ranks,
        "worker_extension_cls": "engines.Account",
    }  # fmt: skip
    if options.geometry:
        common |= {"load_format": "dummy", "skip_tokenizer_init": True}
    if not cpu.is_cpu():
        common["kv_cache_memory_bytes"] = options.cache << 30  # engines that start together cannot tell each other's memory
        if not options.eager:
            common["compilation_config"] = {"cudagraph_mode": "NONE"}  # graphs are for steps of few tokens; there are none
    if "block_size" in changed:
        common["block_size"] = changed["block_size"]
    if way == "plain":
        return common
    connector = "batched" if way in ("batched", "memory") else "vllm"
    folder = options.in_memory / named if way == "memory" else options.out / f"arriving-{named}"
    asked = hidden_states.server_options(ids, layers, folder, connector)
    if "writers" in changed:
        asked["kv_transfer"]["kv_connector_extra_config"]["writers"] = changed["writers"]
    common["speculative_config"] = asked["speculative"]
    return common if way == "nowhere" else common | {"kv_transfer_config": asked["kv_transfer"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="a bundled name or a folder")
    parser.add_argument("--geometry", help="instead: a config.json or llama-3.1-8b, with random weights that nobody downloads")
    parser.add_argument("--layers", type=int, help="layers kept of the geometry")
    parser.add_argument("--only", default="plain,vllm,batched,memory,nowhere")
    parser.add_argument("--memory-folder", type=Path, default=arriving.MEMORY, help="a file system in memory")
    parser.add_argument("--prompts", type=int, default=2244)
    parser.add_argument("--mean", type=int, default=345, help="tokens of a prompt")
    parser.add_argument("--longest", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seqs", type=int, default=512)
    parser.add_argument("--batched-tokens", type=int, default=16384)
    parser.add_argument("--cache", type=int, default=20, help="GiB for keys, values and states of each engine on a GPU")
    parser.add_argument("--memory", type=float, default=0.2 if cpu.is_cpu() else 0.03)
    parser.add_argument("--dtype", default="float32" if cpu.is_cpu() else "bfloat16")
    parser.add_argument("--eager", action="store_true", default=cpu.is_cpu())
    parser.add_argument("--ranks", type=int, default=1, help="tensor parallel")
    parser.add_argument("--lock", type=Path, help="a file that is locked while this measures")
    parser.add_argument("--start-timeout", type=float, default=300)
    options = parser.parse_args()
    options.out = options.out.absolute()
    summary = Summary(options.out)
    if options.geometry:
        found = dummy_target.config(options.geometry, layers=options.layers)
        options.model, shape = dummy_target.write(options.out / "target", found), dummy_target.geometry(found)
    else:
        options.model = target.locate(options.model)
        shape = target.geometry(options.model)
    ids = hidden_states.layer_ids(None, shape.layers)
    sizes = lengths(options.prompts, options.mean, options.longest, 0)
    summary.data |= {"versions": machine.versions(), "options": vars(options), "tokens": sum(sizes)}
    summary.add("machine", gpus=[gpu["name"] for gpu in machine.gpus()], cores=len(cpu.cores()), **machine.versions())
    environment = {}
    if cpu.is_cpu():
        environment = cpu.vllm_environment(threads=None, kv_cache_gib=1, tensor_parallel=options.ranks)
    asked = options.only.split(",")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what lies in memory goes even so
    most = sum(sizes) * (len(ids) + 1) * shape.hidden_size * machine.DTYPE_BYTES[options.dtype]
    stack, on_disk = ExitStack(), options.out / "arriving-memory"
    memory = [way for way in asked if kind(way) == "memory"]
    options.in_memory = arriving.place(on_disk, most + most // 4 if memory else 0, options.memory_folder)
    stack.enter_context(arriving.removed(options.in_memory, options.memory_folder))
    if memory and options.in_memory == on_disk:
        asked = [way for way in asked if way not in memory]
        summary.add("memory: not measured", because=f"{most / 1e9:.1f} GB of files and a quarter more do not fit "
                    f"{options.memory_folder}, where {arriving.free(options.memory_folder) / 1e9:.1f} GB are free")  # fmt: skip
    ways = {}
    try:
        ways |= {way: engines.Engine(way, settings(options, way, ids, shape.layers), options.out, environment) for way in asked}
        engines.ready(ways, options.start_timeout, summary.add)
        for way, engine in ways.items():
            log = engine.log.read_text(errors="replace")
            fits, rooms = (re.findall(what, log)[-1:] for what in (r"KV cache size: ([\d,]+) tokens", r"Hidden states: (.*)"))
            summary.add(f"{way}: cache", tokens=fits, batched_tokens=options.batched_tokens, rooms=rooms)
        found: dict[str, list[dict]] = {way: [] for way in ways}
        with engines.alone(options.lock):
            for number in range(options.rounds + 1):  # the first warms up
                for way, engine in list(ways.items()):
                    job = {"job": "prefill", "lengths": sizes if number else sizes[: len(sizes) // 4], "seed": number,
                           "account": True, "vocabulary": shape.vocab_size,
                           "states": [len(ids) + 1, shape.hidden_size]}  # fmt: skip
                    got = engine.ask(job)
                    if "failed" in got:
                        summary.add(f"{way}: round {number}", **got)
                        ways.pop(way).stop()
                    elif number:
                        found[way].append(got)
                if number:
                    told(summary, found)
    finally:
        engines.stop(list(ways.values()))
        stack.close()
    print(f"\n{(options.out / 'summary.md').read_text()}")


def told(summary: Summary, found: dict[str, list[dict]]) -> None:
    """Rows of what stands so far, best of the rounds; earlier ones of the same name go."""
    summary.rows = [row for row in summary.rows if not row["what"].endswith("best so far")]
    summary.data["rounds"] = found
    plain = max((one["tokens"] / one["seconds"] for way in found if kind(way) == "plain" for one in found[way]), default=None)
    for way, rounds in found.items():
        if not rounds:
            continue
        every = [one["tokens"] / one["seconds"] for one in rounds]
        best = rounds[every.index(max(every))]
        columns = {"tokens_per_second": f"{max(every):,.0f}", "all_rounds": [round(one) for one in every]}
        if plain and kind(way) != "plain":
            columns["of_plain"] = f"{max(every) / plain:.3f}"
        if best["bytes"]:
            columns |= {"MB_per_second": f"{best['bytes'] / best['seconds'] / 1e6:,.0f}",
                        "files_wrong": f"{sum(one['files_wrong'] for one in rounds)} of "
                                       f"{sum(one['files_looked_at'] for one in rounds)}"}  # fmt: skip
        columns |= {"answered_s": [round(one["answered_s"], 3) for one in rounds],
                    "whole_s": [round(one["seconds"], 3) for one in rounds]}  # fmt: skip
        summary.add(f"{way}, {len(rounds)} rounds, best so far", **columns)
        account = {name: f"{value:.4f}" if name.endswith("_s") else value for name, value in best["account"].items()}
        summary.add(f"{way}, account of the best round, best so far", **account)


if __name__ == "__main__":
    main()
