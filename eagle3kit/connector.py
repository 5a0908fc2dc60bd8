"""vLLM's hidden-states connector, able to write without a GPU. Loaded by vLLM itself, by this module's name.

`ExampleHiddenStatesConnector._submit_async_write` (vllm/distributed/kv_transfer/kv_connector/v1/) copies through pinned
memory on a CUDA stream and waits for CUDA events, none of which a CPU has. This class replaces that one method; all that
decides *which* states are written, and under which lock, stays vLLM's.
"""

import fcntl
import os
from functools import partial

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    PendingSave,
    extract_from_kv_cache,
)


class Done:
    """Stands for a CUDA event that has already happened: a CPU copy is finished when the call returns."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """Always finished."""
        return True


class CpuHiddenStatesConnector(ExampleHiddenStatesConnector):
    """Writes `hidden_states` [tokens, layers, H] and `token_ids` [tokens] as vLLM's own connector does, from CPU memory."""

    def _submit_async_write(self, pending: PendingSave) -> None:
        if not self._is_tp_rank_zero:
            return
        blocks = torch.tensor(pending.block_ids, dtype=torch.long)
        slots = (blocks[:, None] * self._block_size + torch.arange(self._block_size)).flatten()
        states = extract_from_kv_cache(self._kv_cache, slots, pending.token_ids.shape[0])
        # Indexing copied the rows, so the cache may be reused at once; contiguous, for safetensors writes plain memory.
        tensors = {"hidden_states": states.contiguous(), "token_ids": pending.token_ids.clone()}
        os.makedirs(os.path.dirname(pending.filename), exist_ok=True)
        lock = self._lock_fds.pop(pending.req_id, None)
        if lock is None and self.use_lock:
            lock = os.open(pending.filename + ".lock", os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
            fcntl.flock(lock, fcntl.LOCK_EX)
        done = Done()
        future = self._executor.submit(self._write_tensors, tensors, done, pending.filename, lock)
        self._req_copy_events[pending.req_id] = done
        self._req_futures[pending.req_id] = future
        future.add_done_callback(partial(self._on_write_done, pending.req_id))
