"""The one-sample gate with real vLLM and speculators: it holds for a sound kit, and says what is wrong where it does not."""

import pytest
import wholepass

from eagle3kit import gate
from eagle3kit.acceptance import Acceptance, from_steps
from eagle3kit.params import Params


@pytest.mark.slow
def test_one_sample_learned_by_heart_is_served_whole(tmp_path):
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


def some_gate(tmp_path, *, learned, served, steps=None, same=True) -> gate.Gate:
    return gate.Gate("one", 40, 17, learned, served, steps, same, tmp_path / "draft")


WHOLE = Acceptance(drafts=4, accepted=(4, 4, 3))


def test_blocks_must_be_whole_but_for_the_last(tmp_path):
    assert some_gate(tmp_path, learned=WHOLE, served=WHOLE, steps=[3, 3, 3, 2]).passed
    assert some_gate(tmp_path, learned=WHOLE, served=WHOLE).passed
    broken = some_gate(tmp_path, learned=WHOLE, served=from_steps([3, 2, 3, 3, 1], 3), steps=[3, 2, 3, 3, 1])
    assert not broken.passed and "NOT SERVED AS TRAINED" in broken.words and "eagle3kit check" in broken.words
    assert not some_gate(tmp_path, learned=WHOLE, served=from_steps([0] * 9, 3)).passed


def test_what_is_not_learned_or_answered_otherwise_is_not_blamed_on_serving(tmp_path):
    half = from_steps([1, 2, 3, 0], 3)
    assert some_gate(tmp_path, learned=half, served=half).words.startswith("NOT LEARNED")
    other = some_gate(tmp_path, learned=WHOLE, served=WHOLE, same=False)
    assert not other.passed and other.words.startswith("OTHER ANSWER")
    assert not some_gate(tmp_path, learned=from_steps([], 3), served=WHOLE).knows
