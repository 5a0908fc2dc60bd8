"""Why is less served than was predicted? Each known fault is undone in an experiment; the one that brings acceptance back is it.

The draft is looked at as the server would run it: its directory as it is, on states that the target gives now. An experiment
changes one thing (reads `d2t` as target ids, feeds the states of the neighbouring layers, takes the target's RoPE …) and
counts by replay again. What an experiment gains over "as served" is its evidence. Contradictions that need no experiment (a
mask that is not where the answers are) come first.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3kit import doubts
from eagle3kit.acceptance import Acceptance, total
from eagle3kit.agreement import compare
from eagle3kit.errors import KitError
from eagle3kit.predict import Prediction, load_draft, predict
from eagle3kit.samples import StatesSample
from eagle3kit.signs import CHECKS

if TYPE_CHECKING:
    import torch

    from eagle3kit.target import Geometry

Turns = Sequence[tuple[int, int]]
Samples = Sequence[tuple[StatesSample, Turns]]
States = Callable[[Sequence[int], Sequence[int]], "list[torch.Tensor]"]  # (token ids, layer ids) -> states, the last one last
LEAST = 0.02  # tokens of length: a smaller gain is no cause worth the name, whatever its interval
# How much a gain weighs as evidence. A bound is "at most": what is lost lies between nothing and it. Today's states against the
# recorded ones undo every fault of states at once, so they only lead where no special cause explains as much.
BOUND, GENERAL = 0.5, 0.9
STATES = "states of training and serving differ"


@dataclass(frozen=True)
class Suspect:
    """One possible cause: the `length` when it is undone (None: no experiment), what that `gain`s over "as served", whether it
    is `named` (the evidence points to it), what was seen, and the check that would confirm it."""

    name: str
    length: float | None
    gain: float
    named: bool
    seen: str
    confirm: str


def investigate(
    folder: Path, samples: Sequence[tuple[StatesSample, Turns]], weights: dict[str, "torch.Tensor"], geometry: "Geometry", *,
    depth: int, dtype: "torch.dtype", rope: dict[str, Any] | None = None, states: States | str | None = None,
    frequencies: "torch.Tensor | None" = None,
) -> tuple[Prediction, list[Suspect]]:  # fmt: skip
    """(the prediction as served, suspects by falling evidence).

    Args:
        folder: the servable draft.
        samples: a few recorded answers with their turns.
        rope: the target's RoPE parameters, as `transformers` names them; without them RoPE is not tried.
        states: gives the target's states of other layers, or says why it cannot (`target_states`): then layers are not tried.
        frequencies: how often each token [V] occurs in the answers that were trained on (token_freq of 04_vocabulary).
    """
    import torch

    why, states = (states, None) if isinstance(states, str) else ("the target's states of other layers are not at hand", states)

    model = load_draft(folder, dtype)
    ids = list(model.config.eagle_aux_hidden_state_layer_ids)
    served = [(_again(sample, ids, states), turns) for sample, turns in samples]

    def records(of: Any = model, on: Sequence = served, **more: Any) -> list[Acceptance]:
        return predict(of, on, weights, geometry, depth=depth, **more).records

    base = predict(model, served, weights, geometry, depth=depth)
    mask = doubts.masks(samples)
    found, weighs = [Suspect("loss mask shifted", None, 0.0, mask.raised, mask.seen,
                             "the first supervised token must be the first after the prompt")], {}  # fmt: skip

    def tried(name: str, experiments: dict[str, list[Acceptance]], confirm: str, weight: float = 1.0, due: bool = True) -> None:
        best = max(experiments, key=lambda what: total(experiments[what]).length)
        gained = compare(base.records, experiments[best], tolerance=LEAST, resamples=500).rows[-1]
        # The same answers, so what is left of chance is small; an experiment that helps some and harms others is no evidence.
        named = due and gained.difference > LEAST and gained.low > 0
        weighs[name] = weight
        found.append(Suspect(name, gained.served, gained.difference, named, f"{best}: length {gained.served:.3f} instead of "
                             f"{base.length:.3f} ({gained.low:+.3f} to {gained.high:+.3f})", confirm))  # fmt: skip

    def not_tried(name: str, why: str, confirm: str) -> None:
        found.append(Suspect(name, None, 0.0, False, f"not checked: {why}", confirm))

    _vocabulary(model, weights, records, tried, base, doubts.vocabulary(base, samples, frequencies))
    confirm = "eagle_aux_hidden_state_layer_ids against the layers that the samples' manifest names (and its convention)"
    if states is None:
        not_tried("layers shifted", why, confirm)
    else:
        shifts = {f"the states of layers {[k + by for k in ids]}": [k + by for k in ids] for by in (-1, 1)
                  if all(0 <= k + by < geometry.layers for k in ids)}  # fmt: skip
        tried("layers shifted", {name: records(on=[(_with(s, states, other), t) for s, t in served])
                                 for name, other in shifts.items()}, confirm)  # fmt: skip
    tried("tokens and states misaligned", {f"states of the token {word}": records(on=[(_rolled(s, by), t) for s, t in served])
                                           for word, by in (("before", 1), ("after", -1))},
          "each state against one forward pass of the target over the same tokens")  # fmt: skip
    if states is not None and all(len(sample.states) == len(ids) + 1 for sample, _ in samples):
        tried(STATES, {"the recorded states": records(on=samples)}, "one sample's recorded states against one forward of the "
              "target over the same tokens: other layers, another target, another number type", GENERAL)  # fmt: skip
    _rope(model, rope, records, tried, not_tried)
    _flags(model, records, tried)
    tried("final norm missing in training", {"head(state) without the norm as the target's words": records(final_norm=False)},
          "the audit of 03_hidden_states: argmax(head(norm(last state))) must be the next token")  # fmt: skip
    other = torch.float32 if dtype != torch.float32 else torch.bfloat16
    tried("number type", {f"the draft in {str(other).removeprefix('torch.')}": records(of=load_draft(folder, other))},
          "serve once with target.dtype float32 and compare")  # fmt: skip
    same, every = base.on_policy
    tried("off-policy answers", {f"{every - same:,} of {every:,} answer tokens, not the target's own, as hits": base.foreign},
          "regenerate the answers with the target (dataset.regenerate) and predict again", BOUND,
          same < CHECKS["own answers"].threshold * every)  # fmt: skip
    # A contradiction needs no gain to be believed; then by what each experiment brings back.
    return base, sorted(found, key=lambda one: (not (one.named and one.length is None),
                                                -weighs[one.name] * one.gain if one.named and one.name in weighs else 1.0))


def rope_of(target: Path, trust_remote_code: bool = False) -> dict[str, Any]:
    """The RoPE parameters of the target's language model as transformers names them (those of full attention where layers
    differ); KitError when transformers cannot read its config."""
    from eagle3kit.target import language_config

    rope = getattr(language_config(target, trust_remote_code), "rope_parameters", None) or {}
    return dict(rope.get("full_attention", rope))


def target_states(target: Path, *, trust_remote_code: bool = False) -> States | str:
    """States by a forward of the target in transformers, in vLLM's numbering; or why there are none, in words: it would not
    fit into half of the free memory, or transformers cannot load it. Made for a few samples of a small target."""
    import psutil
    import torch

    from eagle3kit import language_model
    from eagle3kit.target import geometry

    try:
        why = language_model.refusal(target, psutil.virtual_memory().available)
        if why:
            return why
        model = language_model.load(target, trust_remote_code)
        count = geometry(target, trust_remote_code).layers
    except KitError as error:
        return str(error)

    def states(ids: Sequence[int], layers: Sequence[int]) -> list[torch.Tensor]:
        entering = language_model.forward(model, torch.tensor(list(ids)), count).entering
        return [*(entering[k] for k in layers), entering[count]]

    return states


def _again(sample: StatesSample, ids: Sequence[int], states: States | None) -> StatesSample:
    """The sample with the states that the server would feed this draft now; as recorded where nobody can say."""
    return sample if states is None else _with(sample, states, ids)


def _with(sample: StatesSample, states: States, ids: Sequence[int]) -> StatesSample:
    return StatesSample(sample.input_ids, sample.loss_mask, states(sample.input_ids.tolist(), ids))


def _rolled(sample: StatesSample, by: int) -> StatesSample:
    """The auxiliary states moved along the tokens; the last state stays, for it says what the target says."""
    return StatesSample(sample.input_ids, sample.loss_mask,
                        [state.roll(by, dims=0) for state in sample.states[:-1]] + [sample.states[-1]])  # fmt: skip


def _vocabulary(model, weights, records, tried, base: Prediction, lacks: doubts.Doubt) -> None:
    """`d2t` read as target ids; the mapping that the head's rows tell; where that is the draft's own, what it lacks."""
    import torch

    own = torch.zeros(model.draft_vocab_size, dtype=torch.int64) if model.d2t is None else model.d2t.cpu()
    count, size = torch.arange(len(own)), len(weights["head"])
    confirm = "eagle3kit check DRAFT --target TARGET compares d2t with t2d and the head's rows with the target's"
    absolute = bool(((own >= 0) & (own < size)).all()) and len(own.unique()) == len(own)
    if absolute:
        tried("d2t holds target ids", {"read as target ids, not offsets": records(d2t=own - count)}, confirm)
    rows, other = _by_rows(model.lm_head.weight.detach().cpu(), weights["head"]), "vocabulary from other data"
    if rows is not None and not torch.equal(rows, own + count) and not (absolute and torch.equal(rows, own)):
        tried(other, {"the mapping that the head's rows tell": records(d2t=rows - count)}, confirm)
        return
    tried(other, {f"{lacks.seen}; tokens outside as hits": base.outside}, "the coverage that 04_vocabulary prints: choose the "
          "draft's vocabulary from answers like these, or a larger one (vocabulary.size)", BOUND, lacks.raised)  # fmt: skip


def _by_rows(head: "torch.Tensor", target: "torch.Tensor") -> "torch.Tensor | None":
    """Which row of the target's head [V, H] each row of the draft's head [D, H] is; None unless nearly all are found."""
    import torch

    places = {row.numpy().tobytes(): place for place, row in enumerate(target.to(head.dtype).view(torch.uint8))}
    found = torch.tensor([places.get(row.numpy().tobytes(), -1) for row in head.contiguous().view(torch.uint8)])
    return found.clamp(min=0) if (found >= 0).float().mean() > 0.95 else None


def _rope(model, rope, records, tried, not_tried) -> None:
    confirm = "eagle3kit check DRAFT --target TARGET compares RoPE field by field"
    if not rope:
        return not_tried("RoPE", "the target's parameters were not given", confirm)
    mine = model.config.transformer_layer_config
    own = dict(getattr(mine, "rope_parameters", None) or {})
    others = {"the target's RoPE": rope, "no scaling": {"rope_type": "default", "rope_theta": own.get("rope_theta", 1e4)}}
    counts = {}
    for name, parameters in others.items():
        if parameters != own:
            variant, config = copy.copy(model), copy.deepcopy(mine)
            variant._modules = dict(model._modules)
            config.rope_parameters = parameters
            config.hidden_size *= 2  # as speculators does: the first layer reads embedding and state side by side
            variant.rotary_emb = type(model.rotary_emb)(config).to(next(model.parameters()).device)
            counts[name] = records(of=variant)
    if counts:
        tried("RoPE", counts, confirm)


def _flags(model, records, tried) -> None:
    """Each norm flag turned round, as a server that ignores or assumes it would run the draft."""
    layer, config, counts = model.layers[0], model.config, {}
    for owner, name in ((layer, "norm_before_residual"), (config, "norm_output")):
        kept = getattr(owner, name)
        setattr(owner, name, not kept)
        try:
            counts[f"{name} {not kept}"] = records()
        finally:
            setattr(owner, name, kept)
    if model.input_norm is not None:
        kept, model.input_norm = model.input_norm, None
        try:
            counts["norm_before_fc False"] = records()
        finally:
            model.input_norm = kept
    tried("a norm flag", counts, "eagle3kit check DRAFT: the flags of config.json against what the installed vLLM reads")

