"""Served counts taken apart: by source and context length, by prompt; and answers that only repeat themselves."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from eagle3kit.acceptance import Acceptance, from_steps, interval, total
from eagle3kit.errors import KitError
from eagle3kit.served import Prompt, by_source

if TYPE_CHECKING:
    from eagle3kit.predict import Step
    from eagle3kit.served import Served

NGRAM = 4  # tokens; shorter ones recur in any text
DEGENERATE = 0.5  # share of distinct 4-grams: prose and code keep 0.9 and more, a loop of p tokens about p / length
SHORTEST = 24  # tokens; a shorter answer is too short to repeat itself


@dataclass(frozen=True)
class Cell:
    """Counts of one group of verify steps: its `source` and `context`, prompts with a step in it, the sum, and its length's
    95 % interval over prompts (None for a single prompt)."""

    source: str
    context: str
    prompts: int
    counts: Acceptance
    low: float | None
    high: float | None


def context_edges(asked: Sequence[Prompt], most_new: int) -> list[int]:
    """Where context buckets begin: 0, then powers of two from 64 on, as far as prompt and answer can reach; 0, 64, 128 …"""
    longest = max(len(prompt.token_ids) for prompt in asked) + most_new
    return [0] + [2**power for power in range(6, 40) if 2**power < longest]


def bucket(context: int, edges: Sequence[int]) -> str:
    """The name of the bucket that `context` tokens fall into: "64 to 127", "512 and more"."""
    place = max(number for number, edge in enumerate(edges) if edge <= context)
    return f"{edges[place]:,} to {edges[place + 1] - 1:,}" if place + 1 < len(edges) else f"{edges[place]:,} and more"


def cells(
    asked: Sequence[Prompt], steps: Sequence[Sequence[int]], edges: Sequence[int], *, depth: int, resamples: int, seed: int
) -> list[Cell]:  # fmt: skip
    """Counts by source and by the context (tokens so far) that each verify step began with.

    `steps` are the accepted draft tokens of each verify step of each prompt. A prompt of 60 tokens whose steps accept 3, 3
    begins them at 61 and 65 tokens: one step in "0 to 63", one in "64 to 127". Every step is in exactly one cell.
    """
    if len(steps) != len(asked):
        raise KitError(f"{len(asked)} prompts but the verify steps of {len(steps)}: this vLLM does not tell of single requests")
    found: dict[tuple[str, int], dict[int, list[int]]] = {}
    for number, (prompt, mine) in enumerate(zip(asked, steps, strict=True)):
        context = len(prompt.token_ids) + 1
        for accepted in mine:
            place = max(n for n, edge in enumerate(edges) if edge <= context)
            found.setdefault((prompt.source, place), {}).setdefault(number, []).append(accepted)
            context += accepted + 1
    rows = []
    for (source, place), of in sorted(found.items()):
        records = [from_steps(one, depth) for one in of.values()]
        low, high = interval(records, resamples=resamples, seed=seed).length if len(records) > 1 else (None, None)
        rows.append(Cell(source, bucket(edges[place], edges), len(records), total(records), low, high))
    return rows


def cell_rows(found: Sequence[Cell]) -> list[dict[str, Any]]:
    """Acceptance by position, source and context as rows of a table: lengths with their intervals, marginals by position."""
    return [{"source": cell.source, "context": cell.context, "prompts": cell.prompts, "drafts": cell.counts.drafts,
             "acceptance length": cell.counts.length, "from": cell.low, "to": cell.high,
             **{f"marginal {k + 1}": rate for k, rate in enumerate(cell.counts.marginal)}} for cell in found]  # fmt: skip


def source_rows(asked: Sequence[Prompt], served: "Served", *, resamples: int, seed: int) -> list[dict[str, Any]]:
    """Served acceptance by source as rows of a table; one row that says why where this vLLM tells nothing of single requests."""
    rows: list[dict[str, Any]] = []
    for name, records in by_source(asked, served).items():
        whole = total(records)
        low, high = interval(records, resamples=resamples, seed=seed).length if len(records) > 1 else (None, None)
        rows.append({"source": name, "prompts": len(records), "drafts": whole.drafts, "acceptance length": whole.length,
                     "from": low, "to": high,
                     **{f"marginal {k + 1}": rate for k, rate in enumerate(whole.marginal)}})  # fmt: skip
    return rows or [{"not measured": "this vLLM tells nothing of single requests, so nothing by source"}]


def distinct(tokens: Sequence[int], n: int = NGRAM) -> float:
    """Distinct n-grams / n-grams of one answer (Li et al. 2016, "distinct-n"); 1 for an answer shorter than n.

    n = 2: (1, 2, 1, 2, 1) has 4 bigrams, 2 of them distinct -> 0.5
    """
    grams = [tuple(tokens[place : place + n]) for place in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


def degenerate(answers: Sequence[Sequence[int]]) -> list[int]:
    """Numbers of the answers that repeat themselves: at least SHORTEST tokens, distinct-4 below DEGENERATE. A draft predicts
    loops easily, so they flatter acceptance."""
    return [number for number, answer in enumerate(answers) if len(answer) >= SHORTEST and distinct(answer) < DEGENERATE]


def worst(records: Sequence[Acceptance], count: int, least_drafts: int = 8) -> list[int]:
    """Numbers of the `count` prompts with the shortest acceptance length, those of fewer than `least_drafts` drafts aside."""
    enough = [number for number, record in enumerate(records) if record.drafts >= least_drafts]
    return sorted(enough, key=lambda number: (records[number].length, number))[:count]


def told(ids: Sequence[int], turn: tuple[int, int], steps: Sequence["Step"]) -> list[tuple[int, str]]:
    """An answer as (token id, whose it is): "target", "kept" (a draft token accepted) or "rejected" (the draft token that the
    target overruled; not part of the answer).

    Tokens 5 … 8 of an answer [5, 9), a draft after token 5 of two tokens whose first is kept:
    target (5), kept (6), rejected, target (7) …
    """
    start, end = turn
    spans = [(ids[start], "target")]
    for step in steps:
        spans += [(ids[step.place + 1 + k], "kept") for k in range(step.accepted)]
        after = step.place + 1 + step.accepted
        if step.accepted < len(step.proposed) and after < end:
            spans.append((step.proposed[step.accepted], "rejected"))
        if after < end:
            spans.append((ids[after], "target"))
    return spans
