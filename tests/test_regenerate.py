"""The target's own answers: kept one by one, found again, and never retokenised."""

import json
import resource
import threading

import pytest
from peer import completion, peer
from tinymodel import make_tiny_tokenizer

from eagle3kit.chat_template import next_prompt
from eagle3kit.conversations import Conversation
from eagle3kit.errors import KitError
from eagle3kit.regenerate import AnswerFile, regenerate

SETTINGS = {"target": "tiny", "max_new_tokens": 20}


@pytest.fixture(scope="module")
def tokenizer():
    return make_tiny_tokenizer()


def conversation(name: str, *turns: str, system: str | None = None, row: int = 1) -> Conversation:
    messages = [{"role": "system", "content": system}] if system else []
    return Conversation(name, "here", row, (*messages, *({"role": "user", "content": turn} for turn in turns)))


class Target:
    """Says something of its own about each prompt, ended by the end of turn; keeps count of what it is asked."""

    def __init__(self, tokenizer, fails_after: int | None = None):
        self.end = tokenizer.convert_tokens_to_ids("<|im_end|>")
        self.words = tokenizer.encode("the lazy dog counts to six")
        self.asked: list[dict] = []
        self.fails_after = fails_after
        self._one = threading.Lock()

    def says(self, prompt: list[int], limit: int) -> list[int]:
        length = 2 + sum(prompt) % 4
        return [*self.words[:length], self.end][:limit]

    def __call__(self, body):
        with self._one:
            self.asked.append(body)
            if self.fails_after is not None and len(self.asked) > self.fails_after:
                return 503, "gone"
        ids = self.says(body["prompt"], body["max_tokens"])
        return completion(ids, "stop" if ids[-1] == self.end else "length")


@pytest.fixture
def ask(tokenizer, tmp_path):
    def run(target: Target, conversations, *, max_new_tokens=20, max_length=200, **options):
        answers = AnswerFile(tmp_path / "answers.jsonl", SETTINGS)
        with peer(target, tmp_path) as server:
            return regenerate(server, tokenizer, conversations, answers, max_new_tokens=max_new_tokens, max_length=max_length,
                              in_flight=2, **options)

    return run


# ---- The file


def test_answers_are_found_again(tmp_path):
    path = tmp_path / "answers.jsonl"
    file = AnswerFile(path, SETTINGS)
    file.add([1, 2], [3, 4])
    file.add([5], [])
    again = AnswerFile(path, dict(reversed(SETTINGS.items())))  # the order of settings says nothing
    assert again.answers == file.answers == {file.key([1, 2]): [3, 4], file.key([5]): []}


def test_an_answer_belongs_to_its_prompt_and_settings(tmp_path):
    file = AnswerFile(tmp_path / "a", SETTINGS)
    others = [AnswerFile(tmp_path / "a", SETTINGS | {"max_new_tokens": 21}), AnswerFile(tmp_path / "a", {"target": "tiny"})]
    keys = [file.key([1, 2]), file.key([12]), file.key([1, 2, 0]), *(other.key([1, 2]) for other in others)]
    assert len(set(keys)) == len(keys) and file.key((1, 2)) == file.key([1, 2])


@pytest.mark.parametrize("torn", [b'{"key": "abc", "token_ids": [1, 2', b'{"key": "abc"}\n', b'{"key": "\xff"}\n', b"\0\0\0\0"])
def test_a_last_line_cut_short_is_dropped(tmp_path, torn):
    path = tmp_path / "answers.jsonl"
    file = AnswerFile(path, SETTINGS)
    file.add([1], [10])
    file.add([2], [20])
    whole = path.read_bytes()
    path.write_bytes(whole + torn)
    again = AnswerFile(path, SETTINGS)
    assert again.answers == file.answers and path.read_bytes() == whole
    again.add([3], [30])
    assert len(AnswerFile(path, SETTINGS).answers) == 3
    assert [json.loads(line)["token_ids"] for line in path.read_text().splitlines()] == [[10], [20], [30]]


def test_every_place_of_a_cut_loses_at_most_one_answer(tmp_path):
    path = tmp_path / "answers.jsonl"
    file = AnswerFile(path, SETTINGS)
    for number in range(3):
        file.add([number], [number, 7])
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert list(AnswerFile(path, SETTINGS).answers) == list(file.answers)[: whole[:length].count(b"\n")]


# ---- Asking


def test_token_ids_are_kept_as_the_target_gave_them(ask, tokenizer):
    target = Target(tokenizer)
    chats = [conversation("a", "What is the capital?"), conversation("b", "Hello!", system="Be brief.")]
    found = ask(target, chats)
    assert found.rejected == [] and (found.written, found.kept) == (2, 0)
    assert [pair[0] for pair in found.pairs] == chats
    for chat, (sample,) in found.pairs:
        prompt = next_prompt(tokenizer, chat.messages)
        assert sample.input_ids == prompt + target.says(prompt, 20)
        assert sample.turns == ((len(prompt), len(sample.input_ids)),)
        assert sample.input_ids[-1] == target.end and sample.loss_mask[-1] == 1
    assert found.new_tokens == sum(sum(sample.loss_mask) for _, (sample,) in found.pairs)
    assert {(body["temperature"], body["seed"]) for body in target.asked} == {(0.0, None)}


def test_the_second_turn_goes_on_from_the_first_answer(ask, tokenizer):
    target, chat = Target(tokenizer), conversation("a", "Hello!", "And you?", "Why is the sky blue?")
    found = ask(target, [chat, conversation("b", "One")])
    ((_, (sample,)), _) = found.pairs
    assert found.written == 4 and len(sample.turns) == 3
    messages = []
    for turn, (start, end) in zip(chat.messages, sample.turns, strict=True):
        messages.append(turn)
        prompt = next_prompt(tokenizer, messages)
        # The template's own text of the chat so far is what was asked, and what the sample holds.
        assert sample.input_ids[:start] == prompt
        assert sample.input_ids[start:end] == target.says(prompt, 20)
        messages.append({"role": "assistant", "content": tokenizer.decode(sample.input_ids[start : end - 1])})
    assert sorted(len(body["prompt"]) for body in target.asked[2:]) == [start for start, _ in sample.turns[1:]]


