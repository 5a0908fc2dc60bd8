"""Bad input, through the real command line: one clear message with the way out, an exit code, and nothing earlier lost.

What is wrong before the first notebook costs no kernel; what a notebook finds is told by the pass in one line.
"""

import json
import shutil

import pytest
from tinymodel import make_tiny_target
from wholepass import Door

pytestmark = pytest.mark.slow
GOOD = 40


def chat(number: int, answer: str = "It is well.") -> dict:
    question = f"Write sentence {number}"
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


BAD = {
    "no answer": {"messages": [{"role": "user", "content": "Who are you?"}]},
    "unknown role": {"messages": [{"role": "narrator", "content": "Once"}, {"role": "assistant", "content": "Yes."}]},
    "empty answer": {"messages": [{"role": "user", "content": "And you?"}, {"role": "assistant", "content": " \n"}]},
}
LONG = chat(GOOD + 1, "The quick brown fox jumps over the lazy dog. " * 20)


@pytest.fixture(scope="module")
def door(tmp_path_factory) -> Door:
    """A run whose first stage is done, with a dataset of the user's own whose answers are kept: no server is needed."""
    door = Door(tmp_path_factory.mktemp("bad input"))
    model = make_tiny_target(door.home / "target", hidden=128)
    rows = [chat(number) for number in range(GOOD)]
    write(door, "good.jsonl", [*rows, LONG])
    write(door, "bad.jsonl", [*rows[:4], BAD["no answer"], BAD["unknown role"], *rows[4:], BAD["empty answer"], LONG])
    door.write(run="bad", target={"model": str(model)},
               dataset={"sources": [str(door.home / "good.jsonl")], "max_length": 64, "regenerate": False},
               profile={"plan_seconds": 0})  # fmt: skip
    ran = door.run("run", door.file, "--only", "00")
    assert ran.code == 0, ran.printed
    return door


def write(door: Door, name: str, rows: list[dict]) -> None:
    (door.home / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def refused(door: Door, stage: str, *overrides: str):
    """The line in which a pass tells that a stage failed; asserts all that must hold of any failure."""
    earlier = door.outputs / "bad" / "00_machine" / "result.json"
    first = earlier.read_bytes() if stage != "00" else b""
    ran = door.run("run", door.file, "--only", stage, *(part for text in overrides for part in ("-p", text)))
    line = next(line for line in ran.lines if line.startswith("["))
    assert ran.code == 1 and "FAILED after" in line and ran.left() == [], ran.printed
    told = [other for other in ran.lines if not other.startswith("note: ")]  # of stages before it that are out of date
    assert "Traceback" not in ran.printed and "  log: outputs/bad/" in line and len(told) <= 4, ran.printed
    name = line.split()[1]
    failure = json.loads((door.outputs / "bad" / name / "failure.json").read_text())
    assert failure["cause"] in line and not (door.outputs / "bad" / name / "result.json").exists()
    report = (door.outputs / "bad" / "index.html").read_text()
    assert "FAILED" in report
    assert stage == "00" or earlier.read_bytes() == first, "what was done stands"
    return line


# ---- Parameters: nothing is started


@pytest.mark.parametrize(
    "override, words",
    [
        ("training.epohcs=3", "unknown parameter 'training.epohcs'; did you mean 'training.epochs'?"),
        ("trianing.epochs=3", "did you mean 'training"),
        ("acceptance.draft_tokens=9", "acceptance.draft_tokens"),
        ("dataset.held_out_percent=0", "dataset.held_out_percent"),
        ("training.learning_rate=.nan", "training.learning_rate"),
        ("hidden_states.layers=[2, 2, 5]", "layers must rise, none twice; try [2, 5]"),
        ("hidden_states.layers=[5, 2]", "layers must rise, none twice; try [2, 5]"),
        ("hidden_states.layers=[-1, 2]", "hidden_states.layers"),
        ("vocabulary.size=0", "vocabulary.size"),
        ("run=../elsewhere", "letters, digits"),
    ],
)
def test_a_parameter_that_cannot_be_is_refused_before_anything_starts(door, override, words):
    before = sorted(door.outputs.rglob("*"))
    ran = door.run("run", door.file, "-p", override)
    assert ran.code == 2 and words in ran.printed and ran.printed.startswith("eagle3kit: "), ran.printed
    assert "Traceback" not in ran.printed and not ran.family and sorted(door.outputs.rglob("*")) == before
    if override == "acceptance.draft_tokens=9":
        assert "9" in ran.printed and "8" in ran.printed, "the value and the range"


# ---- The target


def test_layers_that_the_target_does_not_have(door):
    line = refused(door, "03", "hidden_states.layers=[2, 4, 8]")
    assert "hidden_states.layers: 8 is out of range; the target has 8 layers, so ids run from 0 to 7" in line


def test_a_target_that_is_not_there_or_cut_short(door):
    line = refused(door, "00", f"target.model={door.home / 'nowhere'}")
    assert "no target" in line and str(door.home / "nowhere") in line and "Set target.model" in line
    broken = shutil.copytree(door.home / "target", door.home / "cut short")
    whole = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    line = refused(door, "00", f"target.model={broken}")
    assert "cut short/model.safetensors" in line
    ran = door.run("run", door.file, "--only", "00")
    assert ran.code == 0, "and with the right target all is well again"


def test_a_target_that_vllm_cannot_load_is_told_in_the_servers_own_words(door):
    broken = shutil.copytree(door.home / "target", door.home / "a layer short")
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 9}))
    line = refused(door, "02", f"target.model={broken}", "dataset.regenerate=true")
    assert "vLLM ended with code" in line and "vllm.log" in line
    assert "layers.8" in line.partition("the end of its log")[2], "the reason, not only that there was one"


