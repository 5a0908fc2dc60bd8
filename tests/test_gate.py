"""The one-sample gate with real vLLM and speculators: it holds for a sound kit, and says what is wrong where it does not."""

import pytest
import wholepass

from eagle3kit import gate
from eagle3kit.acceptance import from_steps
from eagle3kit.params import Params


@pytest.mark.slow
def test_one_sample_learned_by_heart_is_served_whole(tmp_path, monkeypatch):
    for name, value in wholepass.ONE_PROCESS.items():
        monkeypatch.setenv(name, value)
    taught = wholepass._finished  # whoever served before us in this process has taught one already
    target = taught[0].target if taught else wholepass.make_taught_target(tmp_path / "target")
    params = Params(
        target={"model": str(target)}, vocabulary={"size": 256},
        dataset={"sources": wholepass.write_chats(tmp_path), "max_length": 128, "max_new_tokens": 32, "samples": 20},
        server={"kv_cache_gib": 1, "max_num_seqs": 8, "threads": 1}, acceptance={"draft_tokens": 3},
    )  # fmt: skip
    lines: list[str] = []
    found = gate.run(params, tmp_path / "gate", lines.append)
    assert found.knows and found.same_answer and found.passed, found.words
    assert found.answer_tokens >= gate.SHORTEST and found.served.length > 3.5
    assert found.steps and all(step == 3 for step in found.steps[:-1]) and "every block accepted whole" in found.words
    assert sorted(path.name for path in found.draft.iterdir()) == ["config.json", "model.safetensors"]
    assert any("extracting their states" in line for line in lines) and any("epoch 1 of" in line for line in lines)


WHOLE = [3, 3, 3, 2]
BROKEN = [3, 2, 3, 3, 1]


def some_gate(tmp_path, *, learned=WHOLE, served=WHOLE, told=True, same=True) -> gate.Gate:
    return gate.Gate("one", 40, 17, learned, from_steps(served, 3), served if told else None, same, tmp_path / "draft")


@pytest.mark.parametrize("told", [True, False])
def test_blocks_must_be_whole_but_for_the_last(tmp_path, told):
    assert some_gate(tmp_path, told=told).passed and some_gate(tmp_path, served=[3, 3, 3, 3], told=told).passed
    broken = some_gate(tmp_path, served=BROKEN, told=told)
    assert not broken.passed and "NOT SERVED AS TRAINED" in broken.words and "eagle3kit check" in broken.words
    assert not some_gate(tmp_path, served=[0] * 16, told=told).passed


def test_what_is_not_learned_or_answered_otherwise_is_not_blamed_on_serving(tmp_path):
    assert some_gate(tmp_path, learned=BROKEN, served=BROKEN).words.startswith("NOT LEARNED")
    # The same sums as of a whole answer, and yet a block broke.
    assert from_steps([3, 3, 1, 3], 3) == from_steps([3, 3, 3, 1], 3) and not some_gate(tmp_path, learned=[3, 3, 1, 3]).knows
    other = some_gate(tmp_path, same=False)
    assert not other.passed and other.words.startswith("OTHER ANSWER")
    assert not some_gate(tmp_path, learned=[]).knows
