"""A hidden-states connector for vLLM that handles a step at a time, not a request. Loaded by vLLM, by this module's name.

vLLM's own (`ExampleHiddenStatesConnector`, "a simple debug implementation") does for every finished request, on the thread
that drives the model: a slot table, a gather of a few kernels, page-locked memory of just that size (the driver takes a
millisecond and more for what it has not given before), an event, a lock file; and every prompt is hashed, for nobody. Here all
requests that one step finished are gathered at once, by one kernel in the model's own stream: whatever overwrites their blocks
comes after it there, so they are free at once. A stream of its own copies what was gathered into one of a few page-locked rooms
(`states_rooms`) and then sets the room's flag, on which processes wait that write the files from there (`states_writer`). What is
left to the thread that drives the model is a few microseconds a request, and no other thread of its process wakes to hold the
interpreter's lock. When every room is in use the model waits: what is under way is bounded. *Which* states are written for
whom stays vLLM's.

The files are byte for byte those of vLLM's connector (`states_file`), but published whole under their name instead of locked
while they grow; the answer says so (`published_whole`), for the reader to know what to wait for. `account` says where time went.
"""

import time
from array import array
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    extract_from_kv_cache,
)
from vllm.logger import init_logger

from eagle3kit import cpu
from eagle3kit.cache_slots import grouped, shares, slots
from eagle3kit.states_rooms import Room, Rooms
from eagle3kit.states_writer import File, Told, Writers

logger = init_logger(f"vllm.{__name__}")  # what vLLM logs is what is below its own name

ROOMS, MOST_BYTES = 8, 2 << 30  # rooms, and the page-locked memory that they take at most (but two there are)
WAIT_S = 1.0  # between two looks whether the GPU still works
FLAGS = 1 << 16  # numbers that a room's flag takes in turn
WRITERS = 8  # at most, unless the setting "writers" of the connector says otherwise; one writes 1 to 3 GB/s


