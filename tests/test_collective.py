"""The all-reduce between real ranks, what its numbers mean, and that nothing of it stays behind."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from conftest import REPOSITORY

from eagle3kit import KitError, child, collective, collective_ranks, cpu, decode_plan, decode_rows, fabric
from eagle3kit.collective import Measured, Request, Timing


def wait_for(what, limit_s: float = 90.0) -> None:
    until = time.monotonic() + limit_s
    while not what():
        assert time.monotonic() < until, "it never came"
        time.sleep(0.05)


def test_messages_of_decode_are_tokens_times_width():
    found = collective.messages(batches=(1, 8), draft_tokens=[3], hidden_size=7168, bytes_per_number=2)
    assert found == {1: 14_336, 4: 57_344, 8: 114_688, 32: 458_752}
    few = collective.messages(batches=[1], draft_tokens=[3], hidden_size=10, bytes_per_number=4)
    assert few == {1: 40, 4: 160, 8: 320}, "a line needs a third size"
    found = collective.messages(batches=[4], draft_tokens=[1, 2], hidden_size=10, bytes_per_number=4)
    assert found == {1: 40, 4: 160, 8: 320, 12: 480}


def test_a_collective_ends_with_its_slowest_rank():
    timing = Timing("gloo", 8, [[1.0, 5.0, 2.0, 4.0], [3.0, 2.0, 2.0, 9.0]])
    assert timing.slowest == [3.0, 5.0, 2.0, 9.0]
    assert (timing.minimum, timing.median, timing.p95) == (2.0, 4.0, 9.0)
    assert timing.quickest == 2.0  # of 1, 2, 2, 4
    many = Timing("gloo", 8, [[float(n) for n in range(1, 101)]])
    assert (many.minimum, many.median, many.p95) == (1.0, 50.5, 96.0)


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> Measured:
    folder = tmp_path_factory.mktemp("a {collective}")  # a folder's name may hold anything
    return collective.measure(Request(sizes=[1024, 65_536, 1_048_576], ranks=2, device="cpu", repeats=12), folder, timeout_s=120)


def test_two_ranks_time_every_size(measured):
    why = cpu.no_shared_memory()
    assert measured.ways == ["gloo", "vLLM shared memory"][: 1 if why else 2]
    assert measured.missing == ({"vLLM shared memory": why} if why else {})
    for way in measured.ways:
        assert [timing.size for timing in measured.of(way)] == [1024, 65_536, 1_048_576]
    for timing in measured.timings:
        assert [len(rank) for rank in timing.seconds] == [12, 12] and min(map(min, timing.seconds)) > 0
        assert timing.minimum <= timing.median <= timing.p95 and timing.quickest <= timing.median
    assert "gloo" in measured.links["backend"]


def test_a_line_goes_through_the_medians(measured):
    line = decode_plan.fits(measured)["gloo"]
    assert [size for size, _ in line.points] == [1024, 65_536, 1_048_576] and abs(sum(line.residuals_us)) < 1e-6
    for timing, residual in zip(measured.of("gloo"), line.residuals_us, strict=True):
        assert 1e6 * timing.median - line.us(timing.size) == pytest.approx(residual)
    assert decode_plan.fits(Measured(measured.timings[:1], {}, {})) == {}


def test_a_child_without_an_answer_is_told_with_its_log(tmp_path):
    with pytest.raises(KitError, match="left no answer; the end of its log"):
        child.call("eagle3kit.no_such_room", {}, tmp_path / "none", timeout_s=60)


def test_a_rank_that_dies_loses_nothing_of_what_was_timed_before(tmp_path):
    many = Request(sizes=[64, *[2**26] * 500], ranks=2, device="cpu", repeats=20, warmup=0)
    first = tmp_path / "rank-0.jsonl"
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(collective.measure, many, tmp_path, timeout_s=120)
        wait_for(lambda: first.is_file() and '"size": 64' in first.read_text())
        ranks = [p for p in psutil.Process().children(recursive=True) if "spawn_main" in " ".join(p.cmdline())]
        assert len(ranks) >= 2
        ranks[-1].kill()
        found = asked.result()
    assert [timing.size for timing in found.timings][:1] == [64] and len(found.timings[0].seconds[1]) == 20
    assert re.fullmatch(r"eagle3kit.collective ended with code 1 after \d+ s", found.missing["the rest"])


def test_a_child_that_takes_too_long_is_ended(tmp_path):
    slow = Request(sizes=[2**26], ranks=2, device="cpu", repeats=10**6)
    found = collective.measure(slow, tmp_path, timeout_s=3)
    assert found.timings == [] and found.missing == {"the rest": "eagle3kit.collective was not done after 3 s and was ended"}


def test_no_rank_outlives_who_asked(tmp_path):
    ask = (f"from pathlib import Path\nfrom eagle3kit.collective import Request, measure\n"
           f"measure(Request(sizes=[2**26], ranks=2, device='cpu', repeats=10**6), Path({str(tmp_path)!r}))")
    asking = subprocess.Popen([sys.executable, "-c", ask], env={**os.environ, "PYTHONPATH": str(REPOSITORY)})
    wait_for(lambda: all((tmp_path / f"rank-{rank}.jsonl").is_file() for rank in (0, 1)))
    family = psutil.Process(asking.pid).children(recursive=True)
    assert len(family) >= 4  # the guard, the child, two ranks
    asking.send_signal(signal.SIGTERM)
    asking.wait(30)
    _, alive = psutil.wait_procs(family, timeout=30)
    assert alive == []
    assert json.loads((tmp_path / "answer.json").read_text())["timings"] == []


TWO = """\t\x1b[4mGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV18\t0-31\t0
GPU1\tNV18\t X \t0-31\t0

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
"""
FOUR = """\tGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity
GPU0\t X \tPIX\tSYS\tSYS\tSYS\t0-31
GPU1\tPIX\t X \tSYS\tSYS\tSYS\t0-31
GPU2\tSYS\tSYS\t X \tPIX\tNODE\t32-63
GPU3\tSYS\tSYS\tPIX\t X \tNODE\t32-63
NIC0\tSYS\tSYS\tNODE\tNODE\t X
"""


def test_gpus_that_cannot_be_seen_are_not_told_of():
    assert collective_ranks.topology(FOUR, "2,3") == "PIX: GPU0-GPU1"
    assert collective_ranks.topology(FOUR, "3, 1, 0") == "SYS: GPU0-GPU1, GPU0-GPU2; PIX: GPU1-GPU2"
    assert collective_ranks.topology(FOUR, "1") == ""
    assert collective_ranks.topology(FOUR, "GPU-6c0d3f2a") == collective_ranks.topology(FOUR)


@pytest.mark.parametrize(("said", "told"), [
    (TWO, "NV18: GPU0-GPU1"),
    (FOUR, "PIX: GPU0-GPU1, GPU2-GPU3; SYS: GPU0-GPU2, GPU0-GPU3, GPU1-GPU2, GPU1-GPU3"),
    (FOUR.replace("PIX", "SYS"), "SYS: all 6 pairs"),
    ("\x1b[1mNo devices were found\x1b[0m\n", "No devices were found"),
    ("", ""),
])  # fmt: skip
def test_a_topology_is_told_by_pairs(said, told):
    assert collective_ranks.topology(said) == told


def test_a_bandwidth_that_drowns_in_noise_is_not_told():
    def bandwidth(*us: float) -> str:
        lines = {"NCCL": fabric.fit(list(zip((8192, 32768, 131072, 524288, 2097152), us, strict=True)))}
        alone = Measured(timings=[], links={}, missing={})
        return decode_rows.links(alone, lines).set_index("what").loc["NCCL: bandwidth", "value"]

    assert bandwidth(5.0, 8.2, 8.1, 9.9, 16.0).endswith(" GB/s")
    assert bandwidth(77.5, 70.9, 78.0, 69.1, 76.0).startswith("not told"), "the line would say 2 TB/s"
    assert bandwidth(78.0, 77.5, 77.0, 76.5, 76.0).startswith("not told")


def test_what_joins_gpus_is_told_in_words():
    def told(peers: list[list[bool]]) -> dict[str, str]:
        links = {"backend": "NCCL 2.28.9", "settings": {"NCCL_NVLS_ENABLE": "0"}, "gpus": ["H200", "H200"], "peer_access": peers,
                 "topology": "NV18: GPU0-GPU1"}  # fmt: skip
        return dict(decode_rows.links(Measured(timings=[], links=links, missing={}), {}).to_numpy().tolist())

    assert told([[True, True], [True, True]]) == {
        "backend": "NCCL 2.28.9", "topology": "NV18: GPU0-GPU1", "GPUs": "2 × H200",
        "peer access": "from every GPU to every other", "NCCL_NVLS_ENABLE": "0"}  # fmt: skip
    assert told([[True, False], [True, True]])["peer access"] == "not from GPU 0 to 1"
