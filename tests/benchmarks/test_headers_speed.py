"""Headers against torch.load, on 10,000 samples of 512 tokens: time a file and peak memory, in one run. `make bench` prints it.

Kimi-K2.5's geometry (four states 7,168 wide, bfloat16) would take 290 GB; the width is halved until all samples take at most
a sixth of the free disk and 12 GB. Every file is written by torch.save; each pass runs in a process of its own, over the same
files, torch.load first. Files of one length have equal descriptions, which the reader makes out once; one pass forgets them
after each file, as if all lengths differed. EAGLE3KIT_SAMPLES changes the number of samples.
"""

import json
import os
import resource
import shutil
import subprocess
import sys

import torch

COUNT, TOKENS, STATES = int(os.environ.get("EAGLE3KIT_SAMPLES", 10_000)), 512, 4
PASSES = {
    "torch.load": "torch.load(path, weights_only=True)",
    "torch.load, mapped": "torch.load(path, weights_only=True, mmap=True)",
    "headers, nothing remembered": "headers._known_description.cache_clear(); contracts.recognise(headers.read(path))",
    "headers": "contracts.recognise(headers.read(path))",
}
RUN = """
import json, pathlib, resource, sys, time, torch
from eagle3kit import contracts, headers
torch.set_num_threads(1)
paths = [pathlib.Path(sys.argv[1]) / f"data_{n}.pt" for n in range(int(sys.argv[2]))]
path = paths[0]; PASS
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
began = time.perf_counter()
for path in paths:
    PASS
print(json.dumps([time.perf_counter() - began, before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss]))
"""


def test_headers_take_a_tenth_of_the_time_of_loading(tmp_path):
    hidden = 7168
    while COUNT * TOKENS * STATES * hidden * 2 > min(shutil.disk_usage(tmp_path).free / 6, 12e9):
        hidden //= 2
    row, states = torch.arange(TOKENS), [torch.randn(TOKENS, hidden, dtype=torch.bfloat16) for _ in range(STATES)]
    for number in range(COUNT):
        torch.save({"input_ids": row, "loss_mask": row % 2, "hidden_states": states}, tmp_path / f"data_{number}.pt")
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    print(f"\n{COUNT:,} samples of {TOKENS} tokens, {STATES} states {hidden} wide, bfloat16: {size / 1e9:.1f} GB")
    seconds = {}
    for name, call in PASSES.items():
        ran = subprocess.run([sys.executable, "-c", RUN.replace("PASS", call), tmp_path, str(COUNT)], check=True,
                             capture_output=True, text=True)  # fmt: skip
        seconds[name], before, peak = json.loads(ran.stdout)
        print(f"{name}: {seconds[name]:.2f} s, {seconds[name] / COUNT * 1e3:.3f} ms a file; peak memory {peak / 1024:.0f} MiB, "
              f"{(peak - before) / 1024:+.1f} MiB over one file")  # fmt: skip
    ratio = seconds["headers"] / seconds["torch.load"]
    print(f"headers take {ratio:.3f} of the time of torch.load, {seconds['headers'] / seconds['torch.load, mapped']:.3f} of the "
          "mapped one")  # fmt: skip
    shutil.rmtree(tmp_path)
    assert ratio <= 0.1 and resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss > 0
