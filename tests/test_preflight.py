"""Pre-flight of draft directories: a sound one of either kind passes, and each planted fault is named by its own check."""

import json
import shutil
from importlib.machinery import ModuleSpec

import pytest
import tinydraft
import torch
from safetensors.torch import load_file, save_file
from tinymodel import make_tiny_target

from eagle3kit import __main__, draft_layout, predict, preflight, served_code, target
from eagle3kit.errors import KitError
from eagle3kit.findings import FAULT, GOOD, NOTE, UNKNOWN


@pytest.fixture
def draft(tiny, tmp_path):
    return shutil.copytree(tiny.draft, tmp_path / "draft")


def as_specforge(draft, folder):
    """The same draft as SpecForge and SGLang keep it: one flat config, the layer called midlayer, no t2d needed."""
    config = json.loads((draft / "config.json").read_text())
    flat = {**config["transformer_layer_config"], "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama",
            "draft_vocab_size": config["draft_vocab_size"], "norm_before_residual": config["norm_before_residual"],
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": config["eagle_aux_hidden_state_layer_ids"]}}  # fmt: skip
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(flat))
    tensors = {key.replace("layers.0.", "midlayer."): value for key, value in load_file(draft / "model.safetensors").items()}
    save_file({key: value for key, value in tensors.items() if key != "embed_tokens.weight"}, folder / "model.safetensors")
    return folder


def config_of(folder, change):
    content = json.loads((folder / "config.json").read_text())
    change(content)
    (folder / "config.json").write_text(json.dumps(content))


def tensors_of(folder, change):
    content = load_file(folder / "model.safetensors")
    change(content)
    save_file({key: tensor.contiguous() for key, tensor in content.items()}, folder / "model.safetensors")


def states(found, state):
    return [one.what for one in found if one.state == state]


# ---- Sound ones


def test_a_sound_draft_passes_and_nothing_is_left_unchecked(draft, tiny):
    found = preflight.check(draft, tiny.target)
    assert states(found, FAULT) == states(found, UNKNOWN) == [], [one.line for one in found if one.state != GOOD]
    assert len(found) > 20 and preflight.summary(found).startswith("fit to serve")


def test_without_a_target_it_says_what_it_did_not_check(draft):
    found = preflight.check(draft)
    assert states(found, FAULT) == []
    assert states(found, UNKNOWN) == ["layer ids against the target", "vocabulary size", "hidden size", "RoPE", "position limit",
                                      "embedding", "head"]  # fmt: skip
    assert all("--target" in one.found for one in found if one.state == UNKNOWN)


def test_the_other_kind_of_directory_passes_too_and_is_written_plain(draft, tiny, tmp_path):
    other = as_specforge(draft, tmp_path / "other")
    (other / "optimizer.pt").write_bytes(b"x" * 100)
    found = preflight.check(other, tiny.target)
    assert states(found, FAULT) == [] and "other files" in states(found, NOTE), [one.line for one in found]
    read = draft_layout.read(other)
    assert (read.kind, read.prefix, read.layer_ids) == ("SpecForge", "midlayer.", tinydraft.LAYERS)
    plain = preflight.export(other, tmp_path / "plain", target_folder=tiny.target, dtype=torch.bfloat16)
    assert sorted(path.name for path in plain.iterdir()) == ["config.json", "model.safetensors"]
    kinds = {tensor.dtype for tensor in load_file(plain / "model.safetensors").values()}
    assert kinds == {torch.bfloat16, torch.int64, torch.bool}


def test_a_training_checkpoint_is_written_plain_and_drafts_the_same(tiny, tmp_path):
    found = preflight.check(tiny.fitted.best, tiny.target)
    assert states(found, FAULT) == [] and "other files" in states(found, NOTE), [one.line for one in found]
    plain = preflight.export_for(tiny.fitted.best, tmp_path / "plain", tiny.target)
    assert states(preflight.check(plain, tiny.target), NOTE) == []
    one, other = (predict.predict(predict.load_draft(folder, torch.float32), tiny.answers(2), **tiny.known, depth=2)
                  for folder in (plain, tiny.draft))
    assert one == other
    with pytest.raises(KitError, match="--export needs --target"):
        preflight.export_for(tiny.draft, tmp_path / "no", None)


