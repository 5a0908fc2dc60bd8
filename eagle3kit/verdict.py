"""GO, NO-GO, or GO BELOW a concurrency: what the map of speedups says about training a draft, and what would change it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from eagle3kit.errors import KitError
from eagle3kit.speedup import Cell
from eagle3kit.words import three

Word = Literal["GO", "NO-GO", "GO BELOW"]
CellWord = Literal["GO", "NO-GO", "WITHIN NOISE"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What the draft would cost: hours (`hours_of` a GPU, or a machine without one) of extracting and training, and disk;
    `source` says how it is known."""

    gpu_hours: float
    disk_gib: float
    source: str
    hours_of: str = "GPU"


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A cell and its word: GO where the whole interval lies at `least_speedup` or above, NO-GO where it lies below it, else
    WITHIN NOISE. A figure without an interval is taken at its word. `headroom`: length / needed length, below 1 for NO-GO."""

    cell: Cell
    word: CellWord
    needed_length: float
    headroom: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The decision. `dataclasses.asdict` of it is what `result.json` holds.

    word: GO: every cell is GO. NO-GO: at no context is the lowest concurrency GO. Else GO BELOW.
    below: by context, the lowest concurrency from which it no longer pays; None where it pays at all that were looked at.
    exceptions: cells that are GO although a lower concurrency of their context is not (noise, most likely; not relied on).
    sentence: the verdict in words, with numbers. changes: what would change it, a sentence each.
    """

    word: Word
    sentence: str
    below: dict[int, int | None]
    cells: tuple[Judged, ...]
    exceptions: tuple[Judged, ...]
    changes: tuple[str, ...]
    least_speedup: float
    cost: Cost | None

    def at(self, concurrency: int, context: int) -> CellWord:
        """The word of one place; KitError for a place that nobody measured (nothing is read in between)."""
        for judged in self.cells:
            if (judged.cell.concurrency, judged.cell.context) == (concurrency, context):
                return judged.word
        known = sorted({(judged.cell.concurrency, judged.cell.context) for judged in self.cells})
        raise KitError(f"nothing is known at concurrency {concurrency} and context {context}; known are {known}")


def judge(cells: Sequence[Cell], *, least_speedup: float = 1.0, cost: Cost | None = None) -> Verdict:
    """The verdict over a map (`speedup.speedup_map`, or published cells). Of several K at one place the fastest counts: that is
    K by goodput (`speedup.best_draft_tokens`), for L / r is goodput over that of plain decoding. What would change it looks at
    all of them, since a better draft may be best with more draft tokens.

    Args:
        least_speedup: what must be reached; 1.0 is "not slower", 1.1 asks for a tenth to pay for the training.

    Raises:
        KitError: no cells.
    """
    if not cells:
        raise KitError("there is no cell to judge: measure r at one concurrency at least")
    best: dict[tuple[int, int], Cell] = {}
    for cell in cells:
        place = (cell.context, cell.concurrency)
        if place not in best or cell.speedup.value > best[place].speedup.value:
            best[place] = cell
    judged = tuple(_judge(best[place], least_speedup) for place in sorted(best))
    every = [_judge(cell, least_speedup) for cell in cells]
    below: dict[int, int | None] = {}
    for one in judged:  # by rising concurrency within a context
        context = one.cell.context
        if below.setdefault(context, None) is None and one.word != "GO":
            below[context] = one.cell.concurrency
    pays = [one for one in judged if _before(one, below)]
    exceptions = tuple(one for one in judged if one.word == "GO" and not _before(one, below))
    word: Word = "NO-GO" if not pays else "GO" if len(pays) == len(judged) else "GO BELOW"
    return Verdict(word=word, sentence=_sentence(word, judged, below, least_speedup, cost), below=below, cells=judged,
                   exceptions=exceptions, changes=_changes(judged, every, least_speedup), least_speedup=least_speedup,
                   cost=cost)  # fmt: skip


def _judge(cell: Cell, least: float) -> Judged:
    word: CellWord = "GO" if cell.speedup.least >= least else "NO-GO" if cell.speedup.most < least else "WITHIN NOISE"
    needed = least * cell.r.value
    return Judged(cell=cell, word=word, needed_length=needed, headroom=cell.length.value / needed)


