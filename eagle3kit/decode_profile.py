"""The engine measured: how long a decode step of vLLM takes, with and without speculation, and traces of its kernels.

`measure` starts children (`stepping`), each of which makes vLLM's offline `LLM`, with dummy weights unless told otherwise, and
steps it by hand. A step with speculation is one verify step of K + 1 tokens a sequence and the draft's K passes for the next.

An untrained draft proposes tokens that are never accepted. That does not matter for the *time* of a step: vLLM verifies all
K + 1 tokens either way. Where vLLM can pretend that drafts are accepted (`rejection_sample_method: synthetic`, not on the CPU)
it is told to, so that sequences grow as they would.
"""

import contextlib
import os
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

from eagle3kit import child, cpu, dummy_target, machine, server
from eagle3kit.errors import KitError
from eagle3kit.files import read_json
from eagle3kit.machine import DTYPE_BYTES

if TYPE_CHECKING:
    from eagle3kit.params import Params

@dataclass(frozen=True, kw_only=True)
class Engine:
    """One engine and what to ask it: steps are timed at each of `points`, (batch, context), then traced at each of `traced`.

    `draft`: a draft directory, None for no speculation.

    `synthetic_length`: mean tokens a verify step that vLLM is to pretend, None for what the draft really earns.
    `stands_for`: draft tokens whose verify step is imitated by plain steps of as many tokens, 0 for none.
    `custom_allreduce`: whether vLLM may use its own all-reduce (on the CPU: shared memory), or NCCL (gloo) alone.
    `neighbours`: other engines that start and run beside it, on the same GPU.
    `group`: engines are compared with those of their group: "" is what the verdict is about, "traced" an A/B of the all-reduce on
    other ranks, "fewer" the same geometry with fewer layers.
    """

    name: str
    model: str
    points: list[tuple[int, int]]
    traced: list[tuple[int, int]] = field(default_factory=list)
    steps: int = 12
    dtype: str = "float32"
    dummy: bool = True
    draft: str | None = None
    draft_tokens: int = 0
    synthetic_length: float | None = None
    stands_for: int = 0
    tensor_parallel: int = 1
    custom_allreduce: bool = True
    group: str = ""
    enforce_eager: bool = True
    gpu_memory_utilization: float = 0.2
    kv_cache_gib: int = 2
    threads: int | None = None
    trust_remote_code: bool = False
    neighbours: int = 0

    @property
    def depth(self) -> int:
        """Draft tokens of its steps, real or imitated; 0 for plain ones."""
        return self.draft_tokens or self.stands_for

    @property
    def baseline(self) -> bool:
        """Whether its steps are the plain ones that all others of its group are compared with."""
        return bool(self.points) and not self.depth and self.custom_allreduce


@dataclass(frozen=True)
class Point:
    """Steps at one batch and context (prompt tokens): seconds of each, new tokens of a sequence in a step (1 without
    speculation), and the tokens that a sequence had on average when the first of them began."""

    batch: int
    context: int
    seconds: list[float]
    tokens_per_step: float
    tokens_held: float


@dataclass(frozen=True)
class Trace:
    """Trace files, one a rank in rank order, of `steps` decode steps of `batch` sequences after `context` tokens."""

    batch: int
    context: int
    steps: int
    files: list[str]


@dataclass(frozen=True)
class Profiled:
    """What one engine gave; `missing` says why when it did not give all that was asked, "" when it did. `alternated`: its steps
    took turns with those of the other engines, so that step i of each had the same company. `pretended`: vLLM pretended
    `synthetic_length`. `child`: engines of one name were measured in the same process."""

    engine: Engine
    points: list[Point] = field(default_factory=list)
    traces: list[Trace] = field(default_factory=list)
    start_seconds: float | None = None
    missing: str = ""
    alternated: bool = False
    pretended: bool = False
    child: str = ""

    def at(self, batch: int, context: int) -> Point | None:
        """The point of a batch and context, None where it was not measured."""
        return next((point for point in self.points if (point.batch, point.context) == (batch, context)), None)


def batches(params: "Params") -> list[int]:
    """Sequences decoded at once: `profile.batches`; without it 1, and as many as 08_acceptance serves, for its forecast."""
    asked = params.profile.batches
    return asked or sorted({1, min(params.acceptance.in_flight, params.acceptance.prompts)})


def depths(params: "Params") -> list[int]:
    """Numbers of draft tokens: `profile.draft_tokens`; without it the one that 08_acceptance serves."""
    return params.profile.draft_tokens or [params.acceptance.draft_tokens]


