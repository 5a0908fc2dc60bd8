"""Processes that write files of states for vLLM, out of memory that they share with it.

Threads would do for the disk, but not for Python: a file is six calls that let go of the interpreter's lock and want it back, and
some ten thousand such turns a second slow down the thread that drives the model more than all else that a connector does. Even a
thread that only waits for a copy, or for a process, takes such turns. Here that thread itself writes a line to a process, nobody
else wakes, and what the process has to say is read when the next room is wanted.

Run as a module it is such a process. It imports nothing but the standard library, and ends with the pipe from its engine or,
while it waits for a flag, with the engine itself.
"""

import contextlib
import fcntl
import json
import marshal
import mmap
import os
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from array import array
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO, NamedTuple

from eagle3kit import states_file

DONE = struct.Struct("<4q3d")  # list; files written and failed, bytes; seconds to create, fill and name them
PIPE = 1 << 20  # bytes of lists that wait; the engine waits for a process that has more
LOOK_S, PAUSE_S = 0.5, 0.0001  # between two looks whether the engine lives, and at a flag


class File(NamedTuple):
    """One file to write: of a room `tokens` rows from row `first` on, and as many token ids, uint32 in bytes."""

    path: str
    first: int
    tokens: int
    token_ids: bytes


class Told(NamedTuple):
    """What became of a list of files: its `room`, how many were written and failed, their bytes; seconds to make them."""

    room: Any
    files: int
    failed: int
    bytes: int = 0
    create_s: float = 0.0
    fill_s: float = 0.0
    name_s: float = 0.0


class _Open(NamedTuple):
    child: subprocess.Popen
    room: Any
    files: Sequence[File]


class Writers:
    """`count` processes that write out of the shared `memory`, a file descriptor, of this `layout` (`states_rooms.Layout`).

    One thread sends and receives. Another one for each process sleeps until that ends: what it has not told of is given up, and
    it is started anew for the next list.
    """

    def __init__(self, count: int, memory: int, layout: Any):
        self._memory, self._layout = memory, json.dumps(vars(layout))
        self._heard, self._say = os.pipe()  # of all: less than a page is written in one go
        os.set_blocking(self._heard, False)
        self._poll = select.poll()
        self._poll.register(self._heard, select.POLLIN)
        self._lists, self._open, self._told = 0, dict[int, _Open](), deque[Told]()
        self._turn, self._burial = threading.Lock(), threading.Lock()
        self._watchers: list[threading.Thread] = []
        self._children = [self._start() for _ in range(count)]

    def __len__(self) -> int:
        return len(self._children)

    def _start(self) -> subprocess.Popen:
        package = str(Path(__file__).parent.parent)
        known = dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")])))
        child = subprocess.Popen([sys.executable, "-m", __name__, str(self._memory), str(self._say), self._layout], env=known,
                                 stdin=subprocess.PIPE, bufsize=0, pass_fds=[self._memory, self._say])  # fmt: skip
        with contextlib.suppress(OSError):  # a smaller one does too, but is full sooner
            fcntl.fcntl(child.stdin, fcntl.F_SETPIPE_SZ, PIPE)
        self._watchers.append(threading.Thread(target=self._watch, args=(child,), daemon=True, name="hidden-states"))
        self._watchers[-1].start()
        return child

    def send(self, number: int, room: Any, when: int, files: Sequence[File]) -> None:
        """Have process `number` write `files` of `room` (which has a `number`) once the room's flag is `when`."""
        if self._children[number].poll() is not None:
            with contextlib.suppress(OSError):
                self._children[number].stdin.close()
            self._children[number] = self._start()
        child = self._children[number]
        self._lists += 1
        with self._turn:
            self._open[self._lists] = _Open(child, room, files)
        # marshal: plain values alone, so that nothing that is read could be run.
        line = memoryview(marshal.dumps((self._lists, room.number, when, [tuple(one) for one in files])))
        try:
            while line:
                line = line[child.stdin.write(line) :]
        except OSError as error:  # it has just died
            self._give_up(child, error)

    def under_way(self) -> int:
        """Lists that were sent and of which nothing has been received."""
        with self._turn:
            return len(self._open) + len(self._told)

    def receive(self, wait_s: float = 0.0) -> list[Told]:
        """What became of lists since the last time; where that is nothing and lists are under way, after waiting for it, at most
        `wait_s` seconds."""
        self._hear()
        if wait_s and not self._told and self._open:
            self._poll.poll(1000 * wait_s)
            self._hear()
        return [self._told.popleft() for _ in range(len(self._told))]

    def _hear(self) -> None:
        with self._turn, contextlib.suppress(BlockingIOError):
            for name, *counts in DONE.iter_unpack(os.read(self._heard, 1024 * DONE.size)):
                if done := self._open.pop(name, None):
                    self._told.append(Told(done.room, *counts))

    def _watch(self, child: subprocess.Popen) -> None:
        code = child.wait()
        self._give_up(child, f"code {code}")

    def _give_up(self, child: subprocess.Popen, how: object) -> None:
        """What `child`, which is no more, has not told of: leave notes for the readers of what is not there."""
        why = OSError(32, f"the process that writes hidden states died ({how})")
        with self._burial:  # once, whoever finds it first
            self._hear()  # what it did tell was told whole
            with self._turn:
                lost = {name: one for name, one in self._open.items() if one.child is child}
            for name, one in lost.items():
                missing = [file.path for file in one.files if not os.path.exists(file.path)]
                for path in missing:
                    states_file.give_up(path, why)
                with self._turn:
                    del self._open[name]
                    self._told.append(Told(one.room, len(one.files) - len(missing), len(missing)))
        if lost:
            print(f"Hidden states: {why}", file=sys.stderr, flush=True)
            with contextlib.suppress(OSError):  # of list 0, which there is not: it wakes who waits
                os.write(self._say, DONE.pack(0, 0, 0, 0, 0.0, 0.0, 0.0))

    def stop(self, patience_s: float = 5.0) -> list[Told]:
        """End the processes, which first write what they have been sent; what became of it. When nothing is heard for
        `patience_s`, what is left is given up: nobody waits long for an engine that ends."""
        for child in self._children:
            with contextlib.suppress(OSError):  # of one that has died
                child.stdin.close()
        found, deadline = [], time.monotonic() + patience_s
        while self._open and time.monotonic() < deadline:
            if told := self.receive(0.1):
                found, deadline = found + told, time.monotonic() + patience_s
        for child in self._children:
            try:
                child.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
        for watcher in self._watchers:
            watcher.join()
        found += self.receive()
        for file in (self._heard, self._say):
            os.close(file)
        return found


