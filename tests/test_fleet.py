"""Two real vLLM servers that the kit is only told of share its rows; one is killed at work, and nothing is missed.

They extract, which plain answers do not mind. One is started by the kit's Python and tells its layers; the other by the Python
of an environment apart, with vLLM's own connector, so that its layers must be found by computing.
"""

import json
import os
import signal
import sys
import sysconfig
import threading
import venv
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import tinystates
import torch
import wholepass
from tinymodel import make_tiny_target

from eagle3kit import fleet, given_states, hidden_states, interpreter, server, target
from eagle3kit.asking import Fleet, Server
from eagle3kit.conversations import Conversation, make_sample
from eagle3kit.errors import KitError
from eagle3kit.params import Params
from eagle3kit.regenerate import AnswerFile, regenerate
from eagle3kit.samples import Store

pytestmark = pytest.mark.slow
LAYERS, IDS, WIDTH = 8, [1, 2, 5], 128  # heads of 32: the least that vLLM attends with on a CPU


@pytest.fixture(scope="module")
def apart(tmp_path_factory) -> Path:
    """An environment of its own: a Python by another name, which finds the installed packages, but not the kit."""
    folder = tmp_path_factory.mktemp("apart") / "environment"
    venv.EnvBuilder(symlinks=True).create(folder)
    site = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder


class Two:
    """The target, the folder both servers write to, and the servers as their owner knows them."""

    def __init__(self, folder: Path, apart: Path, stack: ExitStack):
        self.model, self.shared = tinystates.lively_target(folder / "target", WIDTH), folder / "shared"
        self.shared.mkdir()
        self.folder, self.apart = folder, apart
        how = {"ours": self.settings("batched"), "other": self.settings("vllm", apart)}
        logs = {name: folder / f"{name}.log" for name in how}
        serving = stack.enter_context(server.several(how, logs, at_once=True))
        self.ours, self.other = (stack.enter_context(serving(name)) for name in how)

    def settings(self, connector: str, python: Path | None = None) -> server.Settings:
        options = hidden_states.server_options(IDS, LAYERS, self.shared, connector)
        if connector == "batched":  # blocks of another size hold the same states
            options["block_size"] = 32
        return server.Settings(model=str(self.model), max_model_len=256, max_num_seqs=8, kv_cache_gib=1, threads=1,
                               python=python and str(python), **options)  # fmt: skip

    def params(self, *servers: Server, target: Path | None = None, dtype: str = "float32", **more) -> Params:
        named = {"url": [one.url for one in servers], "api_key_env": "FLEET_KEY", "shared_path": str(self.shared), **more}
        return Params(target={"model": str(target or self.model), "dtype": dtype}, server=named,
                      dataset={"max_length": 128, "max_new_tokens": 24})  # fmt: skip

    def fleet(self, *servers: Server, said: list[str]) -> Fleet:
        """As the owner asks them: each has a key of its own, which `server.url` could not tell apart."""
        return Fleet([replace(one, log=None) for one in servers], servers[0].version, 3, said.append)


@pytest.fixture(scope="module")
def two(apart, tmp_path_factory):
    with ExitStack() as stack:
        yield Two(tmp_path_factory.mktemp("fleet"), apart, stack)


@pytest.fixture
def opened(two, monkeypatch):
    """Opens one server for the states of some layers by the parameters; what was told of it, or the error's words."""

    def run(one: Server, ids=IDS, room=200, **more) -> str:
        monkeypatch.setenv("FLEET_KEY", one.key)
        params, said = two.params(one, **more), []
        options = hidden_states.server_options(ids, LAYERS, fleet.storage(params, two.folder)) if ids else {}  # none: words
        how = server.Settings.of(params, Path(params.target.model), max_model_len=room, **options)
        try:
            with fleet.servers(params, how, two.folder / "unused.log", said.append) as found:
                assert found.version == fleet.version(params)
                return said[0]
        except KitError as error:
            return str(error)

    return run


