"""The command line: run a parameter file's notebooks, render a run's report, check a parameter file or a draft."""

import argparse
import difflib
import os
import sys
from pathlib import Path

from eagle3kit import file_commands, pipeline, places
from eagle3kit.errors import KitError
from eagle3kit.params import Params


def main(arguments: list[str] | None = None) -> int:
    """Run a command and return its exit code: 0 good, 1 a stage or report failed, 2 a mistake in what was asked."""
    options = _parser().parse_args(arguments)
    try:
        return options.command(options)
    except KitError as error:
        print(f"eagle3kit: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # who reads has read enough, as `| head` does; Python's own flush at the end must not say so again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:  # a folder that cannot be written, a disk that is full
        print(f"eagle3kit: {error.strerror}: {error.filename or 'no file named'}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="eagle3kit", description="Train and measure an EAGLE-3 draft.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    run = commands.add_parser("run", help="run every notebook that is not current, in order")
    run.add_argument("file", metavar="PARAMS", help="a parameter file, such as params/cpu.yaml")
    _override(run)
    part = run.add_mutually_exclusive_group()
    part.add_argument("--from", dest="first", metavar="STAGE", help="run again from this stage on: 06, training")
    part.add_argument("--only", metavar="STAGE", help="run only this stage, again even if it is current")
    run.set_defaults(command=_run)
    report = commands.add_parser("report", help="render the report of a run again")
    report.add_argument("run", metavar="RUN", help="a folder under outputs/")
    report.set_defaults(command=_report)
    check = commands.add_parser("check", help="check a parameter file (.yaml) or a draft directory before it is served")
    check.add_argument("file", metavar="PARAMS | DRAFT")
    _override(check)
    check.add_argument("--target", metavar="MODEL", help="of a draft: the model it drafts for (bundled name, folder or hub id)")
    check.add_argument("--reference", metavar="DRAFT", help="of a draft: one known to serve, to compare names and shapes with")
    check.add_argument("--export", metavar="DIR", help="of a draft: write what serving needs, as the --target serves it, to DIR")
    check.add_argument("--trust-remote-code", action="store_true", help="of a draft: let the target's own code run")
    check.add_argument("--gate", action="store_true", help="with PARAMS: learn one sample by heart and serve it; minutes")
    check.set_defaults(command=_check)
    file_commands.add(commands)
    return parser


def _override(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-p", dest="overrides", action="append", default=[], metavar="SECTION.KEY=VALUE", help="one value on top"
    )


def _overrides(options: argparse.Namespace) -> dict[str, str]:
    found = {}
    for text in options.overrides:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise KitError(f"-p {text}: write -p section.key=value, such as -p dataset.samples=10")
        found[name.strip()] = value
    return found


def _run(options: argparse.Namespace) -> int:
    return pipeline.run(options.file, _overrides(options), first=options.first, only=options.only)


def _report(options: argparse.Namespace) -> int:
    from eagle3kit import report

    folder = places.outputs() / options.run
    known = sorted(path.parent.name for path in places.outputs().glob("*/params.yaml"))
    if Path(options.run).name != options.run or not folder.is_dir():
        near = difflib.get_close_matches(options.run, known, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(known) or 'none yet'}"
        raise KitError(f"no run {options.run!r} in {places.shown(places.outputs())}; {hint}")
    print(f"report: {places.shown(report.render(folder))}")
    return 0


def _check(options: argparse.Namespace) -> int:
    path = Path(options.file)
    if options.gate:
        return _gate(options)
    if path.suffix not in (".yaml", ".yml") and (path.is_dir() or options.target or options.reference or options.export):
        return _check_draft(options)
    params = Params.load(options.file, _overrides(options))
    values, defaults = params.leaves(), Params().leaves()
    print(f"{options.file} is good; it differs from the defaults in:")
    for name, value in values.items():
        if value != defaults[name]:
            print(f"  {name}: {value!r} (default {defaults[name]!r})")
    return 0


def _check_draft(options: argparse.Namespace) -> int:
    """A line for everything looked at, faults last but one, the sum last; 1 when there are faults."""
    from eagle3kit import preflight, target

    preflight.require_draft(Path(options.file))
    model = None if options.target is None else target.locate(options.target, base=Path.cwd())
    code = options.trust_remote_code
    found = preflight.check(Path(options.file), model, options.reference and Path(options.reference), trust_remote_code=code)
    for one in found:
        print(one.line)
    wrong = preflight.faults(found)
    print(f"{options.file}: {preflight.summary(found)}")
    if options.export and not wrong:
        print(f"written: {preflight.export_for(Path(options.file), Path(options.export), model, code)}")
    return 1 if wrong else 0


def _gate(options: argparse.Namespace) -> int:
    from eagle3kit import gate

    params = Params.load(options.file, _overrides(options))
    folder = places.outputs() / params.run / "gate"
    found = gate.run(params, folder, lambda line: print(line, flush=True))
    print(f"{found.words}  ({places.shown(folder)})")
    return 0 if found.passed else 1


if __name__ == "__main__":
    sys.exit(main())
