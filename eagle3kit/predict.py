"""The estimate without serving: walk recorded answers with the draft as it will be served, and count what would be kept.

A hit is a draft token that, mapped by `d2t`, is the target's *own* next token over its whole vocabulary: the argmax of
head(norm(last state)). A token that the draft vocabulary lacks can never be proposed, so it is a miss by itself. Drafts
start where the server would start them (`acceptance.walk`); the mean over all positions stands beside it under its own name.
Everything is teacher-forced: past a place where the recorded answer leaves the target's own words (off-policy), the draft
reads the recorded words, so the estimate is only as good as the *on-policy rate* says.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from eagle3kit import checkpoint, cpu
from eagle3kit.acceptance import Acceptance, Interval, interval_of, total
from eagle3kit.errors import KitError
from eagle3kit.predict_tables import Step, Tables
from eagle3kit.samples import StatesSample, Store, load

if TYPE_CHECKING:
    import torch
    from speculators.models.eagle3 import Eagle3DraftModel

    from eagle3kit.target import Geometry


@dataclass(kw_only=True)
class Prediction:
    """What the draft would have accepted, a record a turn in the order they were given.

    `records` is the estimate. The others change one thing each, so that the difference in length is what it costs:
      recorded       hits against the recorded tokens instead of the target's own (equal where the answers are on-policy)
      outside        tokens outside the draft vocabulary counted as hits: the most that the cut vocabulary can cost
      foreign        places where record and target differ counted as hits: the most that off-policy answers can cost
      restricted     hits against the argmax over the *draft* vocabulary, as speculators' `full_acc` counts them
      everywhere, everywhere_restricted   means over all answer positions instead of the replay (`…_records`: a record a turn)
      everywhere_recorded, with_prompts   the same against the recorded tokens, of answers alone and of the prompts too
    `sampled` [turns][1 + K] are expected drafts and accepted at `temperature` where the draft samples too, `pointed` where it
    proposes its best token, as vLLM has it unless told otherwise. `covered` and `on_policy` are (tokens in the
    draft vocabulary, tokens that are the target's own, each of all answer tokens). `accuracy` [K] counts, unjoined, (hits,
    positions, hits among tokens of the draft vocabulary, those positions): what per-step accuracies of trainers are made of.
    """

    depth: int
    temperature: float
    vocabulary: int = 0  # tokens that the draft may say
    conversations: list[int] = field(default_factory=list)  # of each turn, the number of the sample it is from
    records: list[Acceptance] = field(default_factory=list)
    recorded: list[Acceptance] = field(default_factory=list)
    outside: list[Acceptance] = field(default_factory=list)
    foreign: list[Acceptance] = field(default_factory=list)
    restricted: list[Acceptance] = field(default_factory=list)
    everywhere: Acceptance = Acceptance(drafts=0, accepted=())
    everywhere_restricted: Acceptance = Acceptance(drafts=0, accepted=())
    everywhere_records: list[Acceptance] = field(default_factory=list)
    everywhere_restricted_records: list[Acceptance] = field(default_factory=list)
    everywhere_recorded: list[Acceptance] = field(default_factory=list)
    with_prompts: list[Acceptance] = field(default_factory=list)
    sampled: list[tuple[float, ...]] = field(default_factory=list)
    pointed: list[tuple[float, ...]] = field(default_factory=list)
    covered: tuple[int, int] = (0, 0)
    on_policy: tuple[int, int] = (0, 0)
    accuracy: list[list[int]] = field(default_factory=list)
    steps: list[list[Step]] = field(default_factory=list)

    @property
    def length(self) -> float:
        """The estimated acceptance length, 1 to K + 1."""
        return total(self.records).length

    @property
    def sampled_length(self) -> float:
        """The estimated acceptance length when target and draft sample at `temperature`."""
        return _expected_length(self.sampled)

    @property
    def pointed_length(self) -> float:
        """The same where the draft proposes its best token: vLLM's default."""
        return _expected_length(self.pointed)

    def interval(self, *, resamples: int = 2000, seed: int = 0, of: str = "records") -> Interval:
        """95 % bootstrap interval over conversations (turns of one conversation are alike), of the counts called `of`."""
        counts = getattr(self, of)
        rows = np.array(counts if of in ("sampled", "pointed") else [(r.drafts, *r.accepted) for r in counts], dtype=float)
        names, groups = np.unique(self.conversations, return_inverse=True)
        sums = np.zeros((len(names), rows.shape[1]))
        np.add.at(sums, groups, rows)
        return interval_of(sums, resamples=resamples, seed=seed)

    def costs(self) -> dict[str, float]:
        """At most so many tokens of length are lost to the cut vocabulary ("outside") and to off-policy answers
        ("foreign"): the length with those places counted as hits, less the estimate."""
        return {name: total(getattr(self, name)).length - self.length for name in ("outside", "foreign")}


