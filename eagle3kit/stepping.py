"""In the child of `decode_profile`: make engines, admit prompts, step them by hand, note each step's end.

`python -m eagle3kit.stepping FOLDER` reads FOLDER/request.json and writes FOLDER/answer.json anew after each thing measured.
Engines of one rank on the CPU live side by side and take turns, step by step, so that what slows the machine down for a while
slows down all of them alike. Others are measured one after another; on a GPU they may start together (`turn`).
"""

import contextlib
import faulthandler
import fcntl
import gc
import inspect
import math
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from eagle3kit import child, cpu, server, target_config
from eagle3kit.decode_profile import Engine, Point, Trace
from eagle3kit.files import read_json, write_json

WARM_STEPS = 6
TRACED_STEPS = 8
PREFILLED_AT_ONCE = 2048  # tokens that vLLM reads in one step at least (its smallest default of max_num_batched_tokens)


def main(folder: Path) -> int:
    """Child: every engine of the request, or those words in which it failed; the answer is written anew each time."""
    request = read_json(folder / child.REQUEST)
    engines = [Engine(**asked) for asked in request["engines"]]
    empty = {"done": False, "missing": "", "alternated": False}
    given: list[dict[str, Any]] = [empty | {"points": [], "traces": []} for _ in engines]

    def publish() -> None:
        write_json(folder / child.ANSWER, {"engines": given})

    publish()
    groups: list[list[int]] = []
    for number, engine in enumerate(engines):
        beside = request["cpu"] and groups and engine.tensor_parallel == engines[groups[-1][-1]].tensor_parallel == 1
        groups[-1].append(number) if beside else groups.append([number])
    for group in groups:
        _measure([(engines[number], given[number]) for number in group], folder, request["cpu"], publish, group is groups[-1],
                 request.get("turn"))  # fmt: skip
    return 0


def _start_beside(turn: dict[str, Any] | None) -> None:
    """Engines start beside others: whoever has not started in time ends, with its stack in the log."""
    if turn:
        faulthandler.dump_traceback_later(turn["seconds"], exit=True)


