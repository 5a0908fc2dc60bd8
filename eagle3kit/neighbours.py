"""What the files of a folder say about each other: samples beside their manifest and data set, numbers that are missing,
the halves of a mapping. Headers and small files only; the numbers inside are `content`'s."""

import contextlib
import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from eagle3kit import files
from eagle3kit.arrow_rows import Rows, is_one
from eagle3kit.contracts import Contract
from eagle3kit.errors import KitError
from eagle3kit.faults import Fault, Unreadable

REMAKE = "extract the states of these samples again"
MOST_JSON = 256 << 20  # a manifest holds some hundred bytes a sample


class Seen(NamedTuple):
    """One sample's file among others: its number (None for another name) and what its headers say."""

    path: Path
    number: int | None
    contract: Contract


@dataclass
class Surroundings:
    """What lies beside the samples of one folder: `manifest` (empty without one), `rows` (None without a data set, or where
    its rows cannot be told; `data_set` is True for that one too)."""

    root: Path
    manifest: dict[str, Any]
    rows: Rows | None
    data_set: bool = False

    @property
    def layers(self) -> list[int] | None:
        """The auxiliary layer ids that the manifest names."""
        named = self.manifest.get("layers")
        return named if isinstance(named, list) and all(type(k) is int for k in named) else None


def around(folder: Path) -> tuple[Surroundings, list[Fault]]:
    """The surroundings of the samples in `folder`, and what is wrong with them. In the safetensors layout the manifest and
    the data set lie one folder up, beside `hidden_states/`."""
    root = folder.parent if folder.name == "hidden_states" else folder
    faults, manifest, rows = [], {}, None
    path = root / "manifest.json"
    if path.is_file():
        with contextlib.suppress(OSError):
            size = path.stat().st_size
            try:
                manifest = files.read_json(path) if size < MOST_JSON else {}
            except (KitError, UnicodeDecodeError, RecursionError, ValueError):
                manifest = []
        if not isinstance(manifest, dict):
            faults.append(Fault(str(path), "", "what the samples were made from", "it is not JSON",
                                "nobody knows layers and target of the samples", REMAKE))  # fmt: skip
            manifest = {}
    if is_one(root):
        rows = Rows(root)
        try:
            faults += rows.faults()
            rows = rows if rows.whole else None
        except Unreadable as error:
            faults.append(error.fault)
            rows = None
    return Surroundings(root, manifest, rows, is_one(root)), faults


def together(seen: Sequence[Seen], beside: Surroundings, whole: bool, unreadable: Collection[int] = ()) -> list[Fault]:
    """Faults of the samples of one folder as a set; `whole` when all of the folder was looked at, so that one can be missed.

    Each sample against manifest, data set and the most common shape; numbers without a file, but for those of files that
    cannot be read (`unreadable`), whose fault is told already.
    """
    found: list[Fault] = []
    said = beside.manifest
    lengths = said.get("lengths")
    if lengths is not None and (not isinstance(lengths, list) or any(type(length) is not int for length in lengths)):
        found.append(Fault(str(beside.root / "manifest.json"), "lengths", "a list of numbers of tokens", "something else",
                           "no sample can be held against it", REMAKE))  # fmt: skip
        lengths = None
    counted, source = lengths, "the manifest"
    if beside.rows is not None:
        counted, source = beside.rows.lengths(), f"row {{}} of the data set in {beside.root.name}"
        if lengths is not None and lengths != counted:
            found.append(Fault(str(beside.root / "manifest.json"), "lengths", "those of the data set beside it",
                               "others", "manifest and data set are of different runs", REMAKE))  # fmt: skip
    alone = [path for path, number, contract in seen
             if contract.kind == "states" and number is not None and path.parent.name == "hidden_states"]  # fmt: skip
    if alone and not beside.data_set:
        found.append(Fault(str(alone[0].parent), "loss_mask", "an Arrow data set one folder up, with input_ids and loss_mask",
                           f"there is none for {len(alone):,} files of states", "nobody knows which tokens to learn",
                           "put the data set back"))  # fmt: skip
    for path, number, contract in seen:
        if number is None:
            continue
        if counted is not None and number >= len(counted):
            has = "the manifest" if beside.rows is None else f"the data set in {beside.root.name}"
            found.append(Fault(str(path), "", f"numbers 0 to {len(counted) - 1}, as {has} has",
                               f"number {number}", "no trainer reads it", "remove it, or write the rest anew"))  # fmt: skip
        elif counted is not None and contract.tokens and counted[number] != contract.tokens:
            key = "token_ids" if contract.kind == "states" else "input_ids"
            found.append(Fault(str(path), key, f"{counted[number]}, as {source.format(number)} says", f"{contract.tokens} tokens",
                               "the states are of another run's tokens", REMAKE))  # fmt: skip
        found += _against_manifest(path, contract, beside)
    told = {fault.file for fault in found}
    found += [fault for fault in _odd(seen) if fault.file not in told]
    if whole:
        numbers = {number for _, number, _ in seen if number is not None}
        highest = len(counted) if counted is not None else max(numbers, default=-1) + 1
        wanted = said["samples"] if type(said.get("samples")) is int else highest
        found += _missing(numbers.union(unreadable), min(wanted, 10_000_000), seen)
    return found


