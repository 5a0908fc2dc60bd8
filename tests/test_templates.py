"""Masks under real chat templates, held against a rule written apart from the kit's: exact, or refused with the reason."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quirks import QUIRKS
from realtemplates import templates as real_templates
from realtemplates import tokenizer as real_tokenizer
from tinymodel import make_tiny_tokenizer
from turnrules import CASES, TURNS, wrong

from eagle3kit import chat_template, target, template_survey
from eagle3kit.conversations import Conversation, load, make_sample
from eagle3kit.errors import KitError
from eagle3kit.rows import Unfit

# Every token that closes something in one of the templates: with one missing, a wrong end could not show.
MARKS = r"<[|｜][^<>|｜\s]{1,40}[|｜]>|<\|\w+>|<\w+\|>|\[/?[A-Z_]{4,}\]|\]~!?b\[?\]?|\[e~\[|<(?:start|end)_of_turn>"
THINKING = "{% set thinking = true %}"
# name -> what comes of each of CASES, in their order: the number of samples, or - for refused.
OUTCOMES = dict(line.split(maxsplit=1) for line in (Path(__file__).parent / "cases/templates.txt").read_text().splitlines())
# Tokenizers made for these families; Kimi's own is in no package, so its marks are added to one of the same kind.
FAMILIES = {
    "qwen3": ("Qwen", "Kimi", "moonshotai"), "llama3_1": ("meta-llama", "deepseek-ai-DeepSeek-R1-Distill-Llama"),
    "gptoss": ("openai",), "deepseek_v3": ("deepseek-ai-DeepSeek",)}
REASONS = {
    ("Kimi-K2-Thinking", "thoughts"): "messages[1].reasoning_content: the chat template leaves part of the answer out",
    ("Kimi-K2-Instruct", "call"): "access to attribute 'append' of 'list' object is unsafe",
    ("Qwen-Qwen2.5-7B-Instruct", "thought"): "messages[1].reasoning_content: the chat template leaves part of the answer out",
    ("Qwen3.5-4B", "in words"): "messages[1].content: the chat template leaves part of the answer out",
    ("meta-llama-Llama-3.1-8B-Instruct", "two calls"): "only supports single tool-calls",
    ("meta-llama-Llama-3.2-3B-Instruct", "words, call"): "messages[1].content: the chat template leaves part of the answer out",
    ("deepseek-ai-DeepSeek-V3.1", "last thought"): "messages[3].reasoning_content: the chat template leaves part",
    ("deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", "in words"): "messages[1].content: the chat template leaves part",
    ("openai-gpt-oss-120b", "words, call"): "messages[3].content: the chat template rewrites the turns before this answer",
    ("openai-gpt-oss-120b", "two calls"): "messages[1].tool_calls: the chat template leaves out",
    ("google-gemma-2-2b-it", "system"): "System role not supported",
    ("mistralai-Mistral-Nemo-Instruct-2407", "system"): "messages[2].content: the chat template rewrites the turns before",
    ("GLM-4.6", "several"): "messages[1].content: the chat template ends the turn without a special token",
}


def outcome(tokenizer, template, turn, case):
    """"2" for masks in two samples that the rule confirms, else the refusal; fails when a mask is wrong."""
    messages, tools = CASES[case]
    conversation = Conversation("chat", "test", 1, messages, tools)
    try:
        samples = chat_template.render(tokenizer, conversation, template, [tokenizer.convert_tokens_to_ids(e) for e in turn.ends])
    except Unfit as unfit:
        return str(unfit)
    fault = wrong(turn, tokenizer, conversation, samples)
    assert not fault, f"{case}: {fault}"
    return str(len(samples))


def ready(tokenizer, turns, texts):
    """`tokenizer` with all that `texts` and `turns` mark turns with as special tokens; it shall end none of them by itself."""
    from tokenizers import AddedToken

    marks = {mark for text in texts for mark in re.findall(MARKS, text)} | {end for turn in turns for end in turn.ends}
    tokenizer.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in sorted(marks)], special_tokens=True)
    tokenizer.eos_token = "<EOS>"
    tokenizer.bos_token = "<|first|>"
    return tokenizer


@pytest.fixture(scope="module")
def quirky():
    return ready(make_tiny_tokenizer(900), [quirk.turn for quirk in QUIRKS.values()], [q.template for q in QUIRKS.values()])


@pytest.mark.parametrize("name", QUIRKS)
def test_masks_under_a_familys_quirks(quirky, name):
    quirk = QUIRKS[name]
    for case in CASES:
        expected, found = quirk.expected.get(case, quirk.others), outcome(quirky, quirk.template, quirk.turn, case)
        assert found == expected if expected.isdigit() else expected in found, f"{case}: {found}"


# What could be taken for a mark, cut or joined: brackets, spaces, line ends, characters of several bytes, half a mark.
PIECES = [*"ab é☕🦊\n\t<|>{}[]\"'\\/_", "<|im", "_end|>", "<think>", "</think>", "\n\n"]
WORDS = st.lists(st.sampled_from(PIECES), min_size=1, max_size=24).map("".join).filter(lambda text: text and text == text.strip())


@given(st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=3), st.sampled_from(sorted(QUIRKS.keys() - {"reasoning never"})))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_any_words_are_masked_exactly_or_refused(quirky, chat, name):
    quirk = QUIRKS[name]
    messages = [message for question, answer in chat for message in (
        {"role": "user", "content": question}, {"role": "assistant", "content": answer})]  # fmt: skip
    conversation = Conversation("chat", "test", 1, tuple(messages))
    stops = [quirky.convert_tokens_to_ids(end) for end in quirk.turn.ends]
    try:
        samples = chat_template.render(quirky, conversation, quirk.template, stops)
    except Unfit as unfit:
        ended = [end for end in quirk.turn.ends if any(end in answer for _, answer in chat)]
        assert name == "no end" or (ended and "which ends a turn, before its end" in unfit.reason), str(unfit)
    else:
        assert not wrong(quirk.turn, quirky, conversation, samples)


@pytest.fixture(scope="module")
def templates():
    return real_templates()


@pytest.fixture(scope="module")
def words(templates):
    """The bundled target's tokenizer, which knows the marks of all templates."""
    return ready(target.tokenizer(target.locate("smollm2-135m-instruct")), TURNS.values(), templates.values())


