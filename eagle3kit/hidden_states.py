"""Ask a running target for its hidden states, write them as samples, and check that they are what they should be."""

import contextlib
import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from eagle3kit import cpu, states_file
from eagle3kit.errors import KitError
from eagle3kit.samples import StatesSample, Store

if TYPE_CHECKING:
    from torch import Tensor

    from eagle3kit.asking import Answer, Server
    from eagle3kit.conversations import Sample
    from eagle3kit.params import Params
    from eagle3kit.target import Geometry

# Which tensor an id names. vLLM, and transformers' `hidden_states[k]` but for the last, which there is after the norm.
CONVENTION = "id k is the residual stream entering layer k: 0 = embeddings, number of layers = before the final norm"


def layer_ids(asked: Sequence[int] | None, layers: int) -> list[int]:
    """The auxiliary layer ids: those asked for, or [2, n // 2, n - 3] of an n-layer target (the field's default).

    Raises:
        KitError: out of range (0 to n - 1; n is the last state, always kept), doubled, unsorted, or a default that
            collides because the target has so few layers.
    """
    if asked is None:
        ids = [2, layers // 2, layers - 3]
        if not 0 <= ids[0] < ids[1] < ids[2]:
            raise KitError(f"hidden_states.layers: the default {ids} collides for a target of {layers} layers; "
                           f"name rising ids between 0 and {layers - 1}")  # fmt: skip
        return ids
    outside = [k for k in asked if not 0 <= k < layers]
    if outside:
        raise KitError(f"hidden_states.layers: {outside[0]} is out of range; the target has {layers} layers, so ids run from "
                       f"0 to {layers - 1} ({CONVENTION}; the last state is always kept)")  # fmt: skip
    if list(asked) != sorted(set(asked)):
        raise KitError(f"hidden_states.layers: {list(asked)} must rise without doubles, for vLLM sorts them and the draft's "
                       f"first layer reads them in that order; write {sorted(set(asked))}")  # fmt: skip
    return list(asked)


def server_options(
    ids: Sequence[int], layers: int, storage: Path, connector: Literal["batched", "vllm"] = "batched"
) -> dict[str, dict[str, Any]]:
    """vLLM's `speculative` and `kv_transfer` settings that make a server write states `ids` and the last to `storage`.

    `connector`: this kit's, which handles a step at a time, or vLLM's own (on a CPU with the one method replaced that needs
    a GPU). Both write the same files.
    """
    ours = {"kv_connector": "BatchedHiddenStatesConnector", "kv_connector_module_path": "eagle3kit.batched_connector"}
    stock = cpu.CONNECTOR if cpu.is_cpu() else {"kv_connector": "ExampleHiddenStatesConnector"}
    return {
        "speculative": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [*ids, layers]}},
        },
        "kv_transfer": {
            **(ours if connector == "batched" else stock),
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": str(storage)},
        },
    }


def own_settings(params: "Params") -> dict[str, Any]:
    """What this stage's server is given that the others of a run are not: `hidden_states.enforce_eager`, where it is null the
    server's, and `hidden_states.block_size`."""
    own = params.hidden_states
    return {"enforce_eager": params.server.enforce_eager if own.enforce_eager is None else own.enforce_eager,
            "block_size": own.block_size}  # fmt: skip


def require_target(made_from: dict[str, Any], identity: str) -> None:
    """KitError unless the samples' manifest names the model files that `target.identity` sees now."""
    if made_from.get("files", identity) != identity:
        raise KitError("the samples hold states of another target than the one found now (its files differ); run the stage "
                       "03_hidden_states again, or name the target.revision that they were made with")  # fmt: skip


def token_hash(ids: Sequence[int]) -> str:
    """Names a sequence of token ids in a manifest."""
    return hashlib.sha256(repr(list(ids)).encode()).hexdigest()[:16]


