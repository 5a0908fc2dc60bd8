"""The estimate without serving: by identity, against training's own count, and against brute force over the vocabulary."""

from dataclasses import replace

import numpy as np
import pytest
import tinydraft
import torch
from safetensors.torch import load_file, save_file

from eagle3kit import checkpoint, draft, epochs, predict
from eagle3kit.acceptance import from_steps, replay, total
from eagle3kit.errors import KitError
from eagle3kit.predict_tables import expected

DEPTH = tinydraft.DEPTH


@pytest.fixture(scope="module")
def found(tiny):
    return predict.predict(predict.load_draft(tiny.draft, torch.float32), tiny.answers(), **tiny.known, depth=DEPTH)


class TheTargetItself(torch.nn.Module):
    """A draft that is the target: its logits are the target's, for every place and draft step."""

    def __init__(self, tiny, ids):
        super().__init__()
        self.lm_head, self.d2t, self.draft_vocab_size = torch.nn.Identity(), None, 512
        self.anything = torch.nn.Parameter(torch.zeros(1))
        with torch.no_grad():
            self.logits = tiny.model(torch.tensor([ids])).logits

    def forward(self, input_ids, ttt_steps, **_):
        steps = []
        for k in range(ttt_steps):
            mine = self.logits[:, 1 + k :]  # token j + 2 + k is said at place j + 1 + k
            mine = torch.nn.functional.pad(mine, (0, 0, 0, input_ids.shape[1] - mine.shape[1]))
            steps.append(self.lm_head(mine).argmax(-1))
        return steps


