"""Kimi-K2.5: a small replica of real classes for what depends on how it is built, the true size for what depends on sizes."""

import json
import resource
import shutil
import struct
from pathlib import Path

import pytest
import tinydraft
import tinykimi
import tinystates
import torch
from conftest import REPOSITORY
from safetensors.torch import load_file, save_file

from eagle3kit import (
    checkpoint,
    decode_plan,
    draft,
    draft_layout,
    dummy_target,
    language_model,
    machine,
    preflight,
    server,
    suspects,
    target,
    vocabulary,
)
from eagle3kit.errors import KitError
from eagle3kit.findings import FAULT, GOOD, NOTE
from eagle3kit.params import Params, Training
from eagle3kit.samples import Store

CASE = tinykimi.PUBLISHED["draft"]
RECIPE = Training(epochs=1, tokens_per_step=128, learning_rate=4e-3, muon_learning_rate=2e-2)


@pytest.fixture(scope="module")
def kimi(tmp_path_factory):
    """The replica's folder and its language model, as transformers holds it."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("kimi") / "target"
    return folder, tinykimi.make(folder)


def write_config(folder: Path, said: dict) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(said))
    return folder


# ---- The replica


def test_the_replica_is_what_transformers_takes_for_kimi(kimi):
    """Its names and its wrapper are right if the wrapper's own class reads every weight of the language model from them."""
    from transformers import Kimi_K25ForConditionalGeneration

    folder, inner = kimi
    whole, told = Kimi_K25ForConditionalGeneration.from_pretrained(folder, output_loading_info=True)
    assert all(key.startswith("model.mm_projector.") for key in told["missing_keys"]) and not told["unexpected_keys"]
    ids = torch.arange(20, 60)[None]
    with torch.no_grad():
        assert torch.equal(whole.eval()(input_ids=ids).logits, inner(ids).logits)


def test_geometry_and_weights_through_the_wrapper(kimi):
    folder, inner = kimi
    assert target.locate(str(folder)) == folder
    shape = target.geometry(folder)
    assert shape == target.Geometry(64, 8, 512, "float32", "KimiK25ForConditionalGeneration", False, 1024, 1e-5, False)
    found = target.weights(folder)
    assert torch.equal(found["embed"], inner.model.embed_tokens.weight)
    assert torch.equal(found["head"], inner.lm_head.weight) and not torch.equal(found["head"], found["embed"])
    assert torch.equal(found["final_norm"], inner.model.norm.weight)
    assert target.stops(folder, target.tokenizer(folder)) == (2,)


def test_a_draft_is_built_trained_and_served_from_states_of_the_replica(kimi, tmp_path):
    folder, inner = kimi
    samples = tinystates.own_answers(inner, folder, 6, 40)
    train, held = (tinystates.fill(Store(tmp_path / side, "pt"), inner, folder, samples * many)
                   for side, many in (("train", 3), ("held", 1)))  # fmt: skip
    counts = vocabulary.count_tokens([(row.input_ids, row.loss_mask) for row in samples], 512)
    t2d, d2t = vocabulary.build(counts, 256, [0, 1, 2])
    recipe = RECIPE.model_copy(update={"draft_key_value_heads": 2})
    model = draft.build(folder, t2d, d2t, recipe, layer_ids=tinystates.LAYERS, seed=0)
    assert torch.equal(model.embed_tokens.weight, inner.model.embed_tokens.weight)
    assert torch.equal(model.lm_head.weight, inner.lm_head.weight[t2d])
    # The target's own argmax, from the last state alone: the final norm and the head are the right ones.
    states = tinystates.states_of(inner, samples[0].input_ids)
    with torch.no_grad():
        said = model.verifier_lm_head(model.verifier_norm(states[-1]))
        assert torch.allclose(said, inner(torch.tensor([samples[0].input_ids])).logits[0][:, t2d], rtol=1e-4, atol=1e-4)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    done = tinydraft.learn(tmp_path / "checkpoints", model, train, held, recipe)
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert "fc.weight" in moved and not any(name.startswith(("embed", "lm_head", "verifier")) for name in moved)
    plain = checkpoint.export(done.best, tmp_path / "draft", target=folder, dtype=torch.float32)
    found = preflight.check(plain, folder)
    assert [one.line for one in found if one.state not in (GOOD, NOTE)] == []
    assert {"RoPE factor", "RoPE beta_fast", "RoPE mscale_all_dim"} <= {one.what for one in found if one.state == GOOD}
    assert load_file(plain / "model.safetensors")["layers.0.self_attn.k_proj.weight"].shape == (2 * 32, 128)
    from speculators import SpeculatorModel

    again = SpeculatorModel.from_pretrained(str(plain))
    assert torch.equal(again.fc.weight, model.fc.weight) and torch.equal(again.verifier_norm.weight, inner.model.norm.weight)


