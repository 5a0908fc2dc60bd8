"""The doctor: faults of samples and mappings that no shape betrays, each named with its number, threshold and cost.

In stages, from what costs nothing to a forward of the target. The signs come in the order of cause and consequence, so the
first bad one is the fault; what could not be checked says so and why, and is never called sound.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3kit import doctor_layers, doctor_states, doctor_target, doctor_tokens, language_model
from eagle3kit import target as targets
from eagle3kit.doctor_mapping import examine_mapping
from eagle3kit.errors import KitError
from eagle3kit.signs import CHECKS, Sign, require_sound, unchecked

if TYPE_CHECKING:
    from eagle3kit.doctor_layers import Match
    from eagle3kit.samples import StatesSample

__all__ = ["Sign", "examine", "examine_mapping", "layer_matches", "require_sound"]

Named = Sequence[tuple[str, "StatesSample"]]
TARGET_CHECKS = ("own tokens", "norm applied", "auxiliary layers", "last layer", "final norm", "own answers")
MOST = 16  # samples that are read beside the target's head
FORWARD = 3  # samples that the target computes itself


def examine(
    samples: Named, target: Path | None, layer_ids: Sequence[int] | None, *, trust_remote_code: bool = False,
    chat_template: str | None = None, greedy: bool | None = None, reader_adds_one: bool | None = None,
    found: "Sequence[Match] | str | None" = None, tokens: int = 128,
) -> list[Sign]:
    """The signs of `samples` (name, sample), all of one target; the first bad one is the fault, later ones may follow of it.

    `target` is its model directory; without it only the samples themselves are looked at. `layer_ids` are those of the
    auxiliary states (id k = entering layer k), None when nobody said. `chat_template` stands in for the target's own.
    `greedy` False: the answers are not meant to be the target's first choices. `reader_adds_one`: how whoever reads the
    samples applies the final norm; None: as the target does. `found`: `layer_matches` of them, or why there are none;
    None: made here from the first `tokens` tokens of three samples, if the target fits the memory. At most 16 samples are
    read beside the head; give a drawn few.

    Raises:
        KitError: the target's directory is not one, or lacks a tensor.
    """
    given = samples
    samples, any_length = doctor_states.widened(samples)
    signs = doctor_states.of_states(samples, layer_ids)
    if target is None:
        names = ("token ids", "supervised tokens", "chat template", "mask place", "end of turn", *TARGET_CHECKS)
        return [*signs, *(unchecked(name, "only the target can tell, and none was named") for name in names)]
    geometry = targets.geometry(target, trust_remote_code)
    tokenizer = targets.tokenizer(target, trust_remote_code)
    stops = targets.stops(target, tokenizer)
    readable = doctor_states.readable(signs)
    signs += doctor_tokens.of_tokens(samples, tokenizer, stops, geometry.vocab_size, chat_template)
    outside = next(sign for sign in signs if sign.name == "token ids").bad
    fits = all(state.shape[-1] == geometry.hidden_size for _, row in samples for state in row.states)
    if not samples or not readable or outside or not fits:
        why = ("mend the faults above first" if not readable or outside else f"the states are not of the target's width "
               f"{geometry.hidden_size}" if not fits else "there are no samples")  # fmt: skip
        return [*signs, *(unchecked(name, why) for name in TARGET_CHECKS)]
    weights = targets.weights(target, ("head", "final_norm"), trust_remote_code=trust_remote_code)
    adds_one = geometry.norm_adds_one if reader_adds_one is None else reader_adds_one
    (own, applied, reading), answers = doctor_target.of_last_state(
        samples[:MOST], weights, eps=geometry.rms_norm_eps, adds_one=geometry.norm_adds_one,
        reader="1 + w" if adds_one else "norm", greedy=greedy)  # fmt: skip
    if any_length:
        applied = unchecked("norm applied", "states of eight bits have lost their length: their scale is kept aside")
    if found is None:
        found = layer_matches(given, target, layer_ids, trust_remote_code=trust_remote_code, tokens=tokens)
    layers = ([unchecked(name, found) for name in ("auxiliary layers", "last layer")] if isinstance(found, str)
              else doctor_layers.of_layers(found, min(FORWARD, len(samples))))  # fmt: skip
    if answers.bad and isinstance(found, str):
        doubt = f"{answers.note}; or the last state is of an earlier layer, which was not checked"
        answers = replace(answers, note=doubt)
    return [*signs, own, applied, *layers, reading, answers]


def layer_matches(
    samples: Named, target: Path, layer_ids: Sequence[int] | None, *, trust_remote_code: bool = False, tokens: int = 128,
    model: Any = None,
) -> "list[Match] | str":
    """Each stored state of the first three `samples` against every layer of a forward of the target, or why there is none.

    `model`: the target as `language_model.load` gives it; None: loaded here, if in float32 and a fifth more it fits half of
    the free memory.
    """
    from eagle3kit.machine import inventory

    geometry = targets.geometry(target, trust_remote_code)
    try:
        samples, any_length = doctor_states.widened(samples[:FORWARD])
        _require_shapes(samples, geometry, layer_ids)
        if model is None:
            why = language_model.refusal(target, inventory(target)["free_memory_gib"] * 2**30)
            if why:
                return why
            model = language_model.load(target, trust_remote_code)
        return doctor_layers.matches(samples, model, geometry, layer_ids, tokens, any_length)
    except KitError as error:
        return str(error)


def _require_shapes(samples: Named, geometry: "targets.Geometry", layer_ids: Sequence[int] | None) -> None:
    """KitError unless the target can be asked for the tokens of `samples`, and their states be held against its own."""
    if not samples:
        raise KitError("there are no samples")
    counts = {len(row.states) for _, row in samples}
    if len(counts) > 1 or (layer_ids is not None and counts != {len(layer_ids) + 1}):
        raise KitError(f"{sorted(counts)} states a sample do not fit the layer ids {list(layer_ids or [])} and the last")
    for name, row in samples:
        if len(row.input_ids) < 2 or not 0 <= int(row.input_ids.min()) <= int(row.input_ids.max()) < geometry.vocab_size:
            raise KitError(f"{name} holds no tokens of this target's vocabulary of {geometry.vocab_size:,}")
        wrong = [list(state.shape) for state in row.states if list(state.shape) != [len(row.input_ids), geometry.hidden_size]]
        if wrong:
            raise KitError(f"{name} holds states {wrong[0]}, [{len(row.input_ids)}, {geometry.hidden_size}] are due")


def rows(signs: Sequence[Sign]) -> list[dict[str, Any]]:
    """A row a sign, for a table: the check, its verdict, number, threshold and on which side it is bad, and what was found."""
    return [{"check": sign.name, "verdict": sign.word, "number": sign.number, "n": sign.n,
             "bad": f"{CHECKS[sign.name].side} {sign.threshold:g}", "found": sign.note} for sign in signs]  # fmt: skip
