"""Are the hidden states of a server that somebody else started those we need? Layers, number type, weights; and are they read?"""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3kit import hidden_states, target
from eagle3kit.asking import Answer, Server
from eagle3kit.errors import KitError

if TYPE_CHECKING:
    from torch import Tensor

    from eagle3kit.params import Params
    from eagle3kit.server import Settings

FEW = 5  # best tokens among which the server's own must be, by our head: number types may swap near ties
PROBE_S = 30.0  # until the states of a few tokens must be there


def check(one: Server, ids: list[int], answer: Answer, settings: "Settings", params: "Params", command: str) -> str:
    """What is known of the states that `one` gave with its `answer` to the prompt `ids`, in words.

    Raises:
        KitError: they are not what `settings` ask for, with `command`, the line that starts a server as needed.
    """
    if "hidden_states_path" not in answer.extra:
        raise KitError(f"{one.url} answers, but gives no hidden states; start it so that it extracts them:\n{command}")
    storage = Path(settings.kv_transfer["kv_connector_extra_config"]["shared_storage_path"])
    try:
        found, states = hidden_states._take(answer.extra, replace(one, timeout_s=PROBE_S), storage)
    except OSError as error:
        raise KitError(f"{one.url} wrote states to {answer.extra['hidden_states_path']}, which cannot be read in {storage} here: "
                       f"{error.strerror or error}; server.shared_path must be the folder that it writes to, as this machine "
                       "sees it") from None  # fmt: skip
    wanted = settings.speculative["draft_model_config"]["hf_config"]["eagle_aux_hidden_state_layer_ids"]
    proof = _layers(one, answer.extra, ids, states, wanted, settings, params, command)
    geometry = target.geometry(settings.model, params.target.trust_remote_code)
    try:
        hidden_states.check(0, ids, found, states, states=len(wanted), hidden_size=geometry.hidden_size)
    except KitError as error:
        raise KitError(f"{one.url}, asked for the states of {len(ids)} tokens: {error}") from None
    _same_dtype(one, states, params.target.dtype)
    _same_head(one, states, answer.token_ids, geometry, settings, params.target.trust_remote_code)
    return f"states of layers {wanted[:-1]} and the last ({proof})"


def drop(answer: Answer, storage: Path) -> None:
    """Remove the states that an extracting server wrote beside an answer that was asked for its words alone."""
    if answer.extra.get("hidden_states_path"):
        with suppress(OSError):  # none came: nothing to remove
            hidden_states._take(answer.extra, answer.server, storage)


def _layers(one: Server, extra: dict[str, Any], ids: list[int], states: "Tensor", wanted: list[int], settings: "Settings",
            params: "Params", command: str) -> str:  # fmt: skip
    """How it is known that the states are of the layers `wanted`; KitError when they are not, or nobody can tell.

    The kit's connector says so with every answer. vLLM's own does not, nor do the server's settings in developer mode: then a
    target that is small enough is computed here.
    """
    found, how = extra.get("layer_ids"), "as it says"
    if not found:
        found, how = _nearest(ids, states, settings, params), "as computed here"
    if isinstance(found, str):
        raise KitError(f"{one.url} does not say which layers its states are of, and they cannot be computed here: {found}. Start "
                       f"it with the kit's connector, which says so with every answer:\n{command}")  # fmt: skip
    if sorted(set(found)) != wanted:
        raise KitError(f"{one.url} gives the states of layers {sorted(set(found))} ({how}), but {wanted} are needed "
                       f"(hidden_states.layers, and the last; {hidden_states.CONVENTION}). Start it anew, or name its layers:\n"
                       f"{command}")  # fmt: skip
    return how


def _nearest(ids: list[int], states: "Tensor", settings: "Settings", params: "Params") -> list[int] | str:
    """The layer that each state [T, n, H] is nearest to, by one pass of the target here; why not, where it cannot be."""
    from eagle3kit import suspects

    layers = target.geometry(settings.model, params.target.trust_remote_code).layers
    compute = suspects.target_states(Path(settings.model), trust_remote_code=params.target.trust_remote_code)
    if isinstance(compute, str):
        return compute
    own = compute(ids, range(layers))  # the last of these is layer `layers`, before the final norm
    given = states.float()
    if given.ndim != 3 or given.shape[0] != len(ids) or given.shape[2] != own[0].shape[1]:
        return f"they are of another shape than the target's, {list(given.shape)}"
    return [min(range(layers + 1), key=lambda k: float((given[:, n] - own[k].float()).norm())) for n in range(given.shape[1])]


def _same_dtype(one: Server, states: "Tensor", dtype: str) -> None:
    theirs = str(states.dtype).removeprefix("torch.")
    if theirs != dtype:
        raise KitError(f"{one.url} computes in {theirs}, but target.dtype is {dtype}; start it with --dtype {dtype}, or set "
                       f"target.dtype to {theirs}")  # fmt: skip


def _same_head(one: Server, states: "Tensor", said: list[int], geometry: target.Geometry, settings: "Settings",
               trust_remote_code: bool) -> None:  # fmt: skip
    """From its last state, our final norm and head give the token that the server chose: it runs the target's weights."""
    weights = target.weights(Path(settings.model), trust_remote_code=settings.trust_remote_code)
    last = hidden_states.normalised(states[-1:, -1], weights["final_norm"], eps=geometry.rms_norm_eps,
                                    adds_one=geometry.norm_adds_one)  # fmt: skip
    best = (last @ weights["head"].float().T)[0].topk(FEW).indices.tolist()
    if said[0] not in best:
        raise KitError(f"{one.url} says token {said[0]} where its own last state, by the target's norm and head "
                       f"({settings.model}), gives one of {best}: it serves other weights; name a server of the target in "
                       "server.url")  # fmt: skip
