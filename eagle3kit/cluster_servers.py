"""The servers of a cluster's machines as one (`cluster`): shards go to whoever is free, and elsewhere when a machine is lost.

A machine with GPUs gets a server for every `server.tensor_parallel` of them, one without gets one; where any has GPUs, those
without are left alone. A machine that joins meanwhile takes part.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3kit import shards
from eagle3kit.asking import Answer
from eagle3kit.cluster import Node, first_line, joined, nodes, on
from eagle3kit.errors import KitError
from eagle3kit.files import write_bytes

if TYPE_CHECKING:
    from eagle3kit.params import Params
    from eagle3kit.server import Settings

LOOK_S = 1.0  # between looks at who has come and gone
NODE_TRIES = 2  # servers that may fail on one machine before it is left alone
BUSY_S = 60.0  # beside the time that a server may take to start: until Ray has found it room


@dataclass
class _Place:
    """A worker and where it is; `ready` once its server answers."""

    node: Node
    actor: Any
    ready: bool = False


@dataclass
class Servers:
    """The servers of all machines, as one (`asking.Fleet` is the same for servers that run already). They start when they are
    first asked and stay until `close`."""

    ray: Any
    order: shards.Order
    retries: int
    told: Callable[[str], None]
    bytes_each: int
    places: list[_Place] = field(default_factory=list)
    running: dict[Any, tuple[_Place, list[int]]] = field(default_factory=dict)  # an empty shard: the server is starting
    failed: Counter = field(default_factory=Counter)
    reasons: dict[str, str] = field(default_factory=dict)

    @property
    def version(self) -> str:
        """vLLM's, on every machine."""
        return self.order.vllm

    def complete(
        self, prompts: Sequence[list[int]], *, max_tokens: int | Sequence[int], in_flight: int, temperature: float = 0.0,
        seeds: Sequence[int] | None = None, report: Callable[[int, int], None] | None = None,
    ) -> "Answers":  # fmt: skip
        """As `asking.Server.complete`, with `in_flight` requests at once to each server.

        Raises:
            KitError: a shard failed more than `server.retries` times, or no machine is left that can answer; what came before
                stands.
        """
        limits = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else list(max_tokens)
        how = {"in_flight": in_flight, "temperature": temperature}
        return Answers(self._stream(list(prompts), limits, seeds and list(seeds), how, report))

    def _stream(self, prompts: list[list[int]], limits: list[int], seeds: list[int] | None, how: dict[str, Any],
                report: Callable[[int, int], None] | None) -> Iterator[tuple[int, Answer]]:  # fmt: skip
        if not prompts:
            return
        running = self.running
        self._fill()
        step = shards.size(len(prompts), max(1, len(self.places)), how["in_flight"], self.bytes_each)
        waiting = deque(list(range(start, min(start + step, len(prompts)))) for start in range(0, len(prompts), step))
        tries, done, deadline = Counter(), 0, time.monotonic() + self.order.settings.start_timeout_s + BUSY_S
        try:
            while waiting or any(shard for _, shard in running.values()):
                self._fill()
                self._require_one_by(deadline)
                busy = {id(place) for place, _ in running.values()}
                for place in [place for place in self.places if place.ready and id(place) not in busy][: len(waiting)]:
                    shard = waiting.popleft()
                    asked, most, drawn = _part(shard, prompts, limits, seeds)
                    running[place.actor.answer.remote(asked, max_tokens=most, seeds=drawn, **how)] = (place, shard)
                for ref in self.ray.wait(list(running), timeout=LOOK_S)[0]:
                    place, shard = running.pop(ref)
                    said = self._said(ref)
                    if isinstance(said, str):
                        self._leave(place, said, len(shard))
                        if shard:
                            waiting.appendleft(shard)
                            tries[shard[0]] += 1
                        if tries[shard[0] if shard else -1] > max(1, self.retries):
                            named = shards.name(self.order, *_part(shard, prompts, limits, seeds), how["temperature"])
                            raise KitError(f"shard {named} ({len(shard)} prompts) failed {tries[shard[0]]} times, last on "
                                           f"{place.node.name}: {said}. {done} of {len(prompts)} prompts are answered and "
                                           "kept; run the stage again: it goes on from there")  # fmt: skip
                    elif not shard:
                        place.ready = True
                        self.told(f"{place.node.name}: vLLM {said['vllm']} answers")
                    else:
                        for row, ids, why, accepted, states in said:
                            done += 1
                            if report:
                                report(done, len(prompts))
                            yield shard[row], Answer(ids, why, {"states": states} if states else {}, accepted)
        finally:
            # Whoever stops listening, or meets an error, does not wait for answers that are still being written.
            for ref in [ref for ref, (_, shard) in running.items() if shard]:
                self._end(running.pop(ref)[0])

    def _fill(self) -> None:
        """Start a worker wherever there is room for one; KitError when there is none at all."""
        settings = self.order.settings
        there = nodes(self.ray)
        on_gpus = any(node.gpus for node in there)
        for node in there:
            room = node.gpus // settings.tensor_parallel if on_gpus else min(1, node.cpus)
            if node.gpus and not room:
                self.reasons[node.name] = f"{node.gpus} GPUs, fewer than server.tensor_parallel ({settings.tensor_parallel})"
            have = sum(place.node.id == node.id for place in self.places)
            where = on(node, gpus=settings.tensor_parallel if on_gpus else 0, cpus=min(node.cpus, settings.threads or node.cpus))
            for _ in range(room - have if self.failed[node.id] < NODE_TRIES else 0):
                place = _Place(node, self.ray.remote(shards.Worker).options(**where).remote())
                self.places.append(place)
                self.running[place.actor.begin.remote(self.order)] = (place, [])
        if not self.places:
            reasons = "\n".join(f"- {name}: {why}" for name, why in self.reasons.items()) or "- none has a core or a GPU"
            raise KitError(f"no machine of the cluster can answer:\n{reasons}\nWhat came before is kept; run the stage again")

    def _require_one_by(self, deadline: float) -> None:
        if time.monotonic() > deadline and not any(place.ready for place in self.places):
            raise KitError("no machine of the cluster has started a server in time: others may hold its cores or GPUs (ray "
                           "status says so); wait, or raise server.start_timeout_s, and run the stage again")  # fmt: skip

    def _said(self, ref: Any) -> Any:
        """What a worker gave, or in words why it did not."""
        try:
            said = self.ray.get(ref)
        except self.ray.exceptions.RayError as error:
            return first_line(error)
        return said["error"] if isinstance(said, dict) and "error" in said else said

    def _leave(self, place: _Place, reason: str, prompts: int) -> None:
        """Ask this worker nothing more. Its machine gets another, unless it has failed too often."""
        self.told(f"{place.node.name} is out: {reason}" + (f"; its {prompts} prompts go elsewhere" if prompts else ""))
        self.reasons[place.node.name] = reason
        self.failed[place.node.id] += 1
        self._end(place)

    def _end(self, place: _Place) -> None:
        if place in self.places:
            self.places.remove(place)
        with suppress(Exception):  # it may be gone already, with its machine
            self.ray.kill(place.actor)

    def close(self, log: Path) -> None:
        """End all servers; the end of each one's log is kept beside `log`, as vllm-ADDRESS-ID-N.log."""
        for number, place in enumerate(list(self.places)):
            with suppress(self.ray.exceptions.RayError):  # a machine that has died says nothing more
                text = self.ray.get(place.actor.log.remote(), timeout=10) if place.ready else b""
                write_bytes(log.with_name(f"{log.stem}-{place.node.address}-{place.node.id[:6]}-{number}{log.suffix}"), text)
            self._end(place)


