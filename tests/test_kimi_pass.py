"""The whole pass on the replica of Kimi-K2.5, by a parameter file alone: the notebooks are those of every other target.

vLLM serves it on the CPU, wrapper, latent attention, routed experts and all, so nothing here stands in for it.
"""

import pytest
import tinykimi
import torch
import yaml
from safetensors.torch import load_file
from wholepass import STAGES, Door, write_chats

from eagle3kit import language_model, predict, preflight, samples, suspects, target
from eagle3kit.findings import GOOD, NOTE

PARAMETERS = {
    "run": "kimi",
    "dataset": {"samples": 48, "held_out_percent": 25, "max_length": 96, "max_new_tokens": 24,
                "allowed_bad_percent": 5},  # one row is unusable
    "vocabulary": {"size": 256},
    "training": {"epochs": 5, "tokens_per_step": 256, "learning_rate": 4e-3, "muon_learning_rate": 2e-2,
                 "draft_key_value_heads": 2},
    "profile": {"batches": [2], "contexts": [16], "steps": 4, "collective": False, "trace": False},
    "acceptance": {"prompts": 12, "max_new_tokens": 24, "ngram": False, "resamples": 200},
    "server": {"kv_cache_gib": 1, "max_num_seqs": 16, "threads": 1},
}  # fmt: skip


@pytest.fixture(scope="module")
def passed(tmp_path_factory):
    """The pass, run once by its command line: (door, target folder, how it went)."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("kimi pass")
    tinykimi.make(folder / "target", thought=2.0)
    door = Door(folder)
    sources = write_chats(folder, rows=24)
    asked = PARAMETERS | {"target": {"model": str(folder / "target")}, "dataset": PARAMETERS["dataset"] | {"sources": sources}}
    door.file.write_text(yaml.safe_dump(asked))
    return door, folder / "target", door.run("run", door.file)


@pytest.fixture(scope="module")
def held_out(passed):
    """The store of held-out states that the pass left."""
    return samples.open_store(passed[0].outputs / "kimi" / "03_hidden_states" / "held_out")


def numbers(passed, stage: str) -> dict:
    return passed[0].result(stage, "kimi")["numbers"]


def test_every_stage_ends_well(passed):
    door, _, ran = passed
    assert ran.code == 0, ran.printed
    assert [stage for stage in STAGES if (door.outputs / "kimi" / stage / "result.json").is_file()] == list(STAGES)
    assert numbers(passed, "00_machine")["geometry"]["architecture"] == "KimiK25ForConditionalGeneration"


def test_vllm_gave_the_states_that_transformers_computes(passed, held_out):
    """Ids [2, 4, 5] and the last, through the wrapper and its latent attention: the one and the other, token for token."""
    _, folder, _ = passed
    model = language_model.load(folder)
    for number in range(3):
        sample = held_out.read(number)
        found = language_model.forward(model, sample.input_ids, 8)
        for state, wanted in zip(sample.states, [*(found.entering[k] for k in (2, 4, 5)), found.entering[8]], strict=True):
            assert float((state - wanted).norm() / wanted.norm()) < 1e-4
    assert numbers(passed, "03_hidden_states")["agreeing"] == numbers(passed, "03_hidden_states")["compared"] > 50


def test_the_doctor_looked_at_every_layer(passed):
    signs = {row["check"]: row for row in numbers(passed, "05_formats")["signs"]}
    assert {"auxiliary layers", "last layer"} <= {name for name, row in signs.items() if row["verdict"] == "sound"}


def test_its_decode_is_profiled_as_a_language_model(passed):
    found = numbers(passed, "01_allreduce_vs_speculation")
    assert found["geometry"]["experts"] == 12 and {row["draft_tokens"] for row in found["steps"]} == {0, 3}
    assert not any("plain steps" in row["name"] for row in found["steps"])  # the draft itself was run, no stand-in


def test_the_draft_is_what_speculators_and_the_pre_flight_take_for_one(passed):
    from speculators import SpeculatorModel

    door, folder, _ = passed
    place = door.outputs / "kimi" / "07_checkpoint" / "draft"
    model = SpeculatorModel.from_pretrained(str(place))
    layer = model.config.transformer_layer_config
    assert (layer.num_attention_heads, layer.num_key_value_heads, layer.head_dim) == (4, 2, 32)
    assert layer.rope_parameters["rope_type"] == "yarn" and layer.rope_parameters["factor"] == 64
    stored = load_file(place / "model.safetensors")
    assert torch.equal(model.fc.weight.float(), stored["fc.weight"]) and len(stored["lm_head.weight"]) == 256
    assert [one.line for one in preflight.check(place, folder) if one.state not in (GOOD, NOTE)] == []


def test_what_was_served_is_what_was_predicted(passed):
    """vLLM's counters against our replay: a draft beside latent attention is fed, and checked, as on any other target."""
    found = numbers(passed, "08_acceptance")
    assert found["lossless_share"] == 1 and found["recorded_equal"] == found["prompts"] > 5
    assert found["same_walks"][0] == found["same_walks"][1] > 0
    # Draft for draft, to the ends of the answers that are cut short: vLLM has room to draft there (`served.room`).
    ways = found["ways"]
    assert found["agreement"]["within"] and ways["served"]["drafts"] == ways["estimated"]["drafts"]
    assert found["acceptance_length"] > 1.05  # something was accepted, so that there was something to be wrong about


def test_every_suspect_is_tried(passed, held_out):
    """Had it not been as predicted: no experiment is left out for want of the target's states or of its RoPE."""
    door, folder, _ = passed
    states, rope = suspects.target_states(folder), suspects.rope_of(folder)
    rows = list(predict.answers(held_out, 4, 24))
    place = door.outputs / "kimi" / "07_checkpoint" / "draft"
    _, found = suspects.investigate(place, rows, target.weights(folder), target.geometry(folder), depth=3, dtype=torch.float32,
                                    states=states, rope=rope)  # fmt: skip
    untried = {one.name: one.seen for one in found if "not checked" in one.seen}
    assert "layers shifted" not in untried and "RoPE" not in untried
    assert "layers shifted" in {one.name for one in found}
