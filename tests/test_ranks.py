"""Training on two processes through torchrun: equal to one process on the same batches, resumed, stopped; a rank that dies."""

import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import tinystates
import torch
from safetensors.torch import load_file

from eagle3kit import draft, epochs, ranks, vocabulary
from eagle3kit.draft import dataset
from eagle3kit.epochs import Fitted
from eagle3kit.errors import KitError
from eagle3kit.files import write_json
from eagle3kit.params import Training
from eagle3kit.samples import Store

torch.set_num_threads(1)
VALUES = {"epochs": 3, "draft_steps": 2, "tokens_per_step": 128, "learning_rate": 3e-3, "optimizer": "adamw", "processes": 2}


@dataclass
class Bench:
    """A target, a mapping and samples on disk, as a stage finds them."""

    target: Path
    mapping: Path
    stores: dict[str, Store]

    def new(self, recipe: Training):
        return draft.build(self.target, *vocabulary.read(self.mapping), recipe, layer_ids=tinystates.LAYERS, seed=0)

    def fit(self, folder: Path, *, report=lambda row: None, told=lambda line: None, **values) -> Fitted:
        recipe = Training(**VALUES | values)
        return ranks.fit(self.new(recipe), self.stores["train"], self.stores["held_out"], folder / "checkpoints", recipe, seed=0,
                         logs=folder / "ranks", target=self.target, mapping=self.mapping, report=report, told=told)  # fmt: skip


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Bench:
    place = tmp_path_factory.mktemp("a {bench}, with commas")
    folder = tinystates.lively_target(place / "target")
    model = tinystates.load(folder)
    rows = tinystates.own_answers(model, folder, 12, 44)
    sides = {"train": rows[:11], "held_out": [rows[0], rows[11]]}
    stores = {side: tinystates.fill(Store(place / side, "pt"), model, folder, chosen) for side, chosen in sides.items()}
    counts = vocabulary.count_tokens([(row.input_ids, row.loss_mask) for row in rows], 512)
    t2d, d2t = vocabulary.build(counts, 256, [0, 1, 2])
    vocabulary.write(place / "mapping", counts, t2d, d2t)
    return Bench(folder, place / "mapping", stores)


class Stopped(Exception):
    pass


@dataclass
class Whole:
    """A training of two processes whose rank 1 was killed after the first epoch: what was said then; what the next go gave, its
    lines, the folder, and the addresses that its processes listened on."""

    killed: str
    left: bool
    fitted: Fitted
    folder: Path
    lines: list[str]
    listened: set[str]


@pytest.fixture(scope="module")
def whole(bench, tmp_path_factory) -> Whole:
    folder, lines, listened = tmp_path_factory.mktemp("two"), [], set()

    def told(line: str) -> None:
        lines.append(line)
        for process in family():
            for connection in process.net_connections("inet"):
                if connection.status == psutil.CONN_LISTEN:
                    listened.add(connection.laddr.ip)

    watcher = threading.Thread(target=kill_after_an_epoch, args=(folder / "ranks" / ranks.PROGRESS,), daemon=True)
    watcher.start()
    with pytest.raises(KitError) as killed:
        bench.fit(folder)
    watcher.join()
    left = not nobody_left()
    return Whole(str(killed.value), left, bench.fit(folder, told=told), folder, lines, listened)


def family() -> list[psutil.Process]:
    """Everything that torchrun has started below this process, and torchrun."""
    return [process for process in psutil.Process().children(recursive=True)
            if any(part in ("eagle3kit.ranks", "torch.distributed.run") for part in _command(process))]


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def rank_process(rank: int) -> psutil.Process | None:
    return next((process for process in family()
                 if "torch.distributed.run" not in _command(process) and process.environ().get("RANK") == str(rank)), None)


def kill_after_an_epoch(progress: Path) -> None:
    """SIGKILL rank 1 as soon as rank 0 has told of an epoch. Who it is was found out before: the epochs are short."""
    while not (found := rank_process(1)):
        time.sleep(0.05)
    while not progress.exists() or '"line"' not in progress.read_text():
        time.sleep(0.002)
    found.send_signal(signal.SIGKILL)


