"""One raw row -> turns in strict roles, or the field and the reason why not."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3kit.errors import KitError
from eagle3kit.sources import BadRow, Prompts

ROLES = ("system", "user", "assistant", "tool")
SHAREGPT = {"human": "user", "gpt": "assistant"} | {role: role for role in ROLES}
# A dataset's way of saying that there is no call.
NO_CALL = (None, [], {}, "")


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


def check_row(row: Any, regenerate: bool, system_prompt: str | None = None) -> tuple[dict[str, Any], ...]:
    """The messages of a raw row in strict roles, without answers when `regenerate`; Unfit names the field and why.

    Taken: `messages` of role and content, or `conversations` of from and value (human, gpt, system). A system turn may
    only come first; user and assistant take turns, user first; nothing is empty; the last turn is the assistant's.
    `system_prompt` opens conversations that have no system turn.

    An assistant's turn may call tools (`tool_calls`, with arguments as an object or its JSON text); then what they return
    follows, a turn of role tool for each, and the assistant's next turn. Not when `regenerate`: the target's own calls
    would be other ones, and nobody is there to answer them.
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
    due: tuple[str, ...] = ("user",)
    for i, turn in enumerate(turns[first:], first):
        if turn["role"] not in due:
            raise Unfit(f"{key}[{i}]", f"a turn of {turn['role']} where {' or '.join(due)}'s is due")
        after = {"user": ("assistant",), "tool": ("tool", "assistant")}
        due = after.get(turn["role"], ("tool",) if turn.get("tool_calls") else ("user",))
        if regenerate and turn.get("tool_calls"):
            raise Unfit(f"{key}[{i}].tool_calls", "the target's own calls would be other ones, and nobody is there to answer "
                                                  "them: set dataset.regenerate to false")
    if not regenerate and turns[-1]["role"] != "assistant":
        raise Unfit(key, "no assistant turn" if len(turns) == first + 1 else "ends without the assistant's answer")
    if regenerate:
        turns = [turn for turn in turns if turn["role"] != "assistant"]
    return _opened(turns, system_prompt)


def check_tools(row: Any, regenerate: bool) -> tuple[dict[str, Any], ...]:
    """The functions that a raw row declares under `tools`, a list or its JSON text; () without any. Unfit as for a row."""
    tools = row.get("tools") if isinstance(row, dict) else None
    if isinstance(tools, str) and tools.strip():
        tools = _json(tools, "tools")
    if tools in NO_CALL:
        return ()
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise Unfit("tools", "not a list of declarations")
    if regenerate:
        raise Unfit("tools", "the target's own answers may call them, and nobody is there to answer the calls: set "
                             "dataset.regenerate to false")
    return tuple(tools)


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


def _turn(turn: Any, where: str) -> dict[str, Any]:
    """One turn as role and content, and what else its role may have: reasoning_content, tool_calls; tool_call_id, name."""
    if not isinstance(turn, dict):
        raise Unfit(where, f"a {type(turn).__name__}, not an object")
    if turn.get("function_call"):
        raise Unfit(f"{where}.function_call", "an older form of tool_calls, which is not read")
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
    calls = _calls(turn["tool_calls"], f"{where}.tool_calls") if turn.get("tool_calls") not in NO_CALL else []
    if calls and known[role] != "assistant":
        raise Unfit(f"{where}.tool_calls", f"a turn of {role} calls tools")
    if text is None and calls:
        text = ""
    if not isinstance(text, str):
        raise Unfit(f"{where}.{name}", f"a {type(text).__name__}, not text")
    if not text.strip() and not calls and known[role] != "tool":
        raise Unfit(f"{where}.{name}", "an empty answer" if known[role] == "assistant" else "empty")
    checked: dict[str, Any] = {"role": known[role], "content": text}
    if calls:
        checked["tool_calls"] = calls
    if known[role] == "tool":
        checked |= {key: turn[key] for key in ("tool_call_id", "name") if isinstance(turn.get(key), str)}
    reasoning = turn.get("reasoning_content")
    if reasoning and isinstance(reasoning, str) and checked["role"] == "assistant":
        checked["reasoning_content"] = reasoning
    return checked


def _calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Calls as templates read them, and as vLLM hands them over: arguments an object, never its JSON text."""
    if not isinstance(calls, list):
        raise Unfit(where, f"a {type(calls).__name__}, not a list of calls")
    checked = []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise Unfit(f"{where}[{i}]", "no call of a function with a name")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            arguments = _json(arguments, f"{where}[{i}].function.arguments") if arguments.strip() else {}
        if not isinstance(arguments, dict):
            raise Unfit(f"{where}[{i}].function.arguments", f"a {type(arguments).__name__}, not an object")
        name = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
        checked.append({**name, "type": "function", "function": {"name": function["name"], "arguments": arguments}})
    return checked


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise Unfit(where, f"not JSON: {error}") from None
