"""Which layers the stored states are of: the target computes a few samples itself, and each stored state is compared with
what enters every layer. The only check that sees layer ids that are shifted or in another order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3kit import weight_files
from eagle3kit.errors import KitError
from eagle3kit.signs import Sign, sign

if TYPE_CHECKING:
    from torch import Tensor

    from eagle3kit.samples import StatesSample
    from eagle3kit.target import Geometry

STATE_BYTES = {"F32": 1.0, "BF16": 2.0, "F16": 2.0}  # float32 bytes per stored byte
FAR = 0.15  # relative distance beyond which a state is no layer's: bfloat16 stays at 0.02, a neighbour is 0.34 away


@dataclass(frozen=True)
class Forward:
    """What the target gave for one sample: `entering` [n + 1][T, H] (entering layer k; k = n before the final norm),
    `normed` [T, H] what goes into the head."""

    entering: "list[Tensor]"
    normed: "Tensor"


@dataclass(frozen=True)
class Match:
    """Relative distance of stored state `place` from what enters each layer k, `errors` [n + 1], and from the state after
    the final norm, `after`. `claimed` is the id it stands under (None: not said)."""

    place: int
    claimed: int | None
    errors: list[float]
    after: float

    @property
    def best(self) -> int:
        """The layer whose input is nearest; n + 1 stands for the state after the final norm."""
        every = [*self.errors, self.after]
        return every.index(min(every))


def refusal(folder: Path, free_bytes: float) -> str | None:
    """Why a forward is not tried, or None: the weights in float32, and a fifth more, must fit half of the free memory."""
    need = 0.0
    for file in sorted(set(weight_files.index(folder).values())):
        for key, entry in weight_files.header(folder / file).items():
            if entry["dtype"] not in STATE_BYTES:
                return f"{key} is stored as {entry['dtype']}, which transformers would not compute as the server does"
            start, end = entry["data_offsets"]
            need += 1.2 * STATE_BYTES[entry["dtype"]] * (end - start)
    if need > free_bytes / 2:
        return (f"the target's forward takes about {need / 2**30:,.1f} GiB in float32, and half of the free memory is "
                f"{free_bytes / 2**31:,.1f} GiB")  # fmt: skip
    return None


def load(folder: Path, trust_remote_code: bool = False) -> Any:
    """The target as transformers' model in float32 on the CPU; KitError with transformers' own words."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # a second's work, and a notebook keeps every state of a bar
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=trust_remote_code)
    except Exception as error:  # an architecture that transformers does not know, or whose code it may not run
        raise KitError(f"transformers cannot load the target: {(str(error).strip() or repr(error)).splitlines()[0]}") from error
    finally:
        if shown:
            logging.enable_progress_bar()
    return model.eval()


