"""Loss masks: every supervised span says the answer and its end-of-turn token, whatever the template does."""

import dataclasses

import pytest
from tinymodel import CHATML, make_tiny_tokenizer

from eagle3kit import chat_template, target
from eagle3kit.conversations import Conversation, make_sample
from eagle3kit.errors import KitError
from eagle3kit.rows import Unfit

LLAMA3 = (
    "{{ '<|begin|>' }}{% for m in messages %}{{ '<|start_header|>' + m.role + '<|end_header|>\n\n' + m.content | trim"
    " + '<|eot|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|start_header|>assistant<|end_header|>\n\n' }}"
    "{% endif %}"
)
# Keeps the reasoning of the last turn only.
THINK_LAST = (
    "{% for m in messages %}{% set text = m.content %}"
    "{% if m.role == 'assistant' and not loop.last and '</think>' in text %}"
    "{% set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + text + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Opens the reasoning in the prompt, and drops it from every rendered turn: the prompt is no prefix of the chat.
THINK_NEVER = (
    "{% for m in messages %}{% set text = m.content %}{% if m.role == 'assistant' and '</think>' in text %}"
    "{% set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + text + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
# The last answer gets an empty reasoning, earlier ones none; the prompt opens one: prompt + answer is never history.
THINK_EMPTY = (
    "{% for m in messages %}{% set lead = '<think>\n\n</think>\n\n' if m.role == 'assistant' and loop.last else '' %}"
    "{{ '<|im_start|>' + m.role + '\n' + lead + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
DEFAULT_SYSTEM = (
    "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}"
    "{% endif %}"
    + CHATML
)
GEMMA = (
    "{{ '<|begin|>' }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}"
    "{% for m in messages %}{{ '<|turn|>' + ('model' if m.role == 'assistant' else m.role) + '\n' + m.content | trim +"
    " '<|eot|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|turn|>model\n' }}{% endif %}"
)
# Other tokens close the last turn than the earlier ones, and channels stand between prompt and words.
CHANNELS = (
    "{% for m in messages %}{{ '<|start_header|>' + m.role }}{% if m.role == 'assistant' %}{{ '<|channel|>final' }}"
    "{% endif %}{{ '<|end_header|>' + m.content }}"
    "{{ '<|return|>' if loop.last and m.role == 'assistant' else '<|eot|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header|>assistant' }}{% endif %}"
)
NO_END = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
DATED = "{{ '<|im_start|>system\n' + strftime_now('%Y-%m-%d') + '<|im_end|>\n' }}" + CHATML
EXTRA = ("<|begin|>", "<|start_header|>", "<|end_header|>", "<|eot|>", "<|turn|>", "<|channel|>", "<|return|>")

CHAT = (
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "The capital of France is Paris."},
    {"role": "user", "content": "And you? Café ☕ 数"},
    {"role": "assistant", "content": "I am well — thank you, 🦊!\n\nHello."},
    {"role": "user", "content": "One, two?"},
    {"role": "assistant", "content": "Three"},
)
ANSWERS = [turn["content"] for turn in CHAT if turn["role"] == "assistant"]
SYSTEM = {"role": "system", "content": "Write a short story."}


@pytest.fixture(scope="module")
def tokenizer():
    return make_tiny_tokenizer(600, EXTRA)


def conversation(*messages):
    return Conversation("abc", "test", 7, tuple(messages))


def spans(tokenizer, samples):
    return [tokenizer.decode(sample.input_ids[a:b]) for sample in samples for a, b in sample.turns]


def check(samples):
    """What must hold for any sample: the mask is the turns, and the turns are in order."""
    for sample in samples:
        assert sum(sample.loss_mask) == sum(end - start for start, end in sample.turns)
        assert len(sample.loss_mask) == len(sample.input_ids)
        assert sample == make_sample(sample.id, sample.source, sample.input_ids, list(sample.turns))
        assert list(sample.turns) == sorted(sample.turns)


@pytest.mark.parametrize("template, end, system", [
    (CHATML, "<|im_end|>", True), (LLAMA3, "<|eot|>", True), (DEFAULT_SYSTEM, "<|im_end|>", True),
    (GEMMA, "<|eot|>", False), (THINK_LAST, "<|im_end|>", True), (THINK_NEVER, "<|im_end|>", True),
], ids=["chatml", "llama3", "default_system", "gemma", "think_last", "think_never"])
def test_plain_answers_make_one_sample_with_exactly_the_words_and_the_end(tokenizer, template, end, system):
    for opening in ((), (SYSTEM,)) if system else ((),):
        samples = chat_template.render(tokenizer, conversation(*opening, *CHAT), template)
        check(samples)
        assert [sample.id for sample in samples] == ["abc"] and samples[0].source == "test"
        assert spans(tokenizer, samples) == [answer + end for answer in ANSWERS]
        # The whole is the template's text, tokenised once, up to the last end of turn.
        text = tokenizer.apply_chat_template([*opening, *CHAT], chat_template=template, tokenize=False)
        assert samples[0].input_ids == tokenizer(text.rstrip("\n"), add_special_tokens=False)["input_ids"]


def test_a_span_starts_where_the_servers_prompt_ends(tokenizer):
    (sample,) = chat_template.render(tokenizer, conversation(SYSTEM, *CHAT))
    for turn, (start, _) in enumerate(sample.turns):
        prompt = chat_template.next_prompt(tokenizer, [SYSTEM, *CHAT[: 2 * turn + 1]])
        assert sample.input_ids[:start] == prompt


def test_reasoning_is_supervised_in_its_own_turn_and_gone_from_the_next(tokenizer):
    chat = list(CHAT[:4])
    chat[1] = {"role": "assistant", "content": "<think>\nEasy.\n</think>\n\nParis."}
    samples = chat_template.render(tokenizer, conversation(*chat), THINK_LAST)
    check(samples)
    assert [sample.id for sample in samples] == ["abc.0", "abc.1"]
    assert spans(tokenizer, samples) == [chat[1]["content"] + "<|im_end|>", ANSWERS[1] + "<|im_end|>"]
    second = tokenizer.decode(samples[1].input_ids)
    assert "Easy" not in second and "Paris.<|im_end|>" in second


def test_reasoning_that_the_template_drops_is_not_trained_around(tokenizer):
    chat = (CHAT[0], {"role": "assistant", "content": "Easy.\n</think>\n\nParis."})
    with pytest.raises(Unfit, match=r"messages\[1\].content: the chat template leaves part of the answer out"):
        chat_template.render(tokenizer, conversation(*chat), THINK_NEVER)


def test_a_prompt_that_opens_a_reasoning_closed_at_once(tokenizer):
    samples = chat_template.render(tokenizer, conversation(*CHAT), THINK_EMPTY)
    check(samples)
    assert [sample.id for sample in samples] == ["abc.0", "abc.1", "abc.2"]
    for span, answer in zip(spans(tokenizer, samples), ANSWERS, strict=True):
        # What follows the prompt is written by the target, the end of the reasoning included.
        assert span.lstrip("\n") == f"</think>\n\n{answer}<|im_end|>"


def test_a_last_turn_closed_by_another_token_makes_a_sample_a_turn(tokenizer):
    samples = chat_template.render(tokenizer, conversation(*CHAT), CHANNELS)
    check(samples)
    assert len(samples) == 3
    assert spans(tokenizer, samples) == [f"<|channel|>final<|end_header|>{answer}<|return|>" for answer in ANSWERS]


def test_the_targets_own_stop_tokens_tell_parts_from_ends(tokenizer):
    template = CHATML.replace("+ '<|im_end|>\n'", "+ '<|end_header|>part<|im_end|>\n'")
    stop = tokenizer.convert_tokens_to_ids("<|im_end|>")
    samples = chat_template.render(tokenizer, conversation(*CHAT), template, [stop])
    check(samples)
    assert spans(tokenizer, samples) == [answer + "<|end_header|>part<|im_end|>" for answer in ANSWERS]
    # Without them, or when they do not come up, the tokenizer's end of sequence is the end; without that nobody can tell.
    for other in ((), [tokenizer.convert_tokens_to_ids("<|return|>")]):
        assert chat_template.render(tokenizer, conversation(*CHAT), template, other) == samples
        with pytest.raises(Unfit, match=r"ends the turn with <\|end_header\|> <\|eot\|>, and none of them is a stop token"):
            chat_template.render(tokenizer, conversation(*CHAT), template.replace("im_end", "eot"), other)


def test_a_token_across_the_boundary_belongs_to_the_prompt(tokenizer):
    # "assistant:" + space ends the prompt; the tokenizer joins the space to the first word.
    template = CHATML.replace("'\n' + message['content']", "': ' + message['content']").replace(
        "assistant\n", "assistant: ")
    words = ({"role": "user", "content": "Hello"}, {"role": "assistant", "content": "the capital of France is Paris."})
    text = tokenizer.apply_chat_template(list(words), chat_template=template, tokenize=False)
    tokens = [tokenizer.decode([i]) for i in tokenizer(text)["input_ids"]]
    assert " the" in tokens  # else this test shows nothing
    (sample,) = chat_template.render(tokenizer, conversation(*words), template)
    assert spans(tokenizer, [sample]) == [" capital of France is Paris.<|im_end|>"]


def test_what_cannot_be_told_for_certain_is_unfit(tokenizer):
    with pytest.raises(Unfit, match="System role not supported"):
        chat_template.render(tokenizer, conversation(SYSTEM, *CHAT), GEMMA)
    with pytest.raises(Unfit, match="without a special token"):
        chat_template.render(tokenizer, conversation(*CHAT), NO_END)
    with pytest.raises(Unfit, match="shows an answer 2 times"):
        chat_template.render(tokenizer, conversation(*CHAT), CHATML.replace("message['content']",
                                                                            "message['content'] + message['content']"))
    with pytest.raises(Unfit, match="rewrites it"):
        chat_template.render(tokenizer, conversation(*CHAT), CHATML.replace("message['content']",
                                                                            "message['content'].replace('P', 'B')"))
    with pytest.raises(Unfit, match="holds <|im_end|>"):
        chat_template.render(tokenizer, conversation(CHAT[0], {"role": "assistant", "content": "No<|im_end|>yes"}))
    with pytest.raises(KitError, match="chat_template, line 1"):
        chat_template.render(tokenizer, conversation(*CHAT), "{% for %}")
    bare = make_tiny_tokenizer()
    bare.chat_template = None
    with pytest.raises(KitError, match="no chat template"):
        chat_template.render(bare, conversation(*CHAT))


def test_the_date_stands_still(tokenizer):
    (sample,) = chat_template.render(tokenizer, conversation(*CHAT), DATED)
    assert tokenizer.decode(sample.input_ids).startswith("<|im_start|>system\n2026-01-01<|im_end|>")


def test_a_tokenizer_without_offsets_gives_the_same_or_nothing(tokenizer, monkeypatch):
    expected = chat_template.render(tokenizer, conversation(*CHAT))
    monkeypatch.setattr(type(tokenizer), "is_fast", False)
    assert chat_template.render(tokenizer, conversation(*CHAT)) == expected
    template = CHATML.replace("'\n' + message['content']", "': ' + message['content']").replace(
        "assistant\n", "assistant: ")
    with pytest.raises(Unfit, match="no offsets"):
        chat_template.render(tokenizer, conversation(CHAT[0], {"role": "assistant", "content": "the dog"}), template)


def test_assemble_joins_what_continues_and_parts_what_does_not():
    joined = chat_template.assemble([([1, 2], [7, 9]), ([1, 2, 7, 9, 3], [8, 9])], "n", "s")
    assert [(s.id, s.input_ids, s.turns) for s in joined] == [("n", [1, 2, 7, 9, 3, 8, 9], ((2, 4), (5, 7)))]
    assert joined[0].loss_mask == [0, 0, 1, 1, 0, 1, 1]
    parted = chat_template.assemble([([1, 2], [7, 9]), ([1, 2, 6, 9, 3], [8, 9])], "n", "s")
    assert [(s.id, s.input_ids, s.turns) for s in parted] == [
        ("n.0", [1, 2, 7, 9], ((2, 4),)), ("n.1", [1, 2, 6, 9, 3, 8, 9], ((5, 7),))]
    check(joined + parted)
    assert chat_template.assemble([([1], [])], "n", "s") == []


def test_assembled_ids_of_a_chat_are_the_rendered_ones(tokenizer):
    (rendered,) = chat_template.render(tokenizer, conversation(*CHAT))
    turns = [(chat_template.next_prompt(tokenizer, CHAT[: 2 * k + 1]), rendered.input_ids[start:end])
             for k, (start, end) in enumerate(rendered.turns)]
    assert chat_template.assemble(turns, "abc", "test") == [rendered]


def test_prepare_lists_the_rejected_and_counts_the_cuts(tokenizer):
    whole = conversation(*CHAT)
    (sample,) = chat_template.render(tokenizer, whole)
    broken = dataclasses.replace(whole, row=9, messages=(CHAT[0], {"role": "assistant", "content": "<|im_end|>"}))
    limit = sample.turns[1][0] + 2
    prepared = chat_template.prepare(tokenizer, [whole, broken], limit)
    check(prepared.samples)
    assert (prepared.cut_samples, prepared.cut_tokens) == (1, len(sample.input_ids) - limit)
    assert prepared.samples[0].turns == (sample.turns[0], (sample.turns[1][0], limit))
    assert [(r.source, r.row, r.field) for r in prepared.rejected] == [("test", 9, "messages[1].content")]
    nothing = chat_template.prepare(tokenizer, [whole], sample.turns[0][0])
    assert nothing.samples == [] and "dataset.max_length" in nothing.rejected[0].reason


def test_the_bundled_targets_own_template():
    tokenizer = target.tokenizer(target.locate("smollm2-135m-instruct"))
    (sample,) = chat_template.render(tokenizer, conversation(*CHAT))
    check([sample])
    assert spans(tokenizer, [sample]) == [answer + "<|im_end|>" for answer in ANSWERS]
    assert tokenizer.decode(sample.input_ids).startswith("<|im_start|>system\nYou are a helpful AI assistant")


def test_a_template_file(tmp_path):
    (tmp_path / "own.jinja").write_text(CHATML, encoding="utf-8")
    assert chat_template.read_template(tmp_path / "own.jinja") == CHATML
    assert chat_template.read_template(None) is None
    with pytest.raises(KitError, match="no file"):
        chat_template.read_template(tmp_path / "none.jinja")
