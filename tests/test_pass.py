"""One whole pass through the real command line, papermill, vLLM and speculators, and what it leaves behind.

The target is small, but everything else is what users run. The pass is run once; most tests look at what it left.
"""

import hashlib
import json
import re
import shutil
import signal
import subprocess

import pytest
import torch
from conftest import REPOSITORY
from wholepass import STAGES, Finished, finished_pass, is_root, tensors

from eagle3kit import residue, target
from eagle3kit.conversations import read_samples

pytestmark = pytest.mark.slow
STATES = "03_hidden_states"


@pytest.fixture(scope="module")
def done(tmp_path_factory) -> Finished:
    finished = finished_pass(tmp_path_factory.mktemp("whole pass"))
    assert finished.ran.code == 0, finished.ran.printed
    return finished


# ---- What a finished pass leaves


def test_it_ends_with_a_report_and_the_acceptance_length(done):
    pattern = r"acceptance length served by vLLM: (\d\.\d\d) \(95% interval (\d\.\d\d)-(\d\.\d\d)\)  report: (\S+)"
    length, low, high, path = re.fullmatch(pattern, done.ran.lines[-1]).groups()
    assert 1.0 < float(low) <= float(length) <= float(high) <= 4.0
    assert path == "outputs/pass/index.html" and (done.door.home / path).is_file()
    assert [line.split()[1] for line in done.ran.lines[: len(STAGES)]] == STAGES
    for stage in STAGES:
        result = done.door.result(stage)
        assert (result["stage"], result["run"]) == (stage, "pass") and result["headline"] in done.ran.printed
        assert (done.folder / stage / "notebook.ipynb").is_file() and (done.folder / stage / "report.html").is_file()
    assert not [path for name in ("failed.ipynb", "running.ipynb", "failure.json") for path in done.folder.rglob(name)]
    timing = json.loads((done.folder / "timing.json").read_text())
    assert [row["stage"] for row in timing["stages"]] == STAGES and not any(row["skipped"] for row in timing["stages"])


def test_nothing_that_was_started_is_left(done):
    assert done.ran.left() == []
    assert len(done.ran.family) > 3 * len(STAGES), "papermill and a kernel a stage, and the servers: they were seen"
    assert list((done.folder / STATES / "arriving").iterdir()) == [], "what the server hands over is taken and removed"
    hidden = [path for path in done.folder.rglob(".*") if path.name != ".lock"]
    assert hidden == [], "half-written files"


def test_logs_are_short_and_tell_of_no_trouble(done):
    for stage in STAGES:
        log = (done.folder / stage / "log.txt").read_text()
        assert "Traceback" not in log and "unknown parameter" not in log.lower(), stage
        assert len(log.splitlines()) < 300, stage
    for log in done.folder.rglob("vllm*.log"):
        # Once told to stop, vLLM's web server may complain that its engine stopped first.
        assert "Traceback" not in log.read_text().partition("[shutdown]")[0], log


def test_pages_need_nothing_from_outside(done):
    pages = [done.folder / "index.html", *(done.folder / stage / "report.html" for stage in STAGES)]
    for page in pages:
        text = page.read_text()
        assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//""", text) and "url(http" not in text, page
        assert "<script" not in text and "@import" not in text, page
        for image in re.findall(r"<img[^>]*>", text):
            assert re.search(r'src="data:', image) and re.search(r'alt="[^"]*\d', image), (page, image[:200])
    assert not [page for page in pages if "ipywidgets" in page.read_text()], "warnings of a progress bar are no result"
    words = pages[0].read_text()
    assert "FAILED" not in words and f"{done.numbers('08_acceptance')['acceptance_length']:.2f}" in words


