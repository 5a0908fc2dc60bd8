"""From one layout of samples to another, and from one convention of a mapping to the other, without losing a bit.

    samples    --to pt | pt-v0 | safetensors    the layouts of `samples`; back and forth gives the same tensors, byte for byte
    mappings   --to offsets | absolute          see `mapping`; pt | npy: the container, t2d.pt or t2d-{D}.npy

What a file does not say is not made up. Files of speculators 0.3 and 0.4 name no layers: whoever converts them states the ids,
by either convention, and the manifest records what was stated:
    layers_after [2, 15, 27]    captured *after* layer k (0.3 and 0.4, custom_worker.py), so vLLM's ids are k + 1: [3, 16, 28]
    layers [3, 16, 28]          vLLM's own: what *enters* layer k
A conversion that stops goes on where it stopped: the same call, and samples that are there, whole, of these tokens, stay.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3kit import content, mapping, neighbours
from eagle3kit.contracts import CONVERT
from eagle3kit.errors import KitError
from eagle3kit.file_walk import Found, walk
from eagle3kit.files import publish
from eagle3kit.samples import Layout, StatesSample, Store, load

if TYPE_CHECKING:
    from torch import Tensor

SAMPLES, MAPPINGS = ("pt", "pt-v0", "safetensors"), ("offsets", "absolute", "pt", "npy")
Progress = Callable[[Iterable[Any], int], Iterable[Any]]


@dataclass(frozen=True)
class Done:
    """What a conversion left: where, how many files were written and how many stood already, and what was taken as stated."""

    destination: Path
    written: int
    stood: int
    said: str


def convert(
    source: Path, destination: Path, to: str, *, layers: Sequence[int] | None = None, layers_after: Sequence[int] | None = None,
    lossy: bool = False, progress: Progress | None = None,
) -> Done:  # fmt: skip
    """Write the samples or the mapping in `source` (a folder, or a mapping's file) anew in `destination`, `to` a layout.

    `layers` or `layers_after` state the auxiliary layer ids where no manifest does. `lossy` lets 8-bit states be widened.

    Raises:
        KitError: nothing to convert; something that `source` does not say and nobody stated; a step that would lose bits; a
            destination that holds other things. Nothing that is there is removed.
    """
    if destination.resolve() == source.resolve() or source.resolve() in destination.resolve().parents:
        place = "is the source itself" if destination.resolve() == source.resolve() else f"lies in {source}"
        raise KitError(f"{destination} {place}, which would be read while it is written; name another folder")
    found = walk([source])
    if found.samples and to in SAMPLES:
        if source.is_file():
            raise KitError(f"{source} is one sample of a folder; name the folder, whose samples are converted together")
        return _samples(source, found, destination, to, layers, layers_after, lossy, progress)
    if found.mappings and to in MAPPINGS:
        return _mappings(source, found, destination, to)
    if not found.samples and not found.mappings:
        why = f": {found.broken[0].line}" if found.broken else "; `eagle3kit inspect` says what it is"
        raise KitError(f"{source} holds neither samples nor a mapping that can be read{why}")
    has, right = ("samples", SAMPLES) if found.samples else ("a mapping", MAPPINGS)
    raise KitError(f"{source} holds {has}, not to be turned into {to!r}; choose one of {', '.join(right)}")


# ---- Samples


def _samples(source: Path, found: Found, destination: Path, to: Layout, layers: Sequence[int] | None,
             layers_after: Sequence[int] | None, lossy: bool, progress: Progress | None) -> Done:  # fmt: skip
    """Every sample of one folder; the samples of several folders are of several runs, and are refused."""
    if found.broken:
        raise KitError(f"{found.broken[0].line}. Nothing was converted")
    if len(found.samples) > 1:
        listed = ", ".join(map(str, list(found.samples)[:3]))
        raise KitError(f"{source} holds samples in {len(found.samples)} folders ({listed}); convert one at a time")
    ((folder, seen),) = found.samples.items()
    beside, faults = neighbours.around(folder)
    faults += [fault for one in seen for fault in one.contract.faults if fault.way_out != CONVERT]
    faults += neighbours.together(seen, beside, whole=True)
    if faults:
        more = f" ({len(faults) - 1} more: `eagle3kit inspect` lists them)" if len(faults) > 1 else ""
        raise KitError(f"{faults[0].line}{more}. Nothing was converted")
    unnamed = next((one.path for one in seen if one.number is None), None)
    if unnamed is not None:
        raise KitError(f"{unnamed} has no number in its name (data_N.pt, hs_N.safetensors), so its place among the samples is "
                       "unknown; name it so first")  # fmt: skip
    fp8 = next((one.path for one in seen if "fp8" in one.contract.version), None)
    if fp8 is not None and not lossy:
        raise KitError(f"{fp8} holds 8-bit states: as bfloat16 they take twice the room and stay as coarse, and the way back is "
                       "not exact; add --lossy if that is what you want")  # fmt: skip
    first = content.take_apart(load(seen[0].path), seen[0].path).states
    ids, stated = _layers(beside, len(first), layers, layers_after, folder)
    tokens, masks, dtypes = _rows(seen, beside)
    made = _manifest(beside, seen, tokens, masks, ids, stated, dtypes) | {"hidden_size": first[0].shape[1]}
    store = Store(destination, to)
    _room_for(store, made)
    before = {number for number in range(len(seen)) if store.made_as(made) and store.holds(number, tokens[number])}
    store.begin(tokens, masks, made)
    for one in progress(seen, len(seen)) if progress else seen:
        if one.number not in before:
            store.write(one.number, _sample(one, masks[one.number], made, to))
    return Done(destination, len(seen) - len(before), len(before), stated)


def _layers(beside: neighbours.Surroundings, states: int, layers: Sequence[int] | None, after: Sequence[int] | None,
            folder: Path) -> tuple[list[int], str]:  # fmt: skip
    """(vLLM's ids, the sentence that says where they come from)."""
    if layers is not None and after is not None:
        raise KitError("--layers and --layers-after state the same thing by two conventions; give one")
    named = beside.layers
    if named is not None:
        ids, said = named, f"layers {named} as the manifest of the source names them"
        mine = list(layers) if layers is not None else [k + 1 for k in after] if after is not None else named
        if mine != named:
            raise KitError(f"{beside.root / 'manifest.json'} names layers {named}, which are not those stated ({mine}); one of "
                           "the two is wrong")  # fmt: skip
    elif layers is not None:
        ids, said = list(layers), f"layers {list(layers)} as stated: what enters layer k (vLLM's convention)"
    elif after is not None:
        ids = [k + 1 for k in after]
        said = f"layers {ids}: stated as captured after {list(after)} (speculators 0.3 and 0.4), so vLLM's ids are one higher"
    else:
        raise KitError(f"{folder}: no manifest names the layers of these states, and the files do not. State them: "
                       "--layers-after 2,15,27 for files of speculators 0.3 and 0.4, which count what leaves a layer (its "
                       "defaults for n layers are 2, n/2, n-3), or --layers 3,16,28 in vLLM's counting of what enters one")
    if len(ids) != states - 1:
        raise KitError(f"{folder}: {states} states a token, so {states - 1} auxiliary layers and the last; {len(ids)} ids were "
                       f"named ({ids}); name the auxiliary ones only")  # fmt: skip
    if ids != sorted(set(ids)) or any(k < 0 for k in ids):
        raise KitError(f"layers {ids} must rise without doubles, from 0 on: the states lie in that order")
    return ids, said


def _rows(seen: Sequence[neighbours.Seen], beside: neighbours.Surroundings) -> tuple[list[list[int]], list[list[int]], dict]:
    """Tokens and masks of every sample, and the number types they were stored in."""
    tokens, masks, kinds = [], [], set()
    for one in seen:
        parts = content.take_apart(load(one.path), one.path)
        row = beside.rows.row(one.number) if beside.rows is not None else None
        if parts.mask is None and row is None:
            raise KitError(f"{one.path} holds no loss mask and no Arrow data set lies beside it, so nobody knows which tokens "
                           "are supervised; put the data set (input_ids, loss_mask, seq_len) one folder up")
        mask = parts.mask.long().tolist() if parts.mask is not None else row[1]
        if row is not None and row[0] != parts.ids.tolist():
            raise KitError(f"{one.path}, key token_ids: not the tokens of row {one.number} of the data set beside it; nothing "
                           "was converted")  # fmt: skip
        tokens.append(parts.ids.tolist())
        masks.append(mask)
        kinds.add((_type(parts.ids), "int64" if parts.mask is None else _type(parts.mask)))
    if len(kinds) > 1:
        raise KitError(f"{seen[0].path.parent}: number types of input_ids and loss_mask differ between samples "
                       f"({sorted(kinds)}); they would not come back as they were")  # fmt: skip
    ids, mask = kinds.pop()
    earlier = beside.manifest.get("stored_as")
    if isinstance(earlier, dict) and seen[0].contract.kind == "states":  # a conversion to this layout widened them
        ids, mask = str(earlier.get("input_ids", ids)), str(earlier.get("loss_mask", mask))
    return tokens, masks, {"input_ids": ids, "loss_mask": mask}


def _type(tensor: "Tensor") -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _manifest(beside: neighbours.Surroundings, seen: Sequence[neighbours.Seen], tokens: list[list[int]], masks: list[list[int]],
              ids: list[int], stated: str, dtypes: dict[str, str]) -> dict[str, Any]:  # fmt: skip
    """The source's own manifest, with what its files are now and what was stated when they were converted."""
    from eagle3kit.hidden_states import CONVENTION, token_hash

    files = hashlib.sha256()
    for one in seen:
        about = one.path.stat()
        files.update(f"{one.path.name} {about.st_size} {about.st_mtime_ns}\n".encode())
    kept = {key: value for key, value in beside.manifest.items() if key not in ("layout", "samples", "converted")}
    turns = [_turns(mask) for mask in masks]
    return {
        "target": None, "revision": None, "last": None, **kept,
        "layers": ids, "convention": CONVENTION,
        "lengths": [len(row) for row in tokens], "tokens": [token_hash(row) for row in tokens],
        "sources": kept.get("sources", ["converted"] * len(seen)), "turns": kept.get("turns", turns), "stored_as": dtypes,
        "converted": {"from": seen[0].contract.version, "stated": stated, "files": files.hexdigest()[:16],
                      "earlier": beside.manifest.get("converted")},
    }  # fmt: skip


def _turns(mask: Sequence[int]) -> list[list[int]]:
    """[begin, end) of each run of ones: [0 1 1 0 1] has [1, 3] and [4, 5]."""
    pairs = enumerate(zip([0, *mask], [*mask, 0], strict=True))
    edges = [place for place, (before, after) in pairs if bool(before) != bool(after)]
    return [list(pair) for pair in zip(edges[::2], edges[1::2], strict=True)]


def _room_for(store: Store, made: dict[str, Any]) -> None:
    """KitError when the destination holds anything but an earlier part of this very conversion."""
    if not store.folder.exists() or store.made_as(made):
        return
    other: Path | None = store.folder
    if store.folder.is_dir():
        other = next((path for path in store.folder.rglob("*") if path.is_file()), None)
    if other is not None:
        raise KitError(f"{store.folder} holds something else already ({other.name}); name an empty folder")


def _sample(one: neighbours.Seen, mask: list[int], made: dict[str, Any], to: Layout) -> StatesSample:
    import torch

    inside = load(one.path)
    if "hidden_states_scales" in inside:
        from hs_connectors.fp8_utils import dequantize_fp8_tensor

        inside["hidden_states"] = dequantize_fp8_tensor(inside["hidden_states"], inside["hidden_states_scales"])
    parts = content.take_apart(inside, one.path)
    if to == "safetensors":  # the trainer compares its token_ids with the data set's, which are int64
        return StatesSample(parts.ids.long(), torch.tensor(mask), parts.states)
    stored = made["stored_as"]
    ids = parts.ids.to(getattr(torch, stored["input_ids"])).clone()
    masked = parts.mask if parts.mask is not None else torch.tensor(mask)
    return StatesSample(ids, masked.to(getattr(torch, stored["loss_mask"])).clone(), parts.states)


# ---- Mappings


def _mappings(source: Path, found: Found, destination: Path, to: str) -> Done:
    """t2d, d2t and token_freq of one folder; a d2t turns only when it is proven what it holds."""
    if len(found.mappings) > 1:
        raise KitError(f"{source} holds mappings in {len(found.mappings)} folders; convert one at a time")
    ((folder, parts),) = found.mappings.items()
    for kind, rows in parts.items():
        if len(rows) > 1:
            listed = ", ".join(path.name for path, _ in rows[:3])
            raise KitError(f"{folder} holds {len(rows)} files of kind {kind} ({listed}); name a folder with one of each")
        if rows[0][1].faults:
            raise KitError(f"{rows[0][1].faults[0].line}. Nothing was converted")
    paths = {kind: rows[0][0] for kind, rows in parts.items()}
    half = paths["d2t"].with_name(paths["d2t"].name.replace("d2t", "t2d")) if "d2t" in paths else None
    if "t2d" not in paths and half is not None and half != paths["d2t"] and half.is_file():
        paths["t2d"] = half
    tensors = {kind: mapping.read(path, kind) for kind, path in paths.items()}
    said = f"the same numbers as {to}"
    if "d2t" in tensors:
        proof = mapping.prove(tensors["d2t"], tensors.get("t2d"))
        if proof.convention == "neither" or (proof.convention == "unproven" and to in ("offsets", "absolute")):
            raise KitError(f"{paths['d2t']}: {proof.said}; nothing was converted. Put its t2d beside it")
        if to in ("offsets", "absolute") and proof.convention != to:
            tensors["d2t"] = mapping.turned(tensors["d2t"], to)
        said = f"it held {proof.convention}: {proof.said}"
    elif to in ("offsets", "absolute"):
        raise KitError(f"{source} holds no d2t, so there is no convention to convert")
    return _write_mapping(tensors, paths, destination, to, said)


def _write_mapping(tensors: "dict[str, Tensor]", paths: dict[str, Path], destination: Path, to: str, said: str) -> Done:
    import numpy
    import torch

    size = len(tensors["d2t"]) if "d2t" in tensors else int(tensors["t2d"].sum()) if "t2d" in tensors else 0
    same = ".npy" if next(iter(paths.values())).suffix == ".npy" else ".pt"
    suffix = {"npy": ".npy", "pt": ".pt"}.get(to, same)
    written = 0
    for kind, tensor in tensors.items():
        sized = suffix == ".npy" and size and kind != "token_freq"  # as speculators names them
        path = destination / f"{kind}{f'-{size}' if sized else ''}{suffix}"
        if path.exists():
            if torch.equal(mapping.read(path, kind), tensor):
                continue
            raise KitError(f"{path} is there already and holds something else; name an empty folder")
        with publish(path) as inner, open(inner, "wb") as file:
            numpy.save(file, tensor.numpy(), allow_pickle=False) if suffix == ".npy" else torch.save(tensor, file)
        written += 1
    return Done(destination, written, len(tensors) - written, said)
