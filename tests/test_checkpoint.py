"""The servable draft: exported whole, loaded by speculators, and any one thing broken is named by its own check."""

import json
from pathlib import Path

import pytest
import tinystates
import torch
from safetensors.torch import load_file, save_file
from tinymodel import make_tiny_target

from eagle3kit import checkpoint, draft, target, vocabulary
from eagle3kit.errors import KitError
from eagle3kit.params import Training

torch.set_num_threads(1)
LAYERS, SIZE = tinystates.LAYERS, 128
RECIPE = Training(draft_steps=2)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory) -> Path:
    return make_tiny_target(tmp_path_factory.mktemp("target") / "tiny")


@pytest.fixture(scope="module")
def mapping():
    counts = torch.randint(50, (512,), generator=torch.Generator().manual_seed(0))
    return vocabulary.build(counts, SIZE, [0, 1, 2])


@pytest.fixture(scope="module")
def trained(model_folder, mapping):
    """A draft as training leaves it: what it knows of the target, and weights of its own."""
    return draft.build(model_folder, *mapping, RECIPE, layer_ids=LAYERS, seed=1)


@pytest.fixture
def source(trained, tmp_path) -> Path:
    folder = tmp_path / "checkpoints" / "0"
    trained.save_pretrained(folder)
    torch.save({"moments": torch.ones(3)}, folder / "optimizer_state_dict.pt")
    return folder


@pytest.fixture
def exported(source, model_folder, tmp_path) -> Path:
    return checkpoint.export(source, tmp_path / "draft", target=model_folder, dtype=torch.float32)


@pytest.fixture
def check(model_folder, mapping):
    geometry, weights = target.geometry(model_folder), target.weights(model_folder)

    def run(folder: Path, dtype=torch.float32, **changes) -> list[checkpoint.Check]:
        known = {"geometry": geometry, "weights": weights, "t2d": mapping[0], "d2t": mapping[1], "layer_ids": LAYERS}
        return checkpoint.check(folder, dtype=dtype, **known | changes)

    return run


def wrong(checks: list[checkpoint.Check]) -> list[str]:
    return [one.what for one in checks if not one.right]


def change_config(folder: Path, change) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def change_tensors(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / "model.safetensors")


# ---- Whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_export_holds_every_check(source, model_folder, tmp_path, check, trained, dtype):
    folder = checkpoint.export(source, tmp_path / "draft", target=model_folder, dtype=dtype)
    checks = check(folder, dtype)
    assert wrong(checks) == [] and len(checks) == 16
    checkpoint.faults(checks, folder)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    mine = trained.state_dict()
    for key, tensor in load_file(folder / "model.safetensors").items():
        assert torch.equal(tensor, mine[key].to(dtype) if mine[key].is_floating_point() else mine[key]), key
    config = json.loads((folder / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == str(model_folder)
    assert {config.get("dtype"), config.get("torch_dtype")} - {None} == {str(dtype).removeprefix("torch.")}


def test_speculators_loads_it_and_it_drafts_the_same(exported, trained):
    from speculators import SpeculatorModel

    loaded = SpeculatorModel.from_pretrained(str(exported))
    assert loaded.target_layer_ids == LAYERS
    assert all(torch.equal(tensor, trained.state_dict()[key]) for key, tensor in loaded.state_dict().items())
    generator = torch.Generator().manual_seed(3)
    inputs = {"hidden_states": torch.randn(1, 128, 3 * 64, generator=generator),
              "input_ids": torch.randint(512, (1, 128), generator=generator),
              "document_ids": torch.zeros(1, 128, dtype=torch.int64)}
    with torch.no_grad():
        for mine, theirs in zip(loaded(**inputs), trained(**inputs), strict=True):
            # It is loaded with another attention, which rounds otherwise: one in a hundred may fall on the other side.
            assert (mine != theirs).sum() <= 1


def test_it_shares_the_targets_embedding_and_head(exported, model_folder, mapping):
    tensors, weights = load_file(exported / "model.safetensors"), target.weights(model_folder)
    assert torch.equal(tensors["embed_tokens.weight"], weights["embed"])
    places = torch.arange(SIZE) + tensors["d2t"]
    assert torch.equal(tensors["lm_head.weight"], weights["head"][places]) and torch.equal(tensors["t2d"], mapping[0])


def test_a_second_export_takes_the_place_of_the_first(source, exported, model_folder, check):
    (exported / "left-over").write_text("of before")
    change_tensors(source, lambda tensors: tensors.update({"fc.weight": tensors["fc.weight"] * 2}))
    checkpoint.export(source, exported, target=model_folder, dtype=torch.float32)
    assert sorted(path.name for path in exported.iterdir()) == ["config.json", "model.safetensors"]
    assert wrong(check(exported)) == []
    assert [path.name for path in exported.parent.iterdir() if path.name.startswith(".")] == []


# ---- Broken, one thing at a time


def spoil(key: str, change):
    return lambda tensors: tensors.update({key: change(tensors[key])})


def nudge(tensor: torch.Tensor) -> torch.Tensor:
    other = tensor.clone()
    other[3, 5] += 1e-3
    return other


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (spoil("embed_tokens.weight", nudge), ["embedding"]),
        (spoil("lm_head.weight", nudge), ["head"]),
        (spoil("lm_head.weight", lambda head: head.roll(1, dims=0)), ["head"]),
        (spoil("d2t", lambda offsets: offsets + torch.arange(SIZE)), ["d2t and t2d"]),
        (spoil("t2d", lambda kept: kept.roll(1)), ["d2t and t2d"]),
        (spoil("fc.weight", lambda fc: fc[:, :128]), ["fc.weight shape"]),
        (spoil("fc.weight", lambda fc: fc.to(torch.bfloat16)), ["number type"]),
        (spoil("norm.weight", lambda norm: norm[:-1]), ["norm.weight shape"]),
        (lambda tensors: tensors.pop("d2t"), ["d2t shape", "d2t and t2d"]),
        (lambda tensors: tensors.pop("embed_tokens.weight"), ["embed_tokens.weight shape", "embedding"]),
    ],
)
def test_a_tensor_that_is_wrong_is_named(exported, check, change, found):
    change_tensors(exported, change)
    assert wrong(check(exported)) == found


