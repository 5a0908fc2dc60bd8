"""Chats -> token ids and loss masks, through the target's own chat template.

Supervised is what the target would write: the assistant's words and the end-of-turn token. Prompts are not, and neither
is the text that a template puts after the end of a turn (often a newline): nobody generates it.

Each answer is looked at as the server would see it, as the *last* turn of its conversation. Example, ChatML:

    turn 1   <|im_start|>user / Hi<|im_end|> / <|im_start|>assistant / [Hello!<|im_end|>]
    turn 2   <|im_start|>user / Hi<|im_end|> / <|im_start|>assistant / Hello!<|im_end|> / ... / [Bye.<|im_end|>]

Here turn 2 begins with all of turn 1, so both make one sample with two spans. A template that rewrites earlier turns
(it drops their reasoning, or closes them with another token) gives a turn 2 that does not begin with turn 1; then each
turn makes a sample of its own, "ID.0" and "ID.1", with the context that the server would have had. So one conversation
is one sample for most templates, and never more than one sample a turn.

Where a template does not let this be told exactly (nothing ends the turn; it drops the reasoning, or words beside a call; it
changes the turns before), the conversation is refused with the turn and the reason: `template_survey` says so beforehand.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3kit import turn_span
from eagle3kit.conversations import Conversation, Sample, cut, make_sample
from eagle3kit.errors import KitError
from eagle3kit.rows import Rejected, Unfit
from eagle3kit.turn_span import squash

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer


@dataclass(frozen=True)
class Prepared:
    """Samples within the length limit, what was rejected, how many samples were cut, and how many tokens that cost."""

    samples: list[Sample]
    rejected: list[Rejected]
    cut_samples: int
    cut_tokens: int


def read_template(path: Path | str | None) -> str | None:
    """The text of a Jinja file for `chat_template` below; None for None: the target's own. KitError: no such file."""
    if path is None:
        return None
    if not Path(path).is_file():
        raise KitError(f"dataset.chat_template: there is no file {path}")
    return Path(path).read_text(encoding="utf-8")


def next_prompt(tokenizer: "Tokenizer", messages: Iterable[dict[str, Any]], chat_template: str | None = None,
                tools: Sequence[dict[str, Any]] = ()) -> list[int]:
    """Token ids of `messages` with the generation prompt: what the server is asked to continue.

    Unfit when the template refuses the messages, KitError when there is no template or it is not one.
    """
    return _tokens(tokenizer, turn_span.text(tokenizer, list(messages), True, chat_template, tools))


def render(tokenizer: "Tokenizer", conversation: Conversation, chat_template: str | None = None,
           stops: Collection[int] = ()) -> list[Sample]:
    """The samples of a conversation with answers: one, or one a turn where the template rewrites earlier turns.

    `stops` are the token ids that end the target's turns (`target.stops`): a span ends with the first of them after the
    words. Give them: some families close parts of an answer with special tokens, too, and are refused without. A turn
    that calls tools is an answer like others; what a tool returns is not.

    Spans are found in the text and carried to tokens by their offsets, so the whole text is tokenised once. A token
    that holds the end of a prompt and the beginning of an answer belongs to the prompt. Unfit when a span cannot be
    told for certain: the template refuses the conversation, leaves part of an answer out, or closes no turn with a
    special token. KitError when there is no chat template or it is not one.
    """
    documents: list[tuple[str, list[tuple[int, int]]]] = []
    for i, message in enumerate(conversation.messages):
        if message["role"] != "assistant":
            continue
        head, answer = turn_span.answer(tokenizer, conversation.messages[: i + 1], chat_template, stops, conversation.tools)
        span = (len(head), len(head) + len(answer))
        if documents and head.startswith(documents[-1][0]):
            documents[-1] = (head + answer, [*documents[-1][1], span])
        else:
            documents.append((head + answer, [span]))
    tokens = [_spans(tokenizer, text, spans) for text, spans in documents]
    return _samples(conversation.id, conversation.source, tokens)


