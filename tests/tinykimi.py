"""Kimi-K2.5 made small from the real classes: the wrapper's config as published, latent attention, routed experts, YaRN, the
published names of the weights, and what vLLM reads beside them. Only sizes differ, and not all: the latent space and the part of
each head that RoPE turns are as large as in the original, since vLLM's CPU kernel knows no others."""

import json
from pathlib import Path
from typing import Any

from conftest import REPOSITORY
from tinymodel import make_tiny_tokenizer

PUBLISHED = json.loads((REPOSITORY / "tests" / "cases" / "kimi-k2.5.json").read_text())
TEXT = {name: value for name, value in PUBLISHED["target"]["text_config"].items() if name != "architecture"}
SMALL = {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 4,
         "q_lora_rank": 48, "qk_nope_head_dim": 32, "v_head_dim": 32,
         "n_routed_experts": 12, "num_experts_per_tok": 2, "intermediate_size": 160, "moe_intermediate_size": 32,
         "max_position_embeddings": 1024}  # fmt: skip
# How pictures are cut up. vLLM reads it as it starts, also where it is told that none will come.
PICTURES = {"patch_size": 14, "merge_kernel_size": 2, "temporal_merge_kernel_size": 4, "in_patch_limit": 16384,
            "in_patch_limit_each_frame": 4096, "in_patch_limit_video": None, "patch_limit_on_one_side": 512,
            "fixed_output_tokens": None, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "sample_fps": 2.0,
            "max_num_frames_each_video": None}  # fmt: skip


def config(**text: Any) -> dict[str, Any]:
    """The wrapper's config.json with the published text_config in it, changed by `text`; beta_fast, mscale as in Kimi-K2's."""
    scaling = {name: value for name, value in TEXT["rope_scaling"].items() if not name.startswith("_")}
    scaling |= {"beta_fast": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    inner = {**TEXT, "architectures": ["DeepseekV3ForCausalLM"], "dtype": "float32", "n_group": 1, "topk_group": 1,
             "routed_scaling_factor": 2.827, "norm_topk_prob": True, "num_nextn_predict_layers": 0,
             "topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1,
             "rope_scaling": scaling}  # fmt: skip
    code = {"AutoConfig": "configuration_kimi_k25.KimiK25Config",
            "AutoModel": "modeling_kimi_k25.KimiK25ForConditionalGeneration"}  # fmt: skip
    vision = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    return {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "auto_map": code,
            "tie_word_embeddings": False, "text_config": inner | text, "vision_config": vision, "projection_hidden_size": 32,
            "media_placeholder_token_id": 3}  # fmt: skip


def make(folder: Path, seed: int = 0, thought: float = 8.0) -> Any:
    """Write the replica into `folder` as two files with an index, and return its language model as transformers has it.

    `thought`: how much the layers weigh beside the embedding. With little of it one word follows from the last, and a draft can
    learn what the target will say; with much of it answers wander.
    """
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, Kimi_K25Config
    from transformers.models.kimi_k25.modeling_kimi_k25 import Kimi_K25VisionModel

    tokenizer = make_tiny_tokenizer(SMALL["vocab_size"])
    ends = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    said = config(**SMALL, **ends)
    said["text_config"]["rope_scaling"] |= {"original_max_position_embeddings": 16}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = DeepseekV3ForCausalLM(DeepseekV3Config(**said["text_config"])).eval()
        vision = Kimi_K25VisionModel(Kimi_K25Config(**said).vision_config)
        for name, weight in model.named_parameters():
            if weight.ndim == 1:
                weight.data += 0.3 * torch.randn_like(weight)  # a norm of ones could be left out and nobody would see
            elif "experts" not in name:  # and fresh weights have nothing to say
                weight.data *= 50 if "embed" in name else 15 if "head" in name else thought
    model.save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    found = {f"language_model.{name}": value for key, tensor in stored.items() for name, value in apart(key, tensor).items()}
    for key, value in vision.state_dict().items():
        renamed = key.replace("layers.", "encoder.blocks.").replace("final_", "encoder.final_").replace("attn.proj", "wo")
        found["vision_tower." + renamed.replace(".norm1", ".norm0").replace(".norm2", ".norm1")] = value.contiguous()
    keys = sorted(found)
    files = {key: f"model-0000{1 + (place > len(keys) // 2)}-of-00002.safetensors" for place, key in enumerate(keys)}
    for file in set(files.values()):
        save_file({key: found[key] for key in keys if files[key] == file}, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    (folder / "config.json").write_text(json.dumps(said, indent=1))
    (folder / "preprocessor_config.json").write_text(json.dumps({"media_proc_cfg": PICTURES}))
    tokenizer.save_pretrained(folder)
    return model


def apart(key: str, tensor: Any) -> dict[str, Any]:
    """transformers keeps all experts of a layer in one tensor; published, each has its own three matrices."""
    head, _, last = key.rpartition(".")
    if not head.endswith("mlp.experts"):
        return {key: tensor}
    names = ("gate_proj", "up_proj") if last == "gate_up_proj" else ("down_proj",)
    return {f"{head}.{number}.{name}.weight": part.contiguous() for number, one in enumerate(tensor)
            for name, part in zip(names, one.chunk(len(names)), strict=True)}  # fmt: skip


def quantize(folder: Path, out: Path) -> Path:
    """The replica in `folder` again in `out`, its routed experts in INT4 as Kimi-K2.5's are: compressed-tensors, packed in 32-bit
    numbers, a scale for every 32 weights. All else, embedding, head and norms among it, stays as it was."""
    import shutil

    from safetensors.torch import load_file, save_file

    shutil.copytree(folder, out)
    listed = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    files = {}
    for file in set(listed.values()):
        held = {}
        for key, weight in load_file(folder / file).items():
            held |= packed(key, weight) if ".experts." in key and weight.ndim == 2 else {key: weight}
        save_file(held, out / file, metadata={"format": "pt"})
        files |= dict.fromkeys(held, file)
    (out / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    said = json.loads((out / "config.json").read_text())
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True, "dynamic": False,
               "actorder": None, "block_structure": None, "observer": "minmax", "observer_kwargs": {}}  # fmt: skip
    said["text_config"]["quantization_config"] = {
        "config_groups": {"group_0": {"input_activations": None, "output_activations": None, "targets": ["Linear"],
                                      "weights": weights}},
        "format": "pack-quantized", "quant_method": "compressed-tensors", "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
    }  # fmt: skip
    (out / "config.json").write_text(json.dumps(said, indent=1))
    return out


def packed(key: str, weight: Any) -> dict[str, Any]:
    """One expert's matrix [out, in] as compressed-tensors stores it: weight_packed [out, in / 8] int32, weight_scale
    [out, in / 32], weight_shape [2]."""
    import torch
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    groups = weight.reshape(len(weight), -1, 32)
    scale = groups.abs().amax(-1) / 7
    numbers = (groups / scale[..., None]).round().clamp(-8, 7).to(torch.int8).reshape(weight.shape)
    return {f"{key}_packed": pack_to_int32(numbers, 4), f"{key}_scale": scale, f"{key}_shape": torch.tensor(weight.shape)}
