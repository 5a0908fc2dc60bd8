"""The draft: speculators' Eagle3DraftModel, its configuration, and how it does on held-out samples."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3kit import acceptance
from eagle3kit.errors import KitError
from eagle3kit.samples import Store
from eagle3kit.target import geometry

if TYPE_CHECKING:
    import torch
    from speculators.models.eagle3 import Eagle3DraftModel

    from eagle3kit.params import Training


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
    from speculators.models.utils import resolve_draft_intermediate_size
    from transformers import AutoConfig, LlamaConfig

    outer = AutoConfig.from_pretrained(target, trust_remote_code=trust_remote_code)
    config = outer.get_text_config()
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    rope = getattr(config, "rope_parameters", None) or {}
    # Some targets have a rope for each kind of layer; the draft attends to everything, as the full layers do.
    rope = rope.get("full_attention", rope)
    if "rope_theta" not in rope:
        raise KitError(f"{target}: config.json names no rope_theta, so the positions of a Llama-style draft are unknown")
    draft = LlamaConfig(
        vocab_size=config.vocab_size, hidden_size=config.hidden_size,
        intermediate_size=resolve_draft_intermediate_size(config),
        num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads, head_dim=head_dim,
        hidden_act="silu", max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=geometry(target, trust_remote_code).rms_norm_eps, rope_parameters=dict(rope),
        tie_word_embeddings=False, attention_bias=False, mlp_bias=False,
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id,
    )  # fmt: skip
    return draft


def build(
    target: Path, t2d: "torch.Tensor", d2t: "torch.Tensor", recipe: "Training", *, layer_ids: Sequence[int], seed: int,
    trust_remote_code: bool = False,
) -> "Eagle3DraftModel":  # fmt: skip
    """A new draft with the target's embedding and the rows of its head that `t2d` keeps, both frozen; float32.

    The same `seed` gives the same first weights.
    """
    import torch
    from speculators.models.eagle3 import Eagle3DraftModel

    torch.manual_seed(seed)
    model = Eagle3DraftModel.from_training_args(
        configuration(target, layers=recipe.draft_layers, trust_remote_code=trust_remote_code),
        t2d=t2d, d2t=d2t, verifier_name_or_path=str(target), draft_vocab_size=len(d2t), ttt_steps=recipe.draft_steps,
        target_layer_ids=list(layer_ids), draft_attn_impl=recipe.attention,
        norm_before_residual=recipe.norm_before_residual, norm_before_fc=recipe.norm_before_fc,
        norm_output=recipe.norm_output, trust_remote_code=trust_remote_code,
    )  # fmt: skip
    if geometry(target, trust_remote_code).norm_adds_one:
        # speculators 0.9 multiplies by w where these families multiply by 1 + w (models/eagle3/core.py, verifier_norm).
        model.verifier_norm.weight.data += 1
    return model


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


def evaluate(
    model: "Eagle3DraftModel", store: Store, call: dict[str, Any], dtype: "torch.dtype", *, padded_to: int | None = None
) -> Evaluation:
    """Loss and acceptance on every sample of `store`, one sample at a time, so that nothing is packed or cut.

    `call` are the keyword arguments of the model's forward pass that training uses (draft steps, loss). `padded_to`: positions
    of each forward pass, for a compiled model, which would be compiled anew for every length; nothing counts the padding.
    """
    import torch
    from speculators.models.eagle3.data import shift_batch
    from torch.nn.functional import pad

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
            batch["document_ids"] = torch.zeros_like(batch["input_ids"])
            if padded_to is not None:
                more = padded_to - len(batch["input_ids"])
                batch = {key: pad(value, (0, 0) * (value.ndim - 1) + (0, more), value=-1 if key == "document_ids" else 0)
                         for key, value in batch.items()}  # fmt: skip
            batch = {key: value.unsqueeze(0).to(device, dtype if value.is_floating_point() else None)
                     for key, value in batch.items()}  # fmt: skip
            drafted, _, metrics = model(**batch, **call)
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