def _wait_for_turn(turn: dict[str, Any] | None) -> None:
    """Until every engine beside this one has started or failed (its `mark` is gone), and no other is being measured. Whoever has
    its turn has its mark again: `decode_profile._together` takes it away once all of that engine's processes are gone."""
    if not turn:
        return
    faulthandler.cancel_dump_traceback_later()
    mark = Path(turn["mark"])
    mark.unlink(missing_ok=True)
    with open(turn["file"], "a", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # of those that wait, one looks at the marks
        while any(mark.parent.iterdir()):
            time.sleep(0.2)
        mark.touch()
    faulthandler.dump_traceback_later(turn["seconds"], exit=True)


def _measure(
    group: list[tuple[Engine, dict[str, Any]]], folder: Path, on_cpu: bool, publish: Callable[[], None], last: bool,
    turn: dict[str, Any] | None,
) -> None:  # fmt: skip
    """Start the engines of `group` and measure what each asks for, into its dictionary; with a `turn` (as `decode_profile` asks),
    when those of other processes have started and none is being measured. After the `last` group of engines that share this
    process it does not return: the process ends."""
    running: list[tuple[_Running, dict[str, Any]]] = []

    @contextlib.contextmanager
    def failing(into: list[dict[str, Any]]) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # vLLM raises whatever its parts raise; what else was asked for is still worth measuring
            traceback.print_exc()
            for one in into:
                one["missing"] = one["missing"] or f"{type(error).__name__}: {(str(error).strip() or 'no words').splitlines()[0]}"
        publish()

    with contextlib.ExitStack() as stack:
        _start_beside(turn)
        for engine, into in group:
            if on_cpu and not engine.custom_allreduce and (why := cpu.no_shared_memory()):
                into["missing"] = f"{why}, so its ranks reduce by gloo anyway"
                publish()
                continue
            with failing([into]):
                started = stack.enter_context(_started(engine, folder, on_cpu))
                into |= {"start_seconds": started.start_seconds, "alternated": len(group) > 1, "pretended": _pretends(engine)}
                running.append((started, into))
        if running:
            _wait_for_turn(turn)
        for place in dict.fromkeys(tuple(point) for started, _ in running for point in started.engine.points):
            those = []
            for started, into in running:
                if list(place) in map(list, started.engine.points):
                    with failing([into]):
                        started.refuse_overfull(*place)
                        those.append((started, into))
            if not those:
                continue
            with failing([into for _, into in those]):
                for (_, into), point in zip(those, _timed([started for started, _ in those], *place), strict=True):
                    into["points"].append(asdict(point))
                print(f"profile: step times at batch {place[0]}, context {place[1]} done", flush=True)
        for started, into in running:
            for batch, context in started.engine.traced:
                with failing([into]):
                    into["traces"].append(asdict(started.trace(batch, context)))
        for _, into in running:
            into["done"] = not into["missing"]
        publish()
        if last and on_cpu and all(engine.tensor_parallel == 1 for engine, _ in group):
            # All is in this process and written down. Taking engines apart tensor by tensor takes 20 s; ending takes none.
            sys.stdout.flush()
            os._exit(0)


def _timed(running: list["_Running"], batch: int, context: int) -> list[Point]:
    """A Point of each engine, whose steps take turns."""
    with contextlib.ExitStack() as stack:
        decoding = [stack.enter_context(one.decoding(batch, context)) for one in running]
        rounds = [[next(steps) for _, steps in decoding] for _ in range(min(one.engine.steps for one in running))]
    columns = [list(zip(*column, strict=True)) for column in zip(*rounds, strict=True)]
    return [Point(batch, context, list(seconds), sum(tokens) / len(tokens) / batch, held)
            for (held, _), (seconds, tokens) in zip(decoding, columns, strict=True)]  # fmt: skip


class _Running:
    """A started engine, stepped by hand."""

    def __init__(self, engine: Engine, llm: Any, start_seconds: float, traces: Path):
        self.engine, self.llm, self.start_seconds, self.traces = engine, llm, start_seconds, traces
        self._asked = 0
        self._vocabulary = llm.llm_engine.model_config.get_vocab_size()
        cache = llm.llm_engine.vllm_config.cache_config
        # Tokens; 0 where this vLLM does not say.
        self.cached = getattr(cache, "kv_cache_size_tokens", None) or (cache.num_gpu_blocks or 0) * (cache.block_size or 0)

    def refuse_overfull(self, batch: int, context: int) -> None:
        """RuntimeError where the keys and values of `batch` sequences do not fit until their last step: some would wait, and the
        steps that are timed would be of fewer."""
        engine = self.engine
        steps = _room(engine, batch, context) / (engine.draft_tokens + 1)
        each = context + math.ceil(steps * (engine.synthetic_length or 1 if _pretends(engine) else 1)) + engine.draft_tokens
        if 0 < self.cached < batch * each:
            raise RuntimeError(f"{batch} sequences of {each:,} tokens do not fit together: vLLM's cache holds {self.cached:,} "
                               "tokens; raise server.kv_cache_gib (of an engine alone on a GPU: "
                               "server.gpu_memory_utilization), or lower profile.batches, contexts or steps")  # fmt: skip

    def trace(self, batch: int, context: int) -> Trace:
        """Decode steps of `batch` sequences, traced by torch's profiler in vLLM's workers; files in a folder of their own."""
        count = min(self.engine.steps, TRACED_STEPS)
        before = set(self.traces.glob("**/*.pt.trace.json*"))
        self.refuse_overfull(batch, context)
        with self.decoding(batch, context) as (_, steps):
            self.llm.start_profile()
            for _ in range(count):
                next(steps)
            self.llm.stop_profile()
        new = [path for path in self.traces.glob("**/*.pt.trace.json*") if path not in before]
        place = self.traces / f"batch-{batch}-context-{context}"
        place.mkdir(parents=True, exist_ok=True)
        ranked = {rank: path for path in new if (rank := _rank_of(path)) is not None}
        files = []
        for rank in sorted(ranked):
            kept = place / f"rank-{rank}.json{'.gz' if ranked[rank].suffix == '.gz' else ''}"
            os.replace(ranked[rank], kept)
            files.append(str(kept))
        if len(files) != self.engine.tensor_parallel:
            raise RuntimeError(f"{self.engine.tensor_parallel} ranks left {len(files)} traces: {[path.name for path in new]}")
        return Trace(batch, context, count, files)

    @contextlib.contextmanager
    def decoding(self, batch: int, context: int) -> Iterator[tuple[float, Iterator[tuple[float, int]]]]:
        """All sequences admitted, prefilled and warm: (tokens each holds, (seconds, new tokens) of step after step)."""
        from vllm import SamplingParams

        core = self.llm.llm_engine
        most = _room(self.engine, batch, context)  # what is left over is given up afterwards
        sampling = SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True, detokenize=False)
        names: list[str] = []
        written: dict[str, int] = {}

        def step() -> int:
            fresh = 0
            for output in core.step():
                count = len(output.outputs[0].token_ids)
                fresh += count - written[output.request_id]
                written[output.request_id] = count
                if output.finished:
                    raise RuntimeError(f"a sequence ended after {count} of {most} tokens, before the steps of all were timed")
            return fresh

        def following() -> Iterator[tuple[float, int]]:
            while True:
                begun, fresh = time.perf_counter(), 0
                while not fresh:  # an engine that schedules ahead returns empty-handed now and then
                    fresh = step()
                yield time.perf_counter() - begun, fresh

        try:
            for row in range(batch):
                self._asked += 1
                names.append(f"profile-{self._asked}")
                # Other tokens in every prompt, so that no cache of prefixes shortens the work.
                ids = [(17 * self._asked + 31 * place + row) % (self._vocabulary - 10) + 5 for place in range(context)]
                core.add_request(names[-1], {"prompt_token_ids": ids}, sampling)
                written[names[-1]] = 0
            while not all(written.values()):
                step()
            for _ in range(WARM_STEPS):
                step()
            yield context + sum(written.values()) / batch, following()
        finally:  # also when it failed: what is measured next is to be alone
            core.abort_request(names)
            while core.has_unfinished_requests():
                core.step()


