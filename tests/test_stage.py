"""A stage's folder: nothing half-written, nothing that is not a number, and every reason to run again noticed."""

import json
import os
import time

import pytest
from conftest import OPEN, PARAMETERS

from eagle3kit import KitError, fingerprint, open_stage
from eagle3kit.params import Params


@pytest.fixture
def opened(kit, monkeypatch):
    """Open a stage in this process: opened("01_a") -> its parameters and stage, every cell counted as executed."""
    monkeypatch.setenv("EAGLE3KIT_ROOT", str(kit.root))
    monkeypatch.setenv("EAGLE3KIT_OUTPUTS", str(kit.root / "outputs"))
    monkeypatch.setattr(fingerprint, "LOADED", time.time() + 3600)  # sources being edited beside us do not matter here

    def open_in_this_process(name: str, parameters: str = PARAMETERS):
        kit.notebook(name)
        namespace: dict = {"In": ["", parameters, OPEN.format(stage=name), 'stage.finish("ended")']}
        exec(parameters, namespace)
        return open_stage(name, namespace)

    return open_in_this_process


def stale(kit, name: str, **changes) -> str | None:
    params = Params.model_validate({"run": "cpu", **changes})
    return fingerprint.stale(kit.root / "outputs" / "cpu" / name, params, kit.root / "notebooks" / f"{name}.ipynb")


def test_a_result_holds_what_a_reader_needs_and_still_holds(opened, kit):
    params, stage = opened("01_a")
    assert params.training.epochs == 8
    stage.file("states/x.pt").write_bytes(b"12345")
    assert stage.finish("all well", share=0.5, table=[1, {"a": None}]) == "all well"
    result = kit.result("01_a", "cpu")
    assert (result["stage"], result["headline"]) == ("01_a", "all well")
    assert result["numbers"] == {"share": 0.5, "table": [1, {"a": None}]}
    parts = result["fingerprint"]
    assert parts["params"] == {"training.epochs": 8} and parts["artefacts"] == {"states/*.pt": [1, 5]}
    assert "eagle3kit.stage" in parts["sources"] and parts["versions"]["torch"]
    assert result["provenance"]["machine"]["cores"] >= 1
    assert stale(kit, "01_a") is None
    assert [path.name for path in stage.dir.iterdir() if path.name.startswith(".")] == []


def test_numpy_scalars_are_numbers(opened, kit):
    import numpy

    opened("01_a")[1].finish("x", a=numpy.float32(0.5), b=numpy.int64(3))
    assert kit.result("01_a", "cpu")["numbers"] == {"a": 0.5, "b": 3}


@pytest.mark.parametrize(
    "value, words",
    [
        (float("nan"), "01_a: loss is nan: a result must be a finite number"),
        ([1.0, float("inf")], r"01_a: loss\[1\] is inf"),
        ({"step": float("-inf")}, "01_a: loss.step is -inf"),
        (object(), "01_a: loss is a object"),
    ],
)
def test_what_json_cannot_hold_is_refused_by_name_and_the_old_result_stands(opened, kit, value, words):
    _, stage = opened("01_a")
    stage.finish("first")
    with pytest.raises(KitError, match=words):
        stage.finish("second", loss=value)
    with pytest.raises(KitError, match="headline"):
        stage.finish(" ")
    assert kit.result("01_a", "cpu")["headline"] == "first"


def test_an_input_that_is_missing_names_the_stage_to_run(opened, kit):
    opened("02_dataset")
    _, stage = opened("03_states")
    with pytest.raises(
        KitError, match="02_dataset, which has not finished.*notebooks/02_dataset.ipynb.*--only 02_data"
    ):
        stage.input("02_dataset", "train.parquet")
    with pytest.raises(KitError, match="'02_dtaset', which is no notebook; there are: 02_dataset, 03_states"):
        stage.result("02_dtaset")
    opened("02_dataset")[1].finish("done")
    with pytest.raises(KitError, match="train.parquet, but 02_dataset finished without it.*--only 02_dataset"):
        stage.input("02_dataset", "train.parquet")
    assert stage.result("02_dataset")["headline"] == "done"


def test_a_stage_keeps_to_its_own_folder(opened):
    with pytest.raises(KitError, match="outside the stage's folder"):
        opened("01_a")[1].file("../02_b/x")


def test_a_stage_without_a_notebook_is_refused(opened):
    with pytest.raises(KitError, match="there is no .*02_b.ipynb; use the notebook's own name"):
        opened("01_a")
        open_stage("02_b", {})


