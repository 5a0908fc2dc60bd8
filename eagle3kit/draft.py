"""The draft: speculators' Eagle3DraftModel, its configuration, and its Trainer, over samples of this kit."""

import json
import logging
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3kit import acceptance, cpu
from eagle3kit.errors import KitError
from eagle3kit.files import read_json, write_json
from eagle3kit.samples import Store

if TYPE_CHECKING:
    import torch
    from speculators.models.eagle3 import Eagle3DraftModel


@dataclass(frozen=True)
class Evaluation:
    """One look at held-out samples: loss and share of right tokens per draft step [K], as speculators defines them (its
    `full_acc`, over all supervised positions), and our replay, one record a turn, with the mean over positions beside it."""

    loss: list[float]
    full_accuracy: list[float]
    records: list[acceptance.Acceptance]
    everywhere: acceptance.Acceptance

    @property
    def replayed(self) -> acceptance.Acceptance:
        """The sum of `records`."""
        return acceptance.total(self.records)


def configuration(target: Path, *, layers: int, trust_remote_code: bool = False) -> Any:
    """A LlamaConfig for a draft of `layers` decoder layers with the width, heads, vocabulary and RoPE of the target.

    vLLM serves drafts of model type llama and qwen3 only; a dense Llama layer fits every target, whatever its own kind.

    Raises:
        KitError: the target's config lacks what a dense layer needs.
    """
    from transformers import AutoConfig, LlamaConfig

    outer = AutoConfig.from_pretrained(target, trust_remote_code=trust_remote_code)
    config = outer.get_text_config()
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    if not getattr(config, "intermediate_size", None):
        raise KitError(f"{target}: config.json names no intermediate_size, so the width of the draft's MLP is unknown")
    draft = LlamaConfig(
        vocab_size=config.vocab_size, hidden_size=config.hidden_size, intermediate_size=config.intermediate_size,
        num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads, head_dim=head_dim,
        hidden_act="silu", max_position_embeddings=config.max_position_embeddings, rms_norm_eps=config.rms_norm_eps,
        rope_parameters=dict(config.rope_parameters), tie_word_embeddings=False, attention_bias=False, mlp_bias=False,
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id,
    )  # fmt: skip
    return draft


def build(
    target: Path,
    t2d: "torch.Tensor",
    d2t: "torch.Tensor",
    *,
    layer_ids: Sequence[int],
    draft_layers: int,
    draft_steps: int,
    attention: str,
    norm_before_residual: bool,
    norm_before_fc: bool,
    norm_output: bool,
    seed: int,
    trust_remote_code: bool = False,
) -> "Eagle3DraftModel":
    """A new draft with the target's embedding and the rows of its head that `t2d` keeps, both frozen; float32."""
    import torch
    from speculators.models.eagle3 import Eagle3DraftModel

    torch.manual_seed(seed)
    return Eagle3DraftModel.from_training_args(
        configuration(target, layers=draft_layers, trust_remote_code=trust_remote_code),
        t2d=t2d, d2t=d2t, verifier_name_or_path=str(target), draft_vocab_size=len(d2t), ttt_steps=draft_steps,
        target_layer_ids=list(layer_ids), draft_attn_impl=attention, norm_before_residual=norm_before_residual,
        norm_before_fc=norm_before_fc, norm_output=norm_output, trust_remote_code=trust_remote_code,
    )  # fmt: skip


def _row(store: Store, number: int) -> dict[str, "torch.Tensor"]:
    """A sample as speculators' data pipeline takes it: hidden_states [T, n·H], verifier_last_hidden_states [T, H]."""
    import torch

    sample = store.read(number)
    return {
        "hidden_states": torch.cat(sample.states[:-1], dim=-1),
        "verifier_last_hidden_states": sample.states[-1],
        "input_ids": sample.input_ids,
        "loss_mask": sample.loss_mask,
    }


def dataset(store: Store, *, max_length: int, dtype: "torch.dtype") -> Any:
    """The samples of a store as speculators' BaseDataset; lengths come from the manifest, so no file is opened for them."""
    from speculators.train.data import BaseDataset

    class Samples(BaseDataset):
        def _compute_approx_lengths(self) -> list[int]:
            return [min(length, max_length) for length in store.manifest()["lengths"]]

        def _get_raw_data(self, index: int) -> dict[str, "torch.Tensor"]:
            return _row(store, int(index))

    return Samples(max_length, dtype)