def _before(one: Judged, below: dict[int, int | None]) -> bool:
    """Whether it lies where speculation pays, all lower concurrencies of its context included."""
    end = below[one.cell.context]
    return end is None or one.cell.concurrency < end


def _sentence(
    word: Word, judged: Sequence[Judged], below: dict[int, int | None], least: float, cost: Cost | None
) -> str:
    parts = []
    for context, end in below.items():
        row = [one for one in judged if one.cell.context == context]
        inside = [one for one in row if _before(one, below)]
        where = f"at context {context:,}"
        if inside:
            values = [one.cell.speedup.value for one in inside]
            last = "" if end is None else f", not at {end} ({_of(row, end)})"
            parts.append(f"{where}: {_span(values)} up to concurrency {inside[-1].cell.concurrency}{last}")
        else:
            least_of_all = "not proven" if row[0].word == "WITHIN NOISE" else "not"
            parts.append(f"{where}: {least_of_all} even at concurrency {row[0].cell.concurrency} "
                         f"({_of(row, row[0].cell.concurrency)})")  # fmt: skip
    kinds = sorted({one.cell.speedup.kind for one in judged})
    lengths = sorted({round(one.cell.length.value, 3) for one in judged})
    head = f"{word}: speedup ({', '.join(kinds)}; length {', '.join(map(three, lengths))}; wanted {least:g}x)"
    text = f"{head} {'; '.join(parts)}"
    if cost is None:
        return text
    price = f"{three(cost.gpu_hours)} {cost.hours_of}-hours and {three(cost.disk_gib)} GiB ({cost.source})"
    return f"{text}. A draft would cost {price}"


def _of(row: Sequence[Judged], concurrency: int) -> str:
    one = next(one for one in row if one.cell.concurrency == concurrency)
    noise = ", within noise" if one.word == "WITHIN NOISE" else ""
    return f"{one.cell.speedup.value:.2f}x{noise}"


def _span(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:.2f}x" if f"{low:.2f}" == f"{high:.2f}" else f"{low:.2f}x to {high:.2f}x"


def _changes(judged: Sequence[Judged], every: Sequence[Judged], least: float) -> tuple[str, ...]:
    """One sentence for the nearest gain, what is out of reach whatever the draft, the nearest loss, and noise. `judged`: the
    best K of each place, `every`: all of them."""
    found = []
    losing = [one for one in judged if one.word == "NO-GO"]
    lost = {_place(one) for one in losing}
    reach = [one for one in every if _place(one) in lost and one.needed_length <= one.cell.draft_tokens + 1]
    if reach:
        near = max(reach, key=lambda one: one.headroom)
        found.append(f"A length of {near.needed_length:.2f} with {_tokens(near)}, instead of {near.cell.length.value:.2f}, would "
                     f"reach {least:g}x at {_place(near)}")  # fmt: skip
    if beyond := [one for one in losing if _place(one) not in {_place(other) for other in reach}]:
        far = min(beyond, key=lambda one: one.headroom)
        found.append(f"At {_place(far)} no draft can: it would need a length of {far.needed_length:.2f} with {_tokens(far)}, "
                     f"where {far.cell.draft_tokens + 1} is the most there can be")  # fmt: skip
    if winning := [one for one in judged if one.word == "GO"]:
        near = min(winning, key=lambda one: one.headroom)
        found.append(f"A length below {near.needed_length:.2f}, where {near.cell.length.value:.2f} is counted on, would end it "
                     f"first at {_place(near)}")  # fmt: skip
    if noisy := [one for one in judged if one.word == "WITHIN NOISE"]:
        found.append("More repeats would decide " + ", ".join(_place(one) for one in noisy))
    return tuple(found)


def _tokens(one: Judged) -> str:
    return f"{one.cell.draft_tokens} draft token{'s' * (one.cell.draft_tokens > 1)}"


def _place(one: Judged) -> str:
    return f"concurrency {one.cell.concurrency} and context {one.cell.context:,}"
