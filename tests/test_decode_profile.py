"""Geometries without weights, engines stepped by hand, what follows from their steps, and the forecast."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from tinymodel import make_tiny_target

from eagle3kit import (
    KitError,
    child,
    cpu,
    decode_plan,
    decode_profile,
    decode_rows,
    decode_shares,
    dummy_target,
    forecast,
    lengths,
    rates,
    served,
    speedup,
    story,
    traces,
    whole,
)
from eagle3kit.acceptance import Acceptance
from eagle3kit.collective import Measured, Timing
from eagle3kit.decode_profile import Engine, Point, Profiled, Trace
from eagle3kit.figures import Figure
from eagle3kit.params import Params

TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 1024, "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": False,
    "dtype": "float32",
}  # fmt: skip
DRAWS = {"resamples": 500, "seed": 0}


# ---- Geometries


def test_published_geometries_are_cut_as_asked():
    whole = dummy_target.config("kimi-k2.5")
    assert dummy_target.geometry(whole) == dummy_target.Geometry(7168, 61, 163_840, 384, 8, 64)
    cut = dummy_target.config("kimi-k2.5", layers=6, experts=128)
    assert (cut["num_hidden_layers"], cut["n_routed_experts"], cut["num_experts_per_tok"]) == (6, 128, 8)
    assert dummy_target.PUBLISHED["kimi-k2.5"]["num_hidden_layers"] == 61
    assert dummy_target.geometry(dummy_target.config("llama-3.1-8b")).experts == 0
    for wrong, words in (({"layers": 62}, "has 61 num_hidden_layers"), ({"experts": 4}, "at least as many")):
        with pytest.raises(KitError, match=words):
            dummy_target.config("kimi-k2.5", **wrong)
    with pytest.raises(KitError, match="llama-3.1-8b has 0"):
        dummy_target.config("llama-3.1-8b", experts=2)


def test_a_config_inside_another_is_taken_out_without_what_needs_weights_or_code(tmp_path):
    inner = {key: value for key, value in TINY.items() if key not in ("architectures", "dtype", "model_type")}
    inner |= {"model_type": "kimi_k2", "quantization_config": {"bits": 4}, "auto_map": {"AutoConfig": "x"}}
    outer = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "torch_dtype": "bfloat16",
             "text_config": inner}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    found = dummy_target.config(tmp_path)
    assert found["architectures"] == ["DeepseekV3ForCausalLM"] and found["model_type"] == "deepseek_v3"
    assert not {"quantization_config", "auto_map"} & set(found) and found["dtype"] == "bfloat16"
    assert dummy_target.config("config.json", base=tmp_path) == found
    outer["text_config"]["model_type"] = "other"
    (tmp_path / "config.json").write_text(json.dumps(outer))
    with pytest.raises(KitError, match="does not say the architecture"):
        dummy_target.config(tmp_path / "config.json")
    with pytest.raises(KitError, match="not a bundled one .*llama-3.1-8b.* and no file .*nowhere"):
        dummy_target.config("nowhere", base=tmp_path)


def test_heads_that_do_not_split_are_made_fewer():
    odd = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576, "num_hidden_layers": 30}
    even = dummy_target.splittable(odd, 2)
    assert even == odd | {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
    assert dummy_target.splittable(odd, 1) is odd and dummy_target.splittable(odd, 3) is odd
    assert dummy_target.splittable(TINY, 2) is TINY
    with pytest.raises(KitError, match="9 attention heads cannot be shared among 16"):
        dummy_target.splittable(odd, 16)
    with pytest.raises(KitError, match="4 attention heads cannot be shared among 3 ranks"):
        dummy_target.refuse_uneven(dummy_target.geometry(TINY), 3)


def test_a_draft_is_fed_three_layers_of_any_target():
    assert dummy_target.layer_ids(61) == [2, 30, 58] and dummy_target.layer_ids(30) == [2, 15, 27]
    assert [dummy_target.layer_ids(n) for n in (3, 4, 6, 7)] == [[0, 1, 2], [1, 2, 3], [1, 3, 5], [2, 3, 4]]
    with pytest.raises(KitError, match="2 layers are too few"):
        dummy_target.layer_ids(2)


def test_an_untrained_draft_has_the_shape_of_a_trained_one_and_no_weights(tmp_path):
    target = make_tiny_target(tmp_path / "target")
    draft = dummy_target.untrained_draft(tmp_path / "draft", target, Params().training, layer_ids=[2, 4, 5], draft_vocab_size=100,
                                         draft_tokens=3)
    config = json.loads((draft / "config.json").read_text())
    assert [path.name for path in draft.iterdir()] == ["config.json"]
    assert config["speculators_model_type"] == "eagle3" and config["draft_vocab_size"] == 100
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5] and config["transformer_layer_config"]["hidden_size"] == 64
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3


def test_the_subject_is_the_target_or_a_named_geometry(tmp_path):
    target = make_tiny_target(tmp_path / "target")
    own = decode_plan.subject(Params(target={"model": str(target)}), tmp_path / "models")
    assert own.folder == target and own.dtype == "float32" and own.geometry.hidden_size == 64
    (tmp_path / "geometry.json").write_text(json.dumps(TINY | {"num_hidden_layers": 4}))
    asked = Params(profile={"geometry": str(tmp_path / "geometry.json"), "geometry_layers": 3, "batches": [2]})
    named = decode_plan.subject(asked, tmp_path / "models")
    assert [path.name for path in named.folder.iterdir()] == ["config.json"]
    assert named.name == "geometry, geometry only (3 of 4 layers)" and (named.layers, named.fewer) == (4, None)
    assert named.messages(asked) == {1: 256, 2: 512, 8: 2048} and (own.layers, own.fewer) == (own.geometry.layers, None)
    with pytest.raises(KitError, match="name one"):
        decode_plan.subject(Params(profile={"geometry_layers": 3}), tmp_path / "models")


def test_engines_follow_the_parameters(tmp_path):
    target = make_tiny_target(tmp_path / "target")
    asked = Params(target={"model": str(target)}, profile={"batches": [1, 2], "contexts": [16, 8], "draft_tokens": [1, 3]})
    subject = decode_plan.subject(asked, tmp_path)
    plan = decode_plan.engines(asked, subject, tmp_path)
    assert [(e.name, e.depth, e.baseline, e.traced) for e in plan] == [
        ("plain", 0, True, [(2, 8)]), ("1 draft token", 1, False, []), ("3 draft tokens", 3, False, [])]
    assert plan[0].points == [(1, 16), (2, 16), (1, 8), (2, 8)] and plan[1].draft == str(tmp_path / "draft-1")
    asked = {"batches": [1, 2], "contexts": [16, 8], "trace_tensor_parallel": 2}
    two = Params(target={"model": str(target)}, profile=asked | {"step_times": False})
    [traced] = decode_plan.engines(two, subject, tmp_path)
    assert (traced.tensor_parallel, traced.points, traced.traced, traced.baseline) == (2, [], [(2, 8)], False)
    plan = decode_plan.engines(Params(target={"model": str(target)}, profile=asked), subject, tmp_path)
    assert [(e.name, e.group, e.tensor_parallel, e.points, e.traced, e.custom_allreduce) for e in plan[:3]] == [
        ("traced", "traced", 2, [(2, 8)], [(2, 8)], True), ("traced, gloo only", "traced", 2, [(2, 8)], [], False),
        ("plain", "", 1, plain_points := [(1, 16), (2, 16), (1, 8), (2, 8)], [], True)]  # fmt: skip
    assert [e.name for e in plan if e.baseline] == ["traced", "plain"] and plan[3].points == plain_points
    split = Params(target={"model": str(target)}, profile=asked | {"trace_tensor_parallel": None}, server={"tensor_parallel": 2})
    assert [e.name for e in decode_plan.engines(split, subject, tmp_path)] == ["plain", "3 draft tokens", "plain, gloo only"]
    odd = replace(subject, config=subject.config | {"num_attention_heads": 9, "num_key_value_heads": 3})
    stand_in = decode_plan.engines(Params(target={"model": str(target)}, profile=asked | {"step_times": False}), odd, tmp_path)[0]
    assert stand_in.name == "traced, 8 heads" and stand_in.model != str(subject.folder)
    off = split.model_copy(update={"profile": split.profile.model_copy(update={"custom_allreduce": False})})
    assert [e.name for e in decode_plan.engines(off, subject, tmp_path)] == ["plain", "3 draft tokens"]
    served = Params(target={"model": str(target)}, acceptance={"in_flight": 16, "draft_tokens": 2})
    plan = decode_plan.engines(served, subject, tmp_path)
    both = [(1, 128), (16, 128)]
    assert [(e.depth, e.points, e.traced) for e in plan] == [(0, both, both[1:]), (2, both, [])]
    assert list(subject.messages(served)) == [1, 3, 16, 48] and list(lengths.lengths(served)) == [2]
    few = Params(acceptance={"in_flight": 16, "prompts": 1})
    assert decode_profile.batches(few) == [1] and decode_profile.batches(Params(profile={"batches": [4]})) == [4]
    off = Params(target={"model": str(target)}, profile={"step_times": False, "trace": False})
    assert decode_plan.engines(off, subject, tmp_path) == [] == decode_profile.measure([], tmp_path)


def test_more_ranks_than_the_machine_has_are_refused(tmp_path):
    with pytest.raises(KitError, match="an engine of 64 ranks is asked for, but there are"):
        decode_profile.measure([Engine(name="big", model="m", points=[(1, 8)], tensor_parallel=64)], tmp_path)


# ---- What follows from steps


def profiled(name, seconds, batch=8, context=128, **engine):
    point = Point(batch, context, seconds, 1.0, 130.0)
    return Profiled(Engine(name=name, model="m", points=[(batch, context)], **engine), [point])


PLAIN = profiled("plain", [0.010, 0.011, 0.010, 0.009])
DRAFTED = profiled("3 draft tokens", [0.016, 0.016, 0.017, 0.015], draft="d", draft_tokens=3)


def test_r_is_the_ratio_of_step_times_and_below_one_it_is_refused():
    found, refused = decode_plan.ratios([PLAIN, DRAFTED], **DRAWS)
    [(place, r)] = found.items()
    assert place == (8, 128, 3) and r.value == pytest.approx(1.6) and r.low < 1.6 < r.high and r.kind == "measured" and r.n == 4
    assert refused == []
    quick = profiled("3 draft tokens", [0.005, 0.006, 0.005, 0.005], draft="d", draft_tokens=3)
    found, [reason] = decode_plan.ratios([PLAIN, quick], **DRAWS)
    assert found == {} and "3 draft tokens at concurrency 8, context 128" in reason and "baseline is broken" in reason
    assert decode_plan.ratios([DRAFTED], **DRAWS) == ({}, [])


def test_where_no_draft_runs_plain_steps_of_as_many_tokens_stand_in():
    failed = Profiled(DRAFTED.engine, missing="ValueError: no such method")
    [wide] = decode_plan.wider([PLAIN, failed])
    assert (wide.points, wide.stands_for, wide.draft, wide.baseline) == ([(32, 128)], 3, None, False)
    assert decode_plan.wider([PLAIN, DRAFTED]) == [] == decode_plan.wider([failed])
    measured = Profiled(wide, [Point(32, 128, [0.013, 0.013, 0.014, 0.012], 1.0, 130.0)])
    found, _ = decode_plan.ratios([PLAIN, failed, measured], **DRAWS)
    assert found[8, 128, 3].value == pytest.approx(1.3) and found[8, 128, 3].kind == "modelled"
    assert "left out" in found[8, 128, 3].source


def test_steps_and_goodput_by_draft_tokens():
    rows = decode_plan.step_rows([PLAIN, DRAFTED], **DRAWS)
    assert [(row["draft_tokens"], round(row["ms"], 6), row["steps"]) for row in rows] == [(0, 10.0, 4), (3, 16.0, 4)]
    length = {3: Figure(value=2.0, unit="tokens", kind="published", source="s")}
    [best] = decode_plan.choices([PLAIN, DRAFTED], length, **DRAWS)
    assert best["best draft tokens"] == 3 and best["tokens/s with 0"] == pytest.approx(800)
    assert best["tokens/s with 3"] == pytest.approx(1000)


def test_a_length_that_an_earlier_run_served_comes_before_published_ones(tmp_path):
    def served(run, length, finished, depth=3, model="smollm2-135m-instruct"):
        place = tmp_path / run / "08_acceptance"
        place.mkdir(parents=True)
        numbers = {"acceptance_length": length, "acceptance_length_low": length - 0.1, "acceptance_length_high": length + 0.1,
                   "prompts": 32}
        params = {"target.model": model, "acceptance.draft_tokens": depth}
        (place / "result.json").write_text(json.dumps({"run": run, "finished": finished, "numbers": numbers, "params": params}))

    assert lengths.lengths(Params(), tmp_path)[3].kind == "published"
    served("old", 1.4, "2026-01-01T00:00:00")
    served("new", 1.8, "2026-02-01T00:00:00")
    served("deeper", 2.5, "2026-03-01T00:00:00", depth=5)
    served("other", 3.0, "2026-03-01T00:00:00", model="another")
    found = lengths.lengths(Params(profile={"draft_tokens": [3, 1]}), tmp_path)
    assert (found[3].value, found[3].low, found[3].n, found[3].kind) == (1.8, pytest.approx(1.7), 32, "measured")
    assert found[3].source == "served by run new of 2026-02-01" and found[1].kind == "modelled"
    assert lengths.lengths(Params(profile={"acceptance_length": 2.2}), tmp_path)[3].value == 2.2
    assert lengths.lengths(Params(profile={"geometry": "kimi-k2.5"}), tmp_path)[3].kind == "published"
    for name in ("moonshotai/Kimi-K2.5", "configs/kimi-k2.5/config.json"):
        assert lengths.lengths(Params(target={"model": name}))[3].value == 2.278
    llama = lengths.lengths(Params(profile={"geometry": "llama-3.1-8b"}))[3]
    assert llama.kind == "modelled" and 2.4 < llama.value < 2.8 and "by one acceptance rate a token" in llama.source


def test_lengths_are_assumed_published_or_modelled():
    own = lengths.lengths(Params(profile={"draft_tokens": [3, 1]}))
    assert own[3].low < own[3].value == 1.61 < own[3].high and own[3].n == 32 and own[1].low is None
    assert own[3].kind == "published" and own[1].kind == "modelled" and 1 < own[1].value < 1.61
    asked = lengths.lengths(Params(profile={"acceptance_length": speedup.expected_tokens(0.8, 3), "draft_tokens": [3, 5]}))
    assert asked[3].kind == "modelled" and asked[5].value == pytest.approx(speedup.expected_tokens(0.8, 5))
    other = lengths.lengths(Params(target={"model": "another"}))
    assert other[3].value == 2 and "assumed" in other[3].source
    with pytest.raises(KitError, match="profile.acceptance_length is 4.5, but 3 draft tokens"):
        lengths.lengths(Params(profile={"acceptance_length": 4.5}))


def test_the_ab_compares_the_same_point_with_and_without_vllms_own_all_reduce():
    without = profiled("plain, NCCL only", [0.012, 0.012, 0.013, 0.011], custom_allreduce=False)
    switched = decode_shares.saving([PLAIN, without], 65)
    assert switched.saved_ms == pytest.approx(2.0) and switched.share.value == pytest.approx(1 / 6)
    assert decode_shares.saving([PLAIN, DRAFTED], 65) is None
    elsewhere = profiled("plain, NCCL only", [0.012, 0.012], batch=1, custom_allreduce=False)
    assert decode_shares.saving([PLAIN, elsewhere], 65) is None


def test_a_trace_is_told_beside_the_steps_that_nobody_traced():
    told = decode_rows.traced_words([replace(PLAIN, traces=[Trace(8, 128, 4, ["p.json"])])])
    assert told == "sequences 8, prompt tokens 128, ranks 1; untraced 10.0 ms a step"
    assert decode_rows.traced_words([replace(PLAIN, traces=[Trace(2, 128, 4, ["p.json"])])]).endswith("ranks 1")
    assert decode_rows.collective_words(0) == "No all-reduce was timed" and "2 ranks" in decode_rows.collective_words(2)


def switched_pair():
    """A plain engine of two ranks with vLLM's own all-reduce, and the same without it: 2 ms more a step."""
    slower = profiled("plain, gloo only", [0.012, 0.012, 0.013, 0.011], custom_allreduce=False)
    return decode_shares.saving([PLAIN, slower], 65)


