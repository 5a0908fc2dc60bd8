"""Training with speculators: it learns, it comes out the same however often it is killed, and it keeps the right epoch."""

import json
import logging
import os
import shutil
import signal
from pathlib import Path

import pytest
import tinystates
import torch
from safetensors.torch import load_file

from eagle3kit import acceptance, cpu, draft, epochs, training, vocabulary
from eagle3kit.errors import KitError
from eagle3kit.params import Training
from eagle3kit.samples import Store, open_store

torch.set_num_threads(1)
LAYERS = tinystates.LAYERS
VALUES = {"epochs": 3, "draft_steps": 2, "tokens_per_step": 128, "learning_rate": 3e-3, "muon_learning_rate": 3e-3}


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory) -> Path:
    return tinystates.lively_target(tmp_path_factory.mktemp("target") / "tiny")


@pytest.fixture(scope="module")
def sides(target_folder):
    """Two of the samples held out are learned by heart, so that a draft of a few seconds knows something about them."""
    rows = tinystates.own_answers(tinystates.load(target_folder), target_folder, 9, 44)
    return {"train": rows[:8], "held_out": [rows[0], rows[1], rows[8]]}


@pytest.fixture(scope="module")
def stores(target_folder, sides, tmp_path_factory) -> dict[str, Store]:
    model, folder = tinystates.load(target_folder), tmp_path_factory.mktemp("stores")
    return {side: tinystates.fill(Store(folder / side, "pt"), model, target_folder, rows) for side, rows in sides.items()}


@pytest.fixture(scope="module")
def new(target_folder, sides):
    """A fresh draft for a recipe; the same every time."""
    pairs = [(row.input_ids, row.loss_mask) for row in sides["train"]]
    mapping = vocabulary.build(vocabulary.count_tokens(pairs, 512), 256, [0, 1, 2])

    def build(recipe: Training):
        return draft.build(target_folder, *mapping, recipe, layer_ids=LAYERS, seed=0)

    return build


@pytest.fixture(scope="module")
def call():
    """What training hands to the model's forward pass."""
    from speculators.losses import resolve_loss_config

    return {"ttt_steps": 2, "ttt_step_loss_decay": 1.0, "loss_config": resolve_loss_config("kl_div", "eager")}


@pytest.fixture(scope="module")
def fit(new, stores):
    def run(folder: Path, told=lambda line: None, *, train=None, held_out=None, report=lambda row: None, **values):
        recipe = Training(**VALUES | values)
        return training.fit(new(recipe), train or stores["train"], held_out or stores["held_out"], folder, recipe, seed=0,
                            report=report, told=told)

    return run


@pytest.fixture(scope="module")
def unbroken(fit, tmp_path_factory) -> dict[str, training.Fitted]:
    """One whole run an optimizer."""
    return {name: fit(tmp_path_factory.mktemp(name) / "run", optimizer=name) for name in ("adamw", "muon")}


@pytest.fixture(scope="module")
def learned(fit, new, tmp_path_factory):
    """A draft that is right now and then, and what was counted of it."""
    values = {"epochs": 12, "learning_rate": 0.01, "muon_learning_rate": 0.02}
    fitted = fit(tmp_path_factory.mktemp("learned") / "run", **values)
    model = new(Training(**VALUES))
    model.load_state_dict(load_file(fitted.best / "model.safetensors"), strict=False)
    assert acceptance.total(fitted.records).length > 1.2
    return model.eval(), fitted


class Killed(Exception):
    pass


def killed_after(epochs: int):
    """A listener that stops the run when so many epochs have ended."""
    lines: list[str] = []

    def told(line: str) -> None:
        lines.append(line)
        if len(lines) == epochs:
            raise Killed

    return told


def weights_of(fitted: training.Fitted) -> dict[str, torch.Tensor]:
    return load_file(fitted.last / "model.safetensors")


