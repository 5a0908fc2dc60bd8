"""One child at a time, and nothing of it left behind: not its kernel, not a server that a cell started.

A kernel lives in a session of its own, and what it starts outlives it; so children are found by descent, not by group.
On Linux this process adopts orphans of its descendants, which keeps them findable when the process between has died.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import psutil

# A cell gets this long to leave its `with` blocks after an interrupt, then everything this long to end by itself.
INTERRUPT_SECONDS = 9.0
TERMINATE_SECONDS = 5.0
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


class Stopped(Exception):
    """A signal asked this process to stop; `number` says which."""

    def __init__(self, number: int):
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number


@contextlib.contextmanager
def stopping_on_signals() -> Iterator[None]:
    """Inside, SIGTERM, SIGINT and a lost terminal raise Stopped once; a repeated signal changes nothing.

    A signal that is ignored from outside (nohup) stays ignored.
    """

    def stop(number: int, frame: object) -> None:
        for again in old:
            signal.signal(again, signal.SIG_IGN)
        raise Stopped(number)

    wanted = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]
    old = {number: signal.getsignal(number) for number in wanted if signal.getsignal(number) != signal.SIG_IGN}
    for number in old:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def run(command: Sequence[str], log: IO[bytes], environment: dict[str, str], keep: Sequence[int] = ()) -> int:
    """Run a command with its output in `log`; return its exit code (negative: the signal that ended it).

    When this returns or raises, no descendant is left. Stopped is let through after the child had time to end well.
    `keep` are file descriptors that the child holds too.
    """
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if libc is not None:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def end_with_parent() -> None:
        if libc is not None:  # this process killed outright: the child must not go on unwatched
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)

    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=environment,
        pass_fds=tuple(keep),
        start_new_session=True,
        preexec_fn=end_with_parent,
    )
    try:
        return child.wait()
    except Stopped as stopped:
        _end_gently(child, stopped.number)
        raise
    finally:
        left = kill_all()
        child.wait()
        if left:
            log.write(f"ended after the stage: {', '.join(left)}\n".encode())


def kill_all() -> list[str]:
    """Kill and reap every descendant of this process; the names of those that were still at work."""
    names: list[str] = []
    psutil.wait_procs(_descendants(), timeout=1)  # helpers of a kernel that has just ended are on their way out
    until = time.monotonic() + 30
    while (left := _descendants()) and time.monotonic() < until:
        for process in left:
            with contextlib.suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE:
                    names.append(f"{process.name()} ({process.pid})")
                    process.kill()
        psutil.wait_procs(left, timeout=1)
    return sorted(set(names))


def _end_gently(child: subprocess.Popen, number: int) -> None:
    """Interrupt the kernel, so that its cell can close what it opened; then the signal itself, to all."""
    kernels = psutil.Process(child.pid).children() if child.poll() is None else []
    for kernel in kernels:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(kernel.pid, signal.SIGINT)  # as Jupyter does: the kernel leads its own group
    if kernels:
        _wait(child, INTERRUPT_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, number)
    for process in _descendants():
        with contextlib.suppress(psutil.Error):
            process.terminate()
    psutil.wait_procs(_descendants(), timeout=TERMINATE_SECONDS)


def _wait(child: subprocess.Popen, seconds: float) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(seconds)


def _descendants() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


@contextlib.contextmanager
def lock(path: Path) -> Iterator[int]:
    """Hold `path` for this process alone; yields its file descriptor. BlockingIOError carries the holder's id."""
    import fcntl

    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise BlockingIOError(file.read().strip() or "unknown") from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield file.fileno()
