"""A stage: one notebook's folder, its inputs, and the result.json that alone says it is done.

An executed notebook can claim success after its kernel was killed or a cell called sys.exit(0). So the last cell writes
result.json, last and whole: no file, no success.
"""

import datetime
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eagle3kit import fingerprint, places
from eagle3kit.errors import KitError
from eagle3kit.files import write_json
from eagle3kit.params import Params


def open_stage(name: str, namespace: dict[str, Any]) -> tuple[Params, "Stage"]:
    """The checked parameters of a notebook and its stage; to be called in the cell after the parameters cell.

    `name` is the notebook's own, without .ipynb; `namespace` is its globals(). Raises KitError for a parameter that is
    unknown, out of range, or sent but lost, and for a stage that has no notebook.
    """
    source = places.notebook(name)
    if not source.is_file():
        raise KitError(f"open_stage({name!r}): there is no {source}; use the notebook's own name")
    params = Params.from_namespace(namespace)
    return params, Stage(name, params, namespace.get("In", []))


class Stage:
    """The folder of one stage of one run: where it puts its files, what it takes from earlier stages, how it ends."""

    def __init__(self, name: str, params: Params, executed: list[str]):
        self.name = name
        self.dir = places.outputs() / params.run / name
        self.dir.mkdir(parents=True, exist_ok=True)
        self._params, self._executed = params, executed
        self._source = places.notebook(name)
        self._cells, self._code = fingerprint.cells(self._source), fingerprint.code_cells(self._source)
        self._inputs: dict[str, str] = {}
        self._files: dict[str, str] = {}
        self._runs: dict[str, str] | None = None
        self._runs_of: str | None = None
        self._started = time.monotonic()

    def file(self, name: str) -> Path:
        """A path in this stage's folder; its own folder is made if `name` has one."""
        path = self.dir / name
        if not path.resolve().is_relative_to(self.dir.resolve()):
            raise KitError(f"{self.name}: {name!r} lies outside the stage's folder {self.dir}; use a plain file name")
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def emptied(self, name: str) -> Path:
        """A folder in this stage's folder with nothing in it: what an earlier, broken-off run left there is removed."""
        path = self.file(name)
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        return path

    def result(self, stage: str) -> dict[str, Any]:
        """The result.json of an earlier stage of this run, noted as an input; KitError when that stage is not done."""
        done = fingerprint.result(self.dir.parent / stage)
        if done is None:
            known = sorted(path.stem for path in self._source.parent.glob("[0-9][0-9]_*.ipynb"))
            if stage not in known:
                raise KitError(f"{self.name} asks for {stage!r}, which is no notebook; there are: {', '.join(known)}")
            where = places.shown(self.dir.parent / stage / "result.json")
            raise KitError(
                f"{self.name} needs {stage}, which has not finished for the run {self._params.run!r} (no {where}). "
                f"Run it first: papermill notebooks/{stage}.ipynb out.ipynb -f PARAMS, with the same PARAMS file, "
                f"or eagle3kit run PARAMS --only {stage}"
            )
        self._inputs[stage] = done["id"]
        return done

    def input(self, stage: str, name: str) -> Path:
        """The path of a file that an earlier stage left, noted as an input; KitError when either is missing."""
        self.result(stage)
        path = self.dir.parent / stage / name
        if not path.exists():
            raise KitError(
                f"{self.name} needs {places.shown(path)}, but {stage} finished without it or it was removed; "
                f"run that stage again: eagle3kit run PARAMS --only {stage}"
            )
        return path

    def outside(self, path: Path | str) -> Path:
        """A file or folder from outside the run (a dataset, a template), noted by its content as an input.

        A relative path counts from the root. A missing file is noted as missing: saying so is the caller's part.
        """
        full = places.root() / Path(path).expanduser()
        self._files[str(full)] = fingerprint.file_state(full)
        return full

    def elsewhere(self, *names: str) -> list[Path]:
        """What this stage of other runs left under any of `names`, newest first. No input: what is taken from there is found by
        its content, and would be the same if it were made here."""
        found = [path for name in names for path in self.dir.parent.parent.glob(f"*/{self.name}/{name}")]
        return sorted((path for path in found if not path.is_relative_to(self.dir)),
                      key=lambda path: (path.stat().st_mtime, str(path)), reverse=True)  # fmt: skip

    def runs(self, only: str | None = None) -> dict[str, dict[str, dict[str, Any]]]:
        """All results of all runs, {run: {stage: result.json}}, noted as an input; those of the stage `only`, if named."""
        self._runs_of = only
        self._runs = fingerprint.runs(self.dir.parent.parent, self.name, only)
        found: dict[str, dict[str, dict[str, Any]]] = {}
        for place in self._runs:
            run, _, stage = place.partition("/")
            found.setdefault(run, {})[stage] = fingerprint.result(self.dir.parent.parent / run / stage) or {}
        return found

    def log(self, text: str) -> None:
        """One line to the notebook's output, and so to log.txt, at once."""
        print(text, flush=True)

    def progress(self, what: str, every_s: float = 10.0) -> Callable[[int, int], None]:
        """A function (done, of all) that logs a line now and then and at the end: `train: 40 of 180, 12 s`."""
        started, said = time.monotonic(), time.monotonic()

        def report(done: int, of: int) -> None:
            nonlocal said
            now = time.monotonic()
            if done == of or now - said >= every_s:
                said = now
                self.log(f"{what}: {done} of {of}, {now - started:.0f} s")

        return report

    def finish(self, headline: str, **numbers: Any) -> str:
        """Write result.json, whole and last, and return the headline.

        `numbers` are JSON data (numpy and torch scalars too); KitError names one that is not finite.
        """
        numbers = {name: _plain(f"{self.name}: {name}", value) for name, value in numbers.items()}
        if not headline.strip():
            raise KitError(f"{self.name}: finish() needs a headline, the one line a reader sees; it is empty")
        parts = {
            "cells": self._cells if self._ran_as_saved() else "edited: not every cell ran as it is saved",
            "params": self._params.reads(),
            "sources": fingerprint.sources(),
            "versions": fingerprint.versions(),
            "inputs": self._inputs,
            "runs": self._runs,
            "runs_of": self._runs_of,
            "files": self._files,
            "artefacts": fingerprint.artefacts(self.dir),
        }
        finished = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        data = {
            "stage": self.name,
            "run": self._params.run,
            "headline": headline,
            "numbers": numbers,
            "seconds": round(time.monotonic() - self._started, 2),
            "finished": finished,
            # Two runs of a stage differ even when they did the same: what follows was made from the other files.
            "id": fingerprint.digest([parts, finished, time.time_ns(), os.getpid()]),
            "fingerprint": parts,
            "provenance": {**_commit(places.root()), "versions": fingerprint.versions(), "machine": _machine()},
            "params": self._params.leaves(),
        }
        write_json(self.dir / "result.json", data)
        return headline

    def _ran_as_saved(self) -> bool:
        executed = {cell.strip() for cell in self._executed}
        return all(cell.strip() in executed for cell in self._code) and fingerprint.cells(self._source) == self._cells


