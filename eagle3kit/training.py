"""speculators' Trainer over samples of this kit: progress, which checkpoint is kept, and going on after a kill."""

import contextlib
import logging
import math
import shutil
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3kit import cpu, epochs, formats, pace
from eagle3kit.draft import dataset, evaluate
from eagle3kit.epochs import Fitted, fitted
from eagle3kit.errors import KitError
from eagle3kit.files import write_json
from eagle3kit.samples import Store

if TYPE_CHECKING:
    import torch
    from speculators.models.eagle3 import Eagle3DraftModel

    from eagle3kit.params import Training


class _Steps(logging.Handler):
    """Takes the trainer's per-step metrics from its logger, keeps a row a step, reports now and then.

    Where several processes train, losses and accuracies come as speculators joins them: the mean over the ranks of each rank's
    batch for a loss, right tokens over supervised tokens of all ranks for an accuracy. Tokens a second are added up here.
    """

    def __init__(self, report: Callable[[dict[str, Any]], None], steps: int):
        super().__init__()
        self.rows: list[dict[str, Any]] = []
        self._report, self._steps, self._said = report, steps, 0.0

    def emit(self, record: logging.LogRecord) -> None:
        if not isinstance(record.msg, dict) or "train" not in record.msg:
            return
        metrics, profile = record.msg["train"], record.msg["profile"]
        row = {"step": record.msg["global_step"], "epoch": record.msg["epoch"], "loss": metrics["loss"],
               "learning_rate": record.msg["lr"] if isinstance(record.msg["lr"], float) else max(record.msg["lr"].values()),
               "tokens_per_second": _over_ranks(profile["tokens_per_s"]),
               **{key: value for key, value in metrics.items() if key.startswith(("loss_", "full_acc_"))}}  # fmt: skip
        self.rows.append(row)
        now = time.monotonic()
        if now - self._said > 10 or row["step"] + 1 == self._steps:  # a long log helps nobody
            self._said = now
            self._report({**row, "steps": self._steps})


def _over_ranks(value: float) -> float:
    """The sum of every rank's `value`; every rank must ask."""
    import torch
    from speculators.train import distributed

    if not distributed.is_distributed():
        return value
    summed = torch.tensor(value, dtype=torch.float64)
    torch.distributed.all_reduce(summed)
    return float(summed)


@contextlib.contextmanager
def _no_bar() -> Iterator[None]:
    """No progress bar of speculators' inside this block: rich draws it and takes whatever is printed meanwhile for its own, so
    that a report would show every line as a block. `report` and `told` say how far training is."""
    from speculators.train import trainer

    bar, trainer.tqdm = trainer.tqdm, lambda batches, **_: batches
    try:
        yield
    finally:
        trainer.tqdm = bar


def fit(
    model: "Eagle3DraftModel", train: Store, held_out: Store, folder: Path, recipe: "Training", *, seed: int,
    report: Callable[[dict[str, Any]], None], told: Callable[[str], None],
) -> Fitted:  # fmt: skip
    """Train in this process: `prepare`, `learn`, `fitted`. `ranks.fit` does the same on several processes.

    Args:
        model: from `build`, or an equal one; its weights are trained in place.
        train, held_out: samples; nothing is learned from `held_out`, the best epoch is chosen on it.
        folder: checkpoints go to FOLDER/<epoch>; a run that was killed goes on after its last whole epoch, and ends as it
            would have ended (weights and optimizer are kept in float32, not in speculators' bfloat16). Checkpoints that
            were trained otherwise, or on other samples, are removed first.
        recipe: the parameters of training.
        report: called with a row of metrics now and then; `told` with one line an epoch.

    Raises:
        KitError: a sample that is not usable (`formats`) or longer than a step, training that was stopped, or a loss that is
            not finite.
    """
    prepare(model.t2d, train, held_out, folder, recipe, seed=seed)
    learn(model, train, held_out, folder, recipe, seed=seed, report=report, told=told)
    return fitted(folder, recipe.epochs)


