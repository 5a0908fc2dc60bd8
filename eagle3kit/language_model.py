"""The target's language model as transformers computes it, in float32 on the CPU: the second opinion that the doctor and the
search for suspects ask. The one door to it, for targets inside other models too.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3kit import target, target_config, weight_files
from eagle3kit.errors import KitError

if TYPE_CHECKING:
    from torch import Tensor

STATE_BYTES = {"F32": 1.0, "BF16": 2.0, "F16": 2.0}  # float32 bytes per stored byte


@dataclass(frozen=True)
class Forward:
    """What the target gave for one sample: `entering` [n + 1][T, H] (entering layer k; k = n before the final norm),
    `normed` [T, H] what goes into the head."""

    entering: "list[Tensor]"
    normed: "Tensor"


def refusal(folder: Path, free_bytes: float) -> str | None:
    """Why a forward is not tried, or None: the weights in float32, and a fifth more, must fit half of the free memory.

    Counted are the weights of the language model; what else a wrapper holds (a vision tower) is not loaded.
    """
    need, files = 0.0, weight_files.index(folder)
    inside = _prefixes(folder) if target_config.wraps(target_config.described(folder)) else ("",)
    for file in sorted(set(files.values())):
        for key, entry in sorted(weight_files.header(folder / file).items()):
            if not key.startswith(inside):
                continue
            if entry["dtype"] not in STATE_BYTES:
                return f"{key} is stored as {entry['dtype']}, which transformers would not compute as the server does"
            start, end = entry["data_offsets"]
            need += 1.2 * STATE_BYTES[entry["dtype"]] * (end - start)
    if need > free_bytes / 2:
        return (f"the target's forward takes about {need / 2**30:,.1f} GiB in float32, and half of the free memory is "
                f"{free_bytes / 2**31:,.1f} GiB")  # fmt: skip
    return None


def load(folder: Path, trust_remote_code: bool = False) -> Any:
    """The language model of the target in `folder` as transformers' causal model, in float32 on the CPU.

    Of a wrapper (`target_config.wraps`) only the language model is made, by its own config, and its weights are found under the
    wrapper's names: Kimi-K2.5's language_model.model.layers.0. is DeepSeek-V3's model.layers.0. .

    Raises:
        KitError: transformers cannot make it (with its own words), or weights of it are missing in the files.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    options: dict[str, Any] = {"dtype": torch.float32, "trust_remote_code": trust_remote_code, "output_loading_info": True}
    if target_config.wraps(target_config.described(folder)):
        renamed = zip(_prefixes(folder), ("model.", "lm_head."), strict=False)
        config = target.language_config(folder, trust_remote_code)
        config.model_type = type(config).model_type  # Kimi's says kimi_k2, for which transformers does not join experts
        config.tie_word_embeddings = target.geometry(folder, trust_remote_code).tied  # the wrapper may say so, not its part
        options |= {"config": config, "key_mapping": {f"^{re.escape(theirs)}": ours for theirs, ours in renamed}}
    shown, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()  # a second's work, and a notebook keeps every state of a bar
    logging.set_verbosity_error()  # else it lists every weight of the wrapper's other parts
    try:
        model, told = AutoModelForCausalLM.from_pretrained(folder, **options)
    except Exception as error:  # an architecture that transformers does not know, or whose code it may not run
        raise KitError(f"transformers cannot load the target: {(str(error).strip() or repr(error)).splitlines()[0]}") from error
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()
    lost = sorted(told["missing_keys"])
    if lost:  # they would be drawn at random, and every comparison with them
        raise KitError(f"transformers finds {len(lost)} weights of {type(model).__name__} nowhere in {folder}, first {lost[0]}")
    return model.eval()


def _prefixes(folder: Path) -> tuple[str, ...]:
    """How a wrapper's names of its language model's trunk begin, and of its head where it has one of its own.

    Kimi-K2.5 -> ("language_model.model.", "language_model.lm_head.")
    """
    embed = weight_files.shared(folder, ("embed",), True)["embed"]
    trunk, named, _ = embed.rpartition("embed_tokens.")
    if not named:
        raise KitError(f"the embedding of {folder} is called {embed}: how transformers would call the weights of its language "
                       "model is not known here")  # fmt: skip
    if not weight_files.stores_head(folder):
        return (trunk,)
    return trunk, weight_files.shared(folder, ("head",), False)["head"].removesuffix("weight")


def forward(model: Any, ids: "Tensor", layers: int) -> Forward:
    """The states of tokens `ids` [T] in a target of `layers` layers, taken by hooks on the layers and on the head.

    KitError when the model has no list of that many layers.
    """
    import torch

    stacks = [part for name, part in model.named_modules() if isinstance(part, torch.nn.ModuleList) and len(part) == layers
              and name.rpartition(".")[2] in ("layers", "h", "blocks")]  # fmt: skip
    if len(stacks) != 1:
        raise KitError(f"{type(model).__name__} has {len(stacks)} lists of {layers} layers; its layers could not be told")
    kept: dict[int, Tensor] = {}

    def entering(number: int) -> Any:
        def hook(_: Any, given: tuple, named: dict) -> None:
            kept[number] = (given[0] if given else named["hidden_states"])[0].detach().float()
        return hook  # fmt: skip

    def leaving(_: Any, __: Any, out: Any) -> None:
        kept[layers] = (out[0] if isinstance(out, tuple) else out).reshape(len(ids), -1).detach().float()

    hooks = [layer.register_forward_pre_hook(entering(k), with_kwargs=True) for k, layer in enumerate(stacks[0])]
    hooks += [stacks[0][-1].register_forward_hook(leaving),
              model.get_output_embeddings().register_forward_pre_hook(entering(layers + 1), with_kwargs=True)]  # fmt: skip
    try:
        with torch.no_grad():
            model(input_ids=ids[None], use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return Forward([kept[k] for k in range(layers + 1)], kept[layers + 1])
