"""All that this kit measures of a machine, part by part, in one table: the pass, and the scripts beside this one.

    PYTHONPATH=. python tests/benchmarks/measure_all.py --out DIR --params params/h200.yaml
    … --only pass,speed --pass="-p training.epochs=5" --extraction="--only plain,memory"

pass: every notebook, by `eagle3kit run`; the run is kept in DIR/outputs. speed: the draft of that run beside plain decoding and
n-gram, at several concurrencies. extraction, training, decode: the scripts of these names. What a part is to be told besides is
given as text, as above. A part that is through is not run again: after an interruption the same line goes on. DIR/summary.md
holds the table, DIR/<part>.log what a part printed, DIR/<part>/ all it found.
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from statistics import harmonic_mean

from measure_decode import Summary

from eagle3kit import __main__ as commands
from eagle3kit import cpu, machine, rungs
from eagle3kit.params import Params

PARTS = ("pass", "speed", "extraction", "training", "decode")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--params", type=Path, default=Path("params/cpu.yaml") if cpu.is_cpu() else Path("params/h200.yaml"))
    parser.add_argument("--only", default=",".join(PARTS))
    for part in PARTS:
        parser.add_argument(f"--{part}", default="", metavar="TEXT", help=f"more arguments for {part}")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no part outlives this script
    options.out = options.out.absolute()
    options.out.mkdir(parents=True, exist_ok=True)
    told = {part: shlex.split(getattr(options, part)) for part in PARTS}
    outputs = options.out / "outputs"
    folder = outputs / run_of(options.params, told["pass"])
    summary = Summary(options.out)
    summary.add("machine", gpus=[gpu["name"] for gpu in machine.gpus()], cores=len(cpu.cores()), **machine.versions())
    for part in options.only.split(","):
        if part == "pass":
            command = ["-m", "eagle3kit", "run", str(options.params)]
        else:
            script = f"measure_{'pass_speed' if part == 'speed' else part}.py"
            command = [str(Path(__file__).with_name(script)), "--out", str(options.out / part)]
            command += ["--run", str(folder)] if part == "speed" else []
        done = options.out / part / "rows.json"
        if not done.exists():
            code = run([*command, *told[part]], options.out / f"{part}.log", outputs)
            rows = of_run(folder) if part == "pass" else of_script(options.out / part)
            if code:
                rows.append({"what": "FAILED", "code": code, "log": options.out / f"{part}.log"})
            else:
                done.parent.mkdir(exist_ok=True)
                done.write_text(json.dumps(rows, default=str), encoding="utf-8")
        else:
            rows = json.loads(done.read_text(encoding="utf-8"))
        for row in rows:
            summary.add(f"{part}: {row.pop('what')}", **row)
    print(f"\n{(options.out / 'summary.md').read_text()}")


def run_of(params: Path, told: list[str]) -> str:
    """The name of the run that `eagle3kit run` makes of a parameter file, told so."""
    given = argparse.ArgumentParser(add_help=False)
    commands._override(given)
    overrides = commands._overrides(given.parse_known_args(told)[0])
    return rungs.own_run(params, overrides) or Params.load(params, overrides).run


def run(command: list[str], log: Path, outputs: Path) -> int:
    """The exit code of a part; its whole family ends with this script."""
    environment = dict(os.environ, EAGLE3KIT_OUTPUTS=str(outputs), PYTHONUNBUFFERED="1")
    with open(log, "ab") as output:
        child = subprocess.Popen([sys.executable, *command], stdout=output, stderr=subprocess.STDOUT, env=environment,
                                 start_new_session=True)  # fmt: skip
        try:
            return child.wait()
        finally:  # its own end is the kindest: it ends its engines
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGTERM)
                child.wait()


def of_script(folder: Path) -> list[dict]:
    """The rows of another script's table, as far as it came."""
    try:
        return json.loads((folder / "summary.json").read_text(encoding="utf-8"))["rows"]
    except FileNotFoundError:
        return []