def manifest(samples: Sequence["Sample"], identity: dict[str, Any], ids: Sequence[int], geometry: "Geometry") -> dict[str, Any]:
    """What the samples are made from: `identity` (target, revision, versions, dtype), layer ids and their convention,
    lengths and hashes of the tokens."""
    return {
        **identity,
        "layers": list(ids),
        "last": geometry.layers,
        "convention": CONVENTION,
        "hidden_size": geometry.hidden_size,
        "lengths": [len(sample.input_ids) for sample in samples],
        "tokens": [token_hash(sample.input_ids) for sample in samples],
        "sources": [sample.source for sample in samples],
        "turns": [[list(turn) for turn in sample.turns] for sample in samples],
    }


def missing(store: Store, wanted: dict[str, Any], samples: Sequence["Sample"]) -> list[int]:
    """Numbers of the samples that must still be extracted. Those on disk count only if they were made from the same
    target, layers, versions and number type, of the same tokens and with the same loss mask."""
    if not store.made_as(wanted):
        return list(range(len(samples)))
    return [number for number, sample in enumerate(samples)
            if not store.holds(number, sample.input_ids, sample.loss_mask)]  # fmt: skip


@cpu.one_thread()
def extract(
    server: "Server",
    samples: Sequence["Sample"],
    numbers: Sequence[int],
    store: Store,
    *,
    states: int,
    hidden_size: int,
    in_flight: int,
    storage: Path | None = None,
    report: Callable[[int, int], None] | None = None,
) -> int:
    """Have the server compute the states of `samples[n]` for n in `numbers`; write each as it comes. Returns the tokens.

    `storage`: the folder the server was told to write to; a file it names elsewhere is neither read nor removed. A sample whose
    states did not come, since its server died or its disk is full, is asked for again where the servers have tries left.

    Raises:
        KitError: the server gave something else than asked for (see `check`), or the disk is full: then the samples in
            flight are lost, the others stand, and the next run goes on from there.
    """
    kept: list[int] = []  # tokens of the samples that stand

    def keep(number: int, answer: "Answer") -> None:
        import torch

        sample = samples[number]
        try:
            ids, hidden = _take(answer.extra, answer.server or server, storage)
        except OSError as error:
            raise _NotKept(number, error, True) from None
        try:
            check(number, sample.input_ids, ids, hidden, states=states, hidden_size=hidden_size)
            store.write(number, StatesSample(ids, torch.tensor(sample.loss_mask, dtype=torch.int64), list(hidden.unbind(1))))
        except OSError as error:
            raise _NotKept(number, error, False) from None
        kept.append(len(sample.input_ids))

    prompts = [samples[number].input_ids for number in numbers]
    # Reading, checking and writing wait for disks and leave the interpreter free; a few at once keep up with a GPU.
    workers = min(8, len(cpu.cores()))
    pool, running = ThreadPoolExecutor(workers), deque()
    answers, asking = server.complete(prompts, max_tokens=1, in_flight=in_flight, report=report), True

    def settle() -> bool:
        """Wait for the oldest sample under way; True when it must be asked for again."""
        index, future = running.popleft()
        try:
            future.result()
        except _NotKept as lost:
            _, error, not_given = lost.args
            if not_given and answers.again(index, error.strerror or str(error)):
                return True
            raise
        return False

    try:
        while asking:  # what is asked for again after the last answer goes round once more
            for index, answer in answers:
                running.append((index, pool.submit(keep, numbers[index], answer)))
                while running and (len(running) >= min(2 * workers, in_flight) or running[0][1].done()):
                    settle()
            asking = any([settle() for _ in range(len(running))])
    except _NotKept as lost:
        pool.shutdown(cancel_futures=True)
        number, error, _ = lost.args
        raise KitError(f"sample {number} could not be written to {store.path(number)}: {error.strerror or error}; "
                       f"{len(kept)} of {len(numbers)} samples of this pass stand. Free space (a sample takes about "
                       f"{len(samples[number].input_ids) * states * hidden_size * 4 // 1024} KiB) and run the stage again: "
                       "it goes on from there") from None  # fmt: skip
    finally:
        pool.shutdown(cancel_futures=True)
    return sum(kept)


