"""Runs side by side: which differences exceed noise, by a paired bootstrap over the prompts that two runs share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from eagle3kit.acceptance import Acceptance, chance_of_none, middle, resampled, total

FEWEST = 5  # shared prompts; fewer are no basis for an interval
LEVEL = 0.05
MOST_RESAMPLES = 20_000  # of a pair
NEEDED = ("accepted", "drafts", "acceptance_length", "acceptance_length_low", "acceptance_length_high")
UNTOLD = "no counts by prompt (served by an older kit, or by a vLLM before 0.32, which tells nothing of single requests)"


@dataclass(frozen=True)
class Run:
    """What one run measured: `numbers` of its 08_acceptance, the `params` it read, the `machine`, and for each prompt (named by
    its token ids) the served counts; no `prompts` where its vLLM told nothing of single requests. `unpaired` says why it can
    only be shown, not be compared prompt by prompt; "" where it can."""

    name: str
    numbers: dict[str, Any]
    params: dict[str, Any]
    machine: dict[str, Any]
    prompts: dict[str, Acceptance]
    unpaired: str = ""

    @property
    def depth(self) -> int:
        """Draft tokens a verify step."""
        return len(self.numbers["accepted"])


@dataclass(frozen=True)
class Difference:
    """`second` less `first` in one quantity over `prompts` shared prompts: the difference, its 95 % interval, the bootstrap's
    two-sided p, and whether it exceeds noise after Holm's correction for the number of comparisons made."""

    first: str
    second: str
    what: str
    prompts: int
    values: tuple[float, float]
    difference: float
    low: float
    high: float
    p: float
    exceeds: bool

    @property
    def words(self) -> str:
        """The finding in a sentence."""
        verdict = "more than noise" if self.exceeds else "no more than noise"
        return (f"{self.second} against {self.first}: {self.what} {self.values[1]:.3f} against {self.values[0]:.3f}, "
                f"{self.difference:+.3f} ({self.low:+.3f} to {self.high:+.3f}) over {self.prompts} shared prompts: {verdict}")


def collect(
    runs: Mapping[str, Mapping[str, Mapping[str, Any]]], stage: str = "08_acceptance"
) -> tuple[list[Run], dict[str, str]]:
    """(runs that served their draft, by name; {run: why not} for results that cannot be read), from `Stage.runs()`.

    A run without that stage is not mentioned. One without counts by prompt (a vLLM before 0.32, which tells nothing of single
    requests) is among the runs, with its length and interval, and says so in `unpaired`.
    """
    found, left = [], {}
    for name in sorted(runs):
        result = runs[name].get(stage)
        if not result:
            continue
        numbers = result.get("numbers") or {}
        try:
            lacking = [key for key in NEEDED if key not in numbers]
            if lacking:
                raise ValueError(f"it lacks {', '.join(lacking)}")
            prompts = {row["id"]: Acceptance(drafts=row["drafts"], accepted=tuple(row["accepted"]))
                       for row in numbers.get("by_prompt") or ()}  # fmt: skip
            found.append(Run(name, numbers, result.get("params") or {}, (result.get("provenance") or {}).get("machine") or {},
                             prompts, "" if prompts else UNTOLD))  # fmt: skip
        except (KeyError, TypeError, ValueError) as error:
            left[name] = f"its counts cannot be read ({type(error).__name__}: {error})"
    return found, left


def differences(runs: Sequence[Run], *, resamples: int = 2000, seed: int = 0) -> tuple[list[Difference], dict[str, str]]:
    """(every pair of runs, in acceptance length; {pair: why not} for pairs with too few prompts in common, or
    without counts by prompt).

    Prompts are drawn in pairs, so what makes a prompt easy for both cancels. p is twice the share of resamples on the far side
    of no difference; Holm (1979) keeps the chance of one false alarm among all pairs below 5 %. Prompts count as served: a
    long answer weighs more. Runs of other draft lengths K are compared in length all the same. With many pairs more than
    `resamples` are drawn: p is at least 1 / resamples, and the correction asks for smaller ones the more pairs there are.
    """
    found, left = [], {}
    pairs = len(runs) * (len(runs) - 1) // 2
    resamples = max(resamples, min(MOST_RESAMPLES, int(2 * pairs / LEVEL)))
    for first, second in combinations(runs, 2):
        if untold := [f"{run.name} has {run.unpaired}" for run in (first, second) if run.unpaired]:
            left[f"{first.name} and {second.name}"] = "; ".join(untold)
            continue
        shared = sorted(first.prompts.keys() & second.prompts.keys())
        if len(shared) < FEWEST:
            left[f"{first.name} and {second.name}"] = (f"{len(shared)} prompts in common, at least {FEWEST} are needed"
                                                       + ("" if shared else ": other targets, templates or held-out prompts"))
            continue
        found.append(_difference(first, second, shared, resamples, seed))
    return _holm(found), left


