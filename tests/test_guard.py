"""No family outlives whoever asked for it, whatever it does to stay."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

REPOSITORY = Path(__file__).parent.parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
# Members of a family write their ids down, and sleep.
NOTE = "import os, signal, subprocess, sys, time\nopen(sys.argv[1], 'a').write(f'{os.getpid()}\\n')\n"
SLEEP = NOTE + "time.sleep(600)"
DEAF = NOTE + "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nopen(sys.argv[1] + '.deaf', 'w').close()\ntime.sleep(600)"
STRAY = NOTE + "os.setsid()\nos.fork() and os._exit(0)\n" + NOTE + "time.sleep(600)"  # no longer its parent's child
FAMILY = NOTE + f"""
for member in ({SLEEP!r}, {DEAF!r}):
    subprocess.Popen([sys.executable, '-c', member, sys.argv[1]])
    subprocess.Popen([sys.executable, '-c', member, sys.argv[1]], start_new_session=True)
subprocess.Popen([sys.executable, '-c', {STRAY!r}, sys.argv[1]]).wait()
time.sleep(600)
"""
MEMBERS = 1 + 4 + 2


def guarded(*command: str, grace_s: float = 15.0) -> list[str]:
    start = f"import sys; from eagle3kit import guard; guard.GRACE_S = {grace_s}; code = guard.main(sys.argv[1:]); " \
            "sys.exit(code if code >= 0 else 128 - code)"
    return [sys.executable, "-c", start, *command]


def wait_for(what, limit_s: float = 30.0) -> None:
    until = time.monotonic() + limit_s
    while not what():
        assert time.monotonic() < until, "it never came"
        time.sleep(0.02)


def members(notes: Path) -> list[int]:
    return [int(line) for line in notes.read_text().split()] if notes.exists() else []


def alive(pids: list[int]) -> list[int]:
    found = []
    for pid in pids:
        try:
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
        except psutil.NoSuchProcess:
            continue
    return found


def whole(notes: Path) -> bool:
    return len(members(notes)) == MEMBERS and Path(f"{notes}.deaf").exists()


def start_family(notes: Path, **options) -> subprocess.Popen:
    family = subprocess.Popen(guarded(sys.executable, "-c", FAMILY, str(notes), grace_s=0.5), stdin=subprocess.PIPE,
                              env=ENVIRONMENT, **options)
    wait_for(lambda: whole(notes))
    time.sleep(0.2)  # both deaf ones have had the time to close their ears
    return family


def test_the_family_goes_when_standard_input_closes(tmp_path):
    notes = tmp_path / "ids"
    guard = start_family(notes)
    assert alive(members(notes))
    guard.stdin.close()
    assert guard.wait(30) == 128 + signal.SIGTERM
    assert alive(members(notes)) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_family_goes_when_the_guard_is_told_to_stop(tmp_path, number):
    notes = tmp_path / "ids"
    guard = start_family(notes)
    guard.send_signal(number)
    guard.wait(30)
    assert alive(members(notes)) == []
    guard.stdin.close()


def test_the_family_goes_when_the_asking_process_is_killed_outright(tmp_path):
    notes = tmp_path / "ids"
    asks = "import subprocess, sys, time\nsubprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE)\ntime.sleep(600)"
    command = [sys.executable, "-c", asks, *guarded(sys.executable, "-c", FAMILY, str(notes), grace_s=0.5)]
    asking = subprocess.Popen(command, env=ENVIRONMENT)
    wait_for(lambda: whole(notes))
    time.sleep(0.2)
    everybody = members(notes) + [child.pid for child in psutil.Process(asking.pid).children()]
    asking.kill()
    asking.wait()
    wait_for(lambda: not alive(everybody))


def test_who_stops_when_asked_is_not_killed(tmp_path):
    done = tmp_path / "done"
    polite = ("import signal, sys, time\n"
              "def stop(*_):\n    time.sleep(0.3)\n    open(sys.argv[1], 'w').close()\n    sys.exit(7)\n"
              "signal.signal(signal.SIGTERM, stop)\nprint('ready', flush=True)\ntime.sleep(600)")
    guard = subprocess.Popen(guarded(sys.executable, "-c", polite, str(done)), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                             env=ENVIRONMENT)
    assert guard.stdout.readline() == b"ready\n"
    guard.stdin.close()
    assert guard.wait(30) == 7 and done.exists()
    guard.stdout.close()


@pytest.mark.parametrize(("ending", "code"), [("sys.exit(0)", 0), ("sys.exit(3)", 3), ("os.kill(os.getpid(), 9)", 137)])
def test_the_exit_code_is_handed_on_and_nobody_stays(tmp_path, ending, code):
    notes = tmp_path / "ids"
    leaves_one = f"{NOTE}subprocess.Popen([sys.executable, '-c', {SLEEP!r}, sys.argv[1]])\n" \
                 f"while len(open(sys.argv[1]).read().split()) < 2: time.sleep(0.01)\n{ending}"
    guard = subprocess.Popen(guarded(sys.executable, "-c", leaves_one, str(notes), grace_s=0.2), stdin=subprocess.PIPE,
                             env=ENVIRONMENT)
    assert guard.wait(30) == code
    assert len(members(notes)) == 2 and alive(members(notes)) == []
    guard.stdin.close()


def test_started_as_a_module():
    command = [sys.executable, "-m", "eagle3kit.guard", sys.executable, "-c"]
    for ending, code in (("raise SystemExit(5)", 5), ("import os; os.kill(os.getpid(), 15)", 128 + 15)):
        guard = subprocess.Popen([*command, ending], stdin=subprocess.PIPE, env=ENVIRONMENT)
        assert guard.wait(30) == code
        guard.stdin.close()
    # The command has no input of its own: the pipe is the guard's.
    guard = subprocess.Popen([*command, "import sys; print(repr(sys.stdin.read()))"], stdin=subprocess.PIPE,
                             stdout=subprocess.PIPE, env=ENVIRONMENT)
    assert guard.stdout.read() == b"''\n" and guard.wait(30) == 0
    guard.stdin.close()
    guard.stdout.close()


def test_a_guard_that_is_killed_has_its_command_asked_to_stop(tmp_path):
    notes = tmp_path / "ids"
    guard = subprocess.Popen(guarded(sys.executable, "-c", SLEEP, str(notes)), stdin=subprocess.PIPE, env=ENVIRONMENT)
    wait_for(lambda: members(notes))
    guard.kill()
    guard.wait(30)
    wait_for(lambda: not alive(members(notes)))
    guard.stdin.close()
