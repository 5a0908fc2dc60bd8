"""Ask vLLM over HTTP: one server, or several that share the prompts, so that one that dies costs only its own requests."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import httpx

from eagle3kit.errors import KitError
from eagle3kit.sharing import Answers, Lost

NAME = "target"  # what a server of ours calls the model in its answers
HEALTH_S = 10.0  # a server that says nothing of its health for so long is taken for dead
IDLE_S = 3.0  # after which a connection is not used again: vLLM closes one after five, perhaps just as the next request leaves
NOT_ABOUT_THE_PROMPT = (401, 403, 404, 408, 425, 429)  # of the answers 4xx: another server may well answer


@dataclass(frozen=True)
class Answer:
    """What the server gave for one prompt: its new token ids (end-of-turn included) and why it stopped."""

    token_ids: list[int]
    finish_reason: str
    extra: dict[str, Any] = field(default_factory=dict)  # kv_transfer_params, when the server extracts hidden states
    accepted_per_step: list[int] | None = None  # draft tokens accepted in each verify step, where this vLLM says so
    server: "Server | None" = field(default=None, compare=False, repr=False)  # whose answer it is


@dataclass(frozen=True)
class Server:
    """A running server; `log` is the file its output goes to, None where somebody else started it."""

    url: str
    log: Path | None
    timeout_s: float
    key: str = field(default="", repr=False)  # only who knows it may ask: others can reach the port too
    model: str = NAME
    version: str = ""  # its vLLM's, where it was looked up

    @property
    def witness(self) -> str:
        """Where to look when it fails, in words."""
        return f"see the end of its log, {self.log}" if self.log else f"see the log of {self.url}"

    def client(self) -> httpx.Client:
        """A client that knows the key, for single questions."""
        return httpx.Client(timeout=self.timeout_s, headers=self._headers(), trust_env=self._trust())

    def session(self) -> aiohttp.ClientSession:
        """The same for many requests at once; to be made and used in one loop of asyncio."""
        limit = aiohttp.ClientTimeout(total=None, sock_connect=self.timeout_s, sock_read=self.timeout_s)
        return aiohttp.ClientSession(timeout=limit, headers=self._headers(), trust_env=self._trust(),
                                     cookie_jar=aiohttp.DummyCookieJar(),
                                     connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S))  # fmt: skip

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    def _trust(self) -> bool:
        """A proxy named in the environment must not stand between us and our own loopback."""
        return not is_loopback(self.url)

    def counters(self) -> dict[str, float]:
        """vLLM's counters now, e.g. {"vllm:spec_decode_num_drafts": 100.0, "…_per_pos/0": 76.0}; use differences of two."""
        from prometheus_client.parser import text_string_to_metric_families

        with self.client() as client:
            text = client.get(f"{self.url}/metrics", timeout=60).raise_for_status().text
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            if family.type == "counter" and family.name.startswith("vllm:"):
                for sample in (s for s in family.samples if s.name.endswith("_total")):
                    position = sample.labels.get("position")
                    key = family.name + (f"/{position}" if position is not None else "")
                    found[key] = found.get(key, 0.0) + sample.value
        return found

    def healthy(self) -> bool:
        """Whether it says that its engine lives."""
        try:
            with self.client() as client:
                return client.get(f"{self.url}/health", timeout=HEALTH_S).status_code == 200
        except httpx.HTTPError:
            return False

    def complete(
        self,
        prompts: Sequence[list[int]],
        *,
        max_tokens: int | Sequence[int],
        in_flight: int,
        temperature: float = 0.0,
        seeds: Sequence[int] | None = None,
        report: Callable[[int, int], None] | None = None,
    ) -> Answers:
        """Answers to token-id prompts, as they come: (index of the prompt, Answer), `in_flight` requests at once.

        Args:
            prompts: token ids, one list a prompt.
            max_tokens: most new tokens, for all or for each.
            in_flight: requests under way at once.
            temperature: 0 = greedy.
            seeds: of the sampling, one for each prompt.
            report: called with (done, all) after each answer.

        Raises:
            KitError: a request failed, naming the prompt and the server's words.
        """
        bodies = _bodies(prompts, max_tokens, temperature, seeds)
        return Answers([self], _names(prompts), _asker(bodies), in_flight=in_flight, report=report)


