"""Read what torch.profiler exports (a Chrome trace, .json or .json.gz) as columns, in pieces, so that its size does not matter.

Format: one JSON object; `traceEvents` is an array of events with `ph` "X" for a span, `cat` its category, `name`, `pid` and
`tid` (a GPU kernel's device and stream), `ts` and `dur` in microseconds with three decimals; `distributedInfo` beside it has
the rank (torch/csrc/profiler and Kineto's output_json.cpp). Other profilers that write the same are read as well.

The array is cut between events by looking at quotes and brackets only (NumPy), and each piece is then parsed strictly
(msgspec): a wrong cut could not parse. This takes about as long as the fastest event parser that was tried (ijson over YAJL
in C, `make bench`), keeps times exact without a Decimal each, and can name the place of a mistake.
"""

import gzip
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec
import numpy as np

from eagle3kit.errors import KitError

KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
CATEGORIES = (*KERNELS, "cpu_op", "user_annotation", "gpu_user_annotation")
PIECE = 1 << 23  # bytes
HEADER = 1 << 26  # a trace's head is a few kilobytes; what has no events after this many bytes is something else
_EXACT_BELOW = 2.0**43  # microseconds (101 days): a double is still less than half a nanosecond off
_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
_MARKS = np.zeros(256, dtype=bool)
_MARKS[list(b'"{}[],')] = True
_STEP = np.zeros(256, dtype=np.int8)
_STEP[list(b"{[")], _STEP[list(b"}]")] = 1, -1


class Event(msgspec.Struct, gc=False):
    """What is read of an event."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    pid: int | str = 0
    tid: int | str = 0
    ts: float = 0.0
    dur: float | None = None


class ExactEvent(msgspec.Struct, gc=False):
    """The same, for times that a double cannot hold to the nanosecond (older traces count from 1970, newer ones from the
    beginning of the quarter year)."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    pid: int | str = 0
    tid: int | str = 0
    ts: Decimal = Decimal(0)
    dur: Decimal | None = None


class Ranks(msgspec.Struct):
    """`distributedInfo`."""

    rank: int | None = None
    world_size: int | None = None


class Head(msgspec.Struct):
    """What stands beside the events."""

    traceEvents: list[Any]  # noqa: N815 - the file's own name
    distributedInfo: Ranks | None = None  # noqa: N815


class Lane(NamedTuple):
    """Where spans follow each other: a GPU's stream (device, stream) or a process's thread (pid, tid)."""

    process: int | str
    thread: int | str


@dataclass(frozen=True, eq=False)
class Trace:
    """The spans of one file, a row each in file order: kernels, copies, operators and annotations.

    category, name, lane: int32 [n], indices into `CATEGORIES`, `names` and `lanes`. start, end: int64 [n], nanoseconds of
    the trace's clock. `ignored` counts all other events by category (Python frames, runtime calls, arrows, metadata), so that
    rows + ignored = events in the file.
    """

    path: Path
    rank: int | None
    world_size: int | None
    names: tuple[str, ...]
    lanes: tuple[Lane, ...]
    category: np.ndarray
    name: np.ndarray
    lane: np.ndarray
    start: np.ndarray
    end: np.ndarray
    ignored: dict[str, int] = field(default_factory=dict)

    def of(self, *categories: str) -> np.ndarray:
        """The rows (int64) of these categories."""
        return np.flatnonzero(np.isin(self.category, [CATEGORIES.index(category) for category in categories]))


def read(path: Path | str, *, piece: int = PIECE) -> Trace:
    """The trace in `path`, `piece` bytes at a time (memory: some tens of bytes an event and a few pieces).

    Raises:
        KitError: no such file, not gzip, not JSON, not a trace, or cut off; it names the byte (of the unpacked text) and how
            many events stood before it. Also for a trace without a single span, and for a span without a duration.
    """
    path = Path(path)
    columns, reader = _Columns(path), _Reader(path, piece)
    try:
        with _opened(path) as file:
            for events, place in reader.pieces(file):
                columns.add(events, place)
    except FileNotFoundError:
        raise KitError(f"{path}: no such trace") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise KitError(f"{path}: the gzip stream is damaged or cut off after {reader.read:,} bytes of text and "
                       f"{columns.events:,} events ({error}); was the process killed?") from None  # fmt: skip
    return columns.trace(reader.head)


def _opened(path: Path) -> BinaryIO:
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    return gzip.open(path, "rb") if packed else path.open("rb")  # type: ignore[return-value]


class _Reader:
    """Pieces of whole events out of a file; afterwards `head` holds what stands beside them."""

    def __init__(self, path: Path, piece: int):
        self.path, self.piece, self.read = path, piece, 0
        self.head = Head([])

    def pieces(self, file: BinaryIO) -> Iterator[tuple[bytes, int]]:
        """(events separated by commas, the byte they begin at)."""
        front = b""
        while not (found := _EVENTS.search(front)):
            more = self._more(file)
            front += more
            if not more or len(front) > HEADER or (front.lstrip()[:1] not in (b"{", b"")):
                raise KitError(f"{self.path} is no trace by torch.profiler: no traceEvents in its first {len(front):,} bytes, "
                               f"which begin with {front[:24]!r}")  # fmt: skip
        rest, place, size = front[found.end() :], found.end(), self.piece
        while True:
            cut, ended = _cut(rest)
            if ended:
                break
            if cut:
                yield rest[:cut], place
                rest, place, size = rest[cut + 1 :], place + cut + 1, self.piece
            more = self._more(file, size)
            if not more:
                raise KitError(f"{self.path} is cut off: it ends at byte {self.read:,} within traceEvents, after the event that "
                               f"ends at byte {place - 1:,}; was the profiler stopped before the process ended?")  # fmt: skip
            rest += more
            size *= 2  # an event longer than a piece is not scanned again and again
        yield rest[:cut], place
        tail = rest[cut:]
        while more := self._more(file):
            tail += more
        self.head = self._head(front[: found.end()], tail)

    def _more(self, file: BinaryIO, size: int | None = None) -> bytes:
        more = file.read(size or self.piece)
        self.read += len(more)
        return more

    def _head(self, front: bytes, tail: bytes) -> Head:
        """The whole document with an empty array in place of the events."""
        try:
            return msgspec.json.decode(front + tail, type=Head)
        except msgspec.MsgspecError as error:
            raise KitError(f"{self.path} is cut off or no trace by torch.profiler: what stands around traceEvents is wrong "
                           f"({error}); the file ends at byte {self.read:,}") from None  # fmt: skip


