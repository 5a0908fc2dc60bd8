"""Was the forecast right? The speedup that 01 foretold, for the length that was served, against the one that 08 measured."""

from dataclasses import dataclass
from typing import Any

from eagle3kit.figures import Figure
from eagle3kit.speedup import predicted_speedup


@dataclass(frozen=True)
class Forecast:
    """`foretold`: served length / r; `measured`: by 08. `agree`: their intervals touch. `where`: the settings of r in words."""

    foretold: Figure
    measured: Figure
    agree: bool
    where: str

    @property
    def off(self) -> float:
        """Foretold over measured, less 1: 0.1 is a tenth too much."""
        return self.foretold.value / self.measured.value - 1

    @property
    def words(self) -> str:
        """The comparison as one sentence."""
        told, got = (f"{one.value:.2f} ({one.least:.2f} to {one.most:.2f})" for one in (self.foretold, self.measured))
        end = "they agree" if self.agree else f"off by {100 * self.off:+.0f} %"
        return f"foretold {told}, measured {got}, {self.where}: {end}"


def forecast(profiled: dict[str, Any], served: dict[str, Any], *, in_flight: int, draft_tokens: int) -> Forecast | None:
    """Compare the results of 01_allreduce_vs_speculation and 08_acceptance ({"numbers": …}); None where 01 has no such r.

    r is taken at concurrency `in_flight` and with `draft_tokens`; of several contexts the shortest, for prompts of 08 are short.

    Predicted = served length / r: it leaves out reading the prompts, the server's own work, and the tail of a wave in which
    fewer sequences are left; so it need not agree, and by how much it does not is the point.
    """
    rows = [row for row in profiled["numbers"].get("ratios") or []
            if (row["concurrency"], row["draft_tokens"]) == (in_flight, draft_tokens)]  # fmt: skip
    if not rows:
        return None
    row, numbers = min(rows, key=lambda row: row["context"]), served["numbers"]
    length = Figure(value=numbers["acceptance_length"], low=numbers["acceptance_length_low"], n=numbers["prompts"], unit="",
                    high=numbers["acceptance_length_high"], kind="measured", source="08_acceptance")  # fmt: skip
    low, high = numbers["speedup_interval"]
    got = Figure(value=numbers["speedup"], low=min(low, numbers["speedup"]), high=max(high, numbers["speedup"]), unit="x",
                 kind="measured", source="08_acceptance")  # fmt: skip
    told = predicted_speedup(length, Figure(**row["r"]))
    where = f"at concurrency {in_flight}, {draft_tokens} draft tokens, context {row['context']:,}"
    return Forecast(told, got, told.least <= got.most and got.least <= told.most, where)


def rows(found: Forecast | None) -> list[dict[str, Any]]:
    """The comparison as rows of a table."""
    if found is None:
        return [{"forecast": "none: 01_allreduce_vs_speculation timed no step at this concurrency with these draft tokens"}]
    return [{"speedup": name, "value": figure.value, "from": figure.least, "to": figure.most, "kind": figure.kind,
             "agree": found.agree if name == "foretold" else None}
            for name, figure in (("foretold", found.foretold), ("measured", found.measured))]  # fmt: skip
