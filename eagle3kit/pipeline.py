"""The headless pass: each notebook in order through papermill, skipping what still holds, stopping at what fails.

One papermill child per notebook, so that memory and GPUs are free between stages. A stage has succeeded when papermill
exits with 0 *and* the notebook wrote result.json: papermill alone calls a killed kernel's cells "completed", and takes
sys.exit(0) in a cell for a good end. Stages run one at a time: parallel kernels race for ports.
"""

import contextlib
import difflib
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from eagle3kit import fingerprint, params_text, places, processes, rungs
from eagle3kit.errors import KitError
from eagle3kit.files import read_json, write_bytes, write_json
from eagle3kit.kernel import check_kernel
from eagle3kit.params import Params

MEASURED = "08_acceptance"  # the stage whose numbers a pass ends with
DEAD_KERNEL = 138  # papermill's exit code for it

QUIET = {
    "PYTHONUNBUFFERED": "1",  # log.txt grows while a cell runs
    "PYDEVD_DISABLE_FILE_VALIDATION": "1",  # no debugger warning in front of every log
    "TOKENIZERS_PARALLELISM": "false",  # tokenizers warn and stall when a process that used threads forks
    "VLLM_NO_USAGE_STATS": "1",  # vLLM and Hugging Face report usage unless told not to
    "DO_NOT_TRACK": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}


@dataclass(frozen=True)
class Failure:
    """Why a stage did not finish: one line for a person, and the exit code of the whole pass."""

    cause: str
    code: int


def stages() -> list[str]:
    """The names of all stages in order: the notebooks whose names begin with two digits."""
    folder = places.root() / "notebooks"
    found = sorted(path.stem for path in folder.glob("[0-9][0-9]_*.ipynb"))
    if not found:
        raise KitError(f"no notebooks named NN_*.ipynb in {folder}")
    return found


def find_stage(word: str) -> str:
    """The stage that `word` names: whole, by number or by word ("06_training", "06", "training")."""
    known = stages()
    names = {key: name for name in known for key in (name, name[:2], name[:2].lstrip("0") or "0", name[3:])}
    if word not in names:
        near = difflib.get_close_matches(word, names, 1)
        raise KitError(
            f"no stage {word!r}; " + (f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(known)}")
        )
    return names[word]


def run(file: Path | str, overrides: dict[str, str], *, first: str | None = None, only: str | None = None) -> int:
    """Run a parameter file's stages, printing one line each; return the exit code for the shell.

    `first` runs that stage and the later ones, `only` that one, even where the result still holds. 0: every stage is
    done and the report is written. Raises KitError for what is wrong before the first stage.

    Where `overrides` name `dataset.samples` and no run, this is a rung of the file's run and has a folder of its own.
    """
    params = Params.load(file, overrides)
    if own := rungs.own_run(file, overrides):
        params = Params.load(file, overrides | {"run": own})
        print(f"run {own}: a rung with {params.dataset.samples:,} samples (-p run=NAME names another folder)", flush=True)
    names = stages()
    forced: set[str] = set()
    if only is not None:
        chosen = [find_stage(only)]
        forced = set(chosen)
    else:
        chosen = names if first is None else names[names.index(find_stage(first)) :]
        forced = set() if first is None else set(chosen)
    folder = places.outputs() / params.run
    try:
        with processes.lock(folder / ".lock") as held, processes.stopping_on_signals():
            return _Pass(params, names, folder, held).go(chosen, forced)
    except BlockingIOError as other:
        raise KitError(
            f"process {other} is already writing {places.shown(folder)}; wait for it, stop it (kill {other}), "
            "or use another folder: -p run=NAME"
        ) from None


