"""The commands on files: `inspect` and `convert`. What they find is the rooms' below; here it is printed."""

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from eagle3kit.errors import KitError

MOST_LINES = 200


def add(commands: Any) -> None:
    """Register both with a parser's subcommands."""
    inspect = commands.add_parser("inspect", help="say what files are, whether they are right, and what to do")
    inspect.add_argument("paths", nargs="+", metavar="PATH", help="files, folders or patterns; samples, mappings, drafts")
    inspect.add_argument("--all", action="store_true", help="look at the numbers of every sample, not of a drawn few")
    inspect.add_argument("--json", action="store_true", help="for machines")
    inspect.add_argument("--target", metavar="MODEL", help="add what only the target can tell: a folder, name or hub id")
    inspect.add_argument("--trust-remote-code", action="store_true", help="let the target's own code run")
    inspect.set_defaults(command=_inspect)
    convert = commands.add_parser("convert", help="samples from layout to layout, mappings from convention to convention")
    convert.add_argument("source", metavar="SRC", type=Path)
    convert.add_argument("destination", metavar="DST", type=Path)
    convert.add_argument("--to", required=True, choices=["pt", "pt-v0", "safetensors", "offsets", "absolute", "npy"])
    ids = convert.add_mutually_exclusive_group()
    ids.add_argument("--layers", metavar="3,16,28", help="the auxiliary layers, by what enters them (vLLM)")
    ids.add_argument("--layers-after", metavar="2,15,27", help="the same, by what leaves them (speculators 0.3 and 0.4)")
    convert.add_argument("--lossy", action="store_true", help="let 8-bit states become bfloat16")
    convert.set_defaults(command=_convert)


def _inspect(options: argparse.Namespace) -> int:
    from eagle3kit import inspection

    report = inspection.inspect(options.paths, read_all=options.all, target=options.target, progress=_progress,
                                trust_remote_code=options.trust_remote_code)  # fmt: skip
    if options.json:
        print(json.dumps(report.as_dict(), indent=1, allow_nan=False))
        return report.code
    print("\n".join(_lines(report)))
    return report.code


def _lines(report: Any) -> list[str]:
    """The report as text: a table, a verdict a kind, notes, signs, every fault."""
    from eagle3kit.inspection import FOREIGN

    head = ("kind", "contract", "files", "tokens", "bytes", "keys", "where")
    rows = [(row.kind, row.contract, f"{row.files:,}", _tokens(row), f"{row.bytes:,}", row.keys, row.where)
            for row in report.rows]  # fmt: skip
    widths = [max(len(line[column]) for line in [head, *rows]) for column in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in [head, *rows]]
    if not rows:
        lines = [] if report.faults else [FOREIGN]
    lines += [f"{kind}: {word}" for kind, word in report.verdicts.items()]
    lines += [f"note: {note}" for note in report.notes]
    if report.passed_over:
        listed = ", ".join(f"{count:,} {suffix}" for suffix, count in report.passed_over.items())
        lines.append(f"note: passed over as no files of this field: {listed}")
    for number, sign in enumerate(report.signs):
        if number == 0 or sign["where"] != report.signs[number - 1]["where"]:
            lines.append(f"doctor of {sign['where']}:")
        lines.append(f"doctor: {sign['line']}")
    lines += [f"fault: {fault.line}" for fault in report.faults[:MOST_LINES]]
    if len(report.faults) > MOST_LINES:
        lines.append(f"{len(report.faults) - MOST_LINES:,} more faults; --json lists all {len(report.faults):,}")
    return lines


def _tokens(row: Any) -> str:
    if not row.tokens or row.shortest == row.tokens:
        return f"{row.tokens:,}" if row.tokens else ""
    each = f"{row.shortest:,} each" if row.shortest == row.longest else f"{row.shortest:,}-{row.longest:,}"
    return f"{row.tokens:,} ({each})"


def _convert(options: argparse.Namespace) -> int:
    from eagle3kit import conversion

    done = conversion.convert(options.source, options.destination, options.to, layers=_ids(options.layers, "--layers"),
                              layers_after=_ids(options.layers_after, "--layers-after"), lossy=options.lossy,
                              progress=_progress)  # fmt: skip
    stood = f", {done.stood:,} stood already" if done.stood else ""
    print(f"{done.destination}: {done.written:,} file{'s' * (done.written != 1)} written{stood}; {done.said}")
    return 0


def _ids(text: str | None, option: str) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(part) for part in text.strip("[]").split(",")]
    except ValueError:
        raise KitError(f"{option} {text}: write layer ids with commas between, such as {option} 3,16,28") from None


def _progress(items: Iterable[Any], total: int) -> Iterable[Any]:
    """A bar on stderr, only where a person looks at it."""
    if not sys.stderr.isatty():
        return items
    from tqdm import tqdm

    return tqdm(items, total=total, unit="file", file=sys.stderr, leave=False)
