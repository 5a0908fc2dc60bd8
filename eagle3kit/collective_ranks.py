"""In the ranks of `collective`: join the others, reduce every way at every size, and write each result down at once.

Every way is timed with the ranks lined up before each repeat, by each rank's own clock: events of the GPU, or the host's.
"""

import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3kit import cpu
from eagle3kit.stage import visible_gpus

if TYPE_CHECKING:
    from eagle3kit.collective import Request

IN_GRAPH = 20  # all-reduces captured in one graph, so that starting it is shared by many


def run(rank: int, request: "Request", folder: Path) -> None:
    """One rank: join the others, then time every way at every size; each result is a line of rank-N.jsonl."""
    import torch
    import torch.distributed as dist

    gpu = request.device == "cuda"
    if gpu:
        torch.cuda.set_device(rank)
    else:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
        torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a machine's own name may not resolve; all ranks are here
    store = dist.FileStore(str(folder / "rendezvous"), request.ranks)
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo", store=store, rank=rank, world_size=request.ranks)
    aside = dist.new_group(backend="gloo")  # to line up without disturbing what is timed
    with open(folder / f"rank-{rank}.jsonl", "w", encoding="utf-8", buffering=1) as notes:

        def note(**what: Any) -> None:
            notes.write(json.dumps(what) + "\n")

        note(links=_links(gpu))
        dtype = getattr(torch, request.dtype)
        ways = {"NCCL": _eager, "NCCL in a graph": _graph} if gpu else {"gloo": _eager}
        for way, prepare in ways.items():
            for size in request.sizes:
                data = torch.zeros(max(1, size // dtype.itemsize), dtype=dtype, device=request.device)
                call, many = prepare(lambda data=data: dist.all_reduce(data), gpu)
                note(way=way, size=size, seconds=_time(call, many, request, aside, gpu))
        if gpu:
            _custom(request, dtype, aside, note)
        else:
            _shared_memory(rank, request, dtype, aside, note)
    dist.barrier(aside)
    if gpu:  # all is written. NCCL's own end waits for ever where its all-reduce lies in a graph (seen with NCCL 2.28)
        os._exit(0)
    dist.destroy_process_group()


def _eager(run: Callable[[], Any], gpu: bool) -> tuple[Callable[[], Any], int]:
    """As it stands."""
    return run, 1


def _graph(run: Callable[[], Any], gpu: bool) -> tuple[Callable[[], Any], int]:
    """IN_GRAPH calls captured into a CUDA graph; (its replay, IN_GRAPH)."""
    import torch

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):  # what is captured must have run once, on a side stream
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(IN_GRAPH):
            run()
    return graph.replay, IN_GRAPH


def _custom(request: "Request", dtype: Any, group: Any, note: Callable[..., None]) -> None:
    """vLLM's own all-reduce, eager and captured, where it is to be had; the reason is noted where not."""
    import torch
    import torch.distributed as dist

    own, why = None, ""
    try:
        from vllm.distributed.device_communicators.custom_all_reduce import CustomAllreduce

        own = CustomAllreduce(group, torch.device("cuda", torch.cuda.current_device()))
        why = "vLLM switched it off on this machine (no peer access, or a number of ranks that it does not support)"
    except Exception as error:  # an absent vLLM, a build without the kernel, a driver that refuses peers
        why = f"{type(error).__name__}: {error}"
    able = torch.tensor(int(own is not None and not own.disabled))
    dist.all_reduce(able, op=dist.ReduceOp.MIN, group=group)  # all ranks or none, or some would wait for ever
    if not able:
        return note(way="vLLM custom", missing=why)
    for way, captured in (("vLLM custom", False), ("vLLM custom in a graph", True)):
        for size in request.sizes:
            data = torch.zeros(max(8, size // dtype.itemsize), dtype=dtype, device="cuda")
            if not own.should_custom_ar(data):
                note(way=f"{way}, {size:,} bytes", missing="vLLM leaves messages of this size to NCCL")
                continue
            if captured:
                own.custom_all_reduce(data)
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with own.capture(), torch.cuda.graph(graph):
                    for _ in range(IN_GRAPH):
                        own.custom_all_reduce(data)
                run, many = graph.replay, IN_GRAPH
            else:
                run, many = (lambda data=data: own.custom_all_reduce(data)), 1
            note(way=way, size=size, seconds=_time(run, many, request, group, True))


def _shared_memory(rank: int, request: "Request", dtype: Any, group: Any, note: Callable[..., None]) -> None:
    """What vLLM's engine uses between ranks of one machine without GPUs (distributed/device_communicators/cpu_communicator.py);
    the reason is noted where it is not to be had."""
    import torch
    import torch.distributed as dist

    why = cpu.no_shared_memory()
    able = torch.tensor(int(not why))
    dist.all_reduce(able, op=dist.ReduceOp.MIN, group=group)  # all ranks or none, or some would wait for ever
    if not able:
        return note(way="vLLM shared memory", missing=why or "another rank has none")
    own = torch.ops._C
    name = f"eagle3kit-{os.getppid()}"  # the ranks' common parent, so no other measurement's
    handle = own.init_shm_manager(name, request.ranks, rank, 1)
    dist.barrier(group)
    own.join_shm_manager(handle, name)
    dist.barrier(group)
    for size in request.sizes:
        data = torch.zeros(max(1, size // dtype.itemsize), dtype=dtype)
        note(way="vLLM shared memory", size=size,
             seconds=_time(lambda data=data: own.shm_allreduce(handle, data), 1, request, group, False))  # fmt: skip


def _time(run: Callable[[], Any], many: int, request: "Request", aside: Any, gpu: bool) -> list[float]:
    """Seconds of one all-reduce, `repeats` times, the ranks lined up before each; on a GPU by its own events."""
    import torch
    import torch.distributed as dist

    found = []
    for repeat in range(request.warmup + request.repeats):
        if gpu:
            torch.cuda.synchronize()
        dist.barrier(aside)
        if gpu:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            end.synchronize()
            seconds = begin.elapsed_time(end) / 1e3
        else:
            started = time.perf_counter()
            run()
            seconds = time.perf_counter() - started
        if repeat >= request.warmup:
            found.append(seconds / many)
    return found


def _links(gpu: bool) -> dict[str, Any]:
    """What joins the ranks: peer access and topology of the GPUs, NCCL's version, and the settings that steer it."""
    settings = {name: value for name, value in sorted(os.environ.items()) if name.startswith(("NCCL_", "GLOO_"))}
    if not gpu:
        return {"backend": "gloo over loopback, one core a rank", "settings": settings}
    import shutil
    import subprocess

    import torch

    count = torch.cuda.device_count()
    found = {"backend": f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}", "settings": settings,
             "gpus": [torch.cuda.get_device_name(number) for number in range(count)],
             "peer_access": [[one == other or torch.cuda.can_device_access_peer(one, other) for other in range(count)]
                             for one in range(count)]}  # fmt: skip
    if shutil.which("nvidia-smi"):
        ask = ["nvidia-smi", "topo", "-m"]
        said = subprocess.run(ask, capture_output=True, text=True, check=False).stdout
        joined = topology(said, os.environ.get("CUDA_VISIBLE_DEVICES", ""))
        if joined:
            found["topology"] = joined
    return found


def topology(said: str, visible: str = "") -> str:
    """How the GPUs are joined, pair by pair, of what `nvidia-smi topo -m` prints: a matrix, its legend, a terminal's escapes.

    Of two GPUs: "NV18: GPU0-GPU1"; where all of eight are joined alike: "NV18: all 28 pairs". What has no such matrix is
    given as it is. `visible`: CUDA_VISIBLE_DEVICES, which nvidia-smi does not heed: where it is of numbers, only those GPUs
    are told of, numbered as torch numbers them ("2,3": GPU0 is the machine's third).
    """
    text = re.sub(r"\x1b\[[0-9;]*m", "", said)
    names: list[str] = []
    joined: dict[tuple[str, str], str] = {}
    for line in text.splitlines():
        cells = line.split()
        if not names:
            names = [cell for cell in cells if re.fullmatch(r"GPU\d+", cell)]
        elif cells and cells[0] in names:
            joined |= {(cells[0], other): kind for other, kind in zip(names, cells[1:], strict=False) if other != cells[0]}
    if not joined:
        return text.strip()
    mine = visible_gpus(names, visible) if re.fullmatch(r"[\d, ]+", visible) else names
    pairs: dict[str, list[str]] = {}
    for one, first in enumerate(mine):
        for other, second in enumerate(mine[one + 1 :], one + 1):
            pairs.setdefault(joined.get((first, second), "unknown"), []).append(f"GPU{one}-GPU{other}")
    if len(pairs) == 1 and len(mine) > 2:
        return f"{next(iter(pairs))}: all {sum(map(len, pairs.values()))} pairs"
    return "; ".join(f"{kind}: {', '.join(found)}" for kind, found in pairs.items())
