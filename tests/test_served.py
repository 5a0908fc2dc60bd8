"""What a server counts, as differences; and the same prompts asked in the same company."""

import threading

import pytest
from peer import completion, counters_text, peer

from eagle3kit import served
from eagle3kit.acceptance import Acceptance, from_steps, total
from eagle3kit.conversations import make_sample
from eagle3kit.errors import KitError
from eagle3kit.served import Served, Wave

DRAFTS, ACCEPTED = "vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens_per_pos"


def some_prompts(count: int) -> list[served.Prompt]:
    return [served.Prompt("one", [number, 1, 2], [9], number) for number in range(count)]


class Speculating:
    """Answers [n, n, …] to prompt n and counts the steps of `steps(n)`; `tells` whether a request hears of its own."""

    def __init__(self, steps=None, tells: bool = True, also: int = 0):
        self.steps, self.tells, self.also = steps, tells, also
        self.asked: list[dict] = []
        self.sum = Acceptance(drafts=100, accepted=(60, 30, 10))  # of whoever asked before us
        self._one = threading.Lock()

    def answer(self, body):
        steps = self.steps(body["prompt"][0]) if self.steps else None
        with self._one:
            self.asked.append(body)
            if steps is not None:
                others = [from_steps([0] * self.also * (len(self.asked) > 1), 3)]  # somebody else, from the first wave on
                self.sum = total([self.sum, from_steps(steps, 3), *others])
        told = steps if self.tells else None
        return completion([body["prompt"][0]] * min(4, body["max_tokens"]), "length", accepted=told)

    def metrics(self) -> str:
        return counters_text(self.sum.drafts, list(self.sum.accepted)) if self.steps else ""


def steps_of(number: int) -> list[int]:
    return [number % 4, 3, 0][: 1 + number % 3]


# ---- Counters


def test_counts_are_differences_of_two_readings():
    before = {DRAFTS: 10.0, f"{ACCEPTED}/0": 6.0, f"{ACCEPTED}/1": 2.0}
    after = {DRAFTS: 30.0, f"{ACCEPTED}/0": 18.0, f"{ACCEPTED}/1": 7.0, "vllm:other": 5.0}
    assert served.counts(before, after, 2) == Acceptance(drafts=20, accepted=(12, 5))
    assert served.counts({}, before, 2) == Acceptance(drafts=10, accepted=(6, 2))  # nothing counted yet: no counter yet
    assert served.counts(after, after, 2) == Acceptance(drafts=0, accepted=(0, 0))
    with pytest.raises(KitError, match=f"no counter {DRAFTS}: it does not speculate"):
        served.counts({}, {"vllm:other": 5.0}, 2)


def test_counters_are_read_as_vllm_writes_them(tmp_path):
    text = counters_text(7, [5, 3, 1]) + (
        "# TYPE vllm:request_success_total counter\n"
        'vllm:request_success_total{finished_reason="stop"} 2.0\nvllm:request_success_total{finished_reason="length"} 3.0\n'
        "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 1.0\n# TYPE python_gc counter\npython_gc_total 4.0\n"
    )
    with peer(lambda body: {}, tmp_path, lambda: text) as server:
        assert server.counters() == {
            DRAFTS: 7.0, f"{ACCEPTED}/0": 5.0, f"{ACCEPTED}/1": 3.0, f"{ACCEPTED}/2": 1.0, "vllm:request_success": 5.0,
        }  # fmt: skip


# ---- Measuring


@pytest.mark.parametrize("tells", [True, False])
def test_what_is_counted_is_of_these_prompts_alone(tmp_path, tells):
    asked, engine, heard = some_prompts(7), Speculating(steps_of, tells), []
    with peer(engine.answer, tmp_path, engine.metrics) as server:
        found = served.measure(server, asked, max_new_tokens=4, in_flight=3, depth=3, report=lambda *row: heard.append(row))
    every = [from_steps(steps_of(number), 3) for number in range(7)]
    assert found.counted == total(every)
    waves = [[0, 1, 2], [3, 4, 5], [6]]
    assert [wave.prompts for wave in found.waves] == waves and heard == [(3, 7), (6, 7), (7, 7)]
    assert found.records == (every if tells else [total([every[n] for n in wave]) for wave in waves])
    assert found.answers == [[number] * 4 for number in range(7)]
    assert [wave.new_tokens for wave in found.waves] == [12, 12, 4]
    assert found.tokens_per_second == 28 / sum(wave.seconds for wave in found.waves)
    # The warm-up, a wave of a few tokens, came first and is in none of it; everything is greedy.
    assert [body["max_tokens"] for body in engine.asked] == [8] * 3 + [4] * 7
    assert {body["temperature"] for body in engine.asked} == {0.0}
    for wave, (first, end) in zip([[0, 1, 2], *waves], ((0, 3), (3, 6), (6, 9), (9, 10)), strict=True):
        assert sorted(body["prompt"][0] for body in engine.asked[first:end]) == wave


def test_without_speculation_nothing_is_counted(tmp_path):
    engine = Speculating()
    with peer(engine.answer, tmp_path, engine.metrics) as server:
        found = served.measure(server, some_prompts(4), max_new_tokens=4, in_flight=2, depth=None)
        assert found.counted is None and found.records == [] and len(found.answers) == 4
        with pytest.raises(KitError, match="it does not speculate"):
            served.measure(server, some_prompts(4), max_new_tokens=4, in_flight=2, depth=3)