def _difference(first: Run, second: Run, shared: list[str], resamples: int, seed: int) -> Difference:
    sides = [[run.prompts[name] for name in shared] for run in (first, second)]
    counts = np.array([[(r.drafts, sum(r.accepted)) for r in side] for side in sides], dtype=np.int64)  # [2, n, 2]
    sums = resampled(np.hstack([counts[0], counts[1]]), resamples=resamples, seed=seed)
    lengths = [1 + sums[:, 2 * k + 1] / np.maximum(1, sums[:, 2 * k]) for k in range(2)]
    apart = lengths[1] - lengths[0]
    values = tuple(total(side).length for side in sides)
    return Difference(first.name, second.name, "acceptance length", len(shared), values, values[1] - values[0],
                      *middle(apart), max(chance_of_none(apart), 1 / resamples), False)  # fmt: skip


def _holm(found: list[Difference]) -> list[Difference]:
    """The same differences with `exceeds` set, by Holm's step-down procedure."""
    order = sorted(range(len(found)), key=lambda place: found[place].p)
    exceeds, still = set(), True
    for rank, place in enumerate(order):
        still = still and found[place].p <= LEVEL / (len(found) - rank)
        if still:
            exceeds.add(place)
    return [Difference(**{**vars(one), "exceeds": place in exceeds}) for place, one in enumerate(found)]


def overview(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """A row a run: what it was made with and what came out, for a table."""
    rows = []
    for run in runs:
        numbers, params = run.numbers, run.params
        rows.append({
            "run": run.name, "target": params.get("target.model"), "dtype": params.get("target.dtype"),
            "samples": params.get("dataset.samples"), "epochs": params.get("training.epochs"), "draft tokens": run.depth,
            "prompts": len(run.prompts) or numbers.get("prompts"), "drafts": numbers["drafts"],
            "acceptance length": numbers["acceptance_length"],
            "from": numbers["acceptance_length_low"], "to": numbers["acceptance_length_high"],
            "interval over": numbers.get("drawn_over") or ("not told" if run.unpaired else "prompts"),
            "predicted": numbers.get("predicted_length"), "speedup": numbers.get("speedup"),
            "machine": ", ".join(run.machine.get("gpus") or []) or f"{run.machine.get('cores', '?')} CPU cores",
        })  # fmt: skip
    return rows


def sweep(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """One draft served with several numbers of draft tokens K: a row a run, by K, of each group of runs alike in all other
    parameters and in the machine; empty where no two runs are so. What K is worth is the speedup: length only rises with K.

    `last position`: the share of drafts accepted whole, which is the most that one more draft token could add to the length.
    """
    groups: dict[str, list[Run]] = {}
    for run in runs:
        same = {key: value for key, value in run.params.items() if key not in ("run", "acceptance.draft_tokens")}
        groups.setdefault(repr((sorted(same.items(), key=repr), sorted(run.machine.items(), key=repr))), []).append(run)
    rows = []
    for number, group in enumerate(one for one in groups.values() if len({run.depth for run in one}) > 1):
        fastest = max(run.numbers.get("speedup") or 0.0 for run in group)
        for run in sorted(group, key=lambda run: (run.depth, run.name)):
            numbers = run.numbers
            low, high = numbers.get("speedup_interval") or (None, None)
            rows.append({
                "draft": number + 1, "draft tokens": run.depth, "run": run.name, "drafts": numbers["drafts"],
                "acceptance length": numbers["acceptance_length"], "from": numbers["acceptance_length_low"],
                "to": numbers["acceptance_length_high"], "last position": numbers["accepted"][-1] / max(1, numbers["drafts"]),
                "speedup": numbers.get("speedup"), "at least": low, "at most": high,
                "fastest": bool(fastest) and numbers.get("speedup") == fastest,
            })  # fmt: skip
    return rows


def headline(runs: Sequence[Run], found: Sequence[Difference]) -> str:
    """The one line: how many runs, which pairs differ by more than noise, and the largest of these differences."""
    if not runs:
        return "no run has served its draft yet"
    if len(runs) == 1:
        (one,) = runs
        length, low, high = (one.numbers[f"acceptance_length{end}"] for end in ("", "_low", "_high"))
        return (f"one run served its draft, {one.name}: acceptance length {length:.3f} ({low:.2f} to {high:.2f}, "
                f"{one.numbers['drafts']:,} drafts); there is no other to compare it with yet")  # fmt: skip
    if not found:
        untold = sum(bool(run.unpaired) for run in runs)
        if untold > len(runs) - 2:
            return f"{len(runs)} runs served a draft, but no two can be compared: {untold} without counts by prompt"
        return f"{len(runs)} runs served a draft, but no two of them enough of the same prompts to be compared"
    real = [one for one in found if one.exceeds]
    if not real:
        return f"{len(runs)} runs, {len(found)} pairs: no difference in acceptance length is more than noise"
    most = max(real, key=lambda one: abs(one.difference))
    better, other = (most.second, most.first) if most.difference > 0 else (most.first, most.second)
    return (f"{len(runs)} runs: {len(real)} of {len(found)} pairs differ by more than noise, most of all {better}, "
            f"{abs(most.difference):.3f} longer than {other} on {most.prompts} shared prompts")  # fmt: skip
