"""How fast the target reads and writes tokens here, by the shapes in its config alone; no weights of it are needed."""

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3kit import dummy_target
from eagle3kit.errors import KitError
from eagle3kit.figures import Figure
from eagle3kit.trial import device, rate, refusals, timed, wait

if TYPE_CHECKING:
    import torch

# Weights of the target that are made at most: more take seconds to draw, and some layers of them tell as much.
MOST_WEIGHTS = {"cpu": 2**28, "cuda": 2**33}
TOKENS_A_PASS = {"cpu": 256, "cuda": 8192}


def passes(
    target: Path, *, dtype: str, prompt: int, at_once: int, seconds: float, seed: int = 0
) -> tuple[Figure, Figure]:  # fmt: skip
    """(tokens a second of reading prompts of `prompt` tokens, of decoding `at_once` sequences) by transformers, from the
    config in the folder `target` alone.

    All layers are timed where they fit (`MOST_WEIGHTS`); else the first ones until every kind of layer is there, fewer experts
    where even these are too many, and each layer counts as one of its kind: the figure is then "modelled". Decoding has the
    head's product with it, and no attention to what came before. Serving comes on top of both: requests, copies, sampling.

    Raises:
        KitError: transformers does not know the architecture, or too little memory is free.
    """
    import torch

    torch.manual_seed(seed)
    where, number = device(), getattr(torch, dtype)
    with refusals("timing the target's passes"):
        config, kinds, kept, said = _cut(dummy_target.config(target))
        width, words = config["hidden_size"], config["vocab_size"]
        model = _model(config, kept, number)
        length = min(prompt, TOKENS_A_PASS[where])
        rows = max(1, TOKENS_A_PASS[where] // length)
        read = _layers(model, (rows, length), kinds, seconds / 2)
        step = _layers(model, (at_once, 1), kinds, seconds / 4)
        head = torch.randn(width, words if words * width < MOST_WEIGHTS[where] else 1024, dtype=number, device=where)
        state = torch.randn(at_once, width, dtype=number, device=where)
        scale = words / head.shape[1]
        product = timed(lambda: state @ head, seconds / 8)
    mean = scale * sum(product) / len(product)
    reading = rate(rows * length, read, "tokens/s", f"{len(read)} passes of {rows * length:,} tokens{said}", seed)
    decoding = rate(at_once, [one + mean for one in step], "tokens/s", f"{len(step)} steps of {at_once} sequences{said}", seed)
    return (reading, decoding) if not said else (replace(reading, kind="modelled"), replace(decoding, kind="modelled"))


def _cut(config: dict[str, Any]) -> tuple[dict[str, Any], list[tuple], int, str]:
    """(the config to build, the kind of each of its layers, layers to build, what was cut, in words).

    Kinds differ in attention (`layer_types`) and between dense and expert layers (`first_k_dense_replace`).
    """
    layers, dense = config["num_hidden_layers"], config.get("first_k_dense_replace") or 0
    types = config.get("layer_types") or [""] * layers
    kinds = [(types[k], k >= dense) for k in range(layers)]
    kept = next(k for k in range(1, layers + 1) if set(kinds[:k]) == set(kinds))
    key = next((key for key in dummy_target.EXPERTS if config.get(key)), None)
    experts, least = (config[key], config.get("num_experts_per_tok") or 1) if key else (0, 0)
    most, said = MOST_WEIGHTS[device()], []

    def weights(count: int) -> int:
        return _weights({**config, **({key: experts} if key else {})}, count)

    if weights(layers) <= most:
        return config, kinds, layers, ""
    while key and weights(kept) > most and experts // 2 >= max(least, 2):
        experts //= 2
    if key and experts < config[key]:
        said.append(f"{experts} of {config[key]} experts")
        groups = config.get("n_group") or 1
        config = {**config, key: experts, **({"n_group": 1, "topk_group": 1} if groups > 1 else {})}
    said.append(f"{kept} of {layers} layers, the others taken to be as slow as these")
    return config, kinds, kept, f" ({', '.join(said)})"


def _configured(config: dict[str, Any], layers: int) -> Any:
    """transformers' config of the first `layers` layers, with few words: looking one up costs nothing."""
    from transformers import AutoConfig

    cut = {**config, "num_hidden_layers": layers, "vocab_size": 1024, "pad_token_id": None, "bos_token_id": None,
           "eos_token_id": None, "use_cache": False}  # fmt: skip
    if cut.get("layer_types"):
        cut["layer_types"] = cut["layer_types"][:layers]
    kind = cut.pop("model_type", None)
    try:
        return AutoConfig.for_model(kind, **cut)
    except (ValueError, KeyError, TypeError) as error:
        raise KitError(f"transformers knows no config of model_type {kind!r}: {str(error).splitlines()[0][:200]}") from None


def _weights(config: dict[str, Any], layers: int) -> int:
    """Weights of the first `layers` layers, counted without making any."""
    import torch
    from transformers import AutoModel

    with torch.device("meta"):
        return sum(p.numel() for p in AutoModel.from_config(_configured(config, layers)).parameters())


def _model(config: dict[str, Any], layers: int, dtype: "torch.dtype") -> Any:
    import torch
    from transformers import AutoModel

    with torch.device(device()):
        return AutoModel.from_config(_configured(config, layers), dtype=dtype).eval()


def _layers(model: Any, shape: tuple[int, int], kinds: list[tuple], seconds: float) -> list[float]:
    """Seconds of each pass over random tokens of `shape` [sequences, tokens], as if there were a layer for each of `kinds`."""
    import torch

    ids = torch.randint(0, 1024, shape, device=device())
    marks: list[float] = []
    sums: list[tuple[float, list[float]]] = []

    def mark(*_: Any) -> None:
        wait()
        marks.append(time.perf_counter())

    built = list(model.layers)
    hooks = [hook for layer in built for hook in (layer.register_forward_pre_hook(mark), layer.register_forward_hook(mark))]

    def once(tokens: "torch.Tensor" = ids) -> None:
        marks.clear()
        started = time.perf_counter()
        model(input_ids=tokens, use_cache=False)
        wait()
        inside = [marks[2 * k + 1] - marks[2 * k] for k in range(len(built))]
        sums.append((time.perf_counter() - started - sum(inside), inside))

    try:
        with torch.no_grad():
            count = len(timed(once, seconds, warm_up=lambda: once(ids[:1, :16])))
    finally:
        for hook in hooks:
            hook.remove()
    whole = []
    for outside, inside in sums[-count:]:
        of = {kind: [time for time, mine in zip(inside, kinds, strict=False) if mine == kind] for kind in set(kinds)}
        whole.append(outside + sum(sum(of[kind]) / len(of[kind]) for kind in kinds))
    return whole