def by_hand(bench: Bench, recipe: Training, processes: int) -> dict[str, torch.Tensor]:
    """The weights after training in one process, with nothing of `training` or `ranks`: in each step the batches that so many
    ranks would have taken, one after the other; the step goes down the mean of their gradients."""
    from speculators.losses import resolve_loss_config
    from speculators.models.eagle3.data import shift_batch
    from speculators.train.data import CollateFn
    from speculators.train.distributed_batch_sampler import MultipackDistributedBatchSamplerV2
    from transformers import get_cosine_schedule_with_warmup

    model = bench.new(recipe).train()
    rows = dataset(bench.stores["train"], max_length=recipe.tokens_per_step, dtype=torch.float32)
    collate = CollateFn(recipe.tokens_per_step, 64, num_target_layers=3, dtype=torch.float32, preprocess=shift_batch)
    samplers = [MultipackDistributedBatchSamplerV2(recipe.tokens_per_step, rows.approx_lengths, processes, rank, seed=0)
                for rank in range(processes)]  # fmt: skip
    total = recipe.epochs * len(samplers[0])
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, weight_decay=recipe.weight_decay)
    schedule = get_cosine_schedule_with_warmup(optimizer, int(total * recipe.warmup_percent / 100), total)
    call = {"ttt_steps": recipe.draft_steps, "ttt_step_loss_decay": 1.0, "loss_config": resolve_loss_config("kl_div", "eager")}
    for epoch in range(recipe.epochs):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        for numbers in zip(*samplers, strict=True):
            optimizer.zero_grad()
            for chosen in numbers:
                batch = collate([rows[number] for number in chosen])
                batch = {key: value for key, value in batch.items() if isinstance(value, torch.Tensor)}
                _, loss, _ = model(**batch, **call)
                (loss / processes).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    return model.state_dict()


def weights(fitted: Fitted) -> dict[str, torch.Tensor]:
    return load_file(fitted.last / "model.safetensors")


def nobody_left() -> bool:
    until = time.monotonic() + 20
    while family() and time.monotonic() < until:
        time.sleep(0.1)
    return not family()


# ---- One process or several


def test_two_processes_are_one_on_the_mean_of_both_batches(bench, whole):
    """Broken off in between, too. Not bit for bit: sums are taken in another order. Far from what one process makes of half the
    batches."""
    mine, recipe = weights(whole.fitted), Training(**VALUES)
    reference, half = by_hand(bench, recipe, 2), by_hand(bench, recipe, 1)
    moved = [key for key, value in bench.new(recipe).state_dict().items() if key in mine and not torch.equal(value, mine[key])]
    assert "fc.weight" in moved and len(moved) > 8
    for key in moved:
        torch.testing.assert_close(mine[key], reference[key], rtol=2e-3, atol=2e-5, msg=lambda text, key=key: f"{key}: {text}")
    assert max(float((mine[key] - half[key]).abs().max()) for key in moved) > 1e-3, "the tolerance tells the two apart"


QUICK = """# Every Python here begins with this: ranks train as they do on GPUs, on the CPU.
import torch
from eagle3kit import pace
pace.quick, pace.EVERY_S, pace.place = lambda: True, 0.0, lambda *_, **__: torch.device("cpu")
"""