def test_a_second_run_asks_only_what_is_missing(ask, tokenizer):
    chats = [conversation(str(number), f"Count to {number}", "And on?") for number in range(5)]
    whole = ask(Target(tokenizer), chats)
    assert (whole.written, whole.kept) == (10, 0)
    again = Target(tokenizer)
    found = ask(again, [*chats, conversation("new", "Hello!")])
    assert (found.written, found.kept) == (1, 10) and len(again.asked) == 1
    assert found.pairs[:5] == whole.pairs


def test_a_run_that_broke_off_goes_on_and_ends_the_same(ask, tokenizer, tmp_path):
    chats = [conversation(str(number), f"Count to {number}", "And on?") for number in range(5)]
    broken = Target(tokenizer, fails_after=7)
    with pytest.raises(KitError, match="the server answered 503: gone"):
        ask(broken, chats)
    kept = len(AnswerFile(tmp_path / "answers.jsonl", SETTINGS).answers)
    assert kept >= 5
    rest = Target(tokenizer)
    found = ask(rest, chats)
    assert len(rest.asked) == 10 - kept == found.written and found.kept == kept
    (tmp_path / "answers.jsonl").unlink()
    assert ask(Target(tokenizer), chats).pairs == found.pairs


def test_prompts_that_leave_no_room_are_rejected_with_the_reason(ask, tokenizer):
    many = "dog " * 60
    chats = [conversation("short", "Hi"), conversation("long", many, row=7), conversation("later", "Hi", many, row=8)]
    found = ask(Target(tokenizer), chats, max_length=40)
    length = len(next_prompt(tokenizer, chats[1].messages))
    (rejected,) = found.rejected
    assert (rejected.source, rejected.row, rejected.field) == ("here", 7, "messages")
    assert rejected.reason == f"the prompt alone is {length} tokens of 40 (dataset.max_length)"
    # A later turn that finds no room ends its conversation; what was said before stays.
    assert [(pair[0].id, len(pair[1][0].turns)) for pair in found.pairs] == [("short", 1), ("later", 1)]


def test_answers_end_at_the_nearer_limit(ask, tokenizer):
    chat = conversation("a", "Hello!")
    prompt = next_prompt(tokenizer, chat.messages)
    target = Target(tokenizer)
    ((_, (sample,)),) = ask(target, [chat], max_length=len(prompt) + 2).pairs
    assert target.asked[0]["max_tokens"] == 2 and len(sample.input_ids) == len(prompt) + 2
    target = Target(tokenizer)
    ask(target, [conversation("b", "Hello you")], max_new_tokens=1)
    assert target.asked[0]["max_tokens"] == 1


def test_an_empty_answer_ends_its_conversation(ask, tokenizer):
    target = Target(tokenizer)
    target.says = lambda prompt, limit: [target.end]
    ((_, (sample,)),) = ask(target, [conversation("a", "Hello!", "And you?")]).pairs
    assert len(target.asked) == 1 and sample.loss_mask.count(1) == 1
    target.says = lambda prompt, limit: []
    found = ask_nothing(ask, target)
    assert found.pairs[0][1] == []


def ask_nothing(ask, target):
    def reply(body):
        target.asked.append(body)
        return completion([], "stop")

    return ask(reply, [conversation("b", "Say nothing")])


def test_a_template_that_refuses_is_a_rejection(ask, tokenizer):
    refusal = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system turns') }}{% endif %}"
    strict = refusal + tokenizer.chat_template
    chats = [conversation("a", "Hello!", system="Be brief.", row=3), conversation("b", "Hello!")]
    found = ask(Target(tokenizer), chats, chat_template=strict)
    assert [(row.row, row.field) for row in found.rejected] == [(3, "messages")] and "no system turns" in found.rejected[0].reason
    assert [pair[0].id for pair in found.pairs] == ["b"]


def test_with_a_temperature_every_prompt_has_a_seed_of_its_own_wherever_it_is_asked(ask, tokenizer, tmp_path):
    chats = [conversation(str(number), f"Count to {number}") for number in range(3)]
    seeds = []
    for order, seed in ((chats, 100), (chats[::-1], 100), (chats, 101)):
        target = Target(tokenizer)
        (tmp_path / "answers.jsonl").unlink(missing_ok=True)
        ask(target, order, temperature=0.7, seed=seed)
        assert {body["temperature"] for body in target.asked} == {0.7}
        seeds.append({tuple(body["prompt"]): body["seed"] for body in target.asked})
    assert len(set(seeds[0].values())) == 3
    assert seeds[0] == seeds[1] and not set(seeds[0].values()) & set(seeds[2].values())


def test_a_full_disk_keeps_what_was_written(ask, tokenizer, tmp_path):
    chats = [conversation(str(number), f"Count to {number}") for number in range(8)]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (250, hard))
    try:
        with pytest.raises(KitError) as caught:
            ask(Target(tokenizer), chats)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    kept = len(AnswerFile(tmp_path / "answers.jsonl", SETTINGS).answers)
    assert str(caught.value).startswith(f"{tmp_path / 'answers.jsonl'}: File too large; {kept} answers of this turn are kept.")
    assert 0 < kept < 8
    rest = Target(tokenizer)
    found = ask(rest, chats)
    assert found.kept == kept and len(rest.asked) == 8 - kept and len(found.pairs) == 8