def test_an_ab_is_told_beside_what_the_all_reduce_alone_foretold():
    times = (("gloo", 150e-6, 300e-6), ("vLLM shared memory", 20e-6, 30e-6))
    alone = Measured([Timing(way, size, [[seconds] * 4] * 2) for way, *each in times
                      for size, seconds in zip((2304, 18_432), each, strict=True)], {}, {})  # fmt: skip
    here, told = decode_shares.ab_rows(switched_pair(), alone, 18_432).to_dict("records")
    assert here["foretold"] == pytest.approx(65 * 0.270) and here["saved"] == pytest.approx(2.0)
    low, high = map(float, here["95 % interval"].split(" to "))
    assert 0 < low < 2.0 < high and here["kind"] == "measured" and told["kind"] == "published"
    assert (told["foretold"], told["saved"]) == pytest.approx((5.42, 1.056), abs=6e-3)
    assert decode_shares.foretold_ms(switched_pair(), alone, 77) is None
    [only] = decode_shares.ab_rows(None, alone, 18_432).to_dict("records")
    assert only["engine"] == "the story"
    elsewhere = replace(PLAIN.engine, group="traced")
    apart = profiled("traced, gloo only", [0.02] * 4, custom_allreduce=False, group="traced")
    assert decode_shares.saving([PLAIN, apart], 65) is None, "an A/B is between engines of one group"
    assert decode_shares.saving([PLAIN, replace(PLAIN, engine=elsewhere), apart], 65).saved_ms == pytest.approx(10)