@pytest.fixture
def as_on_gpus(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("customized")
    (folder / "sitecustomize.py").write_text(QUICK)
    monkeypatch.setenv("PYTHONPATH", str(folder))


def test_ranks_that_do_not_wait_end_as_those_that_do(bench, whole, tmp_path, as_on_gpus):
    reported = []
    quick, usual = bench.fit(tmp_path, report=reported.append), whole.fitted
    for key, value in weights(usual).items():
        torch.testing.assert_close(weights(quick)[key], value, rtol=2e-3, atol=2e-5, msg=lambda text, key=key: f"{key}: {text}")
    last = len(usual.steps) - 1
    assert [row["step"] for row in reported] == [*range(last + 1), last], "one rank reports: every step, and the last at the end"
    for one, other in zip(quick.steps, usual.steps, strict=True):
        assert one.keys() == other.keys() and one["tokens_per_second"] > 0
        for key in one.keys() - {"tokens_per_second"}:
            assert one[key] == pytest.approx(other[key], rel=1e-3), (key, one["step"])


def test_what_it_leaves_is_what_one_process_leaves(whole):
    fitted, folder = whole.fitted, whole.folder
    assert {(row["epoch"], row["split"], row["draft_step"]) for row in fitted.history} == {
        (epoch, split, step) for epoch in range(3) for split in ("train", "held out") for step in (0, 1)}  # fmt: skip
    assert [row["step"] for row in fitted.steps] == list(range(len(fitted.steps)))
    assert sum(fitted.steps[-1][f"loss_{k}"] for k in (0, 1)) < sum(fitted.steps[0][f"loss_{k}"] for k in (0, 1))
    assert (fitted.last / "optimizer_state_dict.pt").is_file() and fitted.last.name == "2"
    assert {path.name for path in (folder / "ranks").iterdir()} >= {"rank-0.log", "rank-1.log", "torchrun.log", "request.json"}
    assert "Traceback" not in (folder / "ranks" / "rank-1.log").read_text()
    assert nobody_left()


def test_ranks_can_be_reached_from_this_machine_only(whole):
    assert whole.listened and whole.listened <= {"127.0.0.1", "::1"}


def test_one_process_is_this_one(bench, tmp_path):
    alone = bench.fit(tmp_path, processes=1, epochs=1)
    assert not (tmp_path / "ranks").exists() and len(alone.steps) > 0


# ---- Broken off


def test_a_rank_that_dies_is_named_and_training_goes_on_where_it_was(whole):
    assert "training on 2 processes: rank 1 ended before its time: it was killed, or ran out of memory" in whole.killed
    assert "Run the stage again: it goes on after the last whole epoch" in whole.killed and "rank-1.log" in whole.killed
    assert not whole.left
    assert [line.split(":")[0] for line in whole.lines] == ["epoch 2 of 3", "epoch 3 of 3"]


def test_a_draft_in_parts_is_stopped_goes_on_and_ends_as_copies_of_it_do(bench, whole, tmp_path, as_on_gpus):
    def stop(line: str) -> None:
        raise Stopped

    with pytest.raises(Stopped):
        bench.fit(tmp_path, told=stop, shard=True)
    assert nobody_left()
    fitted = bench.fit(tmp_path, shard=True)
    mine, copies = weights(fitted), weights(whole.fitted)
    assert sorted(mine) == sorted(copies)
    for key, value in mine.items():
        torch.testing.assert_close(value, copies[key], rtol=2e-3, atol=2e-5, msg=lambda text, key=key: f"{key}: {text}")


def test_checkpoints_of_another_number_of_processes_are_not_gone_on_from(bench, whole):
    train, held_out, recipe = bench.stores["train"], bench.stores["held_out"], Training(**VALUES)
    t2d = vocabulary.read(bench.mapping)[0]
    identities = [epochs.identity(t2d, train, held_out, recipe, 0, processes) for processes in (1, 2, 3)]
    assert len({str(one) for one in identities}) == 3 and "processes" not in identities[0]


def test_too_few_samples_and_too_many_processes_are_refused_at_once(bench, tmp_path):
    with pytest.raises(KitError, match="11 samples to train on are too few for 12 processes; lower training.processes"):
        bench.fit(tmp_path, processes=12)
    assert ranks.count(0) == 1 or torch.cuda.is_available()


# ---- Whose fault it was

ROOT_CAUSE = """
------------------------------------------------------------
Failures:
[1]:
  rank      : 0 (local_rank: 0)
  exitcode  : -9 (pid: 4)
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-30_15:00:00
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 5)
"""


def test_the_first_own_error_is_told_and_not_its_echo(tmp_path):
    def left(**ends: tuple[float, str, str]) -> str:
        for old in tmp_path.glob("rank-*"):
            old.unlink()
        for rank, (when, kind, error) in ends.items():
            write_json(tmp_path / f"rank-{rank[1:]}.json", {"time": when, "kind": kind, "error": error})
        return ranks.why(tmp_path, 3)

    words = "the held-out loss is nan"
    echo = (1.0, "RuntimeError", "[gloo/transport/tcp/pair.cc] Connection closed by peer")
    assert left(r0=echo, r1=(2.0, "KitError", words), r2=(3.0, "ValueError", "x")) == words
    assert "rank 2 ended before its time: it was killed" in left(r0=echo, r1=(2.0, *echo[1:]))
    assert "rank 1 ended before its time: no memory left" in left(r0=echo, r1=(0.5, "MemoryError", "no memory left"))
    (tmp_path / "torchrun.log").write_text("no module named x\n")
    assert "rank 0 ended before its time: it was killed" in left() and "no module named x" in left()
    (tmp_path / "torchrun.log").write_text(ROOT_CAUSE)  # the others waited for it and were killed too
    assert "rank 1 ended before its time: it was killed" in left()
    assert "rank 2 ended before its time: it was killed" in left(r0=echo, r1=echo)
