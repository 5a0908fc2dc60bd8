"""Pre-flight, first part: a draft directory by itself, and against what the installed vLLM reads."""

from collections.abc import Iterator
from pathlib import Path

from eagle3kit import checkpoint
from eagle3kit.conventions import phrase
from eagle3kit.draft_layout import Draft
from eagle3kit.findings import FAULT, GOOD, NOTE, UNKNOWN, Finding, compare
from eagle3kit.served_code import honoured

DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
ASIDE = ("optimizer", "scheduler", "training_state", "trainer_state", "rng_state")


def kind(draft: Draft) -> Iterator[Finding]:
    kind = draft.layer.get("model_type", "llama")
    yield compare("kind of layer", " or ".join(checkpoint.SERVED_KINDS), kind, "vLLM refuses the draft",
              kind in checkpoint.SERVED_KINDS)  # fmt: skip
    tied = bool(draft.layer.get("tie_word_embeddings", False))
    pruned = draft.draft_vocab not in (None, draft.layer["vocab_size"])
    yield compare("tied embeddings", "false, or no cut vocabulary", f"{str(tied).lower()}, {'cut' if pruned else 'whole'}",
              "a head of the draft's vocabulary cannot be its embedding; set tie_word_embeddings to false", not (tied and pruned))


def tensors(draft: Draft) -> Iterator[Finding]:
    wants = draft.wants
    lost = [key for key in wants if key not in draft.tensors]
    yield compare("tensors", f"{len(wants)} of them", "all" if not lost else f"missing {', '.join(lost[:4])}",
              "vLLM fails to load the draft, or leaves the tensor as it was made", not lost)  # fmt: skip
    may = {"embed_tokens.weight", "t2d", "d2t", "mask_hidden"}
    more = [key for key in draft.tensors if key not in wants and key not in may]
    stray = [key for key in more if any(word in key for word in ("optim", "exp_avg", "momentum", "step"))]
    yield compare("other tensors", "none", ", ".join(more[:4]) or "none",
              "optimizer state has no place here; export the draft again" if stray else "vLLM refuses names it does not know",
              not more)  # fmt: skip
    shapes = {**wants, "embed_tokens.weight": [draft.layer["vocab_size"], draft.layer["hidden_size"]],
              "t2d": [draft.layer["vocab_size"]]}  # fmt: skip
    wrong = [f"{key} {draft.tensors[key][1]} for {shape}" for key, shape in shapes.items()
             if key in draft.tensors and draft.tensors[key][1] != shape]  # fmt: skip
    yield compare("shapes", "those the config calls for", "; ".join(wrong[:3]) or "those the config calls for",
              "vLLM fails to load the draft", not wrong)  # fmt: skip
    kinds = sorted({DTYPES[kind] for key, (kind, _) in draft.tensors.items() if kind in DTYPES})
    said = draft.config.get("dtype") or draft.config.get("torch_dtype") or draft.layer.get("dtype")
    seen = " and ".join(kinds) + (f"; config {said}" if said else "")
    yield compare("number type", "one, as the config says" if said else "one", seen, "served in other numbers than trained",
                  len(kinds) == 1 and said in (None, kinds[0]))  # fmt: skip


def mapping(draft: Draft) -> Iterator[Finding]:
    import torch

    size, vocab = draft.draft_vocab, draft.layer["vocab_size"]
    if size in (None, vocab):
        return
    if "d2t" not in draft.tensors or draft.tensors["d2t"][1] != [size]:
        yield compare("d2t", f"int64 [{size}]", draft.tensors.get("d2t", ("missing", ""))[0],
                  "draft token i is taken for target token i: acceptance near nothing", False)  # fmt: skip
        return
    d2t = draft.tensor("d2t").to(torch.int64)
    yield compare("d2t number type", "I64", draft.tensors["d2t"][0], "vLLM reads int64 offsets")
    if "t2d" in draft.tensors:
        yield compare("t2d number type", "BOOL", draft.tensors["t2d"][0], "speculators takes it for indices, not for a mask")
    count = torch.arange(size)
    places, effect = count + d2t, "draft tokens are taken for other words: acceptance near nothing"
    inside = bool(((places >= 0) & (places < vocab)).all())
    single = len(places.unique()) == size
    rising = bool((d2t[1:] > d2t[:-1]).all()) and bool(((d2t >= 0) & (d2t < vocab)).all())
    kept = draft.tensor("t2d").bool().nonzero().squeeze(1) if "t2d" in draft.tensors else None
    absolute = torch.equal(d2t, kept) if kept is not None and len(kept) == size else rising and not inside
    if absolute and not torch.equal(places, count):
        past = int((places >= vocab).sum())
        stops = f"; {past:,} of them point past the vocabulary, where vLLM stops with an index error" if past else ""
        yield compare("d2t", "offsets (target id - draft id)", "target ids", f"{effect}{stops}; subtract arange(D)", False)
        return
    how = ("offsets to distinct tokens" if inside and single else "doubled tokens" if inside
           else "tokens outside the vocabulary")  # fmt: skip
    yield compare("d2t", f"offsets to {size:,} distinct tokens of {vocab:,}", how, effect, inside and single)
    if bool((d2t == 0).all()):
        yield Finding("d2t", FAULT, "a mapping", f"all zeros: the first {size:,} tokens", effect + "; it was never filled in")
    if kept is None:
        yield Finding("t2d", NOTE, "the same mapping", "missing", "vLLM does without; training on needs it")
    else:
        same = torch.equal(places.sort()[0], kept)
        yield compare("t2d and d2t", "one mapping, there and back", "one" if same else "two", effect, same)