def test_another_fabric_here_is_reckoned_from_the_transfer_in_the_trace():
    trace = Trace(8, 128, 4, ["plain.json"])
    plain = replace(PLAIN, traces=[trace], points=[Point(8, 128, [0.010] * 4, 1.0, 130.0)])
    drafted = replace(DRAFTED, points=[Point(8, 128, [0.016] * 4, 1.0, 130.0)])
    compared = traces.Comparison((0, 1), 3, 195, np.full(195, 28.0), np.zeros((2, 195)), (5.46, 5.46), (30, 30), 5.46, 0.0, None,
                                 True)
    windows = [([SimpleNamespace(path=Path("plain.json"))], compared)]
    then = decode_shares.faster_here(windows, [plain, drafted], {}, decode_shares.NVLINK_US)
    # 65 all-reduces a step, 28 µs -> 8 µs: 1.3 ms less of both steps.
    assert then.plain_ms.value == pytest.approx(8.7) and then.speculating_ms.value == pytest.approx(14.7)
    assert then.r_then.value == pytest.approx(14.7 / 8.7) and then.r_now.value == pytest.approx(1.6)
    length = Figure(value=2.0, unit="tokens", kind="published", source="s")
    table = decode_shares.what_if_rows(windows, [plain, drafted], {}, length)
    assert table["engine"].tolist() == ["here"] * 3 + ["the story"] * 2
    assert table["speedup then"][0] == pytest.approx(2 * 8.7 / 14.7) and (table["speedup then"] < table["speedup now"]).all()
    rising = table["r then"].tolist()[:3]
    assert rising == sorted(rising, reverse=True), "the faster the fabric, the higher r"
    quick = [(windows[0][0], replace(compared, transfer_us=np.full(195, 4.0)))]
    slower = decode_shares.what_if_rows(quick, [plain, drafted], {}, length).set_index("joined by").iloc[:3]
    assert (slower["r then"] < slower["r now"]).all() and (slower["speedup then"] > slower["speedup now"]).all()
    assert decode_shares.faster_here([], [PLAIN, DRAFTED], {}, 8.0) is None
    assert decode_shares.what_if_rows([], [], {}, length)["engine"].tolist() == ["the story"] * 2


