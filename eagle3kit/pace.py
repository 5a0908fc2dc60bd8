"""How training keeps a GPU busy: samples that stay in its memory, numbers that nobody waits for, and what is compiled.

speculators' loop (train/trainer.py, train_epoch) asks the GPU for a dozen numbers at every logged step, and makes two more with
`torch.tensor(…, device=…)`; each waits until all work before it is done, so the GPU then waits for the next work to be handed
over. Here the same steps run without a question until the epoch is over; every step's numbers are there then.
"""

import contextlib
import math
import time
import types
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from eagle3kit import cpu

if TYPE_CHECKING:
    import torch
    from speculators.models.eagle3 import Eagle3DraftModel

    from eagle3kit.samples import Store

MOST_SCORES = 1 << 30  # bytes of attention scores, below which held-out samples are looked at uncompiled
SHARE = 0.4  # of the GPU memory that is free before training, what samples may take
HELD_OUT_SHARE = 0.1  # and of what is free after that, the held-out ones
EVERY_S = 10.0  # seconds between two rows that are reported, for which the GPU is asked


def place(store: "Store", dtype: "torch.dtype", share: float = SHARE, needed: int = 0) -> "torch.device | None":
    """The GPU that the samples of `store` may stay on as `dtype`; None without a GPU, or when they take more than `share` of
    what is free there now, less `needed` bytes that are yet to come.

    A sample of T tokens takes T · H · (auxiliary layers + 1) · bytes of `dtype`, and 16 T for ids and mask.
    """
    import torch

    if cpu.is_cpu():
        return None
    said = store.manifest()
    each = said["hidden_size"] * (len(said["layers"]) + 1) * dtype.itemsize + 16
    if sum(said["lengths"]) * each > share * (torch.cuda.mem_get_info()[0] - needed):
        return None
    return torch.device("cuda", torch.cuda.current_device())


def learning(model: "Eagle3DraftModel") -> int:
    """Bytes that a draft takes while it learns, in float32: its weights, and of those that are trained the gradient, what ranks
    exchange of it, and two numbers of the optimizer."""
    return sum(4 * weight.numel() * (5 if weight.requires_grad else 1) for weight in model.parameters())


class Rows:
    """A row a training step, as speculators' metric logger would tell it, taken without waiting for the GPU. Of several ranks
    every one adds every step, for there the numbers of all are joined: each learns what all have done.

    `rows` gets one step's row once `finish` is called, at the end of an epoch: step, epoch, loss, learning_rate,
    tokens_per_second, loss_K and full_acc_K. `report` is called with the newest every ten seconds, and for the last of `steps`;
    None, as of all ranks but the first: nobody is told, and nobody waits for it.
    """

    def __init__(self, rows: list[dict[str, Any]], report: Callable[[dict[str, Any]], None] | None, steps: int):
        from speculators.train import distributed

        self.rows, self._report, self._steps, self._said = rows, report, steps, time.monotonic()
        self._waiting: list[tuple[dict[str, Any], list[str], torch.Tensor, Any]] = []
        self._before: Any = None
        self._ranks = distributed.get_world_size()

    def begin(self, device: "torch.device") -> None:
        """An epoch begins now."""
        self._before = _now(device)

    def add(self, fixed: dict[str, Any], metrics: dict[str, "torch.Tensor"], tokens: "torch.Tensor") -> None:
        """One step: what is known of it (`fixed`), the model's metrics as sums and totals, and the tokens it learned from."""
        import torch

        names = sorted(metrics)
        numbers = torch.stack([tokens.float(), *(metrics[name].detach().float() for name in names)])
        if self._ranks > 1:
            torch.distributed.all_reduce(numbers)  # handed to the GPU like all else: nobody waits for it here
        self._waiting.append((fixed, names, numbers, _now(tokens.device)))
        if self._report and time.monotonic() - self._said > EVERY_S:
            self._said = time.monotonic()
            newest = len(self._waiting) - 1
            self._report({**_row(*self._waiting[-1][:3], self._ranks, seconds=self._seconds(newest)), "steps": self._steps})

    def finish(self) -> None:
        """The epoch is over: all its rows."""
        import torch

        if not self._waiting:
            return
        numbers = torch.stack([numbers for _, _, numbers, _ in self._waiting]).cpu()
        new = [_row(fixed, names, numbers[place], self._ranks, seconds=self._seconds(place))
               for place, (fixed, names, _, _) in enumerate(self._waiting)]  # fmt: skip
        self._before, self._waiting = self._waiting[-1][3], []
        self.rows += new
        if self._report and new[-1]["step"] + 1 == self._steps:
            self._report({**new[-1], "steps": self._steps})

    def _seconds(self, place: int) -> float:
        """How long step `place` of this epoch took: from the end of the one before to its own end."""
        before, after = self._waiting[place - 1][3] if place else self._before, self._waiting[place][3]
        if isinstance(after, float):
            return after - before
        after.synchronize()
        return before.elapsed_time(after) / 1000


