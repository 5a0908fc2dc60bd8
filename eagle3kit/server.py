"""`vllm serve` as a child on loopback: start it, ask it, read its counters, and be sure that it is gone afterwards."""

import json
import os
import re
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from eagle3kit import cpu, interpreter, target_config
from eagle3kit.asking import NAME, Answer, Server, tail
from eagle3kit.errors import KitError
from eagle3kit.interpreter import vllm_version  # noqa: F401 - asked for by this name too

if TYPE_CHECKING:
    from eagle3kit.params import Params


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
    kv_cache_gib: int = 2  # on a CPU; on a GPU only where `neighbours` are
    neighbours: int = 0  # other servers that start and run beside it, on the same GPU
    cache: str = ""  # name of a folder of its own for what vLLM compiles: servers that start together would write the same files
    enforce_eager: bool = True
    tensor_parallel: int = 1
    threads: int | None = None
    prefix_caching: bool = False
    block_size: int | None = None
    trust_remote_code: bool = False
    python: str | None = None  # the interpreter that starts vLLM, or its environment's folder; None: our own
    start_timeout_s: float = 600
    request_timeout_s: float = 600
    speculative: dict[str, Any] | None = None
    kv_transfer: dict[str, Any] | None = None

    @classmethod
    def of(cls, params: "Params", model: Path | str, *, max_model_len: int, **more: Any) -> "Settings":
        """The settings that a run's parameters give, but for what `more` names; `max_model_len` is what is needed where they name
        none."""
        names = ("max_num_seqs", "gpu_memory_utilization", "kv_cache_gib", "enforce_eager", "tensor_parallel", "threads",
                 "python", "start_timeout_s", "request_timeout_s")  # fmt: skip
        return cls(
            model=str(model), dtype=params.target.dtype, trust_remote_code=params.target.trust_remote_code,
            max_model_len=params.server.max_model_len or max_model_len,
            **({name: getattr(params.server, name) for name in names} | more),
        )  # fmt: skip

    def command(self, port: int) -> list[str]:
        """The command line. The module is started, not the `vllm` command: that looks up a distribution called vllm."""
        options: dict[str, Any] = {
            "model": self.model, "served-model-name": NAME, "host": "127.0.0.1", "port": port, "dtype": self.dtype,
            "max-model-len": self.max_model_len, "max-num-seqs": self.max_num_seqs,
            "gpu-memory-utilization": self.gpu_memory_utilization, "tensor-parallel-size": self.tensor_parallel,
            "block-size": self.block_size,
            "speculative-config": self.speculative and json.dumps(self.speculative),
            "kv-transfer-config": self.kv_transfer and json.dumps(self.kv_transfer),
            # One line a request would bury what matters in the log.
            "uvicorn-log-level": "warning",
        }  # fmt: skip
        python = interpreter.look(self.python)
        if self.speculative and python.counts_per_request:
            options["per-request-spec-decode-metrics"] = "detailed"
        if self.neighbours and not python.on_cpu:
            beside = memory_beside(self.neighbours, self.gpu_memory_utilization, self.kv_cache_gib)
            options |= {name.replace("_", "-"): value for name, value in beside.items()}
        kind = target_config.described(self.model)
        if python.on_cpu and (self.speculative or {}).get("method") == "eagle3" and target_config.is_latent(kind):
            options["worker-cls"] = cpu.LATENT_WORKER
        flags = ["enforce-eager"] * self.enforce_eager + ["trust-remote-code"] * self.trust_remote_code
        flags += ["enable-prefix-caching" if self.prefix_caching else "no-enable-prefix-caching"]
        # Chats are text only: a vision tower would only take memory, and the prompts that vLLM profiles it with too.
        flags += ["language-model-only"] * (target_config.wraps(kind) and python.can_serve_text_only)
        command = [python.path, "-m", "vllm.entrypoints.openai.api_server"]
        command += [part for key, value in options.items() if value is not None for part in (f"--{key}", str(value))]
        return command + [f"--{flag}" for flag in flags]


def memory_beside(neighbours: int, utilization: float, kv_cache_gib: int) -> dict[str, Any]:
    """vLLM's settings of memory for one of `neighbours` + 1 that start together on a GPU: beside another start it cannot tell how
    much memory is its own, and it does not start where less is free than the share it is told of."""
    return {"kv_cache_memory_bytes": kv_cache_gib << 30, "gpu_memory_utilization": utilization / (neighbours + 1)}


