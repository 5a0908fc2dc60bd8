"""Every door to the parameters: files, the command line, a notebook's globals as papermill fills them."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conftest import PARAMETERS, REPOSITORY
from papermill.translators import PythonTranslator

from eagle3kit import KitError, params_text
from eagle3kit.params import Params

DEFAULTS = Params()


def injected(sent: dict) -> dict:
    """A notebook's globals after its parameters cell and papermill's injected one, made by papermill's translator."""
    cell = PythonTranslator.codify(sent, "Parameters")
    namespace: dict = {"In": ["", PARAMETERS, cell]}
    exec(PARAMETERS + cell, namespace)
    return namespace


def from_file(tmp_path: Path, text: str) -> Params:
    path = tmp_path / "p.yaml"
    path.write_text(text)
    return Params.load(path)


# The table of what YAML makes of what people write: text -> parameter and value, or the words of the error.
DRIFT = [
    ("training: {learning_rate: 1e-4}", "training.learning_rate", 1e-4),
    ("training: {learning_rate: 1.0e-4}", "training.learning_rate", 1e-4),
    ("dataset: {regenerate: no}", "dataset.regenerate", False),
    ("dataset: {regenerate: 'false'}", "dataset.regenerate", False),
    ("target: {revision: 1e5}", "target.revision", "1e5"),
    ("target: {revision: 2026-11-02}", "target.revision", "2026-11-02"),
    ("run: '007'", "run", "007"),
    ("run: 007", None, "run is 7: should be a valid string; put it in quotes"),
    ("target: {model: on}", None, "target.model is True: should be a valid string"),
    ("training: {weight_decay: nan}", None, "should be a finite number"),
    ("training: {weight_decay: .inf}", None, "should be a finite number"),
    ("dataset: {samples: yes}", None, "dataset.samples is True: should be a number, not true or false"),
    ("training: {learning_rate: true}", None, "should be a number, not true or false"),
    ("dataset: {samples: 1e2}", None, "dataset.samples is '1e2': should be a valid integer"),
    ("dataset: {samples: 1.5}", None, "dataset.samples is 1.5: should be a valid integer"),
    ("dataset: {sources: mt-bench}", None, "dataset.sources is 'mt-bench': should be a valid list"),
]


@pytest.mark.parametrize("text, name, expected", DRIFT, ids=[row[0] for row in DRIFT])
def test_what_yaml_makes_of_a_value_is_put_right_or_refused(tmp_path, text, name, expected):
    doors = [lambda: from_file(tmp_path, text)]
    sent = yaml.load(text, Loader=params_text._Loader)
    doors.append(lambda: Params.from_namespace(injected(sent)))
    for door in doors:
        if name is None:
            with pytest.raises(KitError) as error:
                door()
            assert expected in str(error.value) or "NaN and infinity are not allowed" in str(error.value)
        else:
            assert door().leaves()[name] == expected


MISTAKES = [
    ({"trainign": {}}, "unknown parameter 'trainign'; did you mean 'training'?"),
    ({"training": {"epohcs": 3}}, "unknown parameter 'training.epohcs'; did you mean 'training.epochs'?"),
    ({"samples": 3}, "did you mean 'dataset.samples'?"),
    ({"smaples": 3}, "did you mean 'dataset.samples'?"),
    ({"training": {"zzz": 1}}, "known in training: epochs, learning_rate"),
    ({"training": 5}, "training is 5: a section is written {key: value}"),
    ({"training": {"epochs": 0}}, "training.epochs is 0: should be greater than or equal to 1 (passes over the"),
    ({"training": {"loss": "kl"}}, "training.loss is 'kl': should be 'kl_div'"),
    ({"run": "../x"}, "run is '../x'"),
    ({"hidden_states": {"layers": [2, 15, 15]}}, "layers must rise, none twice; try [2, 15]"),
    ({"hidden_states": {"layers": [15, 2]}}, "layers must rise, none twice; try [2, 15]"),
    ({"hidden_states": {"layers": [-1, 2]}}, "hidden_states.layers.0 is -1: should be greater than or equal to 0"),
    ({"acceptance": {"ngram_min": 5}}, "acceptance.ngram_min is 5 but acceptance.ngram_max is 4"),
    ({"acceptance": {"draft_tokens": 9}}, "acceptance.draft_tokens is 9: should be less than or equal to 8"),
    ({"dataset": {"max_length": 2048}}, "training.tokens_per_step is 1024 but dataset.max_length is 2048"),
    ({"dataset": {"max_length": 128}}, "an answer must leave room for its prompt"),
    ({"dataset": {"sources": ["a", "a"]}}, "a source is named twice"),
    ({"server": {"max_model_len": 512}}, "at least one token more than the longest conversation"),
]


