"""What is inside one sample, whichever contract it is of: taken apart the same way, and looked at for faults that its
shapes do not show but its numbers do. What only the target can tell is `doctor`'s."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3kit.errors import KitError
from eagle3kit.faults import Fault

if TYPE_CHECKING:
    from torch import Tensor

REMAKE = "extract the states of this sample again"
# Of a sample's last states, as many may equal another token's. Two tokens at different places never share all H numbers
# after a whole model; a tenth leaves room for a model that circles in 16-bit numbers.
REPEATED = 0.1


@dataclass(frozen=True)
class Parts:
    """One sample: `ids` [T], `mask` [T] or None where the file has none, `states` [n + 1] of [T, H], the last one last."""

    ids: "Tensor"
    mask: "Tensor | None"
    states: list["Tensor"]


def take_apart(content: dict[Any, Any], path: Path) -> Parts:
    """The parts of a file's content in any layout known (see `contracts`), also slightly off: lists of numbers, one stacked
    tensor, a leading dimension of one. Nothing is copied where the layout allows.

    Example: v0's hidden_state [T, 3·H] with target [T, H] gives four states [T, H], target the last.

    Raises:
        KitError: a key is missing, or the widths cannot be taken apart; names file and key.
    """
    import torch

    def flat(key: str) -> "Tensor":
        value = content[key]
        value = value if isinstance(value, torch.Tensor) else torch.tensor(value)
        return value[0] if value.ndim == 2 and value.shape[0] == 1 else value

    def wide(value: Any) -> "Tensor":
        return value[0] if value.ndim == 3 and value.shape[0] == 1 else value

    try:
        mask = flat("loss_mask") if "loss_mask" in content else None
        if "hidden_state" in content:
            last, joined = wide(content["target"]), wide(content["hidden_state"])
            if joined.shape[1] % last.shape[1]:
                raise KitError(f"{path}, key hidden_state: width {joined.shape[1]}, expected a multiple of the target's "
                               f"{last.shape[1]}; it cannot be taken apart into layers")  # fmt: skip
            return Parts(flat("input_ids"), mask, [*joined.split(last.shape[1], dim=1), last])
        states = content["hidden_states"]
        if "token_ids" in content:
            return Parts(flat("token_ids"), mask, list(states.unbind(1)))
        rows = list(states.unbind(0)) if isinstance(states, torch.Tensor) else [wide(state) for state in states]
        return Parts(flat("input_ids"), mask, rows)
    except KeyError as error:
        raise KitError(f"{path} lacks the key {error.args[0]} (it has {', '.join(map(str, content))})") from None
    except (TypeError, ValueError, IndexError, AttributeError, RuntimeError, ZeroDivisionError):
        raise KitError(f"{path} holds the keys of a sample but not its tensors; `eagle3kit inspect` names what is off") from None


def faults(parts: Parts, file: str, way_out: str = REMAKE) -> list[Fault]:
    """Everything wrong with the numbers of one sample; a sample of {T: 4, mask: 0 0 1 1, states finite and alive} has none.

    Looked at: token ids below zero; a mask with other values than 0 and 1, or without any 1; states that are not finite, all
    zero or constant for a token, or the same for many tokens.
    """
    import torch

    found: list[Fault] = []

    def fault(key: str, there: str, expected: str, causes: str) -> None:
        found.append(Fault(file, key, expected, there, causes, way_out))

    if len(parts.ids) and int(parts.ids.min()) < 0:
        place = int((parts.ids < 0).nonzero()[0])
        fault("input_ids", f"token id {int(parts.ids[place])} at place {place}", "ids of at least 0", "it has no embedding")
    if parts.mask is not None:
        other = parts.mask[(parts.mask != 0) & (parts.mask != 1)]
        if other.numel():
            fault("loss_mask", f"values other than 0 and 1 ({other[0].item()} and {other.numel() - 1} more)", "0 and 1",
                  "tokens are weighed by them")  # fmt: skip
        elif not bool(parts.mask.any()):
            fault("loss_mask", "nothing is supervised", "at least one 1", "nothing is learned from it")
    for place, state in enumerate(parts.states):
        key = f"hidden_states[{place}]"
        if state.ndim != 2 or not state.shape[1] or not state.is_floating_point():
            fault(key, f"{str(state.dtype).removeprefix('torch.')} {list(state.shape)}", "floats [T, H]", "it is no state")
            continue
        state = state.float() if state.element_size() == 1 else state
        low, high = state.amin(1), state.amax(1)
        bad = ~(torch.isfinite(low) & torch.isfinite(high))  # a NaN passes through both
        if bad.any():
            at = int(bad.nonzero()[0])
            fault("hidden_states", f"NaN or infinite values (state {place}, {int(bad.sum())} tokens, first token {at})",
                  "finite numbers", "the loss turns NaN")  # fmt: skip
            continue
        same = low == high
        if same.any():
            at = int(same.nonzero()[0])
            what = "all zero" if float(low[at]) == 0 else f"one number, {float(low[at]):g}"
            fault(key, f"{what} for {int(same.sum())} of {len(same)} tokens, first token {at}",
                  f"{state.shape[1]} different numbers",
                  "it says nothing of the token: validation looks fine and acceptance is near none")  # fmt: skip
    again = _repeated(parts.states[-1]) if parts.states and not found and len(parts.ids) > 1 else 0
    if again > REPEATED * len(parts.ids):
        fault(f"hidden_states[{len(parts.states) - 1}]", f"{again} of {len(parts.ids)} tokens have the state of another",
              f"at most {REPEATED:.0%}", "the states were copied, not computed: the draft learns noise")  # fmt: skip
    return found


def _repeated(state: "Tensor") -> int:
    """How many rows of [T, H] equal an earlier one: compared by one random sum of each, in 64 bits."""
    import torch

    weights = torch.rand(state.shape[1], generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    sums = torch.mv(state.float(), weights)
    return len(sums) - len(torch.unique(sums))