def prepare(
    t2d: "torch.Tensor", train: Store, held_out: Store, folder: Path, recipe: "Training", *, seed: int, processes: int = 1
) -> None:  # fmt: skip
    """What comes before training, once however many processes train: the samples are looked at, and what does not belong to
    this training (bool `t2d` [V], recipe, seed, samples, number of processes) is removed from the folder of checkpoints.

    Raises:
        KitError: as `fit`.
    """
    cpu.refuse_what_needs_a_gpu(recipe)
    lengths = train.manifest()["lengths"]
    if len(lengths) < processes:
        raise KitError(f"{len(lengths)} samples to train on are too few for {processes} processes; lower training.processes")
    longest = max(lengths + held_out.manifest()["lengths"])
    if longest > recipe.tokens_per_step + 1:
        raise KitError(f"training.tokens_per_step is {recipe.tokens_per_step}, but a sample has {longest} tokens; raise it to at "
                       f"least {longest - 1} or lower dataset.max_length")  # fmt: skip
    # However this was called: hours are not spent on files that `eagle3kit inspect` would refuse.
    formats.require_usable([formats.verdict_samples(f"{side} samples", store)
                            for side, store in (("training", train), ("held-out", held_out))])  # fmt: skip
    epochs.only_whole(folder, epochs.identity(t2d, train, held_out, recipe, seed, processes))


