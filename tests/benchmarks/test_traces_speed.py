"""A trace of half a gigabyte: under 60 seconds and under 2 GB. Says what it took, and what other ways of reading take.

    pytest -o norecursedirs= -s tests/benchmarks/test_traces_speed.py

EAGLE3KIT_TRACE_MB sets another size.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

MEGABYTES = int(os.environ.get("EAGLE3KIT_TRACE_MB", "500"))
CHILD = """
import json, resource, sys, time
from eagle3kit import traces
started = time.perf_counter()
trace = traces.read(sys.argv[1])
read = time.perf_counter() - started
found = traces.profile(trace, traces.window(trace, traces.DECODE_STEP))
print(json.dumps({"read_s": read, "all_s": time.perf_counter() - started, "rows": len(trace.start), "steps": found.steps,
                  "ignored": sum(trace.ignored.values()), "unaccounted": found.unaccounted,
                  "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}))
"""
IJSON = """
import resource, sys, time
import ijson
started = time.perf_counter()
with open(sys.argv[1], "rb") as file:
    events = sum(1 for _ in ijson.items(file, "traceEvents.item", use_float=True))
print(f"{ijson.backend}: {events:,} events in {time.perf_counter() - started:.1f} s, "
      f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:,.0f} MB")
"""
OPERATORS = (("aten::linear", "aten::addmm"), ("vllm::unified_attention", "aten::bmm"), ("aten::linear", "aten::mm"),
             ("c10d::allreduce_", "gloo:all_reduce"))  # fmt: skip


def event(category: str, name: str, ts: float, dur: float, pid: int, tid: int, args: dict) -> str:
    """As Kineto lays it out."""
    inner = ", ".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in args.items())
    return (f'  {{\n    "ph": "X", "cat": "{category}", "name": {json.dumps(name)}, "pid": {pid}, "tid": {tid},\n'
            f'    "ts": {ts:.3f}, "dur": {dur:.3f},\n    "args": {{\n      {inner}\n    }}\n  }}')  # fmt: skip


def one_step(step: int, kind: str) -> list[str]:
    """The events of a decode step of 32 layers, on a GPU (kernels and frames of Python) or on CPU (nested operators)."""
    at, made = step * 5000.0, []
    gpu = kind == "gpu"
    note = "gpu_user_annotation" if gpu else "user_annotation"
    made.append(event(note, "execute_context_0(0)_generation_8(8)", at, 4900, 0, 7, {"External id": step}))
    for layer in range(32):
        begin = at + layer * 150
        if gpu:
            for number, name in enumerate(("rms_norm_kernel", "nvjet_tst_64x8_h_bz", "flash_fwd_splitkv_kernel", "act_and_mul",
                                           "cross_device_reduce_1stage<__nv_bfloat16, 2>")):  # fmt: skip
                made.append(event("kernel", name, begin + number * 20, 18.5, 0, 7, {
                    "External id": step, "queued": 0, "device": 0, "context": 1, "stream": 7, "correlation": step * 1000 + layer,
                    "registers per thread": 40, "shared memory": 0, "blocks per SM": 0.5, "warps per SM": 2.0,
                    "grid": [64, 1, 1], "block": [512, 1, 1], "est. achieved occupancy %": 12}))  # fmt: skip
            made += [event("python_function", f"model.py({line}): forward_{line}", begin, 100, 99, 99,
                           {"Python id": line, "Python parent id": 3, "Ev Idx": 7}) for line in range(5)]  # fmt: skip
        else:
            shapes = {"External id": layer, "Record function id": 0, "Concrete Inputs": ["", "", "1"], "Input type": ["float"],
                      "Input Strides": [[576, 1]], "Input Dims": [[8, 576], [576, 1536]], "Ev Idx": layer}  # fmt: skip
            for number, (outer, inner) in enumerate(OPERATORS):
                made.append(event("cpu_op", outer, begin + number * 30, 28.5, 99, 99, shapes))
                made.append(event("cpu_op", "aten::t", begin + number * 30 + 1, 2.25, 99, 99, shapes))
                made.append(event("cpu_op", inner, begin + number * 30 + 4, 20.125, 99, 99, shapes))
    return made


@pytest.fixture(scope="module", params=["gpu", "cpu"])
def big(request, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("big") / f"{request.param}.json"
    with path.open("w") as file:
        file.write('{\n  "schemaVersion": 1,\n  "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 2},\n'
                   '  "traceEvents": [\n')  # fmt: skip
        step = 0
        while file.tell() < MEGABYTES * 10**6:
            file.write("".join(made + ",\n" for number in range(step, step + 50) for made in one_step(number, request.param)))
            step += 50
        file.write(",\n".join(one_step(step, request.param)) + '\n  ],\n  "traceName": "big"\n}\n')
    yield path
    path.unlink()


def test_half_a_gigabyte(big):
    printed = subprocess.run([sys.executable, "-c", CHILD, big], capture_output=True, text=True)
    assert printed.returncode == 0, printed.stderr
    found = json.loads(printed.stdout)
    size = big.stat().st_size / 1e6
    print(f"\n{big.name}, {size:,.0f} MB, {found['rows']:,} spans and {found['ignored']:,} other events: read in "
          f"{found['read_s']:.1f} s ({size / found['read_s']:,.0f} MB/s), all in {found['all_s']:.1f} s, "
          f"{found['peak_mb']:,.0f} MB at most")  # fmt: skip
    assert found["unaccounted"] < 0.01
    if MEGABYTES <= 500:
        assert found["all_s"] < 60 and found["peak_mb"] < 2000


def test_other_readers(big):
    """For comparison: ijson with its C backend, where it is installed (events only, without columns or buckets)."""
    pytest.importorskip("ijson")
    started = time.perf_counter()
    printed = subprocess.run([sys.executable, "-c", IJSON, big], capture_output=True, text=True)
    told = printed.stdout.strip() or printed.stderr[-300:]
    print(f"\n{big.name}: ijson, {told} ({time.perf_counter() - started:.1f} s in all)")
    assert printed.returncode == 0
