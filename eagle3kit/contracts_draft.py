"""Draft directories, of speculators and of trainers that write `LlamaForCausalLMEagle3`, told from config and headers.

What vLLM takes for granted when it loads one (model_executor/models/llama_eagle3.py): fc.weight [H, n·H] for n auxiliary
layers, lm_head.weight [D, H], norm.weight [H], one decoder layer whose projections read 2·H numbers (embedding and states),
under `layers.0.` or `midlayer.`; d2t [D] where D is not V, without which draft token i would stand for target token i; t2d and
embed_tokens may be absent, the target's embedding is used then. Serving flags and RoPE are `check DRAFT`'s.
"""

import json
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3kit import headers
from eagle3kit.faults import Fault, Unreadable

CONFIG, WEIGHTS = "config.json", ("model.safetensors", "pytorch_model.bin")
MOST_JSON = 4 << 20
RETRAIN = "export the draft again"
FAILS = "vLLM fails to load the draft"


@dataclass(frozen=True)
class Draft:
    """One draft directory: `version` names its layout, `layers` the auxiliary ids (None where the config names none)."""

    folder: Path
    version: str
    weights: Path
    hidden: int
    vocab: int
    draft_vocab: int
    layers: list[int] | None
    bytes: int
    signature: str
    faults: tuple[Fault, ...]
    keys: frozenset[str]


def config_of(folder: Path) -> dict[str, Any] | None:
    """The config.json of an EAGLE-3 draft directory; None for a folder without one, or of another kind of model."""
    path = folder / CONFIG
    try:
        if not stat.S_ISREG(path.stat().st_mode) or path.stat().st_size > MOST_JSON:
            return None
        config = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(config, dict):
        return None
    names = config.get("architectures") or []
    named = isinstance(names, list) and any(isinstance(name, str) and "eagle3" in name.lower() for name in names)
    return config if config.get("speculators_model_type") == "eagle3" or named else None


def read(folder: Path) -> Draft:
    """What a draft directory is and where it breaks the contract, by config and headers.

    Raises:
        Unreadable: no weights, weights that are no tensor file, a config without the sizes.
    """
    config = config_of(folder) or {}
    place = str(folder / CONFIG)
    own = config.get("speculators_model_type") == "eagle3"
    layer = config.get("transformer_layer_config") if own else config
    numbers = [(layer or {}).get("hidden_size"), (layer or {}).get("vocab_size")] if isinstance(layer, dict | None) else [None]
    if any(type(number) is not int or number < 1 for number in numbers):
        raise Unreadable(Fault(place, "", "hidden_size and vocab_size", "a config without them", FAILS, RETRAIN))
    weights = next((folder / name for name in WEIGHTS if (folder / name).is_file()), None)
    if weights is None:
        raise Unreadable(Fault(str(folder / WEIGHTS[0]), "", "the draft's weights", "it does not exist", FAILS, RETRAIN))
    found = headers.read(weights)
    shapes = {tensor.key: tensor for tensor in found.tensors}
    return _look(folder, config, own, numbers, weights, found.size, shapes)


def _look(folder: Path, config: dict[str, Any], own: bool, numbers: list[int], weights: Path, size: int,
          shapes: dict[str, headers.TensorInfo]) -> Draft:  # fmt: skip
    (hidden, vocab), faults, place = numbers, [], str(folder / CONFIG)

    def fault(file: str, key: str, found: str, expected: str, causes: str = FAILS) -> None:
        faults.append(Fault(file, key, expected, found, causes, RETRAIN))

    draft_vocab = config.get("draft_vocab_size") or vocab
    if type(draft_vocab) is not int or not 1 <= draft_vocab <= vocab:
        fault(place, "draft_vocab_size", str(draft_vocab)[:80], f"1 to {vocab}")
        draft_vocab = vocab
    inner = config.get("eagle_config") if isinstance(config.get("eagle_config"), dict) else {}
    layers = config.get("eagle_aux_hidden_state_layer_ids") or inner.get("eagle_aux_hidden_state_layer_ids")
    if layers is not None and (not isinstance(layers, list) or any(type(k) is not int or k < 0 for k in layers)):
        fault(place, "eagle_aux_hidden_state_layer_ids", str(layers)[:80], "a list of layer ids")
        layers = None
    elif layers is not None and layers != sorted(set(layers)):
        fault(place, "eagle_aux_hidden_state_layer_ids", str(layers), str(sorted(set(layers))),
              "vLLM sorts them, so the draft reads its layers in another order than it learned")  # fmt: skip
    prefix = "midlayer." if any(key.startswith("midlayer.") for key in shapes) else "layers.0."
    states = len(layers) if layers else 3
    target = config.get("target_hidden_size") or hidden
    if type(target) is not int:
        fault(place, "target_hidden_size", str(target)[:80], "a number")
        target = hidden
    wanted = {
        "fc.weight": (hidden, states * target), "norm.weight": (hidden,), "lm_head.weight": (draft_vocab, hidden),
        **{f"{prefix}{name}.weight": (hidden,) for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")},
    }  # fmt: skip
    for name in ("q_proj", "k_proj", "v_proj"):
        wanted[f"{prefix}self_attn.{name}.weight"] = (None, 2 * hidden)
    optional = {"embed_tokens.weight": (vocab, hidden), "t2d": (vocab,), "d2t": (draft_vocab,)}
    for key, shape in (wanted | optional).items():
        if key in shapes:
            has = shapes[key].shape
            if len(has) != len(shape) or any(want not in (None, there) for want, there in zip(shape, has, strict=True)):
                said = "[" + ", ".join("any" if n is None else str(n) for n in shape) + "]"
                fault(str(weights), key, str(list(has)), said)
        elif key in wanted:
            near = next((name for name in shapes if name.endswith(key)), None)
            fault(str(weights), key, f"missing{f' (it has {near})' if near else ''}", "a weight of this name")
    if "d2t" not in shapes and draft_vocab != vocab:
        fault(str(weights), "d2t", "missing", f"int64 [{draft_vocab}]",
              "draft token i is taken for target token i: acceptance collapses")  # fmt: skip
    for key, dtype in (("d2t", "int64"), ("t2d", "bool")):
        if key in shapes and shapes[key].dtype != dtype:
            fault(str(weights), key, shapes[key].dtype, dtype, "draft tokens are taken for other words")
    name = "speculators" if own else "LlamaForCausalLMEagle3"
    dtypes = sorted({tensor.dtype for key, tensor in shapes.items() if key not in optional or "embed" in key})
    told = f"{len(shapes)} tensors, {' and '.join(dtypes)}; H {hidden}, V {vocab}, D {draft_vocab}, layers {layers or 'default'}"
    return Draft(folder, f"draft directory ({name}{', midlayer' if prefix == 'midlayer.' else ''})", weights, hidden, vocab,
                 draft_vocab, layers, size, told, tuple(faults), frozenset(shapes))  # fmt: skip