def _odd(seen: Sequence[Seen]) -> list[Fault]:
    """Samples whose number of states, width or number type is not that of most."""
    found = []
    sound = [(path, contract) for path, _, contract in seen if not contract.faults]
    for key, of in (("states", lambda c: c.states), ("width", lambda c: c.width), ("layout", lambda c: c.signature)):
        counts = Counter(of(contract) for _, contract in sound)
        if len(counts) < 2:
            continue
        (most, times), *_ = counts.most_common(1)
        for path, contract in sound:
            if of(contract) != most:
                found.append(Fault(str(path), "" if key == "layout" else "hidden_states", f"{most} as in {times:,} others",
                                   f"{key} {of(contract)}",
                                   "samples of different runs are mixed", REMAKE))  # fmt: skip
        break  # one difference is enough said of a file
    return found


def _against_manifest(path: Path, contract: Contract, beside: Surroundings) -> Iterable[Fault]:
    place = str(path)
    if beside.layers is not None and contract.states and contract.states != len(beside.layers) + 1:
        few = "a final layer that was dropped?" if contract.states == len(beside.layers) else "layers of another run?"
        yield Fault(place, "hidden_states", f"{len(beside.layers) + 1}, for layers {beside.layers} and the last",
                    f"{contract.states} states", f"the draft reads other layers than it is told ({few})", REMAKE)  # fmt: skip
    width = beside.manifest.get("hidden_size")
    if type(width) is int and contract.width and contract.width != width:
        yield Fault(place, "hidden_states", f"{width}, as the manifest says", f"width {contract.width}",
                    "states of another model", REMAKE)  # fmt: skip


def _missing(numbers: set[int], wanted: int, seen: Sequence[Seen]) -> Iterable[Fault]:
    if not seen or not (numbers or wanted):
        return
    absent = list(itertools.islice((n for n in range(wanted) if n not in numbers), 6))
    if absent:
        count = wanted - len([n for n in numbers if n < wanted])
        others = f", and so are {count - 1:,} more (numbers {', '.join(map(str, absent[1:6]))}{', …' if count > 6 else ''})"
        first = next((path for path, number, _ in seen if number is not None), seen[0].path)
        name = "hs" if first.name.startswith("hs_") else "data"
        yield Fault(str(first.parent / f"{name}_{absent[0]}{first.suffix}"), "", f"samples 0 to {wanted - 1}",
                    "it is missing" + (others if count > 1 else ""), "the trainer stops there, or skips it in silence",
                    "run the stage that makes them: it goes on at the first missing one")  # fmt: skip


def tokens_differ(path: Path, number: int | None, ids: list[int], mask: list[int] | None, beside: Surroundings) -> list[Fault]:
    """The tokens inside a sample against its data set's row and its manifest's hash."""
    from eagle3kit.hidden_states import token_hash

    found = []
    if number is None:
        return found
    if beside.rows is not None and number < len(beside.rows):
        row_ids, row_mask = beside.rows.row(number)
        if ids != row_ids:
            place = next((n for n, (a, b) in enumerate(zip(ids, row_ids, strict=False)) if a != b), min(len(ids), len(row_ids)))
            found.append(Fault(str(path), "token_ids", f"the tokens of row {number} of the data set beside it",
                               f"others from place {place} on", "one sample's states under another's tokens: the draft learns "
                               "noise", REMAKE))  # fmt: skip
        elif mask is not None and mask != row_mask:
            found.append(Fault(str(path), "loss_mask", f"that of row {number} of the data set", "another",
                               "other tokens are learned than were prepared", REMAKE))  # fmt: skip
    hashes = beside.manifest.get("tokens")
    if isinstance(hashes, list) and number < len(hashes) and token_hash(ids) != hashes[number] and not found:
        found.append(Fault(str(path), "input_ids", "those of the manifest", "other tokens than the manifest says",
                           "one sample's states under another's tokens: the draft learns noise", REMAKE))  # fmt: skip
    elif mask is not None and not found:
        found += mask_differs(path, number, mask, beside.manifest)
    return found


def mask_differs(path: Path, number: int, mask: list[int], manifest: dict[str, Any]) -> list[Fault]:
    """A loss mask against the turns [begin, end) that the manifest names: [[2, 4]] of five tokens are 0 0 1 1 0."""
    turns = manifest.get("turns")
    spans = turns[number] if isinstance(turns, list) and number < len(turns) else None
    try:
        wanted = {place for begin, end in spans for place in range(begin, min(end, len(mask)))}
    except (TypeError, ValueError):
        return []  # a manifest that names none
    has = {place for place, value in enumerate(mask) if value}
    if has == wanted or not has or set(mask) - {0, 1}:  # of a mask without ones, or with other numbers, `content` tells
        return []
    first, late = min(has ^ wanted), {place + 1 for place in wanted if place + 1 < len(mask)}
    moved = ", all of it one token late" if has == late else ""
    return [Fault(str(path), "loss_mask", f"{len(wanted):,} supervised, the answers that the manifest names",
                  f"{len(has):,} supervised, first other at place {first}{moved}",
                  "tokens of the prompt are learned, or words of the answer are not", REMAKE)]  # fmt: skip
