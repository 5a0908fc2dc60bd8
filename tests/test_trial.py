"""Rates timed on the spot: they come from real work, say how sure they are, and what cannot be timed says why."""

import json

import pytest
from tinymodel import make_tiny_target

from eagle3kit import cpu, dummy_target, machine, rates, target, trial, trial_passes
from eagle3kit.errors import KitError
from eagle3kit.figures import Figure
from eagle3kit.params import Params, Training

MIXED = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 512, "hidden_size": 64,
    "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 6, "first_k_dense_replace": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 16, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "n_group": 1, "topk_group": 1, "max_position_embeddings": 1024, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
    "tie_word_embeddings": False, "dtype": "float32",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_target(tmp_path_factory.mktemp("target") / "tiny")


def params(**profile) -> Params:
    return Params(dataset={"samples": 20, "max_length": 64, "max_new_tokens": 16}, vocabulary={"size": 128},
                  training={"tokens_per_step": 128}, profile=profile)  # fmt: skip


def paced(folder, outputs, **profile):
    found = {"cores": machine.inventory(outputs)["cores"], "gpus": []}
    return rates.pace(params(**profile), target.geometry(folder), folder, layers=[2, 4, 5], machine=found, outputs=outputs,
                      folder=outputs)  # fmt: skip


def test_every_work_is_timed_by_doing_some_of_it(folder, tmp_path):
    found, untimed = paced(folder, tmp_path, plan_seconds=0.5)
    assert list(found) == [rates.ANSWERS, rates.EXTRACTING, rates.WRITING, rates.TRAINING] and untimed == {}
    for rate in found.values():
        figure = rate.figure
        assert rate.how == "measured on the spot" and figure.kind == "measured" and figure.unit == "tokens/s"
        assert 0 < figure.low <= figure.value <= figure.high and figure.n >= 2
    assert list(tmp_path.iterdir()) == [], "what was written is gone"
    # A token costs the draft more than the target: three draft steps, forward and backward.
    rows = {row.work: row for row in rates.hours(found, tokens=1280, epochs=2, answers=320)}
    assert {work: row.tokens for work, row in rows.items()} == {
        rates.ANSWERS: 320, rates.EXTRACTING: 1280, rates.WRITING: 1280, rates.TRAINING: 2560}  # fmt: skip
    for work, row in rows.items():
        assert row.low <= row.hours <= row.high and row.bound
        assert row.hours == pytest.approx(row.tokens / found[work].tokens_per_second / 3600)


def test_steps_of_a_gpu_are_those_of_a_training_that_compiles_nothing(folder, monkeypatch):
    # The GPU's way on this CPU: attention with a dense mask, hits counted without waiting; the same numbers.
    monkeypatch.setattr(cpu, "is_cpu", lambda: False)
    monkeypatch.setattr(trial, "device", lambda: "cpu")
    recipe = Training(tokens_per_step=128, attention="simple_flex_attention")
    figure = trial.steps(folder, recipe, layer_ids=[2, 4, 5], draft_vocab_size=64, vocab_size=512, length=64, seconds=0.3)
    assert figure.n >= 2 and figure.source.endswith("steps of 128 tokens, as training.compile: none has them")
    # Timed so, a training that is compiled may be faster, and so may vLLM; the disk takes no more either way.
    monkeypatch.undo()
    monkeypatch.setattr(trial, "device", lambda: "cuda")
    monkeypatch.setattr(trial, "steps", lambda *_, **__: figure)
    monkeypatch.setattr(trial_passes, "passes", lambda *_, **__: (figure, figure))
    works = {rates.ANSWERS, rates.EXTRACTING, rates.WRITING, rates.TRAINING}
    for recipe, bound in (({"compile": "none"}, {rates.WRITING, rates.TRAINING}), ({"compile": "whole"}, {rates.WRITING}),
                          ({"compile": "none", "processes": 2}, {rates.WRITING})):  # fmt: skip
        asked = Params(training={"tokens_per_step": 128} | recipe, dataset={"max_length": 64, "max_new_tokens": 16})
        found, _ = rates.on_the_spot(asked, target.geometry(folder), folder, [2, 4, 5], folder.parent, works)
        assert {work for work, rate in found.items() if rate.bound} == bound


