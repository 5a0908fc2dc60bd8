"""Serve the same prompts with and without speculation; count what was accepted, time it, compare the answers."""

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from eagle3kit.acceptance import Acceptance, from_steps, middle, resampled, total
from eagle3kit.errors import KitError
from eagle3kit.figures import Figure

if TYPE_CHECKING:
    from eagle3kit.conversations import Sample
    from eagle3kit.server import Server

COUNTER = "vllm:spec_decode_num_"
WARM_TOKENS = 8


@dataclass(frozen=True)
class Prompt:
    """A held-out turn: the prompt's token ids, the answer recorded for it, and where it is from."""

    source: str
    token_ids: list[int]
    answer: list[int]
    place: int  # number of the turn among all held-out turns, in the order of the samples


@dataclass(frozen=True)
class Wave:
    """A group of prompts asked at once: their indices, new tokens and seconds from the first request to the last answer."""

    prompts: list[int]
    new_tokens: int
    seconds: float


@dataclass(frozen=True)
class Served:
    """One way of serving, over all prompts.

    `counted` is vLLM's own counters as a difference, None without speculation. `records` are the same counts per prompt
    (per wave, where this vLLM tells nothing of single requests): what an interval is drawn over. `steps` are the draft tokens
    accepted in each verify step of each prompt, empty where this vLLM does not tell.
    """

    answers: list[list[int]]
    waves: list[Wave]
    counted: Acceptance | None
    records: list[Acceptance]
    steps: list[list[int]] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all prompts / seconds of all waves."""
        return sum(wave.new_tokens for wave in self.waves) / sum(wave.seconds for wave in self.waves)

    @property
    def words(self) -> str:
        """Speed, and with drafts the acceptance length and their number, for the log of a run."""
        told = f"{self.tokens_per_second:,.1f} tokens/s"
        return told + (f", acceptance length {self.counted.length:.2f} ({self.counted.drafts:,} drafts)" if self.counted else "")

    @property
    def tokens_per_step(self) -> float:
        """New tokens that a step of the target brought, drafted for or not. The acceptance length counts steps with a draft
        alone: n-grams make none where nothing matches, so theirs says less. An answer's first token comes with its prompt, and
        each later step adds one of the target's own to what it accepted.

        One answer of 11 tokens, 6 of them accepted -> 10 / 4 = 2.5
        """
        later = sum(wave.new_tokens - len(wave.prompts) for wave in self.waves)
        return later / max(1, later - sum(self.counted.accepted if self.counted else ()))


def prompts(samples: Sequence["Sample"], most: int) -> list[Prompt]:
    """At most `most` held-out turns, in the order of the samples, in which the sources take turns."""
    every = [(sample, turn) for sample in samples for turn in sample.turns]
    return [Prompt(sample.source, sample.input_ids[:start], sample.input_ids[start:end], place)
            for place, (sample, (start, end)) in enumerate(every[:most])]  # fmt: skip


def counts(before: dict[str, float], after: dict[str, float], depth: int) -> Acceptance:
    """What vLLM's counters say happened between two readings; KitError when this server does not count."""
    names = [f"{COUNTER}drafts", *(f"{COUNTER}accepted_tokens_per_pos/{k}" for k in range(depth))]
    if names[0] not in after:
        raise KitError(f"the server has no counter {names[0]}: it does not speculate")
    drafts, *accepted = (int(after.get(name, 0) - before.get(name, 0)) for name in names)
    return Acceptance(drafts=drafts, accepted=tuple(accepted))


def room(longest: int, depth: int, positions: int) -> int:
    """The max_model_len with which vLLM drafts to the very end of sequences of `longest` tokens of prompt and answer, at most the
    target's `positions`.

    It stops drafting for *all* sequences that it decodes together once the longest of them has no room for the draft tokens
    that are being verified and `depth` more (v1/worker/gpu_model_runner.py, _input_fits_in_drafter); where steps are scheduled
    ahead, those of the step before are counted as accepted. With less room, ends of answers are decoded plainly but counted as
    drafts that were rejected. 43 tokens, 3 draft tokens -> 53.
    """
    return min(positions, longest + 3 * depth + 1)


def measure(
    server: "Server",
    asked: Sequence[Prompt],
    *,
    max_new_tokens: int,
    in_flight: int,
    depth: int | None,
    report: Callable[[int, int], None] | None = None,
) -> Served:
    """Greedy answers to `asked`, in waves of `in_flight` prompts, so that every way of serving meets the same company.

    A few tokens for the first wave's prompts, not counted, warm the server up: what it compiles for steps of that size is not
    the wave's. `depth`: draft tokens of the server, None when it does not speculate.

    Raises:
        KitError: the server does not count drafts, or its counters and its per-request counts differ.
    """
    before = server.counters() if depth else {}
    warm = list(server.complete([prompt.token_ids for prompt in asked[:in_flight]], max_tokens=WARM_TOKENS, in_flight=in_flight))
    if depth:  # else its counts could come late, into the first wave
        _settled(server, before, depth, [from_steps(answer.accepted_per_step, depth) for _, answer in warm
                                         if answer.accepted_per_step is not None])  # fmt: skip
    answers: list[list[int]] = [[] for _ in asked]
    waves, by_wave, by_prompt, steps = [], [], {}, {}
    for first in range(0, len(asked), in_flight):
        numbers = list(range(first, min(first + in_flight, len(asked))))
        before = server.counters() if depth else {}
        started = time.perf_counter()
        for index, answer in server.complete(
            [asked[number].token_ids for number in numbers], max_tokens=max_new_tokens, in_flight=in_flight
        ):
            answers[numbers[index]] = answer.token_ids
            if answer.accepted_per_step is not None:
                by_prompt[numbers[index]] = from_steps(answer.accepted_per_step, depth or 0)
                steps[numbers[index]] = list(answer.accepted_per_step)
        seconds = time.perf_counter() - started
        waves.append(Wave(numbers, sum(len(answers[number]) for number in numbers), seconds))
        if depth:
            by_wave.append(_settled(server, before, depth, [by_prompt[n] for n in numbers if n in by_prompt]))
        if report:
            report(numbers[-1] + 1, len(asked))
    told = len(by_prompt) == len(asked)
    records = [by_prompt[number] for number in sorted(by_prompt)] if told else by_wave
    counted = total(by_wave) if depth else None
    if counted and records and total(records) != counted:
        raise KitError(f"vLLM's counters say {counted}, its answers {total(records)}; somebody else is asking this server")
    return Served(answers, waves, counted, records if depth else [],
                  [steps[number] for number in sorted(steps)] if depth and told else [])  # fmt: skip


