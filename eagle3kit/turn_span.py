"""Where one answer stands in the text that a chat template makes of its conversation.

The text is looked at three times: with the generation prompt in the answer's place (what the server is asked to
continue), with the answer, and with a stand-in for its words, which shows what the template itself puts around them:

    prompt    <|im_start|>user / Hi<|im_end|> / <|im_start|>assistant /
    chat      <|im_start|>user / Hi<|im_end|> / <|im_start|>assistant / Hello!<|im_end|> /
    probe     <|im_start|>user / Hi<|im_end|> / <|im_start|>assistant / Qz7answer7zQ<|im_end|> /

The answer begins where the prompt ends and stops with the end-of-turn token, here "Hello!<|im_end|>". What cannot be told
for certain is refused, never guessed at.
"""

import json
import unicodedata
from collections.abc import Collection, Iterator, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from eagle3kit.errors import KitError
from eagle3kit.rows import Unfit

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

Messages = Sequence[dict[str, Any]]
# Some templates print today's date; a run that is resumed tomorrow must see the same text.
TODAY = datetime(2026, 1, 1)
# Stands in for an answer, to see what a template puts around it. Letters and digits only: nothing to escape or strip.
SENTINEL = "Qz7answer7zQ"


def text(tokenizer: "Tokenizer", messages: Messages, prompt: bool, chat_template: str | None = None,
         tools: Sequence[dict[str, Any]] = ()) -> str:
    """What the template makes of `messages`, with the generation prompt if `prompt`; the date in it stands still.

    `tools` are the declarations of functions that the conversation may call. Unfit when the template refuses the
    messages, KitError when there is no template or it is not one.
    """
    if chat_template is None and not tokenizer.chat_template:
        raise KitError("the target's tokenizer has no chat template; name a Jinja file in dataset.chat_template")
    from jinja2 import TemplateError, TemplateSyntaxError

    source = chat_template if chat_template is not None else str(tokenizer.chat_template)
    try:
        return tokenizer.apply_chat_template(
            [_named(message, source) for message in messages], tools=list(tools) or None, chat_template=chat_template,
            add_generation_prompt=prompt, tokenize=False, strftime_now=TODAY.strftime)
    except TemplateSyntaxError as error:
        raise KitError(f"dataset.chat_template, line {error.lineno}: {error.message}") from None
    except (TemplateError, TypeError, ValueError, LookupError) as error:  # foreign code trips over what it did not expect
        raise Unfit("messages", f"the chat template refuses them: {error}") from None


def answer(tokenizer: "Tokenizer", messages: Messages, template: str | None, stops: Collection[int],
           tools: Sequence[dict[str, Any]] = ()) -> tuple[str, str]:
    """(text before the last message's answer, the answer with its end-of-turn token) as the template renders them.

    The answer is all that the target writes in this turn: reasoning, words, calls of tools. Unfit names the turn and why.
    """
    context, last = messages[:-1], messages[-1]
    where = f"messages[{len(messages) - 1}]"
    prompt = text(tokenizer, context, True, template, tools)
    chat = text(tokenizer, messages, False, template, tools)
    probe = text(tokenizer, (*context, {"role": "assistant", "content": SENTINEL}), False, template, tools)
    if probe.count(SENTINEL) != 1:
        raise Unfit(f"{where}.content", f"the chat template shows an answer {probe.count(SENTINEL)} times, not once")
    before, after = probe.split(SENTINEL)
    if calls := last.get("tool_calls"):
        asked = {**calls[-1], "function": {**calls[-1]["function"], "arguments": {SENTINEL: SENTINEL}}}
        called = text(tokenizer, (*context, {**last, "tool_calls": [*calls[:-1], asked]}), False, template, tools)
        if SENTINEL not in called:
            raise Unfit(f"{where}.tool_calls", "the chat template leaves out what a tool is called with")
        after = called.rsplit(SENTINEL, 1)[1]
    place, length = _end(tokenizer, after, stops, f"{where}.content")
    # Behind a call's arguments stand brackets that depend on their kind; behind words, all is as behind the stand-in.
    tail = after[place:] if calls else after
    end = len(chat) - len(after) + place + length
    # Usually the chat goes on where the prompt stops. If not (the prompt opens a reasoning that the chat leaves out),
    # the answer begins where the stand-in did, unless what comes before the prompt's last words is another text, too.
    start = next((len(head) for head in (prompt, before) if chat.startswith(head)), None)
    if start is None or not chat.endswith(tail) or start >= end:
        raise Unfit(f"{where}.content", "the chat template renders this answer in another way than others: its place is unsure")
    if not chat.startswith(prompt) and not chat.startswith(text(tokenizer, context, False, template, tools)):
        raise Unfit(f"{where}.content", "the chat template rewrites the turns before this answer once it is there: the server "
                                        "would have continued another text; let the target write the answers "
                                        "(dataset.regenerate)")
    for token in {after[place : place + length], *_names(tokenizer, stops)}:
        if token in chat[start : end - length]:
            raise Unfit(f"{where}.content", f"the answer holds {token}, which ends a turn, before its end")
    _require_whole(last, where, chat[start:end])
    return chat[:start], chat[start:end]


