"""Executed notebooks become pages that anyone can read: one a stage, and one index that answers first.

The pages need no network and no script, and show no source code. How a stage went is judged by its `result.json` and
`failure.json`, never by its notebook: an executed notebook claims success even after its kernel was killed.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from eagle3kit import places, words
from eagle3kit.errors import KitError
from eagle3kit.files import read_json, write_bytes

TEMPLATES = Path(__file__).parent / "templates"
STAGES = "[0-9][0-9]_*"
ANSWER = (  # what the index says of the stage that served the draft, each where the stage gave it
    "acceptance_length", "acceptance_length_low", "acceptance_length_high", "drafts", "prompts", "predicted_length",
    "predicted_low", "predicted_high", "tokens_per_second", "tokens_per_second_plain", "speedup", "lossless_share",
)


@dataclass(kw_only=True)
class Stage:
    """What a reader is told about one stage; every field but the name may be empty."""

    name: str
    status: str = "NOT RUN"  # DONE, FAILED, UNFINISHED (killed, or still at it) or NOT RUN
    question: str = ""
    headline: str = ""
    cause: str = ""
    log: str = ""
    time: str = ""
    finished: str = ""
    seconds: float = 0.0
    page: bool = False
    numbers: dict[str, Any] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)
    read: dict[str, Any] = field(default_factory=dict)  # parameters the stage read: path -> value
    figures: list[dict[str, Any]] = field(default_factory=list)


def render(run_dir: Path | str, notebooks: Sequence[Path] | None = None) -> Path:
    """Write `report.html` into each stage folder of a run and `index.html` beside them; the path of the index.

    `notebooks` are the sources in order, so that stages not yet run are listed with their question (None: those of the
    checkout). A page whose notebook, result and failure are as they were is left alone. KitError: no such run.
    """
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise KitError(f"no run to report on at {run_dir}; run it first, or name a folder of {run_dir.parent}")
    if notebooks is None:
        notebooks = sorted((places.root() / "notebooks").glob(f"{STAGES}.ipynb"))
    sources = {path.stem: path for path in notebooks}
    folders = {path.name for path in run_dir.glob(STAGES) if path.is_dir()}
    stages = [_stage(run_dir / name, sources.get(name), run_dir.name) for name in sorted(folders | sources.keys())]
    write_bytes(run_dir / "index.html", _index(run_dir.name, stages).encode())
    return run_dir / "index.html"


def _stage(folder: Path, source: Path | None, run: str) -> Stage:
    """One stage as its folder tells it, and its page brought up to date."""
    stage, notebook = _judge(folder)
    executed, document = None, None
    if notebook is not None:
        executed = notebook.read_bytes()
        document = _parse(executed)
    shown = document or (_parse(source.read_bytes()) if source else None)
    stage.question = _question(shown) if shown else ""
    stage.page = stage.status != "NOT RUN"
    if stage.status == "DONE" and document:
        stage.figures = _figures(document)
    if stage.page:
        _update_page(folder / "report.html", stage, executed if document else None, run)
    return stage


def _judge(folder: Path) -> tuple[Stage, Path | None]:
    """How the stage went, and the notebook that shows it."""
    stage = Stage(name=folder.name)
    result, failure = folder / "result.json", folder / "failure.json"
    try:
        found = read_json(result) if result.exists() else None
        failed = read_json(failure) if failure.exists() else None
    except KitError as error:
        found, failed = None, {"cause": str(error)}
    # Both exist when a stage was run by hand after a failed pass, or died after it left its result: the later counts.
    if found and failed and result.stat().st_mtime_ns > failure.stat().st_mtime_ns:
        failed = None
    notebooks = {name: folder / f"{name}.ipynb" for name in ("notebook", "failed", "running")}
    there = {name for name, path in notebooks.items() if path.exists()}
    if failed is None and found is None and "failed" in there:
        failed = {"cause": "The stage left no result."}
    if failed is not None:
        stage.status, shown = "FAILED", ("failed",)
        stage.cause = str(failed.get("cause") or "The stage gave no reason.").removeprefix("KitError: ")
    elif found is not None:
        stage.status, shown = "DONE", ("notebook",)
        parts = found.get("fingerprint") or {}
        stage.headline = str(found.get("headline") or "")
        stage.seconds, stage.time = _seconds(found)
        finished = str(found.get("finished") or "")
        stage.finished = finished.replace("T", " ")[:16] + (" UTC" if finished.endswith("+00:00") else "")
        stage.numbers, stage.provenance = found.get("numbers") or {}, found.get("provenance") or {}
        stage.read = parts.get("params") or found.get("params") or {}
    elif there:
        stage.status, shown = "UNFINISHED", ("running", "notebook")
        stage.cause = "It left no result: it is still at work, or it was stopped from outside."
    else:
        return stage, None
    if failed is not None:
        stage.seconds, stage.time = _seconds(failed)
    stage.log = "log.txt" if (folder / "log.txt").exists() else ""
    return stage, next((notebooks[name] for name in shown if name in there), None)


def _seconds(record: dict[str, Any]) -> tuple[float, str]:
    seconds = record.get("seconds")
    return (float(seconds), words.duration(seconds)) if isinstance(seconds, int | float) else (0.0, "")


def _parse(data: bytes) -> dict[str, Any] | None:
    """A notebook as plain JSON; None for one cut off in the middle."""
    try:
        document = json.loads(data)
    except ValueError:
        return None
    return document if isinstance(document, dict) and isinstance(document.get("cells"), list) else None


def _text(value: str | list[str]) -> str:
    return value if isinstance(value, str) else "".join(value)


def _question(document: dict[str, Any]) -> str:
    """The first heading of the first markdown cell (papermill's own notices aside)."""
    for cell in document["cells"]:
        if cell["cell_type"] == "markdown" and "papermill-error-cell-tag" not in cell["metadata"].get("tags", []):
            first = _text(cell["source"]).strip().partition("\n")[0]
            return first.lstrip("#").strip().replace("`", "").replace("*", "")
    return ""


def _figures(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The pictures of cells tagged "index"."""
    figures = []
    for cell in document["cells"]:
        for output in cell.get("outputs", []) if "index" in cell["metadata"].get("tags", []) else []:
            if "image/png" in output.get("data", {}):
                about = output.get("metadata", {}).get("image/png", {})
                png = _text(output["data"]["image/png"]).replace("\n", "")
                alt = about.get("alt") or f"Figure {len(figures) + 1}, without a description"
                figures.append({"png": png, "alt": alt, "width": about.get("width")})
    return figures


@cache
def _makers() -> bytes:
    """A digest of what the pages are made with, so that a new version of the kit renders them anew."""
    files = [Path(__file__), Path(__file__).with_name("pages.py"), *sorted(TEMPLATES.rglob("*.*"))]
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).digest()


def _update_page(page: Path, stage: Stage, executed: bytes | None, run: str) -> None:
    """Render a stage's page unless the one that is there was made from the same things."""
    told = {name: value for name, value in asdict(stage).items() if name != "figures"}
    parts = (_makers(), run.encode(), json.dumps(told, sort_keys=True, default=str).encode(), executed or b"")
    digest = hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()
    if page.exists():
        with page.open(encoding="utf-8") as file:
            if digest in file.read(400):
                return
    from eagle3kit import pages  # nbconvert takes a second or two to import: only when there is something to render

    title, body = pages.fragment(executed, stage.name, stage.question, stage.headline)
    rows, changed = _provenance([stage])
    values = {"run": run, "stage": stage, "title": title, "body": body, "rows": rows, "changed": changed}
    write_bytes(page, pages.page("stage.html.j2", digest=digest, **values).encode())


def _index(run: str, stages: list[Stage]) -> str:
    from eagle3kit import pages

    done = [stage for stage in stages if stage.status == "DONE"]
    served = next((stage for stage in reversed(done) if "acceptance_length" in stage.numbers), None)
    numbers = served.numbers if served else {}
    answer = {name: numbers.get(name) if isinstance(numbers.get(name), int | float) else None for name in ANSWER}
    ends = numbers.get("speedup_interval")
    known = isinstance(ends, list) and len(ends) == 2 and all(isinstance(end, int | float) for end in ends)
    answer["speedup_low"], answer["speedup_high"] = ends if known else (None, None)
    rows, changed = _provenance(done)
    measured = dict(_provenance([served])[0]) if served else {}
    return pages.page(
        "index.html.j2", digest="", run=run, stages=stages, answer=answer, rows=rows, changed=changed, done=len(done),
        failed=[stage for stage in stages if stage.status in ("FAILED", "UNFINISHED")],
        waiting=next((stage for stage in stages if stage.name.startswith("08_")), None),
        verdict=next((stage.headline for stage in done if stage.numbers.get("verdict")), ""),
        measured=", ".join(filter(None, (measured.get("Machine"), measured.get("Finished")))),
        time=words.duration(sum(stage.seconds for stage in stages)) if done else "",
    )


def _provenance(stages: list[Stage]) -> tuple[list[tuple[str, str]], list[tuple[str, str, str]]]:
    """Rows of (name, value) on what made these stages, and (parameter, value, default) where the two differ."""
    rows: dict[str, list[str]] = {}
    read: dict[str, Any] = {}
    for stage in stages:
        made = stage.provenance
        read |= stage.read
        if made.get("commit"):
            dirty = " with uncommitted changes" if made.get("dirty") else ""
            rows.setdefault("Commit", []).append(f"{made['commit']}{dirty}")
        rows.setdefault("Machine", []).append(_machine(made.get("machine")))
        rows.setdefault("Versions", []).append(_flat(made.get("versions")))
    if stages:
        rows["Finished"] = [max(stage.finished for stage in stages)]
    told = {name: " / ".join(dict.fromkeys(filter(None, values))) for name, values in rows.items()}
    from eagle3kit.params import Params

    usual = Params().leaves()
    changed = [(name, _plain(value), _plain(usual[name]) if name in usual else "–")
               for name, value in sorted(read.items()) if name not in usual or usual[name] != value]
    return [(name, value) for name, value in told.items() if value], changed


def _machine(machine: Any) -> str:
    """"Linux x86_64, 2 cores, 23.4 GiB, no GPU"."""
    if not isinstance(machine, dict) or not {"system", "processor", "cores", "memory_gib", "gpus"} <= machine.keys():
        return _flat(machine)
    where, gpus = f"{machine['system']} {machine['processor']}", machine["gpus"]
    cores = f"{machine['cores']} core{'' if machine['cores'] == 1 else 's'}"
    named = ", ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)) or "no GPU"
    return f"{where}, {cores}, {machine['memory_gib']} GiB, {named}"


def _flat(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_flat(inner)}" for name, inner in value.items() if inner not in (None, "", [], {}))
    return ", ".join(map(_flat, value)) if isinstance(value, list) else "" if value is None else str(value)


def _plain(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str).strip('"')