@pytest.mark.parametrize("depth", [1, 3, 5])
def test_a_draft_that_is_the_target_is_kept_whole(tiny, depth):
    sample, turns = tiny.answers()[0]
    (start, end), ids = turns[0], sample.input_ids.tolist()
    whole = (start, start + 1 + (depth + 1) * ((end - start - 1) // (depth + 1)))  # an end that cuts no draft
    one = predict.predict(TheTargetItself(tiny, ids), [(sample, [whole])], **tiny.known, depth=depth, temperature=0.7)
    assert one.length == depth + 1 and total(one.recorded).length == depth + 1
    assert one.sampled_length == pytest.approx(depth + 1, abs=1e-3)
    assert one.on_policy[0] == one.on_policy[1] == one.covered[0] == one.covered[1] == whole[1] - whole[0]
    assert one.costs() == {"outside": 0, "foreign": 0}


def test_an_untrained_draft_is_kept_next_to_nothing_of(tiny, tmp_path):
    fresh = draft.build(tiny.target, *tiny.mapping, tinydraft.RECIPE, layer_ids=tinydraft.LAYERS, seed=3)
    fresh.save_pretrained(tmp_path / "0")
    folder = checkpoint.export(tmp_path / "0", tmp_path / "draft", target=tiny.target, dtype=torch.float32)
    one = predict.predict(predict.load_draft(folder, torch.float32), tiny.answers(), **tiny.known, depth=DEPTH)
    assert 1 <= one.length < 1.15 and 1 < one.sampled_length < 1.6


def test_it_is_what_training_counted_of_the_same_draft(tiny, found):
    assert found.recorded == tiny.fitted.records and total(found.recorded).length > 2
    assert found.on_policy[0] == found.on_policy[1], "the target's own greedy answers"
    assert found.records == found.recorded and total(found.foreign) == total(found.records)


def test_identities(tiny, found):
    whole = total(found.records)
    assert found.length == pytest.approx(1 + sum(whole.marginal))
    assert list(whole.marginal) == sorted(whole.marginal, reverse=True)
    assert np.cumprod(whole.conditional) == pytest.approx(whole.marginal)
    assert found.everywhere.drafts == sum(end - 1 - start for _, ((start, end),) in tiny.answers())
    for steps, record in zip(found.steps, found.records, strict=True):
        assert from_steps([step.accepted for step in steps], DEPTH) == record
    for better, worse in ((found.outside, found.records), (found.foreign, found.records), (found.restricted, found.records)):
        assert total(better).length >= total(worse).length
    assert all(cost >= 0 for cost in found.costs().values())
    low, high = found.interval(resamples=300).length
    assert low < found.length < high
    assert found.accuracy[0][0] == found.everywhere.accepted[0] and total(found.everywhere_records) == found.everywhere
    table = predict.rows(found, resamples=300, seed=0)
    assert [row["acceptance length"] for row in table] == pytest.approx(
        [found.length, found.everywhere.length, found.pointed_length, found.sampled_length,
         *(found.length + cost for cost in found.costs().values())])  # fmt: skip
    assert all(row["from"] <= row["acceptance length"] <= row["to"] and row["drafts"] > 0 for row in table), table


def test_the_same_again(tiny, found):
    again = predict.predict(predict.load_draft(tiny.draft, torch.float32), tiny.answers(), **tiny.known, depth=DEPTH)
    assert again == found


def test_recorded_words_that_are_not_the_targets_own_are_counted(tiny, found):
    sample, turns = tiny.answers()[0]
    start, end = turns[0]
    ids = sample.input_ids.clone()
    ids[end - 1] = (ids[end - 1] + 7) % 512  # the last token: nothing before it reads it
    changed = replace(sample, input_ids=ids)
    model = predict.load_draft(tiny.draft, torch.float32)
    mine, other = (predict.predict(model, [(one, turns)], **tiny.known, depth=DEPTH) for one in (sample, changed))
    assert mine.on_policy == (end - start, end - start) and other.on_policy == (end - start - 1, end - start)
    assert other.records == mine.records, "the target's own token is the truth, whatever was recorded"
    assert total(other.recorded).length <= total(mine.recorded).length
    assert total(other.foreign).length >= total(other.records).length


def test_a_smaller_vocabulary_costs_what_it_leaves_out(tiny):
    model = predict.load_draft(tiny.draft, torch.float32)
    answers = tiny.answers()
    words = sorted({int(token) for sample, ((start, end),) in answers for token in sample.input_ids[start:end]})
    d2t = model.d2t.clone()
    lost = words[::3]
    places = torch.arange(len(d2t)) + d2t
    spare = [token for token in range(512) if token not in set(places.tolist())]
    for token, other in zip(lost, spare, strict=False):  # read as another token: the draft can no longer say it
        d2t[places == token] += other - token
    cut = predict.predict(model, answers, **tiny.known, depth=DEPTH, d2t=d2t)
    whole = predict.predict(model, answers, **tiny.known, depth=DEPTH)
    assert cut.covered[0] < cut.covered[1] == whole.covered[1] and cut.length < whole.length
    assert cut.costs()["outside"] > whole.costs()["outside"]
    assert total(cut.outside).length >= whole.length - 1e-9, "what was lost is what is counted as the cost"


# ---- Sampling


def test_expected_walks_are_replays_where_all_is_certain():
    dice = np.random.default_rng(0)
    for _ in range(50):
        length, depth = int(dice.integers(3, 40)), int(dice.integers(1, 5))
        table = dice.random((length + depth, depth)) < 0.6
        (record,) = replay(table, [(1, length)])
        mine = expected(table[: length - 2].astype(float))
        assert mine == pytest.approx((record.drafts, *record.accepted))
    assert expected(np.ones((4, 3))) == (1, 1, 1, 1) and expected(np.zeros((0, 2))) == (0, 0, 0)


@pytest.mark.parametrize("chance", [0.3, 0.8])
def test_a_constant_chance_gives_the_published_length(chance):
    drafts, *accepted = expected(np.full((4000, 3), chance))
    assert 1 + sum(accepted) / drafts == pytest.approx((1 - chance**4) / (1 - chance), rel=1e-3)


def test_chances_are_what_brute_force_over_the_vocabulary_says(tiny):
    sample, ((start, end),) = tiny.answers()[0]
    model, temperature, ids = predict.load_draft(tiny.draft, torch.float32), 0.8, sample.input_ids.tolist()
    kept = []
    hook = model.lm_head.register_forward_hook(lambda *call: kept.append(call[2][0]))
    one = predict.predict(model, [(sample, [(start, end)])], **tiny.known, depth=2, temperature=temperature)
    hook.remove()
    with torch.no_grad():
        target = torch.softmax(tiny.model(torch.tensor([ids])).logits[0] / temperature, -1)
    chances, pointed = np.zeros((end - 1 - start, 2)), np.zeros((end - 1 - start, 2))
    for i, row in enumerate(range(start - 1, end - 2)):
        for k in range(2):
            if row + 2 + k < end:
                q = torch.zeros(512)
                q[torch.arange(256) + model.d2t] = torch.softmax(kept[k][row] / temperature, -1).detach()
                chances[i, k] = float(torch.minimum(target[row + 1 + k], q).sum())
                pointed[i, k] = float(target[row + 1 + k, q.argmax()])
    assert one.sampled[0] == pytest.approx(expected(chances), rel=1e-3)
    assert one.pointed[0] == pytest.approx(expected(pointed), rel=1e-3)
    dice, walks = np.random.default_rng(1), []
    for _ in range(3000):  # the walk itself, with a die at every draft token
        place, drafts, accepted = 0, 0, 0
        while place < len(chances):
            mine = 0
            while mine < 2 and place + mine < len(chances) and dice.random() < chances[place, mine]:
                mine += 1
            place, drafts, accepted = place + mine + 1, drafts + 1, accepted + mine
        walks.append((drafts, accepted))
    drafts, accepted = np.mean(walks, axis=0)
    assert 1 + accepted / drafts == pytest.approx(one.sampled_length, abs=0.02)


# ---- What is refused


def test_a_draft_that_is_not_whole_is_refused(tiny, tmp_path):
    folder = tmp_path / "draft"
    folder.mkdir()
    (folder / "config.json").write_bytes((tiny.draft / "config.json").read_bytes())
    tensors = load_file(tiny.draft / "model.safetensors")
    save_file({key: value for key, value in tensors.items() if key != "fc.weight"} | {"extra": torch.zeros(3)},
              folder / "model.safetensors")
    with pytest.raises(KitError, match=r"lacks fc\.weight; has extra, which the config knows nothing of"):
        predict.load_draft(folder, torch.float32)


def test_nothing_to_predict_on_and_no_temperature(tiny):
    model = predict.load_draft(tiny.draft, torch.float32)
    with pytest.raises(KitError, match="there is no answer to predict on"):
        predict.predict(model, [], **tiny.known, depth=2)
    with pytest.raises(KitError, match="temperature is 0"):
        predict.predict(model, tiny.answers(1), **tiny.known, depth=2, temperature=0)


def test_turns_come_in_the_order_of_the_prompts_and_are_cut_to_what_is_served(tiny):
    spans = [turn for _, turns in predict.answers(tiny.store, 4, 10) for turn in turns]
    assert len(spans) == 4 and all(end - start <= 10 for start, end in spans)
    assert [start for start, _ in spans] == [sample.turns[0][0] for sample in tiny.samples[:4]]


# ---- What training says of it


def test_training_warns_when_the_loss_falls_and_acceptance_falls_too():
    def epoch(number, loss, length):
        return [{"epoch": number, "split": split, "draft_step": k, "loss": loss / 2, "length": length} for k in (0, 1)
                for split in ("train", "held out")]  # fmt: skip

    rows = [*epoch(0, 5.0, 1.8), *epoch(1, 4.0, 1.7), *epoch(2, 4.5, 1.6), *epoch(3, 3.0, 1.9)]
    assert "the loss fell from 5.000, yet acceptance fell from 1.800" in epochs.warning(rows, 1)
    assert [epochs.warning(rows, number) for number in (0, 2, 3)] == ["", "", ""]


def test_a_draft_in_bfloat16_turns_positions_by_the_angles_of_float32(tiny):
    """vLLM computes RoPE in float32 whatever the weights are; rounded frequencies are off by a third of a percent."""
    exact, rounded = (predict.load_draft(tiny.draft, dtype) for dtype in (torch.float32, torch.bfloat16))
    assert {value.dtype for value in rounded.parameters()} == {torch.bfloat16}
    kept = dict(rounded.rotary_emb.named_buffers())
    assert kept and all(torch.equal(value, kept[name]) for name, value in exact.rotary_emb.named_buffers())
    assert kept["inv_freq"].dtype == torch.float32 and not torch.equal(kept["inv_freq"], kept["inv_freq"].bfloat16().float())
