"""The all-reduce alone: how long the messages of decode take between ranks, with nothing else going on.

A decode step of a target that is spread over ranks sums one message [tokens, hidden] after every attention and every MLP, so a
message has tokens · hidden · bytes a number; a verify step of B sequences sends B · (K + 1) tokens, a plain step B.
What is timed here is a floor: in an engine ranks also wait for each other (`traces`), and on a GPU a captured graph hides
the launch (`graph` here) that an eager call pays.

`measure` starts a child, and that one process a rank: NCCL on GPUs, gloo on the CPU, one core a rank.
"""

import json
import multiprocessing
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eagle3kit import child
from eagle3kit.fabric import message_bytes
from eagle3kit.files import read_json, write_json

IN_GRAPH = 20  # all-reduces captured in one graph, so that starting it is shared by many


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to time: `sizes` in bytes, `repeats` of each, between `ranks` processes on "cpu" or "cuda"."""

    sizes: list[int]
    ranks: int
    device: str
    dtype: str = "float32"
    repeats: int = 40
    warmup: int = 5


@dataclass(frozen=True)
class Timing:
    """One way of reducing at one size: seconds [ranks][repeats], each rank's own clock.

    `way`: "gloo", "NCCL", "NCCL in a graph", "vLLM custom", "vLLM custom in a graph".
    """

    way: str
    size: int
    seconds: list[list[float]]

    @property
    def slowest(self) -> list[float]:
        """Seconds of each repeat at the rank that took longest: a collective ends when its last rank does [repeats]."""
        return [max(each) for each in zip(*self.seconds, strict=True)]

    @property
    def minimum(self) -> float:
        """The fastest repeat, seconds."""
        return min(self.slowest)

    @property
    def median(self) -> float:
        """The middle repeat, seconds."""
        return statistics.median(self.slowest)

    @property
    def p95(self) -> float:
        """The repeat that 95 % do not exceed, seconds."""
        ordered = sorted(self.slowest)
        return ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]


@dataclass(frozen=True)
class Measured:
    """What came out: timings by way and size, what could not be measured and why, and what the ranks are joined by."""

    timings: list[Timing]
    missing: dict[str, str]
    links: dict[str, Any]

    def of(self, way: str) -> list[Timing]:
        """The timings of one way, by size."""
        return sorted((timing for timing in self.timings if timing.way == way), key=lambda timing: timing.size)

    @property
    def ways(self) -> list[str]:
        """The ways that were measured, in the order in which they were."""
        return list(dict.fromkeys(timing.way for timing in self.timings))


def messages(*, batches: Sequence[int], draft_tokens: Sequence[int], hidden_size: int, bytes_per_number: int) -> dict[int, int]:
    """{tokens: bytes} of the messages that decode sends, from one token to the largest batch with all its draft tokens.

    batches (1, 8), three draft tokens, hidden 7168, 2 bytes -> 1, 4, 8, 32 tokens: 14,336, 57,344, 114,688, 458,752 bytes.
    """
    tokens = {1} | {batch * (drafts + 1) for batch in batches for drafts in (0, *draft_tokens)}
    return {count: message_bytes(count, 0, hidden_size, bytes_per_number) for count in sorted(tokens)}


def measure(request: Request, folder: Path, *, timeout_s: float = 300) -> Measured:
    """Time `request` in child processes, whose log and request go to `folder`; what was done is returned even if not all was.

    Raises:
        KitError: nothing could be timed; with the end of the log.
    """
    for old in folder.glob("rank-*"):
        old.unlink()
    answer, why = child.call("eagle3kit.collective", asdict(request), folder, timeout_s=timeout_s)
    missing = dict(answer["missing"]) | ({"the rest": why} if why else {})
    return Measured([Timing(**row) for row in answer["timings"]], missing, answer["links"])


def main(folder: Path) -> int:
    """Child: start the ranks, wait, and join what each has written; 1 when a rank failed."""
    request = Request(**read_json(folder / child.REQUEST))
    (folder / "rendezvous").unlink(missing_ok=True)
    write_json(folder / child.ANSWER, {"timings": [], "missing": {}, "links": {}})
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=_rank, args=(rank, request, folder), daemon=True) for rank in range(request.ranks)]
    for rank in ranks:
        rank.start()
    # Told to stop, this process must end as Python does, for that ends its ranks; a plain SIGTERM would leave them.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        while any(rank.exitcode is None for rank in ranks) and not any(rank.exitcode for rank in ranks):
            ranks[0].join(0.2)
    finally:
        _join(request, folder)
    return 1 if any(rank.exitcode for rank in ranks) else 0


def _join(request: Request, folder: Path) -> None:
    """answer.json from what the ranks have written so far: sizes that every rank has timed."""
    notes: list[list[dict[str, Any]]] = []
    for rank in range(request.ranks):
        path = folder / f"rank-{rank}.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
        notes.append([json.loads(line) for line in lines if line.endswith("\n")])
    timed = [{(note["way"], note["size"]): note["seconds"] for note in each if "seconds" in note} for each in notes]
    rows = [{"way": way, "size": size, "seconds": [each[way, size] for each in timed]}
            for way, size in timed[0] if all((way, size) in each for each in timed)]  # fmt: skip
    missing = {note["way"]: note["missing"] for each in notes for note in each if "missing" in note}
    links = next((note["links"] for note in notes[0] if "links" in note), {})
    write_json(folder / child.ANSWER, {"timings": rows, "missing": missing, "links": links})


def _rank(rank: int, request: Request, folder: Path) -> None:
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
                run, many = prepare(lambda data=data: dist.all_reduce(data), gpu)
                note(way=way, size=size, seconds=_time(run, many, request, aside, gpu))
        if gpu:
            _custom(request, dtype, aside, note)
    dist.barrier(aside)
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


def _custom(request: Request, dtype: Any, group: Any, note: Callable[..., None]) -> None:
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


def _time(run: Callable[[], Any], many: int, request: Request, aside: Any, gpu: bool) -> list[float]:
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
        found["topology"] = subprocess.run(ask, capture_output=True, text=True, check=False).stdout
    return found


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