def _now(device: "torch.device") -> Any:
    """A moment of the GPU's work, to be told later; of the CPU's, in seconds."""
    import torch

    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _row(fixed: dict[str, Any], names: list[str], numbers: "torch.Tensor", ranks: int, *, seconds: float) -> dict[str, Any]:
    from speculators.train.trainer import normalize_counted_metrics

    tokens, *values = numbers.tolist()
    metrics = normalize_counted_metrics(dict(zip(names, values, strict=True)), ranks)
    return {**fixed, "loss": metrics["loss"], "tokens_per_second": tokens / seconds if seconds > 0 else 0.0,
            **{name: value for name, value in metrics.items() if name.startswith(("loss_", "full_acc_"))}}  # fmt: skip


def epoch(trainer: Any, number: int, rows: Rows) -> None:
    """One epoch of speculators' `trainer` (one process's, or one rank's), step for step what its `train_epoch` does, less the
    waiting: batches to the device, forward, backward, gradients clipped to norm 1, optimizers, schedulers."""
    import torch

    model, config = trainer.model, trainer.config
    model.train()
    trainer.train_loader.batch_sampler.set_epoch(number)
    device = next(model.parameters()).device
    rows.begin(device)
    for batch in trainer.train_loader:
        batch = {key: _moved(value, device) for key, value in batch.items() if isinstance(value, torch.Tensor)}
        with torch.autocast(trainer.device_type, dtype=config.hidden_states_dtype, enabled=device.type == "cuda"):
            _, loss, metrics = model(**batch, **(config.train_call_kwargs or {}))
        for optimizer in trainer.optimizers:
            optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in trainer.optimizers:
            optimizer.step()
        rate = max(optimizer.param_groups[0]["lr"] for optimizer in trainer.optimizers)
        for scheduler in trainer.schedulers:
            scheduler.step()
        fixed = {"step": trainer.global_step, "epoch": number, "learning_rate": rate}
        rows.add(fixed, metrics, (batch["document_ids"] != -1).sum())
        trainer.global_step += 1
    rows.finish()


def _moved(value: "torch.Tensor", device: "torch.device") -> "torch.Tensor":
    """`value` on `device`; through page-locked memory, for a copy from any other waits for what the GPU has yet to do."""
    if value.device == device or device.type != "cuda":
        return value.to(device)
    return value.pin_memory().to(device, non_blocking=True)


def quick() -> bool:
    """Whether training goes by `epoch`: on a GPU."""
    return not cpu.is_cpu()


@contextlib.contextmanager
def counting() -> Iterator[None]:
    """speculators counts a draft step's hits without asking the GPU how many there are, inside this block, where `quick`.

    Its own way (models/metrics.py, compute_accuracy_single_step) selects the supervised positions first. How many that are only
    the GPU knows: each draft step waits for it, and the compiler cuts the forward pass in two there.
    """
    if not quick():
        yield
        return
    from speculators.models.eagle3 import metrics

    usual, metrics.compute_accuracy_single_step = metrics.compute_accuracy_single_step, hits
    try:
        yield
    finally:
        metrics.compute_accuracy_single_step = usual