def test_what_speculation_costs_is_asked_before_training_and_the_forecast_is_checked(done):
    numbers = done.numbers("01_allreduce_vs_speculation")
    [row], [cell] = numbers["ratios"], numbers["verdict"]["cells"]
    assert (row["concurrency"], row["context"], row["draft_tokens"]) == (8, 16, 3) and row["r"]["kind"] == "measured"
    assert cell["cell"]["speedup"]["value"] == pytest.approx(cell["cell"]["length"]["value"] / row["r"]["value"])
    assert {timing["bytes"] for timing in numbers["collectives"]} == {512, 4096, 16384}, "1, 8 and 32 tokens of 128 numbers"
    [traced] = numbers["traced"]
    parts = sum(bucket["exposed_ms"] for bucket in traced["buckets"].values())
    assert parts + traced["idle_ms"] == pytest.approx(traced["wall_ms"], rel=0.01) and traced["buckets"]["dense matmul"]["count"]
    assert re.match(r"foretold \d.*, measured \d.*, at concurrency 8, 3 draft tokens", done.numbers("08_acceptance")["forecast"])
    hours = done.numbers("00_machine")["hours"]
    assert [row["work"] for row in hours] == ["writing answers", "extracting hidden states", "writing them to disk", "training"]
    assert all(row["how"] == "measured on the spot" and row["bound"] and row["n"] > 1 for row in hours)
    assert all(0 < row["low"] <= row["hours"] <= row["high"] for row in hours) and done.numbers("00_machine")["untimed"] == {}
    assert "at rates timed there for some seconds" in numbers["verdict"]["cost"]["source"]


def test_bad_rows_are_counted_and_the_sides_do_not_mix(done):
    numbers = done.numbers("02_dataset")
    assert (numbers["rows"], numbers["rejected"]) == (121, 1)
    assert "narrator" in (done.folder / "02_dataset" / "report.html").read_text()
    sides = [read_samples(done.folder / "02_dataset" / f"{side}.parquet") for side in ("train", "held_out")]
    train, held_out = ({sample.id.split(".")[0] for sample in side} for side in sides)
    assert not train & held_out and len(train | held_out) == 120 and len(held_out) >= 12
    assert numbers["supervised"] == sum(sum(sample.loss_mask) for side in sides for sample in side)
    stop = target.tokenizer(done.target).convert_tokens_to_ids("<|im_end|>")
    for sample in (sample for side in sides for sample in side):
        for start, end in sample.turns:
            answer = sample.input_ids[start:end]
            assert stop not in answer[:-1] and (answer[-1] == stop or len(answer) == 32), "supervised: words and their end"


def test_samples_hold_exactly_the_keys_of_the_format(done):
    train = read_samples(done.folder / "02_dataset" / "train.parquet")
    files = sorted((done.folder / STATES / "train").glob("*.pt"))
    assert {path.name for path in files} == {f"data_{number}.pt" for number in range(len(train))}
    for number, sample in enumerate(train):
        content = tensors(done.folder / STATES / "train" / f"data_{number}.pt")
        assert list(content) == ["input_ids", "loss_mask", "hidden_states"]
        ids, mask, states = content.values()
        assert ids.dtype == mask.dtype == torch.int64 and type(states) is list
        assert ids.tolist() == sample.input_ids and mask.tolist() == sample.loss_mask
        shapes = {(tuple(state.shape), state.dtype) for state in states}
        assert len(states) == 4 and shapes == {((len(sample.input_ids), 128), torch.float32)}
        assert all(state.untyped_storage().nbytes() == state.nbytes for state in states), "no hidden baggage"
    manifest = json.loads((done.folder / STATES / "train" / "manifest.json").read_text())
    assert (manifest["layers"], manifest["last"], manifest["dtype"]) == ([2, 4, 5], 8, "float32")
    assert "before the final norm" in manifest["convention"] and len(manifest["tokens"]) == len(train)


def test_the_last_state_gives_the_next_token(done):
    numbers = done.numbers(STATES)
    assert numbers["agreeing"] == numbers["compared"] > 300, "the target wrote the answers greedily, so it agrees with all"


def test_the_vocabulary_maps_there_and_back(done):
    t2d, d2t, freq = (tensors(done.folder / "04_vocabulary" / f"{name}.pt") for name in ("t2d", "d2t", "token_freq"))
    assert (t2d.dtype, d2t.dtype, freq.dtype) == (torch.bool, torch.int64, torch.int64)
    assert t2d.shape == freq.shape == (512,) and int(t2d.sum()) == len(d2t) == 256
    assert torch.equal(torch.arange(256) + d2t, t2d.nonzero().squeeze(1))
    specials = target.tokenizer(done.target).all_special_ids
    assert t2d[specials].all() and freq[t2d].sum() == freq.sum()


def test_the_draft_holds_the_targets_embedding_and_head(done):
    draft = tensors(done.folder / "07_checkpoint" / "draft" / "model.safetensors")
    weights = target.weights(done.target)
    t2d = tensors(done.folder / "04_vocabulary" / "t2d.pt")
    assert torch.equal(draft["embed_tokens.weight"], weights["embed"])
    assert torch.equal(draft["lm_head.weight"], weights["head"][t2d])
    assert {path.name for path in (done.folder / "07_checkpoint" / "draft").iterdir()} == {"config.json", "model.safetensors"}
    assert done.numbers("07_checkpoint")["drafts"] > 0