def own_cache(name: str) -> dict[str, str]:
    """The variable that gives a vLLM a folder of its own, called `name`, inside the usual one for what it compiles."""
    usual = os.environ.get("VLLM_CACHE_ROOT") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "vllm")
    return {"VLLM_CACHE_ROOT": os.path.join(os.path.expanduser(usual), re.sub(r"[^\w.-]+", "-", name))}


@contextmanager
def held_port() -> Iterator[int]:
    """A port of 127.0.0.1 that nobody else is given while the block lasts, though a vLLM told of it can listen there.

    Whoever asks Linux for any port, as engines do for ports of their own, would get one that is merely free before the server
    has imported what it needs to listen. A socket of ours stays bound to it without listening: with SO_REUSEADDR on both, as
    vLLM sets it, Linux lets a second one bind and listen.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


@contextmanager
def serve(settings: Settings, log: Path) -> Iterator[Server]:
    """A running server for the length of the block; its output goes to `log`.

    Its whole family of processes is gone after the block, and also when this process dies inside it (see `guard`).

    Raises:
        KitError: the server ended before it answered, or did not answer in time; with the end of its log.
    """
    python = interpreter.look(settings.python)
    log.parent.mkdir(parents=True, exist_ok=True)
    with python.environment() as environment, ExitStack() as stack:
        if python.on_cpu:
            environment |= cpu.vllm_environment(threads=settings.threads, kv_cache_gib=settings.kv_cache_gib,
                                                tensor_parallel=settings.tensor_parallel, prefix=python.prefix)  # fmt: skip
        if settings.cache:
            environment |= own_cache(settings.cache)
        try:
            server = stack.enter_context(_started(settings, log, environment, python.vllm))
        except KitError:
            if not re.search("address already in use", log.read_text(errors="replace"), re.IGNORECASE):
                raise
            # A port that vLLM chose for its own processes, and that another got before they used it: it chooses anew.
            server = stack.enter_context(_started(settings, log, environment, python.vllm))
        yield server


@contextmanager
def _started(settings: Settings, log: Path, environment: dict[str, str], version: str) -> Iterator[Server]:
    key = secrets.token_hex(16)
    with held_port() as port:
        with open(log, "wb") as output:  # of this server alone: an old error must not be taken for a new one
            child = subprocess.Popen(
                [sys.executable, "-m", "eagle3kit.guard", *settings.command(port)], stdin=subprocess.PIPE, stdout=output,
                stderr=subprocess.STDOUT, env={**environment, "VLLM_API_KEY": key}, start_new_session=True,
            )  # fmt: skip
        try:
            server = Server(f"http://127.0.0.1:{port}", log, settings.request_timeout_s, key, version=version)
            _wait_until_ready(server, child, settings.start_timeout_s)
            yield server
        finally:
            child.stdin.close()  # the guard's sign to end the family
            child.wait()


@contextmanager
def several(settings: dict[str, Settings], logs: dict[str, Path], *, at_once: bool) -> Iterator[Callable[[str], Any]]:
    """A function that gives, by name, the context of a running server: `with serving("plain") as server`.

    `at_once`: all are started now, together, and all run until the block ends; the start of a server is mostly waiting on a
    machine with many cores. Else each runs while its context lasts.

    Raises:
        KitError: as `serve`; with `at_once` once every server has started or failed.
    """
    if not at_once:
        yield lambda name: serve(settings[name], logs[name])
        return
    beside = {name: replace(how, neighbours=len(settings) - 1, cache=f"beside-{name}") for name, how in settings.items()}
    with ExitStack() as stack, ThreadPoolExecutor(len(settings)) as pool:
        starting = {name: pool.submit(stack.enter_context, serve(how, logs[name])) for name, how in beside.items()}
        running = {name: one.result() for name, one in starting.items()}
        yield lambda name: nullcontext(running[name])


class _OnDemand:
    """Stands for a server that is started when it is first asked something; its `version` is known before."""

    def __init__(self, start: Callable[[], Server], version: str):
        self._start, self.version = start, version
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
        version = interpreter.look(settings.python).vllm
        yield _OnDemand(lambda: stack.enter_context(serve(settings, log)), version)


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
