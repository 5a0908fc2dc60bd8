"""Pre-flight, second part: a draft directory against the target it drafts for, and against a reference draft."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3kit import draft_layout, target, target_config
from eagle3kit.draft_layout import Draft
from eagle3kit.files import read_json
from eagle3kit.findings import FAULT, GOOD, NOTE, UNKNOWN, Finding, compare

if TYPE_CHECKING:
    import torch

# What transformers and vLLM take where a YaRN config says nothing.
YARN = {"beta_fast": 32.0, "beta_slow": 1.0}
# These weigh all of attention alike, near and far: a draft that learned with other ones reads positions no worse.
WEIGHTS = ("mscale", "mscale_all_dim", "attention_factor")
RELATED = 0.5  # mean cosine of the draft's head rows with the target's: near 1 where they began as these, near 0 where not


def against(draft: Draft, folder: Path, trust_remote_code: bool) -> Iterator[Finding]:
    geometry = target.geometry(folder, trust_remote_code)
    outer = read_json(folder / "config.json")
    inner = target_config.language_part(outer)
    if draft.layer_ids:
        yield compare("layer ids against the target", f"below {geometry.layers}", draft.layer_ids,
                      "the last state is no auxiliary layer: vLLM fails, or feeds other states",
                      max(draft.layer_ids) < geometry.layers)  # fmt: skip
    yield compare("vocabulary size", geometry.vocab_size, draft.layer["vocab_size"], "wrong embeddings, acceptance near nothing")
    hidden = draft.config.get("target_hidden_size") or draft.layer["hidden_size"]
    yield compare("hidden size", geometry.hidden_size, hidden, "vLLM cannot join the draft to the target")
    yield from _rope(draft_layout.rope(draft.layer), draft_layout.rope(inner))
    limit = draft.layer.get("max_position_embeddings", 0)
    yield compare("position limit", f"at least {geometry.max_positions}", limit, "acceptance collapses past the limit",
              limit >= geometry.max_positions)  # fmt: skip
    named = draft.target
    if named and Path(named).is_dir():
        yield compare("target named", folder, named, "it was exported for another model", target.identity(Path(named)) ==
                  target.identity(folder))  # fmt: skip
    weights = target.weights(folder, ("embed", "head"), trust_remote_code=trust_remote_code)
    yield from _shared(draft, weights["embed"], weights["head"])


def _rope(mine: dict[str, Any], theirs: dict[str, Any]) -> Iterator[Finding]:
    """RoPE field by field, then in one sentence what it comes to where the two differ in how they stretch positions.

    Fields that only say a default are equal to none. Part of a head turned (`partial_rotary_factor`) is the target's own
    affair: a Llama layer turns all of it, in training and in vLLM.
    """
    full = [{**(YARN if rope.get("rope_type") == "yarn" else {}), **rope} for rope in (mine, theirs)]
    for name in draft_layout.ROPE_FIELDS:
        one, other = (rope.get(name) for rope in full)
        if name not in mine and name not in theirs:
            continue
        if name == "partial_rotary_factor" and one is None:
            yield Finding("RoPE partial_rotary_factor", NOTE, str(other), "none", "the draft turns the whole of each head")
            continue
        if name in WEIGHTS and not _near(one, other):
            yield Finding(f"RoPE {name}", NOTE, str(other), str(one), "attention is weighed otherwise, alike at every distance; "
                          "sound if the draft was trained so")  # fmt: skip
            continue
        yield compare(f"RoPE {name}", other, one, "positions mean something else than in the target; even if the draft was "
                      "trained so, acceptance falls with length", _near(one, other))  # fmt: skip
    if theirs["rope_type"] == "yarn" and mine["rope_type"] == "default":
        start, factor = theirs.get("original_max_position_embeddings"), theirs.get("factor")
        yield Finding("RoPE scaling", FAULT, f"yarn, {factor:g} times {start:,} tokens" if start and factor else "yarn",
                      f"none (rope_scaling null, theta {mine['rope_theta']:g})", "the draft's config is a plain Llama's, as "
                      "that of a published Kimi draft is: the target stretches its slow turns, the draft does not. Expect "
                      "acceptance to fall with context. Train a draft with the target's RoPE, as this kit does: to change the "
                      "config of a trained one is to read it otherwise than it learned")  # fmt: skip


def _near(one: object, other: object) -> bool:
    numbers = isinstance(one, int | float) and isinstance(other, int | float)
    return abs(one - other) <= 1e-6 * max(abs(one), abs(other)) if numbers else one == other


def _shared(draft: Draft, embed: "torch.Tensor", head: "torch.Tensor") -> Iterator[Finding]:
    """The rows that the draft took from the target: embedding and, where frozen, head."""
    import torch

    if "embed_tokens.weight" not in draft.tensors:
        yield Finding("embedding", GOOD, "the target's", "none of its own: vLLM shares the target's")
    else:
        mine = draft.tensor("embed_tokens.weight")
        same = mine.shape == embed.shape and bool(torch.equal(mine, embed.to(mine.dtype)))
        alike = int((mine == embed.to(mine.dtype)).all(1).sum()) if mine.shape == embed.shape else 0
        rows = f"{alike:,} of {len(mine):,} rows"
        trained = bool(draft.config.get("embed_requires_grad"))
        state = GOOD if same else NOTE if trained else FAULT
        yield Finding("embedding", state, "the target's, bit for bit", "equal" if same else f"equal in {rows}",
                      "the draft reads other words than the target says")  # fmt: skip
    mine = draft.tensor("lm_head.weight") if "lm_head.weight" in draft.tensors else None
    places = torch.arange(len(mine)) if mine is not None else None
    if mine is not None and "d2t" in draft.tensors and draft.tensors["d2t"][1] == [len(mine)]:
        places = places + draft.tensor("d2t").to(torch.int64)
    if mine is None or mine.shape[1] != head.shape[1] or not bool(((places >= 0) & (places < len(head))).all()):
        yield Finding("head", UNKNOWN, "the target's rows", "head or mapping do not fit: see above")
        return
    theirs = head[places].to(mine.dtype)
    if torch.equal(mine, theirs):
        yield Finding("head", GOOD, "the target's rows that d2t names", "equal")
        return
    cosine = float(torch.nn.functional.cosine_similarity(mine.float(), theirs.float(), dim=1).mean())
    yield Finding("head", NOTE if cosine > RELATED else FAULT, "the target's rows that d2t names",
                  f"other rows, mean cosine {cosine:.2f}", "trained on from them" if cosine > RELATED else
                  "they are the rows of other tokens: d2t is of another vocabulary, or absolute")  # fmt: skip


def reference(draft: Draft, other: Draft) -> Iterator[Finding]:
    """Names, shapes and config fields against a draft known to serve; sizes of a vocabulary of one's own may differ."""
    mine, theirs = ({key.replace("midlayer.", "layers.0."): (shape, kind) for key, (kind, shape) in one.tensors.items()}
                    for one in (draft, other))  # fmt: skip
    optional = {"embed_tokens.weight", "t2d"}
    apart = sorted((mine.keys() ^ theirs.keys()) - optional)
    yield compare("reference: names", f"{len(theirs)} tensors of the same names", ", ".join(apart[:4]) or "the same",
              "another kind of draft than the reference", not apart)  # fmt: skip
    shapes = [f"{key} {mine[key][0]} for {theirs[key][0]}" for key in sorted(mine.keys() & theirs.keys())
              if mine[key][0] != theirs[key][0]]  # fmt: skip
    yield Finding("reference: shapes", NOTE if shapes else GOOD, "the same", "; ".join(shapes[:3]) or "the same",
                  "another target or vocabulary than the reference's")  # fmt: skip
    kinds = [key for key in sorted(mine.keys() & theirs.keys()) if mine[key][1] != theirs[key][1]]
    yield Finding("reference: number types", NOTE if kinds else GOOD, "the same", ", ".join(kinds[:3]) or "the same")
    fields = [f"{flag} {draft.flags[flag]} for {other.flags[flag]}" for flag in draft.flags
              if bool(draft.flags[flag]) != bool(other.flags[flag])]  # fmt: skip
    fields += [f"layer ids {draft.layer_ids} for {other.layer_ids}"] * (draft.layer_ids != other.layer_ids)
    fields += [f"RoPE {draft_layout.rope(draft.layer)} for {draft_layout.rope(other.layer)}"] * (
        draft_layout.rope(draft.layer) != draft_layout.rope(other.layer))  # fmt: skip
    yield Finding("reference: config", NOTE if fields else GOOD, "the same", "; ".join(fields[:4]) or "the same",
                  "the reference was made otherwise")  # fmt: skip