def _room(engine: Engine, batch: int, context: int) -> int:
    """New tokens that a sequence may need: steps while the others are still read, then the warm and the timed ones, each with
    all its draft tokens accepted."""
    reading = batch * context // PREFILLED_AT_ONCE + 2
    return (reading + WARM_STEPS + max(engine.steps, TRACED_STEPS) + 2) * (engine.draft_tokens + 1)


def _rank_of(path: Path) -> int | None:
    """The rank in the name of a worker's trace ("rank1", "…_tp1…"); None for the front end's own trace."""
    found = re.search(r"(?:rank|tp)[-_]?(\d+)", path.name)
    return int(found[1]) if found else None


@contextlib.contextmanager
def _started(engine: Engine, folder: Path, on_cpu: bool) -> Iterator[_Running]:
    """The engine, started for the length of the block and gone after it."""
    variables = cpu.vllm_environment(threads=engine.threads, kv_cache_gib=engine.kv_cache_gib,
                                     tensor_parallel=engine.tensor_parallel) if on_cpu else {}  # fmt: skip
    with _variables(variables):
        from vllm import LLM

        traces = folder / "traces" / engine.name
        begun = time.monotonic()
        llm = LLM(**_arguments(engine, traces, LLM))
        try:
            yield _Running(engine, llm, time.monotonic() - begun, traces)
        finally:
            if on_cpu:  # on a GPU the end of this process does it
                with contextlib.suppress(Exception):  # the way it is shut down differs among versions
                    llm.llm_engine.engine_core.shutdown()
                from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

                del llm
                gc.collect()
                cleanup_dist_env_and_memory()


@contextlib.contextmanager
def _variables(wanted: dict[str, str]) -> Iterator[None]:
    kept = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in kept.items():
            os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)


def _arguments(engine: Engine, traces: Path, llm: type) -> dict[str, Any]:
    """Keyword arguments of vLLM's LLM for `engine`."""
    places = [*engine.points, *engine.traced]
    longest = max(context + _room(engine, batch, context) for batch, context in places)
    found: dict[str, Any] = {
        "model": engine.model, "dtype": engine.dtype, "load_format": "dummy" if engine.dummy else "auto",
        "skip_tokenizer_init": True, "enforce_eager": engine.enforce_eager, "tensor_parallel_size": engine.tensor_parallel,
        "max_model_len": longest + engine.draft_tokens + 1, "max_num_seqs": max(batch for batch, _ in places),
        "gpu_memory_utilization": engine.gpu_memory_utilization, "enable_prefix_caching": False,
        "trust_remote_code": engine.trust_remote_code, "disable_custom_all_reduce": not engine.custom_allreduce,
    }  # fmt: skip
    if engine.neighbours and not cpu.is_cpu():
        found |= server.memory_beside(engine.neighbours, engine.gpu_memory_utilization, engine.kv_cache_gib)
    if not engine.custom_allreduce and cpu.is_cpu():  # that switch is for GPUs
        found["worker_cls"] = "eagle3kit.gloo_worker.GlooWorker"
    if engine.draft:
        if cpu.is_cpu() and target_config.is_latent(target_config.described(engine.model)):
            found["worker_cls"] = cpu.LATENT_WORKER
        found["speculative_config"] = {"method": "eagle3", "model": engine.draft, "num_speculative_tokens": engine.draft_tokens}
        if _pretends(engine):
            found["speculative_config"] |= {"rejection_sample_method": "synthetic",
                                            "synthetic_acceptance_length": engine.synthetic_length}  # fmt: skip
    if engine.traced:
        traces.mkdir(parents=True, exist_ok=True)
        found["profiler_config"] = {"profiler": "torch", "torch_profiler_dir": str(traces.resolve()),
                                    "torch_profiler_with_stack": False}  # fmt: skip
    return found


def _pretends(engine: Engine) -> bool:
    return engine.draft is not None and engine.synthetic_length is not None and can_pretend(engine.draft_tokens)


def can_pretend(draft_tokens: int) -> bool:
    """Whether the installed vLLM can pretend acceptance here: it knows the setting, and its sampler runs on a GPU.

    (0.32's sampler on the CPU refuses: "Synthetic acceptance not supported with CPU sampling".)
    """
    if cpu.is_cpu() or draft_tokens < 1:
        return False
    from vllm.config import SpeculativeConfig

    return "synthetic_acceptance_length" in inspect.signature(SpeculativeConfig).parameters


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
