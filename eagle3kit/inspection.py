"""Look at files of this field, anybody's: what each is, whether it is right, and what to do where it is not.

Headers of every file; numbers of a drawn few, or of all when asked: the first, the last, and every n-th between, at most
`DRAWN` of a folder. What was drawn is said in the report's notes.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from eagle3kit import arrow_rows, contracts, contracts_draft, mapping, neighbours
from eagle3kit.content_checks import Work, check_all
from eagle3kit.conventions import ENTERING, LEAVING, phrase
from eagle3kit.errors import KitError
from eagle3kit.faults import Fault, Unreadable
from eagle3kit.file_walk import Progress, walk
from eagle3kit.neighbours import Seen

DRAWN = 16
FOREIGN = "no file of this field: neither samples, nor a vocabulary mapping, nor an EAGLE-3 draft"


@dataclass(frozen=True)
class Row:
    """Like files of one folder: kind, contract, where, how many, keys with shapes and number types, tokens in all and of the
    shortest and longest, bytes."""

    kind: str
    contract: str
    where: str
    files: int
    keys: str
    tokens: int
    shortest: int
    longest: int
    bytes: int


@dataclass
class Report:
    """What was found. `verdicts`: kind -> USABLE or BROKEN; `notes`: proofs, and what was looked at; `passed_over`: suffix ->
    files of the folders that are none of ours; `signs`: what only the target could tell."""

    rows: list[Row] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    passed_over: dict[str, int] = field(default_factory=dict)
    kinds_broken: set[str] = field(default_factory=set)
    signs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def verdicts(self) -> dict[str, str]:
        """Kind -> USABLE or BROKEN, in the order of the rows."""
        kinds = dict.fromkeys([row.kind for row in self.rows] + sorted(self.kinds_broken))
        return {kind: "BROKEN" if kind in self.kinds_broken else "USABLE" for kind in kinds}

    @property
    def code(self) -> int:
        """0 all usable, 1 something is broken, 2 nothing of this field."""
        return 1 if self.faults else 0 if self.rows else 2

    def add(self, kind: str, faults: Iterable[Fault]) -> None:
        """Note faults of a kind."""
        for fault in faults:
            self.faults.append(fault)
            self.kinds_broken.add(kind)

    def as_dict(self) -> dict[str, Any]:
        """For machines: plain values, every fault in its six parts and as its line."""
        return {"rows": [asdict(row) for row in self.rows], "verdicts": self.verdicts, "notes": self.notes,
                "faults": [asdict(fault) | {"line": fault.line} for fault in self.faults], "passed_over": self.passed_over,
                "signs": self.signs, "exit_code": self.code}  # fmt: skip


def inspect(paths: Sequence[Path | str], *, read_all: bool = False, target: str | None = None, progress: Progress | None = None,
            trust_remote_code: bool = False) -> Report:  # fmt: skip
    """Everything that can be told of `paths`: files, folders, and patterns with * ? [ that name either.

    `read_all` looks at the numbers of every file, in parallel. `target`, a model as parameter files name it, adds what only
    the target can tell. `progress(items, total)` may wrap the long loop.

    Raises:
        KitError: a path that does not exist, a pattern that fits nothing, a target that cannot be found.
    """
    found, report = walk(paths, progress), Report()
    report.passed_over = dict(sorted(found.passed.items()))
    lost: dict[Path, set[int]] = {}  # numbers of samples that could not be read: they are broken, not missing
    for fault in found.broken:
        path = Path(fault.file)
        number = contracts.number(path)
        if number is not None and path.parent in found.samples:
            lost.setdefault(path.parent, set()).add(number)
            report.add(found.samples[path.parent][0].contract.kind, [fault])
        else:
            report.add("unreadable", [fault])
    work: list[Work] = []
    for folder, seen in sorted(found.samples.items()):
        work += _samples(folder, seen, lost.get(folder, set()), folder in found.walked, read_all, report)
    for folder, parts in sorted(found.mappings.items()):
        _mappings(folder, parts, report)
    for folder in found.drafts:
        _draft(folder, read_all, report)
    report.add("draft", found.loose)
    for folder in found.datasets:
        _dataset(folder, report, folder in {item.beside.root for item in work})
    data_sets = {str(one.beside.root) for one in work if one.beside.data_set}
    for kind, faults in check_all(work, parallel=read_all, progress=progress):
        for fault in faults:
            report.add("data set" if fault.file in data_sets else kind, [fault])
    if target is not None and report.rows:
        from eagle3kit import inspection_target

        inspection_target.ask(found, report, target, read_all, trust_remote_code)
    return report


# ---- A verdict a kind


def _samples(folder: Path, seen: list[Seen], lost: set[int], whole: bool, read_all: bool, report: Report) -> Iterator[Work]:
    """`lost`: the numbers of files that could not be read."""
    groups: dict[tuple[str, str, str], list[Seen]] = {}
    for one in seen:
        groups.setdefault((one.contract.kind, one.contract.version, one.contract.signature), []).append(one)
    for (kind, version, keys), rows in groups.items():
        tokens = [row.contract.tokens for row in rows]
        size = sum(row.path.stat().st_size for row in rows)
        report.rows.append(Row(kind, version, str(folder), len(rows), keys, sum(tokens), min(tokens), max(tokens), size))
    beside, faults = neighbours.around(folder)
    kinds = {fault.file: "data set" for fault in faults if not fault.file.endswith("manifest.json")}
    faults += [fault for one in seen for fault in one.contract.faults]
    faults += neighbours.together(seen, beside, whole, lost)
    kinds |= {str(one.path): one.contract.kind for one in seen}
    for fault in faults:
        report.add(kinds.get(fault.file, seen[0].contract.kind), [fault])
    if beside.layers is None:
        report.notes.append(f"{folder}: no manifest names the layers of these states; state them when you convert or train "
                            f"({ENTERING}; {LEAVING})")  # fmt: skip
    else:
        report.notes.append(f"{folder}: the last state, and layers {phrase(beside.layers)}")
    nameless = [one.path.name for one in seen if one.number is None]
    if nameless and len(nameless) < len(seen):
        report.notes.append(f"{folder}: {len(nameless):,} samples have no number in their name, first {nameless[0]}: a trainer "
                            "that counts skips them, one that takes every file learns them too")  # fmt: skip
    sound = [one for one in seen if not one.contract.faults]
    drawn = sound if read_all else draw(sound)
    report.notes.append(f"{folder}: the numbers of {len(drawn):,} of {len(seen):,} samples were looked at "
                        + ("(all that have the right shapes)" if read_all else
                           f"(first, last and evenly between, at most {DRAWN}; --all reads every one)"))  # fmt: skip
    yield from (Work(one.path, one.number, one.contract.kind, beside) for one in drawn)


def draw(rows: Sequence[Any], most: int = DRAWN) -> list[Any]:
    """The first, the last, and evenly between, at most `most`: of 31 with most = 16 every second one."""
    if len(rows) <= most:
        return list(rows)
    return [rows[round(n * (len(rows) - 1) / (most - 1))] for n in range(most)]


def _mappings(folder: Path, parts: dict[str, list[tuple[Path, contracts.Contract]]], report: Report) -> None:
    """Each d2t with the t2d of its name (t2d-8192.npy beside d2t-8192.npy), and the token frequencies."""
    first = len(report.rows)
    for path, contract in {path: contract for rows in parts.values() for path, contract in rows}.items():
        report.rows.append(Row(contract.kind, contract.version, str(path), 1, contract.signature, 0, 0, 0, path.stat().st_size))
        report.add(contract.kind, contract.faults)
    kinds = {str(path): contract.kind for rows in parts.values() for path, contract in rows}
    sound = {kind: {path.name: path for path, contract in rows if not contract.faults} for kind, rows in parts.items()}
    halves = {name.replace("d2t", "t2d"): path for name, path in sound.get("d2t", {}).items()}
    freq = next(iter(sound.get("token_freq", {}).values()), None)
    for name in sorted({*sound.get("t2d", {}), *halves}) or ([""] if freq else []):
        files = {"t2d": sound.get("t2d", {}).get(name), "d2t": halves.get(name), "token_freq": freq}
        half = files["d2t"].with_name(name) if files["d2t"] else None
        if files["t2d"] is None and half and half.is_file() and half not in [path for path, _ in parts.get("t2d", ())]:
            files["t2d"] = half  # not asked for, but the only proof of what d2t holds
        try:
            tensors = {kind: mapping.read(path, kind) if path else None for kind, path in files.items()}
        except KitError as error:
            fault = getattr(error, "fault", Fault(str(folder), "", "a mapping", str(error), "", ""))
            report.add(kinds.get(fault.file, "mapping"), [fault])
            continue
        wrong = mapping.faults(tensors["d2t"], tensors["t2d"], tensors["token_freq"],
                               {kind: str(path) for kind, path in files.items()})  # fmt: skip
        if not wrong and all(tensor is not None for tensor in tensors.values()):
            wrong = _other_counts(tensors, str(freq))
        for fault in wrong:
            report.add(kinds.get(fault.file, fault.key), [fault])
        if tensors["d2t"] is not None:
            proof = mapping.prove(tensors["d2t"], tensors["t2d"])
            report.notes.append(f"{files['d2t']}: {proof.said}")
            for place, row in enumerate(report.rows[first:], first):
                if row.where == str(files["d2t"]):
                    report.rows[place] = replace(row, contract=f"{row.contract}, {proof.convention}")


def _other_counts(tensors: dict[str, Any], file: str) -> list[Fault]:
    """A t2d that was not chosen on the token frequencies beside it, as the doctor sees it."""
    from eagle3kit import doctor

    t2d, freq = tensors["t2d"], tensors["token_freq"]
    counts = t2d.new_zeros(len(t2d), dtype=freq.dtype)
    counts[: len(freq)] = freq  # a dictionary names no token after the last one counted
    found = next(sign for sign in doctor.examine_mapping(t2d, tensors["d2t"], counts) if sign.name == "frequencies")
    return [Fault(file, "token_freq", f"at least {found.threshold:g} ({found.reason})", f"{found.number:g} ({found.note})",
                  found.effect, mapping.REBUILD)] if found.bad else []  # fmt: skip


def _draft(folder: Path, read_all: bool, report: Report) -> None:
    from eagle3kit.samples import load

    try:
        draft = contracts_draft.read(folder)
    except Unreadable as error:
        report.add("draft", [error.fault])
        return
    report.rows.append(Row("draft", draft.version, str(folder), 1, draft.signature, 0, 0, 0, draft.bytes))
    report.add("draft", draft.faults)
    wrong = {fault.key for fault in draft.faults}
    if "d2t" in draft.files and not wrong & {"d2t", "t2d", "draft_vocab_size"}:
        d2t, t2d = (mapping.some(draft.files[key], (key,))[key] if key in draft.files else None for key in ("d2t", "t2d"))
        files = {key: str(path) for key, path in draft.files.items()}
        for fault in mapping.faults(d2t, t2d, None, files, draft.vocab):  # `convert` turns mappings, not drafts
            way_out = contracts_draft.OFFSETS if fault.way_out != mapping.REBUILD else contracts_draft.RETRAIN
            report.add("draft", [fault.at(fault.file, way_out)])
        report.notes.append(f"{files['d2t']}, d2t: {mapping.prove(d2t, t2d, draft.vocab).said}")
    if not read_all:
        report.notes.append(f"{folder}: its weights are there, their numbers were not looked at (--all reads them)")
    for path in sorted(set(draft.files.values())) if read_all and not draft.faults else ():
        for key, tensor in load(path).items():
            if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                report.add("draft", [Fault(str(path), key, "finite weights", "NaN or infinite weights",
                                           "every draft token is rejected", contracts_draft.RETRAIN)])  # fmt: skip


def _dataset(folder: Path, report: Report, told: bool) -> None:
    try:
        rows = arrow_rows.Rows(folder)
        lengths, faults = rows.lengths(), rows.faults()
    except Unreadable as error:
        if error.fault not in report.faults:
            report.add("data set", [error.fault])
        return
    keys = ", ".join(f"{name} {kind}" for name, kind in zip(rows.table.schema.names, rows.table.schema.types, strict=True))
    report.rows.append(Row("data set", "Arrow (speculators 0.5 to 0.9)", str(folder), 1, keys, sum(lengths),
                           min(lengths, default=0), max(lengths, default=0), rows.bytes))  # fmt: skip
    report.add("data set", [fault for fault in faults if fault not in report.faults])
    if not told:
        report.notes.append(f"{folder}: {len(rows):,} rows; no states of them were looked at")
