"""Training on several processes of one machine, one a GPU: started by torchrun, watched, logged, none of them left behind.

Where one process would do, it is this one. Else torchrun starts `python -m eagle3kit.ranks FOLDER` once a rank; each builds the
same draft anew, takes its own batches, and averages gradients with the others: copies of the draft (DDP), or with
`training.shard` weights and optimizer in parts (FSDP), as speculators' Trainer has both.

FOLDER holds what ranks are told and what they say: `request.json`, `rank-N.log` (all its output), `rank-N.json` (how it ended),
`progress.jsonl` (what rank 0 reports), `torchrun.log`. Ranks meet in a file there and talk over loopback; torchrun's own way, a
store that listens on every address of the machine, is not used.
"""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3kit import cpu, draft, training, vocabulary
from eagle3kit.epochs import Fitted
from eagle3kit.errors import KitError
from eagle3kit.files import log_end, read_json, write_json
from eagle3kit.params import Training
from eagle3kit.samples import Store, open_store

if TYPE_CHECKING:
    from speculators.models.eagle3 import Eagle3DraftModel

PROGRESS = "progress.jsonl"
# How the death of one rank shows in the others: no cause, only its echo.
_ECHOES = ("connection closed", "connection reset", "broken pipe", "gloo", "nccl", "remote process", "training was stopped")


@dataclass(frozen=True, kw_only=True)
class Job:
    """All that a rank trains from, as JSON holds it: folders of the target, of t2d/d2t, of both sides and of the checkpoints;
    the auxiliary layer ids; the recipe's fields; the seed; how many processes train."""

    target: str
    mapping: str
    train: str
    held_out: str
    checkpoints: str
    layers: list[int]
    recipe: dict[str, Any]
    seed: int
    processes: int
    trust_remote_code: bool = False


def count(asked: int) -> int:
    """How many processes train: 0 = one a GPU that torch sees, and one where it sees none.

    Raises:
        KitError: more than there are GPUs, where there are any.
    """
    import torch

    gpus = torch.cuda.device_count()
    if gpus and asked > gpus:
        raise KitError(f"training.processes is {asked}, but torch sees {gpus} GPUs here; lower it, or write 0 for all of them")
    return asked or max(1, gpus)


def fit(
    model: "Eagle3DraftModel", train: Store, held_out: Store, folder: Path, recipe: Training, *, seed: int, logs: Path,
    target: Path, mapping: Path, trust_remote_code: bool = False, cluster: str | None = None,
    report: Callable[[dict[str, Any]], None], told: Callable[[str], None],
) -> Fitted:  # fmt: skip
    """As `training.fit`, on as many processes as `recipe.processes` says; what comes out is of the same kind.

    A step of n processes takes n batches of `tokens_per_step` tokens, so an epoch has about n times fewer steps. Where samples do
    not divide among the processes, an epoch leaves out up to n - 1 of them, others each time (they are drawn by epoch).

    Args:
        logs: a folder of the ranks' own, kept; what an earlier training left there is removed.
        target, mapping: what `model` was built from; a rank builds it anew, equal for the seed.
        cluster: train on a machine of this Ray cluster (`cluster_training`), None: on this one.

    Raises:
        KitError: as `training.fit`, and when a rank ends before its time: which one, why, the end of its log.
    """
    processes = recipe.processes if cluster else count(recipe.processes)
    if processes == 1 and not cluster:
        return training.fit(model, train, held_out, folder, recipe, seed=seed, report=report, told=told)
    job = Job(target=str(target), mapping=str(mapping), train=str(train.folder), held_out=str(held_out.folder),
              checkpoints=str(folder), layers=list(model.target_layer_ids), recipe=recipe.model_dump(), seed=seed,
              processes=processes, trust_remote_code=trust_remote_code)  # fmt: skip

    def prepare(found: int) -> None:
        training.prepare(model.t2d, train, held_out, folder, recipe, seed=seed, processes=found)

    logs.mkdir(parents=True, exist_ok=True)
    if cluster:
        from eagle3kit import cluster_training  # late: it needs this room

        cluster_training.run(cluster, job, logs, prepare, report=report, told=told)
    else:
        prepare(processes)
        launch(job, logs, report=report, told=told)
    return training.fitted(folder, recipe.epochs)


