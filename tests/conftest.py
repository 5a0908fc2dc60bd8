"""What tests share: outputs of their own, and a factory of tiny notebooks, most of them ill-behaved."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
PARAMETERS = """\
run = "cpu"
seed = 0
target = {}
dataset = {}
hidden_states = {}
vocabulary = {}
training = {}
acceptance = {}
profile = {}
server = {}
cluster = None
params_file = ""
"""
OPEN = 'from eagle3kit import open_stage\nparams, stage = open_stage("{stage}", globals())'


def notebook_text(cells: list[str], tag: str = "parameters") -> str:
    """A notebook of code cells as JSON text; the first cell carries the tag."""
    made = [
        {
            "cell_type": "code",
            "execution_count": None,
            "id": f"cell-{number}",
            "metadata": {"tags": [tag]} if number == 0 else {},
            "outputs": [],
            "source": text,
        }
        for number, text in enumerate(cells)
    ]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return json.dumps({"cells": made, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5})


@dataclass
class Kit:
    """A root of its own: notebooks, parameters, outputs, and optionally a copy of the package to change."""

    root: Path
    package: Path = REPOSITORY
    environment: dict[str, str] = field(default_factory=dict)

    def notebook(self, stage: str, *cells: str, tag: str = "parameters", parameters: str = PARAMETERS) -> Path:
        """Write notebooks/STAGE.ipynb: parameters, opening, the cells given, and unless told otherwise a finish."""
        cells = cells or ('stage.finish("ended")',)
        path = self.root / "notebooks" / f"{stage}.ipynb"
        path.write_text(notebook_text([parameters, OPEN.format(stage=stage), *cells], tag))
        return path

    def params(self, text: str = "run: r\n", name: str = "p.yaml") -> Path:
        path = self.root / "params" / name
        path.write_text(text)
        return path

    def copy_package(self) -> Path:
        """The package copied into the root, so that a test can change its source."""
        self.package = self.root / "library"
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPOSITORY / "eagle3kit", self.package / "eagle3kit", ignore=ignore)
        # Files newer than the process that loads them count as changed while it ran.
        for path in (self.package / "eagle3kit").rglob("*.py"):
            os.utime(path, (path.stat().st_mtime - 3600,) * 2)
        return self.package / "eagle3kit"

    @property
    def env(self) -> dict[str, str]:
        place = {"EAGLE3KIT_ROOT": str(self.root), "EAGLE3KIT_OUTPUTS": str(self.root / "outputs")}
        return {**os.environ, **place, "PYTHONPATH": str(self.package), **self.environment}

    def start(self, *arguments: str | Path, module: str = "eagle3kit", cwd: Path | None = None) -> subprocess.Popen:
        command = [sys.executable, "-m", module, *map(str, arguments)]
        where = cwd or self.root
        return subprocess.Popen(
            command, env=self.env, cwd=where, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )

    def run(self, *arguments: str | Path, module: str = "eagle3kit", cwd: Path | None = None) -> tuple[int, str]:
        """Exit code and everything printed."""
        process = self.start(*arguments, module=module, cwd=cwd)
        printed, _ = process.communicate(timeout=120)
        return process.returncode, printed

    def result(self, stage: str, run: str = "r") -> dict:
        return json.loads((self.root / "outputs" / run / stage / "result.json").read_text())


# Files that take a minute and more, the longest first: begun last, one of them would leave the other worker with nothing to do.
LONGEST = ("test_pass.py", "test_cluster.py", "test_kimi_pass.py", "test_decode_profile.py", "test_bad_input.py", "test_fleet.py",
           "test_planted.py", "test_run.py", "test_server.py", "test_gate.py", "test_ranks.py")  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The long files first; within a file, and among the others, as they were."""
    order = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))


@pytest.fixture
def kit(tmp_path: Path) -> Kit:
    """An empty root with notebooks/ and params/. Its name holds a space and braces, as folders may."""
    root = tmp_path / "a {root}"
    for name in ("notebooks", "params"):
        (root / name).mkdir(parents=True)
    return Kit(root)


@pytest.fixture
def outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An outputs folder of the test's own, which stages opened in this process use."""
    folder = tmp_path / "outputs"
    folder.mkdir()
    monkeypatch.setenv("EAGLE3KIT_OUTPUTS", str(folder))
    return folder


@pytest.fixture
def drawn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The sentences of the figures that the test module's FIGURES draws, which are laid out for real."""
    said: list[str] = []

    def show(fig, alt):
        fig.draw_without_rendering()
        said.append(alt)

    monkeypatch.setattr(request.module.FIGURES, "show", show)
    return said


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory):
    """A tiny target with a draft that has learned some of its answers (see `tinydraft`), made once; tests change copies."""
    import tinydraft

    return tinydraft.tiny(tmp_path_factory.mktemp("tiny"))