# ---- One fault each


def layer(**values):
    return lambda config: config["transformer_layer_config"].update(values)


def top(**values):
    return lambda config: config.update(values)


@pytest.mark.parametrize(
    ("change", "named", "words"),
    [
        (layer(model_type="mistral"), "kind of layer", "llama or qwen3"),
        (layer(tie_word_embeddings=True), "tied embeddings", "true, cut"),
        (top(draft_vocab_size=300), "shapes", "lm_head.weight"),
        (top(eagle_aux_hidden_state_layer_ids=[2, 4, 8]), "layer ids against the target", "below 8"),
        (top(eagle_aux_hidden_state_layer_ids=[4, 2, 5]), "layer ids", "rising"),
        (top(eagle_aux_hidden_state_layer_ids=[2, 4, 5, 7]), "layers joined by fc", "3 of 64"),
        (layer(rope_parameters={"rope_type": "default", "rope_theta": 1e6}), "RoPE rope_theta", "1000000"),
        (layer(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 64.0}), "RoPE factor", "64"),
        (layer(max_position_embeddings=256), "position limit", "256"),
        (layer(vocab_size=256), "vocabulary size", "256"),
        (layer(hidden_size=32), "hidden size", "32"),
        (lambda config: config.pop("norm_before_residual"), "norm_before_residual", "missing"),
        (top(norm_before_fc=True), "tensors", "input_norm.weight"),
    ],
)
def test_a_config_that_would_not_serve_is_named(draft, tiny, change, named, words):
    config_of(draft, change)
    found = preflight.check(draft, tiny.target)
    assert named in states(found, FAULT), [one.line for one in found if one.state == FAULT]
    line = next(one for one in found if one.what == named and one.state == FAULT).line
    assert words in line and line.startswith("FAULT")


def test_layer_ids_say_how_they_are_counted_and_those_that_look_otherwise_are_doubted(draft, tiny, tmp_path):
    (told,) = [one for one in preflight.check(draft, tiny.target) if one.what == "layer ids"]
    assert "as vLLM counts" in told.found and "there the same states are 1, 3, 4" in told.found
    config_of(draft, top(eagle_aux_hidden_state_layer_ids=[1, 3, 4]))  # the defaults of eight layers, by what leaves one
    for folder in (draft, as_specforge(draft, tmp_path / "other")):
        (doubt,) = [one for one in preflight.check(folder, tiny.target) if one.what == "how layer ids are counted"]
        assert doubt.state == NOTE and "write [2, 4, 5]" in doubt.effect


def put(key, change):
    return lambda tensors: tensors.update({key: change(tensors[key])})


