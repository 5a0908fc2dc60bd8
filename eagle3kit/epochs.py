"""What a training leaves behind: whole epochs, the best of them and the last, and from what they were trained.

`history.json` beside the checkpoints is the one record; a checkpoint whose epoch it does not name was not seen through.
"""

import hashlib
import json
import shutil
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3kit import acceptance
from eagle3kit.errors import KitError
from eagle3kit.files import read_json, write_json
from eagle3kit.samples import Store

if TYPE_CHECKING:
    import torch

    from eagle3kit.params import Training


@dataclass(frozen=True)
class Fitted:
    """What training left: the folders of the `best` and the `last` checkpoint, the epoch of the best (from 0), a row per
    epoch, split and draft step (`history`) and a row per training step (`steps`); of the best epoch, the estimate on held-out
    samples by replay, one record a turn (`records`), and the mean over all positions (`everywhere`); how many `processes`
    trained."""

    best: Path
    last: Path
    best_epoch: int
    records: list[acceptance.Acceptance]
    everywhere: acceptance.Acceptance
    history: list[dict[str, Any]]
    steps: list[dict[str, Any]]
    processes: int = 1


def fitted(folder: Path, count: int) -> Fitted:
    """What a training of so many epochs left in `folder`; KitError when it did not come so far."""
    history = read(folder)
    if not history["epochs"]:
        raise KitError("training was stopped before its first epoch ended; run the stage again")
    chosen = best(history)
    last = max(row["epoch"] for row in history["epochs"])
    if last + 1 < count:
        raise KitError(f"training was stopped after {last + 1} of {count} epochs; run the stage again: it goes on from there")
    records = [_record(row) for row in history["records"][str(chosen)]]
    return Fitted(folder / str(chosen), folder / str(last), chosen, records,
                  _record(history["everywhere"][str(chosen)]), history["epochs"], history["steps"],
                  read_json(folder / "identity.json").get("processes", 1))  # fmt: skip


def read(folder: Path) -> dict[str, Any]:
    """What was learned of each whole epoch so far."""
    path = folder / "history.json"
    return read_json(path) if path.exists() else {"epochs": [], "steps": [], "records": {}, "everywhere": {}}


def best(history: dict[str, Any]) -> int:
    """The epoch of the longest estimated acceptance length, the first of equals.

    Told from the history, not from the link `checkpoint_best`: a kill between the two leaves the link one epoch behind.
    """
    lengths = {row["epoch"]: row["length"] for row in history["epochs"]}
    return max(lengths, key=lambda number: (lengths[number], -number))


def warning(rows: list[dict[str, Any]], epoch: int) -> str:
    """Words for the end of an epoch's line when the held-out loss fell while the estimated acceptance fell too: loss is then no
    guide, and more epochs of it cost acceptance. Empty otherwise."""
    loss, length = ({e: f([row for row in rows if row["epoch"] == e and row["split"] == "held out"]) for e in (epoch - 1, epoch)}
                    for f in (lambda of: sum(row["loss"] for row in of), lambda of: of[0]["length"] if of else 0.0))  # fmt: skip
    if epoch == 0 or not length[epoch - 1] or not (loss[epoch] < loss[epoch - 1] and length[epoch] < length[epoch - 1]):
        return ""
    return f"; warning: the loss fell from {loss[epoch - 1]:.3f}, yet acceptance fell from {length[epoch - 1]:.3f}"


def _record(row: list[int]) -> acceptance.Acceptance:
    return acceptance.Acceptance(drafts=row[0], accepted=tuple(row[1:]))


def identity(
    t2d: "torch.Tensor", train: Store, held_out: Store, recipe: "Training", seed: int, processes: int
) -> dict[str, Any]:  # fmt: skip
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
        "vocabulary": hashlib.sha256(t2d.cpu().numpy().tobytes()).hexdigest()[:16],
        "train": train.manifest(),
        "held_out": held_out.manifest(),
        **({"processes": processes, "shard": recipe.shard} if processes > 1 else {}),
    }


def only_whole(folder: Path, identity: dict[str, Any]) -> None:
    """Remove checkpoints of another training, and an epoch whose saving or evaluation was cut short."""
    marker = folder / "identity.json"
    identity = json.loads(json.dumps(identity))
    if folder.exists() and (not marker.exists() or read_json(marker) != identity):
        shutil.rmtree(folder)
    done = {row["epoch"] for row in read(folder)["epochs"]}
    for child in folder.iterdir() if folder.exists() else []:
        number = int(child.name) if child.name.isdigit() else None
        partial_save = number is not None and (number not in done or not (child / "training_state.json").exists())
        if partial_save or child.name == "interrupted":
            shutil.rmtree(child)
    write_json(marker, identity)