def evaluate(model: "Eagle3DraftModel", store: Store, call: dict[str, Any], dtype: "torch.dtype") -> Evaluation:
    """Loss and acceptance on every sample of `store`, one sample at a time, so that nothing is packed or cut.

    `call` are the keyword arguments of the model's forward pass that training uses (draft steps, loss).
    """
    import torch
    from speculators.models.eagle3.data import shift_batch

    model.eval()
    device, turns = next(model.parameters()).device, store.manifest()["turns"]
    sums: dict[str, float] = {}
    records, tables = [], acceptance.Acceptance(drafts=0, accepted=(0,) * call["ttt_steps"])
    with torch.no_grad(), torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
        for number, spans in enumerate(turns):
            row = _row(store, number)
            length = len(row["input_ids"])
            batch = shift_batch({**row, "lengths": torch.tensor([length]), "position_ids": torch.arange(length)})
            batch.pop("lengths")
            batch = {key: value.unsqueeze(0).to(device, dtype if value.is_floating_point() else None)
                     for key, value in batch.items()}  # fmt: skip
            drafted, _, metrics = model(**batch, document_ids=torch.zeros_like(batch["input_ids"]), **call)
            supervised = float(batch["loss_mask"].sum())
            for key, value in metrics.items():
                # Losses come as a mean over the sample's supervised positions: weighted here by how many there are.
                weight = supervised if key.startswith("loss") else 1.0
                sums[key] = sums.get(key, 0.0) + float(value) * weight
            table = acceptance.hits(drafted, row["input_ids"], model.d2t)
            records += acceptance.replay(table, spans)
            tables = acceptance.total([tables, acceptance.everywhere(table, spans)])
    steps = range(call["ttt_steps"])
    return Evaluation(
        loss=[sums[f"loss_{k}_sum"] / max(1.0, sums[f"loss_{k}_total"]) for k in steps],
        full_accuracy=[sums[f"full_acc_{k}_sum"] / max(1.0, sums[f"full_acc_{k}_total"]) for k in steps],
        records=records,
        everywhere=tables,
    )


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
    epoch, split and draft step (`history`) and a row per training step (`steps`)."""

    best: Path
    last: Path
    best_epoch: int
    history: list[dict[str, Any]]
    steps: list[dict[str, Any]]


def fit(
    model: "Eagle3DraftModel",
    train: Store,
    held_out: Store,
    folder: Path,
    *,
    epochs: int,
    learning_rate: float,
    optimizer: str,
    weight_decay: float,
    scheduler: str,
    warmup_percent: float,
    loss: str,
    loss_implementation: str,
    step_loss_decay: float,
    draft_steps: int,
    tokens_per_step: int,
    dtype: "torch.dtype",
    identity: dict[str, Any],
    report: Callable[[dict[str, Any]], None],
    told: Callable[[str], None],
) -> Fitted:
    """Train with speculators' Trainer; keep the checkpoint of the best *estimated acceptance length* and the last one.

    Args:
        folder: checkpoints go to FOLDER/<epoch>; a run that was killed goes on after its last whole epoch, and ends as it
            would have ended (weights and optimizer are kept in `dtype` of training, not in speculators' bfloat16).
        identity: what the training depends on; checkpoints of another identity are removed first.
        report: called with a row of metrics now and then; `told` with one line an epoch.

    Raises:
        KitError: a sample longer than a step, or a loss that is not finite.
    """
    import torch
    from speculators.losses import resolve_loss_config
    from speculators.models.eagle3.data import shift_batch
    from speculators.train.dataloader import _setup_dataloader
    from speculators.train.trainer import Trainer, TrainerConfig

    longest = max(train.manifest()["lengths"])
    if longest > tokens_per_step + 1:
        raise KitError(f"training.tokens_per_step is {tokens_per_step}, but a sample has {longest} tokens; raise it to at "
                       f"least {longest - 1} or lower dataset.max_length")  # fmt: skip
    _only_whole_epochs(folder, identity)
    history = read_json(folder / "history.json") if (folder / "history.json").exists() else {"epochs": [], "steps": []}
    call = {"ttt_steps": draft_steps, "ttt_step_loss_decay": step_loss_decay,
            "loss_config": resolve_loss_config(loss, loss_implementation)}  # fmt: skip
    # shift_batch drops a token of each sample, so a sample of tokens_per_step + 1 still fits.
    loader = _setup_dataloader(
        dataset(train, max_length=tokens_per_step, dtype=dtype), tokens_per_step, model.hidden_size, num_workers=0,
        num_target_layers=len(model.target_layer_ids), preprocess=shift_batch,
    )  # fmt: skip
    steps = _Steps(report, epochs * len(loader))
    metric_logger = logging.getLogger("speculators.metrics")

    class BestByLength(Trainer):
        """Replaces one decision of the trainer: which epoch is best, and what is kept."""

        def maybe_update_best(self, epoch: int, val_metrics: dict | None) -> None:
            seen = evaluate(self.model, held_out, call, dtype)
            replayed = seen.replayed
            mine = [row for row in steps.rows if row["epoch"] == epoch]
            for k in range(draft_steps):
                epoch_rows = {"train": {"loss": float(sum(row[f"loss_{k}"] for row in mine)) / max(1, len(mine)),
                                        "full_acceptance": float(sum(row[f"full_acc_{k}"] for row in mine)) / max(1, len(mine))},
                              "held out": {"loss": seen.loss[k], "full_acceptance": seen.full_accuracy[k],
                                           "replayed": replayed.marginal[k]}}  # fmt: skip
                history["epochs"] += [{"epoch": epoch, "split": split, "draft_step": k, "length": replayed.length,
                                       "drafts": replayed.drafts, **values} for split, values in epoch_rows.items()]  # fmt: skip
            history["steps"] += mine
            write_json(folder / "history.json", history)
            lengths = {row["epoch"]: row["length"] for row in history["epochs"]}
            best = max(lengths, key=lambda number: (lengths[number], -number))
            self.checkpointer.update_best_symlink(best)
            told(f"epoch {epoch + 1} of {epochs}: held-out loss {sum(seen.loss):.3f}, estimated acceptance length "
                 f"{replayed.length:.3f} ({replayed.drafts} drafts), best so far {lengths[best]:.3f}")  # fmt: skip
            for number in set(lengths) - {best, epoch}:
                shutil.rmtree(folder / str(number), ignore_errors=True)

    config = TrainerConfig(
        lr=learning_rate, num_epochs=epochs, save_path=str(folder), resume_from_checkpoint=True, train_call_kwargs=call,
        optimizer=optimizer, weight_decay=weight_decay, scheduler_type=scheduler,
        scheduler_warmup_ratio=warmup_percent / 100, hidden_states_dtype=dtype, log_freq=1,
    )  # fmt: skip
    metric_logger.addHandler(steps)
    metric_logger.setLevel(logging.INFO)
    metric_logger.propagate = False
    try:
        with cpu.trainable():
            trainer = BestByLength(model, config, loader)
            # Its checkpoints would be rounded to bfloat16, and a resumed run would end elsewhere than an unbroken one.
            trainer.checkpointer.save_checkpoint = partial(trainer.checkpointer.save_checkpoint, float_dtype=torch.float32)
            trainer.run_training()
    finally:
        metric_logger.removeHandler(steps)
    if not history["epochs"] or trainer.checkpointer.read_best_epoch() is None:
        raise KitError("training was stopped before its first epoch ended; run the stage again")
    best_epoch = trainer.checkpointer.read_best_epoch()
    last = max(row["epoch"] for row in history["epochs"])
    if last + 1 < epochs:
        raise KitError(f"training was stopped after {last + 1} of {epochs} epochs; run the stage again: it goes on from there")
    return Fitted(folder / str(best_epoch), folder / str(last), best_epoch, history["epochs"], history["steps"])


def _only_whole_epochs(folder: Path, identity: dict[str, Any]) -> None:
    """Remove checkpoints of another training, and an epoch whose saving or evaluation was cut short."""
    marker = folder / "identity.json"
    identity = json.loads(json.dumps(identity))
    if folder.exists() and (not marker.exists() or read_json(marker) != identity):
        shutil.rmtree(folder)
    history = read_json(folder / "history.json") if (folder / "history.json").exists() else {"epochs": []}
    done = {row["epoch"] for row in history["epochs"]}
    for child in folder.iterdir() if folder.exists() else []:
        number = int(child.name) if child.name.isdigit() else None
        partial_save = number is not None and (number not in done or not (child / "training_state.json").exists())
        if partial_save or child.name == "interrupted":
            shutil.rmtree(child)
    write_json(marker, identity)