def test_speculators_builds_the_same_draft_where_it_can(kimi):
    """Ours takes the tensors by exact names; where the shortest fitting name happens to be right the two must agree."""
    from speculators.models.eagle3 import Eagle3DraftModel

    folder, _ = kimi
    t2d = torch.arange(512) % 2 == 0
    mapping = {"t2d": t2d, "d2t": torch.arange(256)}
    ours = draft.build(folder, **mapping, recipe=RECIPE, layer_ids=[2, 4, 5], seed=3)
    torch.manual_seed(3)
    theirs = Eagle3DraftModel.from_training_args(
        draft.configuration(folder, layers=1), **mapping, verifier_name_or_path=str(folder), draft_vocab_size=256,
        ttt_steps=RECIPE.draft_steps, target_layer_ids=[2, 4, 5], draft_attn_impl=RECIPE.attention,
        norm_before_residual=RECIPE.norm_before_residual,
    )  # fmt: skip
    one, other = ours.state_dict(), theirs.state_dict()
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert ours.config.to_dict() == theirs.config.to_dict()
    frozen = [{name for name, weight in model.named_parameters() if not weight.requires_grad} for model in (ours, theirs)]
    assert frozen[0] == frozen[1] == {"embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight"}


def test_a_target_without_final_norm_makes_no_draft(kimi, tmp_path):
    folder = Path(shutil.copytree(kimi[0], tmp_path / "copy"))
    listed = json.loads((folder / "model.safetensors.index.json").read_text())
    file = folder / listed["weight_map"].pop("language_model.model.norm.weight")
    (folder / "model.safetensors.index.json").write_text(json.dumps(listed))
    save_file({key: value for key, value in load_file(file).items() if key in listed["weight_map"]}, file)
    with pytest.raises(KitError, match="no final norm: there is no weight language_model.model.norm.weight"):
        draft.build(folder, torch.arange(512) < 256, torch.zeros(256, dtype=torch.long), RECIPE, layer_ids=[2, 4, 5], seed=0)


@pytest.fixture(scope="module")
def quantized(kimi, tmp_path_factory):
    return tinykimi.quantize(kimi[0], tmp_path_factory.mktemp("int4") / "target")


def test_experts_in_int4_change_nothing_of_what_a_draft_takes(kimi, quantized):
    """INT4 as published: only the routed experts are quantized, and nothing of them is read."""
    assert target.locate(str(quantized)) == quantized and target.geometry(quantized) == target.geometry(kimi[0])
    one, other = target.weights(quantized), target.weights(kimi[0])
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    mapping = torch.arange(512) < 256, torch.zeros(256, dtype=torch.long)
    ours, plain = (draft.build(folder, *mapping, RECIPE, layer_ids=[2, 4, 5], seed=0) for folder in (quantized, kimi[0]))
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in ours.state_dict().items())
    assert target.identity(quantized) != target.identity(kimi[0])


