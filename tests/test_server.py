"""A real vLLM server, asked directly: is what it says and hands over what transformers computes of the same weights?

One server that extracts hidden states serves all of it, for starting one is what takes long.
"""

import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import httpx
import psutil
import pytest
import torch
from tinymodel import make_tiny_target
from transformers import AutoModelForCausalLM

from eagle3kit import hidden_states, inspection, server, states_file, target
from eagle3kit.errors import KitError

pytestmark = pytest.mark.slow
LAYERS, IDS, WIDTH = 8, [0, 2, 5], 128  # id 0 is the embedding; the last state comes by itself
TEXTS = ["The quick brown fox", "def add(a, b):", "What is the capital of France?", "One, two, three; four",
         "Hello! How are you today? I am well, thank you. And you? Explain why the sky is blue, in two sentences."]  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_target(tmp_path_factory.mktemp("served") / "target", layers=LAYERS, hidden=WIDTH)


@pytest.fixture(scope="module")
def prompts(model):
    words = target.tokenizer(model)
    return [words(text, add_special_tokens=False)["input_ids"] for text in TEXTS]


@pytest.fixture(scope="module")
def transformers_model(model):
    return AutoModelForCausalLM.from_pretrained(model, dtype="float32").eval()


@pytest.fixture(scope="module")
def served(model, tmp_path_factory):
    """(the server, the folder it hands states over in); after the module: nothing of its family is left.

    Its first start meets a port that somebody else has taken; it is started again, with another.
    """
    folder = tmp_path_factory.mktemp("server")
    how = server.Settings(model=str(model), max_model_len=256, max_num_seqs=8, kv_cache_gib=1,
                          **hidden_states.server_options(IDS, LAYERS, folder / "arriving"))  # fmt: skip
    hold, wanted = server.held_port, []
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        ports = iter([nullcontext(taken.getsockname()[1])])
        patch.setattr(server, "held_port", lambda: wanted.append(1) or next(ports, None) or hold())
        running = stack.enter_context(server.serve(how, folder / "vllm.log"))
        assert len(wanted) == 2 and not running.url.endswith(f":{taken.getsockname()[1]}")
        guard = next(child for child in psutil.Process().children() if "eagle3kit.guard" in child.cmdline())
        family = [guard, *guard.children(recursive=True)]
        assert len(family) >= 3, "the guard, the server, its engine"
        yield running, folder / "arriving"
    assert not [process for process in family if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{running.url}/health", timeout=5)


def test_it_listens_on_loopback_only(served):
    port = int(served[0].url.rpartition(":")[2])
    listening = [line.split()[1] for table in ("tcp", "tcp6") for line in _table(table) if line.split()[3] == "0A"]
    own = [address for address in listening if int(address.rpartition(":")[2], 16) == port]
    assert own == [f"0100007F:{port:04X}"], "127.0.0.1, and no other address"
    # Nor does any other process of the family wait for the network: engine and workers talk over files and loopback.
    for process in psutil.Process().children(recursive=True):
        for connection in process.net_connections("inet"):
            if connection.status == psutil.CONN_LISTEN:
                assert connection.laddr.ip in ("127.0.0.1", "::1"), (process.name(), connection.laddr)


def _table(name: str) -> list[str]:
    with open(f"/proc/net/{name}", encoding="ascii") as file:
        return file.read().splitlines()[1:]


def test_a_held_port_is_given_to_nobody_but_who_asks_for_it_as_vllm_does():
    with server.held_port() as port, socket.socket() as plain, socket.socket() as as_vllm:
        with pytest.raises(OSError, match="in use"):
            plain.bind(("127.0.0.1", port))
        as_vllm.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        as_vllm.bind(("127.0.0.1", port))
        as_vllm.listen()
        socket.create_connection(("127.0.0.1", port), 5).close()
    with server.held_port() as one, server.held_port() as other:
        assert one != other


def test_greedy_tokens_are_those_of_transformers(served, prompts, model, transformers_model):
    stops = target.stops(model, target.tokenizer(model))
    said = dict(served[0].complete(prompts, max_tokens=[16, 1, 12, 16, 5], in_flight=4))
    assert sorted(said) == list(range(len(prompts)))
    for number, limit in enumerate([16, 1, 12, 16, 5]):
        ids = torch.tensor([prompts[number]])
        with torch.no_grad():
            whole = transformers_model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=limit, do_sample=False)
        assert said[number].token_ids == whole[0, len(prompts[number]) :].tolist(), TEXTS[number]
        ended = "stop" if said[number].token_ids[-1] in stops else "length"
        assert said[number].finish_reason == ended


