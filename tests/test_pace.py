"""Training without waiting: the same steps as speculators' own loop, told a moment later; and what is compiled is put back."""

import pytest
import tinydraft
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from speculators.losses import resolve_loss_config
from speculators.models.metrics import compute_accuracy_single_step

from eagle3kit import cpu, draft, pace, training
from eagle3kit.samples import open_store

pytestmark = pytest.mark.slow
RECIPE = tinydraft.RECIPE.model_copy(update={"epochs": 2})


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tinydraft.Tiny:
    return tinydraft.tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def new(made):
    return draft.build(made.target, *made.mapping, RECIPE, layer_ids=tinydraft.LAYERS, seed=0)


def test_the_same_steps_end_in_the_same_weights_and_rows(made, new, tmp_path, monkeypatch):
    other = draft.build(made.target, *made.mapping, RECIPE, layer_ids=tinydraft.LAYERS, seed=0)
    with monkeypatch.context() as inside:
        inside.setattr("speculators.train.trainer.tqdm", None)  # its bar would take what is printed, and is not called
        usual = tinydraft.learn(tmp_path / "usual", other, made.store, made.store, RECIPE)
    monkeypatch.setattr(pace, "quick", lambda: True)
    monkeypatch.setattr(pace, "place", lambda *_, **__: torch.device("cpu"))
    monkeypatch.setattr(pace, "EVERY_S", 0.0)
    reported = []
    quick = training.fit(new, made.store, made.store, tmp_path / "quick", RECIPE, seed=0, report=reported.append,
                         told=lambda line: None)  # fmt: skip
    assert quick.records == usual.records and quick.history == usual.history
    assert len(quick.steps) == len(usual.steps) > 2
    for one, other in zip(quick.steps, usual.steps, strict=True):
        assert one.keys() == other.keys() and one.pop("tokens_per_second") > 0 < other.pop("tokens_per_second")
        assert one == pytest.approx(other, rel=1e-6)
    assert [row["step"] for row in reported][-1] == len(usual.steps) - 1 and reported[0]["steps"] == len(usual.steps)
    one, other = (load_file(fitted.last / "model.safetensors") for fitted in (usual, quick))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@given(st.data())
def test_hits_are_those_of_speculators(data):
    size = data.draw(st.integers(1, 30))
    drafted, wanted = (torch.tensor([data.draw(st.lists(st.integers(0, 2), min_size=size, max_size=size))]) for _ in range(2))
    flags = st.none() | st.lists(st.integers(0, 1), min_size=size, max_size=size)
    mask, so_far = (None if drawn is None else torch.tensor([drawn]) for drawn in (data.draw(flags), data.draw(flags)))
    mine, own = (None if so_far is None else so_far.clone() for _ in range(2))
    found, usual = pace.hits(drafted, wanted, mask, mine), compute_accuracy_single_step(drafted, wanted, mask, own)
    assert [float(one) for one in found] == [float(one) for one in usual]
    assert {one.dtype for one in found} == {torch.float32} == {one.dtype for one in usual}
    assert so_far is None or torch.equal(mine, own)


def test_samples_stay_where_they_were_put(made):
    rows = draft.dataset(open_store(made.store.folder), max_length=128, dtype=torch.bfloat16, place=torch.device("cpu"))
    first, again = rows[0], rows[0]
    assert first["hidden_states"].dtype == torch.bfloat16 and first["input_ids"].dtype == torch.int64
    assert first["hidden_states"] is again["hidden_states"] and first is not again
    anew = draft.dataset(made.store, max_length=128, dtype=torch.bfloat16)
    assert anew[0]["hidden_states"] is not anew[0]["hidden_states"]


def test_what_was_compiled_is_put_back(new, monkeypatch):
    from speculators.models import attention
    from speculators.models.eagle3 import core

    def state():
        return ("forward" in new.__dict__, core.compute_metrics, new._create_mask_fn,
                attention.ALL_ATTENTION_FUNCTIONS["simple_flex_attention"])  # fmt: skip

    before = state()
    with pace.compiled(new, "blocks"):
        assert state() == before, "nothing is compiled on a CPU"
    monkeypatch.setattr(cpu, "is_cpu", lambda: False)
    with pytest.raises(ZeroDivisionError), pace.compiled(new, "blocks"):
        inside = state()
        assert inside[0] and all(one is not other for one, other in zip(inside[1:], before[1:], strict=True))
        with pace.compiled(new, "none"):
            assert state() == (True, *before[1:]), "what was given to the compiler, not what it made"
        assert state() == inside
        with pace.compiled(new, "whole"):
            assert state() == before
        raise ZeroDivisionError
    assert state() == before


def test_uncompiled_flex_attention_is_torchs_own_with_the_same_mask(made, monkeypatch):
    """Drafts with either attention and the same weights, looked at uncompiled: the same hits, the same loss."""
    call = {"ttt_steps": 3, "ttt_step_loss_decay": 1.0, "loss_config": resolve_loss_config("kl_div", "eager")}
    found = {}
    for attention in ("sdpa", "simple_flex_attention"):
        recipe = RECIPE.model_copy(update={"attention": attention})
        one = draft.build(made.target, *made.mapping, recipe, layer_ids=tinydraft.LAYERS, seed=0)
        with monkeypatch.context() as inside:
            inside.setattr(cpu, "is_cpu", lambda: False)
            with pace.compiled(one, "none"):
                inside.undo()
                found[attention] = draft.evaluate(one, made.store, call, torch.float32)
                packed = draft.evaluate(one, made.store, call, torch.float32, together=300)
        assert packed.records == found[attention].records and packed.loss == pytest.approx(found[attention].loss, rel=1e-5)
        assert one._attn_impl == one.config.transformer_layer_config._attn_implementation == attention
    usual, flex = found.values()
    assert flex.records == usual.records and flex.loss == pytest.approx(usual.loss, rel=1e-5)


def test_samples_too_many_for_a_gpu_do_not_stay(made, monkeypatch):
    assert pace.place(made.store, torch.bfloat16) is None, "no GPU, no place"
    said = made.store.manifest()
    size = sum(said["lengths"]) * (said["hidden_size"] * 4 * 2 + 16)
    monkeypatch.setattr(cpu, "is_cpu", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    for free, place in ((size / pace.SHARE * 1.01, torch.device("cuda", 3)), (size / pace.SHARE * 0.99, None)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda free=free: (int(free), 0))
        assert pace.place(made.store, torch.bfloat16) == place
        assert pace.place(made.store, torch.bfloat16, needed=int(free)) is None


def test_what_a_draft_takes_while_it_learns(new):
    trained, every = (sum(weight.numel() for weight in new.parameters() if weight.requires_grad or not only) for only in (1, 0))
    assert 0 < trained < every and pace.learning(new) == 4 * every + 16 * trained


def test_short_samples_are_looked_at_uncompiled(new):
    heads = new.config.transformer_layer_config.num_attention_heads
    limit = pace.positions(new, 3)
    assert 4 * heads * 3 * limit**2 <= pace.MOST_SCORES < 4 * heads * 3 * (limit + 1) ** 2
    assert pace.looked_at(new, limit, 3) == "none" and pace.looked_at(new, limit + 1, 3) == "as it is"