def settings(params: "Params", ranks: int) -> dict[str, Any]:
    """The fields of Engine that a run's `server`, `target` and `profile` sections give, for `ranks` ranks."""
    served = params.server
    return {
        "dtype": params.target.dtype, "steps": params.profile.steps, "tensor_parallel": ranks, "threads": served.threads,
        "enforce_eager": served.enforce_eager, "gpu_memory_utilization": served.gpu_memory_utilization,
        "kv_cache_gib": served.kv_cache_gib, "trust_remote_code": params.target.trust_remote_code,
        "points": [(batch, context) for context in params.profile.contexts for batch in batches(params)],
    }  # fmt: skip


def measure(engines: Sequence[Engine], folder: Path, *, timeout_s: float = 600, at_once: bool = False) -> list[Profiled]:
    """Start each of `engines` in turn in `folder`, and return what each gave, in order; a failed one says why.

    On the CPU one child makes them all, which saves the import of vLLM (10 s), and engines of one rank take turns; those of other
    thread counts get a child of their own, and so does a second cut ("fewer") that does not fit into memory beside the first. On
    a GPU each has its own child, for only its end surely frees the memory; `at_once` has these start together, which is mostly
    waiting, and then be measured one after another, with `Engine.kv_cache_gib` of memory for keys and values each.

    Raises:
        KitError: an engine names more ranks than there are GPUs, or not one of those asked for gave anything.
    """
    on_cpu = cpu.is_cpu()
    _refuse_missing_gpus(engines, on_cpu)
    groups: list[list[Engine]] = []
    alone = on_cpu and not _fit(engines)
    for engine in engines:
        last = groups[-1][-1] if groups else None
        joined = last is not None and last.threads == engine.threads and (not alone or last.group == engine.group)
        if on_cpu and joined:
            groups[-1].append(engine)
        else:
            groups.append([engine])
    if at_once and not on_cpu and len(groups) > 1:
        found = _together(engines, folder, on_cpu, timeout_s)
    else:
        found = [profiled for group in groups for profiled in _measured(group, folder, on_cpu, timeout_s)]
    if found and not any(profiled.points or profiled.traces for profiled in found):
        raise KitError(f"no engine could be measured; {found[0].missing}")
    return found


def _together(engines: Sequence[Engine], folder: Path, on_cpu: bool, timeout_s: float) -> list[Profiled]:
    """Each of `engines` in a child of its own, all started now. A mark says that one has not started yet, or is being measured:
    whoever is up waits until there is none. What gave nothing is started again, alone."""
    stop, turn, marks = Event(), folder / "turn", folder / "starting"
    shutil.rmtree(marks, ignore_errors=True)
    marks.mkdir(parents=True)
    turn.unlink(missing_ok=True)
    for number in range(len(engines)):  # all, before any can look
        (marks / str(number)).touch()

    def one(number: int, engine: Engine) -> Profiled:
        place, mark = folder / engine.name, marks / str(number)
        request = {"engines": [asdict(replace(engine, neighbours=len(engines) - 1))], "cpu": on_cpu,
                   "turn": {"file": str(turn), "mark": str(mark), "seconds": timeout_s}}  # fmt: skip
        # What they compile would be the same files, written at the same time.
        environment = _environment(engine, on_cpu) | server.own_cache(f"beside-{engine.name}")
        try:
            answer, why = child.call("eagle3kit.stepping", request, place, timeout_s=timeout_s * (len(engines) + 1), stop=stop,
                                     environment=environment)  # fmt: skip
        except KitError as error:
            return _profiled(engine, {}, str(error).splitlines()[0], place)
        finally:
            mark.unlink(missing_ok=True)
        return _profiled(engine, answer["engines"][0], why, place)

    with ThreadPoolExecutor(len(engines)) as pool:
        try:
            found = list(pool.map(one, range(len(engines)), engines))
        finally:
            stop.set()  # whoever is interrupted here does not wait for them
    for number, one in enumerate(found):
        if not (one.points or one.traces):
            with contextlib.suppress(KitError):  # then what is known of the first time stands
                [found[number]] = _measured([one.engine], folder / "again", on_cpu, timeout_s)
    return found