def test_the_story_with_the_other_all_reduce_is_as_fast_as_it_was_measured():
    assert 1000 / story.faster(story.CUSTOM_US).plain_ms.value == pytest.approx(story.CUSTOM_RATE)
    assert story.usual_us() == pytest.approx(20.45, abs=0.01)


# ---- From a cut to the whole


def test_r_of_the_whole_is_where_two_lines_lead():
    few = whole.Cut(layers=3, plain=[0.005] * 4, speculating=[0.009] * 4, paired=True)
    many = whole.Cut(layers=6, plain=[0.008] * 4, speculating=[0.0126] * 4, paired=True)
    r = whole.ratio(many, few, 32, pair="p")
    assert r.value == pytest.approx(43.8 / 34) and r.kind == "modelled" and r.low == pytest.approx(r.high)
    assert whole.ratio(many, few, 6, pair="p").value == pytest.approx(12.6 / 8), "no farther than the cut: its own r"
    with pytest.raises(KitError, match="6 and 3 of 32 layers make no line"):
        whole.ratio(few, many, 32, pair="p")


@pytest.mark.parametrize("paired", [True, False])
def test_the_interval_of_the_whole_holds_its_promise(paired):
    rng, held = np.random.default_rng(0), 0

    def cut(layers: int) -> whole.Cut:
        mood = moods if paired else 1  # what all four share
        plain, speculating = ((start + layers * each) * mood * rng.normal(1, 0.004, 24) for start, each in ((2, 1), (5.4, 1.2)))
        return whole.Cut(layers=layers, plain=plain.tolist(), speculating=speculating.tolist(), paired=paired)

    for _ in range(80):
        moods = rng.uniform(0.5, 1.5, 24)
        r = whole.ratio(cut(6), cut(3), 32, pair="p", together=paired, resamples=150)
        held += r.low <= 43.8 / 34 <= r.high
    assert 69 <= held < 80


