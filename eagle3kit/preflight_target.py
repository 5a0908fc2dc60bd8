"""Pre-flight, second part: a draft directory against the target it drafts for, and against a reference draft."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from eagle3kit import draft_layout, target
from eagle3kit.draft_layout import Draft
from eagle3kit.files import read_json
from eagle3kit.findings import FAULT, GOOD, NOTE, UNKNOWN, Finding, compare

if TYPE_CHECKING:
    import torch

RELATED = 0.5  # mean cosine of the draft's head rows with the target's: near 1 where they began as these, near 0 where not


def against(draft: Draft, folder: Path, trust_remote_code: bool) -> Iterator[Finding]:
    geometry = target.geometry(folder, trust_remote_code)
    outer = read_json(folder / "config.json")
    inner = next((outer[name] for name in target.INNER if isinstance(outer.get(name), dict)), outer)
    if draft.layer_ids:
        yield compare("layer ids against the target", f"below {geometry.layers}", draft.layer_ids,
                      "the last state is no auxiliary layer: vLLM fails, or feeds other states",
                      max(draft.layer_ids) < geometry.layers)  # fmt: skip
    yield compare("vocabulary size", geometry.vocab_size, draft.layer["vocab_size"], "wrong embeddings, acceptance near nothing")
    hidden = draft.config.get("target_hidden_size") or draft.layer["hidden_size"]
    yield compare("hidden size", geometry.hidden_size, hidden, "vLLM cannot join the draft to the target")
    mine, theirs = draft_layout.rope(draft.layer), draft_layout.rope(inner)
    for name in draft_layout.ROPE_FIELDS:
        if name in mine or name in theirs:
            yield compare(f"RoPE {name}", theirs.get(name), mine.get(name),
                          "positions mean something else than in the target; even if the draft was trained so, acceptance falls "
                          "with length", _near(mine.get(name), theirs.get(name)))  # fmt: skip
    limit = draft.layer.get("max_position_embeddings", 0)
    yield compare("position limit", f"at least {geometry.max_positions}", limit, "acceptance collapses past the limit",
              limit >= geometry.max_positions)  # fmt: skip
    named = draft.target
    if named and Path(named).is_dir():
        yield compare("target named", folder, named, "it was exported for another model", target.identity(Path(named)) ==
                  target.identity(folder))  # fmt: skip
    weights = target.weights(folder, ("embed", "head"))
    yield from _shared(draft, weights["embed"], weights["head"])


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
        places = places + draft.tensor("d2t")
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
