"""The draft: speculators' Eagle3DraftModel, its configuration, and how it does on held-out samples."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3kit import acceptance, cpu
from eagle3kit.errors import KitError
from eagle3kit.samples import Store
from eagle3kit.target import geometry, language_config, weights

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


def configuration(
    target: Path, *, layers: int, key_value_heads: int | None = None, trust_remote_code: bool = False
) -> Any:  # fmt: skip
    """A LlamaConfig for a draft of `layers` decoder layers with the width, heads, vocabulary and RoPE of the target.

    vLLM serves drafts of model type llama and qwen3 only; a dense Llama layer fits every target, whatever its own kind. Of a
    target with latent attention (MLA: DeepSeek, Kimi) it takes the number of heads and the width of their values, since its
    `head_dim` is only the part that RoPE turns. Every layer sees everything before it: there is no sliding window.

    Kimi-K2.5 -> hidden 7168, 64 heads of 128, feed-forward 18432, 262,144 positions, YaRN of 64 over 4,096, theta 5e4.

    Args:
        key_value_heads: of the draft; None = as many as the target's config says (of MLA: as many as heads).

    Raises:
        KitError: the target's config lacks what a dense layer needs, or its heads cannot share so many.
    """
    from speculators.models.utils import resolve_draft_intermediate_size
    from transformers import LlamaConfig

    config = language_config(target, trust_remote_code)
    heads = config.num_attention_heads
    latent = getattr(config, "kv_lora_rank", None)
    head_dim = (config.v_head_dim if latent else getattr(config, "head_dim", None)) or config.hidden_size // heads
    shared = key_value_heads or getattr(config, "num_key_value_heads", None) or heads
    if heads % shared:
        raise KitError(f"{heads} heads of the draft cannot share {shared} for keys and values: set "
                       f"training.draft_key_value_heads to a divisor of {heads}")  # fmt: skip
    rope = getattr(config, "rope_parameters", None) or {}
    # Some targets have a rope for each kind of layer; the draft attends to everything, as the full layers do.
    rope = rope.get("full_attention", rope)
    if "rope_theta" not in rope:
        raise KitError(f"{target}: config.json names no rope_theta, so the positions of a Llama-style draft are unknown")
    # A target that turns a part of each head: training's Llama layer would turn all of it all the same, and vLLM's a part.
    rope = {name: value for name, value in rope.items() if name not in ("type", "partial_rotary_factor")}
    draft = LlamaConfig(
        vocab_size=config.vocab_size, hidden_size=config.hidden_size,
        intermediate_size=resolve_draft_intermediate_size(config),
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=shared, head_dim=head_dim,
        hidden_act="silu", max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=geometry(target, trust_remote_code).rms_norm_eps, rope_parameters=rope,
        tie_word_embeddings=False, attention_bias=False, mlp_bias=False,
        **{name: getattr(config, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
    )  # fmt: skip
    return draft


def shell(
    target: Path, recipe: "Training", *, layer_ids: Sequence[int], draft_vocab_size: int, trust_remote_code: bool = False
) -> "Eagle3DraftModel":  # fmt: skip
    """A draft whose own weights are drawn at random and which has nothing of the target yet: of it only config.json is read.

    Under `torch.device("meta")` it costs nothing, so that names and shapes can be had of any size.
    """
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    layer = configuration(target, layers=recipe.draft_layers, key_value_heads=recipe.draft_key_value_heads,
                          trust_remote_code=trust_remote_code)  # fmt: skip
    layer._attn_implementation = recipe.attention  # as speculators' own from_training_args has it
    return Eagle3DraftModel(Eagle3SpeculatorConfig(
        transformer_layer_config=layer, draft_vocab_size=draft_vocab_size,
        norm_before_residual=recipe.norm_before_residual, norm_before_fc=recipe.norm_before_fc, norm_output=recipe.norm_output,
        eagle_aux_hidden_state_layer_ids=list(layer_ids),
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3", proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=recipe.draft_steps)],
            default_proposal_method="greedy", verifier=VerifierConfig.from_pretrained(str(target)),
        ),
    ))  # fmt: skip


def build(
    target: Path, t2d: "torch.Tensor", d2t: "torch.Tensor", recipe: "Training", *, layer_ids: Sequence[int], seed: int,
    trust_remote_code: bool = False,
) -> "Eagle3DraftModel":  # fmt: skip
    """A new draft with the target's embedding and the rows of its head that `t2d` keeps, both frozen; float32.

    The same `seed` gives the same first weights. What it takes of the target it takes by exact names (`target.weights`):
    speculators takes the shortest name with a fitting end, asks `text_config` only, does without a final norm after a warning,
    and cannot read a target that brings its own code.

    Raises:
        KitError: the target lacks embedding, head or final norm, or none of its weights is the only one to fit.
    """
    import torch

    place = geometry(target, trust_remote_code)
    own = weights(target, trust_remote_code=trust_remote_code)
    torch.manual_seed(seed)
    model = shell(target, recipe, layer_ids=layer_ids, draft_vocab_size=len(d2t), trust_remote_code=trust_remote_code)
    model.load_vocab_mappings(t2d, d2t)
    with torch.no_grad():
        # Popped, so that each is unmapped once it is read: together their pages would be as much memory again.
        model.embed_tokens.weight.copy_(own.pop("embed")[: place.vocab_size])
        kept = own.pop("head")[: len(t2d)][t2d]  # a head may be padded to more rows than there are tokens
        model.lm_head.weight.copy_(kept)
        model.verifier_lm_head.weight.copy_(kept)
        model.verifier_norm.weight.copy_(own["final_norm"])
        if place.norm_adds_one:
            # speculators 0.9 multiplies by w where these families multiply by 1 + w (models/eagle3/core.py, verifier_norm).
            model.verifier_norm.weight += 1
    for part in (model.embed_tokens, model.lm_head, model.verifier_lm_head, model.verifier_norm):
        part.weight.requires_grad_(False)
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


def dataset(store: Store, *, max_length: int, dtype: "torch.dtype", place: "torch.device | None" = None) -> Any:
    """The samples of a store as speculators' BaseDataset; lengths come from the manifest, so no file is opened for them.

    `place`: a device on which all samples are from the start, as `dtype`; None: each is read anew whenever it is its turn.
    """
    from speculators.train.data import BaseDataset

    def placed(index: int) -> dict[str, "torch.Tensor"]:
        return {key: value.to(place, dtype if value.is_floating_point() else None) for key, value in _row(store, index).items()}

    class Samples(BaseDataset):
        def __init__(self) -> None:
            super().__init__(max_length, dtype)
            self.kept: list[dict[str, torch.Tensor]] = []
            if place is not None:  # now, and several at once: the GPU does not wait for files in its first epoch
                with cpu.beside_gpu(), ThreadPoolExecutor(8) as pool:
                    self.kept = list(pool.map(placed, range(store.manifest()["samples"])))

        def _compute_approx_lengths(self) -> list[int]:
            return [min(length, max_length) for length in store.manifest()["lengths"]]

        def _get_raw_data(self, index: int) -> dict[str, "torch.Tensor"]:
            if place is None:
                return _row(store, int(index))
            return dict(self.kept[index])  # speculators adds to what it is given

    return Samples()


def evaluate(
    model: "Eagle3DraftModel", store: Store, call: dict[str, Any], dtype: "torch.dtype", *, padded_to: int | None = None,
    together: int = 0, kept: "dict[int, tuple[list[torch.Tensor], dict[str, torch.Tensor]]] | None" = None,
) -> Evaluation:  # fmt: skip
    """Loss and acceptance on every sample of `store`, whole and as if it were alone.

    `call` are the keyword arguments of the model's forward pass that training uses (draft steps, loss). `padded_to`: positions
    of each forward pass, for a compiled model, which would be compiled anew for every length; nothing counts the padding.
    `together`: samples share a forward pass while they fit so many positions; 0: none does. Rounding aside it changes
    no number (`_apart`); it is not for a compiled model.
    `kept`: a dictionary of the caller's that holds what the model is given, on its device, from one call to the next (of the
    same store, `dtype` and `together`); None: samples are read anew. The device is asked for nothing until all samples are
    through.
    """
    import torch

    if padded_to and together:
        raise ValueError("padded_to is for samples that are alone, together is 0 then")
    model.eval()
    device, turns, steps = next(model.parameters()).device, store.manifest()["turns"], call["ttt_steps"]
    sums: dict[str, Any] = {}
    drafts: list[tuple[torch.Tensor, torch.Tensor]] = []
    with torch.no_grad(), torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
        for first, after in _apart(store, together, steps):
            several, batch = (kept or {}).get(first) or _batch(store, range(first, after), steps, device, dtype)
            if kept is not None:
                kept[first] = several, batch
            batch = batch if padded_to is None else _padded(batch, padded_to)
            drafted, _, metrics = model(**batch, **call)
            supervised = batch["loss_mask"].sum().double()
            for key, value in metrics.items():
                # Losses come as a mean over the batch's supervised positions: weighted here by how many there are.
                sums[key] = sums.get(key, 0.0) + (value.double() * supervised if key.startswith("loss") else value.double())
            every, start = torch.cat(list(drafted)), 0  # [K, positions]
            for ids in several:
                drafts.append((every[:, start : start + len(ids) - 1], ids))
                start += len(ids) - 1 + steps
    records, tables, d2t = [], acceptance.Acceptance(drafts=0, accepted=(0,) * steps), model.d2t.cpu()
    for spans, (drafted, ids) in zip(turns, drafts, strict=True):
        table = acceptance.hits(drafted.cpu().unsqueeze(1), ids, d2t)
        records += acceptance.replay(table, spans)
        tables = acceptance.total([tables, acceptance.everywhere(table, spans)])
    numbers = {key: float(value) for key, value in sums.items()}
    loss, full = ([numbers[f"{name}_{k}_sum"] / max(1.0, numbers[f"{name}_{k}_total"]) for k in range(steps)]
                  for name in ("loss", "full_acc"))  # fmt: skip
    return Evaluation(loss=loss, full_accuracy=full, records=records, everywhere=tables)


def _apart(store: Store, most: int, steps: int) -> "list[tuple[int, int]]":
    """[first, after) of the samples that share a forward pass of at most `most` positions.

    Behind each stand `steps` positions of no document: a draft step reads and is held against the positions that follow, and
    there it finds what it finds behind a sample that is alone. Before a sample there is nothing to find unless its first tokens
    are supervised (it was cut inside an answer): that one stays alone.

    Example: 300, 200 and 600 tokens, `most` 1,000, 3 steps: 299 + 3 + 199 + 3 positions, 599 more do not fit: [0, 2), [2, 3).
    """
    manifest = store.manifest()
    lengths, turns = manifest["lengths"], manifest["turns"]
    alone = {number for number, spans in enumerate(turns) if any(start < steps for start, _ in spans)}
    groups, used = [], 0
    for number, length in enumerate(lengths):
        needed = length - 1 + steps
        if not groups or used + needed > most or alone & {number, number - 1}:
            groups.append([number, number])
            used = 0
        groups[-1][1], used = number + 1, used + needed
    return [(first, after) for first, after in groups]


def _batch(
    store: Store, numbers: Sequence[int], steps: int, device: "torch.device", dtype: "torch.dtype"
) -> tuple[list["torch.Tensor"], dict[str, "torch.Tensor"]]:  # fmt: skip
    """The tokens [T] of each of these samples, and what the model is called with for them, on `device`: one behind the other,
    `steps` positions apart."""
    import torch
    from speculators.models.eagle3.data import shift_batch

    tokens, parts = [], []
    for place, number in enumerate(numbers):
        row = _row(store, number)
        length = len(row["input_ids"])
        part = shift_batch({**row, "lengths": torch.tensor([length]), "position_ids": torch.arange(length)})
        part.pop("lengths")
        part["document_ids"] = torch.full_like(part["input_ids"], place)
        last = place == len(numbers) - 1
        part = {key: value.unsqueeze(0).to(device, dtype if value.is_floating_point() else None) for key, value in part.items()}
        parts.append(part if last else _padded(part, length - 1 + steps))
        tokens.append(row["input_ids"].clone())  # cloned: as they are read, a few tokens would hold the whole file in memory
    return tokens, {key: torch.cat([part[key] for part in parts], dim=1) for key in parts[0]}


def _padded(batch: dict[str, "torch.Tensor"], length: int) -> dict[str, "torch.Tensor"]:
    """A batch [1, T, …] of `length` positions; those added belong to no document."""
    from torch.nn.functional import pad

    more = length - batch["input_ids"].shape[1]
    return {key: pad(value, (0, 0) * (value.ndim - 2) + (0, more), value=-1 if key == "document_ids" else 0)
            for key, value in batch.items()}  # fmt: skip
