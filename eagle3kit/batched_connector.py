"""A hidden-states connector for vLLM that handles a step at a time, not a request. Loaded by vLLM, by this module's name.

vLLM's own (`ExampleHiddenStatesConnector`, "a simple debug implementation") does for every finished request, on the thread
that drives the model: a slot table, a gather of a few kernels, page-locked memory of just that size (the driver takes a
millisecond and more for what it has not given before), an event, a lock file; and every prompt is hashed, for nobody. Here all
requests that one step finished are gathered at once, by one kernel on a stream of its own, into one of a few page-locked rooms
that are made before the first request and used over and over; threads write the files from there, without a copy and without the
interpreter's lock. When every room is in use the model waits: what is under way is bounded. *Which* states are written for whom
stays vLLM's.

The files are byte for byte those of vLLM's connector (`states_file`), but published whole under their name instead of locked
while they grow; the answer says so (`published_whole`), for the reader to know what to wait for.
"""

import os
import queue
import threading
import time
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    PendingSave,
    extract_from_kv_cache,
)
from vllm.logger import init_logger

from eagle3kit import states_file
from eagle3kit.cache_slots import grouped, slots
from eagle3kit.connector import Done

logger = init_logger(f"vllm.{__name__}")  # what vLLM logs is what is below its own name

ROOMS, MOST_BYTES = 8, 2 << 30  # rooms, and the page-locked memory that they take at most (but two there are)


@dataclass
class Room:
    """Where the states of one step wait for their files: `states` [tokens, states, H] and `slots` int64 [tokens]."""

    states: torch.Tensor
    slots: torch.Tensor


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
        self._rooms: queue.SimpleQueue[Room | None] = queue.SimpleQueue()
        self._spent, self._counting = {"files": 0, "bytes": 0, "engine_s": 0.0, "waited_s": 0.0}, threading.Lock()

    def get_finished_count(self) -> int:
        """One: only rank 0 writes. Without this vLLM 0.25 waits for every rank, for ever."""
        return 1

    def wait_for_save(self) -> None:
        """No lock files: a file is published whole."""

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """As vLLM's, and it tells the reader that the file appears whole, and which layers it is of: who did not start this
        server cannot know."""
        delayed, told = super().request_finished(request, block_ids)
        return delayed, told and {**told, "published_whole": True, "layer_ids": self._layer_ids}

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        """As vLLM's; nothing for a request that was given up before it was ever scheduled, at which vLLM 0.25's falls over."""
        if request.request_id not in self._request_filenames:
            return False, None
        return super().request_finished_all_groups(request, block_ids)

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """As vLLM's; and the rooms are made, on the rank that writes."""
        super().register_kv_caches(kv_caches)
        if not self._is_tp_rank_zero:
            return
        os.makedirs(self._storage_path, exist_ok=True)
        cache = self._kv_cache
        shape = extract_from_kv_cache(cache, torch.zeros(1, dtype=torch.int64, device=cache.device), 1).shape[1:]
        scheduled = self._vllm_config.scheduler_config.max_num_batched_tokens
        self._most = max(scheduled, self._vllm_config.model_config.max_model_len)
        size = self._most * shape.numel() * cache.element_size()
        rooms = max(2, min(ROOMS, MOST_BYTES // size))
        for _ in range(rooms):
            room = None
            if cache.is_cuda:
                room = Room(torch.empty((self._most, *shape), dtype=cache.dtype, pin_memory=True),
                            torch.empty(self._most, dtype=torch.int64, pin_memory=True))  # fmt: skip
            self._rooms.put(room)
        logger.info("Hidden states: %d rooms of %d tokens, %.0f MB each", rooms, self._most, size / 1e6)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Start to save what the last steps finished; say which requests' blocks may be used again."""
        if not self._is_tp_rank_zero:
            return None, None  # vLLM 0.25's would report at once, before rank 0 has copied
        if self.has_connector_metadata():
            metadata = self._get_connector_metadata()
            pending, metadata.pending_saves = metadata.pending_saves, []
            if pending:
                started = time.perf_counter()
                for group in grouped(pending, self._most):
                    self._save(group)
                self._spent["engine_s"] += time.perf_counter() - started
        return super().get_finished(finished_req_ids)

    def _save(self, group: list[PendingSave]) -> None:
        """Gather and copy the states of `group`, and have them written."""
        where = slots(group, self._block_size)
        asked = time.perf_counter()
        room = self._rooms.get()
        self._spent["waited_s"] += time.perf_counter() - asked
        done: Any
        if room is None:  # indexing copies, so the cache may be used again at once
            states, done = extract_from_kv_cache(self._kv_cache, where, len(where)).contiguous(), Done()
        else:
            states, copied = room.states[: len(where)], self._get_copy_stream()
            room.slots[: len(where)].copy_(where)
            copied.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(copied):
                index = room.slots[: len(where)].to(self._kv_cache.device, non_blocking=True)
                states.copy_(extract_from_kv_cache(self._kv_cache, index, len(where)), non_blocking=True)
                done = torch.cuda.Event(blocking=True)  # a writer that waits sleeps
                done.record(copied)
        for save in group:
            self._req_copy_events[save.req_id] = done
        self._executor.submit(self._write, group, states, done, room)

    def _write(self, group: list[PendingSave], states: torch.Tensor, done: Any, room: Room | None) -> None:
        """A file for every request of `group`, then the room is free again."""
        sizes, ends = [], torch.tensor([save.token_ids.shape[0] for save in group]).cumsum(0).tolist()
        try:
            done.synchronize()
            for save, start, end in zip(group, [0, *ends], ends, strict=False):
                sizes.append(self._write_one(save, states[start:end]))
        except Exception as error:  # of the copy: nobody's files come. A thread's exception would be seen by no one
            logger.error("Hidden states of %d requests were lost: %r", len(group), error)
            for save in group:
                states_file.give_up(save.filename, error)
        finally:
            self._rooms.put(room)
            with self._counting:
                self._spent["files"] += sum(size > 0 for size in sizes)
                self._spent["bytes"] += sum(sizes)

    def _write_one(self, save: PendingSave, states: torch.Tensor) -> int:
        """The bytes written for one request; 0, with a note for its reader, when they cannot be."""
        try:
            os.makedirs(os.path.dirname(save.filename), exist_ok=True)
            return states_file.write(save.filename, save.token_ids, states)
        except OSError as error:
            logger.error("Hidden states of %s were not written: %r", save.req_id, error)
            states_file.give_up(save.filename, error)
            return 0

    def shutdown(self) -> None:
        """Write what is under way; say what it cost."""
        self._executor.shutdown(wait=True)
        if self._spent["files"]:
            logger.info("Hidden states written: %s", self._spent)
        super().shutdown()