def _part(shard: list[int], prompts: list[list[int]], limits: list[int], seeds: list[int] | None) -> tuple[Any, ...]:
    """The prompts of a shard, the most tokens of each answer, and the seeds, if any."""
    return [prompts[index] for index in shard], [limits[index] for index in shard], seeds and [seeds[index] for index in shard]


class Answers:
    """(index of the prompt, Answer), as they come. A shard is repeated by `Servers`, so no single answer is asked for again."""

    def __init__(self, stream: Iterator[tuple[int, Answer]]):
        self._stream = stream

    def __iter__(self) -> "Answers":
        return self

    def __next__(self) -> tuple[int, Answer]:
        return next(self._stream)

    def again(self, index: int, reason: str) -> bool:
        """False: there is no second try for one prompt alone."""
        return False


@contextmanager
def servers(params: "Params", settings: "Settings", log: Path, told: Callable[[str], None]) -> Iterator[Servers]:
    """The servers of the machines that `params.cluster` names; `settings` as for a server of our own.

    Raises:
        KitError: there is no such cluster.
    """
    order = shards.Order.of(params, settings)
    with joined(params.cluster) as ray:
        found = nodes(ray)
        cores, gpus = sum(node.cpus for node in found), sum(node.gpus for node in found)
        told(f"cluster {params.cluster}: {len(found)} machines, {cores} cores, {gpus} GPUs")
        crew = Servers(ray, order, params.server.retries, told, _bytes_each(settings))
        try:
            yield crew
        finally:
            crew.close(log)


def _bytes_each(settings: "Settings") -> int:
    """Bytes of states that the longest prompt gives; 0 where none are asked for."""
    from eagle3kit import target

    if settings.speculative is None:
        return 0
    ids = settings.speculative["draft_model_config"]["hf_config"]["eagle_aux_hidden_state_layer_ids"]
    width = target.geometry(Path(settings.model), trust_remote_code=settings.trust_remote_code).hidden_size
    return (settings.max_model_len or 0) * len(ids) * width * (4 if settings.dtype == "float32" else 2)
