"""Two ranks that multiply and all-reduce over gloo, profiled: python tworanks.py FOLDER -> rank0.json, rank1.json.gz there."""

import multiprocessing
import os
import sys
import time

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["GLOO_SOCKET_IFNAME"] = "lo"

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function


def run(rank: int, folder: str) -> None:
    """Profile six steps; rank 1 comes late to every second all-reduce."""
    dist.init_process_group("gloo", init_method=f"file://{os.path.abspath(folder)}/store", rank=rank, world_size=2)
    left, right, small = torch.randn(64, 576), torch.randn(576, 576), torch.ones(4, 576)

    def step() -> None:
        out = torch.nn.functional.rms_norm(left @ right, (576,))
        dist.all_reduce(out)
        if rank == 1:
            time.sleep(0.02)
        dist.all_reduce(small)
        small.fill_(1)

    step()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(6):
            with record_function("one step"):
                step()
    profiler.export_chrome_trace(os.path.join(folder, f"rank{rank}.json" + (".gz" if rank else "")))
    dist.destroy_process_group()


if __name__ == "__main__":
    fork = multiprocessing.get_context("fork")  # torch is loaded once for both
    ranks = [fork.Process(target=run, args=(rank, sys.argv[1])) for rank in range(2)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join()
    sys.exit(max(abs(one.exitcode) for one in ranks))