def test_the_draft_learned(done):
    history = done.numbers("06_training")["history"]
    losses = [sum(row["loss"] for row in history if (row["epoch"], row["split"]) == (epoch, "held out")) for epoch in (0, 2)]
    assert losses[1] < losses[0]
    numbers = done.numbers("06_training")
    assert numbers["predicted_length"] > 1.3 and numbers["best"] == str(numbers["best_epoch"])


def test_serving_with_the_draft_changes_no_answer_and_keeps_what_was_predicted(done):
    numbers = done.numbers("08_acceptance")
    assert numbers["prompts"] == 24 and numbers["equal"] == {"draft": [24, 24], "n-gram": [24, 24]}
    assert numbers["recorded_equal"] == 24, "the plain server says again what it said when it wrote the dataset"
    assert numbers["lossless_share"] == 1
    assert numbers["acceptance_length"] > 1.3
    # Draft for draft as predicted, but for one thing: vLLM counts what it accepts of a last draft past the answer's end, too.
    served, estimated = numbers["ways"]["served"], numbers["ways"]["estimated"]
    assert abs(served["drafts"] - estimated["drafts"]) <= 0.01 * served["drafts"]
    for kept, predicted in zip(served["accepted"], estimated["accepted"], strict=True):
        assert -2 <= kept - predicted <= numbers["prompts"]
    assert abs(served["accepted"][0] - estimated["accepted"][0]) <= 0.02 * served["drafts"]
    assert numbers["acceptance_length"] == pytest.approx(1 + sum(numbers["accepted"]) / numbers["drafts"])
    for kind in ("marginal", "predicted_marginal"):  # each position has its interval
        for share, (low, high) in zip(numbers[kind], numbers[f"{kind}_intervals"], strict=True):
            assert low <= share <= high and low < high
    # Up to the answers' ends the two agree, and nearly every answer goes step by step as predicted.
    agreed = numbers["agreement"]
    assert agreed["within"] and agreed["tolerance"] == 0.01 and agreed["paired"] and numbers["suspects"] == []
    assert numbers["same_walks"][0] >= 22 and numbers["same_walks"][1] == 24 and numbers["doubts"] == []
    page = (done.folder / "08_acceptance" / "report.html").read_text()
    for cause in residue.CAUSES:
        assert cause in page, "each is switched off or said why not"
    assert done.numbers("09_compare_runs")["runs"] == ["pass"] and len(numbers["by_prompt"]) == 24
    assert set(numbers["ways"]) == {"served", "estimated", "n-gram"} and numbers["ways"]["n-gram"]["drafts"] > 0
    assert min(numbers["speeds"].values()) > 0


# ---- Again, with nothing or little changed


def test_a_second_pass_starts_no_notebook_and_says_so(done):
    ids = [done.door.result(stage)["id"] for stage in STAGES]
    again = done.door.run("run", done.door.file)
    assert again.code == 0 and again.printed.count("current, skipped") == len(STAGES), again.printed
    assert f"nothing to do: all {len(STAGES)} stages are current" in again.printed and not again.family
    assert again.lines[-1] == done.ran.lines[-1]
    assert [done.door.result(stage)["id"] for stage in STAGES] == ids


def test_another_draft_length_runs_again_what_reads_it_and_a_stop_leaves_no_server(done):
    folder = done.door.copy("longer", *STAGES)
    server = folder / "07_checkpoint" / "vllm.log"
    server.unlink()
    ran = done.door.run("run", done.door.file, "-p", "run=longer", "-p", "acceptance.draft_tokens=2",
                        until=server.exists, number=signal.SIGTERM)  # fmt: skip
    skipped = [line.split()[1] for line in ran.lines if "current, skipped" in line]
    assert skipped == [stage for stage in STAGES if stage < "07" and stage[:2] != "01"], ran.printed
    assert "07_checkpoint  (acceptance.draft_tokens is 2, was 3)  FAILED: stopped by SIGTERM" in ran.printed
    assert ran.code == 128 + signal.SIGTERM and ran.left() == []
    assert "Traceback" not in ran.printed
    assert json.loads((folder / "07_checkpoint" / "failure.json").read_text())["cause"] == "stopped by SIGTERM"
    assert done.door.result("06_training", "longer")["id"] == done.door.result("06_training")["id"]