def test_layers_that_noise_hides_tell_nothing():
    rng = np.random.default_rng(0)
    few, many = (whole.Cut(layers=n, plain=rng.normal(0.01, 0.001, 12), speculating=rng.normal(0.02, 0.001, 12)) for n in (3, 6))
    with pytest.raises(KitError, match=r"with 3 layers and .* with 6, within noise the same, which tells nothing of 32; time"):
        whole.ratio(many, few, 32, pair="p")
    steady = [whole.Cut(layers=n, plain=[n] * 4, speculating=[0.5 * n] * 4) for n in (6, 3)]
    with pytest.raises(KitError, match="baseline is broken"):
        whole.ratio(*steady, 32, pair="p")


def test_a_cut_geometry_is_timed_twice_and_its_verdict_is_of_the_whole(tmp_path):
    (tmp_path / "big").mkdir()
    (tmp_path / "big" / "config.json").write_text(json.dumps(TINY | {"num_hidden_layers": 40}))
    asked = Params(profile={"geometry": str(tmp_path / "big"), "geometry_layers": 6, "batches": [8], "trace": False})
    subject = decode_plan.subject(asked, tmp_path / "models")
    assert (subject.layers, subject.fewer, subject.name) == (40, 3, "big, geometry only (6 of 40 layers)")
    plan = decode_plan.engines(asked, subject, tmp_path / "models")
    assert [(e.name, e.group) for e in plan] == [("plain", ""), ("3 draft tokens", ""), ("plain, 3 layers", "fewer"),
                                                 ("3 draft tokens, 3 layers", "fewer")]  # fmt: skip
    kept = [json.loads((Path(e.model) / "config.json").read_text())["num_hidden_layers"] for e in plan]
    assert kept == [6, 6, 3, 3]
    done = [Profiled(engine, [Point(8, 128, [ms / 1000] * 4, 1.0, 130.0)]) for engine, ms in
            zip(plan, (8.0, 12.6, 5.0, 9.0), strict=True)]  # fmt: skip
    ratios, _ = decode_plan.ratios(done, **DRAWS)
    assert ratios[8, 128, 3].value == pytest.approx(1.575) and len(ratios) == 1
    told, refused = decode_plan.whole_ratios(done, subject, **DRAWS)
    assert told[8, 128, 3].value == pytest.approx((12.6 + 34 * 1.2) / (8 + 34)) and refused == []
    assert [row["draft_tokens"] for row in decode_plan.step_rows(done, **DRAWS) if not row["group"]] == [0, 3]
    assert decode_rows.whole_rows(told, [], subject)["r of the whole"][0] < ratios[8, 128, 3].value
    assert decode_rows.told(subject, told, "GO: x") == f"{subject.name}, r of all 40 layers from two cuts. GO: x"
    alone = decode_rows.told(subject, {}, "NO-GO: x")
    assert "NOT OF THE WHOLE, for against 6 layers the draft weighs more than against 40" in alone and alone.endswith("NO-GO: x")
    failed = [done[0], replace(done[1], points=[], missing="x"), done[2], replace(done[3], points=[], missing="x")]
    assert [(e.group, e.points, e.model) for e in decode_plan.wider(failed)] == [
        ("", [(32, 128)], plan[0].model), ("fewer", [(32, 128)], plan[2].model)]  # fmt: skip
    # Side by side where they fit: embedding and head of 512 x 64 and 6 layers of 49,152 in float32, a tenth more, and 1 GiB.
    weights = 2 * 512 * 64 + 6 * 49_152
    assert decode_profile.gib(replace(plan[0], kv_cache_gib=1)) == pytest.approx(1 + 1.1 * 4 * weights / 2**30)
    assert decode_profile._fit([replace(one, kv_cache_gib=1) for one in plan])
    assert not decode_profile._fit([replace(one, kv_cache_gib=1024) for one in plan])
    assert decode_profile._fit([replace(one, kv_cache_gib=1024) for one in plan[:2]]), "without a second cut nothing is parted"
    assert decode_rows.told(subject, {}, "No verdict: x") == f"{subject.name}. No verdict: x"
    same = decode_plan.subject(Params(profile={"geometry": str(tmp_path / "big")}), tmp_path / "models")
    assert decode_rows.told(same, {}, "GO") == "big, geometry only. GO"
    assert "nothing was cut" in decode_rows.whole_rows({}, [], same)["not measured"][0]


# ---- The story, the forecast, the plan


def test_the_story_is_answered_from_the_public_record():
    told = story.answer()
    assert told.word == "GO BELOW" and told.at(32, 0) == "GO" and told.at(128, 32768) == "NO-GO"
    readings = story.readings()
    assert readings.implied_us == pytest.approx(51.5, abs=0.05) and readings.claimed.value == 0.515
    assert readings.saved.value < readings.cost.value < readings.claimed.value
    then = story.faster(decode_shares.NVLINK_US)
    assert then.plain_ms.value < story.plain_ms().value and then.r_then.value > then.r_now.value


