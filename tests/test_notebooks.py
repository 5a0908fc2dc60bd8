"""The notebooks as text: thin, alike in their first cells, free of what a machine or an editor left in them.

Nothing is executed here but the parameters cell; the whole pass is tested elsewhere.
"""

import ast
import json
import re

import pytest
from conftest import PARAMETERS, REPOSITORY

from eagle3kit.params import Params

NOTEBOOKS = sorted((REPOSITORY / "notebooks").glob("*.ipynb"))
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
MAX_LINES = 15


def cells(path):
    return json.loads(path.read_text())["cells"]


def text(cell):
    return "".join(cell["source"])


def tags(cell):
    return cell["metadata"].get("tags", [])


def code_cells(path):
    """The code cells after the parameters cell, as parsed Python: a `!command` or `%magic` does not parse."""
    found = []
    for number, cell in enumerate(cells(path)):
        if cell["cell_type"] == "code" and "parameters" not in tags(cell):
            try:
                found.append((number, ast.parse(text(cell))))
            except SyntaxError as error:
                pytest.fail(f"{path.name}, cell {number}: not plain Python ({error}); no !commands, no %magics")
    return found


def nodes(path):
    """Every syntax node of a notebook with the number of its cell."""
    for number, tree in code_cells(path):
        for node in ast.walk(tree):
            yield number, node


each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def test_notebooks_are_numbered_each_once():
    assert NOTEBOOKS and all(re.fullmatch(r"\d\d_[a-z0-9_]+", path.stem) for path in NOTEBOOKS)
    assert len({path.stem[:2] for path in NOTEBOOKS}) == len(NOTEBOOKS)


def test_the_parameters_cell_is_the_same_in_all_notebooks_and_means_the_defaults():
    first = {text(cell) for path in NOTEBOOKS for cell in cells(path) if "parameters" in tags(cell)}
    assert len(first) == 1, "parameters cells differ"
    cell = first.pop()
    namespace: dict = {}
    exec(cell, namespace)
    assert [name for name in namespace if not name.startswith("__")] == [*Params.model_fields, "params_file"]
    assert (REPOSITORY / namespace["params_file"]).is_file()
    assert Params.from_namespace({**namespace, "params_file": "", "In": ["", cell]}) == Params()
    plain = [line.partition("#")[0].split() for line in cell.splitlines() if "=" in line.partition("#")[0]]
    # The tests' own cell names no file, for their root has none.
    assert [words[0] for words in plain] == [line.split()[0] for line in PARAMETERS.splitlines()]


@each
def test_nothing_is_in_the_metadata_but_the_kernel_and_two_tags(path):
    notebook = json.loads(path.read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert notebook["metadata"] == {"kernelspec": KERNEL, "language_info": {"name": "python"}}
    # `parameters`: where papermill injects; `index`: its figure is shown on the report's first page too
    found = [cell["metadata"] for cell in notebook["cells"] if cell["metadata"]]
    assert found[0] == {"tags": ["parameters"]} and all(about == {"tags": ["index"]} for about in found[1:])
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids)


@each
def test_no_outputs_are_stored(path):
    for number, cell in enumerate(cells(path)):
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None), f"cell {number} holds an output"
        assert "attachments" not in cell


@each
def test_it_opens_with_a_question_then_the_parameters_then_the_stage(path):
    question, parameters, opening = cells(path)[:3]
    title = text(question).splitlines()[0]
    assert question["cell_type"] == "markdown" and title.startswith("# ") and title.endswith("?")
    assert parameters["metadata"] == {"tags": ["parameters"]}
    wanted = f'from eagle3kit import open_stage\n\nparams, stage = open_stage("{path.stem}", globals())'
    assert text(opening).strip() == wanted


@each
def test_sentences_stand_between_the_cells_of_code(path):
    body = cells(path)[3:]
    assert body[0]["cell_type"] == "markdown"
    kinds = "".join(cell["cell_type"][0] for cell in body)
    assert "cccc" not in kinds, "four cells of code in a row: say in a sentence what they show"
    assert all(text(cell).strip() for cell in body), "an empty cell"


@each
def test_cells_are_thin_and_define_nothing(path):
    for number, cell in enumerate(cells(path)):
        if cell["cell_type"] == "code":
            lines = len(text(cell).strip().splitlines())
            assert lines <= MAX_LINES, f"cell {number} has {lines} lines; the library is the place for more"
    defined = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    assert not [number for number, node in nodes(path) if isinstance(node, defined)], "def or class: library"
    named = [node for _, node in nodes(path) if isinstance(node, ast.Assign) and isinstance(node.value, ast.Lambda)]
    assert not named, "a named lambda is a def"


@each
def test_it_ends_with_finish_and_finishes_once(path):
    calls = [
        number
        for number, node in nodes(path)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "stage.finish"
    ]
    assert calls == [len(cells(path)) - 1]
    last = code_cells(path)[-1][1].body[-1]
    assert isinstance(last, ast.Expr) and ast.unparse(last.value.func) == "stage.finish"


@each
def test_it_asks_nothing_of_the_shell_the_environment_or_the_folder_it_runs_in(path):
    banned = ("os.environ", "os.getenv", "os.system", "os.popen", "os.getcwd", "Path.cwd", "sys.path", "get_ipython")
    for number, node in nodes(path):
        words = ast.unparse(node) if isinstance(node, (ast.Attribute, ast.Name)) else ""
        assert words not in banned, f"cell {number}: {words}"
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("subprocess."):
            checked = {word.arg: ast.unparse(word.value) for word in node.keywords}.get("check")
            assert ast.unparse(node.func) == "subprocess.run" and checked == "True", f"cell {number}: unchecked process"
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            assert not node.value.startswith(("/", "~/", "../", "outputs/")), f"cell {number}: path {node.value!r}"


@each
def test_no_cell_takes_the_name_of_a_parameter(path):
    taken = {*Params.model_fields, "params_file"}
    for number, node in nodes(path):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            assert node.id not in taken, f"cell {number} assigns {node.id}, which the parameters cell owns"
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                name = (alias.asname or alias.name).partition(".")[0]
                assert name not in taken, f"cell {number} imports {name}, which the parameters cell owns"


@each
def test_inputs_come_from_earlier_stages_only(path):
    known = [other.stem for other in NOTEBOOKS]
    for number, node in nodes(path):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("stage.input", "stage.result"):
            name = node.args[0]
            assert isinstance(name, ast.Constant), f"cell {number}: name the earlier stage in plain text"
            assert name.value in known[: known.index(path.stem)], f"cell {number}: {name.value} is no earlier stage"