def test_another_environments_python_is_asked_what_it_has(apart, tmp_path):
    found, own = interpreter.look(str(apart)), interpreter.look(None)
    assert found.path == str(apart / "bin" / "python") and found.prefix == str(apart) and found.apart
    assert (found.vllm, found.on_cpu) == (own.vllm, own.on_cpu)
    with found.environment() as variables:
        assert [path.name for path in Path(variables["PYTHONPATH"]).iterdir()] == ["eagle3kit"], "our packages stay ours"
    assert not Path(variables["PYTHONPATH"]).exists()
    bare = tmp_path / "bare"
    venv.EnvBuilder(symlinks=True).create(bare)
    for python, words in ((bare, "has no vLLM; install it there"), (tmp_path / "none", "does not start"),
                          ("true", "does not answer as a Python does")):  # fmt: skip
        with pytest.raises(KitError, match=f"server.python is {python}.*{words}"):
            interpreter.look(str(python))


def test_both_are_found_to_be_what_is_needed(two, opened):
    assert two.other.version == interpreter.look(None).vllm
    started = psutil.Process().children(recursive=True)
    assert any(process.cmdline()[:1] == [str(two.apart / "bin" / "python")] for process in started), "by the other Python"
    for one, how in ((two.ours, "as it says"), (two.other, "as computed here")):
        words = opened(one)
        assert words.startswith(f"{one.url}: vLLM 0.") and words.endswith(f"states of layers {IDS} and the last ({how})"), words
    before = set(two.shared.iterdir())
    for one in (two.ours, two.other):
        assert "states" not in opened(one, ids=None) and set(two.shared.iterdir()) == before
    assert "nobody would remove them; name that folder" in opened(two.ours, ids=None, shared_path=None)


def test_what_does_not_fit_is_said_with_what_was_found_and_the_way_out(two, opened, tmp_path):
    other = make_tiny_target(tmp_path / "other", hidden=WIDTH, seed=5)
    for one in (two.ours, two.other):
        words = opened(one, ids=[1, 2, 4])
        assert "gives the states of layers [1, 2, 5, 8]" in words and "but [1, 2, 4, 8] are needed" in words
        assert "vllm serve" in words and "eagle_aux_hidden_state_layer_ids" in words and "PYTHONPATH=" in words
    words = opened(two.ours, target=other)
    assert f"{two.ours.url} serves {two.model}, but the target is {other}" in words and "vllm serve" in words
    words = opened(two.ours, room=400)
    assert "holds 256 tokens of prompt and answer" in words and "400 are needed" in words
    assert "computes in float32, but target.dtype is bfloat16" in opened(two.ours, dtype="bfloat16")
    assert "has no model 'gpt' (server.model); it has: target" in opened(two.ours, model="gpt")
    assert "answered 401. The key in the variable" in opened(replace(two.ours, key="wrong"))
    words = opened(two.other, shared_path=str(tmp_path))
    assert f"which cannot be read in {tmp_path} here" in words and "server.shared_path must be the folder" in words


def test_weights_of_another_model_by_the_same_name_are_told_by_their_head(two, tmp_path):
    other = make_tiny_target(tmp_path / "other", hidden=WIDTH, seed=5)
    geometry = target.geometry(two.model)
    words = target.tokenizer(two.model)("One, two, three", add_special_tokens=False)["input_ids"]
    ((_, answer),) = two.ours.complete([words], max_tokens=1, in_flight=1)
    _, states = hidden_states._take(answer.extra, two.ours, two.shared)
    same = two.settings("batched")
    given_states._same_head(two.ours, states, answer.token_ids, geometry, same, False)
    with pytest.raises(KitError, match=r"says token \d+ where its own last state.*it serves other weights"):
        given_states._same_head(two.ours, states, answer.token_ids, geometry, replace(same, model=str(other)), False)


