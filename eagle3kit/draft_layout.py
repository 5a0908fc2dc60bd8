"""A draft directory of either kind read as one thing: speculators' own, or `LlamaForCausalLMEagle3` (SpecForge, SGLang).

Both hold an EAGLE-3 draft that vLLM serves; they differ in where the config keeps what, and in the decoder layer's name
(`layers.0.` or `midlayer.`). vLLM, model_executor/models/llama_eagle3.py and transformers_utils/configs/speculators.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eagle3kit import headers, weight_files
from eagle3kit.errors import KitError
from eagle3kit.files import read_json

KINDS = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Qwen3ForCausalLM", "LlamaForCausalLMEagle")
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
ROPE_FIELDS = ("rope_type", "rope_theta", "factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor",
               "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "partial_rotary_factor")  # fmt: skip


@dataclass(frozen=True)
class Draft:
    """What a draft directory says of itself. `layer` is the config of its decoder layer, `tensors` name -> (dtype, shape) as
    safetensors writes them ("BF16", [8192, 576]), `files` name -> weight file, `flags` those that the config sets (None where
    it says nothing), `target` the model it names."""

    folder: Path
    kind: str  # "speculators" or "SpecForge"
    config: dict[str, Any]
    layer: dict[str, Any]
    layer_ids: list[int] | None
    draft_vocab: int | None
    target: str | None
    flags: dict[str, bool | None]
    tensors: dict[str, tuple[str, list[int]]] = field(repr=False)
    files: dict[str, str] = field(repr=False)

    @property
    def prefix(self) -> str:
        """The name of its first decoder layer."""
        return "midlayer." if any(key.startswith("midlayer.") for key in self.tensors) else "layers.0."

    @property
    def wants(self) -> dict[str, list[int]]:
        """The tensors that its config calls for, and their shapes; the embedding, `t2d` and a whole vocabulary's `d2t` may be
        left out and are not in it."""
        layer, count = self.layer, len(self.layer_ids) if self.layer_ids else 3
        hidden, inner, heads = layer["hidden_size"], layer["intermediate_size"], layer["num_attention_heads"]
        groups = layer.get("num_key_value_heads") or heads
        width = layer.get("head_dim") or hidden // heads
        given = self.config.get("target_hidden_size") or hidden
        vocab = self.draft_vocab or layer["vocab_size"]
        shapes = {"fc.weight": [hidden, count * given], "norm.weight": [hidden], "lm_head.weight": [vocab, hidden]}
        if vocab != layer["vocab_size"]:
            shapes["d2t"] = [vocab]
        if self.flags["norm_before_fc"]:
            shapes["input_norm.weight"] = [count * given]
        if self.flags["fc_norm"]:
            shapes |= {f"fc_norm.{number}.weight": [given] for number in range(count)}
        for number in range(layer.get("num_hidden_layers", 1)):
            name = self.prefix if number == 0 else f"layers.{number}."
            reads = 2 * hidden if number == 0 else hidden  # the first layer reads embedding and state side by side
            norms = ("input_layernorm", "post_attention_layernorm", *(("hidden_norm",) if number == 0 else ()))
            shapes |= {f"{name}{norm}.weight": [hidden] for norm in norms}
            rows = {"q_proj": heads * width, "k_proj": groups * width, "v_proj": groups * width}
            shapes |= {f"{name}self_attn.{key}.weight": [size, reads] for key, size in rows.items()}
            shapes[f"{name}self_attn.o_proj.weight"] = [hidden, heads * width]
            shapes |= {f"{name}mlp.{key}_proj.weight": [inner, hidden] for key in ("gate", "up")}
            shapes[f"{name}mlp.down_proj.weight"] = [hidden, inner]
            if layer.get("model_type") == "qwen3":
                shapes |= {f"{name}self_attn.{key}_norm.weight": [width] for key in "qk"}
            if layer.get("attention_bias"):
                shapes |= {f"{name}self_attn.{key}.bias": [size] for key, size in rows.items()}
        return shapes

    def tensor(self, name: str) -> Any:
        """One tensor, read alone."""
        from safetensors import safe_open

        with safe_open(self.folder / self.files[name], framework="pt") as file:
            return file.get_tensor(name)


def read(folder: Path) -> Draft:
    """The draft in `folder`.

    Raises:
        KitError: no directory, no config or weights, or a config that is not an EAGLE-3 draft's; says what it is instead.
    """
    if not (folder / "config.json").is_file():
        state = "does not exist" if not folder.exists() else "has no config.json"
        raise KitError(f"{folder} {state}, so it is not a draft directory; the stage 07_checkpoint makes one")
    config = read_json(folder / "config.json")
    if not isinstance(config, dict):
        raise KitError(f"{folder / 'config.json'} holds no object, so {folder} is not a draft directory; copy it again")
    kind, names = config.get("speculators_model_type"), config.get("architectures") or []
    if kind is None and not set(names) & set(KINDS):
        raise KitError(f"{folder} is not an EAGLE-3 draft: config.json has no speculators_model_type, and its architectures "
                       f"are {names} (known: {', '.join(KINDS)})")  # fmt: skip
    if kind not in (None, "eagle3"):
        raise KitError(f"{folder} is a draft of another kind: speculators_model_type is {kind!r}, not 'eagle3'")
    layer = config.get("transformer_layer_config") if kind else config
    needs = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
    lost = [name for name in needs if not isinstance(layer, dict) or not isinstance(layer.get(name), int)]
    if lost:
        raise KitError(f"{folder / 'config.json'} lacks {', '.join(lost)}{' in transformer_layer_config' * bool(kind)}, so the "
                       "draft's shapes are unknown; copy the config that came with the weights")  # fmt: skip
    eagle = config.get("eagle_config") or {}
    ids = config.get("eagle_aux_hidden_state_layer_ids") or eagle.get("eagle_aux_hidden_state_layer_ids")
    _typed(folder / "config.json", config, eagle, ids)
    verifier = ((config.get("speculators_config") or {}).get("verifier") or {}).get("name_or_path")
    for file in sorted(folder.glob("*.safetensors")):
        headers.read(file)  # the room that every file of this field goes through; what is hostile ends there, in a line
    files = weight_files.index(folder)
    stored = {file: weight_files.header(folder / file) for file in sorted(set(files.values()))}
    tensors = {name: (stored[file][name]["dtype"], list(stored[file][name]["shape"])) for name, file in files.items()
               if name in stored[file]}  # fmt: skip
    flags = {flag: config.get(flag, eagle.get(flag)) for flag in FLAGS}
    return Draft(folder, "speculators" if kind else "SpecForge", config, layer, ids, config.get("draft_vocab_size"), verifier,
                 flags, tensors, files)  # fmt: skip


def _typed(path: Path, config: dict[str, Any], eagle: dict[str, Any], ids: Any) -> None:
    """KitError for a number or a flag that is written as text or otherwise: vLLM and speculators would each make something else
    of it ("false" is true in Python)."""
    wrong = [f"{flag} is {value!r}, not true or false" for flag in FLAGS
             if (value := config.get(flag, eagle.get(flag))) is not None and not isinstance(value, bool)]  # fmt: skip
    size = config.get("draft_vocab_size")
    if size is not None and type(size) is not int:
        wrong.append(f"draft_vocab_size is {size!r}, not a whole number")
    if ids is not None and not (isinstance(ids, list) and all(type(k) is int for k in ids)):
        wrong.append(f"eagle_aux_hidden_state_layer_ids is {ids!r}, not a list of whole numbers")
    if wrong:
        raise KitError(f"{path}: {'; '.join(wrong)}; correct it there, or copy the config that came with the weights")


def rope(config: dict[str, Any]) -> dict[str, Any]:
    """RoPE as ROPE_FIELDS from a config.json, in the newer form (`rope_parameters`) or the older (`rope_theta` and
    `rope_scaling`), that of full attention where layers differ; fields that are not set are left out."""
    found = dict(config.get("rope_parameters") or {})
    found = dict(found.get("full_attention", found))
    scaling = dict(config.get("rope_scaling") or {})
    found = {**scaling, **found}
    if "type" in found:
        found.setdefault("rope_type", found.pop("type"))
    for name in ("rope_theta", "partial_rotary_factor"):
        if name not in found and config.get(name) is not None:
            found[name] = config[name]
    found.setdefault("rope_type", "default")
    found.setdefault("rope_theta", 10000.0)
    return {name: found[name] for name in ROPE_FIELDS if found.get(name) is not None}
