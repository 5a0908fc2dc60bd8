"""The target writes the answers itself: a draft learns the target's words, not other people's. Resumes answer by answer."""

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from eagle3kit.chat_template import assemble, next_prompt
from eagle3kit.conversations import Conversation, Sample
from eagle3kit.errors import KitError
from eagle3kit.rows import Rejected, Unfit

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

    from eagle3kit.reuse import Answers
    from eagle3kit.server import Server


@dataclass(frozen=True)
class Regenerated:
    """`pairs` of a conversation and its samples; what was `rejected`; answers `written` now, in `seconds` without the start of a
    server, and `kept` from before or from another run."""

    pairs: list[tuple[Conversation, list[Sample]]]
    rejected: list[Rejected]
    written: int
    kept: int
    new_tokens: int
    seconds: float = 0.0


class AnswerFile:
    """Answers as JSON lines, added one by one, so that a killed run loses only what was under way.

    An answer is found by a hash of all that it depends on (`settings`) and its prompt. A last line cut short is dropped. What
    other runs have (`elsewhere`) is copied into this file when it is first asked for.
    """

    def __init__(self, path: Path, settings: dict, elsewhere: "Answers | None" = None):
        self._elsewhere = elsewhere
        self.path, self._settings = path, json.dumps(settings, sort_keys=True)
        self.answers: dict[str, list[int]] = {}
        whole = 0
        for line in path.read_bytes().splitlines(keepends=True) if path.exists() else []:
            if not line.endswith(b"\n"):
                break
            try:
                row = json.loads(line)
                self.answers[row["key"]] = row["token_ids"]
            except (json.JSONDecodeError, KeyError, UnicodeDecodeError):
                break
            whole += len(line)
        if path.exists():
            with open(path, "r+b") as file:
                file.truncate(whole)

    def key(self, prompt: Sequence[int]) -> str:
        """The name of the answer to `prompt` under these settings."""
        return hashlib.sha256(f"{self._settings} {list(prompt)}".encode()).hexdigest()[:32]

    def seed(self, prompt: Sequence[int], seed: int) -> int:
        """The seed of one sampled answer, of the prompt rather than of its place: a resumed run draws the same words."""
        return (int(self.key(prompt)[:8], 16) + seed) % 2**31

    def has(self, prompt: Sequence[int]) -> bool:
        """Whether the answer to `prompt` is there; KitError when a full disk stops another run's from being copied."""
        key = self.key(prompt)
        if key not in self.answers and self._elsewhere is not None and (found := self._elsewhere.get(key)) is not None:
            try:
                self.add(prompt, found)
            except OSError as error:
                raise KitError(f"{self.path}: {error.strerror}; free space and run the stage again: it goes on from "
                               "there") from None  # fmt: skip
        return key in self.answers

    def add(self, prompt: Sequence[int], token_ids: list[int]) -> None:
        """Keep an answer at once."""
        self.answers[self.key(prompt)] = token_ids
        with open(self.path, "ab") as file:
            file.write(json.dumps({"key": self.key(prompt), "token_ids": token_ids}).encode() + b"\n")


def regenerate(
    server: "Server",
    tokenizer: "Tokenizer",
    conversations: Sequence[Conversation],
    answers: AnswerFile,
    *,
    max_new_tokens: int,
    max_length: int,
    in_flight: int,
    temperature: float = 0.0,
    seed: int = 0,
    chat_template: str | None = None,
    report: Callable[[int, int], None] | None = None,
) -> Regenerated:
    """The target's own answer to every user turn, turn after turn; token ids exactly as the server gave them.

    A turn whose prompt leaves no room within `max_length` tokens ends its conversation; when that is the first turn the
    conversation is rejected, with the reason. An answer stops at `max_new_tokens` or where `max_length` is reached.

    Raises:
        KitError: from the server, or when a full disk stops the answers from being kept; those before stand.
    """
    turns: list[list[tuple[list[int], list[int]]]] = [[] for _ in conversations]
    messages: list[list[dict[str, str]]] = [[] for _ in conversations]
    waiting = [[m for m in conversation.messages if m["role"] != "assistant"] for conversation in conversations]
    rejected: list[Rejected] = []
    written = kept = new_tokens = 0
    seconds = 0.0
    while any(waiting):
        prompts: dict[int, list[int]] = {}
        for number, conversation in enumerate(conversations):
            while waiting[number] and (not messages[number] or messages[number][-1]["role"] != "user"):
                messages[number].append(waiting[number].pop(0))
            if not messages[number] or messages[number][-1]["role"] != "user":
                continue
            try:
                prompt = next_prompt(tokenizer, messages[number], chat_template)
                if len(prompt) >= max_length:
                    raise Unfit("messages", f"the prompt alone is {len(prompt)} tokens of {max_length} (dataset.max_length)")
                prompts[number] = prompt
            except Unfit as unfit:
                if not turns[number]:
                    rejected.append(Rejected(conversation.source, conversation.row, unfit.field, unfit.reason))
                waiting[number], messages[number] = [], []
        missing = [number for number, prompt in prompts.items() if not answers.has(prompt)]
        kept += len(prompts) - len(missing)
        limits = [min(max_new_tokens, max_length - len(prompts[number])) for number in missing]
        arriving = server.complete(
            [prompts[number] for number in missing], max_tokens=limits, in_flight=in_flight, temperature=temperature,
            seeds=[answers.seed(prompts[number], seed) for number in missing] if temperature else None, report=report,
        )  # fmt: skip
        started = time.perf_counter()  # a server that starts on demand is up by now
        for index, answer in arriving:
            written, new_tokens = written + 1, new_tokens + len(answer.token_ids)
            try:
                answers.add(prompts[missing[index]], answer.token_ids)
            except OSError as error:
                raise KitError(f"{answers.path}: {error.strerror}; {written - 1} answers of this turn are kept. Free space "
                               "and run the stage again: it goes on from there") from None  # fmt: skip
        seconds += time.perf_counter() - started if missing else 0.0
        for number, prompt in prompts.items():
            answer_ids = answers.answers[answers.key(prompt)]
            turns[number].append((prompt, answer_ids))
            text = tokenizer.decode(answer_ids, skip_special_tokens=True)
            messages[number].append({"role": "assistant", "content": text})
            if not text.strip():  # nothing to go on from; what was written (an end of turn) still counts
                waiting[number] = []
    pairs = [(conversation, assemble(turns[number], conversation.id, conversation.source))
             for number, conversation in enumerate(conversations) if turns[number]]  # fmt: skip
    return Regenerated(pairs, rejected, written, kept, new_tokens, seconds)
