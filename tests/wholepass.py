"""What the tests that serve and train share: a small target that has learned something, chats for it, and one whole pass.

A random target says nothing that a draft could learn, and a real one takes minutes. This one is taught two little rules in
some seconds: to recite a list from a given word on, and to recite two lists in turns.
"""

import json
import os
import random
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import yaml
from conftest import REPOSITORY, Kit
from tinymodel import make_tiny_target, make_tiny_tokenizer

LISTS = (
    "quick brown fox jumps over the lazy dog is capital of are helpful short story about that learns to count",
    "two three four five six comes after seven and eight what you today am well why sky blue in return",
)
FIRST, SECOND = (words.split() for words in LISTS)
STAGES = sorted(path.stem for path in (REPOSITORY / "notebooks").glob("[0-9][0-9]_*.ipynb"))
PARAMETERS = {
    "run": "pass",
    "dataset": {"samples": 120, "held_out_percent": 25, "max_length": 128, "max_new_tokens": 32},
    "vocabulary": {"size": 256},
    "training": {"epochs": 3, "tokens_per_step": 256, "learning_rate": 3e-3, "muon_learning_rate": 1e-2},
    "profile": {"plan_seconds": 1, "batches": [8], "contexts": [16], "steps": 5, "repeats": 5},
    "acceptance": {"prompts": 24, "max_new_tokens": 32, "resamples": 500, "servers_at_once": True},
    # One thread each: matrices this small gain nothing from a second, and threads that wait for each other waste a busy core.
    "server": {"kv_cache_gib": 1, "max_num_seqs": 32, "threads": 1},
}

# vLLM's engine computes itself instead of starting a worker, where it has one: most of a start on a CPU is imports, and this is
# one of three. The whole pass is run without it, as by users.
ONE_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


def exchange(dice: random.Random, kind: str) -> tuple[str, str]:
    """A question and its answer. "list": FIRST from a word on; "lists": FIRST and SECOND in turns, each from a word on."""
    noise = " ".join(dice.choices(FIRST + SECOND, k=3))
    start = dice.randrange(len(FIRST) - 6)
    if kind == "list":
        return f"Write {noise}: {FIRST[start]}", " ".join(FIRST[start:]) + "."
    other = dice.randrange(len(SECOND) - 6)
    turns = [word for pair in zip(FIRST[start:], SECOND[other:], strict=False) for word in pair]
    return f"Explain {noise}: {FIRST[start]} {SECOND[other]}", " ".join(turns) + "."


def write_chats(folder: Path, rows: int = 60, seed: int = 1) -> list[str]:
    """list.jsonl and lists.jsonl in `folder`, every fourth chat of two turns; their paths. One row more is unusable."""
    paths = []
    for kind in ("list", "lists"):
        dice = random.Random(f"{seed} {kind}")
        lines = []
        for number in range(rows):
            messages = []
            for question, answer in (exchange(dice, kind) for _ in range(1 + (number % 4 == 3))):
                messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            lines.append({"messages": messages})
        if kind == "list":
            lines.insert(7, {"messages": [{"role": "narrator", "content": "Once upon a time"}]})
        path = folder / f"{kind}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        paths.append(str(path))
    return paths


def make_taught_target(path: Path, steps: int = 160, seed: int = 0) -> Path:
    """A tiny Llama (8 layers of width 128, 512 tokens) that has learned `exchange`, as a model directory."""
    import torch
    from transformers import LlamaForCausalLM

    make_tiny_target(path, hidden=128, seed=seed)
    words = make_tiny_tokenizer()
    dice = random.Random(seed)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM.from_pretrained(path, dtype="float32")
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
        for _ in range(steps):
            ids, labels = zip(*(_lesson(words, dice) for _ in range(8)), strict=True)
            longest = max(map(len, ids))
            batch = torch.tensor([row + [0] * (longest - len(row)) for row in ids])
            wanted = torch.tensor([row + [-100] * (longest - len(row)) for row in labels])
            loss = model(input_ids=batch, labels=wanted).loss
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    torch.set_num_threads(threads)
    model.save_pretrained(path)
    return path


def _lesson(words, dice: random.Random) -> tuple[list[int], list[int]]:
    """Token ids of a chat of one or two turns, and the same with -100 wherever the assistant does not speak."""
    ids, labels, messages = [], [], []
    kind = dice.choice(["list", "lists"])
    for _ in range(dice.choice([1, 1, 2])):
        question, answer = exchange(dice, kind)
        messages.append({"role": "user", "content": question})
        prompt = words(words.apply_chat_template(messages, tokenize=False, add_generation_prompt=True),
                       add_special_tokens=False)["input_ids"]  # fmt: skip
        said = words(answer + "<|im_end|>", add_special_tokens=False)["input_ids"]
        labels += [-100] * (len(prompt) - len(ids)) + said
        ids = prompt + said
        messages.append({"role": "assistant", "content": answer})
    return ids, labels