def results(r=1.6, length=1.6, gained=(0.95, 0.9, 1.0)):
    figure = {"value": r, "unit": "", "kind": "measured", "source": "s", "low": r - 0.05, "high": r + 0.05, "n": 12}
    rows = [{"concurrency": 8, "context": context, "draft_tokens": 3, "r": figure | {"value": r + more, "low": r + more - 0.05,
             "high": r + more + 0.05}} for more, context in ((0, 64), (1, 2048))]
    served = {"acceptance_length": length, "acceptance_length_low": length - 0.1, "acceptance_length_high": length + 0.1,
              "prompts": 32, "speedup": gained[0], "speedup_interval": list(gained[1:])}
    return {"numbers": {"ratios": rows}}, {"numbers": served}


def test_a_forecast_is_held_against_what_was_measured():
    told = forecast.forecast(*results(), in_flight=8, draft_tokens=3)
    assert told.foretold.value == pytest.approx(1.0) and told.foretold.kind == "modelled" and told.measured.kind == "measured"
    assert told.agree and told.off == pytest.approx(1 / 0.95 - 1) and "context 64" in told.where
    assert "they agree" in told.words and "foretold 1.00" in told.words and "measured 0.95 (0.90 to 1.00)" in told.words
    wrong = forecast.forecast(*results(gained=(0.5, 0.48, 0.52)), in_flight=8, draft_tokens=3)
    assert not wrong.agree and "off by +100 %" in wrong.words
    table = forecast.rows(told)
    assert [row["value"] for row in table] == pytest.approx([1.0, 0.95, 1.6, 1.6])
    assert "breaks even" in table[3]["what"] and all(row["from"] < row["value"] < row["to"] for row in table)


def test_what_a_served_step_takes_outside_the_engine_is_told_where_the_forecast_fails():
    profiled, served_ = results(length=2.4, gained=(1.2, 1.15, 1.25))
    here = {"name": "plain", "group": "", "draft_tokens": 0, "batch": 8, "context": 64}
    here |= {"ms": 3.0, "low": 2.9, "high": 3.1, "steps": 9}
    others = [here | {"batch": 1, "ms": 1.0}, here | {"group": "fewer", "ms": 2.0}, here | {"draft_tokens": 3, "ms": 5.0}]
    profiled["numbers"]["steps"] = [*others, here]
    # Two waves: the longest answers have 100 and 150 tokens.
    answers = [[0] * 100, [0] * 40, [0] * 150]
    plain = served.Served(answers, [served.Wave([0, 1], 140, 0.5), served.Wave([2], 150, 0.75)], None, [])
    assert plain.words == "232.0 tokens/s"
    told = replace(plain, counted=Acceptance(drafts=100, accepted=(60, 30, 10))).words
    assert told == "232.0 tokens/s, acceptance length 2.00 (100 drafts)"
    step = served.plain_step(plain, resamples=200, seed=0)
    assert step.value == pytest.approx(5.0) and step.n == 2 and step.low <= step.value <= step.high
    served_["numbers"]["plain_step"] = asdict(step)
    told = forecast.forecast(profiled, served_, in_flight=8, draft_tokens=3)
    assert "a plain step took 5.00 ms as served and 3.00 ms in the engine alone" in told.words
    assert [row["value"] for row in forecast.rows(told)][-2:] == [5.0, 3.0]
    # A slowdown where a speedup was foretold has another reason.
    slower = {"numbers": served_["numbers"] | {"speedup": 0.6, "speedup_interval": [0.58, 0.62]}}
    assert "as served and" not in forecast.forecast(profiled, slower, in_flight=8, draft_tokens=3).words
    # Where forecast and measurement agree, or nothing is known of the steps, nobody is told.
    profiled, agreeing = results()
    agreeing["numbers"]["plain_step"] = asdict(step)
    assert "as served and" not in forecast.forecast(profiled, agreeing, in_flight=8, draft_tokens=3).words
    assert "as served and" not in forecast.forecast(profiled, served_, in_flight=8, draft_tokens=3).words


def test_why_there_is_no_forecast_is_said():
    profiled, served = results()
    other = forecast.forecast(profiled, served, in_flight=16, draft_tokens=3)
    assert "served 16 at once with 3 draft tokens" in other.words and "r at 8 at once with 3 draft tokens" in other.words
    assert "leave profile.batches" in other.words and forecast.rows(other) == [{"forecast": other.words}]
    none = forecast.forecast({"numbers": {"ratios": [], "refused": ["r = 0.8 for this"]}}, served, in_flight=8, draft_tokens=3)
    assert none.words == "no forecast: 01_allreduce_vs_speculation has no r (r = 0.8 for this)"
    # 01 may time a geometry of which nobody has the weights; its r is not the target's.
    llama, small = (asdict(dummy_target.geometry(dummy_target.config(name))) for name in ("llama-3.1-8b", "kimi-k2.5"))
    profiled["numbers"] |= {"profiled": "llama-3.1-8b, geometry only", "geometry": llama}
    assert forecast.forecast(profiled, served, in_flight=8, draft_tokens=3, shape=llama | {"tied": False}).agree
    another = forecast.forecast(profiled, served, in_flight=8, draft_tokens=3, shape=small)
    assert "timed llama-3.1-8b, geometry only, with width 4,096 (7,168 served), layers 32 (61 served)" in another.words
    assert "leave profile.geometry out" in another.words and forecast.rows(another) == [{"forecast": another.words}]
    # Fewer prompts than may be in flight are served all at once.
    assert forecast.forecast(profiled, {"numbers": served["numbers"] | {"prompts": 8}}, in_flight=64, draft_tokens=3).agree