@dataclass(frozen=True)
class Fleet:
    """Several servers of one model and vLLM `version` that share the prompts; `told` hears of what goes wrong. `after` is called
    with every answer, where it comes in."""

    servers: Sequence[Server]
    version: str
    retries: int
    told: Callable[[str], None]
    after: Callable[[Answer], None] | None = None

    def complete(self, prompts: Sequence[list[int]], *, max_tokens: int | Sequence[int], in_flight: int, temperature: float = 0.0,
                 seeds: Sequence[int] | None = None, report: Callable[[int, int], None] | None = None) -> Answers:  # fmt: skip
        """As `Server.complete`, with `in_flight` requests at once to each server.

        A request that fails is asked again, of another server where there is one, at most `retries` times. A server that
        has died is asked nothing more; its requests go to the others and cost none of their tries. It may come back: each
        call begins with the servers that live.

        Raises:
            KitError: a prompt that a server refuses, or that failed too often; or no server is left.
        """
        bodies = _bodies(prompts, max_tokens, temperature, seeds)
        return Answers(self.servers, _names(prompts), _asker(bodies, self.after), in_flight=in_flight, retries=self.retries,
                       told=self.told, report=report)  # fmt: skip


def is_loopback(url: str) -> bool:
    """Whether a server's address is of this machine alone."""
    host = urlsplit(url).hostname or ""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def tail(log: Path | None, lines: int = 12) -> str:
    """The last lines of a log that say something went wrong, else simply the last lines."""
    text = log.read_text(errors="replace").splitlines() if log and log.exists() else []
    telling = [line for line in text if "Error" in line or "error:" in line]
    return "\n".join((telling or text)[-lines:])


def _bodies(prompts, max_tokens, temperature, seeds) -> list[dict[str, Any]]:
    """What is sent for each prompt, but for the name of the model, which is the server's."""
    limits = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else list(max_tokens)
    return [{"prompt": prompt, "max_tokens": limits[index], "temperature": temperature, "return_token_ids": True,
             "seed": None if seeds is None else seeds[index]} for index, prompt in enumerate(prompts)]  # fmt: skip


def _names(prompts: Sequence[list[int]]) -> list[str]:
    return [f"prompt {index} ({len(prompt)} tokens)" for index, prompt in enumerate(prompts)]


def _asker(bodies: list[dict[str, Any]], after: Callable[[Answer], None] | None = None
           ) -> Callable[[Server, aiohttp.ClientSession, int], Awaitable[Answer]]:  # fmt: skip
    async def ask(server: Server, session: aiohttp.ClientSession, index: int) -> Answer:
        answer = await _ask(server, session, bodies[index])
        if after:
            await asyncio.to_thread(after, answer)  # it may read files, while other requests go on
        return answer

    return ask


async def _ask(server: Server, session: aiohttp.ClientSession, body: dict[str, Any]) -> Answer:
    """One request. Raises Lost where another try may help, KitError where none will."""
    try:
        async with session.post(f"{server.url}/v1/completions", json={"model": server.model, **body}) as reply:
            status, text = reply.status, (await reply.read()).decode(errors="replace")
    except (aiohttp.ClientError, TimeoutError) as error:
        end = f"; the end of its log, {server.log}:\n{tail(server.log)}" if server.log else ""
        raise Lost(f"the server did not answer ({type(error).__name__}){end}") from None
    if status != 200:
        said = f"the server answered {status}: {text[:400]}"
        if 400 <= status < 500 and status not in NOT_ABOUT_THE_PROMPT:
            raise KitError(said)
        raise Lost(said, gone=status in (401, 403, 404))
    try:
        content = json.loads(text)
        choice = content["choices"][0]
        spoken = (content.get("metrics") or {}).get("speculative_decoding") or {}
        return Answer(list(choice["token_ids"]), choice["finish_reason"], content.get("kv_transfer_params") or {},
                      spoken.get("per_step_accepted"), server)  # fmt: skip
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        raise Lost(f"its answer is not one of vLLM's: {text[:200]}") from None