def forward(model: Any, ids: "Tensor", layers: int) -> Forward:
    """The states of tokens `ids` [T] in a target of `layers` layers, taken by hooks on the layers and on the head.

    KitError when the model has no list of that many layers.
    """
    import torch

    stacks = [part for name, part in model.named_modules() if isinstance(part, torch.nn.ModuleList) and len(part) == layers
              and name.rpartition(".")[2] in ("layers", "h", "blocks")]  # fmt: skip
    if len(stacks) != 1:
        raise KitError(f"{type(model).__name__} has {len(stacks)} lists of {layers} layers; its layers could not be told")
    kept: dict[int, Tensor] = {}

    def entering(number: int) -> Any:
        def hook(_: Any, given: tuple, named: dict) -> None:
            kept[number] = (given[0] if given else named["hidden_states"])[0].detach().float()
        return hook  # fmt: skip

    def leaving(_: Any, __: Any, out: Any) -> None:
        kept[layers] = (out[0] if isinstance(out, tuple) else out).reshape(len(ids), -1).detach().float()

    hooks = [layer.register_forward_pre_hook(entering(k), with_kwargs=True) for k, layer in enumerate(stacks[0])]
    hooks += [stacks[0][-1].register_forward_hook(leaving),
              model.get_output_embeddings().register_forward_pre_hook(entering(layers + 1), with_kwargs=True)]  # fmt: skip
    try:
        with torch.no_grad():
            model(input_ids=ids[None], use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return Forward([kept[k] for k in range(layers + 1)], kept[layers + 1])


def distance(stored: "Tensor", computed: "Tensor", any_length: bool = False) -> float:
    """Median over tokens of |stored - computed| / |computed - mean computed|, the first token aside; with `any_length` each
    stored state is brought to the computed one's length before.

    A few huge numbers that are the same at every token are normal (up to 24,960 in SmolLM2) and would hide all else; so is
    a first token a thousand times longer than the rest. Hence the mean is taken off, and the median is of the others.
    """
    stored, computed = stored[1:].float(), computed[1:]
    if any_length:
        stored = stored * (computed.norm(dim=1) / stored.norm(dim=1).clamp_min(1e-30))[:, None]
    size = (computed - computed.mean(0)).norm(dim=1).clamp_min(1e-30)
    return float(((stored - computed).norm(dim=1) / size).nan_to_num(float("inf")).median())


def matches(
    samples: Sequence[tuple[str, "StatesSample"]], model: Any, geometry: "Geometry", layer_ids: Sequence[int] | None,
    tokens: int = 128, any_length: bool = False,
) -> list[Match]:
    """Each stored state of `samples` against every layer: distances averaged over the samples, whose first `tokens` are
    computed (what comes later changes nothing before it). `any_length`: see `distance`.

    Example, ids [2, 15, 27] stored one layer late: matches at 3, 16, 28, where 2, 15 and 27 are claimed.
    """
    sums: list[list[float]] = []
    for _, row in samples:
        ids = row.input_ids[:tokens]
        found = forward(model, ids, geometry.layers)
        every = [*found.entering, found.normed]
        mine = [[distance(state[: len(ids)], other, any_length) for other in every] for state in row.states]
        sums = [[a + b for a, b in zip(old, new, strict=True)] for old, new in zip(sums, mine, strict=True)] if sums else mine
    claims = [*(layer_ids or [None] * (len(sums) - 1)), geometry.layers]
    n = len(samples)
    return [Match(place, claimed, [value / n for value in errors[:-1]], errors[-1] / n)
            for place, (errors, claimed) in enumerate(zip(sums, claims, strict=True))]  # fmt: skip


def of_layers(found: Sequence[Match], samples: int) -> list[Sign]:
    """The signs of the auxiliary layers and of the last, from `matches` on so many samples."""
    *auxiliary, last = found
    return [_auxiliary(auxiliary, samples), _last(last, len(last.errors) - 1, samples)]


def _auxiliary(found: Sequence[Match], samples: int) -> Sign:
    best = [match.best for match in found]
    claimed = [match.claimed for match in found]
    lost = [match.place for match in found if min(match.errors) > FAR]
    if None in claimed:
        wrong = lost or ([match.place for match in found] if best != sorted(set(best)) else [])
        note = f"no ids were said; the states are those of {best}"
    else:
        wrong = [match.place for match in found if match.best != match.claimed or match.place in lost]
        note = f"the states stored under {claimed} are those of {best}"
        shifts = {there - said for there, said in zip(best, claimed, strict=True)}
        if not lost and shifts in ({1}, {-1}):
            step = "one layer late: captured after the layer" if shifts == {1} else "one layer early"
            note += f", {step}; write {best} as the layer ids, or extract again"
        elif not lost and wrong and sorted(best) == sorted(claimed):
            note += ", in another order; sort them as their ids rise"
    if lost:
        note += f". State {lost[0]} is of no layer (nearest is {min(found[lost[0]].errors):.2g} away): another target, or damaged"
    far = ", ".join(f"{match.errors[min(match.best, len(match.errors) - 1)]:.2g}" for match in found)
    return sign("auxiliary layers", len(wrong), len(found), f"{note} (relative distance {far}, {samples} samples)")


def _last(match: Match, layers: int, samples: int) -> Sign:
    here = match.errors[layers]
    if match.best == layers:
        note = "it is what goes into the final norm" if here <= FAR else "it is no state of this target: another one, or damaged"
    elif match.best == layers + 1:
        note = "it is what comes out of the final norm: applied already"
    else:
        early = layers - match.best
        note = f"it is what enters layer {match.best}, {early} layer{'s' if early > 1 else ''} early; extract id {layers} instead"
    bad = match.best != layers or here > FAR
    nearest = min(*match.errors, match.after)
    return sign("last layer", here, samples, f"{note} (relative distance {nearest:.2g})", bad=bad)