def _settled(server: "Server", before: dict[str, float], depth: int, told: list[Acceptance]) -> Acceptance:
    """The counters' difference once they have caught up: they are published a moment after the last answer.

    They have when they say what the answers say; where this vLLM's answers say nothing, when a fifth of a second changes nothing:
    it counts a step before it hands over the step's tokens.
    """
    until, found = time.monotonic() + 5, None
    while True:
        last, found = found, counts(before, server.counters(), depth)
        if (found == total(told) if told else found == last) or time.monotonic() > until:
            return found
        time.sleep(0.1 if told else 0.2)


def drafts_made(server: "Server") -> int:
    """How many drafts the server has counted, once there are any; 0 after five seconds without."""
    until = time.monotonic() + 5
    while True:
        drafts = int(server.counters().get(f"{COUNTER}drafts", 0))
        if drafts or time.monotonic() > until:
            return drafts
        time.sleep(0.1)


def drawn_over(asked: Sequence[Prompt], served: Served) -> str:
    """What an interval of this way of serving is drawn over, in words: "32 prompts", or "3 waves of 43 prompts"."""
    if len(served.records) == len(asked):
        return f"{len(asked)} prompts"
    few = ", few and so rough" if len(served.records) < 10 else ""
    return f"{len(served.records)} waves of {len(asked)} prompts{few}"


def by_source(asked: Sequence[Prompt], served: Served) -> dict[str, list[Acceptance]]:
    """The counts of each source's prompts; empty where this vLLM tells nothing of single requests."""
    if len(served.records) != len(asked):
        return {}
    found: dict[str, list[Acceptance]] = {}
    for prompt, record in zip(asked, served.records, strict=True):
        found.setdefault(prompt.source, []).append(record)
    return found


def name(prompt: Prompt) -> str:
    """What a prompt is called in results: 16 hex digits of a hash of its token ids, the same in every run that asks it."""
    return hashlib.sha256(repr(list(prompt.token_ids)).encode()).hexdigest()[:16]


def by_prompt(asked: Sequence[Prompt], served: Served) -> list[dict[str, object]]:
    """The counts of each prompt as plain data, for results that later runs are compared with; empty where this vLLM tells
    nothing of single requests."""
    if len(served.records) != len(asked):
        return []
    return [{"id": name(prompt), "source": prompt.source, "prompt_tokens": len(prompt.token_ids), "new_tokens": len(answer),
             "drafts": record.drafts, "accepted": list(record.accepted)}
            for prompt, answer, record in zip(asked, served.answers, served.records, strict=True)]  # fmt: skip


def lossless(plain: Sequence[list[int]], other: Sequence[list[int]]) -> tuple[int, int]:
    """(answers equal token for token, answers): greedy speculation must not change what the target says."""
    return sum(a == b for a, b in zip(plain, other, strict=True)), len(plain)


def speed_interval(served: Served, *, resamples: int, seed: int) -> tuple[float, float]:
    """95 % bootstrap interval over waves of tokens a second."""
    sums = resampled(_waves(served), resamples=resamples, seed=seed)
    return middle(sums[:, 0] / sums[:, 1])


def speedup_interval(served: Served, plain: Served, *, resamples: int, seed: int) -> tuple[float, float]:
    """95 % bootstrap interval of tokens a second over plain tokens a second, over waves of the same prompts."""
    sums = resampled(np.hstack([_waves(served), _waves(plain)]), resamples=resamples, seed=seed)
    return middle(sums[:, 0] / sums[:, 1] / (sums[:, 2] / sums[:, 3]))


def plain_step(plain: Served, *, resamples: int, seed: int) -> Figure:
    """Milliseconds of a plain decode step as it was served: seconds of all waves over the tokens of each one's longest answer,
    one a step; 95 % bootstrap interval over waves. Reading the prompts, and all that server and client do, is in it.

    Two waves of 2 s and 3 s whose longest answers have 100 and 150 tokens -> 20.0
    """
    longest = [max(len(plain.answers[number]) for number in wave.prompts) for wave in plain.waves]
    rows = np.array([(wave.seconds, most) for wave, most in zip(plain.waves, longest, strict=True)])
    sums, (seconds, steps) = resampled(rows, resamples=resamples, seed=seed), rows.sum(axis=0)
    low, high = middle(1000 * sums[:, 0] / np.maximum(1, sums[:, 1]))
    value = float(1000 * seconds / max(1, steps))
    return Figure(value=value, low=min(low, value), high=max(high, value), n=len(rows), unit="ms", kind="measured",
                  source="waves of 08_acceptance")  # fmt: skip


def _waves(served: Served) -> np.ndarray:
    """New tokens and seconds [waves, 2]."""
    return np.array([(wave.new_tokens, wave.seconds) for wave in served.waves])