@dataclass
class Ran:
    """A command that ended: its exit code, what it printed, how long it took, and every process it ever had below it."""

    code: int
    printed: str
    seconds: float
    family: set[psutil.Process] = field(repr=False)

    @property
    def lines(self) -> list[str]:
        return self.printed.splitlines()

    def left(self, seconds: float = 20) -> list[str]:
        """Processes of the family still at work after at most so many seconds."""
        until = time.monotonic() + seconds
        while (alive := list(_at_work(self.family))) and time.monotonic() < until:
            time.sleep(0.2)
        return [f"{process.pid} {process.name()}" for process in alive]


def _at_work(family: set[psutil.Process]) -> Iterator[psutil.Process]:
    for process in family:
        try:
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                yield process
        except psutil.NoSuchProcess:
            continue


@dataclass(frozen=True)
class Door:
    """The command line as a user has it, with outputs of the tests' own; it runs in `home`, which holds params.yaml."""

    home: Path
    variables: dict[str, str] = field(default_factory=lambda: dict(ONE_PROCESS))

    @property
    def outputs(self) -> Path:
        return self.home / "outputs"

    @property
    def file(self) -> Path:
        return self.home / "params.yaml"

    def write(self, **changes) -> Path:
        """params.yaml: PARAMETERS with sections of `changes` on top."""
        data = {**PARAMETERS, **changes}
        for name, section in changes.items():
            if isinstance(section, dict):
                data[name] = {**PARAMETERS.get(name, {}), **section}
        self.file.write_text(yaml.safe_dump(data))
        return self.file

    def start(self, *arguments: str | Path, module: str = "eagle3kit"):
        variables = {"EAGLE3KIT_OUTPUTS": str(self.outputs), "OMP_NUM_THREADS": "1", **self.variables}
        kit = Kit(REPOSITORY, environment=variables)
        return kit.start(*arguments, module=module, cwd=self.home)

    def run(self, *arguments: str | Path, module: str = "eagle3kit", until=None, number: int = 0, meanwhile=None,
            limit: float = 1500) -> Ran:  # fmt: skip
        """Run a command to its end, or send it signal `number` (or do what `meanwhile` does) once `until()` is true."""
        started = time.monotonic()
        process = self.start(*arguments, module=module)
        family: set[psutil.Process] = set()
        while process.poll() is None:
            try:
                family |= set(psutil.Process(process.pid).children(recursive=True))
            except psutil.NoSuchProcess:
                break
            if until is not None and until():
                meanwhile() if meanwhile else process.send_signal(number)
                until = None
            if time.monotonic() - started > limit:
                process.terminate()
                raise AssertionError(f"not done after {limit} s: {arguments}\n{process.communicate(timeout=60)[0]}")
            time.sleep(0.02 if until is not None else 0.2)
        printed = process.communicate(timeout=60)[0]
        return Ran(process.returncode, printed, time.monotonic() - started, family)

    def result(self, stage: str, run: str = "pass") -> dict:
        return json.loads((self.outputs / run / stage / "result.json").read_text())

    def copy(self, name: str, *stages: str, run: str = "pass") -> Path:
        """A run of another name with copies of finished stages: what comes after them starts from there."""
        for stage in stages:
            shutil.copytree(self.outputs / run / stage, self.outputs / name / stage, symlinks=True)
        return self.outputs / name


@dataclass
class Finished:
    """A pass that has ended: the door to its folders, the target it was made for, how it went."""

    door: Door
    target: Path
    ran: Ran

    @property
    def folder(self) -> Path:
        return self.door.outputs / "pass"

    def numbers(self, stage: str) -> dict:
        return self.door.result(stage)["numbers"]


_finished: list[Finished] = []


def finished_pass(folder: Path) -> Finished:
    """The pass, run in `folder` when first asked for and then shared by all tests of this process."""
    if not _finished:
        door = Door(folder, variables={})  # this one with nothing but what users have
        target = make_taught_target(folder / "target")
        door.write(target={"model": str(target)}, dataset={"sources": write_chats(folder)})
        _finished.append(Finished(Door(folder), target, door.run("run", door.file)))
    return _finished[0]


def tensors(path: Path) -> dict:
    """The content of a file of tensors, read with nothing of ours."""
    import torch
    from safetensors.torch import load_file

    return load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)


def is_root() -> bool:
    return os.geteuid() == 0