def test_a_rung_has_a_folder_of_its_own_and_makes_nothing_that_another_has(done):
    for stage in ("02", "03"):
        ran = done.door.run("run", done.door.file, "-p", "dataset.samples=20", "--only", stage)
        assert ran.code == 0 and ran.lines[0].startswith("run pass-20: a rung with 20 samples"), ran.printed
    folder = done.door.outputs / "pass-20"
    answers, states = (done.door.result(stage, "pass-20")["numbers"] for stage in ("02_dataset", STATES))
    assert answers["answers_written"] == 0 and answers["answers_taken"] == {"pass": answers["answers_kept"]}
    assert (states["written"], states["kept"], states["tokens"]) == (0, 0, 0) and states["taken"]["pass"] >= 20
    assert states["agreeing"] == states["compared"] > 0
    assert not list(folder.rglob("vllm.log")), "no server was needed"
    ids = {}
    for side in ("train", "held_out"):
        small, large = (read_samples(place / "02_dataset" / f"{side}.parquet") for place in (folder, done.folder))
        ids[side] = {sample.id for sample in small}
        assert ids[side] and ids[side] <= {sample.id for sample in large}, "nobody changes sides"
        places = {tuple(sample.input_ids): number for number, sample in enumerate(large)}
        for number, sample in enumerate(small):
            mine, other = (place / STATES / side / f"data_{n}.pt" for place, n in (
                (folder, number), (done.folder, places[tuple(sample.input_ids)])))  # fmt: skip
            assert mine.samefile(other)
    # The other way round: what the pass measured is what a rung of its parameters is foretold.
    assert done.door.run("run", done.door.file, "-p", "dataset.samples=20", "--only", "00").code == 0
    hours = {row["work"]: row for row in done.door.result("00_machine", "pass-20")["numbers"]["hours"]}
    assert hours["training"]["how"] == "measured by an earlier run"
    assert "run pass of" in hours["training"]["source"] and not hours["training"]["bound"]


def test_one_stage_alone_and_the_report_alone(done):
    folder = done.door.copy("alone", *STAGES[: STAGES.index("05_formats")])
    ran = done.door.run("run", done.door.file, "-p", "run=alone", "--only", "05")
    assert ran.code == 0 and [line.split()[1] for line in ran.lines if line.startswith("[")] == ["05_formats"]
    assert all(row["verdict"] == "USABLE" for row in done.door.result("05_formats", "alone")["numbers"]["verdicts"])
    (folder / "index.html").unlink()
    ran = done.door.run("report", "alone")
    assert (ran.code, ran.printed) == (0, "report: outputs/alone/index.html\n") and (folder / "index.html").is_file()


def test_plain_papermill_runs_one_notebook_or_says_which_comes_first(done):
    notebook = "notebooks/06_training.ipynb"
    changed = done.door.file.read_text().replace("run: pass", "run: plain").replace("epochs: 3", "epochs: 1")
    (done.door.home / "plain.yaml").write_text(changed)
    shutil.copytree(REPOSITORY / "notebooks", done.door.home / "notebooks", dirs_exist_ok=True)
    arguments = (notebook, "out.ipynb", "-f", "plain.yaml", "-k", "python3")
    ran = done.door.run(*arguments, module="papermill")
    assert ran.code == 1 and ran.left() == []
    assert "06_training needs 03_hidden_states, which has not finished for the run 'plain'" in ran.printed
    assert "papermill notebooks/03_hidden_states.ipynb out.ipynb -f PARAMS" in ran.printed

    done.door.copy("plain", "02_dataset", STATES, "04_vocabulary")
    ran = done.door.run(*arguments, module="papermill")
    assert ran.code == 0, ran.printed
    assert done.door.result("06_training", "plain")["numbers"]["best"] == "0" and "unknown" not in ran.printed


def test_the_inspector_calls_every_file_of_the_pass_usable(done):
    """Samples and mapping of the kit's own, the checkpoint that speculators' Trainer wrote, the draft that vLLM served."""
    best = done.folder / "06_training" / "checkpoints" / done.numbers("06_training")["best"]
    places = (done.folder / STATES, done.folder / "04_vocabulary", best, done.folder / "07_checkpoint" / "draft")
    ran = done.door.run("inspect", *places, "--json")
    told = json.loads(ran.printed)
    assert ran.code == told["exit_code"] == 0 and not told["faults"], ran.printed
    assert told["verdicts"] == dict.fromkeys(("sample", "t2d", "d2t", "token_freq", "draft"), "USABLE")
    assert sum(row["kind"] == "draft" for row in told["rows"]) == 2