def test_counters_that_lag_are_waited_for(tmp_path):
    """After each change the first two readings still say what was before: of the warm-up, too."""
    engine, shown = Speculating(steps_of), []

    def late() -> str:
        shown.append(engine.metrics())
        return shown[-3] if len(shown) > 2 else shown[0]

    with peer(engine.answer, tmp_path, late) as server:
        found = served.measure(server, some_prompts(2), max_new_tokens=4, in_flight=2, depth=3)
    assert found.counted == total([from_steps(steps_of(number), 3) for number in range(2)])


def test_somebody_else_asking_the_same_server_is_noticed(tmp_path):
    engine = Speculating(steps_of, also=1)
    with peer(engine.answer, tmp_path, engine.metrics) as server, pytest.raises(KitError) as caught:
        served.measure(server, some_prompts(2), max_new_tokens=4, in_flight=2, depth=3)
    said = str(caught.value)
    assert "vLLM's counters say Acceptance(drafts=5" in said and "its answers Acceptance(drafts=3" in said
    assert said.endswith("somebody else is asking this server")


def test_a_request_that_fails_names_its_prompt(tmp_path):
    with peer(lambda body: (400, "too long"), tmp_path) as server, pytest.raises(KitError) as caught:
        served.measure(server, some_prompts(1), max_new_tokens=4, in_flight=2, depth=None)
    assert str(caught.value) == "prompt 0 (3 tokens): the server answered 400: too long"


# ---- Which prompts, and what is made of the answers


def test_prompts_are_the_held_out_turns_in_order():
    ids = list(range(20))
    samples = [make_sample("a", "one", ids, [(3, 6), (10, 20)]), make_sample("b", "two", ids[:8], [(5, 8)])]
    found = served.prompts(samples, 10)
    assert [(p.source, p.token_ids, p.answer, p.place) for p in found] == [
        ("one", ids[:3], ids[3:6], 0), ("one", ids[:10], ids[10:], 1), ("two", ids[:5], ids[5:8], 2),
    ]  # fmt: skip
    assert served.prompts(samples, 2) == found[:2]


def test_lossless_counts_answers_equal_token_for_token():
    plain = [[1, 2, 3], [4], []]
    assert served.lossless(plain, plain) == (3, 3)
    assert served.lossless(plain, [[1, 2], [4], []]) == (2, 3)
    assert served.lossless(plain, [[1, 2, 3], [5], [0]]) == (1, 3)
    with pytest.raises(ValueError, match="shorter|longer"):
        served.lossless(plain, plain[:2])


def test_counts_by_source_where_requests_are_told_apart():
    asked = [served.Prompt(source, [1], [2], place) for place, source in enumerate(["one", "two", "one"])]
    records = [from_steps([number], 3) for number in range(3)]
    assert served.by_source(asked, Served([], [], None, records)) == {"one": [records[0], records[2]], "two": [records[1]]}
    assert served.by_source(asked, Served([], [], None, records[:2])) == {}


def waves(*rows: tuple[int, float]) -> Served:
    return Served([], [Wave([], tokens, seconds) for tokens, seconds in rows], None, [])


def test_speed_intervals_hold_the_speed():
    fast, plain = waves((100, 1.0), (90, 1.1), (120, 1.0), (80, 0.7)), waves((100, 2.0), (90, 2.3), (120, 2.1), (80, 1.3))
    assert fast.tokens_per_second == 390 / 3.8
    low, high = served.speed_interval(fast, resamples=500, seed=1)
    assert 90 / 1.1 <= low < 390 / 3.8 < high <= 120 / 1.0
    assert served.speed_interval(fast, resamples=500, seed=1) == (low, high)
    low, high = served.speedup_interval(fast, plain, resamples=500, seed=1)
    assert low < (390 / 3.8) / (390 / 7.7) < high
    # Alike in every wave: nothing is uncertain, however different the waves are.
    double = waves(*((wave.new_tokens, wave.seconds / 2) for wave in plain.waves))
    assert served.speedup_interval(double, plain, resamples=200, seed=0) == pytest.approx((2.0, 2.0))
    assert served.speed_interval(waves((50, 2.0)), resamples=100, seed=0) == (25.0, 25.0)


def test_the_room_for_drafts_at_the_end():
    assert served.room(43, 3, 1024) == 53 and served.room(1000, 3, 1005) == 1005


def test_steps_without_a_draft_count_in_the_tokens_of_a_step():
    def answered(accepted: tuple[int, ...], drafts: int) -> Served:
        return Served([[0] * 11], [Wave([0], 11, 1.0)], Acceptance(drafts=drafts, accepted=accepted), [])

    # Ten tokens after the first, six of them accepted: four steps, whether each had a draft or only two.
    assert answered((3, 2, 1), 4).tokens_per_step == answered((3, 2, 1), 4).counted.length == 2.5
    assert answered((2, 2, 2), 2).tokens_per_step == 2.5 and answered((2, 2, 2), 2).counted.length == 4
    assert Served([[0] * 11], [Wave([0], 11, 1.0)], None, []).tokens_per_step == 1