@pytest.mark.parametrize(
    ("change", "named", "words"),
    [
        (lambda t: t.pop("norm.weight"), "tensors", "missing norm.weight"),
        (lambda t: t.pop("d2t"), "d2t", "missing"),
        (lambda t: t.update({"exp_avg.fc": torch.zeros(2)}), "other tensors", "optimizer state has no place"),
        (put("fc.weight", lambda w: w[:, :128]), "shapes", "fc.weight"),
        (put("fc.weight", lambda w: w.to(torch.bfloat16)), "number type", "bfloat16 and float32"),
        (put("fc.weight", lambda w: w.fill_(float("nan"))), "values", "fc.weight"),
        (put("d2t", lambda d: d + torch.arange(len(d))), "d2t", "target ids"),
        (put("d2t", lambda d: torch.zeros_like(d)), "d2t", "all zeros"),
        (put("d2t", lambda d: d + 400), "d2t", "outside the vocabulary"),
        (put("d2t", lambda d: d.to(torch.int32)), "d2t number type", "I32"),
        (put("d2t", lambda d: d.float()), "d2t number type", "F32"),
        (put("d2t", lambda d: d + torch.arange(len(d))), "d2t", "where vLLM stops with an index error"),
        (put("t2d", lambda t: t.long()), "t2d number type", "I64"),
        (put("fc.weight", torch.zeros_like), "weights", "all zero: fc.weight"),
        (put("t2d", lambda t: t.roll(1)), "t2d and d2t", "two"),
        (put("embed_tokens.weight", lambda w: w.roll(1, 0)), "embedding", "of 512 rows"),
        (put("lm_head.weight", lambda w: w.roll(1, 0)), "head", "rows of other tokens"),
    ],
)
def test_a_tensor_that_would_not_serve_is_named(draft, tiny, change, named, words):
    tensors_of(draft, change)
    found = preflight.check(draft, tiny.target)
    lines = [one.line for one in found if one.what == named and one.state == FAULT]
    assert any(words in line for line in lines), [one.line for one in found if one.state == FAULT]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (top(eagle_aux_hidden_state_layer_ids=["2", "4", "5"]), "not a list of whole numbers"),
        (top(draft_vocab_size="256"), "draft_vocab_size is '256', not a whole number"),
        (top(norm_before_residual="false"), "norm_before_residual is 'false', not true or false"),
    ],
)
def test_text_in_the_place_of_numbers_and_flags_is_refused_by_name(draft, tiny, change, words):
    config_of(draft, change)
    with pytest.raises(KitError, match=words):
        preflight.check(draft, tiny.target)


def test_another_target_is_noticed(draft, tmp_path):
    other = make_tiny_target(tmp_path / "other", layers=5, tied=False, seed=7)
    wrong = states(preflight.check(draft, other), FAULT)
    assert {"layer ids against the target", "embedding", "head", "target named"} <= set(wrong)


def test_a_trained_embedding_or_head_is_a_note_not_a_fault(draft, tiny):
    config_of(draft, top(embed_requires_grad=True))
    tensors_of(draft, lambda t: t.update({key: t[key] + 0.01 for key in ("embed_tokens.weight", "lm_head.weight")}))
    found = preflight.check(draft, tiny.target)
    assert {"embedding", "head"} <= set(states(found, NOTE)) and not {"embedding", "head"} & set(states(found, FAULT))


# ---- What the installed vLLM honours


def test_flags_are_looked_up_in_the_installed_vllm(draft, monkeypatch):
    reads, version = served_code.honoured("llama", True)
    assert {"norm_before_fc", "norm_output", "fc_norm", "norm_before_residual", "layer_types"} <= reads and version[0].isdigit()
    assert served_code.honoured("mistral", True)[0] is None
    config_of(draft, top(norm_output=True))
    assert "norm_output" in states(preflight.check(draft), GOOD)


def test_a_flag_that_an_older_vllm_does_not_read_is_a_fault(draft, tmp_path, monkeypatch):
    """Its own sources, with the lines of the flag and the window taken out as in older versions."""
    spec = served_code.util.find_spec("vllm")
    root, old = next(iter(spec.submodule_search_locations)), tmp_path / "vllm"
    for name in ("model_executor/models/llama_eagle3.py", "model_executor/models/llama.py", served_code.CONVERTED):
        text = (served_code.Path(root) / name).read_text()
        (old / name).parent.mkdir(parents=True, exist_ok=True)
        (old / name).write_text(text.replace("norm_output", "something").replace("layer_types", "kinds"))
    spec = ModuleSpec("vllm", None)
    spec.submodule_search_locations = [str(old)]
    monkeypatch.setattr(served_code.util, "find_spec", lambda name: spec)
    config_of(draft, top(norm_output=True))
    config_of(draft, layer(layer_types=["sliding_attention"], sliding_window=2048))
    assert states(preflight.check(draft), FAULT) == ["norm_output", "sliding window"]
    monkeypatch.setattr(served_code.util, "find_spec", lambda name: None)
    (line,) = [one.line for one in preflight.check(draft) if one.what == "norm flags and window"]
    assert line.startswith("not checked") and "vLLM is not installed here" in line


