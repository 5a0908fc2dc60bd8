"""What another run has made is taken, not made again: answers and hidden states, found by what they are made *from*.

So a rung of a thousand samples begins with what the rung of ten left, and nobody has to say where it lies. Nothing is taken on
trust: an answer is named by a hash of its target, decoding and prompt; states count only if their manifest names the same target,
layers, versions and number type, and if the file holds the same tokens and loss mask, whole.
"""

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3kit.errors import KitError
from eagle3kit.files import publish
from eagle3kit.hidden_states import token_hash
from eagle3kit.samples import Store, open_store

if TYPE_CHECKING:
    from eagle3kit.conversations import Sample


class Answers:
    """Answer files of other runs, as `regenerate.AnswerFile` writes them, looked through by key.

    Only where each answer lies is kept in memory: 100,000 answers of 2,000 tokens are a gigabyte of text.
    """

    def __init__(self, files: Sequence[Path]):
        self.taken: Counter[str] = Counter()  # by run
        self._places: dict[str, tuple[Path, int, int]] = {}
        for path in files:
            at = 0
            with open(path, "rb") as file:
                for line in file:
                    key = _key(line)
                    if key and key not in self._places:  # the first file named counts: the newest
                        self._places[key] = path, at, len(line)
                    at += len(line)

    def get(self, key: str) -> list[int] | None:
        """The token ids of the answer of that name, None where no run has a whole one."""
        if key not in self._places:
            return None
        path, at, size = self._places[key]
        try:
            with open(path, "rb") as file:
                file.seek(at)
                row = json.loads(file.read(size))
            ids = row["token_ids"] if row["key"] == key else None
        except (OSError, ValueError, KeyError, TypeError):
            return None
        if not isinstance(ids, list) or not all(type(token) is int and token >= 0 for token in ids):
            return None
        self.taken[run_of(path)] += 1
        return ids


def states(
    store: Store, wanted: dict[str, Any], samples: Sequence["Sample"], numbers: Sequence[int], folders: Sequence[Path],
    report: Callable[[int, int], None] | None = None,
) -> dict[int, str]:  # fmt: skip
    """{number: run} of the samples among `numbers` that a store in `folders` had, and that are in `store` now.

    They are hard links where both lie on one file system, and then take no room; copies otherwise. A file of samples is replaced,
    never changed, so that a link is as good as a copy. `wanted`: the manifest of `store`, which must have begun.

    Raises:
        OSError: the disk is full (copies); what was taken before stands.
    """
    places: dict[tuple[str, str], list[tuple[Store, int]]] = {}
    for folder in folders:
        try:
            other = open_store(folder)
            made = other.manifest()
            if other.layout != store.layout or not other.made_as(wanted):
                continue
            for number, name in enumerate(zip(made["tokens"], map(json.dumps, made["turns"]), strict=True)):
                places.setdefault(name, []).append((other, number))
        except (KitError, KeyError, TypeError, ValueError):  # a run of an older kit, or one that broke off: nothing to be had
            continue
    taken: dict[int, str] = {}
    for done, number in enumerate(numbers, 1):
        sample = samples[number]
        for other, there in places.get((token_hash(sample.input_ids), json.dumps([list(turn) for turn in sample.turns])), ()):
            if _whole(other, there, sample):
                with publish(store.path(number)) as inner:
                    _link(other.path(there), inner)
                taken[number] = run_of(other.folder)
                break
        if report is not None:
            report(done, len(numbers))
    return taken


def by_run(*taken: dict[int, str]) -> dict[str, int]:
    """How many samples each run gave, of what `states` returned."""
    return dict(Counter(run for one in taken for run in one.values()))


def run_of(path: Path) -> str:
    """The run that a file or folder of a stage belongs to: outputs/RUN/STAGE/NAME -> RUN."""
    return path.parent.parent.name


def _whole(store: Store, number: int, sample: "Sample") -> bool:
    """Whether a file is there, can be read, holds a row of states for each of these tokens, and this loss mask."""
    try:
        return store.holds(number, sample.input_ids, sample.loss_mask) and bool(store.read(number).states)
    except (KitError, OSError):
        return False


def _link(source: Path, place: Path) -> None:
    try:
        os.link(source, place)
    except OSError:  # another file system, or one that knows no hard links
        shutil.copyfile(source, place)


def _key(line: bytes) -> str | None:
    """The key of a whole line, found without reading its tokens."""
    start = b'{"key": "'
    if not (line.startswith(start) and line.endswith(b"]}\n")):
        return None
    return line[len(start) :].partition(b'"')[0].decode("ascii", "replace")
