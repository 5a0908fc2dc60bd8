"""A fault of a file, in the six things that a person needs: which file, which key, what was expected, what is there, what
that causes, and the way out."""

from dataclasses import dataclass, replace

from eagle3kit.errors import KitError


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong. `key` is empty when the file as a whole is meant."""

    file: str
    key: str
    expected: str
    found: str
    causes: str
    way_out: str

    @property
    def line(self) -> str:
        """All of it in one line: `data_3.pt, key loss_mask: [19], expected [20] …; cause; way out`."""
        place = f"{self.file}, key {self.key}: {self.found}" if self.key else f"{self.file} cannot be used: {self.found}"
        return "; ".join(part for part in (f"{place}, expected {self.expected}", self.causes, self.way_out) if part)

    def at(self, file: str, way_out: str | None = None) -> "Fault":
        """The same fault under another name of its file, or with another way out."""
        return replace(self, file=file, way_out=self.way_out if way_out is None else way_out)


class Unreadable(KitError):
    """A file that no reader here opens; `fault` says why in parts, the message in one line."""

    def __init__(self, fault: Fault):
        said = f"{fault.file} cannot be read: {fault.found}, expected {fault.expected}"
        super().__init__("; ".join(part for part in (said, fault.causes, fault.way_out) if part))
        self.fault = fault