@pytest.mark.parametrize("data, words", MISTAKES, ids=[str(row[0]) for row in MISTAKES])
def test_a_mistake_names_the_parameter_the_value_and_the_way_out(tmp_path, data, words):
    with pytest.raises(KitError) as error:
        from_file(tmp_path, yaml.safe_dump(data))
    assert words in str(error.value) and str(error.value).startswith(str(tmp_path / "p.yaml"))
    with pytest.raises(KitError) as error:
        Params.from_namespace(injected(data))
    assert words in str(error.value)


def test_every_mistake_is_told_at_once(tmp_path):
    with pytest.raises(KitError) as error:
        from_file(tmp_path, "training: {epochs: 0, epohcs: 1}\nrun: 7\n")
    assert len(str(error.value).splitlines()) == 3


@pytest.mark.parametrize(
    "text, words",
    [
        ("training: {epochs: 1}\ntraining: {epochs: 2}\n", "line 2: 'training' is given twice"),
        ("training:\n  epochs: 1\n  epochs: 2\n", "line 3: 'epochs' is given twice"),
        ("- a\n", "holds a list"),
        ("a: [", "is not YAML"),
        ("run: \x00", "is not YAML"),
    ],
)
def test_a_file_that_is_not_a_parameter_file_is_refused(tmp_path, text, words):
    with pytest.raises(KitError) as error:
        from_file(tmp_path, text)
    assert words in str(error.value)


def test_a_missing_file_names_those_that_exist(tmp_path):
    with pytest.raises(KitError, match="No such file.*cpu.yaml"):
        Params.load(tmp_path / "none.yaml")


def test_an_empty_file_or_section_means_the_defaults(tmp_path):
    assert from_file(tmp_path, "") == from_file(tmp_path, "training:\n") == DEFAULTS


def test_one_value_on_the_command_line_stands_over_the_file(tmp_path):
    path = tmp_path / "p.yaml"
    path.write_text("run: x\ndataset: {samples: 9, max_length: 256}\n")
    typed = {
        "dataset.samples": "10",
        "run": "007",
        "target.revision": "1e5",
        "hidden_states.layers": "[1, 2]",
        "hidden_states.minimum_agreement": "null",
        "training.learning_rate": "1e-4",
    }
    values = Params.load(path, typed).leaves()
    assert [values[name] for name in typed] == [10, "007", "1e5", [1, 2], None, 1e-4]
    assert values["dataset.max_length"] == 256
    with pytest.raises(KitError, match="did you mean 'dataset.samples'"):
        Params.load(path, {"dataset.sampels": "3"})
    with pytest.raises(KitError, match="write the value|not YAML"):
        Params.load(path, {"dataset.samples": "[1"})


def test_written_parameters_read_back_the_same_here_and_in_papermill(tmp_path):
    from papermill.iorw import read_yaml_file

    params = from_file(tmp_path, "run: '007'\ntarget: {revision: 1e5, model: 'on'}\ntraining: {learning_rate: 1e-7}\n")
    path = tmp_path / "out.yaml"
    path.write_text(params_text.write(params))
    assert Params.load(path) == params == Params.from_namespace(injected(read_yaml_file(str(path))))


def test_a_notebook_with_the_cell_as_it_stands_has_the_defaults():
    namespace: dict = {"In": ["", PARAMETERS]}
    exec(PARAMETERS, namespace)
    assert Params.from_namespace(namespace) == DEFAULTS


