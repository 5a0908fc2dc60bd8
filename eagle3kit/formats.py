"""Verdicts on artefacts: each file of a kind opened, checked against its manifest and its neighbours, faults named."""

import multiprocessing
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from eagle3kit import content, contracts, cpu, headers, neighbours, vocabulary
from eagle3kit.errors import KitError
from eagle3kit.faults import Fault
from eagle3kit.hidden_states import token_hash
from eagle3kit.samples import StatesSample, Store, load

if TYPE_CHECKING:
    from torch import Tensor

AGAIN = "run the stage 03_hidden_states again"
MOST_WORKERS, MANY = 16, 2000  # processes that look at samples at once; as many samples pay for their start
MOST_TOKENS = 1 << 24  # no vocabulary is larger; an id beyond is damage, and would cost memory to count


@dataclass(frozen=True)
class Verdict:
    """What was found of one kind: how many files and bytes, a summary, and every fault as one line."""

    kind: str
    files: int
    bytes: int
    summary: str
    faults: list[str] = field(default_factory=list)
    counted: "Tensor | None" = field(default=None, compare=False, repr=False)  # of samples: how often each token is supervised

    @property
    def word(self) -> str:
        """USABLE or BROKEN."""
        return "BROKEN" if self.faults else "USABLE"


def verdict_samples(kind: str, store: Store) -> Verdict:
    """Every sample of a store: readable, of the tokens that the manifest says, the right number and width of states, and all
    that `eagle3kit inspect` looks at, by the same rooms: the trainer meets no file that the inspector would refuse."""
    import torch

    said, faults, tokens, supervised, size = store.manifest(), [], 0, 0, 0
    counted = np.zeros(0, dtype=np.int64)
    for seen, found in _looks(store, said):
        faults += found
        if seen is not None:
            size += seen.bytes
            tokens += seen.tokens
            supervised += seen.supervised
            counted = _count(counted, seen.kept)
    summary = f"{tokens:,} tokens, {supervised:,} supervised; layers {said['layers']} and the last; {said['dtype']}"
    return Verdict(kind, said["samples"], size, summary, faults, torch.from_numpy(counted))


@dataclass(frozen=True)
class _Seen:
    """What is added up of one sample; `kept` are its supervised token ids."""

    bytes: int
    tokens: int
    supervised: int
    kept: np.ndarray


def _looks(store: Store, said: dict) -> Iterator[tuple[_Seen | None, list[str]]]:
    """`_look` at every sample, a core each. Many go to processes of their own: half of a look is Python, which threads do one at
    a time."""
    count, workers = said["samples"], min(MOST_WORKERS, len(cpu.cores()))
    if count >= MANY and workers > 1:
        with multiprocessing.get_context("spawn").Pool(workers, _begin, (store, said)) as pool:
            yield from pool.imap(_look_there, range(count), chunksize=32)
        return
    with cpu.one_thread():
        yield from (_look(store, said, number) for number in range(count))


_there: tuple[Store, dict] | None = None


def _begin(store: Store, said: dict) -> None:
    global _there
    import torch

    torch.set_num_threads(1)
    _there = store, said


def _look_there(number: int) -> tuple[_Seen | None, list[str]]:
    return _look(*_there, number)


def _look(store: Store, said: dict, number: int) -> tuple[_Seen | None, list[str]]:
    """One sample, None where it cannot be read, and what is wrong with it."""
    path = store.path(number)
    try:
        contract = contracts.recognise(headers.read(path))
        if contract is None or contract.faults:
            other = Fault("", "", "a sample", "other tensors", "the trainer stops at it", AGAIN)
            return None, [fault.at(path.name, AGAIN).line for fault in (contract.faults if contract else [other])]
        sample = store.read(number)
    except KitError as error:
        return None, [str(error)]
    found = [*_against(said, number, sample),
             *content.faults(content.Parts(sample.input_ids, sample.loss_mask, sample.states), path.name)]  # fmt: skip
    kept = sample.input_ids[sample.loss_mask != 0]
    kept = kept[:0].long() if kept.is_floating_point() else kept.long()  # a fault of its own
    seen = _Seen(path.stat().st_size, len(sample.input_ids), int(sample.loss_mask.sum()), kept.numpy())
    return seen, [fault.at(path.name, AGAIN).line for fault in found]