class _Pass:
    """One pass over the stages of one run."""

    def __init__(self, params: Params, names: list[str], folder: Path, held: int):
        self.params, self.names, self.folder, self.held = params, names, folder, held
        self.timing: list[dict[str, Any]] = []
        self.report_error: str | None = None
        self.params_changed = False

    def go(self, chosen: list[str], forced: set[str]) -> int:
        started = time.monotonic()
        try:
            # Before the parameters are replaced: a pass that cannot start leaves the run as it was.
            if self._needed(chosen, forced):
                check_kernel()
            for name, why in self._stale_before(chosen).items():
                print(f"note: {name} is not current ({why}); its results are used as they are", flush=True)
            self._write_params()
            failure = None
            for name in chosen:
                failure = self._stage(name, name in forced)
                if failure is not None:
                    break
            self._close(started)
            # Only a measurement of what is there now is an answer.
            answered = failure is None and not (self._has(MEASURED) and self._stale(MEASURED))
            last = summary(self.folder) if answered else _report_line(self.folder)
            print(last, flush=True)
            return failure.code if failure else 1 if self.report_error else 0
        except processes.Stopped as stopped:
            processes.kill_all()
            print(f"stopped by {_signal(stopped.number)}; the stages before it stand, run again to go on", flush=True)
            return 128 + stopped.number

    def _has(self, name: str) -> bool:
        return name in self.names and (self.folder / name / "result.json").is_file()

    def _stale_before(self, chosen: list[str]) -> dict[str, str]:
        """Finished stages before the chosen ones that no longer fit the parameters or the code, and why."""
        before = [name for name in self.names[: self.names.index(chosen[0])] if self._has(name)]
        return {name: why for name in before if (why := self._stale(name))}

    def _write_params(self) -> None:
        path, data = self.folder / "params.yaml", params_text.write(self.params).encode()
        self.params_changed = not path.exists() or path.read_bytes() != data
        write_bytes(path, data)

    def _needed(self, chosen: list[str], forced: set[str]) -> bool:
        return bool(forced) or any(self._stale(name) for name in chosen)

    def _stale(self, name: str) -> str | None:
        return fingerprint.stale(self.folder / name, self.params, places.notebook(name))

    def _stage(self, name: str, forced: bool) -> Failure | None:
        place, done = self.folder / name, None
        why = self._stale(name)
        line = f"[{self.names.index(name) + 1}/{len(self.names)}] {name}  "
        if why is None and not forced:
            done = fingerprint.result(place)
            print(f"{line}current, skipped  {done['headline']}", flush=True)
            self.timing.append({"stage": name, "skipped": True, "seconds": 0.0, "inside_seconds": 0.0})
            return None
        again = why is not None and (place / "result.json").exists()
        print(f"{line}({why})  " if again else line, end="", flush=True)
        started = time.monotonic()
        failure = self._execute(name, place)
        seconds = time.monotonic() - started
        done = fingerprint.result(place)
        inside = done["seconds"] if done else round(seconds, 2)
        self.timing.append({"stage": name, "skipped": False, "seconds": round(seconds, 2), "inside_seconds": inside})
        if failure is None:
            print(f"done in {_clock(seconds)}  {done['headline']}", flush=True)
        else:
            log = places.shown(place / "log.txt")
            print(f"FAILED after {_clock(seconds)}: {failure.cause}  log: {log}", flush=True)
        self._render()
        return failure

    def _execute(self, name: str, place: Path) -> Failure | None:
        """Run one notebook; leave notebook.ipynb and result.json, or failed.ipynb and failure.json."""
        place.mkdir(parents=True, exist_ok=True)
        for old in ("result.json", "failure.json", "running.ipynb"):
            (place / old).unlink(missing_ok=True)
        running = place / "running.ipynb"
        source = places.notebook(name)
        command = [sys.executable, "-m", "papermill", _literal(source), _literal(running), "-k", "python3"]
        command += ["--cwd", str(source.parent), "-f", str(self.folder / "params.yaml")]
        command += ["--log-output", "--no-progress-bar", "--start-timeout", "300"]
        try:
            with open(place / "log.txt", "wb") as log:
                code = processes.run(command, log, os.environ | QUIET, keep=[self.held])
        except processes.Stopped as stopped:
            self._failed(name, place, Failure(str(stopped), 128 + stopped.number))
            print(f"FAILED: {stopped}", flush=True)
            raise
        if code == 0 and (place / "result.json").is_file():
            os.replace(running, place / "notebook.ipynb")
            (place / "failed.ipynb").unlink(missing_ok=True)
            return None
        (place / "result.json").unlink(missing_ok=True)
        failure = Failure(cause(running, place / "log.txt", code), DEAD_KERNEL if code == DEAD_KERNEL else 1)
        self._failed(name, place, failure)
        return failure

    def _failed(self, name: str, place: Path, failure: Failure) -> None:
        if (place / "running.ipynb").exists():
            os.replace(place / "running.ipynb", place / "failed.ipynb")
        data = {"stage": name, "cause": failure.cause, "code": failure.code, "log": f"{name}/log.txt"}
        with contextlib.suppress(OSError):  # a full disk may be the very failure; the line on the terminal says it
            write_json(place / "failure.json", data)

    def _render(self) -> None:
        """Render the report as far as the run has come; what goes wrong is one line, and the exit code at the end."""
        from eagle3kit import report  # late: a pass that skips everything does without

        try:
            report.render(self.folder)
            self.report_error = None
        except Exception as error:  # noqa: BLE001 - whatever it is, hours of stages must not be lost to it
            self.report_error = f"{type(error).__name__}: {error}"
            print(f"warning: the report could not be rendered: {self.report_error}", flush=True)

    def _close(self, started: float) -> None:
        """How long it took, in a line and in timing.json; a report if there is none yet."""
        ran = [stage for stage in self.timing if not stage["skipped"]]
        if not ran and (self.params_changed or not (self.folder / "index.html").exists()):
            self._render()
        total = time.monotonic() - started
        overhead = total - sum(stage["inside_seconds"] for stage in ran)
        if ran:
            skipped = len(self.timing) - len(ran)
            data = {"stages": self.timing, "total_seconds": round(total, 2), "overhead_seconds": round(overhead, 2)}
            with contextlib.suppress(OSError):
                write_json(self.folder / "timing.json", data)
            words = (
                f"{len(ran)} run, {skipped} skipped, in {_clock(total)}; {overhead:.0f} s of it outside the notebooks"
            )
            print(words, flush=True)
        else:
            print(f"nothing to do: all {len(self.timing)} stages are current, checked in {total:.1f} s", flush=True)


