"""A hidden-states connector for vLLM that handles a step at a time, not a request. Loaded by vLLM, by this module's name.

vLLM's own (`ExampleHiddenStatesConnector`, "a simple debug implementation") does for every finished request, on the thread
that drives the model: a slot table, a gather of a few kernels, page-locked memory of just that size (the driver takes a
millisecond and more for what it has not given before), an event, a lock file; and every prompt is hashed, for nobody. Here all
requests that one step finished are gathered at once, by one kernel in the model's own stream: whatever overwrites their blocks
comes after it there, so they are free at once. A stream of its own copies what was gathered into one of a few page-locked rooms
(`states_rooms`); processes write the files from there (`states_writer`), shared out among them. What is left to the thread that
drives the model is a few microseconds a request. When every room is in use the model waits: what is under way is bounded. *Which*
states are written for whom stays vLLM's.

The files are byte for byte those of vLLM's connector (`states_file`), but published whole under their name instead of locked
while they grow; the answer says so (`published_whole`), for the reader to know what to wait for. `account` says where time went.
"""

import queue
import threading
import time
from array import array
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    extract_from_kv_cache,
)
from vllm.logger import init_logger

from eagle3kit import cpu, states_file
from eagle3kit.cache_slots import grouped, shares, slots
from eagle3kit.states_rooms import Room, Rooms
from eagle3kit.states_writer import File, Writer

logger = init_logger(f"vllm.{__name__}")  # what vLLM logs is what is below its own name

ROOMS, MOST_BYTES = 8, 2 << 30  # rooms, and the page-locked memory that they take at most (but two there are)
WRITERS = 8  # at most, unless the setting "writers" of the connector says otherwise; one writes 1 to 3 GB/s


@dataclass
class Save:
    """A finished request, as vLLM's PendingSave; its token ids are an array of int64, which costs a tenth of a tensor to make."""

    req_id: str
    filename: str
    token_ids: array
    block_ids: list[int]


def _no_hashes() -> None:
    """The engine that is being made hashes no prompts.

    With any connector vLLM hashes every block of every prompt, for connectors that look prompts up; the blocks are then as small
    as those of the states, often two tokens, so a prompt of 345 costs 172 hashes. This one looks nothing up, and without prefix
    caching nobody else does. vLLM's function is put back as soon as the engine has asked for its own.
    """
    from vllm.v1.engine import core

    usual = getattr(core, "get_request_block_hasher", None)

    def instead(*_: Any, **__: Any) -> Any:
        core.get_request_block_hasher = usual
        return lambda request: []

    if usual is not None:  # a vLLM that makes them elsewhere stays as it is
        core.get_request_block_hasher = instead