def assert_same(one: training.Fitted, other: training.Fitted) -> None:
    mine, theirs = weights_of(one), weights_of(other)
    assert sorted(mine) == sorted(theirs)
    assert [key for key in mine if not torch.equal(mine[key], theirs[key])] == []
    assert one.history == other.history and one.records == other.records and one.everywhere == other.everywhere
    assert one.best_epoch == other.best_epoch and one.best.name == other.best.name and one.last.name == other.last.name
    steps = [[{key: value for key, value in row.items() if key != "tokens_per_second"} for row in fitted.steps]
             for fitted in (one, other)]
    assert steps[0] == steps[1]


# ---- It learns


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_loss_falls_at_every_draft_step(unbroken, optimizer):
    fitted = unbroken[optimizer]
    loss = {(row["split"], row["draft_step"], row["epoch"]): row["loss"] for row in fitted.history}
    assert len(loss) == 2 * 2 * 3
    for step in (0, 1):
        for split in ("train", "held out"):
            assert loss[split, step, 2] < loss[split, step, 1] < loss[split, step, 0]
    assert [row["step"] for row in fitted.steps] == list(range(len(fitted.steps)))
    assert {row["epoch"] for row in fitted.steps} == {0, 1, 2}
    assert fitted.steps[-1]["loss"] < fitted.steps[0]["loss"]


def test_what_is_kept_is_frozen_or_trained(unbroken, new):
    start, end = new(Training(**VALUES)).state_dict(), weights_of(unbroken["adamw"])
    moved = sorted(key for key in end if not torch.equal(start[key], end[key]))
    assert "fc.weight" in moved and any(key.startswith("layers.0.") for key in moved)
    assert not {"embed_tokens.weight", "lm_head.weight", "t2d", "d2t"} & set(moved)


def test_nothing_is_learned_where_nothing_is_supervised(new, stores, call):
    model = new(Training(**VALUES))
    row = draft._row(stores["train"], 0)
    inputs = {key: value.unsqueeze(0) for key, value in row.items()}
    inputs["document_ids"] = torch.zeros_like(inputs["input_ids"])

    def gradients(mask: torch.Tensor) -> list[torch.Tensor]:
        model.zero_grad()
        _, loss, _ = model(**inputs | {"loss_mask": mask}, **call)
        loss.backward()
        return [weight.grad for weight in model.parameters() if weight.grad is not None]

    assert gradients(inputs["loss_mask"]) and any(grad.abs().max() > 0 for grad in gradients(inputs["loss_mask"]))
    assert all(not grad.any() for grad in gradients(torch.zeros_like(inputs["loss_mask"])))


# ---- The same, however it comes about


def test_two_equal_runs_end_equal_bit_for_bit(fit, unbroken, tmp_path):
    rows: list[dict] = []
    fitted = fit(tmp_path / "again", optimizer="muon", report=rows.append)
    assert_same(fitted, unbroken["muon"])
    # Now and then a step is told of, the last one always.
    assert len(rows) < len(fitted.steps) == rows[-1]["steps"] == rows[-1]["step"] + 1
    assert rows[-1]["loss"] == fitted.steps[-1]["loss"] and rows[-1]["tokens_per_second"] > 0


def test_both_layouts_of_samples_train_alike(fit, unbroken, stores, target_folder, sides, tmp_path):
    model = tinystates.load(target_folder)
    other = {side: tinystates.fill(Store(tmp_path / side, "safetensors"), model, target_folder, rows)
             for side, rows in sides.items()}
    fitted = fit(tmp_path / "run", train=open_store(other["train"].folder), held_out=other["held_out"], optimizer="muon")
    assert_same(fitted, unbroken["muon"])


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_killed_run_ends_as_the_unbroken_one(fit, unbroken, tmp_path, optimizer):
    folder = tmp_path / "run"
    with pytest.raises(Killed):
        fit(folder, killed_after(1), optimizer=optimizer)
    with pytest.raises(Killed):
        fit(folder, killed_after(1), optimizer=optimizer)
    lines: list[str] = []
    fitted = fit(folder, lines.append, optimizer=optimizer)
    assert [line.split(":")[0] for line in lines] == ["epoch 3 of 3"]
    assert_same(fitted, unbroken[optimizer])
    lines.clear()
    assert_same(fit(folder, lines.append, optimizer=optimizer), unbroken[optimizer])  # nothing left to do
    assert lines == []


