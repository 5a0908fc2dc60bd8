"""One of our modules run as a child: a request in, an answer out, both JSON; nothing of it outlives whoever asked.

The child writes its answer anew after every part it has done, so that a later failure does not lose what came before it.
"""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from threading import Event
from typing import Any

from eagle3kit import interpreter
from eagle3kit.errors import KitError
from eagle3kit.files import log_end, read_json, write_json

REQUEST, ANSWER, LOG = "request.json", "answer.json", "log.txt"


def call(
    module: str, request: Any, folder: Path, *, timeout_s: float, environment: Mapping[str, str] | None = None,
    stop: Event | None = None,
) -> tuple[dict[str, Any], str]:  # fmt: skip
    """Run `python -m MODULE FOLDER`, whose `main` reads FOLDER/request.json and writes FOLDER/answer.json; its output goes to
    FOLDER/log.txt. Where `stop` is set by another thread the child is ended at once.

    Returns:
        The answer as far as it came, and why it is not whole: "" when the child ended well, else one line in words.

    Raises:
        KitError: the child left no answer at all; with the end of its log.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ANSWER).unlink(missing_ok=True)  # an older answer must not be taken for this one's
    write_json(folder / REQUEST, request)
    ours = str(Path(__file__).resolve().parents[1])
    paths = os.pathsep.join(filter(None, [ours, os.environ.get("PYTHONPATH", "")]))
    variables = {**interpreter.kernels(), **os.environ, "PYTHONPATH": paths, "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
                 **(environment or {})}  # fmt: skip
    log = folder / LOG
    with open(log, "wb") as output:
        child = subprocess.Popen(
            [sys.executable, "-m", "eagle3kit.guard", sys.executable, "-m", module, str(folder)],
            stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, env=variables, start_new_session=True,
        )  # fmt: skip
    started = time.monotonic()
    code: int | None = None
    try:
        while code is None and (left := started + timeout_s - time.monotonic()) > 0 and not (stop and stop.is_set()):
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = child.wait(min(left, 0.5) if stop else left)
    finally:
        child.stdin.close()  # the guard's sign to end the family
        child.wait()
    why = ""
    if code is None:
        why = f"{module} was not done after {timeout_s:.0f} s and was ended"
    elif code:
        why = f"{module} ended with code {code} after {time.monotonic() - started:.0f} s"
    if not (folder / ANSWER).is_file():
        raise KitError(f"{why or f'{module} ended well'}, but left no answer; the end of its log, {log}:\n{log_end(log)}")
    return read_json(folder / ANSWER), why
