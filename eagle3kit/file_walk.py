"""Which files of this field lie under the paths that somebody names: sorted by what their headers say, not by their names."""

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eagle3kit import arrow_rows, contracts, contracts_draft, headers
from eagle3kit.errors import KitError
from eagle3kit.faults import Fault, Unreadable
from eagle3kit.neighbours import Seen

TENSOR_FILES = (".pt", ".pth", ".ckpt", ".npy", ".safetensors")
Progress = Callable[[Iterable[Any], int], Iterable[Any]]


@dataclass
class Found:
    """What a walk found: samples by folder, parts of mappings by folder, drafts, data sets; which folders were walked; what is
    broken, and `loose` weights of drafts without their config."""

    samples: dict[Path, list[Seen]] = field(default_factory=dict)
    mappings: dict[Path, dict[str, list[tuple[Path, contracts.Contract]]]] = field(default_factory=dict)
    drafts: list[Path] = field(default_factory=list)
    datasets: list[Path] = field(default_factory=list)
    walked: set[Path] = field(default_factory=set)
    passed: Counter = field(default_factory=Counter)
    broken: list[Fault] = field(default_factory=list)
    loose: list[Fault] = field(default_factory=list)
    looked_at: set[Path] = field(default_factory=set)


def walk(paths: Sequence[Path | str], progress: Progress | None = None) -> Found:
    """Sort the files that `paths` name, by their headers. Folders are walked to the bottom, links followed once, hidden names
    left out."""
    import glob

    found = Found()
    for given in paths:
        path = Path(given)
        if not os.path.lexists(path) and any(letter in str(path) for letter in "*?["):
            named = sorted(map(Path, glob.glob(str(path), recursive=True)))
            if not named:
                raise KitError(f"{path}: no file has such a name")
        elif not os.path.lexists(path):
            raise KitError(f"{path} does not exist; name a file, a folder or a pattern")
        else:
            named = [path]
        for one in named:
            if one.is_dir():
                _folder(one, found, progress)
            else:
                _file(one, found, asked=True)
    for seen in found.samples.values():
        seen.sort(key=lambda one: (one.number is None, one.number or 0, one.path))
    return found


def _folder(top: Path, found: Found, progress: Progress | None) -> None:
    places: set[tuple[int, int]] = set()

    def closed(error: OSError) -> None:
        found.broken.append(Fault(str(error.filename), "", "a folder that can be read", str(error.strerror), "", "allow it"))

    for folder, inner, names in os.walk(top, followlinks=True, onerror=closed):
        place = os.stat(folder)
        if (place.st_dev, place.st_ino) in places:  # a link that leads back up
            inner.clear()
            continue
        places.add((place.st_dev, place.st_ino))
        here = Path(folder)
        inner[:] = sorted(name for name in inner if not name.startswith("."))
        names = [name for name in sorted(names) if not name.startswith(".")]
        found.walked.add(here)
        if contracts_draft.config_of(here) is not None:
            found.drafts.append(here)
            found.passed.update(Path(name).suffix or name for name in names if not contracts_draft.OWN.fullmatch(name))
            continue
        if arrow_rows.is_one(here):
            found.datasets.append(here)
            names = [name for name in names if not name.endswith(".arrow") and name not in ("state.json", "dataset_info.json")]
        for name in progress(names, len(names)) if progress and len(names) > 1000 else names:
            _file(here / name, found, asked=False)


def _file(path: Path, found: Found, asked: bool) -> None:
    if path in found.looked_at:
        return
    found.looked_at.add(path)
    if path.suffix not in TENSOR_FILES and not asked:
        found.passed[path.suffix or path.name] += 1
        return
    if asked and contracts_draft.OWN.fullmatch(path.name) and contracts_draft.config_of(path.parent):
        if path.parent not in found.drafts:
            found.drafts.append(path.parent)
        return
    try:
        seen = headers.read(path)
        contract = contracts.recognise(seen)
    except Unreadable as error:
        if path.suffix in TENSOR_FILES or "it wants to run" in error.fault.found or not path.is_file():
            found.broken.append(error.fault)
        else:
            found.passed[path.suffix or path.name] += 1
        return
    if contract is None and contracts_draft.is_loose(seen):
        state = "a config.json that is none" if (path.parent / contracts_draft.CONFIG).is_file() else "no config.json"
        found.loose.append(Fault(str(path), "", "an EAGLE-3 draft's config.json beside it", f"weights of a draft beside {state}",
                                 "nobody knows their sizes, layers and flags", "put the config that came with them back"))
    elif contract is None:
        found.passed[path.suffix or path.name] += 1
    elif contract.kind in ("sample", "states"):
        small = contracts.Contract(contract.kind, sys.intern(contract.version), contract.tokens, contract.states,
                                   contract.width, sys.intern(contract.signature), contract.faults)  # fmt: skip
        found.samples.setdefault(path.parent, []).append(Seen(path, contracts.number(path), small))
    else:
        for kind in contracts.MAPPING if contract.kind == "mapping" else (contract.kind,):
            if contract.kind != "mapping" or kind in contract.signature:
                found.mappings.setdefault(path.parent, {}).setdefault(kind, []).append((path, contract))