def test_one_is_killed_at_work_and_everything_comes_as_from_one(two, tmp_path):
    """Answers and states are asked for at the same time, of both servers; then one is no more."""
    words = target.tokenizer(two.model)
    turns = [tuple({"role": "user", "content": f"{text} {n}"} for text in ("Count to", "And on?")) for n in range(24)]
    chats = [Conversation(str(n), "here", n, messages) for n, messages in enumerate(turns)]
    texts = [f"Explain {n}: the quick brown fox jumps over {n} dogs" for n in range(60)]
    rows = [make_sample(f"s{n}", "one", words(text)["input_ids"], [(4, 9)]) for n, text in enumerate(texts)]
    manifest = hidden_states.manifest(rows, tinystates.IDENTITY, IDS, target.geometry(two.model))

    def write(asked, name: str, report=None):
        file = AnswerFile(tmp_path / f"{name}.jsonl", {"target": "tiny"})
        return regenerate(asked, words, chats, file, max_new_tokens=40, max_length=128, in_flight=2, report=report)

    def states(asked, name: str, report=None):
        store = Store(tmp_path / name, "pt")
        store.begin([row.input_ids for row in rows], [row.loss_mask for row in rows], manifest)
        hidden_states.extract(asked, rows, range(len(rows)), store, states=len(IDS) + 1, hidden_size=WIDTH, in_flight=2,
                              storage=two.shared, report=report)  # fmt: skip
        return store

    alone = write(two.ours, "alone"), states(two.ours, "states-alone")
    said, done, ready = [], Counter(), threading.Barrier(3, timeout=120)

    def reporter(what):
        def report(number, of):
            done[what] += 1
            if done[what] == 10:
                ready.wait()  # both are in the middle of it: the third who waits is the killer

        return report

    with ThreadPoolExecutor(2) as pool:
        both = two.fleet(two.ours, two.other, said=said)
        shared = [pool.submit(write, both, "both", reporter("answers")),
                  pool.submit(states, both, "states-both", reporter("states"))]  # fmt: skip
        parent = next(process for process in psutil.Process().children() if str(two.apart) in " ".join(process.cmdline()))
        ready.wait()
        every = [parent, *parent.children(recursive=True)]
        for process in parent.children():
            os.kill(process.pid, signal.SIGKILL)
        found = [future.result() for future in shared]
    # A worker below the engine learns of its end and writes what it still has: later than all answers, on a busy machine.
    assert psutil.wait_procs(every, timeout=120)[1] == []
    assert sum(f"{two.other.url} is out: " in line for line in said) >= 2, said
    assert found[0].pairs == alone[0].pairs and found[0].written == 48 and found[0].rejected == []
    assert hidden_states.missing(found[1], manifest, rows) == []
    for number, row in enumerate(rows):
        one, many = alone[1].read(number), found[1].read(number)
        assert one.input_ids.tolist() == many.input_ids.tolist() == row.input_ids
        for mine, theirs in zip(one.states, many.states, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-3)


def test_the_stages_ask_the_server_that_is_left(two, tmp_path):
    """As a user: the command line, with an address where nobody listens beside it, then the living one alone."""
    with server.held_port() as port:  # given back: nobody listens there
        door, nobody = wholepass.Door(tmp_path), f"http://127.0.0.1:{port}"
    more = {"api_key_env": "FLEET_KEY", "shared_path": str(two.shared), "kv_cache_gib": 1}
    chats = {"sources": wholepass.write_chats(tmp_path, rows=12), "samples": 20, "allowed_bad_percent": 10}
    settings = {"target": {"model": str(two.model)}, "hidden_states": {"layers": IDS, "minimum_agreement": 0.9}, "dataset": chats}
    os.environ["FLEET_KEY"], before = two.ours.key, set(two.shared.iterdir())
    try:
        door.write(server={**more, "url": [nobody, two.ours.url]}, **settings)
        ran = door.run("run", door.file, "--only", "02")
        assert ran.code == 1 and "Traceback" not in ran.printed
        assert any(f"{nobody} does not answer (ConnectError" in line for line in ran.lines), ran.printed
        door.write(server={**more, "url": two.ours.url}, **settings)
        for stage in ("02", "03"):
            ran = door.run("run", door.file, "--only", stage)
            assert ran.code == 0, ran.printed
    finally:
        del os.environ["FLEET_KEY"]
    assert set(two.shared.iterdir()) == before, "what the answers of 02 brought along is removed, what 03 asked for is taken"
    numbers = door.result("03_hidden_states")["numbers"]
    assert numbers["written"] >= 8 and numbers["agreeing"] == numbers["compared"] > 0
    manifest = door.outputs / "pass" / "03_hidden_states" / "train" / "manifest.json"
    assert json.loads(manifest.read_text())["vllm"].startswith("0.")
    kinds = (".json", ".jsonl", ".ipynb", ".txt", ".html", ".yaml")
    everything = [path for path in door.outputs.rglob("*") if path.suffix in kinds]
    assert len(everything) > 5 and not [path for path in everything if two.ours.key in path.read_text(errors="replace")]
