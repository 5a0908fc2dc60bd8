"""Was the forecast right? The speedup that 01 foretold, for the length that was served, against the one that 08 measured."""

from dataclasses import dataclass
from typing import Any

from eagle3kit.figures import Figure
from eagle3kit.speedup import predicted_speedup

NAMED = {"hidden_size": "width", "layers": "layers", "vocab_size": "vocabulary"}  # what tells one target from another
OUTSIDE = 1.1  # a served step this much longer than the engine's is worth a word


@dataclass(frozen=True)
class Forecast:
    """`foretold`: served `length` / `r`; `measured`: by 08. `agree`: their intervals touch. `where`: the settings of r in words.
    A length of r breaks even. `step`, `engine_step`: milliseconds of a plain step as 08 served it, and in 01's engine alone."""

    foretold: Figure
    measured: Figure
    length: Figure
    r: Figure
    agree: bool
    where: str
    step: Figure | None = None
    engine_step: Figure | None = None

    @property
    def off(self) -> float:
        """Foretold over measured, less 1: 0.1 is a tenth too much."""
        return self.foretold.value / self.measured.value - 1

    @property
    def words(self) -> str:
        """The comparison as one sentence."""
        told, got = (f"{one.value:.2f} ({one.least:.2f} to {one.most:.2f})" for one in (self.foretold, self.measured))
        end = "they agree within their intervals" if self.agree else f"off by {100 * self.off:+.0f} %"
        # What is not the engine's draws a speedup towards 1, never across it.
        gain, hope = self.measured.value - 1, self.foretold.value - 1
        drawn = abs(gain) < abs(hope) and (gain > 0) == (hope > 0)
        if not self.agree and drawn and self.step and self.engine_step and self.step.value > OUTSIDE * self.engine_step.value:
            end += (f"; a plain step took {self.step.value:.2f} ms as served and {self.engine_step.value:.2f} ms in the engine "
                    "alone; the rest, reading prompts and the server's work, no draft makes faster")  # fmt: skip
        return f"foretold {told}, measured {got}, {self.where}: {end}"


@dataclass(frozen=True)
class NoForecast:
    """There is nothing to hold against 08: `words` say what 01 did not measure, and what to do about it."""

    words: str


def forecast(
    profiled: dict[str, Any], served: dict[str, Any], *, in_flight: int, draft_tokens: int, shape: dict[str, Any] | None = None
) -> Forecast | NoForecast:  # fmt: skip
    """Compare the results of 01_allreduce_vs_speculation and 08_acceptance ({"numbers": …}).

    r is taken at the concurrency that was served (`in_flight`, or all prompts where they are fewer) and with `draft_tokens`; of
    several contexts the shortest, for prompts of 08 are short. NoForecast where 01 has no such r, or timed another geometry
    than the target's `shape` ({"layers": …, "hidden_size": …}; what both tell of NAMED is compared): r of Llama-3.1-8B
    tells nothing of SmolLM2-135M.

    Predicted = served length / r: it leaves out reading the prompts, the server's own work, and the tail of a wave in which
    fewer sequences are left; so it need not agree, and by how much it does not is the point. What of it is the server's shows in
    "plain_step" of 08's numbers (`served.plain_step`), if they hold it, beside the plain step of 01.
    """
    numbers, known = served["numbers"], profiled["numbers"].get("ratios") or []
    timed, shape = profiled["numbers"].get("geometry") or {}, shape or {}
    if other := {key: (timed[key], shape[key]) for key in NAMED if key in timed and key in shape and timed[key] != shape[key]}:
        return NoForecast(_of_another(profiled["numbers"].get("profiled", "another target"), other))
    at_once = min(in_flight, numbers["prompts"])
    rows = [row for row in known if (row["concurrency"], row["draft_tokens"]) == (at_once, draft_tokens)]
    if not rows:
        return NoForecast(_why_not(known, profiled["numbers"].get("refused") or [], at_once, draft_tokens))
    row = min(rows, key=lambda row: row["context"])
    shortest = row["context"]
    length = Figure(value=numbers["acceptance_length"], low=numbers["acceptance_length_low"], n=numbers["prompts"], unit="",
                    high=numbers["acceptance_length_high"], kind="measured", source="08_acceptance")  # fmt: skip
    low, high = numbers["speedup_interval"]
    got = Figure(value=numbers["speedup"], low=min(low, numbers["speedup"]), high=max(high, numbers["speedup"]), unit="x",
                 kind="measured", source="08_acceptance")  # fmt: skip
    r = Figure(**row["r"])
    told = predicted_speedup(length, r)
    where = f"at concurrency {at_once}, {draft_tokens} draft tokens, context {row['context']:,}"
    steps = [Figure(value=row["ms"], low=row["low"], high=row["high"], n=row["steps"], unit="ms", kind="measured",
                    source="01_allreduce_vs_speculation") for row in profiled["numbers"].get("steps") or []
             if (row["draft_tokens"], row["group"], row["batch"], row["context"]) == (0, "", at_once, shortest)]  # fmt: skip
    step = numbers.get("plain_step") and Figure(**numbers["plain_step"])
    return Forecast(told, got, length, r, told.least <= got.most and got.least <= told.most, where, step, next(iter(steps), None))


def _of_another(name: str, other: dict[str, tuple[int, int]]) -> str:
    parts = ", ".join(f"{NAMED[key]} {timed:,} ({served:,} served)" for key, (timed, served) in other.items())
    return (f"no forecast: 01_allreduce_vs_speculation timed {name}, with {parts}, which is not the target that 08_acceptance "
            "serves; leave profile.geometry out, then 01 times the target")  # fmt: skip


def _why_not(known: list[dict[str, Any]], refused: list[str], at_once: int, draft_tokens: int) -> str:
    if not known:
        told = f" ({'; '.join(refused)})" if refused else ""
        return f"no forecast: 01_allreduce_vs_speculation has no r{told}"
    timed = ", ".join(f"{row['concurrency']} at once with {row['draft_tokens']} draft tokens" for row in known)
    return (f"no forecast: 08_acceptance served {at_once} at once with {draft_tokens} draft tokens, 01_allreduce_vs_speculation "
            f"has r at {timed}; leave profile.batches and profile.draft_tokens out, then 01 times what 08 serves")  # fmt: skip


def rows(found: Forecast | NoForecast) -> list[dict[str, Any]]:
    """The comparison as rows of a table: speed, and the length against the one that breaks even."""
    if isinstance(found, NoForecast):
        return [{"forecast": found.words}]
    told = {"speedup, foretold: length / r": found.foretold, "speedup, measured": found.measured,
            "length, served": found.length, "length that breaks even: r": found.r,
            "a plain step as served, ms": found.step, "a plain step of the engine alone, ms": found.engine_step}  # fmt: skip
    return [{"what": name, "value": figure.value, "from": figure.least, "to": figure.most, "kind": figure.kind}
            for name, figure in told.items() if figure]  # fmt: skip