def top(**values):
    return lambda config: config.update(values)


def layer(**values):
    return lambda config: config["transformer_layer_config"].update(values)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (top(eagle_aux_hidden_state_layer_ids=[3, 5, 6]), "layer ids: expected [2, 4, 5], found [3, 5, 6]"),
        (top(draft_vocab_size=512), "draft's vocabulary: expected 128, found 512"),
        (layer(vocab_size=SIZE), "target's vocabulary: expected 512, found 128"),
        (layer(hidden_size=32), "hidden size: expected 64, found 32"),
        (layer(model_type="mistral"), "kind of layer: expected llama or qwen3, found mistral"),
        (layer(max_position_embeddings=128), "position limit: expected at least 1024, found 128"),
    ],
)
def test_a_config_that_is_wrong_is_named(exported, check, change, found):
    change_config(exported, change)
    checks = check(exported)
    assert wrong(checks) == [found.split(":")[0]]
    with pytest.raises(KitError) as caught:
        checkpoint.faults(checks, exported)
    said = str(caught.value).splitlines()
    assert said[0] == f"{exported} is not the draft that was trained:" and said[1].startswith(found) and len(said) == 3


def test_another_target_is_noticed(exported, check, tmp_path):
    other = target.weights(make_tiny_target(tmp_path / "other", seed=5))
    assert wrong(check(exported, weights=other)) == ["embedding", "head"]
    assert wrong(check(exported, dtype=torch.bfloat16)) == ["number type", "embedding", "head"]


# ---- Not a draft at all


def test_what_is_no_draft_directory_is_said_to_be_none(tmp_path, model_folder, exported, check):
    empty = tmp_path / "empty"
    empty.mkdir()
    for folder, words in (
        (tmp_path / "nowhere", "nowhere does not exist, so it is not a draft directory"),
        (empty, "empty has no config.json, so it is not a draft directory"),
        (model_folder, r"speculators_model_type is None, not 'eagle3' \(architectures: \['LlamaForCausalLM'\]\)"),
    ):
        with pytest.raises(KitError, match=words):
            checkpoint.read_config(folder)
        with pytest.raises(KitError, match=words):
            check(folder)
    assert checkpoint.read_config(exported)["speculators_model_type"] == "eagle3"
    (exported / "model.safetensors").unlink()
    with pytest.raises(KitError, match=r"draft has no model\.safetensors"):
        checkpoint.read_config(exported)
    (exported / "config.json").write_text("{")
    (exported / "model.safetensors").write_text("")
    with pytest.raises(KitError, match=r"config\.json is not JSON"):
        checkpoint.read_config(exported)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_refused_and_the_old_draft_stands(source, exported, model_folder, check, value):
    def spoiled(tensors):
        tensors["fc.weight"][0, 0] = value

    change_tensors(source, spoiled)
    with pytest.raises(KitError, match=r"NaN or infinite weights; lower training\.learning_rate"):
        checkpoint.export(source, exported, target=model_folder, dtype=torch.float32)
    assert wrong(check(exported)) == []


def test_a_server_that_never_drafts_is_not_a_success(exported):
    checkpoint.require_drafted(3, exported)
    with pytest.raises(KitError, match="drafted nothing"):
        checkpoint.require_drafted(0, exported)