def test_every_reason_to_run_again_is_told(opened, kit, monkeypatch):
    assert stale(kit, "01_a") == "not run yet"
    opened("01_a")[1].finish("x")
    params, stage = opened("02_b")
    template = kit.root / "template.jinja"
    template.write_text("{{ x }}")
    stage.outside("template.jinja")
    stage.result("01_a")
    stage.file("states.pt").write_bytes(b"123")
    assert params.training.epochs and params.vocabulary.size
    stage.finish("y")

    assert stale(kit, "02_b") is None
    assert stale(kit, "02_b", run="another", acceptance={"prompts": 3}) is None, "not read, so no reason"
    assert stale(kit, "02_b", training={"epochs": 9}) == "training.epochs is 9, was 8"
    template.write_text("{{ y }}")
    assert "template.jinja changed" in stale(kit, "02_b")
    template.write_text("{{ x }}")
    (stage.dir / "states.pt").write_bytes(b"12")
    assert stale(kit, "02_b") == "02_b/*.pt is not as the stage left it"
    (stage.dir / "states.pt").write_bytes(b"123")
    for around in ("log.txt", "report.html", "notebook.ipynb", "failure.json"):
        (stage.dir / around).write_text("x")
    assert stale(kit, "02_b") is None

    kit.notebook("02_b", "# a comment, and space\n\nstage.finish( 'ended' )")
    assert stale(kit, "02_b") is None, "what Python does not see is no reason"
    kit.notebook("02_b", "stage.finish('ended otherwise')")
    assert stale(kit, "02_b") == "the notebook changed"
    kit.notebook("02_b")
    monkeypatch.setattr(fingerprint, "versions", lambda: {"torch": "9"})
    assert "is 9, was 2" in stale(kit, "02_b") or "is None, was" in stale(kit, "02_b")
    monkeypatch.undo()
    monkeypatch.setenv("EAGLE3KIT_ROOT", str(kit.root))
    opened("01_a")[1].finish("x")
    assert stale(kit, "02_b") == "01_a ran again"
    (stage.dir / "result.json").write_text("{")
    assert stale(kit, "02_b") == "result.json cannot be read"


def test_a_result_of_cells_changed_by_hand_is_not_taken_for_the_notebook_s(opened, kit):
    kit.notebook("01_a")
    namespace: dict = {"In": ["", PARAMETERS, OPEN.format(stage="01_a"), 'stage.finish("tried something")']}
    exec(PARAMETERS, namespace)
    open_stage("01_a", namespace)[1].finish("tried something")
    assert stale(kit, "01_a") == "the notebook changed"


def test_source_that_changed_after_it_was_loaded_is_not_taken_for_what_ran(opened, kit, monkeypatch):
    monkeypatch.setattr(fingerprint, "LOADED", 0.0)
    opened("01_a")[1].finish("x")
    assert "changed" in stale(kit, "01_a")


def test_comparing_runs_sees_them_all_and_notices_a_new_one(opened, kit):
    opened("01_a")[1].finish("x", loss=2)
    opened("01_a", PARAMETERS.replace('"cpu"', '"other"'))[1].finish("x", loss=1)
    _, stage = opened("09_compare")
    found = stage.runs()
    assert {run: done["01_a"]["numbers"]["loss"] for run, done in found.items()} == {"cpu": 2, "other": 1}
    stage.finish("other is better")
    assert stale(kit, "09_compare") is None
    opened("01_a", PARAMETERS.replace('"cpu"', '"third"'))[1].finish("x", loss=0)
    assert stale(kit, "09_compare") == "other runs changed"


def test_the_log_is_a_line_at_once(opened, capfd):
    opened("01_a")[1].log("200 samples")
    assert capfd.readouterr().out == "200 samples\n"


def test_results_do_not_depend_on_the_current_folder(opened, kit, monkeypatch):
    for place in ("/", kit.root, kit.root / "notebooks"):
        monkeypatch.chdir(place)
        assert opened("01_a")[1].dir == kit.root / "outputs" / "cpu" / "01_a"
        assert os.listdir(kit.root / "notebooks") == ["01_a.ipynb"]


def test_a_result_is_plain_json(opened, kit):
    opened("01_a")[1].finish("x", loss=1e-9)
    text = (kit.root / "outputs" / "cpu" / "01_a" / "result.json").read_text()
    json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
