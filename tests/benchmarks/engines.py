"""vLLM engines for measurements: each in a process of its own, all started at once, asked one at a time.

Run as a script it is such a process: it reads its settings and what it is asked from standard input, a line of JSON each, and
answers in lines of JSON.
"""

import contextlib
import fcntl
import itertools
import json
import os
import queue
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from eagle3kit import interpreter


class Engine:
    """A child process with one engine; `ask` waits for its answer."""

    def __init__(self, name: str, settings: dict, folder: Path, environment: dict[str, str] | None = None):
        self.name, self.log = name, folder / f"{name.replace(' ', '-')}.log"
        folder.mkdir(parents=True, exist_ok=True)
        self._started, self._lines = time.monotonic(), queue.Queue()
        # A cache of its own: engines that start together would write the same files; and few compilers each. Answers come by
        # standard output, so vLLM logs beside it.
        own = {"VLLM_CACHE_ROOT": str(folder / "cache" / self.log.stem), "TORCHINDUCTOR_COMPILE_THREADS": "4",
               "VLLM_LOGGING_STREAM": "ext://sys.stderr"}  # fmt: skip
        known = {**interpreter.kernels(), **os.environ, "VLLM_WORKER_MULTIPROC_METHOD": "spawn", "VLLM_NO_USAGE_STATS": "1",
                 **own, **(environment or {})}  # fmt: skip
        with open(self.log, "wb") as log:
            self._child = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                                           env=known, start_new_session=True, text=True)  # fmt: skip
        threading.Thread(target=self._read, daemon=True).start()
        self._say(settings)

    def _read(self) -> None:
        for line in self._child.stdout:
            if '@{"' in line:  # the engine prints too, not always whole lines
                self._lines.put(json.loads(line[line.index('@{"') + 1 :]))
        self._lines.put({"failed": f"it ended with code {self._child.wait()}: {self.end_of_log()}"})

    def _say(self, what: dict) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._child.stdin.write(json.dumps(what) + "\n")
            self._child.stdin.flush()

    def _answer(self, limit_s: float) -> dict:
        try:
            return self._lines.get(timeout=limit_s)
        except queue.Empty:
            return {"failed": f"no answer within {limit_s:.0f} s: {self.end_of_log()}"}

    def ready(self, limit_s: float) -> dict:
        """{"start_s": …} once the engine stands, or {"failed": why}."""
        return self._answer(max(1.0, limit_s - (time.monotonic() - self._started)))

    def ask(self, what: dict, limit_s: float = 180) -> dict:
        """What the child found of one request."""
        self._say(what)
        return self._answer(limit_s)

    def end_of_log(self) -> str:
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return " | ".join(([line for line in lines if "Error" in line] or lines)[-3:])[-600:]

    def quit(self) -> None:
        """Ask the child to end."""
        self._say({"job": "quit"})

    def stop(self) -> None:
        """End the child and all that it started."""
        self.quit()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(8)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()


def ready(running: dict[str, Engine], limit_s: float, tell) -> None:
    """Wait for each and tell how its start went, by `tell(what, **columns)`; who failed is stopped and leaves `running`."""
    for way, engine in list(running.items()):
        said = engine.ready(limit_s)
        tell(f"{way}: engine", **said)
        if "failed" in said:
            running.pop(way).stop()


def stop(every: list[Engine]) -> None:
    """End all, at once."""
    for engine in every:
        engine.quit()
    for engine in every:
        engine.stop()