def learn(
    model: "Eagle3DraftModel", train: Store, held_out: Store, folder: Path, recipe: "Training", *, seed: int,
    report: Callable[[dict[str, Any]], None], told: Callable[[str], None],
) -> None:  # fmt: skip
    """Train with speculators' Trainer; keep the checkpoint of the best *estimated acceptance length* and the last one.

    Where this process is one rank of several (`ranks`), every rank calls it with the same arguments. Each takes its own batch of
    `tokens_per_step` tokens, gradients are averaged over the ranks, each rank's being the mean over its own supervised tokens:
    one step of two ranks is one step of one process that goes down the mean of both batches' losses. Every rank walks the whole
    held-out side, so all agree; rank 0 writes.
    """
    import torch
    from speculators.losses import resolve_loss_config
    from speculators.models.eagle3.data import shift_batch
    from speculators.train import distributed
    from speculators.train.dataloader import _setup_dataloader
    from speculators.train.trainer import Trainer, TrainerConfig

    dtype, tokens_per_step = getattr(torch, recipe.dtype), recipe.tokens_per_step
    first = distributed.get_rank() == 0
    history = epochs.read(folder)
    call = {"ttt_steps": recipe.draft_steps, "ttt_step_loss_decay": recipe.step_loss_decay,
            "loss_config": resolve_loss_config(recipe.loss, recipe.loss_implementation)}  # fmt: skip
    # shift_batch drops a token of each sample, so a sample of tokens_per_step + 1 still fits.
    quick, needed = pace.quick(), pace.learning(model)
    may_stay = quick and not recipe.shard  # who shards a draft is short of memory
    stay = pace.place(train, dtype, needed=needed) if may_stay else None
    loader = _setup_dataloader(
        dataset(train, max_length=tokens_per_step, dtype=dtype, place=stay), tokens_per_step, model.hidden_size, num_workers=0,
        num_target_layers=len(model.target_layer_ids), preprocess=shift_batch, seed=seed,
    )  # fmt: skip
    if cpu.is_cpu():
        loader.collate_fn = cpu.WithoutPadding(loader.collate_fn)
    loader.pin_memory = loader.pin_memory and stay is None  # what is on a GPU cannot be
    steps = _Steps(report if first else lambda row: None, recipe.epochs * len(loader))
    metric_logger = logging.getLogger("speculators.metrics")
    quick_rows = pace.Rows(steps.rows, report if first else None, recipe.epochs * len(loader))
    longest = max(held_out.manifest()["lengths"])
    padded = -(-longest // 128) * 128  # whole blocks of flex attention
    kept = {} if may_stay and pace.place(held_out, dtype, pace.HELD_OUT_SHARE, needed) else None

    class BestByLength(Trainer):
        """Replaces one decision of the trainer: which epoch is best, and what is kept."""

        def setup_optimizer(self) -> None:
            # A sharded optimizer's file forgets the rate it started from, without which speculators' scheduler does not go on.
            load, rates = self.checkpointer.load_optimizer_state_dict, {"Muon": recipe.muon_learning_rate}

            def load_with_rates(of: Any, optimizers: Any, *more: Any) -> None:
                load(of, optimizers, *more)
                for optimizer in optimizers:
                    for group in optimizer.param_groups:
                        group.setdefault("initial_lr", rates.get(type(optimizer).__name__, recipe.learning_rate))

            self.checkpointer.load_optimizer_state_dict = load_with_rates
            super().setup_optimizer()

        def train_epoch(self, epoch: int, **more: Any) -> None:
            if quick:
                pace.epoch(self, epoch, quick_rows)
            else:
                super().train_epoch(epoch, **more)

        def maybe_save_checkpoint(self, epoch: int | str, local_step: int = 0) -> None:
            if epoch != "interrupted":  # only whole epochs are gone on from; and to save one, ranks wait for each other
                super().maybe_save_checkpoint(epoch, local_step)

        def maybe_update_best(self, epoch: int, val_metrics: dict | None) -> None:
            whole = getattr(self.model, "module", self.model)
            how = pace.looked_at(whole, padded, recipe.draft_steps)
            shape: dict[str, int] = {}  # on a CPU each sample alone is the quickest
            if not cpu.is_cpu():
                most = min(pace.positions(whole, recipe.draft_steps), tokens_per_step)  # a step of training fits, gradients too
                shape = {"together": most} if how == "none" else {"padded_to": padded}
            with pace.compiled(whole, how):
                seen = evaluate(whole, held_out, call, dtype, kept=kept, **shape)
            replayed = seen.replayed
            if not all(map(math.isfinite, seen.loss)):
                raise KitError(f"the held-out loss is {seen.loss} after epoch {epoch + 1}; lower training.learning_rate")
            mine = [row for row in steps.rows if row["epoch"] == epoch]
            for k in range(recipe.draft_steps):
                epoch_rows = {"train": {"loss": float(sum(row[f"loss_{k}"] for row in mine)) / max(1, len(mine)),
                                        "full_acceptance": float(sum(row[f"full_acc_{k}"] for row in mine)) / max(1, len(mine))},
                              "held out": {"loss": seen.loss[k], "full_acceptance": seen.full_accuracy[k],
                                           "replayed": replayed.marginal[k]}}  # fmt: skip
                history["epochs"] += [{"epoch": epoch, "split": split, "draft_step": k, "length": replayed.length,
                                       "drafts": replayed.drafts, **values} for split, values in epoch_rows.items()]  # fmt: skip
            history["records"][str(epoch)] = [[record.drafts, *record.accepted] for record in seen.records]
            history["everywhere"][str(epoch)] = [seen.everywhere.drafts, *seen.everywhere.accepted]
            history["steps"] += mine
            lengths = {row["epoch"]: row["length"] for row in history["epochs"]}
            best = epochs.best(history)
            if first:
                write_json(folder / "history.json", history)
            self.checkpointer.update_best_symlink(best)
            if not first:
                return
            told(f"epoch {epoch + 1} of {recipe.epochs}: held-out loss {sum(seen.loss):.3f}, estimated acceptance length "
                 f"{replayed.length:.3f} ({replayed.drafts} drafts), best so far {lengths[best]:.3f}"
                 + epochs.warning(history["epochs"], epoch))  # fmt: skip
            for number in set(lengths) - {best, epoch}:
                shutil.rmtree(folder / str(number), ignore_errors=True)

    config = TrainerConfig(
        lr=recipe.learning_rate, num_epochs=recipe.epochs, save_path=str(folder), resume_from_checkpoint=True,
        train_call_kwargs=call, optimizer=recipe.optimizer, weight_decay=recipe.weight_decay,
        muon_lr=recipe.muon_learning_rate, muon_weight_decay=recipe.weight_decay, fsdp_shard=recipe.shard,
        scheduler_type=recipe.scheduler, scheduler_warmup_ratio=recipe.warmup_percent / 100, hidden_states_dtype=dtype,
    )  # fmt: skip
    metric_logger.addHandler(steps)
    metric_logger.setLevel(logging.INFO)
    metric_logger.propagate = False
    try:
        # Samples that are read anew for each batch are put together on the CPU: that is work for several threads.
        few = cpu.beside_gpu() if stay is not None else contextlib.nullcontext()
        with cpu.trainable(), few, pace.compiled(model, recipe.compile), pace.counting(), _no_bar():
            trainer = BestByLength(model, config, loader)
            # Its checkpoints would be rounded to bfloat16, and a resumed run would end elsewhere than an unbroken one.
            trainer.checkpointer.save_checkpoint = partial(trainer.checkpointer.save_checkpoint, float_dtype=torch.float32)
            trainer.run_training()
    finally:
        metric_logger.removeHandler(steps)