def assemble(turns: Iterable[tuple[list[int], list[int]]], name: str, source: str) -> list[Sample]:
    """Samples from (prompt ids, answer ids) a turn, the answers as the server wrote them: nothing is retokenised.

    A prompt that begins with all of the sample so far continues it; any other starts a new sample. Example:

        ([1, 2], [7, 9]), ([1, 2, 7, 9, 3], [8, 9])   ->  [1, 2, 7, 9, 3, 8, 9], turns (2, 4) and (5, 7)
        ([1, 2], [7, 9]), ([1, 2, 6, 9, 3], [8, 9])   ->  [1, 2, 7, 9] and [1, 2, 6, 9, 3, 8, 9], turns (2, 4); (5, 7)

    In the second, the answer's text is tokenised as 6 where the server had written 7. A turn without answer ids is left
    out. The samples are named `name`, or "name.0", "name.1", ... if there are several.
    """
    documents: list[tuple[list[int], list[tuple[int, int]]]] = []
    for prompt, answer in turns:
        if not answer:
            continue
        span = (len(prompt), len(prompt) + len(answer))
        if documents and prompt[: len(documents[-1][0])] == documents[-1][0]:
            documents[-1] = ([*prompt, *answer], [*documents[-1][1], span])
        else:
            documents.append(([*prompt, *answer], [span]))
    return _samples(name, source, documents)


def prepare(tokenizer: "Tokenizer", conversations: Iterable[Conversation], max_length: int,
            chat_template: str | None = None, stops: Collection[int] = ()) -> Prepared:
    """`render` for all, then `fit`. What is unfit is listed as rejected, never guessed at."""
    rejected, pairs = [], []
    for conversation in conversations:
        try:
            pairs.append((conversation, render(tokenizer, conversation, chat_template, stops)))
        except Unfit as unfit:
            rejected.append(Rejected(conversation.source, conversation.row, unfit.field, unfit.reason))
    fitted = fit(pairs, max_length)
    return Prepared(fitted.samples, rejected + fitted.rejected, fitted.cut_samples, fitted.cut_tokens)


def fit(pairs: Iterable[tuple[Conversation, list[Sample]]], max_length: int) -> Prepared:
    """All samples cut to `max_length` tokens at the end; those that keep nothing supervised are rejected."""
    samples, rejected, cut_samples, cut_tokens = [], [], 0, 0
    for conversation, pieces in pairs:
        for sample in pieces:
            try:
                samples.append(cut(sample, max_length))
            except Unfit as unfit:
                rejected.append(Rejected(conversation.source, conversation.row, unfit.field, unfit.reason))
                continue
            lost = len(sample.input_ids) - len(samples[-1].input_ids)
            cut_samples, cut_tokens = cut_samples + (lost > 0), cut_tokens + lost
    return Prepared(samples, rejected, cut_samples, cut_tokens)


def _spans(tokenizer: "Tokenizer", text: str, spans: list[tuple[int, int]]) -> tuple[list[int], list[tuple[int, int]]]:
    """Token ids of `text`, and the character `spans` as token spans; Unfit when they do not say the same words."""
    if not tokenizer.is_fast:
        return _pieces(tokenizer, text, spans)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, offsets = encoded["input_ids"], encoded["offset_mapping"]
    turns = []
    for first, last in spans:
        start = next(k for k, (begin, end) in enumerate(offsets) if begin >= first and end > begin)
        if start and offsets[start - 1][1] < first:
            start += 1  # the space before `first` is in no offsets: trimmed from this token, which straddles
        end = max(k for k, (begin, end) in enumerate(offsets) if end <= last and end > begin) + 1
        said = squash(tokenizer.decode(ids[start:end], skip_special_tokens=False))
        if start >= end or not said or not squash(text[first:last]).endswith(said) or offsets[end - 1][1] != last:
            raise Unfit("messages", f"the tokens {start} to {end} are not the words of the answer")
        turns.append((start, end))
    return ids, turns


def _pieces(tokenizer: "Tokenizer", text: str, spans: list[tuple[int, int]]) -> tuple[list[int], list[tuple[int, int]]]:
    """The same for a tokenizer without offsets: piece by piece, and the pieces must be what the whole text gives."""
    ids: list[int] = []
    turns, done = [], 0
    for first, last in spans:
        ids += _tokens(tokenizer, text[done:first])
        start = len(ids)
        ids += _tokens(tokenizer, text[first:last])
        turns.append((start, len(ids)))
        done = last
    if ids != _tokens(tokenizer, text):
        raise Unfit("messages", "a token holds both prompt and answer, and this tokenizer has no offsets to tell where")
    return ids, turns


def _samples(name: str, source: str, documents: list[tuple[list[int], list[tuple[int, int]]]]) -> list[Sample]:
    several = len(documents) > 1
    return [make_sample(f"{name}.{k}" if several else name, source, ids, turns)
            for k, (ids, turns) in enumerate(documents)]


def _tokens(tokenizer: "Tokenizer", text: str) -> list[int]:
    # The template has written the special tokens itself: a tokenizer that adds a first one would double it.
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
