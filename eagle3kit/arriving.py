"""Where states lie between the server that writes them and the reader that takes each at once: in memory, where there is room.

What arrives is read once and removed, so a disk would only be in the way. A folder in memory is named after the folder on disk
that it stands for, so that the next run of the same stage finds and clears what a killed one left, and nobody else's.
"""

import contextlib
import hashlib
import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from eagle3kit.machine import DTYPE_BYTES

MEMORY, PREFIX = Path("/dev/shm"), "eagle3kit-"
MOUNTS, MEMINFO, CGROUP = Path("/proc/self/mounts"), Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def free(memory: Path = MEMORY) -> int:
    """Bytes that files in `memory` may take: what is free there, and in the machine's or the container's memory. 0 where it is no
    file system in memory, or not ours to write to (a container's may hold 64 MB)."""
    kinds = {line.split()[1]: line.split()[2] for line in MOUNTS.read_text(encoding="utf-8").splitlines()}
    if kinds.get(str(memory)) != "tmpfs" or not os.access(memory, os.W_OK):
        return 0
    there = os.statvfs(memory)
    info = dict(line.split(":", 1) for line in MEMINFO.read_text(encoding="utf-8").splitlines() if ":" in line)
    found = [there.f_bavail * there.f_frsize, int(info["MemAvailable"].split()[0]) * 1024]
    with contextlib.suppress(OSError, ValueError):  # "max", or no such limit
        limit, used = (int((CGROUP / name).read_text(encoding="utf-8")) for name in ("memory.max", "memory.current"))
        found.append(limit - used)
    return max(0, min(found))


def at_once(lengths: Sequence[int], *, in_flight: int, states: int, hidden_size: int, dtype: str) -> int:
    """Bytes of files that `in_flight` samples of these many tokens have at most under way; 0 for no sample.

    100, 40 and 7 tokens, 2 at once, 4 states of 8 float32 -> 2 · 100 · 4 · 8 · 4 = 25,600.
    """
    return min(in_flight, len(lengths)) * max(lengths, default=0) * states * hidden_size * DTYPE_BYTES[dtype]


def place(own: Path, needed: int, memory: Path = MEMORY) -> Path:
    """A new, empty folder in `memory` for this user alone, when `needed` bytes fit there; else `own`, as for 0 bytes. Whatever an
    earlier run with the same `own` left in memory is removed."""
    name = hashlib.sha256(str(own.resolve()).encode()).hexdigest()[:16]
    folder = memory / f"{PREFIX}{os.getuid()}-{name}"
    remove(folder, memory)
    if not needed or free(memory) < needed:
        return own
    try:
        folder.mkdir(mode=0o700)
    except OSError:  # it is another's, or memory has filled up
        return own
    return folder


def remove(folder: Path, memory: Path = MEMORY) -> None:
    """Remove `folder`, if it is one in memory that `place` made for this user; leave any other."""
    with contextlib.suppress(OSError):
        found, named = folder.lstat(), folder.parent == memory and folder.name.startswith(PREFIX)
        if named and stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid():
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def removed(folder: Path | None, memory: Path = MEMORY) -> Iterator[None]:
    """`remove` the folder at the end, however that comes."""
    try:
        yield
    finally:
        if folder is not None:
            remove(folder, memory)