def summary(folder: Path) -> str:
    """The line a pass ends with: the acceptance length served by vLLM, if it was measured, and the report's path."""
    report = _report_line(folder)
    done = fingerprint.result(folder / MEASURED)
    numbers = done["numbers"] if done else {}
    if "acceptance_length" not in numbers:
        return report
    length, low, high = (numbers[f"acceptance_length{end}"] for end in ("", "_low", "_high"))
    return f"acceptance length served by vLLM: {length:.2f} (95% interval {low:.2f}-{high:.2f})  {report}"


def _report_line(folder: Path) -> str:
    return f"report: {places.shown(folder / 'index.html')}"


def cause(notebook: Path, log: Path, code: int) -> str:
    """Why an executed notebook failed, in one line, from its own error output, else from the exit code and the log."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    if code == DEAD_KERNEL or any("DeadKernelError" in line for line in lines[-5:]):
        return "the kernel died: killed, or out of memory (dmesg says which)"
    with contextlib.suppress(OSError, json.JSONDecodeError, KitError):
        for output in _outputs(read_json(notebook)):
            if output["output_type"] == "error" and output["ename"] != "SystemExit":
                if output["ename"] == "KitError":
                    return " ".join(output["evalue"].split("\n"))
                last = next(iter(reversed(output["evalue"].strip().splitlines())), "")
                return f"{output['ename']}: {last}".rstrip(": ")
    if code == 0:
        return "a cell stopped the notebook before its end (no result.json)"
    if code < 0:
        return f"papermill was ended by {_signal(-code)}"
    return f"papermill exited with {code}: {lines[-1] if lines else 'nothing in its log'}"


def _outputs(notebook: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for cell in notebook["cells"]:
        yield from cell.get("outputs", [])


def _literal(path: Path) -> str:
    """papermill formats the notebooks' paths (and only those): a brace in a folder's name must be doubled."""
    return str(path).replace("{", "{{").replace("}", "}}")


def _signal(number: int) -> str:
    import signal

    return signal.Signals(number).name


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
