"""The acceptance length that a verdict reckons with: measured with an earlier draft, published by others, or assumed."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3kit import fingerprint, speedup
from eagle3kit.decode_profile import depths
from eagle3kit.errors import KitError
from eagle3kit.figures import Figure

if TYPE_CHECKING:
    from eagle3kit.params import Params

# Lengths that were served with a draft for targets of a family: length, its interval, prompts, draft tokens, and where from.
# A target belongs to the family whose name is part of its own ("moonshotai/Kimi-K2.5", "configs/kimi-k2.5/config.json").
SERVED = {
    "smollm2-135m-instruct": (1.61, (1.49, 1.76), 32, 3, "this kit's pass on two CPU cores, chats of params/cpu.yaml (README)"),
    "llama-3.1-8b": (3.53, (None, None), 80, 7, "a published EAGLE-3 draft for Llama-3.1-8B-Instruct, MT-bench, 7 draft tokens, "
                     "vLLM of May to September 2025 (told in its report 26191)"),
    "kimi-k2": (2.278, (None, None), None, 3, "an EAGLE-3 draft for Kimi-K2.6 on 8x RTX PRO 6000, pooled (rtx6kpro)"),
}
ASSUMED = 2.0
NUMBERS = {"acceptance_length", "acceptance_length_low", "acceptance_length_high", "prompts"}  # of 08's result


def lengths(params: "Params", outputs: Path | None = None) -> dict[int, Figure]:
    """Acceptance length by draft tokens.

    The first of these that there is: what `profile.acceptance_length` assumes; what the newest run in `outputs` served for this
    target with as many draft tokens (`measured`); what was published for its family; 2. It holds for one number of draft tokens
    (`acceptance.draft_tokens`, or as published). For others it is "modelled", with one acceptance rate a token that gives the
    same (`speedup.expected_tokens`), and has no interval: a length of 2.0 with 3 draft tokens is 1.54 with 1.

    Raises:
        KitError: `profile.acceptance_length` is more than so many draft tokens can give.
    """
    depth = params.acceptance.draft_tokens
    base = _base(params, outputs)
    if base[0].value > depth + 1 and params.profile.acceptance_length is not None:
        raise KitError(f"profile.acceptance_length is {base[0].value}, but {depth} draft tokens (acceptance.draft_tokens) give "
                       f"at most {depth + 1} tokens a verify step")  # fmt: skip
    known, depth = base
    low, high = 0.0, 1.0
    for _ in range(60):  # the rate whose expected tokens are the length: they grow with it
        rate = (low + high) / 2
        low, high = (rate, high) if speedup.expected_tokens(rate, depth) < known.value else (low, rate)
    return {other: known if other == depth else
            Figure(value=speedup.expected_tokens(low, other), unit="tokens", kind="modelled",
                   source=f"{known.source}; with {other} draft tokens by one acceptance rate a token")
            for other in depths(params)}  # fmt: skip


def measured(outputs: Path, params: "Params") -> Figure | None:
    """What the newest run in `outputs` served for the same target with as many draft tokens; None where there is none.

    It is no input of a stage: a draft that was served since makes no verdict stale, and asking again takes it into account.
    """
    wanted = {"target.model": params.target.model, "acceptance.draft_tokens": params.acceptance.draft_tokens}
    newest: dict[str, Any] = {}
    for path in outputs.glob("*/08_acceptance/result.json"):
        done = fingerprint.result(path.parent) or {}
        same = all(done.get("params", {}).get(name) == value for name, value in wanted.items())
        if same and done.get("numbers", {}).keys() >= NUMBERS and done["finished"] > newest.get("finished", ""):
            newest = done
    if not newest:
        return None
    numbers = newest["numbers"]
    return Figure(value=numbers["acceptance_length"], low=numbers["acceptance_length_low"], n=numbers["prompts"], unit="tokens",
                  high=numbers["acceptance_length_high"], kind="measured",
                  source=f"served by run {newest['run']} of {newest['finished'][:10]}")  # fmt: skip


def _base(params: "Params", outputs: Path | None) -> tuple[Figure, int]:
    """The one length that is known, and with how many draft tokens."""
    asked, depth = params.profile, params.acceptance.draft_tokens
    if asked.acceptance_length is not None:
        return _assumed(asked.acceptance_length, "assumed by the parameters"), depth
    if outputs and asked.geometry is None and (found := measured(outputs, params)):
        return found, depth
    name = (asked.geometry or params.target.model).lower()
    if family := next((family for family in SERVED if family in name), None):
        value, (least, most), prompts, depth, source = SERVED[family]
        return Figure(value=value, low=least, high=most, n=prompts, unit="tokens", kind="published", source=source), depth
    return _assumed(min(ASSUMED, depth + 1.0), "assumed: none is known for this target"), depth


def _assumed(value: float, source: str) -> Figure:
    return Figure(value=value, unit="tokens", kind="modelled", source=source)