def load_draft(folder: Path, dtype: "torch.dtype", device: str | None = None) -> "Eagle3DraftModel":
    """The draft of a servable directory as speculators' model, in the number type it is served in, ready to be asked.

    Nothing of the target is read: embedding and head are the draft's own, as in vLLM. KitError when a tensor is missing.
    """
    import torch
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    checkpoint.read_config(folder)
    config = Eagle3SpeculatorConfig.from_pretrained(str(folder))
    config.transformer_layer_config._attn_implementation = "sdpa"  # flex attention wants lengths in blocks
    model = Eagle3DraftModel(config)
    missing, unknown = model.load_state_dict(load(folder / checkpoint.WEIGHTS), strict=False)
    lost = [key for key in missing if not key.startswith("verifier_")]
    if lost or unknown:
        raise KitError(f"{folder / checkpoint.WEIGHTS} " + "; ".join(
            filter(None, [f"lacks {', '.join(lost[:4])}" if lost else "",
                          f"has {', '.join(unknown[:4])}, which the config knows nothing of" if unknown else ""]))
            + ": config and weights are not of one draft; export it again")  # fmt: skip
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    frequencies = {name: buffer.to(place, copy=True) for name, buffer in model.rotary_emb.named_buffers()}
    model = model.to(place, dtype).eval()
    for name, buffer in frequencies.items():  # rounded to bfloat16 they turn far positions by wrong angles; vLLM's are float32
        model.rotary_emb.register_buffer(name, buffer, persistent=False)
    return model


def answers(store: Store, most: int, most_tokens: int) -> Iterator[tuple[StatesSample, list[tuple[int, int]]]]:
    """The first `most` turns of a store as (sample, its turns), in the order in which `served.prompts` asks them; answers are
    cut to the `most_tokens` that are served."""
    left = most
    for number, turns in enumerate(store.manifest()["turns"]):
        mine = [(start, min(end, start + most_tokens)) for start, end in turns[:left]]
        if mine:
            left -= len(mine)
            yield store.read(number), mine


def rows(found: Prediction, *, resamples: int, seed: int) -> list[dict[str, Any]]:
    """The estimates as rows of a table: name, length, its interval over conversations, drafts."""
    covered, own = (f"{100 * of[0] / max(1, of[1]):.2f} % of {of[1]:,} tokens" for of in (found.covered, found.on_policy))
    table = [("replay, greedy: the prediction", "records", "as served"),
             ("mean over all positions", "everywhere_records", "what trainers average"),
             (f"replay, target sampled at temperature {found.temperature:g}", "pointed", "vLLM's default; not served here"),
             (f"replay, target and draft sampled at {found.temperature:g}", "sampled", "Σ min(p, q); not served here"),
             ("outside the draft vocabulary as hits", "outside", f"inside: {covered}"),
             ("off-policy places as hits", "foreign", f"on-policy: {own}")]  # fmt: skip
    made = []
    for name, of, remark in table:
        counts, sampled = getattr(found, of), of in ("sampled", "pointed")
        length = _expected_length(counts) if sampled else total(counts).length
        drafts = round(sum(row[0] for row in counts)) if sampled else total(counts).drafts
        low, high = found.interval(resamples=resamples, seed=seed, of=of).length
        made.append({"estimate": name, "acceptance length": length, "from": low, "to": high, "drafts": drafts, "remark": remark})
    return made


@cpu.beside_gpu()
def predict(
    model: "Eagle3DraftModel", samples: Iterable[tuple[StatesSample, Sequence[tuple[int, int]]]],
    weights: dict[str, "torch.Tensor"], geometry: "Geometry", *, depth: int, temperature: float = 1.0,
    d2t: "torch.Tensor | None" = None, final_norm: bool = True,
) -> Prediction:  # fmt: skip
    """The estimate on samples, each with the turns [start, end) that are to be walked.

    Args:
        model: from `load_draft`.
        weights: embed not needed; head [V, H] and final_norm [H] of the target.
        depth: draft tokens K.
        temperature: of `sampled`; must be above 0.
        d2t: offsets [D] to read the draft's tokens by; default the draft's own.
        final_norm: False takes head(last state) for the target's words: what a trainer that forgot the norm learned.

    Sampling (Leviathan et al. 2023, theorem 3.5): a draft token is accepted with probability Σ min(p, q) over the target's
    vocabulary, q being 0 outside the draft's; where the draft proposes its best token x, with p(x) (vLLM, v1/sample/
    rejection_sampler.py, NO_DRAFT_PROBS). Along a draft these are multiplied on the recorded path; the walk then is over
    the expected number of drafts that start at each place, which for certain hits and misses is the replay itself.
    """
    import torch

    if temperature <= 0:
        raise KitError(f"temperature is {temperature}: the sampled estimate needs one above 0; the greedy one is always made")
    mapping = _mapping(model, d2t)
    known = torch.zeros(geometry.vocab_size, dtype=torch.bool)
    places = torch.arange(len(mapping)) + mapping
    known[places[(places >= 0) & (places < geometry.vocab_size)]] = True
    kept = places.clamp(0, geometry.vocab_size - 1)
    found = Prediction(depth=depth, temperature=temperature, vocabulary=len(mapping))
    found.everywhere = found.everywhere_restricted = Acceptance(drafts=0, accepted=(0,) * depth)
    found.accuracy = [[0, 0, 0, 0] for _ in range(depth)]
    tables = Tables(model, weights, geometry, depth, temperature, mapping, known, kept, final_norm)
    for number, (sample, turns) in enumerate(samples):
        tables.add(found, number, sample, [tuple(turn) for turn in turns])
    if not found.records:
        raise KitError("there is no answer to predict on; give samples with turns")
    return found


def _expected_length(counts: Sequence[tuple[float, ...]]) -> float:
    drafts, *accepted = np.sum(counts, axis=0)
    return float(1 + sum(accepted) / drafts)


def _mapping(model: Any, d2t: "torch.Tensor | None") -> "torch.Tensor":
    """Offsets [D] int64 on the CPU; zeros where the draft has the whole vocabulary."""
    import torch

    if d2t is None:
        d2t = model.d2t
    return torch.zeros(model.draft_vocab_size, dtype=torch.int64) if d2t is None else d2t.cpu().to(torch.int64)