@dataclass
class Save:
    """A finished request, as vLLM's PendingSave, but its token ids are uint32 in bytes: an array of int64 takes twice as long to
    make, a tensor twenty times as long, and the process that writes the file has time for it."""

    req_id: str
    filename: str
    tokens: int
    token_ids: bytes
    block_ids: list[int]

    @classmethod
    def of(cls, name: str, filename: str, token_ids: list[int], block_ids: list[int]) -> "Save":
        return cls(name, filename, len(token_ids), array("I", token_ids).tobytes(), block_ids)


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
        self._writers: Writers | None = None
        self._parts: dict[int, int] = {}  # of a room in use, the lists of files that are still to be written
        self._flag = self._next_writer = 0
        self._spent = {"scheduler_s": 0.0, "engine_s": 0.0, "waited_s": 0.0}

    def get_finished_count(self) -> int:
        """One: only rank 0 writes. Without this vLLM 0.25 waits for every rank, for ever."""
        return 1

    def account(self) -> dict[str, float]:
        """Where time went since the start, in seconds, and how many requests, groups, files, bytes and failures there were.

        It waits until all that is under way is written. Of the thread that drives the model: `scheduler_s` beside the scheduler,
        `engine_s` beside the model, of which `waited_s` to hear from the writers and for a room. Of the processes that write,
        summed over them: `create_s`, `fill_s` and `name_s` of their files. `most_rooms` that were in use at once.
        """
        while self._writers is not None and self._parts:
            self._wait()
        return dict(self._spent)

    def _count(self, **more: float) -> None:
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
                self._pending_saves[save.req_id] = Save.of(save.req_id, save.filename, save.token_ids.tolist(), save.block_ids)
            return delayed, told and {**told, "published_whole": True, "layer_ids": self._layer_ids}
        name, filename = request.request_id, self._request_filenames.pop(request.request_id)
        self._pending_saves[name] = Save.of(name, filename, request.prompt_token_ids, block_ids)
        return True, {"hidden_states_path": filename, "published_whole": True, "layer_ids": self._layer_ids}

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        """As vLLM's; nothing for a request that was given up: before it was ever scheduled, at which vLLM 0.25's falls over, or
        before its prompt was computed, of which vLLM's writes the beginning as if it were all."""
        started = time.perf_counter()
        if request.request_id not in self._request_filenames:
            return False, None
        found = super().request_finished_all_groups(request, block_ids)
        save = self._pending_saves.get(request.request_id)
        if save is not None and len(save.block_ids) * self._block_size < save.tokens:
            del self._pending_saves[request.request_id]
            return False, None
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
        writers = self._kv_transfer_config.get_from_extra_config("writers", min(WRITERS, len(cpu.cores()) // 2))
        self._writers = Writers(max(1, int(writers)), self._rooms.file, self._rooms.layout)
        self._numbers = torch.arange(FLAGS, device=cache.device)
        logger.info("Hidden states: %d rooms of %d tokens, %.0f MB each, page-locked: %s; %d writers", self._rooms.layout.count,
                    self._most, size / 1e6, self._rooms.locked, len(self._writers))  # fmt: skip

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Start to save what the last steps finished; say which requests' blocks may be used again: theirs."""
        if not self._is_tp_rank_zero or not self.has_connector_metadata():
            return None, None  # vLLM 0.25's other ranks would report at once, before rank 0 has gathered
        started, metadata = time.perf_counter(), self._get_connector_metadata()
        pending, metadata.pending_saves = metadata.pending_saves, []
        for group in grouped(pending, self._most):
            self._save(group)
        self._spent.update(getattr(metadata, "spent", {}))
        self._spent["engine_s"] += time.perf_counter() - started
        return {save.req_id for save in pending} or None, None

    def _save(self, group: list[Save]) -> None:
        """Gather the states of `group`, and have them copied and written."""
        asked = time.perf_counter()
        self._heard(self._writers.receive())
        while not self._rooms.free:
            self._wait()
        self._count(groups=1, waited_s=time.perf_counter() - asked)
        room, where = self._rooms.take(), slots(group, self._block_size)
        self._flag = self._flag % (FLAGS - 1) + 1  # never 0
        number = self._numbers[self._flag : self._flag + 1]
        if self._kv_cache.is_cuda:
            room.slots[: len(where)].copy_(where)
            where = room.slots[: len(where)].to(self._kv_cache.device, non_blocking=True)
            found = extract_from_kv_cache(self._kv_cache, where, len(where))
            copying = self._get_copy_stream()
            copying.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(copying):
                room.states[: len(where)].copy_(found, non_blocking=True)
                room.flag.copy_(number, non_blocking=True)
            found.record_stream(copying)  # its memory is not another's before it is copied
        else:
            room.states[: len(where)].copy_(extract_from_kv_cache(self._kv_cache, where, len(where)))
            room.flag.copy_(number)
        self._share_out(group, room)

    def _share_out(self, group: list[Save], room: Room) -> None:
        """Tell the writers of their shares of `group`, whose states are on the way to `room`."""
        files, first = [], 0
        for save in group:
            files.append(File(save.filename, first, save.tokens, save.token_ids))
            first += save.tokens
        runs = shares([file.tokens for file in files], len(self._writers))
        self._parts[room.number] = len(runs)
        for start, after in runs:
            self._writers.send(self._next_writer, room, self._flag, files[start:after])
            self._next_writer = (self._next_writer + 1) % len(self._writers)
        self._spent["most_rooms"] = max(self._spent.get("most_rooms", 0), len(self._parts))

    def _wait(self) -> None:
        """Until something was written; RuntimeError when nothing can come any more."""
        told = self._writers.receive(WAIT_S)
        self._heard(told)
        if told:
            return
        if self._kv_cache.is_cuda:
            self._get_copy_stream().query()  # raises where the GPU has failed: then no flag is ever set
        if not self._writers.under_way():
            raise RuntimeError(f"hidden states: nothing is being written, but of {self._rooms.layout.count} rooms "
                               f"{len(self._parts)} are in use")  # fmt: skip

    def _heard(self, told: list[Told]) -> None:
        """Count what was written; the last list of a room frees it."""
        for one in told:
            self._count(files=one.files, bytes=one.bytes, create_s=one.create_s, fill_s=one.fill_s, name_s=one.name_s)
            if one.failed:
                self._count(failed=one.failed)
            self._parts[one.room.number] -= 1
            if not self._parts[one.room.number]:
                del self._parts[one.room.number]
                self._rooms.free.append(one.room)

    def shutdown(self) -> None:
        """Have what is under way written; say what it cost."""
        if self._writers is not None:
            self._heard(self._writers.stop())
            self._rooms.close()
            self._writers = None
        if self._spent.get("files"):
            logger.info("Hidden states written: %s", self.account())
        super().shutdown()
