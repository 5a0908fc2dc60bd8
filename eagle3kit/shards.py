"""A shard: some prompts that one machine of a cluster answers with a server of its own, and what it sends back.

A shard is what is lost when a machine is, and then asked elsewhere: small, and named by what it is made of (`name`), so that the
same shard has the same name in every run's log. What comes back is bytes, through Ray, to the machine that asked, which checks
and publishes each sample as it does with a server of its own: no disk need be shared for it, and a half-answered shard leaves
nothing behind.
"""

import tempfile
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3kit import fingerprint, hidden_states, interpreter, server, target
from eagle3kit.errors import KitError

if TYPE_CHECKING:
    from eagle3kit.params import Params

# A machine answers this many shards' worth of requests in a row before it sends anything back; see `size`.
ROUNDS, PER_WORKER, MOST_BYTES = 4, 4, 2 * 2**30


@dataclass(frozen=True, kw_only=True)
class Order:
    """What a machine must have and start before its first shard; plain values, and the settings of its server."""

    kit: str
    vllm: str
    model: str
    revision: str | None
    files: str
    settings: server.Settings

    @classmethod
    def of(cls, params: "Params", settings: server.Settings) -> "Order":
        """The order for a run's parameters; `settings.model` is the target's folder on this machine."""
        return cls(kit=kit(), vllm=interpreter.look(settings.python).vllm, model=params.target.model,
                   revision=params.target.revision, files=target.identity(Path(settings.model)), settings=settings)  # fmt: skip


def kit() -> str:
    """A hash of this package's code, without comments and layout: machines that share work must run the same."""
    package = Path(__file__).parent
    return fingerprint.digest({path.name: fingerprint.source(path) for path in sorted(package.glob("*.py"))})


def name(order: Order, prompts: list[list[int]], limits: list[int], seeds: list[int] | None, temperature: float) -> str:
    """The name of a shard: a hash of all that its answers depend on, e.g. "3fa09c117be2d456"."""
    how = asdict(replace(order.settings, model="", kv_transfer=None))
    return fingerprint.digest([order.kit, order.vllm, order.files, how, prompts, limits, temperature, seeds])


def size(prompts: int, workers: int, in_flight: int, bytes_each: int) -> int:
    """How many prompts make a shard: so few that each worker gets about four and that they fit 2 GiB of memory, and at most
    four times what is asked at once, since a server idles while the last few of a shard are answered.

    90 prompts, 2 workers, 8 at once -> 12; Kimi-K2.5's states, 2,048 tokens of 57,344 bytes -> at most 18.
    """
    return max(1, min(-(-prompts // (PER_WORKER * workers)), ROUNDS * in_flight, MOST_BYTES // max(1, bytes_each)))


class Worker:
    """A server of the target on one machine of the cluster. An actor of Ray: errors are returned, {"error": words}, since the
    machine that asked decides what becomes of them."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._server: server.Server | None = None
        self._storage: Path | None = None
        self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="eagle3kit-")))

    def begin(self, order: Order) -> dict[str, Any]:
        """Look whether this machine can take part, and start its server."""
        try:
            if kit() != order.kit:
                raise KitError("another version of eagle3kit is installed there; install the same on every machine")
            found = interpreter.look(order.settings.python).vllm
            if found != order.vllm:
                raise KitError(f"vLLM is {found} there and {order.vllm} here; install the same on every machine")
            model = target.locate(order.model, revision=order.revision)
            if target.identity(model) != order.files:
                raise KitError(f"{order.model} is another target there than here (its files differ); name a target.revision, or "
                               "copy the folder")  # fmt: skip
            settings = replace(order.settings, model=str(model), **self._arriving(order.settings))
            self._server = self._stack.enter_context(server.serve(settings, self._folder / "vllm.log"))
        except KitError as error:
            return {"error": str(error)}
        return {"vllm": found}

    def _arriving(self, settings: server.Settings) -> dict[str, Any]:
        """Where states arrive on this machine, and by which connector: a machine without a GPU may need another."""
        if settings.kv_transfer is None or settings.speculative is None:
            return {}
        self._storage = self._folder / "arriving"
        self._storage.mkdir()
        *layers, last = settings.speculative["draft_model_config"]["hf_config"]["eagle_aux_hidden_state_layer_ids"]
        batched = settings.kv_transfer["kv_connector"].startswith("Batched")
        return hidden_states.server_options(layers, last, self._storage, "batched" if batched else "vllm")

    def answer(self, prompts: list[list[int]], **how: Any) -> list[tuple[Any, ...]] | dict[str, Any]:
        """Answers of a shard, a row each: index, token ids, why it stopped, accepted per step, and states as the bytes of a
        safetensors file ("token_ids" [T], "hidden_states" [T, states, H]) or None."""
        rows = []
        try:
            for index, answer in self._server.complete(prompts, **how):
                states = None if self._storage is None else self._packed(answer.extra)
                rows.append((index, answer.token_ids, answer.finish_reason, answer.accepted_per_step, states))
        except (KitError, OSError) as error:
            return {"error": str(error)}
        return rows

    def _packed(self, extra: dict[str, Any]) -> bytes:
        from safetensors.torch import save

        ids, hidden = hidden_states._take(extra, self._server, self._storage)
        return save({"token_ids": ids.contiguous(), "hidden_states": hidden.contiguous()})

    def log(self) -> bytes:
        """The end of its server's log."""
        path = self._folder / "vllm.log"
        return path.read_bytes()[-1_000_000:] if path.exists() else b""
