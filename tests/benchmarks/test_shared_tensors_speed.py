"""The three tensors that a draft takes of Kimi-K2.5, at their true size (4.7 GB of embedding and head): time and peak memory of
loading them through the kit, against reading as many bytes of the same file. `make bench` prints it. Needs 6 GB of disk."""

import json
import os
import shutil
import struct
import subprocess
import sys

import pytest
import tinykimi
import torch

ROWS, HIDDEN = 163840, 7168
NAMES = {"language_model.lm_head.weight": [ROWS, HIDDEN], "language_model.model.embed_tokens.weight": [ROWS, HIDDEN],
         "language_model.model.layers.0.mlp.down_proj.weight": [HIDDEN, 18432], "language_model.model.norm.weight": [HIDDEN]}
RUN = """
import json, pathlib, resource, sys, time, torch
from safetensors import safe_open
from eagle3kit import target
torch.set_num_threads(1)
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
folder = pathlib.Path(sys.argv[1])
before, began = peak(), time.perf_counter()
CALL
print(json.dumps([time.perf_counter() - began, peak() - before]))
"""
CALLS = {
    "read alone": "file = open(folder / 'model.safetensors', 'rb', buffering=0)\nwhole = bytearray(SIZE)\nfile.readinto(whole)",
    "named and mapped": "found = target.weights(folder)",
    "copied, all at once": "found = {name: value.clone() for name, value in target.weights(folder).items()}",
    "copied, one by one": "names = ('embed', 'head', 'final_norm')\n"
                          "found = {name: target.weights(folder, (name,))[name].clone() for name in names}",
}


def test_the_shared_tensors_cost_what_their_bytes_cost(tmp_path):
    if shutil.disk_usage(tmp_path).free < 6e9:
        pytest.skip("needs 6 GB of disk")
    header, end = {}, 0
    for name, shape in NAMES.items():
        size = 2 * torch.Size(shape).numel()
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        block, left = os.urandom(2**24), end
        while left:
            left -= file.write(block[: min(left, len(block))])
    (tmp_path / "config.json").write_text(json.dumps(tinykimi.config(dtype="bfloat16")))
    needed = sum(2 * torch.Size(shape).numel() for name, shape in NAMES.items() if "layers" not in name)
    seconds, more = {}, {}
    for name, call in CALLS.items():
        code = RUN.replace("CALL", call.replace("SIZE", str(needed)))
        ran = subprocess.run([sys.executable, "-c", code, tmp_path], check=True, capture_output=True, text=True)
        seconds[name], more[name] = json.loads(ran.stdout)
        print(f"\n{name}: {seconds[name]:.2f} s, peak memory {more[name] / 1e9:+.2f} GB, for {needed / 1e9:.2f} GB of tensors")
    shutil.rmtree(tmp_path)
    # A mapped file's pages count as memory of the process until they are unmapped: one by one (as `draft.build` does) the last
    # copy stands beside the pages of one tensor, so 1.5 times the bytes; all at once, beside all of them.
    assert more["named and mapped"] < 0.05 * needed and more["copied, one by one"] < 1.55 * needed