def test_a_lost_parameters_tag_is_noticed():
    # papermill then injects on top, and the defaults overwrite what it sent
    namespace: dict = {"In": ["", "# Parameters\nseed = 7\n", PARAMETERS]}
    exec(PARAMETERS, namespace)
    with pytest.raises(KitError, match="seed was sent as 7 but is 0: is the 'parameters' tag missing"):
        Params.from_namespace(namespace)


def test_a_name_added_to_the_parameters_cell_by_hand_is_checked():
    cell = PARAMETERS + "epochs = 3\n"
    namespace: dict = {"In": ["", cell]}
    exec(cell, namespace)
    with pytest.raises(KitError, match="did you mean 'training.epochs'"):
        Params.from_namespace(namespace)


def test_opening_before_or_long_after_the_parameters_cell_says_what_to_run():
    with pytest.raises(KitError, match="run the cell tagged 'parameters' first"):
        Params.from_namespace({"In": [""]})
    namespace = injected({})
    namespace["dataset"] = [1, 2]
    with pytest.raises(KitError, match="dataset is a list, not a section.*run the parameters cell again"):
        Params.from_namespace(namespace)


def test_params_file_gives_the_base_and_the_cell_stands_over_it(kit, monkeypatch):
    monkeypatch.setenv("EAGLE3KIT_ROOT", str(kit.root))
    kit.params("run: big\nseed: 5\ntraining: {epochs: 2, draft_steps: 5}\n", "big.yaml")
    cell = PARAMETERS.replace('params_file = ""', 'params_file = "params/big.yaml"')
    cell = cell.replace("training = {}", 'training = {"epochs": 4}')
    namespace: dict = {"In": ["", cell]}
    exec(cell, namespace)
    values = Params.from_namespace(namespace).leaves()
    wanted = {"run": "big", "seed": 5, "training.epochs": 4, "training.draft_steps": 5}
    assert {name: values[name] for name in wanted} == wanted
    # what papermill sent counts, even where it equals the default
    sent = injected({"params_file": "params/big.yaml", "seed": 0, "training": {"epochs": 3}})
    values = Params.from_namespace(sent).leaves()
    assert (values["seed"], values["training.epochs"], values["run"]) == (0, 3, "big")
    with pytest.raises(KitError, match="No such file.*big.yaml"):
        Params.from_namespace(injected({"params_file": "params/bgi.yaml"}))


def test_reads_are_noted_leaf_by_leaf_and_nothing_else_counts():
    params, same = Params(), Params()
    assert params == same and params.leaves() == same.leaves() and "epochs" in repr(params)
    Params.model_validate(params.model_dump())
    assert params.reads() == {}
    section = params.training
    assert params.reads() == {} and section == same.training
    assert (section.epochs, params.seed, params.run) == (8, 0, "cpu")
    assert params.reads() == {"seed": 0, "training.epochs": 8} and same.reads() == {}
    # a section handed on whole is read whole
    assert dict(params.vocabulary) == params.vocabulary.model_dump() == {"size": 8192, "always": []}
    assert params.reads().keys() == {"seed", "training.epochs", "vocabulary.size", "vocabulary.always"}


def test_parameters_cannot_be_changed():
    with pytest.raises(ValueError, match="frozen"):
        DEFAULTS.training.epochs = 3


def test_every_parameter_says_what_it_is():
    for name, kind in {"": Params, **Params.sections()}.items():
        for leaf, about in kind.model_fields.items():
            assert about.description or leaf in Params.sections(), f"{name}.{leaf} has no description"


@pytest.mark.parametrize("path", sorted((REPOSITORY / "params").glob("*.yaml")), ids=lambda path: path.name)
def test_every_parameter_file_loads_and_says_what_it_is_for(path):
    params = Params.load(path)
    assert params.run != "cpu" or path.stem == "cpu", "two files would write into outputs/cpu"
    assert path.read_text().startswith("# "), "the first line says the machine, the time and what to expect"


def test_parameters_are_checked_before_anything_heavy_is_imported():
    code = "import sys, eagle3kit; eagle3kit.open_stage; import eagle3kit.pipeline; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPOSITORY)
    assert {"torch", "vllm", "transformers", "pandas", "matplotlib", "nbconvert"}.isdisjoint(loaded.stdout.split())