def hits(
    drafted: "torch.Tensor", wanted: "torch.Tensor", loss_mask: "torch.Tensor | None", so_far: "torch.Tensor | None"
) -> tuple["torch.Tensor", "torch.Tensor", "torch.Tensor", "torch.Tensor"]:
    """(right so far, supervised, right so far, right before this step) of token ids [1, T], as float32 scalars; `so_far` [1, T],
    which positions were right in all steps before, becomes which still are. The numbers are speculators' own.

    drafted 5 7 9, wanted 5 8 9, mask 1 1 0, so far 1 1 1 -> 1, 2, 1, 3; so far becomes 1 0 1.
    """
    import torch

    right = drafted == wanted
    every = torch.full((), right.numel(), dtype=torch.float32, device=right.device)
    before = every
    if so_far is not None:
        before = so_far.sum().float()
        right = torch.logical_and(so_far, right)
        so_far.copy_(right)
    supervised = every if loss_mask is None else loss_mask.bool().sum().float()
    still = (right if loss_mask is None else right & loss_mask.bool()).sum().float()
    return still, supervised, still.clone(), before


def positions(model: "Eagle3DraftModel", steps: int) -> int:
    """How many positions of a forward pass have attention scores that fit uncompiled: heads · T · T · steps in float32."""
    heads = model.config.transformer_layer_config.num_attention_heads
    return math.isqrt(MOST_SCORES // (4 * heads * steps))


def looked_at(model: "Eagle3DraftModel", longest: int, steps: int) -> str:
    """What is compiled (`compiled`) when held-out samples of at most `longest` tokens are looked at after an epoch: nothing, if
    attention then fits uncompiled (`positions`); else what is compiled anyway."""
    return "none" if longest <= positions(model, steps) else "as it is"


@contextlib.contextmanager
def compiled(model: "Eagle3DraftModel", what: str) -> Iterator[None]:
    """What of `model` is compiled inside this block; on a CPU nothing ever is, and the block changes nothing.

    "whole": speculators' own way, the forward pass as one; the fastest steps, and the longest wait for the first.
    "blocks": its attention, its mask, and loss and accuracy of a draft step; all else runs as written.
    "none": nothing, and attention is torch's own with a dense mask; flex attention, uncompiled, takes 35 ms a call for any size.
    """
    if cpu.is_cpu() or what == "as it is":
        yield
        return
    import torch
    from speculators.models import attention
    from speculators.models.eagle3 import core

    functions, flex, layer = attention.ALL_ATTENTION_FUNCTIONS, "simple_flex_attention", model.config.transformer_layer_config
    before = core.compute_metrics, model._create_mask_fn, functions[flex]
    forward, kind = model.__dict__.get("forward"), model._attn_impl
    numbers, mask, attend = map(_written, before)
    if what == "blocks":
        # Each draft step sees more keys and one target less than the last: three shapes, each compiled for itself.
        numbers, mask, attend = (torch.compile(function, dynamic=False) for function in (numbers, mask, attend))
    if what == "none" and kind == flex:
        mask, model._attn_impl, layer._attn_implementation = torch.nn.attention.flex_attention.create_mask, "sdpa", "sdpa"
    try:
        model.__dict__.pop("forward", None)
        if what != "whole":
            model.forward = types.MethodType(_written(type(model).forward), model)
        core.compute_metrics, model._create_mask_fn = numbers, mask
        functions.register(flex, attend)
        yield
    finally:
        model.__dict__.pop("forward", None)
        if forward is not None:
            model.forward = forward
        core.compute_metrics, model._create_mask_fn = before[:2]
        functions.register(flex, before[2])
        model._attn_impl = layer._attn_implementation = kind


def _written(function: Any) -> Any:
    """What torch.compile was given."""
    return getattr(function, "_torchdynamo_orig_callable", function)
