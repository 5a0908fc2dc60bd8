"""speculators' own `speculators train` and this kit's training, side by side: the same samples, first weights, loss, attention.

    PYTHONPATH=. python tests/benchmarks/measure_training.py --out DIR [--run outputs/RUN]
    … --only speculators,whole,blocks,none,again

RUN has been through 04_vocabulary; without one the samples are random, of the lengths of chats: speed is the same, nothing is
learned. speculators: its command-line training as it comes (12 loader workers, every step logged). whole, blocks, none: the
kit's, by what is compiled (training.compile). again: as whole, with what whole has left in the compiler's cache. All start
together and compile at the same time; then each trains alone. The first epoch holds the compilation; the last is traced and
does not count; between them tokens a second, by the clock, from an idle GPU to an idle GPU. Prints after each epoch.
"""

import argparse
import contextlib
import fcntl
import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from measure_decode import Summary
from measure_extraction import lengths

from eagle3kit import cpu, draft, hidden_states, machine, pace, target, vocabulary
from eagle3kit.conversations import Sample
from eagle3kit.params import Training
from eagle3kit.samples import PER_SAMPLE, StatesSample, Store, open_store

WAYS = ("whole", "blocks", "none")  # of training.compile
SHARE = 0.98  # of the samples to train on


def invent(options: argparse.Namespace) -> None:
    """A run of random samples and a random vocabulary, in the folder `options.run`: ids like words (Zipf), states like noise."""
    import torch

    shape, draw = target.geometry(options.model), torch.Generator().manual_seed(0)
    odds = 1 / torch.arange(1.0, shape.vocab_size + 1)[torch.randperm(shape.vocab_size, generator=draw)]
    layers, samples = hidden_states.layer_ids(None, shape.layers), []
    for number, size in enumerate(lengths(options.samples, 345, 1024, 0)):
        ids, start = torch.multinomial(odds, size, replacement=True, generator=draw).tolist(), size // 3
        samples.append(Sample(str(number), "random", ids, [0] * start + [1] * (size - start), ((start, size),)))
    store = Store(options.run / "03_hidden_states" / "train", "pt")
    identity = {"target": "random", "dtype": options.dtype}
    said = hidden_states.manifest(samples, identity, layers, shape)
    store.begin([one.input_ids for one in samples], [one.loss_mask for one in samples], said)
    noise = torch.randn(len(layers) + 1, 1024, shape.hidden_size, generator=draw).to(getattr(torch, options.dtype))

    def write(number: int) -> None:
        ids, mask = (torch.tensor(part) for part in (samples[number].input_ids, samples[number].loss_mask))
        store.write(number, StatesSample(ids, mask, list(noise[:, : len(ids)])))

    list(ThreadPoolExecutor(8).map(write, range(len(samples))))
    counted = vocabulary.count_tokens([(one.input_ids, one.loss_mask) for one in samples], shape.vocab_size)
    t2d, d2t = vocabulary.build(counted, min(16384, shape.vocab_size // 3), [])
    vocabulary.write(options.run / "04_vocabulary", counted, t2d, d2t)


def prepare(options: argparse.Namespace) -> dict[str, int]:
    """The run's first samples in the layout that speculators reads: all in one folder for it, the two sides for the kit."""
    import torch

    source = open_store(options.run / "03_hidden_states" / "train")
    said = source.manifest()
    count = min(options.samples, said["samples"])
    first = int(count * SHARE)  # as speculators splits: the first ones
    rows = list(ThreadPoolExecutor(8).map(source.read, range(count)))
    ids, masks = [row.input_ids.tolist() for row in rows], [row.loss_mask.tolist() for row in rows]
    shared = {key: value for key, value in said.items() if key not in (*PER_SAMPLE, "layout", "samples")}
    for name, span in (("all", range(count)), ("train", range(first)), ("held", range(first, count))):
        store = Store(options.out / "samples" / name, "safetensors")
        own = {key: [said[key][number] for number in span] for key in PER_SAMPLE}
        store.begin([ids[number] for number in span], [masks[number] for number in span], shared | own)
        if name == "all":
            list(ThreadPoolExecutor(8).map(store.write, span, rows))
        else:
            store.path(0).parent.mkdir(exist_ok=True)
            for place, number in enumerate(span):
                with contextlib.suppress(FileExistsError):
                    os.link(Store(options.out / "samples" / "all", "safetensors").path(number), store.path(place))
    t2d, d2t = vocabulary.read(options.run / "04_vocabulary")
    model = draft.build(options.model, t2d, d2t, recipe(options, "whole"), layer_ids=said["layers"], seed=0)
    model.save_pretrained(options.out / "first")
    import numpy

    for name, mapping in (("t2d", t2d), ("d2t", d2t)):
        numpy.save(options.out / f"{name}.npy", mapping.numpy())
    weights = sum(tensor.numel() for tensor in model.parameters() if tensor.requires_grad)
    torch.save({"t2d": t2d, "d2t": d2t}, options.out / "mapping.pt")
    return {"samples": first, "tokens": sum(len(one) - 1 for one in ids[:first]), "supervised": sum(map(sum, masks[:first])),
            "weights": weights}  # fmt: skip


def recipe(options: argparse.Namespace, compile: str) -> Training:
    names = ("epochs", "tokens_per_step", "attention", "dtype", "optimizer")
    return Training(weight_decay=0.1, compile=compile, **{name: getattr(options, name) for name in names})


# ---- A child: one training, watched


class Watch:
    """Takes the place of an epoch's loop, times it, and says so; from the second epoch on it has the machine alone."""

    def __init__(self, options: argparse.Namespace):
        self.options, self.lock, self.losses, self.tokens, self.profile = options, None, [], [], None
        self.started = time.monotonic()

    def around(self, loop):
        def watched(trainer, epoch: int, *more, **named):
            import torch

            model = getattr(trainer.model, "module", trainer.model)
            hook = model.register_forward_hook(self.seen, with_kwargs=True)
            if epoch and self.lock is None:
                self.wait_for_the_others()
                self.lock = open(self.options.lock, "a", encoding="utf-8")  # noqa: SIM115 - held until the last epoch is over
                fcntl.flock(self.lock, fcntl.LOCK_EX)
            self.last = epoch == self.options.epochs - 1
            synchronize()
            begun = time.perf_counter()
            result = loop(trainer, epoch, *more, **named)
            synchronize()
            seconds = time.perf_counter() - begun
            hook.remove()
            losses, tokens = torch.stack(self.losses).float().cpu(), int(torch.stack(self.tokens).sum())
            say({"epoch": epoch, "seconds": seconds, "steps": len(losses), "tokens": tokens, "loss": float(losses.mean()),
                 "first_loss": float(losses[0]), "last_loss": float(losses[-1]), "since_start": time.monotonic() - self.started,
                 "profile": self.profile and self.told(), "memory_gb": memory_gb()})  # fmt: skip
            self.losses.clear(), self.tokens.clear()
            if not epoch:
                (self.options.out / f"{self.options.child}.warm").touch()
            if self.last and self.lock:
                self.lock.close()
            return result

        return watched

    def seen(self, module, args, named, output) -> None:
        if not module.training:
            return
        self.losses.append(output[1].detach())
        self.tokens.append((named["document_ids"] >= 0).sum())
        if self.last and len(self.losses) in (4, 12):
            self.trace(len(self.losses) == 4)

    def trace(self, begin: bool) -> None:
        import torch
        from torch.profiler import ProfilerActivity as Activity

        synchronize()
        if begin:
            self.profile = torch.profiler.profile(activities=[Activity.CPU, *([] if cpu.is_cpu() else [Activity.CUDA])])
            self.profile.start()
            self.traced = time.perf_counter()
        elif self.profile:
            self.traced = time.perf_counter() - self.traced
            self.profile.stop()

    def told(self) -> dict:
        """Of one of the eight traced steps: milliseconds by the clock, of work on the device, and its dearest kernels."""
        device = "cpu" if cpu.is_cpu() else "device"
        every = [row for row in self.profile.key_averages() if cpu.is_cpu() or on_device(row)]
        rows = [(getattr(row, f"self_{device}_time_total") / 8000, row.count / 8, row.key[:70]) for row in every]
        rows = sorted((row for row in rows if row[0]), reverse=True)
        return {"clock_ms": 1000 * self.traced / 8, "busy_ms": sum(row[0] for row in rows), "dearest": rows[:14]}

    def wait_for_the_others(self) -> None:
        until = time.monotonic() + self.options.patience
        for name in self.options.partners.split(","):
            while not (self.options.out / f"{name}.warm").exists() and time.monotonic() < until:
                time.sleep(0.2)


def on_device(row) -> bool:
    """Whether a row of the profile is a kernel or a copy: not the operator that began it, nor a name given to a stretch of time,
    whose device time would be counted twice."""
    return "CUDA" in str(row.device_type) and not getattr(row, "is_user_annotation", False)


def synchronize() -> None:
    import torch

    if not cpu.is_cpu():
        torch.cuda.synchronize()


def memory_gb() -> float:
    import torch

    return 0.0 if cpu.is_cpu() else torch.cuda.max_memory_allocated() / 1e9


def say(what: dict) -> None:
    print("@" + json.dumps(what), flush=True)


def child(options: argparse.Namespace) -> None:
    from speculators.train.trainer import Trainer

    watch, mine = Watch(options), recipe(options, options.child if options.child in WAYS else "whole")
    Trainer.train_epoch, pace.epoch = watch.around(Trainer.train_epoch), watch.around(pace.epoch)
    if options.child.startswith("speculators"):
        by_speculators(options, mine)
    else:
        by_the_kit(options, mine)
    with contextlib.suppress(Exception):
        from torch._dynamo.utils import compile_times

        names, values = compile_times(repr="csv", aggregate=True)
        say({"compiler": dict(sorted(zip(names, map(float, values), strict=True), key=lambda item: -item[1])[:8])})


def by_speculators(options: argparse.Namespace, mine: Training) -> None:
    """What the command `speculators train` calls, with these flags."""
    from speculators.train.cli import main as train
    from speculators.train.config import TrainConfig

    flags = {
        "speculator-type": "eagle3", "verifier-name-or-path": options.model, "from-pretrained": options.out / "first",
        "d2t-path": options.out / "d2t.npy", "t2d-path": options.out / "t2d.npy", "data-path": options.out / "samples" / "all",
        "on-missing": "raise", "train-data-ratio": SHARE, "total-seq-len": mine.tokens_per_step,
        "hidden-states-dtype": mine.dtype,
        "draft-attn-impl": mine.attention, "loss-fn": mine.loss, "loss-implementation": mine.loss_implementation,
        "ttt-steps": mine.draft_steps, "ttt-step-loss-decay": mine.step_loss_decay, "optimizer": mine.optimizer,
        "lr": mine.learning_rate, "muon-lr": mine.muon_learning_rate, "weight-decay": mine.weight_decay,
        "muon-weight-decay": mine.weight_decay, "scheduler-type": mine.scheduler,
        "scheduler-warmup-ratio": mine.warmup_percent / 100, "epochs": mine.epochs, "seed": 0, "num-workers": options.workers,
        "save-path": options.out / f"checkpoints-{options.child}", "log-freq": 20 if options.child == "speculators-quiet" else 1,
    }  # fmt: skip
    with cpu.trainable():
        train(TrainConfig.resolve([part for name, value in flags.items() for part in (f"--{name}", str(value))]))


def by_the_kit(options: argparse.Namespace, mine: Training) -> None:
    import torch

    from eagle3kit import training

    train, held = (open_store(options.out / "samples" / name) for name in ("train", "held"))
    maps = torch.load(options.out / "mapping.pt", weights_only=True)
    model = draft.build(options.model, maps["t2d"], maps["d2t"], mine, layer_ids=train.manifest()["layers"], seed=0)
    fitted = training.fit(model, train, held, options.out / f"checkpoints-{options.child}", mine, seed=0, report=lambda row: None,
                          told=lambda line: print(line, flush=True))  # fmt: skip
    say({"lengths": [row["length"] for row in fitted.history if row["split"] == "held out" and row["draft_step"] == 0]})


# ---- The parent


def run(options: argparse.Namespace, name: str, partners: list[str], got: dict, summary: Summary) -> None:
    """One child from start to end; a row an epoch."""
    cache = options.out / "compiled" / ("whole" if name == "again" else name)
    known = dict(os.environ, TORCHINDUCTOR_CACHE_DIR=str(cache), TRITON_CACHE_DIR=str(cache / "triton"))
    command = [sys.executable, __file__, "--child", name, "--partners", ",".join(partners), "--out", str(options.out), "--run",
               str(options.run), "--model", str(options.model), "--lock", str(options.lock), "--epochs", str(options.epochs),
               "--tokens-per-step", str(options.tokens_per_step), "--attention", options.attention, "--dtype", options.dtype,
               "--optimizer", options.optimizer, "--workers", str(options.workers),
               "--patience", str(options.patience)]  # fmt: skip
    log = options.out / f"{name}.log"
    with open(log, "wb") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=known, start_new_session=True)
        clock = threading.Timer(options.timeout, process.kill)
        clock.start()
        for line in process.stdout:
            if '@{"' in line:  # after what a progress bar may have left of its line
                row = json.loads(line[line.index('@{"') + 1 :])
                got.setdefault(name, []).append(row)
                summary.data["trainings"] = got
                summary.add(name, **{key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()
                                     if key != "profile"})  # fmt: skip
        code = process.wait()
        clock.cancel()
    (options.out / f"{name}.warm").touch()  # nobody waits for what has ended
    if code:
        every = [part for part in log.read_text(errors="replace").splitlines() if part.strip()]
        said = [part for part in every if "Error" in part] or every
        summary.add(f"{name}: ended with {code}", said=" | ".join(said[-2:])[-400:])


def table(summary: Summary, got: dict) -> None:
    """What it comes to."""
    speeds = {}
    for name, rows in got.items():
        epochs = [row for row in rows if "epoch" in row]
        middle = sorted(row["tokens"] / row["seconds"] for row in epochs[1:-1])
        if not middle:
            continue
        speeds[name] = middle[len(middle) // 2]
        first, steady = epochs[0]["seconds"], epochs[0]["tokens"] / speeds[name]
        traced = (epochs[-1].get("profile") or {}) if len(epochs) > 1 else {}
        summary.add(f"{name}: comes to", tokens_per_second=f"{speeds[name]:,.0f}", all_epochs=[round(one) for one in middle],
                    first_epoch=f"{first:.1f} s", of_it_compilation=f"{first - steady:.1f} s",
                    last_loss=f"{epochs[-1]['loss']:.4f}", first_loss=f"{epochs[0]['first_loss']:.4f}",
                    step_ms=f"{traced.get('clock_ms', 0):.1f}", busy_ms=f"{traced.get('busy_ms', 0):.1f}",
                    memory_gb=f"{epochs[-1]['memory_gb']:.1f}")  # fmt: skip
        for ms, count, key in traced.get("dearest", [])[:10]:
            summary.add(f"{name}: a step", kernel=key, ms=f"{ms:.3f}", times=f"{count:.1f}")
    for name in speeds.keys() - {"speculators"}:
        if "speculators" in speeds:
            summary.add(f"{name} against speculators", ratio=f"{speeds[name] / speeds['speculators']:.2f}")
    for name in speeds.keys() & {"blocks", "none"} if "whole" in speeds else ():
        waits = [got[way][0]["seconds"] - got[way][0]["tokens"] / speeds[way] for way in ("whole", name)]
        saved = 1 / speeds[name] - 1 / speeds["whole"]
        even = (waits[0] - waits[1]) / saved if saved > 0 else float("inf")
        summary.add(f"whole against {name}: worth its compilation from", tokens=f"{even:,.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--run", type=Path, help="the folder of a run of the kit; without one: random samples")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="the run's target: a bundled name or a folder")
    parser.add_argument("--only", default="speculators,whole,blocks,again")
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--epochs", type=int, default=4, help="at least three")
    parser.add_argument("--tokens-per-step", type=int, default=1024 if cpu.is_cpu() else 8192)
    parser.add_argument("--attention", default="sdpa" if cpu.is_cpu() else "simple_flex_attention")
    parser.add_argument("--dtype", default="float32" if cpu.is_cpu() else "bfloat16")
    parser.add_argument("--optimizer", default="muon")
    parser.add_argument("--workers", type=int, default=0 if cpu.is_cpu() else 12, help="loader workers of speculators")
    parser.add_argument("--lock", type=Path, help="a file that is locked while one trains alone")
    parser.add_argument("--patience", type=float, default=240, help="seconds that one waits for the others to have compiled")
    parser.add_argument("--timeout", type=float, default=420, help="seconds for one training")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--partners", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.out = options.out.absolute()
    invented, options.run = options.run is None, (options.run or options.out / "random").absolute()
    if options.child:
        return child(options)
    options.lock = (options.lock or options.out / "lock").absolute()
    summary = Summary(options.out)
    options.model = target.locate(options.model)
    summary.data |= {"versions": machine.versions(), "options": vars(options)}
    summary.add("machine", gpus=[gpu["name"] for gpu in machine.gpus()], cores=len(cpu.cores()), **machine.versions())
    if invented:
        invent(options)
    summary.add("samples", random=invented, **prepare(options))
    got: dict[str, list[dict]] = {}
    names = options.only.split(",")
    together = [name for name in names if name != "again"]
    threads = [threading.Thread(target=run, args=(options, name, together, got, summary)) for name in together]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    table(summary, got)
    if "again" in names:
        run(options, "again", ["again"], got, summary)
        table(summary, got)
    print(f"\n{(options.out / 'summary.md').read_text()}")


if __name__ == "__main__":
    main()
