"""Language models inside other models, as vLLM serves them: where their config lies and how their tensors are called."""

import json
from dataclasses import dataclass, field

import pytest
import torch
import transformers
from safetensors.torch import save_file

from eagle3kit import hidden_states, language_model, suspects, target
from eagle3kit.errors import KitError

TEXT = {"model_type": "llama", "hidden_size": 4, "num_hidden_layers": 3, "vocab_size": 8, "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "dtype": "float32"}  # fmt: skip
OTHER = TEXT | {"hidden_size": 2, "vocab_size": 3}


@dataclass
class Layout:
    """One way to keep a language model: the config around `TEXT`, and the names of embedding, head (None: tied) and norm; `aside`
    are names of other tensors that must not pass for them."""

    config: dict
    embed: str
    head: str | None
    norm: str
    aside: list[str] = field(default_factory=list)


def inside(name: str, **more) -> dict:
    return {"architectures": ["Outer"], "model_type": "outer", name: TEXT, "vision_config": {"hidden_size": 2}, **more}


def usual(config: dict, trunk: str, head: str | None, *aside: str) -> Layout:
    return Layout(config, f"{trunk}embed_tokens.weight", head, f"{trunk}norm.weight", list(aside))


TIED = {"text_config": TEXT | {"tie_word_embeddings": True}}
LAYOUTS = {
    "Kimi-K2.5": usual(inside("text_config"), "language_model.model.", "language_model.lm_head.weight",
                       "vision_tower.encoder.final_layernorm.weight", "mm_projector.pre_norm.weight"),
    "Llama 4, older LLaVA, Mistral 3, Pixtral": usual(inside("text_config"), "language_model.model.",
                                                      "language_model.lm_head.weight", "vision_model.norm.weight"),
    "newer LLaVA, Mistral 3, Qwen3-VL, GLM-V": usual(inside("text_config"), "model.language_model.", "lm_head.weight",
                                                     "model.visual.norm.weight", "model.vision_tower.embed_tokens.weight"),
    "Qwen2.5-VL as first published": usual(TEXT | {"vision_config": {"hidden_size": 2}}, "model.", "lm_head.weight",
                                           "visual.merger.ln_q.weight"),
    "Gemma 3, tied": usual(inside("text_config", **TIED), "language_model.model.", None, "vision_tower.norm.weight"),
    "Gemma 4, tied": usual(inside("text_config", **TIED), "model.language_model.", None, "model.embed_vision.embedding.weight",
                           "model.language_model.embed_tokens_per_layer.weight"),
    "Mistral 3, tied by the wrapper alone": usual(inside("text_config", tie_word_embeddings=True), "language_model.model.", None),
    "a head of its own, though the config says tied": usual(inside("text_config", **TIED), "language_model.model.",
                                                            "language_model.lm_head.weight"),
    "Qwen3-Omni": usual({"model_type": "outer", "thinker_config": {"text_config": TEXT, "audio_config": {"hidden_size": 2}},
                         "talker_config": {"text_config": OTHER}}, "thinker.model.", "thinker.lm_head.weight",
                        "talker.model.norm.weight", "talker.model.embed_tokens.weight", "talker.lm_head.weight",
                        "code2wav.norm.weight"),
    "InternVL over Qwen": usual(inside("llm_config"), "language_model.model.", "language_model.lm_head.weight"),
    "InternVL over InternLM2": Layout(inside("llm_config"), "language_model.model.tok_embeddings.weight",
                                      "language_model.output.weight", "language_model.model.norm.weight"),
    "DeepSeek-VL2": usual(inside("language_config"), "language.model.", "language.lm_head.weight", "vision.norm.weight"),
    "MiniCPM-V": usual(TEXT, "llm.model.", "llm.lm_head.weight", "vpm.embed_tokens.weight", "resampler.norm.weight"),
    "Nemotron VL": Layout(inside("llm_config"), "language_model.backbone.embeddings.weight", "language_model.lm_head.weight",
                          "language_model.backbone.norm_f.weight", ["vision_model.embeddings.weight"]),
    "Ling": Layout(TEXT, "model.word_embeddings.weight", "lm_head.weight", "model.norm.weight"),
    "DeepSeek-V3 with its draft layer": usual(TEXT, "model.", "lm_head.weight", "model.layers.3.embed_tokens.weight",
                                              "model.layers.3.shared_head.norm.weight", "mtp.norm.weight"),
}  # fmt: skip


def write(folder, layout: Layout, *, indexed: bool = False, **changed) -> dict[str, torch.Tensor]:
    """The layout as a folder; `changed` are tensors put in or (None) left out. Returns the tensors written."""
    folder.mkdir(exist_ok=True)
    drawn = torch.Generator().manual_seed(0)
    shapes = {layout.embed: (8, 4), layout.norm: (4,)} | ({layout.head: (8, 4)} if layout.head else {})
    trunk = layout.norm.removesuffix(layout.norm.split(".")[-2] + ".weight")
    shapes |= {f"{trunk}layers.{n}.{norm}.weight": (4,) for n in range(3) for norm in ("input_layernorm", "norm")}
    held = {name: torch.randn(shape, generator=drawn) for name, shape in shapes.items()}
    held |= {name: torch.full((3, 2), 9.0) for name in layout.aside}
    held = {name: value for name, value in (held | changed).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(layout.config))
    if not indexed:
        save_file(held, folder / "model.safetensors")
        return held
    files = {name: f"model-{place % 2}.safetensors" for place, name in enumerate(sorted(held))}
    for file in set(files.values()):
        save_file({name: held[name] for name in held if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return held


@pytest.mark.parametrize("indexed", [False, True], ids=["one file", "an index"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_gives_its_geometry_and_its_three_tensors(tmp_path, name, indexed):
    layout = LAYOUTS[name]
    held = write(tmp_path, layout, indexed=indexed)
    shape = target.geometry(tmp_path)
    assert (shape.hidden_size, shape.layers, shape.vocab_size, shape.max_positions) == (4, 3, 8, 64)
    assert shape.tied is (layout.head is None)
    found = target.weights(tmp_path)
    wanted = {"embed": layout.embed, "head": layout.head or layout.embed, "final_norm": layout.norm}
    assert found.keys() == wanted.keys() and all(torch.equal(found[key], held[wanted[key]]) for key in wanted)


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_is_missing_or_doubtful_is_an_error_in_every_layout(tmp_path, name):
    layout = LAYOUTS[name]
    write(tmp_path, layout, **{layout.norm: None})
    with pytest.raises(KitError, match=f"no final norm: there is no weight {layout.norm}"):
        target.weights(tmp_path)
    last = ".".join(layout.embed.split(".")[-2:])
    last = "backbone.embeddings.weight" if last == "embeddings.weight" else last
    write(tmp_path, layout, **{f"another.{last}": torch.zeros(8, 4)})
    with pytest.raises(KitError, match="2 weights fit"):
        target.weights(tmp_path)
    if layout.head and not target.language_part(layout.config)["tie_word_embeddings"]:
        write(tmp_path, layout, **{layout.head: None})
        with pytest.raises(KitError, match=f"{layout.head.split('.')[-2]}.weight, but none of its"):
            target.weights(tmp_path, ("head",))


def test_quantized_or_ill_fitting_tensors_are_refused(tmp_path):
    layout = LAYOUTS["Kimi-K2.5"]
    write(tmp_path, layout, **{layout.head: torch.zeros(8, 2, dtype=torch.uint8)})
    with pytest.raises(KitError, match=r"model\.safetensors: language_model\.lm_head\.weight is stored as U8, so it is quant"):
        target.weights(tmp_path)
    write(tmp_path, layout, **{layout.norm: torch.zeros(5)})
    with pytest.raises(KitError, match=r"do not go together.*embed_tokens\.weight \[8, 4\].*norm\.weight \[5\]"):
        target.weights(tmp_path)


def test_a_part_under_an_unknown_name_is_named(tmp_path):
    config = {"model_type": "outer", "brain_config": TEXT, "vision_config": {"hidden_size": 2}}
    write(tmp_path, Layout(config, "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"))
    with pytest.raises(KitError, match="its parts are brain_config, vision_config.*looked for under thinker_config, text_config"):
        target.geometry(tmp_path)


# ---- Their language models, by transformers' own classes

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1,
         "head_dim": 16, "vocab_size": 128, "max_position_embeddings": 64}  # fmt: skip
EYE = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
       "patch_size": 14}  # fmt: skip


def made(name: str):
    """A tiny wrapper of real classes: Llama behind CLIP, Gemma 3 (tied, its norms add one), Mistral 3 (tied)."""
    if name == "llava":
        parts = {"text_config": transformers.LlamaConfig(**SMALL), "vision_config": transformers.CLIPVisionConfig(**EYE)}
        return transformers.LlavaForConditionalGeneration(transformers.LlavaConfig(image_token_index=5, **parts))
    if name == "gemma3":
        parts = {"text_config": transformers.Gemma3TextConfig(**SMALL, query_pre_attn_scalar=16),
                 "vision_config": transformers.SiglipVisionConfig(**EYE)}  # fmt: skip
        return transformers.Gemma3ForConditionalGeneration(transformers.Gemma3Config(mm_tokens_per_image=4, **parts))
    parts = {"text_config": transformers.MistralConfig(**SMALL), "vision_config": transformers.PixtralVisionConfig(**EYE)}
    return transformers.Mistral3ForConditionalGeneration(transformers.Mistral3Config(image_token_index=5, **parts))


@pytest.mark.parametrize("name", ["llava", "gemma3", "mistral3"])
def test_the_language_model_inside_says_what_the_wrapper_says(tmp_path, name):
    whole = made(name).eval()
    whole.save_pretrained(tmp_path)
    inner, ids = language_model.load(tmp_path), torch.arange(10, 30)
    with torch.no_grad():
        assert torch.equal(inner(ids[None]).logits, whole(input_ids=ids[None]).logits)
    assert not any("vision" in key for key in inner.state_dict())
    found, shape = target.weights(tmp_path), target.geometry(tmp_path)
    states = language_model.forward(inner, ids, shape.layers)
    normed = hidden_states.normalised(states.entering[-1], found["final_norm"], eps=shape.rms_norm_eps,
                                      adds_one=shape.norm_adds_one)  # fmt: skip
    assert torch.allclose(normed, states.normed, atol=1e-5)
    assert torch.allclose(normed @ found["head"].float().T, inner(ids[None]).logits[0], atol=1e-4)


def test_a_part_that_transformers_has_no_class_for_is_named(tmp_path):
    """Qwen3-VL's text reads positions of pictures, so transformers has no causal model of it: what needs one is not done."""
    eye = {"depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32,
           "deepstack_visual_indexes": [0]}  # fmt: skip
    config = transformers.Qwen3VLConfig(text_config=SMALL, vision_config=eye)
    transformers.Qwen3VLForConditionalGeneration(config).save_pretrained(tmp_path)
    with pytest.raises(KitError, match="transformers cannot load the target: .*Qwen3VLTextConfig"):
        language_model.load(tmp_path)
    assert "Qwen3VLTextConfig" in suspects.target_states(tmp_path)
