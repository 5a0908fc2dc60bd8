"""Prompts shared among servers: what fails is asked again, what has died is asked no more; and servers that are none of ours."""

import contextlib
import http.server
import threading
from pathlib import Path

import pytest
from peer import completion, peer
from tinymodel import make_tiny_target

from eagle3kit import fleet, given, hidden_states, server
from eagle3kit.asking import Fleet, Server
from eagle3kit.errors import KitError
from eagle3kit.params import Params

PROMPTS = [[5, number] for number in range(20)]


@contextlib.contextmanager
def peers(folder: Path, *answers):
    """A server for each of `answers`, and a list that hears what is told."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(peer(answer, folder)) for answer in answers], []


def say(body):
    return completion([body["prompt"][1], 7])


def asked(servers, said, retries=3, in_flight=2, **options):
    found = Fleet(servers, "0.32.0", retries, said.append).complete(PROMPTS, max_tokens=2, in_flight=in_flight, **options)
    return {index: answer.token_ids for index, answer in found}


RIGHT = {number: [number, 7] for number in range(20)}


def test_rows_are_spread_and_each_is_answered_once(tmp_path):
    counts, one = [0, 0], threading.Barrier(2, timeout=20)

    def counting(place):
        def answer(body):
            counts[place] += 1
            if counts[place] == 1:
                one.wait()  # both have work at the same time
            return say(body)

        return answer

    progress = []
    with peers(tmp_path, counting(0), counting(1)) as (servers, said):
        assert asked(servers, said, report=lambda done, of: progress.append((done, of))) == RIGHT
    assert sum(counts) == 20 and min(counts) >= 1 and said == []
    assert progress == [(number, 20) for number in range(1, 21)]


def test_what_fails_is_asked_again_elsewhere_and_the_reason_is_told(tmp_path):
    failed = []

    def stumbling(body):
        if body["prompt"] not in failed:
            failed.append(body["prompt"])
            return 500, "out of luck"
        return say(body)

    with peers(tmp_path, stumbling, say) as (servers, said):
        assert asked(servers, said) == RIGHT
    assert failed and len(said) == len(failed)
    first = PROMPTS.index(failed[0])
    where = f"prompt {first} (2 tokens) failed at {servers[0].url}"
    assert f"{where}: the server answered 500: out of luck; asked again (1 of 3 times)" in said


def test_a_row_that_always_fails_ends_it_with_the_reason_and_the_way_on(tmp_path):
    def stubborn(body):
        return (503, "not this one") if body["prompt"] == PROMPTS[4] else say(body)

    with peers(tmp_path, stubborn, stubborn) as (servers, said), pytest.raises(KitError) as caught:
        asked(servers, said, retries=2)
    words = str(caught.value)
    assert words.startswith("prompt 4 (2 tokens): the server answered 503: not this one; asked 3 times in all")
    assert "(server.retries is 2)" in words
    assert "of 20 prompts of this pass are answered and kept" in words and "run the stage again" in words and len(said) == 2


def test_what_is_wrong_with_the_prompt_is_not_asked_twice(tmp_path):
    tries = []

    def strict(body):
        if body["prompt"] == PROMPTS[4]:
            tries.append(body)
            return 400, "too long"
        return say(body)

    with peers(tmp_path, strict, strict) as (servers, said), \
            pytest.raises(KitError, match=r"^prompt 4 \(2 tokens\): the server answered 400: too long$"):
        asked(servers, said)
    assert len(tries) == 1 and said == []


def test_a_server_that_dies_costs_none_of_the_tries(tmp_path):
    """One dies with requests under way: even where nothing may be asked twice, all answers come."""
    stop, many = threading.Event(), threading.Semaphore(0)

    def dying(body):
        many.release()
        stop.wait(20)
        return 500, "going down"

    with contextlib.ExitStack() as stack, peers(tmp_path, say) as (servers, said):
        gone = contextlib.ExitStack()
        stack.callback(gone.close)
        dead = gone.enter_context(peer(dying, tmp_path))
        ends = threading.Thread(target=lambda: (many.acquire(), many.acquire(), gone.close(), stop.set()))
        ends.start()
        assert asked([dead, *servers], said, retries=1) == RIGHT
        ends.join()
    assert said[0].startswith(f"{dead.url} is out: the server ") and said[0].endswith("its requests go to the others")
    assert len(said) == 1, said


def test_no_server_left_is_one_message_with_every_reason(tmp_path):
    with peers(tmp_path, say, say) as (servers, said):
        pass
    with pytest.raises(KitError) as caught:
        asked(servers, said)
    words = str(caught.value)
    assert words.startswith("no server is left that answers:\n")
    assert all(f"- {one.url}: it does not answer" in words for one in servers)
    assert "0 of 20 prompts of this pass are answered and kept" in words and "name others in server.url" in words


def test_an_answer_of_no_use_is_asked_for_again_a_bounded_number_of_times(tmp_path):
    with peers(tmp_path, say, say) as (servers, said):
        answers = Fleet(servers, "0.32.0", 2, said.append).complete(PROMPTS[:3], max_tokens=2, in_flight=1)
        seen = [index for index, _ in answers]
        assert sorted(seen) == [0, 1, 2] and answers.again(1, "no file came")  # after the last answer, too
        assert [index for index, _ in answers] == [1]
        assert answers.again(1, "no file came") and [index for index, _ in answers] == [1]
        assert not answers.again(1, "no file came") and list(answers) == []
    assert len(said) == 2 and "prompt 1 (2 tokens) failed at" in said[0] and "no file came; asked again (1 of 2 times)" in said[0]


def test_leaving_early_asks_for_no_more(tmp_path):
    count = []

    def counting(body):
        count.append(body)
        return say(body)

    with peers(tmp_path, counting, counting) as (servers, said):
        next(Fleet(servers, "0.32.0", 3, said.append).complete(PROMPTS, max_tokens=2, in_flight=1))
        assert len(count) <= 4


# ---- What is no server of ours


@contextlib.contextmanager
def website(pages: dict[str, str]):
    """A web server on loopback that knows `pages` and no others."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            text = pages.get(self.path)
            self.send_response(404 if text is None else 200)
            self.end_headers()
            self.wfile.write((text or "<h1>Not here</h1>").encode())

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as site:
        threading.Thread(target=site.serve_forever, args=(0.02,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{site.server_address[1]}"
        finally:
            site.shutdown()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_target(tmp_path_factory.mktemp("model") / "target")


def opened(model, *urls, **more):
    """What opening `urls` for answers of the target says."""
    params = Params(target={"model": str(model)}, server={"url": list(urls), **more})
    how = server.Settings.of(params, model, max_model_len=64)
    with pytest.raises(KitError) as caught, fleet.servers(params, how, Path("unused.log"), lambda line: None):
        pass
    return str(caught.value)


def test_a_port_where_nobody_listens(model):
    with website({}) as url:
        pass
    words = opened(model, url)
    assert words.startswith(f"{url} does not answer (ConnectError") and "server.url" in words and "Traceback" not in words


def test_an_address_that_is_no_vllm(model):
    with website({"/": "welcome"}) as url:
        words = opened(model, url)
    assert words.startswith(f"{url} answers, but is no vLLM server: /version gives 404") and "`vllm serve` prints" in words


def test_a_version_that_lacks_what_is_asked_of_it(model):
    with website({"/version": '{"version": "0.9.2"}'}) as url:
        words = opened(model, url)
        assert f"{url} runs vLLM 0.9.2; the first that gives token ids in its answers is 0.10.2" in words
    states = server.Settings(model=str(model), **hidden_states.server_options([2], 8, Path("unused")))
    with website({"/version": '{"version": "0.16.1"}'}) as url:
        with pytest.raises(KitError, match=f"{url}: vllm 0.16.1 cannot extract hidden states.*Use vllm 0.17.0 or newer"):
            given._old_enough(Server(url, None, 5), states)
        given._old_enough(Server(url, None, 5), server.Settings(model=str(model)))


def test_servers_of_two_versions_are_not_mixed(model):
    with website({"/version": '{"version": "0.31.0"}'}) as one, website({"/version": '{"version": "0.32.0"}'}) as two:
        words = opened(model, one, two)
    assert f"{one} runs 0.31.0, {two} runs 0.32.0" in words and "name servers of one version" in words


def test_a_key_that_is_not_set_is_named_and_one_that_is_set_is_never_shown(model, monkeypatch):
    monkeypatch.delenv("SOME_KEY", raising=False)
    assert "server.api_key_env is SOME_KEY, but that environment variable is not set" in opened(
        model, "http://127.0.0.1:9", api_key_env="SOME_KEY")  # fmt: skip
    monkeypatch.setenv("SOME_KEY", "open-sesame")
    params = Params(server={"url": "http://127.0.0.1:9", "api_key_env": "SOME_KEY"})
    (one,) = fleet.addresses(params)
    assert one.key == "open-sesame" and "open-sesame" not in repr(one) + repr(Fleet([one], "", 1, print)) + repr(params.leaves())


def test_states_need_the_folder_that_the_servers_share(tmp_path):
    own = Params(server={"url": None})
    assert fleet.storage(own, tmp_path) == tmp_path
    for more, words in (({}, "in server.shared_path"), ({"shared_path": str(tmp_path / "none")}, "which is no folder here")):
        with pytest.raises(KitError, match=words):
            fleet.storage(Params(server={"url": "http://127.0.0.1:9", **more}), tmp_path)
    assert fleet.storage(Params(server={"url": "http://h:9", "shared_path": str(tmp_path)}), tmp_path / "own") == tmp_path


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (None, None),
        ("http://127.0.0.1:8000", ["http://127.0.0.1:8000"]),
        (["http://127.0.0.1:8000/v1/", "https://gpu.example/vllm"], ["http://127.0.0.1:8000", "https://gpu.example/vllm"]),
    ],
)
def test_addresses_are_one_or_several(given, found):
    assert Params(server={"url": given}).server.url == found


def test_addresses_that_are_none_are_refused_without_showing_a_password(tmp_path):
    file = tmp_path / "p.yaml"
    for text, words in (("gpu:8000", "is not the address of a server; write it as http://127.0.0.1:8000"),
                        ("[http://a, http://a/v1]", "http://a is named twice"), ("[]", "should have at least 1 item"),
                        ("http://me:secret@gpu:8000", "name that in server.api_key_env")):  # fmt: skip
        file.write_text(f"server: {{url: {text}}}\n")
        with pytest.raises(KitError, match=words) as caught:
            Params.load(file)
        assert "server.url is" in str(caught.value) and "secret" not in str(caught.value)