def of_run(folder: Path) -> list[dict]:
    """Rows of what a run measured, by its results; each with its sample sizes and intervals."""
    found = {path.parent.name: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*/result.json"))}
    seconds = {name[:2]: one["seconds"] for name, one in found.items()}
    rows = [{"what": "seconds by stage", **{name: f"{of:.0f}" for name, of in seconds.items()},
             "sum": f"{sum(seconds.values()):.0f}"}]  # fmt: skip
    kinds = {"02_dataset": answers, "03_hidden_states": states, "06_training": training, "08_acceptance": acceptance}
    for name, rows_of in kinds.items():
        if name in found:
            rows += rows_of(found[name]["numbers"], folder / name)
    return rows


def answers(of: dict, folder: Path) -> list[dict]:
    if not of["seconds_answering"]:
        return []  # all were there
    seconds = of["seconds_answering"]
    return [{"what": "answers", "written": of["answers_written"], "new_tokens": of["new_tokens"], "seconds": f"{seconds:.1f}",
             "answers_per_second": f"{of['answers_written'] / seconds:.1f}",
             "new_tokens_per_second": f"{of['new_tokens'] / seconds:,.0f}"}]  # fmt: skip


def states(of: dict, folder: Path) -> list[dict]:
    agrees = {"next_token_agrees": f"{of['agreeing']} of {of['compared']}"}
    if not of["tokens"]:
        return [{"what": "hidden states, all there"} | agrees]
    seconds = of["seconds_extracting"]
    return [{"what": "hidden states, asked over HTTP", "samples": of["written"], "tokens": of["tokens"],
             "seconds": f"{seconds:.1f}", "tokens_per_second": f"{of['tokens'] / seconds:,.0f}",
             "MB": f"{of['bytes'] / 1e6:,.0f}"} | agrees]  # fmt: skip


def training(of: dict, folder: Path) -> list[dict]:
    epochs: dict[int, list[float]] = {}
    for step in json.loads((folder / "checkpoints" / "history.json").read_text(encoding="utf-8"))["steps"]:
        epochs.setdefault(step["epoch"], []).append(step["tokens_per_second"])
    lengths = {row["epoch"]: row["length"] for row in of["history"] if row["split"] == "held out"}
    return [{"what": "training, tokens a second by epoch (harmonic mean of its steps)",
             **{f"epoch {epoch + 1}": f"{harmonic_mean(rates):,.0f}" for epoch, rates in epochs.items()}},
            {"what": "estimated length by epoch, held out", "kept": of["best_epoch"] + 1,
             **{f"epoch {epoch + 1}": f"{length:.3f}" for epoch, length in lengths.items()},
             "drafts_of_the_kept": sum(row[0] for row in of["predicted"])}]  # fmt: skip


def acceptance(of: dict, folder: Path) -> list[dict]:
    rows = []
    for name, kind, names in (("served", "", ("acceptance_length", "acceptance_length_low", "acceptance_length_high")),
                              ("predicted", "predicted_", ("predicted_length", "predicted_low", "predicted_high"))):  # fmt: skip
        length, low, high = (of[key] for key in names)
        row = {"what": f"acceptance, {name}", "length": f"{length:.3f} ({low:.2f} to {high:.2f})"}
        shares = zip(of[f"{kind}marginal"], of[f"{kind}marginal_intervals"], strict=True)
        rows.append(row | {f"marginal {k}": f"{share:.3f} ({a:.3f} to {b:.3f})" for k, (share, (a, b)) in enumerate(shares, 1)})
    rows[0] |= {"drafts": of["drafts"], "prompts": of["prompts"], "drawn_over": of["drawn_over"]}
    low, high = of["speedup_interval"]
    speeds = {f"{way}, tokens_per_second": f"{rate:,.0f}" for way, rate in of["speeds"].items()}
    return [*rows, {"what": "speed as served", **speeds, "speedup": f"{of['speedup']:.2f} ({low:.2f} to {high:.2f})",
                    "forecast": of["forecast"]},
            {"what": "equal answers", **{f"{way} and plain": f"{same} of {all_}" for way, (same, all_) in of["equal"].items()},
             "plain and recorded": f"{of['recorded_equal']} of {of['prompts']}", "verdict": of["lossless"]}]  # fmt: skip


if __name__ == "__main__":
    main()