def launch(job: Job, logs: Path, *, report: Callable[[dict[str, Any]], None], told: Callable[[str], None]) -> None:
    """Run a job on `job.processes` ranks of this machine until all have ended; KitError as `fit` says."""
    for old in [*logs.glob("rank-*"), logs / PROGRESS, logs / "meeting", logs / "rendezvous"]:
        old.unlink(missing_ok=True)
    write_json(logs / "request.json", asdict(job))
    cores = len(cpu.cores())
    paths = os.pathsep.join(filter(None, [str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")]))
    environment = {
        **os.environ, "PYTHONPATH": paths,
        "OMP_NUM_THREADS": str(max(1, cores // job.processes)),
        # All ranks are here: nothing of theirs is to be reached from elsewhere, and a machine's own name may not resolve.
        "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }  # fmt: skip
    command = [sys.executable, "-m", "eagle3kit.guard", sys.executable, "-m", "torch.distributed.run",
               "--nnodes=1", f"--nproc-per-node={job.processes}", "--max-restarts=0", "--local-addr=127.0.0.1",
               "--rdzv-backend=c10d", f"--rdzv-endpoint={logs / 'rendezvous'}", "--rdzv-conf=store_type=file",
               "-m", "eagle3kit.ranks", str(logs)]  # fmt: skip
    with open(logs / "torchrun.log", "wb") as output:
        torchrun = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, env=environment,
                                    start_new_session=True)  # fmt: skip
    heard = 0
    try:
        while torchrun.poll() is None:
            time.sleep(0.2)
            heard = hear(logs, heard, report, told)
    finally:
        torchrun.stdin.close()  # the guard's sign to end the family
        torchrun.wait()
    hear(logs, heard, report, told)
    if torchrun.returncode:
        raise KitError(why(logs, job.processes))


def hear(logs: Path, heard: int, report: Callable[[dict[str, Any]], None], told: Callable[[str], None]) -> int:
    """Hand on what rank 0 has said since byte `heard` of progress.jsonl; returns where it ends now."""
    path = logs / PROGRESS
    if not path.exists():
        return heard
    with open(path, "rb") as file:
        file.seek(heard)
        for line in file:
            if not line.endswith(b"\n"):
                break
            heard += len(line)
            said = json.loads(line)
            (report if "row" in said else told)(said.get("row") or said["line"])
    return heard


def why(logs: Path, processes: int) -> str:
    """Why a training on several processes failed, from what each rank left: which rank's fault it is, and the end of its log.

    A rank that was killed leaves no rank-N.json, and the others then say only that it is gone. So first a rank whose error is
    its own, the earliest; then one that left nothing; then the earliest of the rest.
    """
    ends = {rank: read_json(path) for rank in range(processes) if (path := logs / f"rank-{rank}.json").exists()}
    failed = sorted((end["time"], rank) for rank, end in ends.items() if end["error"])
    own = [rank for _, rank in failed if not any(echo in ends[rank]["error"].lower() for echo in _ECHOES)]
    silent = [rank for rank in range(processes) if rank not in ends]
    if len(silent) > 1:  # ranks that wait for one that was killed are killed in their turn: torchrun tells which was the first
        text = (logs / "torchrun.log").read_text(errors="replace") if (logs / "torchrun.log").exists() else ""
        first = re.search(r"Root Cause \(first observed failure\):.*?\brank\s*:\s*(\d+)", text, re.DOTALL)
        silent.sort(key=lambda rank: first is None or rank != int(first[1]))
    rank = next(iter([*own, *silent, *(rank for _, rank in failed)]), None)
    if rank is None:
        return f"torchrun failed; the end of its log, {logs / 'torchrun.log'}:\n{log_end(logs / 'torchrun.log')}"
    log = logs / f"rank-{rank}.log"
    if rank in ends and ends[rank]["kind"] == "KitError":
        return ends[rank]["error"]
    what = ends[rank]["error"] if rank in ends else "it was killed, or ran out of memory (dmesg says which)"
    if not log.exists():
        log = logs / "torchrun.log"
    return (f"training on {processes} processes: rank {rank} ended before its time: {what}. Run the stage again: it goes on "
            f"after the last whole epoch. The end of its log, {log}:\n{log_end(log)}")  # fmt: skip


def main(logs: Path) -> int:
    """One rank, started by torchrun: its output goes to a log of its own, its end to rank-N.json."""
    rank = int(os.environ["RANK"])
    with open(logs / f"rank-{rank}.log", "wb") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    kind = error = ""
    try:
        _learn(Job(**read_json(logs / "request.json")), logs, rank)
    except BaseException as problem:
        kind, error = type(problem).__name__, " ".join(str(problem).split()) or type(problem).__name__
        raise
    finally:
        write_json(logs / f"rank-{rank}.json", {"time": time.time(), "kind": kind, "error": error})
    return 0


def _learn(job: Job, logs: Path, rank: int) -> None:
    import torch
    import torch.distributed as dist

    if job.processes > 1:
        _meet(logs, rank, job.processes)
    recipe = Training(**job.recipe)
    t2d, d2t = vocabulary.read(Path(job.mapping))
    model = draft.build(Path(job.target), t2d, d2t, recipe, layer_ids=job.layers, seed=job.seed,
                        trust_remote_code=job.trust_remote_code)  # fmt: skip
    torch.manual_seed(job.seed)

    def say(**what: Any) -> None:
        with open(logs / PROGRESS, "a", encoding="utf-8") as file:
            file.write(json.dumps(what) + "\n")

    train, held_out = (open_store(Path(side)) for side in (job.train, job.held_out))
    training.learn(model, train, held_out, Path(job.checkpoints), recipe, seed=job.seed,
                   report=lambda row: say(row=row), told=lambda line: say(line=line))  # fmt: skip
    if job.processes > 1:
        dist.destroy_process_group()


def _meet(logs: Path, rank: int, processes: int) -> None:
    """Join the other ranks, and tell speculators so.

    What its own `maybe_setup_distributed` (train/distributed.py) does, but for the store: that one listens on every address, and
    is for accelerators only.
    """
    import torch
    import torch.distributed as dist
    from speculators.train import distributed

    gpu, local = not cpu.is_cpu(), int(os.environ["LOCAL_RANK"])
    if gpu:
        torch.accelerator.set_device_index(local)
    else:
        torch.set_num_threads(max(1, len(cpu.cores()) // processes))
    store = dist.FileStore(str(logs / "meeting"), processes)
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo", store=store, rank=rank, world_size=processes)
    distributed._local_rank, distributed._rank, distributed._world_size = local, rank, processes
    distributed._is_distributed = True
    distributed._init_sp_process_groups(rank, processes, 1)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