def test_what_transformers_would_compute_otherwise_is_said_by_name(kimi, quantized):
    """The layer check needs the target's own forward: of INT4 experts it is not made, and the verdict says so."""
    why = language_model.refusal(quantized, 2**40)
    assert "experts." in why and "weight_packed is stored as I32, which transformers would not compute" in why
    assert suspects.target_states(quantized) == why
    assert language_model.refusal(kimi[0], 2**40) is None
    folder = quantized / "config.json"
    found = dummy_target.language_model(json.loads(folder.read_text()), folder)
    assert found["architectures"] == ["DeepseekV3ForCausalLM"] and found["model_type"] == "deepseek_v3"
    assert found["quantization_config"]["format"] == "pack-quantized"  # profiled as it is served
    assert "quantization_config" not in dummy_target.config(quantized)


def test_decoding_is_profiled_on_its_language_model(kimi, tmp_path):
    """vLLM wants a tokenizer and pictures of a wrapper even with dummy weights; a step of what is inside costs the same."""
    found = decode_plan.subject(Params(target={"model": str(kimi[0])}), tmp_path / "models")
    assert found.folder == tmp_path / "models" / "target" and [path.name for path in found.folder.iterdir()] == ["config.json"]
    assert found.config["model_type"] == "deepseek_v3" and "vision_config" not in found.config
    assert found.geometry == dummy_target.Geometry(64, 8, 512, 12, 2, 4)


# ---- Its language model


def test_the_language_model_inside_is_loaded_alone(kimi):
    """The doctor's and the suspects' second opinion: the wrapper's weights, without its vision tower, in transformers' names."""
    folder, inner = kimi
    found = language_model.load(folder)
    assert type(found) is type(inner)
    mine, own = found.state_dict(), inner.state_dict()
    assert mine.keys() == own.keys() and all(torch.equal(mine[key], own[key]) for key in own)
    ids = torch.arange(20, 60)
    passed = language_model.forward(found, ids, 8)
    wanted = tinystates.states_of(inner, ids.tolist(), list(range(8)))
    assert all(torch.equal(one, other) for one, other in zip(passed.entering, wanted, strict=True))
    assert torch.equal(torch.stack(suspects.target_states(folder)(ids.tolist(), [2, 4, 5])), torch.stack([*wanted[2:6:2],
                       wanted[5], wanted[8]]))  # fmt: skip
    assert suspects.rope_of(folder)["rope_type"] == "yarn" and suspects.rope_of(folder)["factor"] == 64


def test_a_language_model_that_lacks_weights_is_not_made_up(kimi, tmp_path):
    folder = Path(shutil.copytree(kimi[0], tmp_path / "copy"))
    listed = json.loads((folder / "model.safetensors.index.json").read_text())
    lost = "language_model.model.layers.3.self_attn.o_proj.weight"
    file = folder / listed["weight_map"].pop(lost)
    (folder / "model.safetensors.index.json").write_text(json.dumps(listed))
    save_file({key: value for key, value in load_file(file).items() if key != lost}, file)
    with pytest.raises(KitError, match=r"finds 1 weights of DeepseekV3ForCausalLM nowhere in .*first model.layers.3.self_attn.o"):
        language_model.load(folder)
    assert "nowhere in" in suspects.target_states(folder)


def test_vllm_is_asked_for_the_text_model_alone(kimi, tmp_path):
    """No vision tower, whose weights and trial pictures would take memory; the draft's own worker only where it is needed."""
    drafting = {"method": "eagle3", "model": "draft", "num_speculative_tokens": 3}
    plain, served = (server.Settings(model=str(kimi[0]), speculative=how).command(1) for how in (None, drafting))
    assert "--language-model-only" in plain and "--language-model-only" in served
    on_cpu = not torch.cuda.is_available()
    assert ("--worker-cls" in served) is on_cpu and "--worker-cls" not in plain
    alone = write_config(tmp_path / "alone", tinykimi.config()["text_config"])
    command = server.Settings(model=str(alone), speculative=drafting).command(1)
    assert "--language-model-only" not in command and ("--worker-cls" in command) is on_cpu
    llama = write_config(tmp_path / "llama", {"model_type": "llama", "hidden_size": 8})
    assert not {"--language-model-only", "--worker-cls"} & set(server.Settings(model=str(llama), speculative=drafting).command(1))