def test_more_than_three_layers_must_be_named_for_vllm(draft):
    config_of(draft, top(eagle_aux_hidden_state_layer_ids=[1, 2, 4, 5]))
    tensors_of(draft, put("fc.weight", lambda w: torch.cat([w, w[:, :64]], dim=1)))
    assert states(preflight.check(draft), FAULT) == ["num_aux_hidden_states"]
    config_of(draft, layer(num_aux_hidden_states=4))
    assert states(preflight.check(draft), FAULT) == []


# ---- Against a reference


def test_a_reference_shows_what_is_otherwise(draft, tiny, tmp_path):
    found = preflight.check(draft, reference=as_specforge(draft, tmp_path / "reference"))
    assert {one.what: one.state for one in found if one.what.startswith("reference")} == {
        "reference: names": GOOD, "reference: shapes": GOOD, "reference: number types": GOOD,
        "reference: config": GOOD}  # fmt: skip
    tensors_of(draft, lambda t: t.update({"layers.0.self_attn.q_proj.bias": torch.zeros(64)}))
    config_of(draft, top(norm_output=True))
    found = preflight.check(draft, reference=tmp_path / "reference")
    assert "reference: names" in states(found, FAULT) and "reference: config" in states(found, NOTE)


# ---- From the command line


def test_the_command_line_prints_every_finding_and_tells_by_its_code(draft, tiny, tmp_path, capsys):
    assert __main__.main(["check", str(draft), "--target", str(tiny.target), "--export", str(tmp_path / "plain")]) == 0
    said = capsys.readouterr().out
    assert "fit to serve" in said and said.count("\ngood") > 15 and (tmp_path / "plain" / "config.json").is_file()
    tensors_of(draft, put("d2t", lambda d: d + torch.arange(len(d))))
    assert __main__.main(["check", str(draft)]) == 1
    said = capsys.readouterr().out
    assert "FAULT        d2t: expected offsets (target id - draft id), found target ids" in said and "not fit to serve" in said
    for path, words in ((tmp_path, "has no config.json"), (tiny.target, "is not an EAGLE-3 draft")):
        assert __main__.main(["check", str(path)]) == 2
        assert words in capsys.readouterr().err
    assert __main__.main(["check", str(tmp_path / "nowhere"), "--target", str(tiny.target)]) == 2
    assert "is not a directory" in capsys.readouterr().err


def test_a_parameter_file_is_still_checked_as_one(tmp_path, capsys):
    (tmp_path / "p.yaml").write_text("run: r\nvocabulary: {size: 512}\n")
    assert __main__.main(["check", str(tmp_path / "p.yaml")]) == 0
    assert "vocabulary.size: 512" in capsys.readouterr().out
    assert __main__.main(["check", str(tmp_path / "p.yml")]) == 2 and capsys.readouterr().err


def test_hostile_directories_are_errors_of_one_line(tiny, draft, tmp_path):
    for text, words in (("[]", "holds no object"), ("{}", "not an EAGLE-3 draft"), ("{", "is not JSON"),
                        ('{"speculators_model_type": "dflash"}', "of another kind"),
                        ('{"speculators_model_type": "eagle3"}', "lacks hidden_size"),
                        ('{"speculators_model_type": "eagle3", "transformer_layer_config": 3}',
                         "lacks hidden_size")):  # fmt: skip
        (draft / "config.json").write_text(text)
        with pytest.raises(KitError, match=words):
            preflight.check(draft)
    shutil.copy(tiny.draft / "config.json", draft / "config.json")
    (draft / "model.safetensors").write_bytes((draft / "model.safetensors").read_bytes()[:500])
    with pytest.raises(KitError, match=r"model\.safetensors cannot be read: 500 bytes"):
        preflight.check(draft)
    assert target.check(tiny.target) == tiny.target