def test_hidden_states_are_those_of_transformers(served, prompts, transformers_model):
    running, _ = served
    for index, answer in running.complete(prompts * 4, max_tokens=1, in_flight=8):
        asked = prompts[index % len(prompts)]
        ids, states = hidden_states._take(answer.extra, running)
        hidden_states.check(index, asked, ids, states, states=len(IDS) + 1, hidden_size=WIDTH)
        seen: list[torch.Tensor] = []
        hook = transformers_model.model.norm.register_forward_pre_hook(lambda _, given, seen=seen: seen.append(given[0]))
        with torch.no_grad():
            wanted = transformers_model(torch.tensor([asked]), output_hidden_states=True).hidden_states
        hook.remove()
        for place, layer in enumerate(IDS):
            torch.testing.assert_close(states[:, place], wanted[layer][0], rtol=0, atol=1e-4)
            assert (states[:, place] - wanted[layer + 1][0]).abs().max() > 1e-2, "the next layer's would be told apart"
        torch.testing.assert_close(states[:, -1], seen[0][0], rtol=0, atol=1e-4)
        assert (states[:, -1] - wanted[LAYERS][0]).abs().max() > 1e-2, "before the final norm, not after it"


def test_what_is_handed_over_is_known_to_the_inspector(served, prompts):
    running, _ = served
    answer = next(iter(running.complete(prompts[:1], max_tokens=1, in_flight=1)))[1]
    path = Path(answer.extra["hidden_states_path"])
    states_file.wait_for(path, 60)
    told = inspection.inspect([path])
    hidden_states._take(answer.extra, running)
    assert told.code == 0 and not told.faults, [fault.line for fault in told.faults]
    assert len(told.rows) == 1 and "connector" in told.rows[0].contract


def test_vllms_own_connector_hands_over_the_same_bytes(served, prompts, model, tmp_path):
    asked = [*prompts, prompts[0] + prompts[1] * 3]
    how = server.Settings(model=str(model), max_model_len=256, max_num_seqs=8, kv_cache_gib=1,
                          **hidden_states.server_options(IDS, LAYERS, tmp_path / "stock", "vllm"))  # fmt: skip
    found = {}
    with server.serve(how, tmp_path / "vllm.log") as stock:
        for running in (served[0], stock):
            for index, answer in running.complete(asked, max_tokens=1, in_flight=1):
                path, lock = Path(answer.extra["hidden_states_path"]), Path(answer.extra["hidden_states_path"] + ".lock")
                assert lock.exists() == (running is stock) == ("published_whole" not in answer.extra)
                if running is stock:
                    with open(lock, encoding="utf-8") as held:
                        fcntl.flock(held, fcntl.LOCK_SH)
                else:
                    states_file.wait_for(path, 60)
                found[running, index] = path.read_bytes()
                hidden_states._take(answer.extra, running)
    for index in range(len(asked)):
        assert found[served[0], index] == found[stock, index], f"prompt {index}"


def test_what_is_handed_over_is_removed_once_taken(served, prompts):
    running, folder = served
    before = set(folder.iterdir())
    answer = next(iter(running.complete(prompts[:1], max_tokens=1, in_flight=1)))[1]
    hidden_states._take(answer.extra, running)
    assert set(folder.iterdir()) == before


def test_a_refused_request_names_the_prompt_and_the_servers_words(served, prompts):
    with pytest.raises(KitError, match=r"prompt 1 \(300 tokens\): the server answered 400: .*256"):
        list(served[0].complete([prompts[0], [5] * 300], max_tokens=1, in_flight=1))


def test_counters_are_numbers_and_grow(served, prompts):
    running, _ = served
    before = running.counters()
    list(running.complete(prompts[:2], max_tokens=3, in_flight=2))
    until = time.monotonic() + 10
    while (grown := running.counters()["vllm:generation_tokens"] - before["vllm:generation_tokens"]) < 6:
        assert time.monotonic() < until, grown
        time.sleep(0.1)
    assert grown == 6