def _plain(name: str, value: Any) -> Any:
    """`value` as JSON data: numpy and torch scalars become numbers, NaN and what JSON cannot hold become a KitError."""
    if isinstance(value, dict):
        return {str(key): _plain(f"{name}.{key}", inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(f"{name}[{place}]", inner) for place, inner in enumerate(value)]
    if not isinstance(value, (str, int, float, bool, type(None))):
        if not hasattr(value, "item") or getattr(value, "size", 1) == 0:
            raise KitError(f"{name} is a {type(value).__name__}: result.json holds numbers, text, lists and dicts")
        try:
            value = value.item()
        except (ValueError, RuntimeError):
            raise KitError(f"{name} is an array; give .tolist() or a summary of it") from None
    if isinstance(value, float) and not float("-inf") < value < float("inf"):
        raise KitError(f"{name} is {value}: a result must be a finite number; find out where it became {value}")
    return value


def _commit(root: Path) -> dict[str, Any]:
    """The commit the code is at and whether files differ from it; None for both outside a repository."""
    git = ["git", "-C", str(root), "status", "--porcelain=v2", "--branch", "--untracked-files=no"]
    try:
        lines = subprocess.run(git, capture_output=True, text=True, check=True, timeout=30).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return {"commit": None, "dirty": None}
    commit = next((line.split()[-1] for line in lines if line.startswith("# branch.oid")), None)
    return {"commit": commit, "dirty": any(not line.startswith("#") for line in lines)}


def visible_gpus(rows: list[Any], asked: str | None = None) -> list[Any]:
    """Of all GPUs of the machine, a row each, those that CUDA lets this process use (CUDA_VISIBLE_DEVICES, or `asked`, by number;
    where it names them otherwise, as many of the first). Numbers that are not there end the list, as they do for CUDA."""
    asked = os.environ.get("CUDA_VISIBLE_DEVICES") if asked is None else asked
    if asked is None:
        return rows
    names, kept = [name.strip() for name in asked.split(",") if name.strip()], []
    for place, name in enumerate(names):
        number = int(name) if name.lstrip("-").isdigit() else place
        if not 0 <= number < len(rows):
            break
        kept.append(rows[number])
    return kept


def _machine() -> dict[str, Any]:
    """What the stage ran on, without names: system, processor, cores it may use, memory in GiB, GPUs."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    gpus = []
    if shutil.which("nvidia-smi"):
        ask = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        # Exit code unheeded: a driver that does not answer means no GPU to name here.
        gpus = visible_gpus(subprocess.run(ask, capture_output=True, text=True, check=False).stdout.splitlines())
    return {
        "system": platform.system(),
        "processor": platform.machine(),
        "cores": cores,
        "memory_gib": round(memory, 1),
        "gpus": gpus,
    }