class BatchedHiddenStatesConnector(ExampleHiddenStatesConnector):
    """Writes `hidden_states` [tokens, layers, H] and `token_ids` [tokens] as vLLM's connector does, a step at a time."""

    def __init__(self, *args: Any, **more: Any):
        super().__init__(*args, **more)
        self.use_lock = False
        if self.role == KVConnectorRole.SCHEDULER and not self._vllm_config.cache_config.enable_prefix_caching:
            _no_hashes()
        drafted = self._vllm_config.speculative_config.draft_model_config.hf_config
        self._layer_ids = [int(layer) for layer in getattr(drafted, "eagle_aux_hidden_state_layer_ids", [])]
        self._rooms: Rooms | None = None
        self._writers: queue.SimpleQueue[Writer] = queue.SimpleQueue()
        self._every_writer: list[Writer] = []
        self._spent, self._counting = {"scheduler_s": 0.0, "engine_s": 0.0, "waited_s": 0.0}, threading.Lock()

    def get_finished_count(self) -> int:
        """One: only rank 0 writes. Without this vLLM 0.25 waits for every rank, for ever."""
        return 1

    def account(self) -> dict[str, float]:
        """Where time went since the start, in seconds, and how many requests, groups, files, bytes and failures there were.

        Of the thread that drives the model: `scheduler_s` beside the scheduler, `engine_s` beside the model, of which `waited_s`
        for a room. On the GPU: `gather_s`, `copy_s`. In threads and processes of their own, summed over them: `behind_s` until a
        copy was done, `written_s` until a writer had answered, of which `create_s`, `fill_s` and `name_s` for its files.
        `most_rooms` that were in use at once.
        """
        with self._counting:
            return dict(self._spent)

    def _count(self, **more: float) -> None:
        with self._counting:
            for name, value in more.items():
                self._spent[name] = self._spent.get(name, 0) + value

    # ---- Beside the scheduler

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """As vLLM's, and it tells the reader that the file appears whole, and which layers it is of: who did not start this
        server cannot know."""
        wanted = request.kv_transfer_params or {}
        if request.prompt_token_ids is None or wanted.get("include_output_tokens"):  # vLLM knows what to do
            delayed, told = super().request_finished(request, block_ids)
            save = self._pending_saves.get(request.request_id)
            if save is not None:
                save.token_ids = array("q", save.token_ids.tolist())
            return delayed, told and {**told, "published_whole": True, "layer_ids": self._layer_ids}
        name, filename = request.request_id, self._request_filenames.pop(request.request_id)
        self._pending_saves[name] = Save(name, filename, array("q", request.prompt_token_ids), block_ids)
        return True, {"hidden_states_path": filename, "published_whole": True, "layer_ids": self._layer_ids}

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        """As vLLM's; nothing for a request that was given up before it was ever scheduled, at which vLLM 0.25's falls over."""
        started = time.perf_counter()
        if request.request_id not in self._request_filenames:
            return False, None
        found = super().request_finished_all_groups(request, block_ids)
        self._count(scheduler_s=time.perf_counter() - started, requests=1)
        return found

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """As vLLM's; it carries what this side has spent, for `account` is asked of the other."""
        started = time.perf_counter()
        metadata = super().build_connector_meta(scheduler_output)
        self._count(scheduler_s=time.perf_counter() - started)
        metadata.spent = {name: value for name, value in self._spent.items() if name in ("scheduler_s", "requests")}
        return metadata

    # ---- Beside the model

    def wait_for_save(self) -> None:
        """No lock files: a file is published whole."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """As vLLM's; and rooms and writers are made, on the rank that writes."""
        super().register_kv_caches(kv_caches)
        if not self._is_tp_rank_zero:
            return
        cache = self._kv_cache
        row = extract_from_kv_cache(cache, torch.zeros(1, dtype=torch.int64, device=cache.device), 1).shape[1:]
        scheduled = self._vllm_config.scheduler_config.max_num_batched_tokens
        self._most = max(scheduled, self._vllm_config.model_config.max_model_len)
        size = self._most * row.numel() * cache.element_size()
        self._rooms = Rooms(max(2, min(ROOMS, MOST_BYTES // size)), self._most, row, cache.dtype, locked=cache.is_cuda)
        writers = self._kv_transfer_config.get_from_extra_config("writers", max(1, min(WRITERS, len(cpu.cores()) // 2)))
        self._every_writer = [Writer(self._rooms.file) for _ in range(writers)]
        for writer in self._every_writer:
            writer.start()
            self._writers.put(writer)
        self._executor = ThreadPoolExecutor(len(self._every_writer) + 2, thread_name_prefix="hidden-states")
        logger.info("Hidden states: %d rooms of %d tokens, %.0f MB each, page-locked: %s; %d writers", self._rooms.count,
                    self._most, size / 1e6, self._rooms.locked, len(self._every_writer))  # fmt: skip

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Start to save what the last steps finished; say which requests' blocks may be used again: theirs."""
        if not self._is_tp_rank_zero or not self.has_connector_metadata():
            return None, None  # vLLM 0.25's other ranks would report at once, before rank 0 has gathered
        started, metadata = time.perf_counter(), self._get_connector_metadata()
        pending, metadata.pending_saves = metadata.pending_saves, []
        for group in grouped(pending, self._most):
            self._save(group)
        with self._counting:
            self._spent.update(getattr(metadata, "spent", {}))
            self._spent["engine_s"] += time.perf_counter() - started
        return {save.req_id for save in pending} or None, None

    def _save(self, group: list[Save]) -> None:
        """Gather the states of `group`, and have them copied and written."""
        where = slots(group, self._block_size)
        asked = time.perf_counter()
        room = self._rooms.take()
        begun = time.perf_counter()
        events: list[Any] = []
        if self._kv_cache.is_cuda:
            room.slots[: len(where)].copy_(where)
            # A thread that waits for the last sleeps.
            events = [torch.cuda.Event(enable_timing=True, blocking=True) for _ in range(3)]
            events[0].record()
            where = room.slots[: len(where)].to(self._kv_cache.device, non_blocking=True)
            found = extract_from_kv_cache(self._kv_cache, where, len(where))
            events[1].record()
            copying = self._get_copy_stream()
            copying.wait_event(events[1])
            with torch.cuda.stream(copying):
                room.states[: len(where)].copy_(found, non_blocking=True)
                events[2].record(copying)
        else:
            found = extract_from_kv_cache(self._kv_cache, where, len(where))
            room.states[: len(where)].copy_(found)
        self._executor.submit(self._share_out, group, room, events, begun, found)
        self._count(groups=1, waited_s=begun - asked)
        with self._counting:
            self._spent["most_rooms"] = max(self._spent.get("most_rooms", 0), self._rooms.in_use())

    # ---- In threads of their own

    def _share_out(self, group: list[Save], room: Room, events: list[Any], begun: float, found: torch.Tensor) -> None:
        """Once the copy is done, hand the files of `group` to the writers. What was gathered, `found`, must last until then."""
        try:
            if events:
                events[-1].synchronize()
                self._count(gather_s=events[0].elapsed_time(events[1]) / 1e3, copy_s=events[1].elapsed_time(events[2]) / 1e3)
            del found
            self._count(behind_s=time.perf_counter() - begun)
            files, start, row = [], room.start, room.states[0].nbytes
            for save in group:
                files.append(File(save.filename, save.token_ids.tobytes(), start, len(save.token_ids) * row))
                start += files[-1].size
            runs = shares([file.size for file in files], len(self._every_writer))
        except Exception as error:  # of the copy: nobody's files come. A thread's exception would be seen by no one
            logger.error("Hidden states of %d requests were lost: %r", len(group), error)
            for save in group:
                states_file.give_up(save.filename, error)
            self._rooms.give(room)
            return
        room.parts = len(runs)
        for first, after in runs:
            self._executor.submit(self._have_written, files[first:after], room)

    def _have_written(self, files: list[File], room: Room) -> None:
        """Have a writer write `files`; the last of a room's lists frees it."""
        writer, started = self._writers.get(), time.perf_counter()
        try:
            told = writer.write(files, room.states.shape[1:], str(room.states.dtype))
            for path, why in told.pop("failed").items():
                logger.error("Hidden states were not written to %s: %s", path, why)
                told["failed"] = told.get("failed", 0) + 1
            self._count(written_s=time.perf_counter() - started, **told)
        except Exception as error:  # seen by nobody else
            logger.error("Hidden states of %d requests were lost: %r", len(files), error)
            for file in files:
                states_file.give_up(file.path, error)
        finally:
            self._writers.put(writer)
            with self._counting:
                room.parts -= 1
                last = room.parts == 0
            if last:
                self._rooms.give(room)

    def shutdown(self) -> None:
        """Write what is under way; say what it cost."""
        if self._rooms is not None:
            self._rooms.drain()
        self._executor.shutdown(wait=True)
        for writer in self._every_writer:
            writer.stop()
        if self._spent.get("files"):
            logger.info("Hidden states written: %s", self.account())
        super().shutdown()
