"""What a check finds: good, a FAULT, a note, or not checked with the reason."""

from dataclasses import dataclass
from typing import Literal

GOOD, FAULT, NOTE, UNKNOWN = "good", "FAULT", "note", "not checked"


@dataclass(frozen=True)
class Finding:
    """One thing looked at: where, how it is, what was expected and found, and what a fault would cause or the way out."""

    what: str
    state: Literal["good", "FAULT", "note", "not checked"]
    expected: str
    found: str
    effect: str = ""

    @property
    def line(self) -> str:
        """The finding in a line."""
        tail = f" ({self.effect})" if self.effect and self.state != GOOD else ""
        return f"{self.state:<11}  {self.what}: expected {self.expected}, found {self.found}{tail}"


def compare(what: str, expected: object, found: object, effect: str, right: bool | None = None) -> Finding:
    """Good when `found` is `expected`, or as `right` says; else a FAULT."""
    right = expected == found if right is None else right
    return Finding(what, GOOD if right else FAULT, str(expected), str(found), effect)
