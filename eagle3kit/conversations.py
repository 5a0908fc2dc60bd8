"""Rows -> checked conversations -> the ones to use -> the two sides of the split; and the samples that come of them.

Nothing is dropped in silence: a row that cannot be used is listed with its source, number, field and reason.
"""

import heapq
import json
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from eagle3kit import sources as rooms
from eagle3kit.errors import KitError
from eagle3kit.files import publish, write_bytes
from eagle3kit.rows import Rejected, Unfit, check_row, check_share, check_tools
from eagle3kit.sides import Sides, opening, share
from eagle3kit.sides import short_hash as _hash


@dataclass(frozen=True)
class Conversation:
    """Checked turns. `id` is the hash of the messages, so the same words have the same id wherever they come from.

    `tools` are the functions that the conversation may call, as declared; part of the id where there are any.
    """

    id: str
    source: str
    row: int
    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class Sample:
    """Token ids [T] with a loss mask [T] of 0 and 1, which is 1 exactly in the spans [start, end) of `turns`.

    A span is what the target writes in one turn: the assistant's words and the end-of-turn token. It starts where the
    prompt, generation prompt included, ends.
    """

    id: str
    source: str
    input_ids: list[int]
    loss_mask: list[int]
    turns: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Loaded:
    """What `load` made of the sources. `counts`: source -> rows, unusable, duplicates, usable, used."""

    conversations: list[Conversation]
    rejected: list[Rejected]
    counts: dict[str, dict[str, int]] = field(default_factory=dict)


def make_sample(name: str, source: str, input_ids: list[int], turns: list[tuple[int, int]]) -> Sample:
    """A Sample whose loss mask follows from its `turns`; ValueError when spans overlap, are empty or do not fit."""
    mask = [0] * len(input_ids)
    last = 0
    for start, end in turns:
        if not last <= start < end <= len(input_ids):
            raise ValueError(f"sample {name}: turn [{start}, {end}) does not fit {len(input_ids)} tokens after {last}")
        mask[start:end] = [1] * (end - start)
        last = end
    return Sample(name, source, list(input_ids), mask, tuple((start, end) for start, end in turns))


def load(sources: list[str], samples: int, seed: int, regenerate: bool, *, allowed_bad_percent: float = 1.0,
         system_prompt: str | None = None, base: Path | None = None, listing: Path | None = None,
         sides: Sides | None = None) -> Loaded:
    """At most `samples` conversations from `sources`, taking turns between the sources until one runs out.

    Which ones is decided by a hash of `seed` and the content, so the same set comes on every machine, and a smaller
    number picks a subset of what a larger one picks. Conversations with the same content count once, for the first
    source. `sides` replaces the last ones where otherwise nothing would be held out, or too little.

    Raises:
        KitError: no such source; nothing usable; more than `allowed_bad_percent` of all rows unusable.
    """
    rejected: list[Rejected] = []
    counts: dict[str, dict[str, int]] = {}
    seen: set[str] = set()
    best: list[list[Conversation]] = []
    for source in dict.fromkeys(sources):
        count = counts[source] = dict.fromkeys(("rows", "unusable", "duplicates", "usable", "used"), 0)
        if sides is not None:
            sides.source()
        heap: list[tuple[int, str, Conversation]] = []  # the `samples` lowest hashes so far, the highest of them on top
        for number, row in rooms.rows(source, base):
            count["rows"] += 1
            try:
                messages = check_row(row, regenerate, system_prompt)
                tools = check_tools(row, regenerate)
            except Unfit as unfit:
                count["unusable"] += 1
                rejected.append(Rejected(source, number, unfit.field, unfit.reason))
                continue
            said = [messages, tools] if tools else messages
            name = _hash(json.dumps(said, ensure_ascii=False, sort_keys=True))
            if name in seen:
                count["duplicates"] += 1
                continue
            seen.add(name)
            count["usable"] += 1
            rank, conversation = int(_hash(f"{seed} {name}"), 16), Conversation(name, source, number, messages, tools)
            if sides is not None:
                sides.see(rank, conversation)
            heapq.heappush(heap, (-rank, name, conversation))
            if len(heap) > samples:
                heapq.heappop(heap)
        best.append([conversation for *_, conversation in sorted(heap, key=lambda entry: -entry[0])])
    if listing is not None:
        write_rejected(listing, rejected)
    check_share(len(rejected), sum(count["rows"] for count in counts.values()), rejected, allowed_bad_percent, listing)
    # First of each source, second of each source, ...: the order does not depend on `samples`.
    places = sorted((place, which) for which, of in enumerate(best) for place in range(len(of)))
    taken = [best[which][place] for place, which in places[:samples]]
    if not taken:
        raise KitError(f"dataset.sources: {', '.join(sources)} hold no usable conversation")
    if sides is not None:
        taken = sides.complete(taken)
    for source, used in Counter(conversation.source for conversation in taken).items():
        counts[source]["used"] = used
    return Loaded(taken, rejected, counts)