def test_the_family_goes_with_a_process_that_is_killed(tmp_path):
    """The guard, with something that starts quicker than vLLM but has a child in a session of its own, as vLLM may."""
    child = "import subprocess, sys, time; p = subprocess.Popen(['sleep', '600'], start_new_session=True); "
    child += "print(p.pid, flush=True); time.sleep(600)"
    asker = "import subprocess, sys, time\n"
    asker += f"g = subprocess.Popen([sys.executable, '-m', 'eagle3kit.guard', sys.executable, '-c', {child!r}],"
    asker += " stdin=subprocess.PIPE, start_new_session=True)\ntime.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", asker], stdout=subprocess.PIPE, text=True, env=_environment())
    grandchild = psutil.Process(int(process.stdout.readline()))
    family = [*psutil.Process(process.pid).children(recursive=True), grandchild]
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    _, left = psutil.wait_procs(family, timeout=30)
    assert not [other for other in left if other.status() != psutil.STATUS_ZOMBIE]


def _environment() -> dict[str, str]:
    root = os.path.dirname(os.path.dirname(server.__file__))
    return {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}


@pytest.fixture
def connector():
    """The kit's, as far as it stands beside the scheduler; blocks of 4 tokens."""
    from eagle3kit.batched_connector import BatchedHiddenStatesConnector

    one = BatchedHiddenStatesConnector.__new__(BatchedHiddenStatesConnector)
    one._block_size, one._cache_kv_group_id, one._layer_ids, one._pending_saves = 4, 1, [1, 2], {}
    one._request_filenames, one._spent = {"a": "/states/a"}, {"scheduler_s": 0.0}
    return one


@pytest.mark.parametrize("blocks", [0, 2, 3])
def test_a_request_given_up_before_its_prompt_was_computed_is_not_saved(connector, blocks):
    """vLLM says how far it came by the blocks that it holds; the end of a prompt that it never read is nowhere."""
    request = SimpleNamespace(request_id="a", prompt_token_ids=list(range(10)), kv_transfer_params=None)
    saved, told = connector.request_finished_all_groups(request, ([9] * 3, list(range(blocks))))
    assert saved == (blocks == 3) == ("a" in connector._pending_saves) == bool(told)
    assert connector._request_filenames == {}
    assert connector.request_finished_all_groups(request, ([], [])) == (False, None), "one that was never scheduled"


def test_a_connector_that_waits_for_nothing_says_so(connector):
    """It must not turn for ever: the server would seem to think."""
    connector._writers = SimpleNamespace(receive=lambda wait_s: [], under_way=lambda: 0)
    connector._kv_cache, connector._parts = SimpleNamespace(is_cuda=False), {0: 1}
    connector._rooms = SimpleNamespace(layout=SimpleNamespace(count=1), free=[])
    with pytest.raises(RuntimeError, match="nothing is being written, but of 1 rooms 1 are in use"):
        connector.account()


def test_of_servers_that_start_together_one_that_fails_takes_the_others_with_it(model, tmp_path):
    sound = server.Settings(model=str(model), max_model_len=64, max_num_seqs=2, kv_cache_gib=1)
    how = {"sound": sound, "broken": replace(sound, max_model_len=1_000_000)}  # the target has fewer positions
    logs, before = {name: tmp_path / f"{name}.log" for name in how}, psutil.Process().children(recursive=True)
    with pytest.raises(KitError, match="(?s)vLLM ended with code .*broken.log"), server.several(how, logs, at_once=True):
        raise AssertionError("not all of them run")
    assert set(psutil.Process().children(recursive=True)) <= set(before)
    assert "init engine" in (tmp_path / "sound.log").read_text(), "it was there"


def test_on_a_gpu_servers_that_start_together_are_told_their_memory(model, monkeypatch):
    here = server.interpreter.look(None)
    monkeypatch.setattr(server.interpreter, "look", lambda python: replace(here, on_cpu=False))
    settings = server.Settings(model=str(model), gpu_memory_utilization=0.6, kv_cache_gib=3)
    alone, beside = settings.command(1), replace(settings, neighbours=2).command(1)
    assert "--kv-cache-memory-bytes" not in alone and alone[alone.index("--gpu-memory-utilization") + 1] == "0.6"
    assert beside[beside.index("--kv-cache-memory-bytes") + 1] == str(3 << 30)
    assert float(beside[beside.index("--gpu-memory-utilization") + 1]) == pytest.approx(0.2)
