"""Real samples of the tiny target: its own greedy answers by transformers, and the states that vLLM would give of them.

vLLM's id k is transformers' `hidden_states[k]`; the last state is what goes *into* the final norm.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinymodel import TEXT, make_tiny_target

from eagle3kit import hidden_states, target
from eagle3kit.conversations import Sample, make_sample
from eagle3kit.samples import StatesSample, Store

if TYPE_CHECKING:
    import torch

LAYERS = [2, 4, 5]  # the default ids of a target of eight layers
IDENTITY = {"target": "tiny", "revision": None, "vllm": "none", "dtype": "float32"}


def lively_target(path: Path, hidden: int = 64, vocab: int = 512, said: int | None = None) -> Path:
    """A tiny target that has something to say: its greedy answers wander rather than circle, and it is sure of them. Tokens
    from `said` on it never says, as the unused ones at the end of many vocabularies."""
    from transformers import AutoModelForCausalLM

    folder = make_tiny_target(path, hidden=hidden, vocab=vocab, tied=False)
    model = AutoModelForCausalLM.from_pretrained(folder)
    for name, weight in model.named_parameters():
        if weight.ndim == 2:  # a fresh one's words weigh next to nothing beside what its layers add
            weight.data *= 50 if "embed" in name else 15 if "head" in name else 8
    if said is not None:
        model.lm_head.weight.data[said:] = 0
    model.save_pretrained(folder)
    return folder


def load(folder: Path) -> Any:
    """The target as transformers' model, ready to be asked."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder).eval()


def own_answers(model: Any, folder: Path, count: int, new_tokens: int) -> list[Sample]:
    """`count` samples: a prompt of words, and up to `new_tokens` that the target says to it, greedily."""
    import torch

    tokenizer = target.tokenizer(folder)
    samples = []
    for number in range(count):
        text = TEXT[number % len(TEXT)][5 * (number // len(TEXT)) :]
        prompt = tokenizer.encode(text)[: 12 + number % 5]
        asked = {"max_new_tokens": new_tokens - number % 3, "do_sample": False, "eos_token_id": None,
                 "attention_mask": torch.ones(1, len(prompt), dtype=torch.long)}  # fmt: skip
        with torch.no_grad():
            whole = model.generate(torch.tensor([prompt]), **asked)[0].tolist()
        samples.append(make_sample(f"s{number}", ("one", "two")[number % 2], whole, [(len(prompt), len(whole))]))
    return samples


def states_of(model: Any, ids: list[int], layers: list[int] = LAYERS) -> "list[torch.Tensor]":
    """The states [T, H] of `layers`, then the last one before the final norm."""
    import torch

    kept: dict[str, torch.Tensor] = {}
    hook = model.model.norm.register_forward_pre_hook(lambda _, inputs: kept.update(last=inputs[0]))
    try:
        with torch.no_grad():
            out = model(torch.tensor([ids]), output_hidden_states=True)
    finally:
        hook.remove()
    return [out.hidden_states[k][0] for k in layers] + [kept["last"][0]]


def states_sample(model: Any, sample: Sample) -> StatesSample:
    """One sample as it is stored."""
    import torch

    return StatesSample(torch.tensor(sample.input_ids), torch.tensor(sample.loss_mask), states_of(model, sample.input_ids))


def fill(store: Store, model: Any, folder: Path, samples: list[Sample]) -> Store:
    """A whole store: manifest and every sample."""
    manifest = hidden_states.manifest(samples, IDENTITY, LAYERS, target.geometry(folder))
    store.begin([sample.input_ids for sample in samples], [sample.loss_mask for sample in samples], manifest)
    for number, sample in enumerate(samples):
        store.write(number, states_sample(model, sample))
    return store