# ---- The process


def main(memory: int, told: int, layout: Any, asked: BinaryIO) -> None:
    """Write what `asked` names from the shared `memory` and answer on `told`, until `asked` ends."""
    held = memoryview(mmap.mmap(memory, 0, prot=mmap.PROT_READ))
    engine = os.getppid()
    while True:
        try:
            name, room, when, files = marshal.load(asked)
        except EOFError:
            return
        start = room * layout.apart
        if not _came(held[start : start + 8].cast("q"), when, engine):
            return
        spent: dict[str, float] = {}
        done = failed = size = 0
        for path, first, tokens, token_ids in files:
            states = start + layout.states + layout.size * first
            head = states_file.header(tokens, (tokens, *layout.row), layout.dtype, tokens * layout.size)
            ids = array("q", array("I", token_ids)).tobytes()
            try:
                size += _write(path, (head, ids, held[states : states + tokens * layout.size]), spent)
                done += 1
            except OSError as error:
                failed += 1
                print(f"Hidden states were not written to {path}: {error}", file=sys.stderr, flush=True)
                states_file.give_up(path, error)
        os.write(told, DONE.pack(name, done, failed, size, *(spent.get(key, 0.0) for key in ("create_s", "fill_s", "name_s"))))


def _came(flag: memoryview, when: int, engine: int) -> bool:
    """Wait until `flag` is `when`; False when the engine has gone."""
    look = time.monotonic() + LOOK_S
    while flag[0] != when:
        time.sleep(PAUSE_S)
        if time.monotonic() > look:
            if os.getppid() != engine:
                return False
            look += LOOK_S
    return True


def _write(path: str, contents: tuple[Any, ...], spent: dict[str, float]) -> int:
    try:
        return states_file.write(path, *contents, spent=spent)
    except FileNotFoundError:  # the first file of a folder
        os.makedirs(os.path.dirname(path), exist_ok=True)
        return states_file.write(path, *contents, spent=spent)


if __name__ == "__main__":
    for each in (signal.SIGINT, signal.SIGTERM):  # meant for the engine, which has its last files written before it goes
        signal.signal(each, signal.SIG_IGN)
    try:
        main(int(sys.argv[1]), int(sys.argv[2]), SimpleNamespace(**json.loads(sys.argv[3])), sys.stdin.buffer)
    except BrokenPipeError:  # the engine is gone; nobody waits for an answer
        os._exit(1)