# ---- The true size


def true_size(folder: Path) -> Path:
    return write_config(folder, tinykimi.config(dtype="bfloat16"))


def test_the_draft_of_the_true_size_has_the_published_geometry(tmp_path):
    folder = true_size(tmp_path / "target")
    found = draft.configuration(folder, layers=1)
    wanted = {"hidden_size": 7168, "num_attention_heads": 64, "head_dim": 128, "num_key_value_heads": 64, "vocab_size": 163840,
              "intermediate_size": 18432, "max_position_embeddings": 262144, "rms_norm_eps": 1e-5, "model_type": "llama",
              "tie_word_embeddings": False}  # fmt: skip
    assert {name: getattr(found, name) for name in wanted} == wanted
    assert all(CASE[name] == wanted[name] for name in ("hidden_size", "num_attention_heads", "head_dim", "vocab_size"))
    assert found.rope_parameters == {"rope_type": "yarn", "rope_theta": 5e4, "factor": 64.0, "beta_fast": 1.0, "beta_slow": 1.0,
                                     "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096}  # fmt: skip
    assert "sliding_attention" not in (getattr(found, "layer_types", None) or [])
    assert not getattr(found, "sliding_window", None)
    assert draft.configuration(folder, layers=1, key_value_heads=8).num_key_value_heads == 8
    with pytest.raises(KitError, match="64 heads of the draft cannot share 12.*training.draft_key_value_heads"):
        draft.configuration(folder, layers=1, key_value_heads=12)


def published_table(key_value_heads: int, intermediate: int) -> dict[str, list[int]]:
    """The tensors of the published drafts, by the names that SpecForge gave them, from the published geometry alone."""
    hidden, heads, width, vocab = (CASE[name] for name in ("hidden_size", "num_attention_heads", "head_dim", "draft_vocab_size"))
    norms = ("midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm", "norm")
    shared = [key_value_heads * width, 2 * hidden]
    return {
        **{f"{name}.weight": [hidden] for name in norms},
        "fc.weight": [hidden, len(CASE["layers_ids"]) * hidden],
        "midlayer.self_attn.q_proj.weight": [heads * width, 2 * hidden],
        "midlayer.self_attn.k_proj.weight": shared,
        "midlayer.self_attn.v_proj.weight": shared,
        "midlayer.self_attn.o_proj.weight": [hidden, heads * width],
        "midlayer.mlp.gate_proj.weight": [intermediate, hidden],
        "midlayer.mlp.up_proj.weight": [intermediate, hidden],
        "midlayer.mlp.down_proj.weight": [hidden, intermediate],
        "lm_head.weight": [vocab, hidden],
        "d2t": CASE["vocabulary_files"]["d2t"]["shape"],
        "t2d": CASE["vocabulary_files"]["t2d"]["shape"],
        "embed_tokens.weight": [CASE["vocab_size"], hidden],
    }


@pytest.mark.parametrize("groups", [None, 8])
def test_names_and_shapes_at_the_true_size_are_the_published_ones(tmp_path, groups):
    folder = true_size(tmp_path / "target")
    variant = CASE["published_variants"][0]
    recipe = RECIPE.model_copy(update={"draft_key_value_heads": groups})
    with torch.device("meta"):
        model = draft.shell(folder, recipe, layer_ids=CASE["layers_ids"], draft_vocab_size=CASE["draft_vocab_size"])
    held = {name: value for name, value in model.state_dict().items() if not name.startswith("verifier_")}
    found = {name.replace("layers.0.", "midlayer."): list(value.shape) for name, value in held.items()}
    assert found == published_table(groups or variant["num_key_value_heads"], variant["intermediate_size"])
    assert found["fc.weight"] == [7168, 21504] and found["midlayer.self_attn.q_proj.weight"] == [8192, 14336]
    assert {held[name].dtype for name in ("t2d", "d2t")} == {torch.bool, torch.int64}
    assert all(value.device.type == "meta" for value in held.values())
    # What the pre-flight asks of a draft with this config, before vLLM does.
    said = json.loads(json.dumps(model.config.to_dict(), default=str))
    kept = draft_layout.Draft(folder, "speculators", said, said["transformer_layer_config"], CASE["layers_ids"],
                              CASE["draft_vocab_size"], None, dict.fromkeys(draft_layout.FLAGS), {}, {})  # fmt: skip
    wants = {name.replace("layers.0.", "midlayer."): shape for name, shape in kept.wants.items()}
    assert wants == {name: shape for name, shape in found.items() if name not in ("t2d", "embed_tokens.weight")}


def test_the_shared_tensors_of_the_true_size_cost_no_memory_until_they_are_read(tmp_path):
    """4.7 GB of embedding and head in a file full of holes: found, mapped, and one row of each read."""
    folder = true_size(tmp_path / "target")
    header, end = {}, 0
    shapes = {"embed_tokens": [163840, 7168], "norm": [7168]}
    named = {f"language_model.model.{name}.weight": shape for name, shape in shapes.items()}
    for name, shape in (named | {"language_model.lm_head.weight": [163840, 7168]}).items():
        size = 2 * torch.Size(shape).numel()
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
        file.seek(8 + len(text) + 2 * 7168 * 163839)
        file.write(torch.full((7168,), 3, dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = target.weights(folder)
    assert {name: tuple(value.shape) for name, value in found.items()} == {
        "embed": (163840, 7168), "head": (163840, 7168), "final_norm": (7168,)}  # fmt: skip
    assert float(found["embed"][163839].float().mean()) == 3 and float(found["head"][5].abs().sum()) == 0
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024 < 200, "MiB for tensors of 4,480"


@pytest.mark.parametrize("name", ["rtx-pro-6000-x8", "b300-nvl8"])
def test_the_parameter_files_of_the_story_fit_its_target(tmp_path, name):
    """What can be said of them without the machine: all of it goes together at the true size."""
    path = REPOSITORY / "params" / f"{name}.yaml"
    params, folder = Params.load(path), true_size(tmp_path / "target")
    first = path.read_text().splitlines()[0]
    assert "Not run by us" in first and "acceptance length" in first and params.run == name
    shape = target.geometry(folder)
    assert params.hidden_states.layers == CASE["layers_ids"] == [2, shape.layers // 2, shape.layers - 3]
    assert params.vocabulary.size == CASE["draft_vocab_size"] and params.target.dtype == shape.dtype == "bfloat16"
    assert (params.server.tensor_parallel, params.target.trust_remote_code) == (8, True)
    dummy_target.refuse_uneven(dummy_target.geometry(tinykimi.config()), params.server.tensor_parallel)
    found = draft.configuration(folder, layers=params.training.draft_layers,
                                key_value_heads=params.training.draft_key_value_heads)  # fmt: skip
    assert found.num_attention_heads % params.server.tensor_parallel == 0
    assert found.max_position_embeddings > params.dataset.max_length
    planned = machine.plan(samples=params.dataset.samples, max_length=params.dataset.max_length, states=4,
                           hidden_size=shape.hidden_size, vocab_size=shape.vocab_size, draft_vocab_size=32000,
                           dtype=shape.dtype, folder=tmp_path)  # fmt: skip
    assert planned.bytes_per_token == 57_344
    told = next(line for line in path.read_text().splitlines() if "57,344" in line)
    assert f"up to {planned.bytes_per_token * planned.tokens / 1e9:.0f} GB" in told


# ---- The published mismatch


def published_draft(folder: Path, variant: dict) -> Path:
    """A small draft as the published one is kept, with the RoPE that it was published with."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 32, "num_hidden_layers": 1, "vocab_size": 512,
             "draft_vocab_size": 512, "intermediate_size": 160, "num_key_value_heads": 4,
             "max_position_embeddings": 1024}  # fmt: skip
    scaling = {"type": "yarn", "factor": 64.0, "original_max_position_embeddings": 16, "beta_fast": 1.0}
    scaling = scaling if variant["rope_scaling"] else None
    said = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "rms_norm_eps": variant["rms_norm_eps"],
            "tie_word_embeddings": False, "rope_theta": variant["rope_theta"], "rope_scaling": scaling,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}}  # fmt: skip
    write_config(folder, said | sizes)
    save_file({"midlayer.norm": torch.zeros(1)}, folder / "model.safetensors")
    wants = draft_layout.read(folder).wants
    drawn = torch.Generator().manual_seed(0)
    save_file({name: torch.randn(shape, generator=drawn) for name, shape in wants.items()}, folder / "model.safetensors")
    return folder


def test_the_published_rope_mismatch_is_found_and_explained(kimi, tmp_path):
    wrong, right = (published_draft(tmp_path / str(place), variant) for place, variant in enumerate(CASE["published_variants"]))
    found = {one.what: one for one in preflight.check(wrong, kimi[0]) if one.what.startswith("RoPE")}
    assert {name for name, one in found.items() if one.state == FAULT} >= {
        "RoPE rope_type", "RoPE rope_theta", "RoPE factor", "RoPE original_max_position_embeddings", "RoPE scaling"}  # fmt: skip
    assert "expected 50000.0, found 1000000.0" in found["RoPE rope_theta"].line
    line = found["RoPE scaling"].line
    assert "yarn, 64 times 16 tokens, found none (rope_scaling null, theta 1e+06)" in line and "fall with context" in line
    found = {one.what: one.state for one in preflight.check(right, kimi[0]) if one.what.startswith("RoPE")}
    # It leaves beta_slow out, which means 1: the same RoPE. Without mscale attention is sharper, alike near and far.
    assert {name for name, state in found.items() if state == NOTE} == {"RoPE mscale", "RoPE mscale_all_dim"}
    assert len(found) == 8 and FAULT not in found.values() and found["RoPE beta_slow"] == GOOD


# ---- Code of its own


def test_code_that_comes_with_a_model_runs_only_by_parameter(kimi, tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = Path(shutil.copytree(kimi[0], tmp_path / "copy"))
    (folder / "tokenizer.json").unlink()
    (folder / "tiktoken.model").write_text("")
    (folder / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["tokenization_kimi.Words", None]}}))
    with pytest.raises(KitError, match=r"without its own code.*tokenization_kimi\.py.*only if target.trust_remote_code is true"):
        target.tokenizer(folder)
    said = json.loads((folder / "config.json").read_text())
    own = said["text_config"] | {"model_type": "ownkind", "auto_map": {"AutoConfig": "configuration_own.OwnConfig"},
                                 "architectures": ["OwnForCausalLM"]}  # fmt: skip
    del own["max_position_embeddings"]
    write_config(folder, own)
    (folder / "configuration_own.py").write_text(
        "from transformers import DeepseekV3Config\n\n\nclass OwnConfig(DeepseekV3Config):\n    model_type = 'ownkind'\n"
        "    max_position_embeddings: int = 777\n"
    )
    for asked in (target.geometry, lambda place: draft.configuration(place, layers=1)):
        with pytest.raises(KitError, match=r"configuration_own\.py\), which is run only if target.trust_remote_code is true"):
            asked(folder)
    assert target.geometry(folder, True).max_positions == 777
    model = draft.build(folder, torch.arange(512) < 256, torch.zeros(256, dtype=torch.long), RECIPE, layer_ids=[2, 4, 5], seed=0,
                        trust_remote_code=True)  # fmt: skip
    assert torch.equal(model.embed_tokens.weight, kimi[1].model.embed_tokens.weight)