def test_seventy_real_templates_are_masked_exactly_or_refused(templates, words):
    found = {name: " ".join(said if (said := outcome(words, text, TURNS[name], case)).isdigit() else "-" for case in CASES)
             for name, text in templates.items()}
    assert len(found) == 70
    assert found == {name: said for name, said in OUTCOMES.items() if name in templates}


@pytest.mark.parametrize("name, case", REASONS)
def test_a_real_template_is_refused_with_the_turn_and_the_reason(templates, words, name, case):
    assert REASONS[name, case] in outcome(words, templates[name], TURNS[name], case)


@pytest.mark.parametrize("family", FAMILIES)
def test_real_templates_with_their_own_tokenizers(templates, family):
    """Where tokens end depends on the tokenizer: "<think>" and what follows it, spaces and line ends at a turn's edges."""
    names = [name for name in templates if name.startswith(FAMILIES[family])]
    tokenizer = ready(real_tokenizer(family), [TURNS[name] for name in names], [templates[name] for name in names])
    variants = [(name, templates[name]) for name in names]
    variants += [(f"{name}-thinking", THINKING + templates[name]) for name in names if f"{name}-thinking" in TURNS]
    for name, text in variants:
        said = [outcome(tokenizer, text, TURNS[name], case) for case in CASES]
        assert " ".join(one if one.isdigit() else "-" for one in said) == OUTCOMES[name], f"{name}: {said}"


