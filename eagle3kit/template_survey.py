"""What a chat template lets be masked exactly: a few chats of known words, each rendered as a data set's would be.

A row can only be used if its template shows every answer whole, ends it with a token of its own, and leaves the turns
before it as the server sees them. Templates differ in that by the kind of chat, so each kind is tried by itself:
Qwen3's keeps an answer's reasoning in the last turn (every turn then makes a sample of its own), DeepSeek-V3.1's drops it
(such rows are refused), Gemma-2's takes no system turn.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from eagle3kit.chat_template import next_prompt, render
from eagle3kit.conversations import Conversation
from eagle3kit.errors import KitError
from eagle3kit.rows import Unfit

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer


@dataclass(frozen=True)
class Verdict:
    """One kind of chat: masked exactly or not, in how many samples, whether every answer stands behind the very tokens that
    the server is asked to continue, and what there is to say, as where and why it is refused."""

    chat: str
    masked: bool
    samples: int
    as_served: bool
    note: str


def _turn(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


_TOOL = {"type": "function", "function": {
    "name": "weather", "description": "Tells the weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}
_CALL = {"id": "a1b2c3d4e", "type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
_FIRST = (_turn("user", "Who wrote Faust?"), _turn("assistant", "Goethe did."))
_SECOND = (_turn("user", "And when?"), _turn("assistant", "Part one in 1808."))
_THOUGHT = {"reasoning_content": "That is easy."}
PLAIN = "one answer"
CHATS: dict[str, tuple[tuple[dict[str, Any], ...], tuple[dict[str, Any], ...]]] = {
    PLAIN: (_FIRST, ()),
    "several answers": (_FIRST + _SECOND, ()),
    "after a system turn": ((_turn("system", "Be brief."), *_FIRST, *_SECOND), ()),
    "reasoning, one answer": ((_FIRST[0], _FIRST[1] | _THOUGHT), ()),
    "reasoning, several answers": ((_FIRST[0], _FIRST[1] | _THOUGHT, _SECOND[0], _SECOND[1] | _THOUGHT), ()),
    "a call of a tool": ((_turn("user", "Rain in Paris?"), _turn("assistant", "", tool_calls=[_CALL]),
                          _turn("tool", "12 degrees, dry", tool_call_id=_CALL["id"], name="weather"),
                          _turn("assistant", "No rain.")), (_TOOL,)),
}  # fmt: skip


def survey(tokenizer: "Tokenizer", chat_template: str | None = None, stops: Collection[int] = ()) -> list[Verdict]:
    """A verdict for each of CHATS with this template (None: the tokenizer's own); `stops` as for `render`."""
    return [_look(tokenizer, kind, Conversation("", "", 0, messages, tools), chat_template, stops)
            for kind, (messages, tools) in CHATS.items()]


def require(verdicts: list[Verdict], name: str) -> None:
    """KitError, with the template's `name`, unless a plain answer can be masked exactly."""
    plain = next(verdict for verdict in verdicts if verdict.chat == PLAIN)
    if not plain.masked:
        raise KitError(f"answers cannot be masked exactly in the chat template of {name}: {plain.note}. Let the target write the "
                       "answers itself (dataset.regenerate: true), or give another template (dataset.chat_template)")


def _look(tokenizer: "Tokenizer", kind: str, conversation: Conversation, template: str | None, stops: Collection[int]
          ) -> Verdict:
    try:
        samples = render(tokenizer, conversation, template, stops)
        prompts = [next_prompt(tokenizer, conversation.messages[:i], template, conversation.tools)
                   for i, message in enumerate(conversation.messages) if message["role"] == "assistant"]
    except Unfit as unfit:
        place = re.match(r"messages\[(\d+)\]\.?(.*)", unfit.field)
        where = f"turn {int(place[1]) + 1}{f', {place[2]}' if place[2] else ''}: " if place else ""
        return Verdict(kind, False, 0, False, where + unfit.reason)
    heads = [sample.input_ids[:start] for sample in samples for start, _ in sample.turns]
    as_served = heads == prompts
    note = "each turn a sample of its own: the template rewrites earlier ones" if len(samples) > 1 else ""
    if not as_served:
        note += "; " * bool(note) + "the prompt's last words are not in the chat: answers that the target writes stand closer"
    return Verdict(kind, True, len(samples), as_served, note)
