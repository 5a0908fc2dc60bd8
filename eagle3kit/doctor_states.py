"""What the stored states betray by themselves: missing, dropped, not numbers, zero, constant or repeated ones."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from eagle3kit.signs import CHECKS, Sign, sign, unchecked

if TYPE_CHECKING:
    from torch import Tensor

    from eagle3kit.samples import StatesSample

FEWEST_CHANGES = 4  # of which a median is taken
Named = Sequence[tuple[str, "StatesSample"]]


def of_states(samples: Named, layer_ids: Sequence[int] | None) -> list[Sign]:
    """The signs of the states [T, H] of `samples`, without the target. `layer_ids` (auxiliary only) says how many are due.

    Example: ids [2, 15, 27] promise four states a sample; three mean that the final layer was dropped.
    """
    return [_per_token(samples), _a_sample(samples, layer_ids), *_numbers(samples), _constant(samples), _repeated(samples),
            _last_is_its_own(samples)]  # fmt: skip


def widened(samples: Named) -> tuple[Named, bool]:
    """`samples` with states of eight bits as float32, and whether there were any: their files keep a scale a token aside, so
    such states are known but for their length."""
    eight = any(state.element_size() == 1 for _, row in samples for state in row.states)
    if not eight:
        return samples, False
    return [(name, replace(row, states=[state.float() for state in row.states])) for name, row in samples], True


def readable(signs: Iterable[Sign]) -> bool:
    """Whether what comes after can be judged at all: else it would say the same fault again in other words."""
    return not any(found.bad for found in signs)


def _names(found: Sequence[str]) -> str:
    return f"{', '.join(found[:3])}{' and others' if len(found) > 3 else ''}"


def _per_token(samples: Named) -> Sign:
    bad = [(name, len(row.input_ids), {len(state) for state in row.states} - {len(row.input_ids)}) for name, row in samples]
    bad = [entry for entry in bad if entry[2]]
    note = "a state for every token"
    if bad:
        name, tokens, found = bad[0]
        note = f"{name}: {min(found):,} states for {tokens:,} tokens; extract again with prefix caching off"
    return sign("states per token", len(bad), len(samples), note)


def _a_sample(samples: Named, layer_ids: Sequence[int] | None) -> Sign:
    counts = [len(row.states) for _, row in samples]
    due = max(counts, default=0) if layer_ids is None else len(layer_ids) + 1
    bad = [(name, len(row.states)) for name, row in samples if len(row.states) != due]
    ids = "" if layer_ids is None else f" (layers {list(layer_ids)} and the last)"
    note = f"{due} states each{ids}"
    if bad:
        name, found = bad[0]
        fewer = ": the final layer is missing; extract again with a newer vLLM" if found == due - 1 else ""
        note = f"{name}: {found} states, {due} are due{ids}{fewer}"
    return sign("states a sample", len(bad), len(samples), note)


def _numbers(samples: Named) -> list[Sign]:
    """Non-finite values, and tokens whose state is zero in every number."""
    import torch

    wild, zero, tokens, where_wild, where_zero = 0, 0, 0, [], []
    for name, row in samples:
        for place, state in enumerate(row.states):
            tokens += len(state)
            count = int((~torch.isfinite(state)).sum())
            empty = int((state == 0).all(dim=-1).sum())
            wild, zero = wild + count, zero + empty
            where_wild += [f"{name}, state {place}"] if count else []
            where_zero += [f"{name}, state {place}"] if empty else []
    finite = f"{wild:,} NaN or infinite in {_names(where_wild)}; extract again in bfloat16 or float32"
    blank = f"{zero:,} states are all zero, in {_names(where_zero)}; this vLLM may not extract from such a model (hybrid layers?)"
    return [sign("finite values", wild, tokens, finite if wild else "every value is a number"),
            sign("zero states", zero / max(1, tokens), tokens, blank if zero else "no state is all zero")]  # fmt: skip


def change(state: "Tensor", ids: "Tensor") -> float:
    """Median of |x[t] - x[t - 1]| / |x[t]| over the tokens of `ids` [T] that are another than the one before; `state` [T, H]. NaN
    (of zero states) counts as no change; infinite where fewer than four tokens differ.

    A target that got stuck writes one token on and on ("0000…"), and its states then hardly change, as they should: of the
    ids 9 8 7 0 0 0 0 5 6 the steps to 8, 7, the first 0, 5 and 6 are looked at.
    """
    length = min(len(state), len(ids))
    state, ids = state[:length].float(), ids[:length]
    others = (ids[1:] != ids[:-1]).nonzero().squeeze(1) + 1
    if len(others) < FEWEST_CHANGES:
        return float("inf")
    moved = (state[others] - state[others - 1]).norm(dim=1) / state[others].norm(dim=1).clamp_min(1e-30)
    return float(moved.nan_to_num(0.0).median())


def _constant(samples: Named) -> Sign:
    # The first tokens are left out: the one that all attend to is a thousand times longer than the others.
    changes = [(change(state[2:], row.input_ids[2:]), f"{name}, state {place}") for name, row in samples
               for place, state in enumerate(row.states)]  # fmt: skip
    changes = [found for found in changes if found[0] < float("inf")]
    if not changes:
        return unchecked("constant states", "no sample is long enough to tell")
    least, where = min(changes)
    still = least < CHECKS["constant states"].threshold
    note = f"{where} hardly changes along the sample" if still else f"the least moving is {where}"
    return sign("constant states", least, len(changes), note)


def _repeated(samples: Named) -> Sign:
    """States that are equal to the bit though the tokens differ. The same token may repeat its state (layer 0 is the
    embedding, and samples that begin alike have alike states); zero states are another sign."""
    import torch

    seen: dict[tuple[int, int], int] = {}  # (place, hash of the bytes) -> token: 64 bits, so none is mistaken for another
    doubles, tokens, where = 0, 0, []
    for name, row in samples:
        ids = row.input_ids.tolist()
        for place, state in enumerate(row.states):
            raw = state.contiguous().view(torch.uint8).numpy()  # bytes: numpy knows no bfloat16
            blank = (state == 0).all(dim=-1).tolist()
            for number, token in enumerate(ids[: len(raw)]):
                if blank[number]:
                    continue
                tokens += 1
                if seen.setdefault((place, hash(raw[number].tobytes())), token) != token:
                    doubles += 1
                    where += [] if name in where else [name]
    note = f"{doubles:,} states are those of other tokens too, in {_names(where)}" if doubles else "no two tokens share a state"
    return sign("repeated states", doubles / max(1, tokens), tokens, note)


def _last_is_its_own(samples: Named) -> Sign:
    import torch

    bad = [(name, place) for name, row in samples for place, state in enumerate(row.states[:-1])
           if state.shape == row.states[-1].shape and torch.equal(state, row.states[-1]) and bool(state.any())]  # fmt: skip
    note = f"{bad[0][0]}: the last state is state {bad[0][1]} again" if bad else "the last state equals none of the others"
    return sign("last state is its own", len({name for name, _ in bad}), len(samples), note)