def test_what_an_earlier_run_measured_is_not_timed_again(folder, tmp_path):
    values = params(plan_seconds=0.1).leaves()
    cores = machine.inventory(tmp_path)["cores"]
    for run, rate, finished in (("one", 500.0, "2026-01-01"), ("two", 800.0, "2026-02-01"), ("odd", 1.0, "2026-03-01")):
        for stage, name in rates.WORK.values():
            place = tmp_path / run / stage
            place.mkdir(parents=True)
            changed = {"training.draft_steps": 7, "target.dtype": "bfloat16"} if run == "odd" else {}
            (place / "result.json").write_text(json.dumps({
                "run": run, "finished": finished, "numbers": {name: rate}, "params": values | changed,
                "provenance": {"machine": {"cores": cores, "gpus": []}}}))  # fmt: skip
    found, untimed = paced(folder, tmp_path, plan_seconds=0.1)
    assert list(found) == [rates.ANSWERS, rates.EXTRACTING, rates.TRAINING], "extraction was timed with its writing"
    for rate in found.values():
        assert (rate.how, rate.tokens_per_second) == ("measured by an earlier run", 800.0)
        assert (rate.figure.low, rate.figure.high, rate.figure.n) == (500.0, 800.0, 2) and "run two" in rate.source
    assert not any(row.bound for row in rates.hours(found, tokens=10, epochs=1)) and untimed == {}


def test_without_seconds_arithmetic_bounds_it_and_says_so(folder, tmp_path):
    found, untimed = paced(folder, tmp_path, plan_seconds=0)
    assert list(found) == [rates.EXTRACTING, rates.TRAINING] and {rate.how for rate in found.values()} == {"modelled"}
    assert set(untimed) == {rates.ANSWERS, rates.EXTRACTING, rates.WRITING, rates.TRAINING}
    assert set(untimed.values()) == {"profile.plan_seconds is 0"}
    assert all(row.bound and row.low is None for row in rates.hours(found, tokens=10, epochs=1))


def test_a_target_too_large_is_timed_by_one_layer_of_each_kind(tmp_path, monkeypatch):
    place = dummy_target.write(tmp_path / "mixed", MIXED)  # no weights, no tokenizer
    asked = {"dtype": "float32", "prompt": 32, "at_once": 4, "seconds": 0.2}
    reading, decoding = trial_passes.passes(place, **asked)
    assert (reading.kind, decoding.kind) == ("measured", "measured") and "layers" not in reading.source
    monkeypatch.setitem(trial_passes.MOST_WEIGHTS, "cpu", 150_000)
    reading, decoding = trial_passes.passes(place, **asked)
    assert (reading.kind, decoding.kind) == ("modelled", "modelled")
    assert "3 of 6 layers" in reading.source and "of 16 experts" in reading.source
    # Kimi-K2.5's own numbers: a dense layer and one of experts are all its kinds.
    kimi = dummy_target.config("kimi-k2.5")
    cut, kinds, kept, said = trial_passes._cut(kimi)
    assert kept == 2 and len(kinds) == 61 and "2 of 61 layers" in said and cut["n_routed_experts"] >= 8


def test_what_cannot_be_timed_says_why(folder, tmp_path, monkeypatch):
    place = dummy_target.write(tmp_path / "odd", MIXED | {"model_type": "nobody_knows"})
    with pytest.raises(KitError, match="no config of model_type 'nobody_knows'"):
        trial_passes.passes(place, dtype="float32", prompt=32, at_once=4, seconds=0.1)
    monkeypatch.setattr(trial, "free_bytes", lambda: 2**20)
    found, untimed = paced(folder, tmp_path, plan_seconds=0.1)
    assert untimed.keys() == {rates.TRAINING} and "are free" in untimed[rates.TRAINING]
    assert found[rates.TRAINING].how == "modelled" and found[rates.EXTRACTING].how == "measured on the spot"


def test_a_rate_and_its_interval_are_those_of_the_mean_time():
    rate = trial.rate(100, [0.5, 0.5, 1.0], "tokens/s", "three", 0)
    assert rate.value == pytest.approx(150) and rate.low == pytest.approx(100) and rate.high == pytest.approx(200)
    assert isinstance(rate, Figure) and rate.n == 3
