"""How fast the real work goes here, timed for some seconds before any of it is done: training steps of the draft at its true
shape, and writes to the disk that will hold the states (the target's passes: `trial_passes`). Weights are drawn at random:
speed is in shapes, not in what the weights say."""

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3kit import cpu, figures
from eagle3kit.errors import KitError
from eagle3kit.figures import Figure

if TYPE_CHECKING:
    from eagle3kit.params import Training

BLOCK = 2**24  # bytes of one timed write


def device() -> str:
    """Where the work would be done: "cuda" where torch sees a GPU, else "cpu"."""
    return "cpu" if cpu.is_cpu() else "cuda"


def free_bytes() -> int:
    """Memory that is free now on that device."""
    import torch

    if device() == "cuda":
        torch.cuda.empty_cache()  # what torch keeps for itself is free too
        return torch.cuda.mem_get_info()[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def disk(folder: Path, seconds: float, *, seed: int = 0) -> Figure:
    """Bytes a second that `folder`'s disk takes: blocks of 16 MiB, each forced out to the disk (fsync), since states of a
    long run do not fit into the memory that hides a slow disk. OSError when the disk is full."""
    block, times = os.urandom(BLOCK), []
    with tempfile.TemporaryFile(dir=folder) as file:
        until = time.perf_counter() + seconds
        while len(times) < 3 or (time.perf_counter() < until and len(times) < 32):
            file.seek(0)
            started = time.perf_counter()
            file.write(block)
            file.flush()
            os.fsync(file.fileno())
            times.append(time.perf_counter() - started)
    return rate(BLOCK, times, "bytes/s", f"{len(times)} writes of {BLOCK >> 20} MiB, each to the disk", seed)


def steps(
    target: Path, recipe: "Training", *, layer_ids: Sequence[int], draft_vocab_size: int, vocab_size: int, length: int,
    seconds: float, seed: int = 0, trust_remote_code: bool = False,
) -> Figure:  # fmt: skip
    """Tokens a second of training steps of the draft as it would be trained: its shape, loss, draft steps and optimizer, full
    steps of `tokens_per_step` random tokens, in samples of `length`. Evaluation, reading samples and checkpoints come on top.

    On a GPU they are those of `training.compile: none`; compiled ones are faster, after a minute of compiling.

    Raises:
        KitError: too little memory is free, or the draft cannot be made of this target.
    """
    import torch
    from speculators.losses import resolve_loss_config
    from speculators.train.optimizers import build_optimizers
    from speculators.train.trainer import TrainerConfig

    from eagle3kit import draft, pace

    where, number, tokens = device(), getattr(torch, recipe.dtype), recipe.tokens_per_step
    shape = {"layer_ids": layer_ids, "draft_vocab_size": draft_vocab_size, "trust_remote_code": trust_remote_code}
    with refusals("planning training steps"), torch.device("meta"):
        planned = draft.shell(target, recipe, **shape)
    weights, heads = sum(p.numel() for p in planned.parameters()), planned.config.transformer_layer_config.num_attention_heads
    # In float32: weights, gradients and two moments; of each token logits and their gradients; one layer's attention.
    need = 4 * (4 * weights + recipe.draft_steps * tokens * (4 * draft_vocab_size + 2 * heads * tokens))
    if need > 0.8 * free_bytes():
        raise KitError(f"a training step takes about {need / 2**30:.1f} GiB, {free_bytes() / 2**30:.1f} GiB are free")
    torch.manual_seed(seed)
    with refusals("timing training steps"), torch.device(where):
        model = draft.shell(target, recipe, **shape)
        kept = torch.arange(vocab_size) < draft_vocab_size
        model.load_vocab_mappings(kept, torch.zeros(draft_vocab_size, dtype=torch.long))
        for part in (model.embed_tokens, model.lm_head, model.verifier_lm_head, model.verifier_norm):
            part.weight.requires_grad_(False)
        place, width = torch.arange(tokens), model.hidden_size
        batch = {"hidden_states": torch.randn(1, tokens, len(layer_ids) * width),
                 "verifier_last_hidden_states": torch.randn(1, tokens, width),
                 "input_ids": torch.randint(0, vocab_size, (1, tokens)), "document_ids": (place // length)[None],
                 "position_ids": (1 + place % length)[None], "loss_mask": torch.ones(1, tokens, dtype=torch.long)}  # fmt: skip
        batch = {key: value.to(number) if value.is_floating_point() else value for key, value in batch.items()}
        call = {"ttt_steps": recipe.draft_steps, "ttt_step_loss_decay": recipe.step_loss_decay,
                "loss_config": resolve_loss_config(recipe.loss, recipe.loss_implementation)}  # fmt: skip
        optimizers = build_optimizers(model, TrainerConfig(
            lr=recipe.learning_rate, num_epochs=1, save_path="", optimizer=recipe.optimizer, weight_decay=recipe.weight_decay,
            muon_lr=recipe.muon_learning_rate, muon_weight_decay=recipe.weight_decay))  # fmt: skip
        model.train()

        def step(part: int = tokens) -> None:
            with torch.autocast(where, dtype=number, enabled=number != torch.float32):
                loss = model(**{key: value[:, :part] for key, value in batch.items()}, **call)[1]
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()

        if cpu.is_cpu():  # what speculators compiles for a GPU runs as written
            with cpu.trainable(), torch.compiler.set_stance("force_eager"):
                times = timed(step, seconds, warm_up=lambda: step(256))
        else:
            with refusals("timing training steps"), pace.compiled(model, "none"), pace.counting():
                times = timed(step, seconds, warm_up=lambda: (step(), step()))  # the second is slow there too
    uncompiled = "" if cpu.is_cpu() else ", as training.compile: none has them"
    return rate(tokens, times, "tokens/s", f"{len(times)} steps of {tokens:,} tokens{uncompiled}", seed)


def timed(work: Callable[[], Any], seconds: float, *, warm_up: Callable[[], Any] | None = None) -> list[float]:
    """Seconds of each repeat of `work`: at least 2 and at most 40, until `seconds` are over; before them one that is not
    counted, or the shorter `warm_up`."""
    (warm_up or work)()
    wait()
    found: list[float] = []
    until = time.perf_counter() + seconds
    while len(found) < 2 or (time.perf_counter() < until and len(found) < 40):
        started = time.perf_counter()
        work()
        wait()
        found.append(time.perf_counter() - started)
    return found


def wait() -> None:
    """Return once the GPU, if there is one, has done what was asked of it."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def rate(amount: float, seconds: Sequence[float], unit: str, source: str, seed: int) -> Figure:
    """`amount` a repeat over the mean of `seconds`, with the interval of that mean."""
    mean = figures.mean(seconds, unit="s", source=source, seed=seed)
    return Figure(value=amount / mean.value, low=amount / mean.most, high=amount / mean.least, n=mean.n, unit=unit,
                  kind="measured", source=source)  # fmt: skip


@contextlib.contextmanager
def refusals(what: str) -> Iterator[None]:
    """What torch and transformers say of a machine or a model that cannot do it, as KitError: a plan does without a figure."""
    try:
        yield
    except KitError:
        raise
    except Exception as error:  # noqa: BLE001 - a model may fail in any way; what failed is said where the figure would stand
        said = str(error).strip().splitlines()
        raise KitError(f"{what}: {type(error).__name__}: {said[0][:200] if said else ''}") from None
