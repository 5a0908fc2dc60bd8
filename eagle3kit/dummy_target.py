"""A target without weights: a folder with only config.json, for vLLM's dummy weights; and a draft nobody has trained.

Where decode time goes depends on shapes, not on what the weights say, so a 1T model can be asked before it is downloaded:
`load_format="dummy"`, no tokenizer, token ids as prompts. Whatever is measured so is of the *geometry*: a mixture of experts
with random weights spreads its tokens over experts otherwise than the trained one does.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3kit.errors import KitError
from eagle3kit.files import publish, read_json
from eagle3kit.target_config import language_part

if TYPE_CHECKING:
    from eagle3kit.params import Training

# The numbers of each model's own published config.json, less what only its tokenizer and its chat need.
PUBLISHED: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1e-05, "hidden_act": "silu",
        "rope_theta": 500000.0, "tie_word_embeddings": False, "dtype": "bfloat16", "bos_token_id": 128000,
        "eos_token_id": 128001,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 8192},
    },
    # The language model of Kimi-K2.5 as the DeepSeek-V3 architecture that it is; its experts are INT4 there, bfloat16 here.
    "kimi-k2.5": {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 163840, "hidden_size": 7168,
        "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61, "first_k_dense_replace": 1,
        "moe_layer_freq": 1, "num_attention_heads": 64, "num_key_value_heads": 64, "q_lora_rank": 1536, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 384, "n_shared_experts": 1,
        "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
        "norm_topk_prob": True, "routed_scaling_factor": 2.827, "hidden_act": "silu", "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-05, "rope_theta": 50000.0, "tie_word_embeddings": False, "dtype": "bfloat16",
        "attention_bias": False, "bos_token_id": 163584, "eos_token_id": 163585,
    },
}  # fmt: skip
EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts")


@dataclass(frozen=True)
class Geometry:
    """What a step is made of, as far as all-reduce and experts go."""

    hidden_size: int
    layers: int
    vocab_size: int
    experts: int  # 0 for a dense model
    experts_per_token: int
    attention_heads: int


def config(
    name: str | Path, *, layers: int | None = None, experts: int | None = None, base: Path | None = None
) -> dict[str, Any]:  # fmt: skip
    """The config of the language model `name`: a key of PUBLISHED, a config.json, or a folder that holds one.

    Args:
        layers: decoder layers kept, from the first on; None = all.
        experts: routed experts kept; None = all. Each token still goes to as many as before.
        base: what a relative path counts from.

    Raises:
        KitError: there is no such config, or it has not what is asked to be kept of it.
    """
    if str(name) in PUBLISHED:
        found = dict(PUBLISHED[str(name)])
    else:
        path = (base or Path()) / Path(name).expanduser()
        path = path / "config.json" if path.is_dir() else path
        if not path.is_file():
            raise KitError(f"profile.geometry is {name}: not a bundled one ({', '.join(PUBLISHED)}) and no file {path}")
        found = language_model(read_json(path), path)
        for key in ("quantization_config", "compression_config"):
            found.pop(key, None)
    kept = {"num_hidden_layers": layers, next((key for key in EXPERTS if key in found), "n_routed_experts"): experts}
    for key, count in kept.items():
        if count is None:
            continue
        if found.get(key, 0) < count:
            raise KitError(f"{name} has {found.get(key, 0)} {key}; profile asks to keep {count}")
        found[key] = count
    if found.get("num_experts_per_tok", 0) > (experts or found.get("num_experts_per_tok", 0)):
        raise KitError(f"{name}: a token goes to {found['num_experts_per_tok']} experts, but profile.geometry_experts keeps "
                       f"{experts}; keep at least as many")  # fmt: skip
    return found


def language_model(outer: dict[str, Any], path: Path) -> dict[str, Any]:
    """The part of the published config `outer` (of file `path`) that decodes, as one that vLLM takes by itself, for it wants
    neither tokenizer nor pictures; quantized as it is. KitError when the config does not say its architecture."""
    inner = dict(language_part(outer))
    if inner.get("model_type") == "kimi_k2":  # DeepSeek-V3's layers under a name that needs the model's own code
        inner |= {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]}
    if not inner.get("architectures"):
        raise KitError(f"{path} does not say the architecture of its language model; write a config.json of that alone, with "
                       "architectures and model_type, and name it in profile.geometry")  # fmt: skip
    inner.pop("auto_map", None)
    if "quantization_config" in outer:
        inner.setdefault("quantization_config", outer["quantization_config"])
    inner["dtype"] = inner.pop("torch_dtype", None) or inner.get("dtype") or outer.get("dtype") or "bfloat16"
    return inner


def write(folder: Path, found: dict[str, Any]) -> Path:
    """Publish `folder` with nothing but `found` as its config.json."""
    with publish(folder) as inner:
        inner.mkdir()
        (inner / "config.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return folder


def geometry(found: dict[str, Any]) -> Geometry:
    """The Geometry that a config (nested ones too) states; KitError names what it lacks."""
    inner = language_part(found)
    needed = ("hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads")
    missing = [key for key in needed if key not in inner]
    if missing:
        raise KitError(f"the config of the profiled model does not say {', '.join(missing)}")
    experts = next((int(inner[key]) for key in EXPERTS if inner.get(key)), 0)
    return Geometry(inner["hidden_size"], inner["num_hidden_layers"], inner["vocab_size"], experts,
                    int(inner.get("num_experts_per_tok") or 0), inner["num_attention_heads"])  # fmt: skip


def refuse_uneven(shape: Geometry, ranks: int) -> None:
    """KitError when the attention heads cannot be shared evenly among `ranks`, as vLLM wants them."""
    if shape.attention_heads % ranks:
        raise KitError(f"{shape.attention_heads} attention heads cannot be shared among {ranks} ranks; profile another geometry "
                       "(profile.geometry) or another number of ranks (profile.trace_tensor_parallel)")  # fmt: skip


def splittable(found: dict[str, Any], ranks: int) -> dict[str, Any]:
    """`found` itself if its heads can be shared among `ranks`; else the same with as many heads fewer as it takes.

    Width, layers and feed-forward stay, and so do the messages of its all-reduces. 9 heads and 3 for keys and values, 2 ranks
    -> 8 and 2.
    """
    heads, kv = found["num_attention_heads"], found.get("num_key_value_heads") or found["num_attention_heads"]
    if heads % ranks == 0 and (kv % ranks == 0 or ranks % kv == 0):
        return found
    if heads < ranks:
        raise KitError(f"{heads} attention heads cannot be shared among {ranks} ranks (profile.trace_tensor_parallel)")
    size = found.get("head_dim") or found["hidden_size"] // heads
    fewer = heads // ranks * ranks
    shared = max(count for count in range(ranks, fewer + 1, ranks) if fewer % count == 0 and count <= max(kv, ranks))
    return found | {"num_attention_heads": fewer, "num_key_value_heads": shared, "head_dim": size}


def layer_ids(layers: int) -> list[int]:
    """Three auxiliary layers of a target of `layers`: [2, n/2, n - 3] as usual, spread out where those would collide.

    61 -> 2, 30, 58; 6 -> 1, 3, 5. What a draft is fed is the same for its speed, wherever it is from.
    """
    if layers < 3:
        raise KitError(f"{layers} layers are too few for a draft that is fed three states; keep at least 3 "
                       "(profile.geometry_layers)")  # fmt: skip
    usual = [2, layers // 2, layers - 3]
    return usual if usual == sorted(set(usual)) else [layers // 4, layers // 2, layers - 1]


def untrained_draft(
    folder: Path, target: Path, recipe: "Training", *, layer_ids: Sequence[int], draft_vocab_size: int, draft_tokens: int,
    trust_remote_code: bool = False,
) -> Path:  # fmt: skip
    """Publish `folder` as an EAGLE-3 draft for `target` that has a config.json and no weights.

    It costs what a trained one costs: same layers, width and vocabulary. What it proposes is worth nothing.
    """
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    from eagle3kit import draft

    kept = Eagle3SpeculatorConfig(
        transformer_layer_config=draft.configuration(
            target, layers=recipe.draft_layers, key_value_heads=recipe.draft_key_value_heads,
            trust_remote_code=trust_remote_code),
        draft_vocab_size=draft_vocab_size, norm_before_residual=recipe.norm_before_residual,
        norm_before_fc=recipe.norm_before_fc, norm_output=recipe.norm_output,
        eagle_aux_hidden_state_layer_ids=list(layer_ids),
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3", proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=draft_tokens)],
            default_proposal_method="greedy", verifier=VerifierConfig.from_pretrained(str(target)),
        ),
    )  # fmt: skip
    with publish(folder) as inner:
        kept.save_pretrained(inner)
        for path in inner.iterdir():  # speculators puts its own source beside the config; nothing here runs it
            if path.name != "config.json":
                path.unlink()
    return folder
