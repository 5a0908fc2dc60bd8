"""speculators' Trainer over samples of this kit: progress, which checkpoint is kept, and going on after a kill."""

import hashlib
import json
import logging
import math
import shutil
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3kit import acceptance, cpu, formats
from eagle3kit.draft import dataset, evaluate
from eagle3kit.errors import KitError
from eagle3kit.files import read_json, write_json
from eagle3kit.samples import Store

if TYPE_CHECKING:
    from speculators.models.eagle3 import Eagle3DraftModel

    from eagle3kit.params import Training


class _Steps(logging.Handler):
    """Takes the trainer's per-step metrics from its logger, keeps a row a step, reports now and then."""

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
               "tokens_per_second": profile["tokens_per_s"],
               **{key: value for key, value in metrics.items() if key.startswith(("loss_", "full_acc_"))}}  # fmt: skip
        self.rows.append(row)
        now = time.monotonic()
        if now - self._said > 10 or row["step"] + 1 == self._steps:  # a long log helps nobody
            self._said = now
            self._report({**row, "steps": self._steps})


@dataclass(frozen=True)
class Fitted:
    """What training left: the folders of the `best` and the `last` checkpoint, the epoch of the best (from 0), a row per
    epoch, split and draft step (`history`) and a row per training step (`steps`); of the best epoch, the estimate on held-out
    samples by replay, one record a turn (`records`), and the mean over all positions (`everywhere`)."""

    best: Path
    last: Path
    best_epoch: int
    records: list[acceptance.Acceptance]
    everywhere: acceptance.Acceptance
    history: list[dict[str, Any]]
    steps: list[dict[str, Any]]


