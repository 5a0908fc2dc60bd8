"""The all-reduce alone: how long the messages of decode take between ranks, with nothing else going on.

A decode step of a target that is spread over ranks sums one message [tokens, hidden] after every attention and every MLP, so a
message has tokens · hidden · bytes a number; a verify step of B sequences sends B · (K + 1) tokens, a plain step B.
What is timed here is a floor: in an engine ranks also wait for each other (`traces`), and on a GPU a captured graph hides
the launch (`graph` here) that an eager call pays.

`measure` starts a child, and that one process a rank: NCCL on GPUs; gloo on the CPU, one core a rank. Beside them vLLM's own,
which is what its engine uses where it can: the custom all-reduce on GPUs, shared memory on the CPU.
"""

import json
import multiprocessing
import signal
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eagle3kit import child, collective_ranks
from eagle3kit.fabric import message_bytes
from eagle3kit.files import read_json, write_json


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

    `way`: "gloo", "vLLM shared memory", "NCCL", "NCCL in a graph", "vLLM custom", "vLLM custom in a graph".
    """

    way: str
    size: int
    seconds: list[list[float]]

    @property
    def slowest(self) -> list[float]:
        """Seconds of each repeat at the rank that took longest: a collective ends when its last rank does [repeats]."""
        return [max(each) for each in zip(*self.seconds, strict=True)]

    @property
    def quickest(self) -> float:
        """The middle repeat at the rank that took least each time: it came last and waited for nobody, so this is the nearest
        to the transfer alone, seconds."""
        return statistics.median(min(each) for each in zip(*self.seconds, strict=True))

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

    At least three sizes, so that a line through them has residuals that say something: where decode sends fewer, one of twice the
    largest is added. Batches (1, 8), three draft tokens, hidden 7168, 2 bytes -> 1, 4, 8, 32 tokens: 14,336, 57,344, 114,688 and
    458,752 bytes.
    """
    tokens = {1} | {batch * (drafts + 1) for batch in batches for drafts in (0, *draft_tokens)}
    tokens |= {2 * max(tokens)} if len(tokens) < 3 else set()
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
    ranks = [context.Process(target=collective_ranks.run, args=(rank, request, folder), daemon=True)
             for rank in range(request.ranks)]  # fmt: skip
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


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