# ---- The dataset


def test_a_source_that_does_not_exist(door):
    assert f"there is no file {door.home / 'none.jsonl'}" in refused(door, "02", f"dataset.sources=[{door.home / 'none.jsonl'}]")
    line = refused(door, "02", "dataset.sources=[mt-bnch]")
    assert "'mt-bnch' is no source. Did you mean mt-bench? Accepted: a bundled name (" in line


def test_rows_without_answer_of_unknown_roles_or_empty_stop_the_stage_by_number(door):
    source = door.home / "bad.jsonl"
    line = refused(door, "02", f"dataset.sources=[{source}]")
    assert "3 of 44 rows (6.82 %) are unusable, dataset.allowed_bad_percent is 1" in line
    assert f"{source} row 5, messages: no assistant turn" in line
    assert f"{source} row 6, messages[0].role: unknown role 'narrator'; known: system, user, assistant" in line
    assert f"{source} row 44" not in line and f"row {GOOD + 3}, messages[1].content: an empty answer" in line
    assert "Mend the rows, or allow more" in line


def test_rows_that_are_allowed_to_be_bad_are_listed_and_long_ones_cut_and_counted(door):
    ran = door.run("run", door.file, "--only", "02", "-p", f"dataset.sources=[{door.home / 'bad.jsonl'}]",
                   "-p", "dataset.allowed_bad_percent=10")  # fmt: skip
    assert ran.code == 0, ran.printed
    numbers = door.result("02_dataset", "bad")["numbers"]
    assert (numbers["rows"], numbers["rejected"], numbers["train"] + numbers["held_out"]) == (44, 3, 41)
    from eagle3kit import target
    from eagle3kit.conversations import read_samples

    samples = [s for side in ("train", "held_out") for s in read_samples(door.outputs / "bad" / "02_dataset" / f"{side}.parquet")]
    whole = target.tokenizer(door.home / "target").apply_chat_template(LONG["messages"], tokenize=True, return_dict=False)
    assert max(len(sample.input_ids) for sample in samples) == 64
    assert numbers["cut_samples"] == 1 and 0 <= len(whole) - 64 - numbers["cut_tokens"] <= 1, "a line break may follow the turn"
    report = (door.outputs / "bad" / "02_dataset" / "report.html").read_text()
    for words in ("no assistant turn", "narrator", "an empty answer", "1 samples were cut"):
        assert words in report


# ---- The vocabulary


def test_a_vocabulary_larger_than_the_targets(door):
    if not (door.outputs / "bad" / "02_dataset" / "result.json").exists():
        assert door.run("run", door.file, "--only", "02").code == 0
    line = refused(door, "04", "vocabulary.size=513")
    assert "vocabulary.size is 513, but the target has only 512 tokens; choose at most 512" in line