def test_todays_date_stands_still(templates, words):
    for name in ("openai-gpt-oss-120b", "meta-llama-Llama-3.2-3B-Instruct"):
        text = words.decode(chat_template.next_prompt(words, CASES["one"][0][:1], templates[name]))
        assert "2026-01-01" in text or "01 Jan 2026" in text, text


@pytest.mark.parametrize("by", [(1, 0), (-1, 0), (0, 1), (0, -1)])
def test_the_rule_sees_a_mask_that_is_off_by_one_token(quirky, by):
    quirk, (messages, tools) = QUIRKS["plain"], CASES["several"]
    conversation = Conversation("chat", "test", 1, messages, tools)
    stops = [quirky.convert_tokens_to_ids(end) for end in quirk.turn.ends]
    (sample,) = chat_template.render(quirky, conversation, quirk.template, stops)
    assert not wrong(quirk.turn, quirky, conversation, [sample])
    turns = [sample.turns[0], (sample.turns[1][0] + by[0], sample.turns[1][1] + by[1]), sample.turns[2]]
    if turns[1][1] <= len(sample.input_ids):
        moved = make_sample(sample.id, sample.source, sample.input_ids, turns)
        assert wrong(quirk.turn, quirky, conversation, [moved])
    short = make_sample(sample.id, sample.source, sample.input_ids, list(sample.turns[:2]))
    assert wrong(quirk.turn, quirky, conversation, [short]) == "2 turns are supervised, 3 were written"


def test_rows_with_calls_go_from_the_file_to_exact_masks(quirky, tmp_path):
    """Arguments come as JSON text, as chat interfaces keep them; the row whose template leaves its reasoning out is listed."""
    rows = []
    for case in ("call", "words, call", "two calls", "thought"):
        messages, tools = json.loads(json.dumps(CASES[case]))
        for call in (call for message in messages for call in message.get("tool_calls", ())):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
        rows.append({"messages": messages, "tools": tools})
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    loaded = load([str(path)], 9, 0, False)
    assert not loaded.rejected
    quirk = QUIRKS["plain"]
    stops = [quirky.convert_tokens_to_ids(end) for end in quirk.turn.ends]
    prepared = chat_template.prepare(quirky, loaded.conversations, 4096, quirk.template, stops)
    assert [(one.row, one.field) for one in prepared.rejected] == [(4, "messages[1].reasoning_content")]
    assert len(prepared.samples) == 3
    for conversation in loaded.conversations:
        if samples := [sample for sample in prepared.samples if sample.id == conversation.id]:
            assert not wrong(quirk.turn, quirky, conversation, samples)


def test_the_survey_says_for_each_kind_of_chat_what_holds(quirky):
    def of(name):
        quirk = QUIRKS[name]
        stops = [quirky.convert_tokens_to_ids(end) for end in quirk.turn.ends]
        return template_survey.survey(quirky, quirk.template, stops)

    plain = {verdict.chat: verdict for verdict in of("plain")}
    assert list(plain) == list(template_survey.CHATS)
    assert plain["several answers"] == template_survey.Verdict("several answers", True, 1, True, "")
    assert plain["a call of a tool"].masked and not plain["reasoning, one answer"].masked
    assert plain["reasoning, one answer"].note.startswith("turn 2, reasoning_content: the chat template leaves part")
    assert [verdict.samples for verdict in of("reasoning of the last")] == [1, 2, 2, 1, 2, 1]
    (one, *_) = of("reasoning never")
    assert one.masked and not one.as_served and "the prompt's last words are not in the chat" in one.note
    (_, _, system, *_) = of("no system")
    assert (system.masked, system.note) == (False, "the chat template refuses them: no system turns")
    template_survey.require(of("plain"), "a model")
    with pytest.raises(KitError, match="template of a-model: turn 2, content: .* ends the turn without a special token"):
        template_survey.require(of("no end"), "a-model")