def layers(draft: Draft) -> Iterator[Finding]:
    ids, hidden = draft.layer_ids, draft.config.get("target_hidden_size") or draft.layer["hidden_size"]
    width = draft.tensors.get("fc.weight", ("", [0, 0]))[1][-1]
    if ids is None:
        yield Finding("layer ids", NOTE, "named in the config", "missing", "vLLM takes its own default, [2, n/2, n-3]")
    else:
        right = ids == sorted(set(ids)) and all(isinstance(k, int) and k >= 0 for k in ids)
        yield compare("layer ids", "rising, none twice", phrase(ids) if right else ids,
                      "vLLM sorts them and drops doubles: other states are read", right)  # fmt: skip
    count = len(ids) if ids else 3
    yield compare("layers joined by fc", f"{count} of {hidden}", f"{width / hidden:g} of {hidden}",
              "vLLM fails to load the draft; the final layer's id must not be among them", width == count * hidden)  # fmt: skip
    if count != 3:
        said = draft.layer.get("num_aux_hidden_states") or (draft.config.get("eagle_config") or {}).get(
            "eagle_aux_hidden_state_layer_ids") and count  # fmt: skip
        yield compare("num_aux_hidden_states", count, said, "vLLM makes fc for three layers; name it in the layer's config")


def served(draft: Draft) -> Iterator[Finding]:
    """Flags and window against what the installed vLLM's own source reads."""
    reads, version = honoured(draft.layer.get("model_type", "llama"), draft.kind == "speculators")
    if reads is None:
        yield Finding("norm flags and window", UNKNOWN, "read by the installed vLLM", version)
        return
    for flag, value in draft.flags.items():
        if value:
            yield compare(flag, f"read by vLLM {version}", "read" if flag in reads else "not read",
                      "served without it: lower acceptance; use a newer vLLM or train without it", flag in reads)  # fmt: skip
    if draft.flags["norm_before_residual"] is None:
        other = "true" if draft.kind == "speculators" else "false"
        yield Finding("norm_before_residual", FAULT if draft.kind == "speculators" else NOTE, "said in the config", "missing",
                      f"vLLM {version} takes {other}; speculators' own default is false: say which it was trained with")
    sliding = "sliding_attention" in (draft.layer.get("layer_types") or [])
    window = draft.layer.get("sliding_window")
    if sliding:
        yield compare("sliding window", f"read by vLLM {version}",
                      f"{window}, {'read' if 'layer_types' in reads else 'not read'}",
                  "the draft attends to more than it was trained on: acceptance falls past the window",
                  "layer_types" in reads)  # fmt: skip


def values(draft: Draft) -> Iterator[Finding]:
    import torch

    bad, empty = [], []
    for key in (key for key, (kind, _) in draft.tensors.items() if kind in DTYPES):
        tensor = draft.tensor(key)
        if not bool(torch.isfinite(tensor).all()):
            bad.append(key)
        elif not bool(tensor.any()) and not key.endswith(".bias"):
            empty.append(key)
    yield compare("values", "finite", f"NaN or infinite in {', '.join(bad[:4])}" if bad else "finite",
              "drafts are noise; take an earlier checkpoint", not bad)  # fmt: skip
    yield compare("weights", "not all zero", f"all zero: {', '.join(empty[:4])}" if empty else "not all zero",
              "a tensor that was made and never filled: what passes through it is lost; copy or export the draft again",
              not empty)  # fmt: skip


def files(draft: Draft) -> Iterator[Finding]:
    aside = sorted(path.name for path in draft.folder.iterdir() if path.name.startswith(ASIDE))
    yield Finding("other files", NOTE if aside else GOOD, "no optimizer state", ", ".join(aside) or "none",
                  "a training checkpoint: eagle3kit check DRAFT --export DIR writes what serving needs")  # fmt: skip
    if draft.kind == "speculators":
        named = draft.target
        here = named is not None and (Path(named).is_dir() or not Path(named).is_absolute())
        yield compare("target named", "a model directory or hub id", named,
                      "speculators, and vLLM given the draft alone, look for it there; export it again with --target", here)