def squash(words: Any) -> str:
    """Without spaces and in one Unicode form: templates trim, tokenizers normalise."""
    return "".join(unicodedata.normalize("NFC", str(words)).split())


def _named(message: dict[str, Any], source: str) -> dict[str, Any]:
    """gpt-oss's template reads an answer's reasoning under the name `thinking`, the others as `reasoning_content`."""
    if "reasoning_content" in message and "reasoning_content" not in source and "thinking" in source:
        return {**message, "thinking": message["reasoning_content"]}
    return message


def _names(tokenizer: "Tokenizer", stops: Collection[int]) -> list[str]:
    """The tokens that end a turn, by name: those of `stops` and the tokenizer's own."""
    return [token for token in (*tokenizer.convert_ids_to_tokens(list(stops)), tokenizer.eos_token) if token]


def _end(tokenizer: "Tokenizer", after: str, stops: Collection[int], where: str) -> tuple[int, int]:
    """(place, length) in `after`, the text behind an answer's words, of the token that ends the turn.

    That is the first of the target's stop tokens, else its tokenizer's end of sequence. Where neither follows, a special
    token that stands alone is taken; of several, nobody can tell which of them closes the turn and which a part of it.
    """
    for tokens in (tokenizer.convert_ids_to_tokens(list(stops)), [tokenizer.eos_token]):
        # Of two at one place the longer one is meant.
        if ends := [(after.find(token), -len(token)) for token in tokens if token and token in after]:
            return min(ends)[0], -min(ends)[1]
    added = tokenizer.added_tokens_decoder.values()
    special = {*tokenizer.all_special_tokens, *(token.content for token in added if token.special)}
    found: dict[int, str] = {}
    for token in sorted(special, key=len):
        place = after.find(token)
        while token and place >= 0:
            found[place] = token
            place = after.find(token, place + 1)
    if not found:
        raise Unfit(where, "the chat template ends the turn without a special token, so nothing tells where it stops")
    if len(found) > 1:
        raise Unfit(where, f"the chat template ends the turn with {' '.join(found[place] for place in sorted(found))}, and none "
                           "of them is a stop token of the target (eos_token_id in generation_config.json)")
    return next((place, len(token)) for place, token in found.items())


def _require_whole(message: dict[str, Any], where: str, span: str) -> None:
    """Unfit unless all that the message says stands in `span`, spaces aside: content, reasoning, calls with arguments."""
    said = squash(span)
    for key in ("content", "reasoning_content"):
        if squash(message.get(key) or "") not in said:
            raise Unfit(f"{where}.{key}", "the chat template leaves part of the answer out or rewrites it (reasoning?); let the "
                                          "target write the answers (dataset.regenerate) or set dataset.chat_template")
    for number, call in enumerate(message.get("tool_calls") or ()):
        for value in (call["function"]["name"], *_leaves(call["function"]["arguments"])):
            forms = (value, json.dumps(value), json.dumps(value, ensure_ascii=False))
            if not any(squash(str(form).strip('"')) in said for form in forms):
                raise Unfit(f"{where}.tool_calls[{number}]", f"the chat template leaves {value!r} out or rewrites it")


def _leaves(value: Any) -> Iterator[Any]:
    """The keys and plain values of a call's arguments, at any depth."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from _leaves(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _leaves(inner)
    else:
        yield value