def _cut(text: bytes) -> tuple[int, bool]:
    """How many bytes of `text`, which begins between two events, hold whole events; and whether the array ends there.

    `{"a":"},{"},{"b` -> (11, False), the place of the last comma between events; 0 when there is none.
    """
    where = np.flatnonzero(_MARKS[np.frombuffer(text, dtype=np.uint8)])
    marks = np.frombuffer(text, dtype=np.uint8)[where]
    quotes = marks == ord('"')
    if escaped := _escaped(text):
        quotes &= ~np.isin(where, escaped)
    outside = (np.cumsum(quotes) % 2 == 0) & ~(marks == ord('"'))
    where, marks = where[outside], marks[outside]
    depth = np.cumsum(_STEP[marks])
    if len(ends := np.flatnonzero(depth < 0)):
        return int(where[ends[0]]), True
    commas = np.flatnonzero((depth == 0) & (marks == ord(",")))
    return (int(where[commas[-1]]), False) if len(commas) else (0, False)


def _escaped(text: bytes) -> list[int]:
    """The places of characters that an odd run of backslashes stands before."""
    if b"\\" not in text:
        return []
    return [run.end() for run in re.finditer(rb"\\+", text) if (run.end() - run.start()) % 2]


class _Columns:
    """Rows gathered piece by piece."""

    def __init__(self, path: Path):
        self.path, self.events = path, 0
        self.names: dict[str, int] = {}
        self.lanes: dict[Lane, int] = {}
        self.parts: list[tuple[np.ndarray, ...]] = []
        self.ignored: Counter[str] = Counter()
        self._decode = msgspec.json.Decoder(list[Event]).decode
        self._decode_exact = msgspec.json.Decoder(list[ExactEvent]).decode

    def add(self, text: bytes, place: int) -> None:
        """The spans of a piece that begins at byte `place`."""
        events: list[Any] = self._parsed(self._decode, text, place)
        if any(event.ts >= _EXACT_BELOW for event in events):
            events = self._parsed(self._decode_exact, text, place)
        kept = [event for event in events if event.ph == "X" and event.cat in _NUMBER]
        if len(kept) < len(events):
            self.ignored.update(_other(event) for event in events if event.ph != "X" or event.cat not in _NUMBER)
        self.events += len(events)
        if bad := next((event for event in kept if event.dur is None or event.dur < 0), None):
            raise KitError(f"{self.path}: {bad.cat} {bad.name!r} at {bad.ts} µs has "
                           f"{'no duration' if bad.dur is None else f'the duration {bad.dur}'}; the profiler did not see it "
                           "end, so the trace is of no use: profile again")  # fmt: skip
        names, lanes = self.names, self.lanes
        start = _nanoseconds([event.ts for event in kept])
        self.parts.append((
            np.array([_NUMBER[event.cat] for event in kept], dtype=np.int32),
            np.array([names.setdefault(event.name, len(names)) for event in kept], dtype=np.int32),
            np.array([lanes.setdefault(Lane(event.pid, event.tid), len(lanes)) for event in kept], dtype=np.int32),
            start,
            start + _nanoseconds([event.dur for event in kept]),
        ))  # fmt: skip

    def _parsed(self, decode: Any, text: bytes, place: int) -> list[Any]:
        try:
            return decode(b"[" + text + b"]")
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise KitError(f"{self.path}: an event between bytes {place:,} and {place + len(text):,} (after {self.events:,} good "
                           f"events) is not as torch.profiler writes it: {error}") from None  # fmt: skip

    def trace(self, head: Head) -> Trace:
        """All rows; KitError when there are none."""
        columns = [np.concatenate(column) for column in zip(*self.parts, strict=True)] if self.parts else [np.zeros(0)] * 5
        if not len(columns[0]):
            raise KitError(f"{self.path} holds {self.events:,} events, but no kernel, operator or annotation")
        ranks = head.distributedInfo or Ranks()
        return Trace(self.path, ranks.rank, ranks.world_size, tuple(self.names), tuple(self.lanes), *columns,
                     ignored=dict(self.ignored))  # fmt: skip


_NUMBER = {category: number for number, category in enumerate(CATEGORIES)}


def _other(event: Any) -> str:
    return event.cat or f"ph {event.ph}"


def _nanoseconds(microseconds: list[Any]) -> np.ndarray:
    if microseconds and isinstance(microseconds[0], Decimal):
        return np.array([int(value * 1000) for value in microseconds], dtype=np.int64)
    # The fraction on its own: times a thousand, the whole number would not fit into a double any more.
    values = np.array(microseconds, dtype=np.float64)
    whole = np.floor(values)
    return whole.astype(np.int64) * 1000 + np.rint((values - whole) * 1000).astype(np.int64)
