"""Processes that write files of states for vLLM, out of memory that they share with it.

Threads would do for the disk, but not for Python: a file is six calls that let go of the interpreter's lock and want it back, and
some ten thousand such turns a second slow down the thread that drives the model more than all else that a connector does. Here
the engine hands a whole list of files to a process and hears of them once.

Run as a module it is such a process. It imports nothing but the standard library and ends when its engine does.
"""

import marshal
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from eagle3kit import states_file


class File(NamedTuple):
    """One file to write: `token_ids` int64 [T] as bytes, and where its states lie in the shared memory, in bytes."""

    path: str
    token_ids: bytes
    start: int
    size: int


class Writer:
    """A process that writes, started when it is first asked, and again when it has died."""

    def __init__(self, memory: int):
        """`memory`: the file descriptor of the shared memory."""
        self._memory = memory
        self._child: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it ahead of its first file."""
        if self._child is None:
            package = str(Path(__file__).parent.parent)
            known = dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")])))
            self._child = subprocess.Popen([sys.executable, "-m", __name__, str(self._memory)], env=known, stdin=subprocess.PIPE,
                                           stdout=subprocess.PIPE, pass_fds=[self._memory])  # fmt: skip

    def write(self, files: Sequence[File], row: Sequence[int], dtype: str) -> dict[str, Any]:
        """Have `files` written; a row of their states is `row` [states, H] of `dtype`, as torch prints it.

        Returns files and bytes written, seconds to create, fill and name them, and "failed": {path: why}. A file that failed has
        left a note for its reader.
        """
        self.start()
        assert self._child and self._child.stdin and self._child.stdout
        try:
            # marshal: plain values alone, so that nothing that is read can be run.
            marshal.dump(([tuple(one) for one in files], tuple(row), dtype), self._child.stdin)
            self._child.stdin.flush()
            return marshal.load(self._child.stdout)
        except (OSError, EOFError, ValueError, TypeError) as error:
            self.stop()
            why = OSError(32, f"the process that writes hidden states died ({error!r})")
            lost = {one.path: str(why) for one in files if not os.path.exists(one.path)}
            for path in lost:
                states_file.give_up(path, why)
            return {"files": len(files) - len(lost), "bytes": 0, "failed": lost}

    def stop(self) -> None:
        """End the process."""
        if self._child is not None:
            self._child.kill()
            self._child.communicate()
            self._child = None


def main(memory: int, asked: BinaryIO, told: BinaryIO) -> None:
    """Write what `asked` names from the shared `memory` and answer on `told`, until `asked` ends."""
    states = memoryview(mmap.mmap(memory, 0, prot=mmap.PROT_READ))
    while True:
        try:
            files, row, dtype = marshal.load(asked)
        except EOFError:
            return
        found: dict[str, Any] = {"files": 0, "bytes": 0, "failed": {}}
        for path, token_ids, start, size in files:
            tokens = len(token_ids) // 8
            head = states_file.header(tokens, (tokens, *row), dtype, size)
            try:
                found["bytes"] += _write(path, (head, token_ids, states[start : start + size]), found)
                found["files"] += 1
            except OSError as error:
                found["failed"][path] = str(error)
                states_file.give_up(path, error)
        marshal.dump(found, told)
        told.flush()


def _write(path: str, contents: tuple[Any, ...], spent: dict[str, Any]) -> int:
    try:
        return states_file.write(path, *contents, spent=spent)
    except FileNotFoundError:  # the first file of a folder
        os.makedirs(os.path.dirname(path), exist_ok=True)
        return states_file.write(path, *contents, spent=spent)


if __name__ == "__main__":
    for each in (signal.SIGINT, signal.SIGTERM):  # meant for the engine, which has its last files written before it goes
        signal.signal(each, signal.SIG_IGN)
    try:
        main(int(sys.argv[1]), sys.stdin.buffer, sys.stdout.buffer)
    except BrokenPipeError:  # the engine is gone; nobody waits for an answer
        os._exit(1)