def test_hours_come_from_earlier_runs_of_a_like_machine(tmp_path):
    def ran(run, stage, rate, finished, cores=2, model="m"):
        place = tmp_path / run / stage
        place.mkdir(parents=True)
        (place / "result.json").write_text(json.dumps({
            "run": run, "finished": finished, "numbers": {"tokens_per_second": rate}, "params": {"target.model": model},
            "provenance": {"machine": {"cores": cores, "gpus": []}}}))

    ran("old", "03_hidden_states", 500.0, "2026-01-01T00:00:00")
    ran("new", "03_hidden_states", 800.0, "2026-02-01T00:00:00")
    ran("bigger", "03_hidden_states", 9000.0, "2026-03-01T00:00:00", cores=64)
    ran("other", "06_training", 7000.0, "2026-03-01T00:00:00", model="another")
    found = rates.earlier(tmp_path, machine={"cores": 2, "gpus": []}, target={"target.model": "m"})
    [(work, rate)] = found.items()
    assert work == "extracting hidden states" and rate.tokens_per_second == 800.0 and "run new of 2026-02-01" in rate.source
    best = rates.at_best(1e12, weights=100_000_000, draft_weights=10_000_000, draft_steps=3)
    assert best[work].tokens_per_second == 5000 and best["training"].tokens_per_second == pytest.approx(1e12 / 1.8e8)
    rows = rates.hours(best | found, tokens=288_000, epochs=4)
    assert [(row.work, row.tokens, row.bound) for row in rows] == [
        ("extracting hidden states", 288_000, False), ("training", 1_152_000, True)]
    assert rows[0].hours == pytest.approx(0.1)


def test_what_a_draft_costs_says_whose_hours_and_how_sure():
    hours = [{"hours": 0.5, "how": "measured by an earlier run"}, {"hours": 1.5, "how": "measured on the spot"}]
    plan = {"hours": hours, "needed_gib": 3.0, "inventory": {"gpus": []}}
    cost = decode_rows.cost(plan)
    assert (cost.gpu_hours, cost.disk_gib, cost.hours_of) == (2.0, 3.0, "machine")
    assert "the most tokens there can be, at measured rates and rates timed there for some seconds" in cost.source
    known = decode_rows.cost(plan | {"hours": hours[:1], "inventory": {"gpus": [{"name": "x"}]}})
    assert known.hours_of == "GPU" and known.source.endswith("at measured rates")
    assert decode_rows.cost(plan | {"hours": hours[1:]}).source.endswith("at rates timed there for some seconds")
    modelled = decode_rows.cost(plan | {"hours": [*hours, {"hours": 1.0, "how": "modelled"}]})
    assert modelled.source.endswith("at the best rates that its arithmetic allows")


def test_a_draft_for_a_named_geometry_has_a_price_without_its_weights(tmp_path):
    kimi = Params(profile={"geometry": "kimi-k2.5", "geometry_layers": 3, "geometry_experts": 8})
    name = "kimi-k2.5, geometry only (3 of 61 layers, 8 of 384 experts)"
    assert decode_plan.subject(kimi, tmp_path / "kimi").name == name
    (tmp_path / "tiny.json").write_text(json.dumps(TINY | {"num_hidden_layers": 400}))
    asked = Params(profile={"geometry": str(tmp_path / "tiny.json"), "geometry_layers": 3}, target={"dtype": "float32"},
                   dataset={"samples": 1000, "max_length": 2000}, training={"tokens_per_step": 2048})
    subject = decode_plan.subject(asked, tmp_path / "models")
    cost = decode_rows.geometry_cost(asked, subject, tmp_path)
    states = 4 * 64 * 4 * 1000 * 2000 / 2**30
    assert states < cost.disk_gib < states + 0.1 and "1,000 conversations of 2,000 tokens" in cost.source
    cut = decode_rows.geometry_cost(asked, replace(subject, layers=3), tmp_path)
    assert cut.gpu_hours < cost.gpu_hours / 2, "the price is of the whole"


def test_arithmetic_is_measured_here():
    assert 1e8 < rates.arithmetic(64, "float32", seconds=0.05) < 1e16


# ---- The engine itself


@pytest.mark.slow
def test_engines_that_start_together_are_measured_one_after_another_and_beside_no_start(tmp_path):
    model = dummy_target.write(tmp_path / "target", TINY)
    engine = Engine(name="one", model=str(model), points=[(2, 8)], steps=400, kv_cache_gib=1)
    # A cache of 32,768 tokens of 32 KiB holds no 128 sequences with room for 400 steps.
    large = dummy_target.write(tmp_path / "large", TINY | {"num_hidden_layers": 8, "num_key_value_heads": 4, "head_dim": 128})
    wide = replace(engine, name="wide", model=str(large), points=[(128, 16), (2, 8)])  # which spoils nothing after it
    found = decode_profile._together([engine, wide], tmp_path / "engines", True, 240)
    assert [one.engine.name for one in found] == ["one", "wide"] and found[0].missing == ""
    assert "do not fit together" in found[1].missing and "raise server.kv_cache_gib" in found[1].missing
    spans = []
    for one in found:
        [point] = one.points
        place = tmp_path / "engines" / one.engine.name
        ended = (place / "answer.json").stat().st_mtime
        spans.append((ended - sum(point.seconds), ended, (place / "request.json").stat().st_mtime + one.start_seconds))
    spans.sort(key=lambda span: span[1])
    assert spans[1][0] > spans[0][1] - 0.1  # one after another
    assert all(begun > started for begun, *_ in spans for *_, started in spans)  # and when all are up
    assert not list((tmp_path / "engines" / "starting").iterdir())


