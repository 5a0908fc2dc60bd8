"""Run a server so that it cannot outlive whoever asked for it.

`python -m eagle3kit.guard COMMAND …` starts COMMAND and watches its own standard input, a pipe that only the asking process
holds open. When that process ends, by whatever means (SIGKILL included), the pipe closes and the guard ends the whole family
of COMMAND: SIGTERM, then SIGKILL. vLLM starts workers of its own; a signal to its first process alone can leave them.
Standard library only, so that it starts in a blink.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time

PR_SET_PDEATHSIG = 1  # linux/prctl.h: what a process is sent when its parent ends
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h: orphans of our family come to us, so none escapes
GRACE_S = 15.0


def _family() -> list[int]:
    """Process ids of every living descendant, read from /proc (children of children too)."""
    parents: dict[int, int] = {}
    living: set[int] = set()
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                state, parent = file.read().rpartition(")")[2].split()[:2]
        except OSError:
            continue  # it ended while we looked
        # Descent goes through the dead too: a process whose first thread has ended while others still end shows as a zombie,
        # and keeps its children.
        parents[int(name)] = int(parent)
        if state != "Z":
            living.add(int(name))
    found, frontier = [], {os.getpid()}
    while frontier:
        frontier = {pid for pid, parent in parents.items() if parent in frontier}
        found += frontier & living
    return found


def _signal_family(number: int) -> bool:
    """Send a signal to every descendant; False when there was none left."""
    family = _family()
    for pid in family:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue
    return bool(family)


def _end_family(first: subprocess.Popen) -> None:
    """Ask the first process to stop, wait, then kill what is left of the family."""
    first.terminate()
    deadline = time.monotonic() + GRACE_S
    while time.monotonic() < deadline and _family():
        first.poll()
        time.sleep(0.1)
    while _signal_family(signal.SIGKILL):
        first.poll()
        time.sleep(0.05)


def main(command: list[str]) -> int:
    """Start `command`, return its exit code; end it and all it started when standard input closes."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # Should the guard itself be killed (as Ray kills the children of a worker it ends), COMMAND is asked to stop by the kernel.
    control = ctypes.CDLL(None).prctl
    first = subprocess.Popen(command, stdin=subprocess.DEVNULL,
                             preexec_fn=lambda: control(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0))  # fmt: skip
    closed = threading.Event()

    def watch() -> None:
        while os.read(0, 4096):
            pass
        closed.set()

    threading.Thread(target=watch, daemon=True).start()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: closed.set())
    while first.poll() is None and not closed.wait(0.2):
        pass
    code = first.poll()
    _end_family(first)
    return first.wait() if code is None else code


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.exit(code if code >= 0 else 128 - code)
