"""The machine and the plan: bytes a run will write, known before it writes any."""

import os
import shutil

import pytest

from eagle3kit import machine
from eagle3kit.errors import KitError


def plan(folder, **changes):
    values = {"samples": 100, "max_length": 512, "states": 4, "hidden_size": 576, "vocab_size": 49152, "draft_vocab_size": 8192,
              "dtype": "float32"}
    return machine.plan(folder=folder, **values | changes)


def test_bytes_of_hidden_states_as_published(tmp_path):
    kimi = {"hidden_size": 7168, "dtype": "bfloat16", "vocab_size": 163840, "draft_vocab_size": 32000}
    one = plan(tmp_path, samples=1, max_length=131_072, **kimi)
    assert one.bytes_per_token == 57_344 and one.states_gib == 7.0
    many = plan(tmp_path, samples=100_000, max_length=2000, **kimi)
    assert many.states_gib * 2**30 / 1e12 == pytest.approx(11.5, abs=0.05)
    llama = plan(tmp_path, samples=1, max_length=8192, hidden_size=4096, dtype="bfloat16")
    assert llama.states_gib * 2**30 / 1e6 == pytest.approx(268, abs=0.5)


def test_a_plan_grows_with_what_it_holds(tmp_path):
    base = plan(tmp_path)
    assert base.bytes_per_token == 4 * 576 * 4 and base.tokens == 51_200
    assert plan(tmp_path, dtype="bfloat16").states_gib == base.states_gib / 2 == plan(tmp_path, dtype="float16").states_gib
    assert plan(tmp_path, samples=200).states_gib == 2 * base.states_gib
    assert plan(tmp_path, samples=200).checkpoints_gib == base.checkpoints_gib
    assert base.needed_gib == base.states_gib + base.checkpoints_gib and base.free_gib > 0
    # Of the checkpoints at least embedding and head are there three times, in float32.
    assert base.checkpoints_gib > 3 * 4 * (49152 + 8192) * 576 / 2**30


def test_a_run_that_does_not_fit_is_refused_before_it_starts(tmp_path):
    fits = plan(tmp_path, samples=1)
    machine.refuse_if_too_big(fits)
    big = machine.Plan(bytes_per_token=57_344, tokens=200_000_000, states_gib=10_681.2, checkpoints_gib=3.8, free_gib=100.04)
    with pytest.raises(KitError) as caught:
        machine.refuse_if_too_big(big)
    assert str(caught.value) == (
        "this run may write 10685.0 GiB (200,000,000 tokens at 57,344 bytes of hidden states, and checkpoints), but only "
        "100.0 GiB are free; lower dataset.samples or dataset.max_length, or move the outputs folder (EAGLE3KIT_OUTPUTS) to a "
        "larger disk"
    )
    machine.refuse_if_too_big(machine.Plan(1, 1, 5.0, 5.0, 10.0))


def test_states_that_do_not_fit_are_refused_before_the_first_is_asked_for(tmp_path):
    free = shutil.disk_usage(tmp_path).free
    kimi = {"states": 4, "hidden_size": 7168, "dtype": "bfloat16", "folder": tmp_path}
    machine.refuse_if_no_room(free // 57_344 // 2, **kimi)
    with pytest.raises(KitError, match=r"states of [\d,]+ tokens take [\d.]+ GiB, but only [\d.]+ GiB are free .*EAGLE3"):
        machine.refuse_if_no_room(2 * free // 57_344, **kimi)


def test_inventory_says_what_this_process_may_use(tmp_path):
    found = machine.inventory(tmp_path)
    assert found["cores"] == len(os.sched_getaffinity(0))
    assert 0 < found["free_memory_gib"] <= found["memory_gib"] and found["free_disk_gib"] >= 0
    assert "Python 3." in found["system"] and found["vectors"] and found["gpus"] == machine.gpus()


def test_gpus_are_read_from_the_drivers_program(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert machine.gpus() == []
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA H200, 143771 MiB, 570.1'\necho 'NVIDIA H200, 143771 MiB, 570.1'\necho oops\n")
    program.chmod(0o755)
    row = {"name": "NVIDIA H200", "memory.total": "143771 MiB", "driver_version": "570.1"}
    assert machine.gpus() == [row, row]
    for visible, count in (("0", 1), ("1", 1), ("1,0", 2), ("", 0), ("-1", 0), ("0,7,1", 1), ("GPU-5ab", 1), ("0, 1", 2)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert len(machine.gpus()) == count, visible
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    program.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed because it could not communicate with the driver'\nexit 9\n")
    assert machine.gpus() == []


def test_versions_are_those_installed():
    import torch

    found = machine.versions()
    assert found["torch"] == torch.__version__ and "speculators" in found
    assert "no-such-package" not in found and set(found) <= set(machine.PACKAGES)