def test_a_faulty_draft_is_served_and_the_notebook_names_the_fault_first(done):
    """Its config turns positions otherwise than it learned: vLLM and the prediction both believe the config, and agree. The
    estimate of the trained weights tells."""
    folder = done.door.copy("turned", *STAGES[: STAGES.index("08_acceptance")])
    config = folder / "07_checkpoint" / "draft" / "config.json"
    said = json.loads(config.read_text())
    said["transformer_layer_config"]["rope_parameters"]["rope_theta"] = 3.0
    config.write_text(json.dumps(said))
    ran = done.door.run("run", done.door.file, "-p", "run=turned", "-p", "acceptance.ngram=false",
                        "-p", "acceptance.repeat_plain=true", "--only", "08")  # fmt: skip
    assert ran.code == 0, ran.printed
    numbers, sound = done.door.result("08_acceptance", "turned")["numbers"], done.numbers("08_acceptance")
    assert numbers["acceptance_length"] < sound["acceptance_length"] - 0.05
    assert numbers["agreement"]["within"] and numbers["since_training"] < -0.05 and abs(sound["since_training"]) <= 0.01
    assert numbers["suspects"][0] == "RoPE" and numbers["doubts"], numbers["suspects"]
    # A bad draft changes no answer, and in float32 plain serving says the same twice; none of 24 is not none at all.
    assert numbers["equal"] == {"draft": [24, 24], "plain again": [24, 24]}
    assert numbers["lossless"].startswith("the draft changes 0 of 24 answers, a second plain run 0 of 24: no more than plain")
    page = (folder / "08_acceptance" / "report.html").read_text()
    assert "plain again and plain" in page and "parted per 1,000" in page and not [
        line for line in numbers["not_checked"] if "repeat_plain" in line]  # fmt: skip


@pytest.mark.parametrize("spoil, words", [("missing", "has no config.json, so it is not a draft directory"),
                                          ("other", "speculators_model_type is None, not 'eagle3'")])  # fmt: skip
def test_a_draft_directory_that_is_not_one(done, spoil, words):
    folder = done.door.copy(spoil, "02_dataset", "06_training", "07_checkpoint")
    config = folder / "07_checkpoint" / "draft" / "config.json"
    config.unlink()
    if spoil == "other":
        shutil.copy(done.target / "config.json", config)
    ran = done.door.run("run", done.door.file, "-p", f"run={spoil}", "--only", "08")
    assert ran.code == 1 and words in ran.printed and "Traceback" not in ran.printed and ran.left() == [], ran.printed
    assert str(config.parent) in ran.printed and not (folder / "08_acceptance" / "result.json").exists()
    assert (folder / "07_checkpoint" / "result.json").exists()


# ---- Interrupted


@pytest.fixture(scope="module")
def interrupted(done):
    """The states of the pass made once more under another name: a disk that fills up, a killed runner, a last go."""
    folder = done.door.copy("interrupted", "00_machine", "02_dataset")
    place = folder / STATES
    disk = place / "train"
    disk.mkdir(parents=True)
    small = is_root() and shutil.which("mount") and not _tmpfs(disk, "3m")
    try:
        told = {"small disk": small}
        # Else it would take the states that the pass has.
        command = ("run", done.door.file, "-p", "run=interrupted", "-p", "hidden_states.reuse=false", "--only", "03")
        if small:
            told["full"] = done.door.run(*command)
            told["full stands"] = _hashes(place)
            subprocess.run(["mount", "-o", "remount,size=200m", str(disk)], check=True)
        enough = len(_files(place)) + 3
        # One request at a time: the kernel lives a second longer than its runner, and must not be done by then.
        slow = (*command, "-p", "hidden_states.in_flight=1")
        told["killed"] = done.door.run(*slow, until=lambda: len(_files(place)) >= enough, number=signal.SIGKILL)
        told["killed left"] = told["killed"].left()
        told["killed stands"] = _hashes(place)
        told["resumed"] = done.door.run(*command)
        told["resumed stands"] = _hashes(place)
        told["result"] = done.door.result(STATES, "interrupted") if told["resumed"].code == 0 else {}
        told["content"] = {name: tensors(place / name) for name in told["resumed stands"]}
        yield told
    finally:
        if small:
            subprocess.run(["umount", str(disk)], check=True)


def _tmpfs(place, size: str) -> int:
    return subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)], capture_output=True).returncode


def _files(place) -> list:
    return sorted(place.glob("*/data_*.pt"))


def _hashes(place) -> dict[str, str]:
    return {str(file.relative_to(place)): hashlib.sha256(file.read_bytes()).hexdigest() for file in _files(place)}


def test_a_full_disk_loses_the_sample_in_flight_only_and_says_so(interrupted, done):
    if not interrupted["small disk"]:
        pytest.skip("mounting a small file system is not permitted here")
    full, stands = interrupted["full"], interrupted["full stands"]
    assert full.code == 1 and full.left() == []
    assert "could not be written to" in full.printed and "Free space" in full.printed, full.printed
    assert "goes on from there" in full.printed and "Traceback" not in full.printed
    assert 0 < len(stands) < 120
    assert {name: interrupted["killed stands"][name] for name in stands} == stands, "whole, and kept"
    assert done.door.result("02_dataset", "interrupted")["id"] == done.door.result("02_dataset")["id"]


def test_a_killed_run_leaves_no_process_and_whole_samples(interrupted):
    assert interrupted["killed"].code == -signal.SIGKILL and interrupted["killed left"] == []
    stands = interrupted["killed stands"]
    assert 2 < len(stands) < len(interrupted["resumed stands"]), "killed in the middle"
    assert {name: interrupted["resumed stands"][name] for name in stands} == stands, "kept, and not made again"


def test_the_next_run_goes_on_and_ends_with_the_same_states(interrupted, done):
    assert interrupted["resumed"].code == 0, interrupted["resumed"].printed
    kept, all_of = len(interrupted["killed stands"]), len(interrupted["resumed stands"])
    assert f"{all_of - kept} samples extracted, {kept} kept" in interrupted["resumed"].printed
    assert interrupted["result"]["numbers"]["kept"] == kept
    assert set(interrupted["resumed stands"]) == set(_hashes(done.folder / STATES))
    for name, content in interrupted["content"].items():
        whole = tensors(done.folder / STATES / name)
        assert torch.equal(content["input_ids"], whole["input_ids"]) and torch.equal(content["loss_mask"], whole["loss_mask"])
        for mine, other in zip(content["hidden_states"], whole["hidden_states"], strict=True):
            # Other company in a batch rounds otherwise in the last bits.
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


# ---- The other layout of samples


def test_the_layout_of_newer_speculators_goes_the_same_way(done):
    folder = done.door.copy("newer", "00_machine", "02_dataset", "04_vocabulary")
    command = ("run", done.door.file, "-p", "run=newer", "-p", "hidden_states.format=safetensors", "-p", "training.epochs=1")
    for stage in ("03", "05", "06"):
        ran = done.door.run(*command, "--only", stage)
        assert ran.code == 0, ran.printed
    held_out = read_samples(folder / "02_dataset" / "held_out.parquet")
    place = folder / STATES / "held_out"
    assert {path.name for path in (place / "hidden_states").iterdir()} == {f"hs_{n}.safetensors" for n in range(len(held_out))}
    for number in (0, len(held_out) - 1):
        content, other = tensors(place / "hidden_states" / f"hs_{number}.safetensors"), tensors(
            done.folder / STATES / "held_out" / f"data_{number}.pt")  # fmt: skip
        assert set(content) == {"hidden_states", "token_ids"}
        assert torch.equal(content["token_ids"], other["input_ids"])
        torch.testing.assert_close(content["hidden_states"], torch.stack(other["hidden_states"], 1), rtol=1e-4, atol=1e-5)
    import datasets

    rows = datasets.load_from_disk(str(place))
    assert rows.column_names == ["input_ids", "loss_mask", "seq_len"] and rows[0]["input_ids"].tolist() == held_out[0].input_ids
    first = {row["draft_step"]: row["loss"] for row in done.numbers("06_training")["history"] if row["epoch"] == 0}
    same = {row["draft_step"]: row["loss"] for row in done.door.result("06_training", "newer")["numbers"]["history"]}
    assert set(first) == set(same) == {0, 1, 2}
