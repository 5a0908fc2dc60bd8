"""Files appear whole or not at all: written beside their place, then renamed into it."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from eagle3kit.errors import KitError


@contextmanager
def publish(path: Path | str) -> Iterator[Path]:
    """A temporary path beside `path`; what is there (file or folder) becomes `path` if the block ends well.

    A block that raises leaves `path` as it was and nothing beside it. A folder replaces an older folder of the same name.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        inner = draft / path.name
        yield inner
        if inner.is_dir() and path.is_dir():
            # A folder cannot be replaced in one step: the old one moves away first and dies with the draft folder.
            os.replace(path, draft / "old")
        os.replace(inner, path)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def write_bytes(path: Path | str, data: bytes) -> None:
    """Publish `data` as `path`."""
    with publish(path) as inner:
        inner.write_bytes(data)


def write_json(path: Path | str, data: Any) -> None:
    """Publish `data` as readable JSON; a NaN or an infinity is refused with ValueError, for no reader could take it."""
    write_bytes(path, (json.dumps(data, indent=1, allow_nan=False, ensure_ascii=False) + "\n").encode())


def read_json(path: Path | str) -> Any:
    """The JSON in `path`; KitError names the file and the place when it is not JSON."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise KitError(f"{path} is not JSON (line {error.lineno}: {error.msg}); delete it and run its stage again") from None


def sha256(path: Path | str) -> str:
    """The hex digest of a file, read in pieces."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def log_end(log: Path, lines: int = 12) -> str:
    """The last lines of a log that say something went wrong, else simply the last lines; "" when there is no log."""
    text = log.read_text(errors="replace").splitlines() if log.exists() else []
    telling = [line for line in text if "Error" in line or "error:" in line]
    return "\n".join((telling or text)[-lines:])