class _NotKept(Exception):
    """(number of the sample, the OSError, whether it is the server that did not give it) of a sample that was not written."""


def _take(extra: dict[str, Any], server: "Server", storage: Path | None = None) -> tuple["Tensor", "Tensor"]:
    """Token ids [T] and states [T, states, H] from the file that the server names; the file is removed.

    vLLM's connector holds a lock on a file beside it while it writes; to wait for it is vLLM's own protocol
    (`load_hidden_states`, spelled out here because importing vLLM takes ten seconds). Ours publishes the file whole.
    """
    import fcntl

    from safetensors import SafetensorError
    from safetensors.torch import load, load_file

    if "states" in extra:  # read on the machine that computed them (`shards`)
        content = load(extra["states"])
        return content["token_ids"], content["hidden_states"]
    name = extra.get("hidden_states_path")
    if not name:
        raise KitError(f"the server gave no hidden states; is it extracting? {server.witness}")
    path = Path(name)
    if storage is not None and server.log is None:  # another machine may call the shared folder by another name
        path = storage / path.name
    lock = path.with_name(f"{path.name}.lock")
    if storage is not None and not path.resolve().is_relative_to(storage.resolve()):
        raise KitError(f"the server names {path}, outside {storage} where it was told to write; is another server answering?")
    if lock.exists():
        with open(lock, encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_SH)
    try:
        if extra.get("published_whole"):
            states_file.wait_for(path, server.timeout_s, server.healthy)
        content = load_file(path)  # mapped: what is mapped outlives the file's name
        return content["token_ids"], content["hidden_states"]
    except (FileNotFoundError, SafetensorError):
        # A writer of the server that meets a full disk leaves a short file or none, and says so only in its own log.
        raise OSError(28, f"the server left no whole file at {path} (is the disk full? {server.witness})") from None
    finally:
        for leftover in (path, lock):
            with contextlib.suppress(OSError):
                leftover.unlink()


def check(number: int, asked: Sequence[int], ids: "Tensor", hidden: "Tensor", *, states: int, hidden_size: int) -> None:
    """Raise KitError unless `hidden` [T, states, H] belongs to the tokens asked for and can be right at all."""
    import torch

    def fault(what: str) -> KitError:
        return KitError(f"hidden states of sample {number}: {what}; nothing was written for it")

    if ids.tolist() != list(asked):
        raise fault(f"computed for other tokens than asked ({len(ids)} beside {len(asked)}); turn prefix caching off")
    if hidden.shape[0] != len(asked):
        raise fault(f"{hidden.shape[0]} states for {len(asked)} tokens; turn prefix caching off")
    if hidden.shape[1] != states:
        raise fault(f"{hidden.shape[1]} states a token, {states} asked for; this vLLM may drop the last of this architecture")
    if hidden.shape[2] != hidden_size:
        raise fault(f"width {hidden.shape[2]}, but the target's is {hidden_size}")
    largest = hidden.abs().amax(dim=2)  # one walk answers both: NaN and infinities go through it
    if not torch.isfinite(largest).all():
        raise fault("NaN or infinite values; try target.dtype bfloat16 or float32")
    empty = (largest == 0).nonzero()
    if empty.numel():
        raise fault(f"state {int(empty[0, 1])} of token {int(empty[0, 0])} is all zero")


def normalised(last: "Tensor", final_norm: "Tensor", *, eps: float, adds_one: bool) -> "Tensor":
    """The target's final RMS norm, in float32: x / sqrt(mean(x²) + eps) · w, or · (1 + w) for the families that do so."""
    x = last.float()
    weight = final_norm.float() + (1.0 if adds_one else 0.0)
    return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight
