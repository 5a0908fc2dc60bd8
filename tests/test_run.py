"""The headless pass through the door users use: the real command line, the real papermill, real kernels.

Each ill-behaved notebook has one fault. What is asserted is what a person would see: the exit code, the printed line,
the file that is there or is not.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest
import yaml
from conftest import PARAMETERS, REPOSITORY, notebook_text

SLEEPER = "import subprocess, sys\nchild = subprocess.Popen([sys.executable, '-c', {code!r}])"


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def wait_until(condition, what: str, seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"waited {seconds} s in vain until {what}"
        time.sleep(0.1)


def test_a_second_pass_skips_and_a_change_runs_again_only_what_it_touches(kit):
    package = kit.copy_package()
    (package / "extra.py").write_text("WORD = 'one'\n")
    os.utime(package / "extra.py", (time.time() - 3600,) * 2)
    first = kit.notebook(
        "00_a", "from eagle3kit import extra", "stage.finish(f'{extra.WORD} {params.training.epochs}')"
    )
    # an error stored in the source is an old output, not this run's
    source = json.loads(first.read_text())
    source["cells"][2]["outputs"] = [{"output_type": "error", "ename": "Old", "evalue": "old", "traceback": []}]
    first.write_text(json.dumps(source))
    kit.notebook("01_b", "stage.finish('size', size=params.vocabulary.size)")
    kit.notebook(
        "08_acceptance",
        "size = stage.result('01_b')['numbers']['size']",
        "stage.finish(f'kept {size}', acceptance_length=1.618, acceptance_length_low=1.55, acceptance_length_high=1.69)",
    )
    file = kit.params("run: r\n")
    last = "acceptance length served by vLLM: 1.62 (95% interval 1.55-1.69)  report: outputs/r/index.html"

    code, printed = kit.run("run", file)
    lines = printed.splitlines()
    assert code == 0, printed
    assert re.fullmatch(r"\[1/3\] 00_a  done in 0:00:\d\d  one 8", lines[0])
    assert re.fullmatch(r"\[3/3\] 08_acceptance  done in 0:00:\d\d  kept 8192", lines[2])
    assert (lines[-1], len(lines)) == (last, 5)
    folder = kit.root / "outputs" / "r"
    assert yaml.safe_load((folder / "params.yaml").read_text())["training"]["epochs"] == 8
    assert {path.name for path in (folder / "01_b").iterdir()} >= {"notebook.ipynb", "result.json", "log.txt"}
    assert not list(folder.rglob("running.ipynb")) and not list(folder.rglob("fail*"))
    assert "unknown parameter" not in (folder / "00_a" / "log.txt").read_text().lower()
    timing = json.loads((folder / "timing.json").read_text())
    assert [stage["skipped"] for stage in timing["stages"]] == [False] * 3
    ids = [kit.result(stage)["id"] for stage in ("00_a", "01_b", "08_acceptance")]

    code, printed = kit.run("run", file)
    assert code == 0 and printed.splitlines()[0] == "[1/3] 00_a  current, skipped  one 8"
    assert "nothing to do: all 3 stages are current" in printed and printed.splitlines()[-1] == last
    assert json.loads((folder / "timing.json").read_text()) == timing, "the times of the pass that ran stay"

    (package / "extra.py").write_text("# what it says\nWORD = 'one'\n")
    code, printed = kit.run("run", file, "-p", "vocabulary.size=64")
    assert code == 0, printed
    assert "00_a  current, skipped" in printed
    assert "01_b  (vocabulary.size is 64, was 8192)  done" in printed
    assert "08_acceptance  (01_b ran again)  done" in printed
    assert kit.result("00_a")["id"] == ids[0] and kit.result("01_b")["id"] != ids[1]

    (package / "extra.py").write_text("WORD = 'two'\n")
    os.utime(package / "extra.py", (time.time() - 60,) * 2)
    code, printed = kit.run("run", file, "-p", "vocabulary.size=64")
    assert code == 0 and "00_a  (eagle3kit.extra changed)  done in" in printed and "two 8" in printed
    assert printed.count("current, skipped") == 2


def test_a_failed_stage_stops_the_pass_harms_nothing_earlier_and_recovers(kit):
    kit.notebook("00_a")
    kit.notebook("01_b", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "stage.finish('never')")
    last = kit.notebook("02_c")
    file = kit.params()
    code, printed = kit.run("run", file)
    assert code == 138 and len(printed.splitlines()) == 4
    assert re.search(r"\[2/3\] 01_b  FAILED after \S+: the kernel died.*  log: outputs/r/01_b/log.txt\n", printed)
    folder = kit.root / "outputs" / "r"
    assert not (folder / "01_b" / "result.json").exists() and (folder / "01_b" / "failed.ipynb").exists()
    failure = json.loads((folder / "01_b" / "failure.json").read_text())
    assert (failure["stage"], failure["code"]) == ("01_b", 138) and "kernel died" in failure["cause"]
    assert kit.result("00_a")["headline"] == "ended" and (folder / "00_a" / "notebook.ipynb").exists()
    assert not (folder / "02_c").exists()
    assert "FAILED" in (folder / "index.html").read_text()

    last.unlink()
    kit.notebook("01_b")
    code, printed = kit.run("run", file)
    assert code == 0 and "00_a  current, skipped" in printed and "01_b  done in" in printed
    assert not (folder / "01_b" / "failed.ipynb").exists() and not (folder / "01_b" / "failure.json").exists()

    kit.notebook("01_b", "1 / 0", "stage.finish('never')")
    code, printed = kit.run("run", file)
    assert code == 1 and "01_b  (the notebook changed)  FAILED after" in printed
    assert ": ZeroDivisionError: division by zero  log: " in printed
    assert not (folder / "01_b" / "result.json").exists()
    assert (folder / "01_b" / "notebook.ipynb").exists() and (folder / "01_b" / "failed.ipynb").exists()


@pytest.mark.parametrize(
    "cell, cause",
    [
        ("import sys; sys.exit(0)", "a cell stopped the notebook before its end (no result.json)"),
        ("stage.input('05_x', 'y')", "00_a asks for '05_x', which is no notebook; there are: 00_a"),
    ],
)
def test_a_stage_that_does_not_reach_its_end_is_a_failure(kit, cell, cause):
    kit.notebook("00_a", cell)
    code, printed = kit.run("run", kit.params())
    assert code == 1 and f": {cause}" in printed
    assert not (kit.root / "outputs" / "r" / "00_a" / "result.json").exists()


@pytest.mark.parametrize(
    "arguments, tag, words",
    [
        (["-p", "ttt_stpes", "9"], "parameters", "unknown parameter 'ttt_stpes'; did you mean 'training.draft_steps'?"),
        (["-y", "training: {draft_stpes: 9}"], "parameters", "did you mean 'training.draft_steps'?"),
        (["-y", "seed: 4"], "lost", "seed was sent as 4 but is 0: is the 'parameters' tag missing"),
    ],
)
def test_plain_papermill_refuses_what_it_would_let_pass(kit, arguments, tag, words):
    path = kit.notebook("00_a", tag=tag)
    code, printed = kit.run(path.relative_to(kit.root), "out.ipynb", "-k", "python3", *arguments, module="papermill")
    assert code == 1 and words in printed
    assert not (kit.root / "outputs" / "cpu" / "00_a").exists()


def test_plain_papermill_runs_one_notebook_with_a_whole_parameter_file(kit):
    path = kit.notebook(
        "06_train", "stage.finish('t', rate=params.training.learning_rate, on=params.dataset.regenerate)"
    )
    text = "run: '007'\ntraining: {learning_rate: 1e-4}\ndataset: {regenerate: no}\ntarget: {revision: 1e5}\n"
    arguments = [path.relative_to(kit.root), "out.ipynb", "-k", "python3", "-f", kit.params(text)]
    code, printed = kit.run(*arguments, module="papermill")
    assert code == 0, printed
    assert "unknown" not in printed, "every warning must be a true typo"
    result = kit.result("06_train", "007")
    assert result["numbers"] == {"rate": 1e-4, "on": False} and result["params"]["target.revision"] == "1e5"
    # what papermill ran by hand is as good as what the pass runs
    code, printed = kit.run("run", kit.root / "params" / "p.yaml")
    assert code == 0 and "current, skipped" in printed


@pytest.mark.parametrize(
    "argv, words",
    [
        (["/nowhere/bin/python", "-m", "x"], "starts /nowhere/bin/python, which does not run"),
        ([sys.base_prefix + "/bin/python3", "-m", "x"], "belongs to another environment"),
    ],
)
def test_a_kernel_that_is_not_ours_stops_the_pass_before_the_first_stage(kit, argv, words):
    if argv[0].startswith(sys.base_prefix) and sys.prefix == sys.base_prefix:
        pytest.skip("the tests do not run in a virtual environment: there is no other one to point at")
    folder = kit.root / "jupyter" / "kernels" / "python3"
    folder.mkdir(parents=True)
    (folder / "kernel.json").write_text(json.dumps({"argv": argv, "display_name": "x", "language": "python"}))
    kit.environment["JUPYTER_PATH"] = str(kit.root / "jupyter")
    kit.notebook("00_a")
    code, printed = kit.run("run", kit.params())
    assert code == 2 and words in printed and "ipykernel install --sys-prefix --name python3" in printed
    assert not (kit.root / "outputs" / "r" / "00_a").exists()


def test_sigterm_reaches_the_cell_and_leaves_no_process(kit):
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    slow = "import time\ntry:\n    for n in range(600):\n        stage.log(f'step {n}'); time.sleep(0.2)\n"
    slow += "finally:\n    stage.file('closed').write_text('x')"
    kit.notebook("00_a")
    kit.notebook("01_b", SLEEPER.format(code=deaf) + "\nstage.log(f'child {child.pid}.')", slow, "stage.finish('no')")
    process = kit.start("run", kit.params())
    folder = kit.root / "outputs" / "r" / "01_b"
    log = folder / "log.txt"
    try:
        wait_until(lambda: log.exists() and "step 2" in log.read_text(), "the log shows a running cell")
        size = log.stat().st_size
        wait_until(lambda: log.stat().st_size > size, "the log grows while the cell runs")
        child = int(re.search(r"child (\d+)\.", log.read_text())[1])
        family = [other.pid for other in psutil.Process(process.pid).children(recursive=True)]
        assert child in family and len(family) >= 3, "papermill, its kernel, and what a cell started"

        code, printed = kit.run("run", kit.params())
        assert code == 2 and f"process {process.pid} is already writing outputs/r" in printed
    finally:
        process.send_signal(signal.SIGTERM)
    printed, _ = process.communicate(timeout=40)
    assert process.returncode == 143 and "[2/2] 01_b  FAILED: stopped by SIGTERM" in printed
    assert not [pid for pid in family if alive(pid)]
    assert (folder / "closed").exists(), "the cell had time to close what it had opened"
    assert json.loads((folder / "failure.json").read_text())["cause"] == "stopped by SIGTERM"
    assert (folder / "failed.ipynb").exists() and not (folder / "result.json").exists()
    assert kit.result("00_a")["headline"] == "ended"


def test_a_runner_that_is_killed_takes_its_papermill_and_kernel_along(kit):
    kit.notebook("00_a", "import time\nstage.log('asleep')\ntime.sleep(600)", "stage.finish('no')")
    process = kit.start("run", kit.params())
    log = kit.root / "outputs" / "r" / "00_a" / "log.txt"
    wait_until(lambda: log.exists() and "asleep" in log.read_text(), "the cell runs")
    family = [other.pid for other in psutil.Process(process.pid).children(recursive=True)]
    process.kill()
    process.communicate(timeout=20)
    wait_until(lambda: not [pid for pid in family if alive(pid)], "no process of the pass is left", 20)


def test_the_same_files_from_any_folder_and_no_child_of_a_finished_stage(kit):
    # in a session of its own, as servers are: the interrupt that ends a kernel does not reach it
    cell = SLEEPER.format(code="import time; time.sleep(600)").replace("])", "], start_new_session=True)")
    kit.notebook("00_a", cell, "stage.finish('ended', child=child.pid)")
    kit.params()
    code, printed = kit.run("run", "params/p.yaml")
    assert code == 0, printed
    assert not alive(kit.result("00_a")["numbers"]["child"]), "a server must not outlive its stage"
    assert "ended after the stage: python" in (kit.root / "outputs" / "r" / "00_a" / "log.txt").read_text()
    for cwd, path in ((kit.root.parent, "a {root}/params/p.yaml"), (kit.root / "notebooks", "../params/p.yaml")):
        code, printed = kit.run("run", path, cwd=cwd)
        assert code == 0 and "00_a  current, skipped" in printed
    assert sorted(path.name for path in kit.root.iterdir()) == ["notebooks", "outputs", "params"]
    assert [path.name for path in (kit.root / "notebooks").iterdir()] == ["00_a.ipynb"]
    code, printed = kit.run("run", kit.root / "params" / "p.yaml", cwd="/")
    assert code == 0 and printed.splitlines()[-1].endswith("/outputs/r/index.html")


def test_stages_are_chosen_by_number_word_or_name_and_a_broken_report_is_told(kit):
    for name in ("00_machine", "06_training", "07_checkpoint"):
        kit.notebook(name)
    file = kit.params()
    code, printed = kit.run("run", file, "--only", "trainign")
    assert code == 2 and "no stage 'trainign'; did you mean 'training'?" in printed
    code, printed = kit.run("run", file, "--only", "06")
    assert code == 0 and printed.startswith("[2/3] 06_training  done in")
    (kit.root / "outputs" / "r" / "index.html").unlink()
    (kit.root / "outputs" / "r" / "index.html" / "in the way").mkdir(parents=True)
    code, printed = kit.run("run", file, "--from", "checkpoint")
    assert code == 1 and "06_training" not in printed
    assert printed.count("done in") == 1 and "warning: the report could not be rendered: " in printed


def test_mistakes_on_the_command_line_cost_no_kernel(kit):
    kit.notebook("00_a")
    file = kit.params("run: r\ntraining: {epohcs: 3}\n")
    rows = [
        (["run", file], "p.yaml: unknown parameter 'training.epohcs'; did you mean 'training.epochs'?"),
        (["check", file], "did you mean 'training.epochs'?"),
        (["run", "none.yaml"], "cannot read none.yaml: No such file or directory; files in params/: p.yaml"),
        (["run", file, "-p", "samples"], "-p samples: write -p section.key=value"),
        (["report", "q"], "no run 'q' in outputs; there are: none yet"),
    ]
    for arguments, words in rows:
        code, printed = kit.run(*arguments)
        assert (code, words in printed) == (2, True), printed
        assert printed.startswith("eagle3kit: ") and "Traceback" not in printed
    assert not (kit.root / "outputs").exists()
    code, printed = kit.run("check", kit.params("run: r\n"), "-p", "training.epochs=3")
    assert code == 0 and "training.epochs: 3 (default 8)" in printed
    (kit.root / "notebooks" / "00_a.ipynb").unlink()
    assert "no notebooks named NN_*.ipynb" in kit.run("run", kit.params("run: r\n"))[1]


def test_a_reader_that_has_read_enough_is_no_mistake():
    command = f"set -o pipefail; {sys.executable} -u -m eagle3kit check params/cpu.yaml | head -n 1; echo ${{PIPESTATUS[0]}}"
    ran = subprocess.run(["bash", "-c", command], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[0].startswith("params/cpu.yaml is good") and ran.stdout.splitlines()[1] in ("0", "141")
    assert ran.stderr == ""


def test_a_root_without_notebooks_says_what_to_set(kit):
    (kit.root / "notebooks").rmdir()
    code, printed = kit.run("run", kit.params())
    assert code == 2 and "set EAGLE3KIT_ROOT" in printed


def test_the_factory_makes_notebooks_that_papermill_takes(kit):
    # the parameters of these tests are those of the real notebooks, or the tests would prove nothing
    names = [line.split(" = ")[0] for line in PARAMETERS.splitlines()]
    from eagle3kit.params import Params

    assert names == [*Params.model_fields, "params_file"]
    assert json.loads(notebook_text([PARAMETERS]))["cells"][0]["metadata"] == {"tags": ["parameters"]}