def test_an_engine_that_never_starts_keeps_nobody_waiting(tmp_path):
    marks = tmp_path / "starting"
    marks.mkdir()
    (marks / "0").touch()
    begun = time.monotonic()
    turn = {"file": str(tmp_path / "turn"), "mark": str(marks / "0"), "seconds": 1}
    model = dummy_target.write(tmp_path / "target", TINY)
    engine = asdict(Engine(name="slow", model=str(model), points=[(1, 8)], kv_cache_gib=1))
    asked = {"engines": [engine], "cpu": True, "turn": turn}
    answer, why = child.call("eagle3kit.stepping", asked, tmp_path / "slow", timeout_s=90)
    assert "ended with code" in why and not answer["engines"][0]["done"] and time.monotonic() - begun < 60
    assert "Timeout" in (tmp_path / "slow" / "log.txt").read_text()


def test_a_child_that_nobody_waits_for_any_more_is_ended(tmp_path):
    stop = Event()
    stop.set()
    with pytest.raises(KitError, match="left no answer"):
        child.call("eagle3kit.stepping", {"engines": [], "cpu": True}, tmp_path, timeout_s=60, stop=stop)


@pytest.mark.slow
def test_two_ranks_of_vllm_are_stepped_and_traced(tmp_path):
    model = dummy_target.write(tmp_path / "target", TINY)
    engine = Engine(name="tiny", model=str(model), points=[(2, 8)], traced=[(2, 8)], steps=6, tensor_parallel=2, kv_cache_gib=1)
    without = replace(engine, name="tiny, gloo only", custom_allreduce=False)
    found, switched = decode_profile.measure([engine, without], tmp_path / "engines", timeout_s=240)
    assert found.missing == "" and found.start_seconds > 0
    [point] = found.points
    assert point == found.at(2, 8) and len(point.seconds) == 6 and min(point.seconds) > 0 and point.tokens_per_step == 1.0
    assert point.tokens_held > 8 and found.at(1, 8) is None
    [trace] = found.traces
    assert len(trace.files) == 2 and trace.steps == 6
    [(profiles, comparison)] = decode_rows.windows([found])
    # The switch switches: vLLM's own all-reduce is shared memory, without it the ranks reduce by gloo, as often.
    names = {k.name for one in profiles for k in one.kernels if k.bucket == "all-reduce"}
    saved = decode_shares.saving([found, switched], 5)
    if why := cpu.no_shared_memory():  # nothing to switch: no A/B of a thing with itself
        assert switched.missing.startswith(why) and saved is None and "gloo:all_reduce" in names
    else:
        assert switched.missing == ""
        [(by_gloo, other)] = decode_rows.windows([switched])
        others = {k.name for one in by_gloo for k in one.kernels if k.bucket == "all-reduce"}
        assert names == {"_C::shm_allreduce"} and "gloo:all_reduce" in others and not names & others
        assert other.instances == comparison.instances
        assert saved.usual_ms.kind == "measured" and saved.share.low < saved.share.value < saved.share.high
    assert [p.rank for p in profiles] == [0, 1] and all(p.unaccounted <= 0.01 for p in profiles)
    # The embedding and two a layer, in each of the whole steps between the annotations, less the first.
    assert comparison.instances == 4 * (2 * 2 + 1) and comparison.steps == 4
    assert all(p.buckets["dense matmul"].count and p.buckets["attention"].count for p in profiles)
    here = decode_shares.readings([(profiles, comparison)], None)
    kernel, bare, switched = here.values()
    assert 0 < bare.value <= kernel.value < 1 and switched is None
    assert traces.DECODE_STEP  # the steps were found by vLLM's own annotation, or `steps` would be None
    gone = Profiled(replace(engine, traced=[]), traces=[Trace(2, 8, 6, [str(tmp_path / "gone.json")] * 2)])
    with pytest.raises(KitError, match="gone.json"):
        decode_rows.windows([gone])


@pytest.mark.slow
def test_cuts_that_kill_their_child_are_measured_apart(tmp_path):
    models = [dummy_target.write(tmp_path / name, TINY | {"architectures": ["NoSuchModel"]}) for name in ("large", "small")]
    both = [Engine(name=model.name, model=str(model), points=[(1, 8)], group=group, kv_cache_gib=1)
            for model, group in zip(models, ("", "fewer"), strict=True)]  # fmt: skip
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(decode_profile.measure, both, tmp_path / "engines", timeout_s=120)
        while not (tmp_path / "engines" / "large" / "answer.json").is_file():
            assert not asked.done()
            time.sleep(0.05)
        [stepping] = [p for p in psutil.Process().children(recursive=True)
                      if "eagle3kit.stepping" in p.cmdline() and "eagle3kit.guard" not in p.cmdline()]  # fmt: skip
        stepping.kill()
        with pytest.raises(KitError, match=r"no engine could be measured; .*again"):
            asked.result()
    for name in ("large", "small"):
        [left] = json.loads((tmp_path / "engines" / "again" / name / "request.json").read_text())["engines"]
        [given] = json.loads((tmp_path / "engines" / "again" / name / "answer.json").read_text())["engines"]
        assert left["name"] == name and given["missing"].startswith("ValidationError") and given["points"] == []