def _measured(engines: list[Engine], folder: Path, on_cpu: bool, timeout_s: float) -> list[Profiled]:
    """`engines` in one child; where it died with engines of several groups in it, what is left again, a child for each group."""
    place = folder / engines[0].name
    request = {"engines": [asdict(engine) for engine in engines], "cpu": on_cpu}
    answer, why = child.call("eagle3kit.stepping", request, place, timeout_s=timeout_s * len(engines),
                             environment=_environment(engines[0], on_cpu))  # fmt: skip
    given = [*answer["engines"], *[{}] * (len(engines) - len(answer["engines"]))]
    found = {one.name: _profiled(one, each, why, place) for one, each in zip(engines, given, strict=True)}
    left = [one for one, each in zip(engines, given, strict=True) if not (each.get("done") or each.get("missing"))]
    groups = dict.fromkeys(one.group for one in left)
    if "ended with code" in why and len({one.group for one in engines}) > 1:  # most likely for want of memory
        for group in groups:
            again = [one for one in left if one.group == group]
            found |= {one.engine.name: one for one in _measured(again, folder / "again", on_cpu, timeout_s)}
    return [found[one.name] for one in engines]


def _profiled(engine: Engine, given: dict[str, Any], why: str, place: Path) -> Profiled:
    missing = given.get("missing") or ("" if given.get("done") else why or "it was not reached")
    return Profiled(engine, [Point(**point) for point in given.get("points", [])],
                    [Trace(**trace) for trace in given.get("traces", [])], given.get("start_seconds"),
                    f"{missing} (log: {place / child.LOG})" if missing else "", given.get("alternated", False),
                    given.get("pretended", False), place.name)  # fmt: skip


def _fit(engines: Sequence[Engine]) -> bool:
    """Whether engines of one rank that have a second cut ("fewer") among them fit into half of the free memory side by side:
    weights are repacked as they are loaded, and others use this machine too."""
    mine = [one for one in engines if one.tensor_parallel == 1]
    if not any(one.group == "fewer" for one in mine):
        return True
    return sum(map(gib, mine)) < 0.5 * machine.inventory(Path(mine[0].model))["free_memory_gib"]


def gib(engine: Engine) -> float:
    """About the memory that an engine takes on the CPU: weights (embedding and head, and of a layer attention, MLP or experts; a
    draft counts as a layer), keys and values, and a tenth more. 3 layers of Llama-3.1-8B, bfloat16, 1 GiB of these: 4.6."""
    found = read_json(Path(engine.model) / "config.json")
    shape, width = dummy_target.geometry(found), found["hidden_size"]
    heads = shape.attention_heads * int(found.get("head_dim") or width // shape.attention_heads)
    shared = int(found.get("n_shared_experts") or 0)
    inner = int(found.get("moe_intermediate_size") or found.get("intermediate_size") or 4 * width)
    layer = 2 * width * (heads + width) + 3 * width * inner * max(1, shape.experts + shared)
    vocabulary = (1 if found.get("tie_word_embeddings") else 2) * shape.vocab_size * width
    weights = vocabulary + layer * (shape.layers + bool(engine.draft))
    return 1.1 * weights * DTYPE_BYTES[engine.dtype] / 2**30 + engine.kv_cache_gib


def _refuse_missing_gpus(engines: Sequence[Engine], on_cpu: bool) -> None:
    most = max((engine.tensor_parallel for engine in engines), default=1)
    if on_cpu:
        there, what = len(cpu.cores()), "cores"
    else:
        import torch

        there, what = torch.cuda.device_count(), "GPUs"
    if most > there:
        raise KitError(f"an engine of {most} ranks is asked for, but there are {there} {what} here; lower server.tensor_parallel "
                       "or profile.trace_tensor_parallel")  # fmt: skip


def _environment(engine: Engine, on_cpu: bool) -> dict[str, str]:
    """Variables a child needs from its start: on the CPU, the cores that its own threads compute on when it is alone."""
    if not on_cpu:
        # The parent of the ranks must not own a GPU itself, or they cannot be forked.
        return {"VLLM_WORKER_MULTIPROC_METHOD": os.environ.get("VLLM_WORKER_MULTIPROC_METHOD", "spawn")}
    variables = cpu.vllm_environment(threads=engine.threads, kv_cache_gib=engine.kv_cache_gib)
    cores = variables["VLLM_CPU_OMP_THREADS_BIND"]
    # What vLLM sets for a worker of its own (utils/ompmultiprocessing.py); here the engine's process is the worker.
    return variables | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": str(cores.count(",") + 1),
                        "KMP_AFFINITY": f"granularity=fine,explicit,proclist=[{cores}]", "KMP_BLOCKTIME": "5"}  # fmt: skip