def split(conversations: list[Conversation], held_out_percent: float, seed: int
          ) -> tuple[list[Conversation], list[Conversation]]:
    """(train, held out). The side follows from `seed` and the first user turn alone, spaces and case aside.

    So conversations that begin alike are on one side, and more samples move nobody. Only where a side would be empty
    does the group of one opening nearest to it change sides (`Sides` lets that happen only where the sources themselves have
    nothing on it, and then to the same group in every rung). KitError when all conversations begin alike.
    """
    shares = {text: share(text, seed) for text in map(opening, conversations)}
    if len(shares) < 2:
        raise KitError(f"{len(conversations)} conversation(s) with {len(shares)} different first user turn(s) cannot "
                       f"be split into training and held out: use more sources or raise dataset.samples")
    held = {text for text, mine in shares.items() if mine < held_out_percent / 100}
    if not held:
        held = {min(shares, key=lambda text: (shares[text], text))}
    elif len(held) == len(shares):
        held.remove(max(shares, key=lambda text: (shares[text], text)))
    found: tuple[list[Conversation], list[Conversation]] = ([], [])
    for conversation in conversations:
        found[opening(conversation) in held].append(conversation)
    return found


def write_rejected(path: Path, rejected: list[Rejected]) -> None:
    """Publish rejected rows as JSON lines: source, row, field, reason."""
    write_bytes(path, "".join(json.dumps(vars(row), ensure_ascii=False) + "\n" for row in rejected).encode())


def require_both(train: list[Sample], held_out: list[Sample]) -> None:
    """KitError unless both sides have a sample: what a side's conversations held may all have been rejected."""
    for name, side in (("to train on", train), ("held out", held_out)):
        if not side:
            raise KitError(f"no sample is left {name}: its conversations were all rejected (see the table above); raise "
                           f"dataset.samples, dataset.max_length or dataset.held_out_percent")


def cut(sample: Sample, max_length: int) -> Sample:
    """`sample`, cut at the end to `max_length` tokens; Unfit when nothing supervised is left."""
    if len(sample.input_ids) > max_length:
        turns = tuple((start, min(end, max_length)) for start, end in sample.turns if start < max_length)
        sample = replace(sample, input_ids=sample.input_ids[:max_length], loss_mask=sample.loss_mask[:max_length],
                         turns=turns)
    if not sample.turns:
        raise Unfit("input_ids", f"the first {max_length} tokens (dataset.max_length) hold nothing of the answer")
    return sample


def write_samples(path: Path | str, samples: list[Sample]) -> None:
    """Publish `samples` as parquet: id, source, input_ids int32 [T], loss_mask int8 [T], turns int32 [n][2]."""
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.Table.from_pylist(
        [{**vars(sample), "turns": [list(turn) for turn in sample.turns]} for sample in samples], schema=_schema())
    with publish(path) as inner:
        pyarrow.parquet.write_table(table, inner, compression="zstd")


def read_samples(path: Path | str) -> list[Sample]:
    """The samples of a file that `write_samples` made; KitError names the file, and the row whose parts do not fit."""
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path, schema=_schema())
    except (OSError, pyarrow.ArrowException) as error:
        raise KitError(f"{path} is no file of samples: {error}; run the stage 02_dataset again") from None
    samples = []
    for number, row in enumerate(table.to_pylist(), 1):
        try:
            sample = make_sample(row["id"], row["source"], row["input_ids"], [tuple(turn) for turn in row["turns"]])
            fits = sample.loss_mask == row["loss_mask"]
        except (TypeError, ValueError):
            fits = False
        if not fits:
            raise KitError(f"{path} row {number}: ids, loss mask and turns do not fit; run the stage 02_dataset again")
        samples.append(sample)
    return samples


def _schema() -> Any:
    import pyarrow as pa

    return pa.schema([("id", pa.string()), ("source", pa.string()), ("input_ids", pa.list_(pa.int32())),
                      ("loss_mask", pa.list_(pa.int8())), ("turns", pa.list_(pa.list_(pa.int32())))])
