"""What the two expensive parts of a pass cost on this machine: a training step, and serving. `make bench` prints it.

Nothing here passes or fails by a time; run it on an otherwise idle machine.
"""

import statistics
import time
from pathlib import Path

import pytest

from eagle3kit import cpu, machine, server, target
from eagle3kit.params import Params

PROMPT = "Write a short story about a dog that learns to count."


@pytest.fixture(scope="module")
def model():
    return target.locate(Params().target.model)


def say(what: str, seconds: list[float], unit: str, amount: float) -> None:
    """One line: minimum, median and maximum of `seconds`, and `amount` of `unit` a second at the median."""
    low, middle, high = min(seconds), statistics.median(seconds), max(seconds)
    found = machine.inventory(Path("."))
    print(f"\n{what}: {low:.3f} / {middle:.3f} / {high:.3f} s, {amount / middle:,.0f} {unit}/s "
          f"(min / median / max of {len(seconds)}; {found['cores']} cores, {found['vectors']}, {len(found['gpus'])} GPUs)")


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("size", [2048, 8192])
def test_training_step(model, optimizer, size):
    """One step of 1,024 packed tokens, three draft steps: forward, backward, optimizer."""
    import torch
    from speculators.losses import resolve_loss_config
    from speculators.train.optimizers import build_optimizers
    from speculators.train.trainer import TrainerConfig

    from eagle3kit import draft

    geometry, tokens = target.geometry(model), 1024
    t2d = torch.arange(geometry.vocab_size) < size
    recipe = Params(training={"optimizer": optimizer}).training
    drafter = draft.build(model, t2d, torch.zeros(size, dtype=torch.int64), recipe, layer_ids=[2, 15, 27], seed=0)
    place = torch.arange(tokens)[None]
    width = geometry.hidden_size
    batch = {"hidden_states": torch.randn(1, tokens, 3 * width), "verifier_last_hidden_states": torch.randn(1, tokens, width),
             "input_ids": torch.randint(0, geometry.vocab_size, (1, tokens)), "loss_mask": (place % 2),
             "document_ids": place // 256, "position_ids": place % 256 + 1}  # fmt: skip
    call = {"ttt_steps": 3, "ttt_step_loss_decay": 1.0, "loss_config": resolve_loss_config("kl_div", "eager")}
    config = TrainerConfig(lr=1e-3, num_epochs=1, save_path="", optimizer=optimizer)
    seconds = []
    with cpu.trainable():
        optimizers = build_optimizers(drafter, config)
        for _ in range(6):
            started = time.perf_counter()
            _, loss, _ = drafter(**batch, **call)
            loss.backward()
            for one in optimizers:
                one.step()
                one.zero_grad()
            seconds.append(time.perf_counter() - started)
    say(f"training step, {optimizer}, draft vocabulary {size}", seconds[1:], "tokens", tokens)


@pytest.mark.parametrize("threads", [1, None])
@pytest.mark.parametrize("in_flight", [8, 64])
def test_serving(model, threads, in_flight, tmp_path):
    """Greedy tokens of one vLLM server, with one core and with all."""
    tokenizer = target.tokenizer(model)
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": PROMPT}], add_generation_prompt=True, return_dict=False)
    how = server.Settings(model=str(model), max_model_len=256, threads=threads, max_num_seqs=in_flight)
    seconds, tokens = [], 0
    with server.serve(how, tmp_path / "vllm.log") as vllm:
        for _ in range(3):
            started = time.perf_counter()
            answers = list(vllm.complete([prompt] * in_flight, max_tokens=32, in_flight=in_flight))
            seconds.append(time.perf_counter() - started)
            tokens = sum(len(answer.token_ids) for _, answer in answers)
    say(f"serving, {threads or 'all'} core(s), {in_flight} in flight", seconds, "tokens", tokens)