def _count(counted: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """`counted` with the supervised tokens `kept` of one more sample; as long as the highest of them needs."""
    if not kept.size or kept.min() < 0 or kept.max() >= MOST_TOKENS:
        return counted  # a fault of its own; the counts then do not fit either
    more = np.bincount(kept, minlength=len(counted))
    more[: len(counted)] += counted
    return more


def _against(said: dict, number: int, sample: StatesSample) -> list[Fault]:
    """One sample against its manifest: tokens, number of states, width."""
    states, width = len(said["layers"]) + 1, said["hidden_size"]
    shapes = {tuple(state.shape) for state in sample.states}
    checks = [
        (token_hash(sample.input_ids.tolist()) == said["tokens"][number], "input_ids", "other tokens than the manifest says",
         "those of the stage 02_dataset", "states under other tokens than theirs"),
        (len(sample.states) == states, "hidden_states", f"{len(sample.states)} states, the manifest says {states}",
         f"layers {said['layers']} and the last", "the draft reads other layers than it is told"),
        (shapes == {(len(sample.input_ids), width)}, "hidden_states", f"shapes {sorted(shapes)}", f"width {width}",
         "states of another model"),
    ]  # fmt: skip
    wrong = [Fault("", key, expected, found, causes, AGAIN) for right, key, found, expected, causes in checks if not right]
    return wrong or neighbours.mask_differs(Path(""), number, sample.loss_mask.tolist(), said)


def verdict_mapping(kind: str, folder: Path, store: Store, counted: "Tensor | None" = None) -> Verdict:
    """token_freq, t2d and d2t: one mapping, of the vocabulary that the samples' tokens come from, frequencies their own.

    `counted`: what `verdict_samples` counted of the same store, so that no sample is read twice; None: counted here.
    """
    import torch

    paths = [folder / f"{name}.pt" for name in ("token_freq", "t2d", "d2t")]
    size = sum(path.stat().st_size for path in paths if path.exists())
    try:
        t2d, d2t = vocabulary.read(folder)
        freq = load(paths[0]).get("")
    except KitError as error:
        return Verdict(kind, len(paths), size, "unreadable", [str(error)])
    faults = []
    if freq is None:
        fault = f"{paths[0]} must hold one tensor; run the stage 04_vocabulary again"
        return Verdict(kind, len(paths), size, "unreadable", [fault])
    if freq.shape != t2d.shape:
        faults.append(f"token_freq.pt: {list(freq.shape)} beside t2d {list(t2d.shape)}; run the stage 04_vocabulary again")
    else:
        rows = (store.read(number) for number in range(store.manifest()["samples"]))  # one at a time: each is a mapped file
        try:
            if counted is None:
                counted = vocabulary.count_tokens(((row.input_ids, row.loss_mask) for row in rows), freq.numel())
            mine = torch.zeros(max(len(counted), len(freq)), dtype=torch.int64)
            mine[: len(counted)] = counted
            if not torch.equal(mine, freq):
                faults.append("token_freq.pt: not the counts of the training samples; run the stage 04_vocabulary again")
        except KitError as error:
            faults.append(f"token_freq.pt: could not be compared with the samples: {error}")
    summary = f"{len(d2t):,} of {len(t2d):,} tokens, offsets up to {int(d2t.max()):,}; {int((freq > 0).sum()):,} tokens seen"
    return Verdict(kind, len(paths), size, summary, faults)


def columns(path: Path) -> list[dict[str, object]]:
    """A row a column of a parquet file: name, type, rows, bytes on disk."""
    import pyarrow.parquet

    file = pyarrow.parquet.ParquetFile(path)
    groups = [file.metadata.row_group(number) for number in range(file.metadata.num_row_groups)]
    sizes: dict[str, int] = {}
    for group in groups:
        for number in range(group.num_columns):
            column = group.column(number)
            name = column.path_in_schema.partition(".")[0]
            sizes[name] = sizes.get(name, 0) + column.total_compressed_size
    return [{"column": field.name, "type": str(field.type), "rows": file.metadata.num_rows, "bytes": sizes.get(field.name, 0)}
            for field in file.schema_arrow]  # fmt: skip


def require_usable(verdicts: list[Verdict]) -> None:
    """KitError with the first faults unless every verdict is USABLE."""
    faults = [fault for verdict in verdicts for fault in verdict.faults]
    if faults:
        raise KitError(f"{len(faults)} faults, so training would not start from what was meant:\n" + "\n".join(faults[:10]))