def fit(
    model: "Eagle3DraftModel", train: Store, held_out: Store, folder: Path, recipe: "Training", *, seed: int,
    report: Callable[[dict[str, Any]], None], told: Callable[[str], None],
) -> Fitted:  # fmt: skip
    """Train with speculators' Trainer; keep the checkpoint of the best *estimated acceptance length* and the last one.

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
    import torch
    from speculators.losses import resolve_loss_config
    from speculators.models.eagle3.data import shift_batch
    from speculators.train.dataloader import _setup_dataloader
    from speculators.train.trainer import Trainer, TrainerConfig

    cpu.refuse_what_needs_a_gpu(recipe)
    dtype, epochs, tokens_per_step = getattr(torch, recipe.dtype), recipe.epochs, recipe.tokens_per_step
    longest = max(train.manifest()["lengths"] + held_out.manifest()["lengths"])
    if longest > tokens_per_step + 1:
        raise KitError(f"training.tokens_per_step is {tokens_per_step}, but a sample has {longest} tokens; raise it to at "
                       f"least {longest - 1} or lower dataset.max_length")  # fmt: skip
    # However this was called: hours are not spent on files that `eagle3kit inspect` would refuse.
    formats.require_usable([formats.verdict_samples(f"{side} samples", store)
                            for side, store in (("training", train), ("held-out", held_out))])  # fmt: skip
    _only_whole_epochs(folder, _identity(model, train, held_out, recipe, seed))
    history = _history(folder)
    call = {"ttt_steps": recipe.draft_steps, "ttt_step_loss_decay": recipe.step_loss_decay,
            "loss_config": resolve_loss_config(recipe.loss, recipe.loss_implementation)}  # fmt: skip
    # shift_batch drops a token of each sample, so a sample of tokens_per_step + 1 still fits.
    loader = _setup_dataloader(
        dataset(train, max_length=tokens_per_step, dtype=dtype), tokens_per_step, model.hidden_size, num_workers=0,
        num_target_layers=len(model.target_layer_ids), preprocess=shift_batch, seed=seed,
    )  # fmt: skip
    if cpu.is_cpu():
        loader.collate_fn = cpu.WithoutPadding(loader.collate_fn)
    steps = _Steps(report, epochs * len(loader))
    metric_logger = logging.getLogger("speculators.metrics")

    class BestByLength(Trainer):
        """Replaces one decision of the trainer: which epoch is best, and what is kept."""

        def maybe_update_best(self, epoch: int, val_metrics: dict | None) -> None:
            seen = evaluate(self.model, held_out, call, dtype, padded_to=None if cpu.is_cpu() else tokens_per_step)
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
            write_json(folder / "history.json", history)
            lengths = {row["epoch"]: row["length"] for row in history["epochs"]}
            best = _best(history)
            self.checkpointer.update_best_symlink(best)
            told(f"epoch {epoch + 1} of {epochs}: held-out loss {sum(seen.loss):.3f}, estimated acceptance length "
                 f"{replayed.length:.3f} ({replayed.drafts} drafts), best so far {lengths[best]:.3f}"
                 + _warning(history["epochs"], epoch))  # fmt: skip
            for number in set(lengths) - {best, epoch}:
                shutil.rmtree(folder / str(number), ignore_errors=True)

    config = TrainerConfig(
        lr=recipe.learning_rate, num_epochs=epochs, save_path=str(folder), resume_from_checkpoint=True,
        train_call_kwargs=call, optimizer=recipe.optimizer, weight_decay=recipe.weight_decay,
        muon_lr=recipe.muon_learning_rate, muon_weight_decay=recipe.weight_decay,
        scheduler_type=recipe.scheduler, scheduler_warmup_ratio=recipe.warmup_percent / 100, hidden_states_dtype=dtype,
    )  # fmt: skip
    metric_logger.addHandler(steps)
    metric_logger.setLevel(logging.INFO)
    metric_logger.propagate = False
    try:
        with cpu.trainable(), warnings.catch_warnings():
            # Its progress bar asks for a package of notebooks at every redraw; the bar is not what a report should show.
            warnings.filterwarnings("ignore", message='install "ipywidgets"')
            trainer = BestByLength(model, config, loader)
            # Its checkpoints would be rounded to bfloat16, and a resumed run would end elsewhere than an unbroken one.
            trainer.checkpointer.save_checkpoint = partial(trainer.checkpointer.save_checkpoint, float_dtype=torch.float32)
            trainer.run_training()
    finally:
        metric_logger.removeHandler(steps)
    if not history["epochs"]:
        raise KitError("training was stopped before its first epoch ended; run the stage again")
    best_epoch = _best(history)
    last = max(row["epoch"] for row in history["epochs"])
    if last + 1 < epochs:
        raise KitError(f"training was stopped after {last + 1} of {epochs} epochs; run the stage again: it goes on from there")
    records = [_record(row) for row in history["records"][str(best_epoch)]]
    return Fitted(folder / str(best_epoch), folder / str(last), best_epoch, records,
                  _record(history["everywhere"][str(best_epoch)]), history["epochs"], history["steps"])  # fmt: skip


def _history(folder: Path) -> dict[str, Any]:
    """What was learned of each whole epoch so far."""
    path = folder / "history.json"
    return read_json(path) if path.exists() else {"epochs": [], "steps": [], "records": {}, "everywhere": {}}


def _best(history: dict[str, Any]) -> int:
    """The epoch of the longest estimated acceptance length, the first of equals.

    Told from the history, not from the link `checkpoint_best`: a kill between the two leaves the link one epoch behind.
    """
    lengths = {row["epoch"]: row["length"] for row in history["epochs"]}
    return max(lengths, key=lambda number: (lengths[number], -number))


def _warning(rows: list[dict[str, Any]], epoch: int) -> str:
    """Words for the end of an epoch's line when the held-out loss fell while the estimated acceptance fell too: loss is then no
    guide, and more epochs of it cost acceptance. Empty otherwise."""
    loss, length = ({e: f([row for row in rows if row["epoch"] == e and row["split"] == "held out"]) for e in (epoch - 1, epoch)}
                    for f in (lambda of: sum(row["loss"] for row in of), lambda of: of[0]["length"] if of else 0.0))  # fmt: skip
    if epoch == 0 or not length[epoch - 1] or not (loss[epoch] < loss[epoch - 1] and length[epoch] < length[epoch - 1]):
        return ""
    return f"; warning: the loss fell from {loss[epoch - 1]:.3f}, yet acceptance fell from {length[epoch - 1]:.3f}"


def _record(row: list[int]) -> acceptance.Acceptance:
    return acceptance.Acceptance(drafts=row[0], accepted=tuple(row[1:]))


def _identity(model: "Eagle3DraftModel", train: Store, held_out: Store, recipe: "Training", seed: int) -> dict[str, Any]:
    """All that a checkpoint depends on: if any of it differs, the checkpoint is of another training."""
    names = ("epochs", "learning_rate", "muon_learning_rate", "optimizer", "weight_decay", "scheduler", "warmup_percent", "loss",
             "loss_implementation", "step_loss_decay", "draft_steps", "tokens_per_step", "attention", "norm_before_residual",
             "norm_before_fc", "norm_output", "draft_layers", "dtype")  # fmt: skip
    if recipe.draft_key_value_heads is not None:  # older trainings, which could not say it, stay what they are
        names += ("draft_key_value_heads",)
    return {
        "seed": seed,
        "speculators": metadata.version("speculators"),
        "recipe": {name: getattr(recipe, name) for name in names},
        "vocabulary": hashlib.sha256(model.t2d.cpu().numpy().tobytes()).hexdigest()[:16],
        "train": train.manifest(),
        "held_out": held_out.manifest(),
    }


def _only_whole_epochs(folder: Path, identity: dict[str, Any]) -> None:
    """Remove checkpoints of another training, and an epoch whose saving or evaluation was cut short."""
    marker = folder / "identity.json"
    identity = json.loads(json.dumps(identity))
    if folder.exists() and (not marker.exists() or read_json(marker) != identity):
        shutil.rmtree(folder)
    done = {row["epoch"] for row in _history(folder)["epochs"]}
    for child in folder.iterdir() if folder.exists() else []:
        number = int(child.name) if child.name.isdigit() else None
        partial_save = number is not None and (number not in done or not (child / "training_state.json").exists())
        if partial_save or child.name == "interrupted":
            shutil.rmtree(child)
    write_json(marker, identity)
