"""Draft directories, of speculators and of trainers that write `LlamaForCausalLMEagle3`, told from config and headers.

What vLLM takes for granted when it loads one (model_executor/models/llama_eagle3.py): fc.weight [H, n·H] for n auxiliary
layers, lm_head.weight [D, H], norm.weight [H], one decoder layer whose projections read 2·H numbers (embedding and states),
under `layers.0.` or `midlayer.`; d2t [D] where D is not V, without which draft token i would stand for target token i; t2d and
embed_tokens may be absent, the target's embedding is used then. Which weights a config calls for is `draft_layout`'s to say,
serving flags and RoPE are `check DRAFT`'s.
"""

import json
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3kit import draft_layout, headers
from eagle3kit.conventions import ENTERING
from eagle3kit.faults import Fault, Unreadable

CONFIG, INDEX, WEIGHTS = "config.json", "model.safetensors.index.json", ("model.safetensors", "pytorch_model.bin")
OWN = re.compile(r"config\.json|model(-\d+-of-\d+)?\.safetensors(\.index\.json)?|pytorch_model\.bin")
# Numbers of the config that shapes follow from; a hostile one must not make millions of names.
SIZES = ("hidden_size", "vocab_size", "intermediate_size", "num_attention_heads")
OPTIONAL_SIZES = ("num_key_value_heads", "head_dim", "num_hidden_layers")
MOST_LAYERS, MOST_SIZE = 100, 1 << 24
MOST_JSON = 4 << 20
RETRAIN = "export the draft again"
OFFSETS = "export the draft again, its d2t less arange(D)"
FAILS = "vLLM fails to load the draft"


@dataclass(frozen=True)
class Draft:
    """One draft directory: `version` names its layout, `layers` the auxiliary ids (None where the config names none), `files`
    the weight file of each tensor."""

    folder: Path
    version: str
    files: dict[str, Path]
    hidden: int
    vocab: int
    draft_vocab: int
    layers: list[int] | None
    bytes: int
    signature: str
    faults: tuple[Fault, ...]


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
    own = config.get("speculators_model_type") == "eagle3"
    layer = config.get("transformer_layer_config") if own else config
    sizes = {name: (layer or {}).get(name) for name in SIZES} if isinstance(layer, dict | None) else {"it": None}
    wrong = [name for name, value in sizes.items() if type(value) is not int or not 1 <= value <= MOST_SIZE]
    if wrong:
        raise Unreadable(Fault(str(folder / CONFIG), "", "whole numbers under " + ", ".join(SIZES),
                               f"a config without {', '.join(wrong)}", FAILS, RETRAIN))  # fmt: skip
    files, size, shapes = _weights(folder), 0, {}
    for path in files:
        found = headers.read(path)
        size += found.size
        shapes |= {tensor.key: (path, tensor) for tensor in found.tensors}
    return _look(folder, config, layer, own, size, shapes)


def _weights(folder: Path) -> list[Path]:
    """The weight files: one, or those that an index names."""
    index = folder / INDEX
    names = [name for name in WEIGHTS if (folder / name).is_file()][:1]
    if not names and index.is_file():
        try:
            names = sorted(set(json.loads(index.read_bytes()[:MOST_JSON])["weight_map"].values()))
            if any(Path(name).name != name for name in names):
                raise ValueError
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise Unreadable(Fault(str(index), "weight_map", "the file of each weight", "it makes no sense", FAILS,
                                   RETRAIN)) from None  # fmt: skip
    lost = next((name for name in names or WEIGHTS[:1] if not (folder / name).is_file()), None)
    if lost is not None:
        raise Unreadable(Fault(str(folder / lost), "", "the draft's weights", "it does not exist", FAILS, RETRAIN))
    return [folder / name for name in names]


def _look(folder: Path, config: dict[str, Any], layer: dict[str, Any], own: bool, size: int,
          shapes: dict[str, tuple[Path, headers.TensorInfo]]) -> Draft:  # fmt: skip
    hidden, vocab, faults, place = layer["hidden_size"], layer["vocab_size"], [], str(folder / CONFIG)

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
    given, numbers = config.get("target_hidden_size"), dict(layer)
    if given is not None and type(given) is not int:
        fault(place, "target_hidden_size", str(given)[:80], "a number")
        given = None
    for name in OPTIONAL_SIZES:
        value, most = layer.get(name), MOST_LAYERS if name == "num_hidden_layers" else MOST_SIZE
        if value is not None and (type(value) is not int or not 1 <= value <= most):
            fault(place, name, str(value)[:80], f"1 to {most:,}")
            value = None
        numbers |= {name: value} if value is not None else {}
        if value is None:
            numbers.pop(name, None)
    flags = {flag: config.get(flag, inner.get(flag)) for flag in draft_layout.FLAGS}
    layout = draft_layout.Draft(folder, "speculators" if own else "SpecForge", {"target_hidden_size": given}, numbers, layers,
                                draft_vocab, None, flags, dict.fromkeys(shapes, ("", [])), {})  # fmt: skip
    wanted = {key: tuple(shape) for key, shape in layout.wants.items()}
    optional = {"embed_tokens.weight": (vocab, hidden), "t2d": (vocab,), "d2t": (draft_vocab,)}
    weights = str(next((path for path, _ in shapes.values()), folder / WEIGHTS[0]))
    for key, shape in (optional | wanted).items():
        if key in shapes:
            path, tensor = shapes[key]
            if tensor.shape != shape:
                fault(str(path), key, str(list(tensor.shape)), str(list(shape)))
        elif key == "d2t" and key in wanted:
            fault(weights, key, "missing", f"int64 [{draft_vocab}]",
                  "draft token i is taken for target token i: acceptance collapses")  # fmt: skip
        elif key in wanted:
            near = next((name for name in shapes if name.endswith("." + key)), None)
            fault(weights, key, f"missing{f' (it has {near})' if near else ''}", f"a weight of this name, {list(shape)}")
    for key, dtype in (("d2t", "int64"), ("t2d", "bool")):
        if key in shapes and shapes[key][1].dtype != dtype:
            fault(str(shapes[key][0]), key, shapes[key][1].dtype, dtype, "draft tokens are taken for other words")
    name = "speculators" if own else "LlamaForCausalLMEagle3"
    dtypes = sorted({tensor.dtype for key, (_, tensor) in shapes.items() if key not in optional or "embed" in key})
    parts = len({path for path, _ in shapes.values()})
    told = (f"{len(shapes)} tensors{f' in {parts} files' if parts > 1 else ''}, {' and '.join(dtypes)}; H {hidden}, V {vocab}, "
            f"D {draft_vocab}, layers {f'{layers} ({ENTERING})' if layers else 'default'}")  # fmt: skip
    midlayer = ", midlayer" if layout.prefix == "midlayer." else ""
    return Draft(folder, f"draft directory ({name}{midlayer})", {key: path for key, (path, _) in shapes.items()}, hidden, vocab,
                 draft_vocab, layers, size, told, tuple(faults))  # fmt: skip


def is_loose(found: headers.Headers) -> bool:
    """True for the weights of an EAGLE-3 draft, wherever they lie."""
    keys = found.content.keys() if isinstance(found.content, dict) else ()
    return "fc.weight" in keys and ("d2t" in keys or any(str(key).startswith("midlayer.") for key in keys))