@contextlib.contextmanager
def alone(lock: Path | None):
    """The machine for one measurement: nobody else who names the same file measures meanwhile."""
    if lock is None:
        yield
        return
    with open(lock, "a", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


# ---- The child


class Account:
    """What vLLM's worker can be asked besides (`worker_extension_cls`)."""

    def harness_account(self) -> dict:
        """CPU seconds of the thread that drives the model (the engine's own, unless there are several ranks) and of its process,
        how often that thread was made to wait, and what a hidden-states connector says of itself."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        connector = get_kv_transfer_group() if has_kv_transfer_group() else None
        used = resource.getrusage(resource.RUSAGE_THREAD)
        return {"thread_cpu_s": time.thread_time(), "process_cpu_s": time.process_time(), "waits": used.ru_nvcsw,
                **(connector.account() if hasattr(connector, "account") else {})}  # fmt: skip


def account(llm, job: dict, before: dict | None = None) -> dict:
    """Rank 0's account so far, less `before`; {} where the engine was not started to give one."""
    if not job.get("account"):
        return {}
    found = llm.collective_rpc("harness_account")[0]
    return {name: value if name == "most_rooms" else value - (before or {}).get(name, 0) for name, value in found.items()}


def prefill(llm, job: dict) -> dict:
    """Prompts of random tokens, one new token each; with a connector: until the last file is whole."""
    import random

    from vllm import SamplingParams

    draw = random.Random(job["seed"])
    prompts = [{"prompt_token_ids": [draw.randrange(10, job["vocabulary"]) for _ in range(n)]} for n in job["lengths"]]
    asked = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
    before = account(llm, job)
    started = time.perf_counter()
    answers = llm.generate(prompts, asked, use_tqdm=False)
    answered = time.perf_counter()
    paths = [(answer.kv_transfer_params or {}).get("hidden_states_path") for answer in answers]
    if any(paths):
        step(llm)
    size = 0
    for path, answer in zip(paths, answers, strict=True):
        if path:
            arrived(Path(path), bool(answer.kv_transfer_params.get("published_whole")))
            size += os.path.getsize(path)
    seconds = time.perf_counter() - started
    spent = account(llm, job, before)
    check = checked(llm, paths, prompts, job.get("states"), asked)
    for path in filter(None, paths):
        remove(path)
    return {"seconds": seconds, "answered_s": answered - started, "tokens": sum(job["lengths"]), "bytes": size,
            "account": spent, **check}  # fmt: skip


def remove(path: str) -> None:
    for name in (path, path + ".lock"):
        with contextlib.suppress(OSError):
            os.unlink(name)


def step(llm) -> None:
    """An engine inside this process saves what finished last only when it is stepped once more."""
    if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0":
        for _ in range(2):
            llm.llm_engine.step()


def arrived(path: Path, published: bool) -> None:
    """Wait until a file is whole: by its name, or by vLLM's lock."""
    if published:
        from eagle3kit.states_file import wait_for

        return wait_for(path, 120)
    with open(f"{path}.lock", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)


def checked(llm, paths: list, prompts: list, states: list | None, asked) -> dict:
    """Every hundredth file: are its tokens those asked for, its shape right, its numbers finite, not all zero, and those of the
    same prompt asked alone? Rows of another step, left in a room that was read too soon, are right in all but the last."""
    from safetensors.torch import load_file

    looked = wrong = 0
    for path, prompt in list(zip(paths, prompts, strict=True))[::100]:
        if path:
            found, looked = load_file(path), looked + 1
            hidden = found["hidden_states"]
            right = found["token_ids"].tolist() == prompt["prompt_token_ids"] and bool(hidden.isfinite().all())
            right = right and list(hidden.shape) == [len(found["token_ids"]), *states] and not bool((hidden == 0).all(2).any())
            wrong += not (right and alike(hidden.float(), again(llm, prompt, asked).float()))
    return {"files_looked_at": looked, "files_wrong": wrong}


def again(llm, prompt: dict, asked):
    """The states of a prompt that is asked alone."""
    from safetensors.torch import load_file

    told = llm.generate([prompt], asked, use_tqdm=False)[0].kv_transfer_params
    step(llm)
    arrived(Path(told["hidden_states_path"]), bool(told.get("published_whole")))
    found = load_file(told["hidden_states_path"])["hidden_states"]
    remove(told["hidden_states_path"])
    return found


def alike(one, other) -> bool:
    """Whether all but one in a hundred rows [T, states, H] differ by less than half of their length: company changes roundings,
    rows of other tokens differ by more than their length."""
    apart = (one - other).norm(dim=2) / other.norm(dim=2).clamp_min(1e-6)
    return bool((apart > 0.5).float().mean() < 0.01)


def decode(llm, job: dict) -> dict:
    """Prompts answered greedily in waves of `in_flight`: of each wave seconds, new tokens, and what vLLM counted of it, [drafts,
    accepted at position 1, 2, …]."""
    from vllm import SamplingParams

    asked, waves, size = SamplingParams(max_tokens=job["max_tokens"], temperature=0.0), [], job["in_flight"]
    for start in range(0, len(job["prompts"]), size):
        prompts = [{"prompt_token_ids": ids} for ids in job["prompts"][start : start + size]]
        before, started = drafts(llm), time.perf_counter()
        answers = llm.generate(prompts, asked, use_tqdm=False)
        seconds = time.perf_counter() - started
        counted = [late - early for early, late in itertools.zip_longest(before, drafts(llm), fillvalue=0)]
        waves.append([seconds, sum(len(answer.outputs[0].token_ids) for answer in answers), counted])
    return {"waves": waves}


def drafts(llm) -> list[int]:
    """[drafts, accepted at position 1, 2, …] so far."""
    found = {metric.name: metric for metric in llm.get_metrics() if "spec_decode" in metric.name}
    count = found.get("vllm:spec_decode_num_drafts")
    by_position = found.get("vllm:spec_decode_num_accepted_tokens_per_pos")
    return [int(count.value) if count else 0, *(map(int, by_position.values) if by_position else ())]


def child() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # vLLM's connector holds a lock file for each request
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

    def say(what: dict) -> None:
        print("@" + json.dumps(what), flush=True)

    settings, started = json.loads(sys.stdin.readline()), time.monotonic()
    from vllm import LLM

    llm = LLM(**settings)
    say({"start_s": time.monotonic() - started})
    for line in sys.stdin:
        job = json.loads(line)
        if job["job"] == "quit":
            break
        try:
            say({"prefill": prefill, "decode": decode}[job["job"]](llm, job))
        except Exception as error:  # the next request may go through
            say({"failed": repr(error)[:600]})
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    child()
