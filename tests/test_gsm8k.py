"""Word problems as a source: from a file put into the cache, checked by its hash; without hub and file, a way out."""

import json

import pytest

from eagle3kit import sources
from eagle3kit.conversations import load
from eagle3kit.errors import KitError
from eagle3kit.files import sha256


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("EAGLE3KIT_CACHE", str(tmp_path))
    (tmp_path / "artefacts").mkdir()
    return tmp_path / "artefacts" / sources.GSM8K


def test_questions_become_prompts_and_answers_stay_out(place, monkeypatch):
    rows = [{"question": f"How much is {n} and {n}?", "answer": f"<<{n}+{n}={2 * n}>>{2 * n}\n#### {2 * n}"} for n in range(9)]
    place.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(sources, "GSM8K_SHA256", sha256(place))
    loaded = load(["gsm8k"], 100, 0, True)
    assert loaded.counts["gsm8k"] == {"rows": 9, "unusable": 0, "duplicates": 0, "usable": 9, "used": 9}
    said = [message for conversation in loaded.conversations for message in conversation.messages]
    assert sorted(message["content"] for message in said) == sorted(row["question"] for row in rows)
    assert {message["role"] for message in said} == {"user"}


def test_another_file_in_its_place_is_refused(place):
    place.write_text(json.dumps({"question": "Whose file is this?"}) + "\n")
    with pytest.raises(KitError, match=r"gsm8k-train.jsonl is not .*train.jsonl .*: its sha256 is .*, expected 17f347dc"):
        load(["gsm8k"], 10, 0, True)


def test_without_hub_and_file_both_ways_are_named(place, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    words = r"openai/gsm8k .*cannot be had from the data hub.*or put .*train.jsonl.*17f347dc.* at .*gsm8k"
    with pytest.raises(KitError, match=words):
        load(["gsm8k"], 10, 0, True)


def test_a_slip_of_the_pen_is_told(tmp_path):
    with pytest.raises(KitError, match="Did you mean gsm8k"):
        sources.rows("gsm8")
