"""The Arrow data set beside hs_N.safetensors, as speculators 0.5 to 0.9 read it (train/data.py, ArrowDataset): columns
input_ids, loss_mask, seq_len, saved in torch format. Opened mapped, without the `datasets` library, which takes seconds."""

import json
from functools import cached_property
from pathlib import Path
from typing import Any

from eagle3kit.faults import Fault, Unreadable

COLUMNS = ("input_ids", "loss_mask", "seq_len")
AGAIN = "write the data set again with `datasets`' save_to_disk, in torch format"
MOST_JSON = 4 << 20


def is_one(folder: Path) -> bool:
    """True for a folder that `save_to_disk` made."""
    return (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()


def _numbers(kind: Any, pyarrow: Any) -> bool:
    """True for the type of a column that holds a list of whole numbers, or of true and false, a row."""
    types = pyarrow.types
    listed = types.is_list(kind) or types.is_large_list(kind)
    return listed and (types.is_integer(kind.value_type) or types.is_boolean(kind.value_type))


class Rows:
    """The rows of one data set. Everything raises Unreadable where the folder is not whole."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __reduce__(self) -> tuple[type, tuple[Path]]:
        return Rows, (self.folder,)  # another process maps the files itself

    def _refused(self, found: str, expected: str, key: str = "state.json") -> Unreadable:
        return Unreadable(Fault(str(self.folder / key), "", expected, found, "speculators cannot open it", AGAIN))

    @cached_property
    def _state(self) -> dict[str, Any]:
        path = self.folder / "state.json"
        try:
            with open(path, "rb") as file:
                state = json.loads(file.read(MOST_JSON))
            files = [row["filename"] for row in state["_data_files"]]
            if not files or any(Path(name).name != name for name in files):
                raise ValueError
            return {"files": files, "format": state.get("_format_type"), "indices": state.get("_indices_data_files")}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise self._refused(f"it makes no sense ({type(error).__name__})", "a list of the data set's files") from None

    @cached_property
    def table(self) -> Any:
        """All rows as a pyarrow table, mapped from the files."""
        import pyarrow
        from pyarrow import ipc

        parts = []
        for name in self._state["files"]:
            if not (self.folder / name).is_file():
                raise self._refused("it does not exist", "an Arrow stream, as state.json names it", name)
            try:
                parts.append(ipc.open_stream(pyarrow.memory_map(str(self.folder / name))).read_all())
                parts[-1].validate(full=True)  # offsets of rows too: a wrong one would be read out of the file
                _ = parts[-1].schema.names  # which may be no text
            except (OSError, pyarrow.ArrowException, UnicodeDecodeError) as error:
                raise self._refused(str(error).splitlines()[0][:120], "an Arrow stream", name) from None
        try:
            return pyarrow.concat_tables(parts)
        except pyarrow.ArrowException:
            raise self._refused("files with other columns than each other", "one schema") from None

    def __len__(self) -> int:
        return self.table.num_rows

    @property
    def bytes(self) -> int:
        """Size of the data files."""
        return sum((self.folder / name).stat().st_size for name in self._state["files"] if (self.folder / name).is_file())

    def lengths(self) -> list[int]:
        """seq_len of every row; the number of its tokens where the column is missing or of another type, 0 where both are."""
        import pyarrow
        import pyarrow.compute

        types = {field.name: field.type for field in self.table.schema}
        if pyarrow.types.is_integer(types.get("seq_len", pyarrow.null())):
            return [length or 0 for length in self.table.column("seq_len").to_pylist()]
        if not _numbers(types.get("input_ids", pyarrow.null()), pyarrow):
            return [0] * len(self)
        return [length or 0 for length in pyarrow.compute.list_value_length(self.table.column("input_ids")).to_pylist()]

    def row(self, number: int) -> tuple[list[int], list[int]]:
        """(input_ids, loss_mask) of one row."""
        return tuple(self.table.column(name)[number].as_py() or [] for name in COLUMNS[:2])

    @property
    def whole(self) -> bool:
        """Whether row N can be read, and is that of hs_N: tokens and mask are columns of numbers, stored in their order."""
        import pyarrow
        import pyarrow.compute as compute

        types = {field.name: field.type for field in self.table.schema}
        told = not self._state["indices"] and all(name in types and _numbers(types[name], pyarrow) for name in COLUMNS[:2])
        return told and not any(compute.list_flatten(self.table.column(name)).null_count for name in COLUMNS[:2])

    def faults(self) -> list[Fault]:
        """What the trainer would stumble over: a missing column, another format, lengths that are not the rows'."""
        import pyarrow
        import pyarrow.compute as compute

        found, place = [], str(self.folder)
        types = {field.name: field.type for field in self.table.schema}
        for name in COLUMNS:
            if name not in types:
                found.append(Fault(place, name, "a column", f"missing (there are {', '.join(types)})",
                                   "speculators stops at it", AGAIN))  # fmt: skip
            elif name != "seq_len" and not _numbers(types[name], pyarrow):
                found.append(Fault(place, name, "a list of whole numbers a row", str(types[name]), "no row of tokens", AGAIN))
            elif name == "seq_len" and not pyarrow.types.is_integer(types[name]):
                found.append(Fault(place, name, "a whole number a row", str(types[name]), "rows are packed by it", AGAIN))
            elif name != "seq_len" and (holes := compute.list_flatten(self.table.column(name)).null_count):
                found.append(Fault(place, name, "numbers only", f"{holes:,} places without a number", "no row of tokens", AGAIN))
        if self._state["format"] != "torch":
            found.append(Fault(place, "_format_type", "torch", str(self._state["format"]),
                               "speculators gets lists where it calls tensors' methods (TypeError)",
                               "save it again after with_format('torch')"))  # fmt: skip
        if self._state["indices"]:
            found.append(Fault(place, "_indices_data_files", "none", "rows in another order than stored",
                               "row N would not be that of hs_N", "save it again after flatten_indices()"))  # fmt: skip
        if found:
            return found
        counted = {name: compute.list_value_length(self.table.column(name)).to_pylist() for name in COLUMNS[:2]}
        for name, lengths in counted.items():
            for number, (has, says) in enumerate(zip(lengths, self.lengths(), strict=True)):
                if has != says:
                    found.append(Fault(place, f"{name}, row {number}", f"{says} values, as seq_len says", f"{has}",
                                       "rows are packed by seq_len", AGAIN))  # fmt: skip
        return found
