"""What torch, vLLM and speculators need in order to run without a GPU, each with its reason, all in this one room."""

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3kit.errors import KitError

if TYPE_CHECKING:
    from torch import Tensor

    from eagle3kit.params import Training

CONNECTOR = {"kv_connector": "CpuHiddenStatesConnector", "kv_connector_module_path": "eagle3kit.connector"}
LATENT_WORKER = "eagle3kit.latent_worker.LatentWorker"  # for a dense draft beside latent attention


def is_cpu() -> bool:
    """True when torch sees no accelerator, so that vLLM serves and speculators trains on the CPU."""
    import torch

    return not torch.cuda.is_available()


def refuse_what_needs_a_gpu(recipe: "Training") -> None:
    """KitError for parameters of training that only a GPU can follow, before hours are spent on what comes before it.

    flex attention has no CPU backward pass; fused losses are Triton's; speculators opens its autocast for CUDA alone, so
    bfloat16 inputs would meet float32 weights.
    """
    if not is_cpu():
        return
    for name, value, instead in (("attention", "simple_flex_attention", "sdpa"), ("loss_implementation", "fused", "eager"),
                                 ("dtype", "bfloat16", "float32")):  # fmt: skip
        if getattr(recipe, name) == value:
            raise KitError(f"training.{name} is {value}, which needs a GPU, and torch sees none here; use {instead}")


def cores() -> list[int]:
    """The cores this process may use, e.g. [0, 1]."""
    return sorted(os.sched_getaffinity(0))


def no_shared_memory() -> str:
    """Why the ranks of a vLLM here cannot reduce by shared memory; "" where they can. Not every build has kernels for that: of
    vLLM 0.32's for x86 only the one for AVX-512."""
    os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
    import torch

    try:
        from vllm.platforms import current_platform

        current_platform.import_kernels()
    except Exception as error:  # no vLLM, or a build whose kernels this processor cannot run
        return f"{type(error).__name__}: {error}"
    has = hasattr(torch.ops._C, "init_shm_manager")
    return "" if has else "this build of vLLM has no all-reduce by shared memory for this processor"


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """torch computes on one thread inside this block, also in threads that begin in it: what is small, and done many times at
    once on all cores, is not to be shared out once more, for every share would wait for a core that another has."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def beside_gpu() -> Iterator[None]:
    """Where a GPU computes, torch's work on the CPU is small and stays on one thread inside this block: the others would wait for
    it by spinning, on cores that whatever else runs here needs. On a machine without a GPU the block changes nothing."""
    if is_cpu():
        yield
        return
    with one_thread():
        yield


def vllm_environment(
    *, threads: int | None, kv_cache_gib: int, tensor_parallel: int = 1, prefix: str = sys.prefix
) -> dict[str, str]:  # fmt: skip
    """Environment variables for a vLLM server on the CPU.

    Args:
        threads: cores a worker computes on; None = all that this process may use, shared among the workers.
        kv_cache_gib: size of the KV cache in GiB (vLLM's CPU default takes a share of the whole memory instead).
        tensor_parallel: number of workers.
        prefix: folder of the environment that vLLM is in.

    vLLM's own choice ("auto") sets one core aside for the web server; of two cores that is half the machine
    (measured: 132 tokens/s with one core, 212 with both).
    """
    every = cores()
    share = max(1, min(threads or len(every), len(every)) // tensor_parallel)
    binding = "|".join(
        ",".join(str(every[(worker * share + k) % len(every)]) for k in range(share)) for worker in range(tensor_parallel)
    )
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": str(kv_cache_gib),
        "VLLM_CPU_OMP_THREADS_BIND": binding,
        # Without it a build that is not named "…cpu" looks for a GPU.
        "VLLM_TARGET_DEVICE": "cpu",
    }
    openmp = Path(prefix) / "lib" / "libiomp5.so"
    if openmp.exists():  # vLLM's advice for x86: Intel's OpenMP, from the package intel-openmp that it installs itself
        environment["LD_PRELOAD"] = ":".join(filter(None, [str(openmp), os.environ.get("LD_PRELOAD", "")]))
    return environment


def orthogonalised(update: "Tensor", coefficients: tuple[float, float, float], steps: int, eps: float) -> "Tensor":
    """Newton-Schulz iteration towards the nearest (semi-)orthogonal matrix of `update` [m, n], in float32.

    With X of spectral norm at most 1, repeat X <- a X + (b A + c A²) X, A = X Xᵀ: an odd polynomial of the singular values
    (Jordan et al. 2024, "Muon"). torch's own (optim/_muon.py) computes it in bfloat16, which a CPU without bfloat16
    arithmetic emulates: 90 % of the training time of a small draft. In float32 it costs a fifth.
    """
    import torch

    a, b, c = coefficients
    wide = update.shape[0] <= update.shape[1]
    x = (update if wide else update.T).float()
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide else x.T


@dataclass(frozen=True)
class WithoutPadding:
    """A collate function whose batches end where their last sample ends: tensors [1, n ≤ max_len, …].

    speculators packs samples into steps of a fixed length (train/data.py, CollateFn) and pads what stays free, since a
    compiled model on a GPU wants one shape. Here nothing is compiled, and padding, which no loss sees, would cost as much
    as samples: an eighth of the steps' time with chats of 240 tokens in steps of 1,024.
    """

    collate: Callable[[Any], dict[str, Any]]

    def __call__(self, samples: Any) -> dict[str, Any]:
        batch = self.collate(samples)
        padded = batch["document_ids"].shape[1]
        used = max(1, int((batch["document_ids"] >= 0).sum()))
        return {key: value[:, :used] if getattr(value, "ndim", 0) > 1 and value.shape[1] == padded else value
                for key, value in batch.items()}  # fmt: skip


@contextlib.contextmanager
def trainable() -> Iterator[None]:
    """speculators 0.9 trains on the CPU inside this block; on a GPU machine the block changes nothing.

    Four places assume an accelerator; each is answered for the time of the block and put back after it:
      - train/trainer.py moves batches to `get_local_rank()`, a CUDA index: here the CPU device;
      - train/trainer.py times logged steps after `torch.accelerator.synchronize()`, which raises without one;
      - train/checkpointer.py loads onto `get_current_device()`, "cuda:0";
      - torch/optim/_muon.py orthogonalises in bfloat16: here `orthogonalised`, in float32.
    A fifth is only noise: the trainer opens `torch.autocast("cuda")`, which switches itself off with a warning.
    """
    if not is_cpu():
        yield
        return
    import warnings

    import torch
    from speculators.train import checkpointer, trainer
    from torch.optim import _muon

    kept = trainer.get_local_rank, torch.accelerator.synchronize, checkpointer.get_current_device
    bfloat16_version, _muon._zeropower_via_newtonschulz = _muon._zeropower_via_newtonschulz, orthogonalised
    trainer.get_local_rank = lambda: torch.device("cpu")
    torch.accelerator.synchronize = lambda *_, **__: None
    checkpointer.get_current_device = lambda: "cpu"
    loader_logger = logging.getLogger("torch.utils.data")
    level = loader_logger.level
    loader_logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            for text in (".*CUDA is not available.*", ".*pin_memory.*", ".*lr_scheduler.step.*before.*"):
                warnings.filterwarnings("ignore", message=text)
            yield
    finally:
        trainer.get_local_rank, torch.accelerator.synchronize, checkpointer.get_current_device = kept
        _muon._zeropower_via_newtonschulz = bfloat16_version
        loader_logger.setLevel(level)
