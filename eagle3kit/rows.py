"""One raw row -> turns in strict roles, or the field and the reason why not."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3kit.errors import KitError
from eagle3kit.sources import BadRow, Prompts

ROLES = ("system", "user", "assistant")
SHAREGPT = {"human": "user", "gpt": "assistant"} | {role: role for role in ROLES}


class Unfit(Exception):
    """A row or conversation that cannot be used: `field` says where in it, `reason` why. Never leaves the kit."""

    def __init__(self, where: str, reason: str):
        super().__init__(f"{where}: {reason}")
        self.field, self.reason = where, reason


@dataclass(frozen=True)
class Rejected:
    """A row not used: where it is (`row` counts from 1), which part of it is wrong, and why."""

    source: str
    row: int
    field: str
    reason: str


def check_row(row: Any, regenerate: bool, system_prompt: str | None = None) -> tuple[dict[str, str], ...]:
    """The messages of a raw row in strict roles, without answers when `regenerate`; Unfit names the field and why.

    Taken: `messages` of role and content, or `conversations` of from and value (human, gpt, system). A system turn may
    only come first; user and assistant take turns, user first; nothing is empty; the last turn is the assistant's.
    `system_prompt` opens conversations that have no system turn.
    """
    if isinstance(row, BadRow):
        raise Unfit(row.field, row.reason)
    if isinstance(row, Prompts):
        if not regenerate:
            raise Unfit("messages", "this source has no answers: set dataset.regenerate")
        return _opened([{"role": "user", "content": text} for text in row.turns], system_prompt)
    if not isinstance(row, dict):
        raise Unfit("row", f"a {type(row).__name__}, not an object")
    key = next((name for name in ("messages", "conversations") if row.get(name) is not None), None)
    if key is None:
        raise Unfit("row", f"neither messages nor conversations; it has {', '.join(map(str, row)) or 'nothing'}")
    if not isinstance(row[key], list) or not row[key]:
        raise Unfit(key, "not a list of turns" if row[key] else "no turn at all")
    turns = [_turn(turn, f"{key}[{i}]") for i, turn in enumerate(row[key])]
    first = 1 if turns[0]["role"] == "system" else 0
    if len(turns) == first:
        raise Unfit(key, "no user turn")
    for i, turn in enumerate(turns[first:], first):
        due = ROLES[1 + (i - first) % 2]
        if turn["role"] != due:
            raise Unfit(f"{key}[{i}]", f"a turn of {turn['role']} where {due}'s is due")
    if not regenerate and turns[-1]["role"] != "assistant":
        raise Unfit(key, "no assistant turn" if len(turns) == first + 1 else "ends without the assistant's answer")
    if regenerate:
        turns = [turn for turn in turns if turn["role"] != "assistant"]
    return _opened(turns, system_prompt)


def check_share(
    bad: int, of: int, rejected: list[Rejected], allowed_bad_percent: float, listing: Path | None = None
) -> None:
    """KitError with the first few `rejected` when more than `allowed_bad_percent` of `of` rows are `bad`."""
    if bad * 100 <= allowed_bad_percent * of:
        return
    first = "; ".join(f"{entry.source} row {entry.row}, {entry.field}: {entry.reason}" for entry in rejected[:3])
    raise KitError(f"{bad} of {of} rows ({100 * bad / of:.3g} %) are unusable, dataset.allowed_bad_percent is "
                   f"{allowed_bad_percent:g}. First: {first}. "
                   + (f"All of them: {listing}. " if listing else "") + "Mend the rows, or allow more")


def _opened(turns: list[dict[str, str]], system_prompt: str | None) -> tuple[dict[str, str], ...]:
    if system_prompt and turns[0]["role"] != "system":
        turns = [{"role": "system", "content": system_prompt}, *turns]
    return tuple(turns)


def _turn(turn: Any, where: str) -> dict[str, str]:
    """One turn as role and content (and reasoning_content, where an assistant's has one)."""
    if not isinstance(turn, dict):
        raise Unfit(where, f"a {type(turn).__name__}, not an object")
    for key in ("tool_calls", "function_call"):
        if turn.get(key):
            raise Unfit(f"{where}.{key}", "calls of tools are not supported")
    key, known = ("role", dict(zip(ROLES, ROLES, strict=True))) if turn.get("role") is not None else ("from", SHAREGPT)
    role = turn.get(key)
    if not isinstance(role, str) or role not in known:
        raise Unfit(f"{where}.{key}", f"unknown role {role!r}; known: {', '.join(known)}")
    name = next((name for name in ("content", "value") if turn.get(name) is not None), "content")
    text = turn.get(name)
    if isinstance(text, list):  # parts, as chat interfaces send them
        kinds = {str(part.get("type")) if isinstance(part, dict) else type(part).__name__ for part in text}
        if other := sorted(kinds - {"text"}):
            raise Unfit(f"{where}.{name}", f"parts of kind {', '.join(other)}; only text is read")
        text = "".join(str(part.get("text") or "") for part in text)
    if not isinstance(text, str):
        raise Unfit(f"{where}.{name}", f"a {type(text).__name__}, not text")
    if not text.strip():
        raise Unfit(f"{where}.{name}", "an empty answer" if known[role] == "assistant" else "empty")
    checked = {"role": known[role], "content": text}
    reasoning = turn.get("reasoning_content")
    if reasoning and isinstance(reasoning, str) and checked["role"] == "assistant":
        checked["reasoning_content"] = reasoning
    return checked