def test_a_checkpoint_whose_epoch_was_not_seen_through_does_not_count(fit, unbroken, tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(Killed):
        fit(folder, killed_after(1), optimizer="muon")
    # As a kill between saving and evaluating leaves it, then one within saving.
    shutil.copytree(folder / "0", folder / "1")
    (folder / "2").mkdir()
    (folder / "2" / "model.safetensors").write_bytes((folder / "0" / "model.safetensors").read_bytes()[:1000])
    assert_same(fit(folder, optimizer="muon"), unbroken["muon"])


def test_a_stop_signal_ends_with_the_way_on(fit, unbroken, tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(KitError, match="stopped after 1 of 3 epochs; run the stage again: it goes on from there"):
        fit(folder, lambda line: os.kill(os.getpid(), signal.SIGINT), optimizer="muon")
    assert_same(fit(folder, optimizer="muon"), unbroken["muon"])
    assert not (folder / "interrupted").exists()


def test_a_kill_between_the_notes_and_the_link_does_not_hide_the_best_epoch(fit, unbroken, tmp_path):
    folder = shutil.copytree(unbroken["muon"].last.parent, tmp_path / "run", symlinks=True)
    (folder / "checkpoint_best").unlink()
    assert_same(fit(folder, optimizer="muon"), unbroken["muon"])


@pytest.mark.parametrize("change", [{"learning_rate": 2e-3}, {"epochs": 2}, {"loss": "ce"}])
def test_checkpoints_of_another_recipe_go(fit, tmp_path, change):
    folder = tmp_path / "run"
    with pytest.raises(Killed):
        fit(folder, killed_after(1))
    (folder / "left-over").touch()
    lines: list[str] = []

    def told(line: str) -> None:
        lines.append(line)
        raise Killed

    with pytest.raises(Killed):
        fit(folder, told, **change)
    assert lines[0].startswith("epoch 1 of ") and not (folder / "left-over").exists()


def test_checkpoints_on_other_samples_go(fit, stores, tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(Killed):
        fit(folder, killed_after(1))
    other = shutil.copytree(stores["train"].folder, tmp_path / "other")
    said = json.loads((other / "manifest.json").read_text())
    (other / "manifest.json").write_text(json.dumps(said | {"vllm": "another"}))
    lines: list[str] = []

    def told(line: str) -> None:
        lines.append(line)
        raise Killed

    with pytest.raises(Killed):
        fit(folder, told, train=Store(other, "pt"))
    assert lines[0].startswith("epoch 1 of 3")


# ---- Which epoch is kept


def test_best_is_the_longest_estimated_acceptance_length(fit, new, stores, call, tmp_path):
    # A rate so high that epochs may be worse than those before.
    values = {"epochs": 6, "optimizer": "adamw", "learning_rate": 0.05, "scheduler": "none"}
    lines: list[str] = []
    fitted = fit(tmp_path / "run", lines.append, **values)
    lengths = {row["epoch"]: row["length"] for row in fitted.history}
    best = max(lengths.values())
    assert fitted.best_epoch == min(epoch for epoch, length in lengths.items() if length == best)
    assert fitted.best == tmp_path / "run" / str(fitted.best_epoch) and fitted.last == tmp_path / "run" / "5"
    assert acceptance.total(fitted.records).length == best
    assert f"best so far {best:.3f}" in lines[-1]
    kept = {path.name for path in (tmp_path / "run").iterdir() if path.is_dir() and not path.is_symlink()}
    assert kept == {str(fitted.best_epoch), "5"}
    # The weights that lie there are those that were looked at.
    model = new(Training(**VALUES | values))
    model.load_state_dict(load_file(fitted.best / "model.safetensors"), strict=False)
    again = draft.evaluate(model, stores["held_out"], call, torch.float32)
    assert again.records == fitted.records and again.everywhere == fitted.everywhere


@pytest.mark.parametrize(
    ("lengths", "best"), [([1.2, 1.5, 1.4], 1), ([1.5, 1.5, 1.5], 0), ([1.0, 1.1, 1.2], 2), ([1.3, 1.1, 1.3], 0)]
)
def test_of_equal_epochs_the_first_is_best(lengths, best):
    rows = [{"epoch": epoch, "draft_step": k, "length": length} for epoch, length in enumerate(lengths) for k in range(2)]
    assert epochs.best({"epochs": rows}) == best


def test_records_are_a_turn_each(unbroken, sides):
    turns = [turn for row in sides["held_out"] for turn in row.turns]
    fitted = unbroken["muon"]
    assert len(fitted.records) == len(turns)
    for (start, end), record in zip(turns, fitted.records, strict=True):
        assert record.drafts + sum(record.accepted) in (end - start - 1, end - start)
    assert fitted.everywhere.drafts == sum(end - start - 1 for start, end in turns)


# ---- What it counts is what speculators counts


def test_full_accuracy_is_speculators_own_over_one_batch(learned, stores, call):
    from speculators.models.eagle3.data import shift_batch
    from speculators.train.data import CollateFn

    model, _ = learned
    store = stores["held_out"]
    mine = draft.evaluate(model, store, call, torch.float32)
    rows = draft.dataset(store, max_length=256, dtype=torch.float32)
    batch = CollateFn(256, 64, num_target_layers=3, dtype=torch.float32, preprocess=shift_batch)([rows[n] for n in range(3)])
    assert int(batch["document_ids"].max()) == 2, "all samples in one batch, padded"
    batch.pop("error_records")
    with torch.no_grad():
        _, _, metrics = model(**batch, **call)
    for k in range(2):
        theirs = float(metrics[f"full_acc_{k}_sum"]) / float(metrics[f"full_acc_{k}_total"])
        assert mine.full_accuracy[k] == pytest.approx(theirs, abs=1e-9)
        assert mine.loss[k] == pytest.approx(float(metrics[f"loss_{k}_sum"]), rel=1e-4)
    assert mine.full_accuracy[0] > mine.full_accuracy[1] > 0
    padded = draft.evaluate(model, store, call, torch.float32, padded_to=160)
    assert padded.records == mine.records and padded.everywhere == mine.everywhere
    assert padded.loss == pytest.approx(mine.loss, rel=1e-4) and padded.full_accuracy == pytest.approx(mine.full_accuracy)
    for together in (200, 10_000):
        packed = draft.evaluate(model, store, call, torch.float32, together=together)
        assert packed.records == mine.records and packed.everywhere == mine.everywhere
        assert packed.loss == pytest.approx(mine.loss, rel=1e-5) and packed.full_accuracy == mine.full_accuracy


def test_samples_share_a_forward_pass_as_far_as_they_fit(stores):
    lengths = stores["held_out"].manifest()["lengths"]
    assert len(lengths) == 3 and draft._apart(stores["held_out"], 0, 2) == [(0, 1), (1, 2), (2, 3)]
    first, second, _ = (length - 1 + 2 for length in lengths)
    assert draft._apart(stores["held_out"], first + second, 2)[0] == (0, 2)
    assert draft._apart(stores["held_out"], first + second - 1, 2)[0] == (0, 1)
    assert draft._apart(stores["held_out"], 10_000, 2) == [(0, 3)]


def test_a_sample_whose_first_tokens_are_supervised_stays_alone(stores, learned, call, monkeypatch):
    """Else its first tokens would be told of a place before it, which a sample that is alone has not."""
    usual, store = draft._row, stores["held_out"]
    manifest = store.manifest()
    turns = [[[0, length]] if number == 1 else spans
             for number, (length, spans) in enumerate(zip(manifest["lengths"], manifest["turns"], strict=True))]  # fmt: skip

    def row(of, number):
        found = usual(of, number)
        return found if number != 1 else {**found, "loss_mask": torch.ones_like(found["loss_mask"])}

    monkeypatch.setattr(draft, "_row", row)
    monkeypatch.setattr(Store, "manifest", lambda _: {**manifest, "turns": turns})
    assert draft._apart(store, 10_000, 2) == [(0, 1), (1, 2), (2, 3)]
    alone, packed = (draft.evaluate(learned[0], store, call, torch.float32, together=n) for n in (0, 10_000))
    assert alone == packed
    monkeypatch.setattr(Store, "manifest", lambda _: {**manifest, "turns": [[[2, length]] for length in manifest["lengths"]]})
    assert draft._apart(store, 10_000, 2) == [(0, 3)]


def test_replay_is_what_free_drafting_would_have_accepted(learned, stores, sides):
    """Drafting as a server does it, step by step from the draft's own tokens, gives the counts of the teacher-forced replay."""
    model, fitted = learned
    for number, sample in enumerate(sides["held_out"]):
        (start, end), ids = sample.turns[0], sample.input_ids
        states = draft._row(stores["held_out"], number)["hidden_states"]
        place, steps = start, []
        while place < end - 1:
            # The draft has read the token at `place`, with the target's states up to the one before it; no more is known.
            known, drafted = torch.tensor(ids[1 : place + 1]), []
            for k in range(2):
                # Entries behind the last one hold the tokens drafted so far, which the model's later steps read there;
                # as a document of their own they are seen by nobody else.
                tokens = torch.cat([known, torch.tensor(drafted, dtype=torch.int64)])
                fed = torch.cat([states[:place], torch.zeros(k, 3 * 64)])
                documents = torch.tensor([0] * place + [1] * k)
                positions = 1 + torch.arange(len(tokens))
                with torch.no_grad():
                    said = model(hidden_states=fed[None], input_ids=tokens[None], document_ids=documents[None],
                                 position_ids=positions[None], ttt_steps=k + 1)
                token = int(said[k][0, place - 1])
                drafted.append(token + int(model.d2t[token]))
            agreed = 0
            while agreed < 2 and place + 1 + agreed < end and drafted[agreed] == ids[place + 1 + agreed]:
                agreed += 1
            steps.append(agreed)
            place += agreed + 1
        assert acceptance.from_steps(steps, 2) == fitted.records[number]


# ---- What it refuses


def test_a_sample_longer_than_a_step_is_refused(fit, stores, tmp_path):
    longest = max(stores["train"].manifest()["lengths"])
    with pytest.raises(KitError, match=f"tokens_per_step is {longest - 2}, but a sample has {longest} tokens; raise it to at "
                                       f"least {longest - 1} or lower dataset.max_length"):
        fit(tmp_path / "run", tokens_per_step=longest - 2)
    assert not (tmp_path / "run").exists()
    fitted = fit(tmp_path / "run", tokens_per_step=longest - 1, epochs=1)
    assert fitted.best == fitted.last == tmp_path / "run" / "0"


def test_a_sample_that_the_inspector_refuses_is_never_trained_on(fit, stores, tmp_path):
    folder = shutil.copytree(stores["train"].folder, tmp_path / "train")
    content = torch.load(folder / "data_3.pt", weights_only=True)
    content["hidden_states"][1][4] = float("inf")
    torch.save(content, folder / "data_3.pt")
    with pytest.raises(KitError, match=r"data_3\.pt, key hidden_states: NaN or infinite values \(state 1, "):
        fit(tmp_path / "run", train=Store(folder, "pt"))
    assert not (tmp_path / "run").exists()


def test_a_loss_that_is_no_number_stops_it(new, stores, tmp_path):
    recipe = Training(**VALUES)
    model = new(recipe)
    model.fc.weight.data[0, 0] = float("nan")
    with pytest.raises(KitError, match=r"held-out loss is \[nan, nan\] after epoch 1; lower training\.learning_rate"):
        training.fit(model, stores["train"], stores["held_out"], tmp_path / "run", recipe, seed=0,
                     report=lambda row: None, told=lambda line: None)
    assert not (tmp_path / "run" / "history.json").exists()


# ---- The CPU's room


def places() -> dict:
    from speculators.train import checkpointer, trainer
    from torch.optim import _muon

    return {
        "rank": trainer.get_local_rank,
        "synchronize": torch.accelerator.synchronize,
        "device": checkpointer.get_current_device,
        "muon": _muon._zeropower_via_newtonschulz,
        "level": logging.getLogger("torch.utils.data").level,
    }


def test_padding_changes_nothing_but_the_time(new, stores, call):
    """Loss and gradients of a packed step are the same whether it is padded to its full length or ends with its samples."""
    from speculators.models.eagle3.data import shift_batch
    from speculators.train.data import CollateFn

    recipe = Training(**VALUES)
    rows = draft.dataset(stores["train"], max_length=128, dtype=torch.float32)
    padded = CollateFn(256, 64, num_target_layers=len(LAYERS), dtype=torch.float32, preprocess=shift_batch)
    samples = [rows[number] for number in (0, 1)]
    seen = []
    for collate in (padded, cpu.WithoutPadding(padded)):
        model = new(recipe)
        batch = collate(samples)
        inputs = {key: value for key, value in batch.items() if torch.is_tensor(value) and key != "error_records"}
        _, loss, _ = model(**inputs, **call)
        loss.backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        seen.append((inputs["input_ids"].shape[1], loss.item(), gradient))
    (whole, loss, gradient), (short, same, alike) = seen
    assert whole == 256 and short == sum(len(row["input_ids"]) for row in samples) - len(samples) < 256
    assert loss == pytest.approx(same, rel=1e-5)
    torch.testing.assert_close(alike, gradient, rtol=1e-4, atol=1e-5)


def test_patches_last_as_long_as_the_block():
    before = places()
    with cpu.trainable():
        inside = places()
        assert all(inside[name] is not before[name] for name in ("rank", "synchronize", "device", "muon"))
        torch.accelerator.synchronize()
    assert places() == before
    with pytest.raises(Killed), cpu.trainable():
        raise Killed
    assert places() == before


@pytest.mark.skipif(not cpu.is_cpu(), reason="on a GPU torch's own is used")
@pytest.mark.parametrize("shape", [(64, 64), (64, 192), (192, 64), (16, 300)])
def test_orthogonalised_is_muons_update_in_float32(shape):
    from torch.optim import _muon

    options = ((_muon.DEFAULT_A, _muon.DEFAULT_B, _muon.DEFAULT_C), _muon.DEFAULT_NS_STEPS, _muon.EPS)
    for seed in range(5):
        update = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 10.0 ** (seed - 2)
        found = cpu.orthogonalised(update, *options)
        assert found.shape == update.shape and found.dtype == torch.float32
        # The promise of the iteration: the singular values come near one, the singular vectors stay.
        left, values, right = torch.linalg.svd(update, full_matrices=False)
        turned = left.T @ found @ right.T
        strong = values > values.max() / 20
        assert ((turned.diagonal()[strong] > 0.5) & (turned.diagonal()[strong] < 1.5)).all()
        assert (turned - turned.diagonal().diag()).abs().max() < 1e-3
        theirs = _muon._zeropower_via_newtonschulz(update, *options).float()
        assert (found - theirs).norm() / found.norm() < 0.05


def test_vllm_gets_every_core_there_is(monkeypatch):
    monkeypatch.setattr(cpu, "cores", lambda: [0, 1, 4, 5])
    assert cpu.vllm_environment(threads=None, kv_cache_gib=2)["VLLM_CPU_OMP_THREADS_BIND"] == "0,1,4,5"
    assert cpu.vllm_environment(threads=2, kv_cache_gib=2)["VLLM_CPU_OMP_THREADS_BIND"] == "0,1"
    assert cpu.vllm_environment(threads=99, kv_cache_gib=3)["VLLM_CPU_OMP_THREADS_BIND"] == "0,1,4,5"
    two = cpu.vllm_environment(threads=None, kv_cache_gib=3, tensor_parallel=2)
    assert two["VLLM_CPU_OMP_THREADS_BIND"] == "0,1|4,5" and two["VLLM_CPU_KVCACHE_SPACE"] == "3"
