"""Prompts shared among servers: so many under way at each, what fails is asked again, what has died is asked no more."""

import asyncio
import contextlib
import queue
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from eagle3kit.errors import KitError

if TYPE_CHECKING:
    import aiohttp

    from eagle3kit.asking import Server

    Ask = Callable[[Server, aiohttp.ClientSession, int], Awaitable[Any]]

LONGEST_PAUSE_S = 8.0  # before a request is repeated


class Lost(Exception):
    """A request that was not answered. `gone`: nor will this server answer others."""

    def __init__(self, reason: str, gone: bool = False):
        super().__init__(reason)
        self.gone = gone


class Answers:
    """(index of the prompt, what `ask` gave for it), as they come; and `again` for an answer that turns out to be of no use.

    A walk through it may be left at any place: requests under way are not waited for.
    """

    def __init__(self, servers: "Sequence[Server]", names: Sequence[str], ask: "Ask", *, in_flight: int, retries: int = 0,
                 told: Callable[[str], None] = lambda line: None, report: Callable[[int, int], None] | None = None):  # fmt: skip
        """`names`: what each prompt is called in messages. `ask` raises Lost where another try may help, KitError where none
        will. `in_flight` requests at once to each server, each asked again at most `retries` times."""
        self._work = _Work(list(servers), names, retries, told)
        self._ask, self._in_flight, self._report = ask, in_flight, report
        self._stream: Iterator[tuple[int, Any]] = iter(())

    def __iter__(self) -> "Answers":
        return self

    def __next__(self) -> tuple[int, Any]:
        while (found := next(self._stream, None)) is None:
            if not self._work.waiting:
                raise StopIteration
            # What is under way belongs to the generator, which knows nothing of this object: leaving it ends all at once.
            self._stream = _stream(self._work, self._ask, self._in_flight, self._report)
        return found

    def again(self, index: int, reason: str) -> bool:
        """Ask for answer `index` once more, since it was of no use; False when it has had all its tries."""
        return self._work.again(index, reason)


class _Work:
    """Which prompts wait, which failed how often and where, and which servers are left."""

    def __init__(self, servers: "list[Server]", names: Sequence[str], retries: int, told: Callable[[str], None]):
        self.names, self.retries, self.told, self.servers = names, retries, told, servers
        self.living = list(servers)
        self.out: dict[str, str] = {}
        self.waiting, self.done = deque(range(len(names))), 0
        self.failures: dict[int, list[Server]] = {}
        self._from: dict[int, Server] = {}

    def take(self, load: dict[str, int], in_flight: int) -> "tuple[int, Server] | None":
        """The next prompt and the server with most room for it that has not failed it; None while none can be handed out.

        A prompt that every free server has failed waits for another, and goes round once all that live have failed it.
        """
        free = [server for server in sorted(self.living, key=lambda server: load[server.url]) if load[server.url] < in_flight]
        pairs = ((index, server) for server in free for index in self.waiting if server not in self.failures.get(index, ()))
        rest = ((index, free[0]) for index in self.waiting if free and all(one in self.failures[index] for one in self.living))
        found = next(pairs, None) or next(rest, None)
        if found:
            self.waiting.remove(found[0])
        return found

    def answered(self, index: int, server: "Server") -> None:
        self._from[index] = server
        self.done += 1

    def again(self, index: int, reason: str) -> bool:
        self.done -= 1
        return self._repeat(index, self._from[index], reason)

    def lost(self, index: int, server: "Server", lost: Lost) -> None:
        """A request of `server` failed: wait again, or raise."""
        if self.retries == 0 and len(self.servers) == 1:
            raise KitError(f"{self.names[index]}: {lost}")
        if lost.gone:
            self.waiting.appendleft(index)
            self.leave(server, str(lost))
        elif not self._repeat(index, server, str(lost)):
            tries = len(self.failures[index])
            raise KitError(f"{self.names[index]}: {lost}; asked {tries} times in all (server.retries is {self.retries}). "
                           f"{self._rest()}")  # fmt: skip

    def leave(self, server: "Server", reason: str) -> None:
        """Ask `server` nothing more; KitError when it was the last one."""
        if server in self.living:
            self.living.remove(server)
            self.out[server.url] = reason
            self.told(f"{server.url} is out: {reason}" + ("; its requests go to the others" if self.living else ""))
        if not self.living:
            reasons = "\n".join(f"- {url}: {why}" for url, why in self.out.items())
            raise KitError(f"no server is left that answers:\n{reasons}\n{self._rest()}")

    def _rest(self) -> str:
        return (f"{self.done} of {len(self.names)} prompts of this pass are answered and kept; look after the servers, or name "
                "others in server.url, and run the stage again: it goes on from there")  # fmt: skip

    def _repeat(self, index: int, server: "Server", reason: str) -> bool:
        self.failures.setdefault(index, []).append(server)
        tries = len(self.failures[index])
        if tries > self.retries:
            return False
        self.told(f"{self.names[index]} failed at {server.url}: {reason}; asked again ({tries} of {self.retries} times)")
        self.waiting.appendleft(index)
        return True


@contextlib.contextmanager
def _wires(servers: "Sequence[Server]") -> "Iterator[tuple[asyncio.AbstractEventLoop, dict[str, aiohttp.ClientSession]]]":
    """A loop in a thread of its own, and connections to each server there; what still runs in it at the end is given up.

    One thread for all requests, not one each: hundreds that wait for the interpreter's lock hold up each other, and the one that
    takes their answers, longer than servers need to answer.
    """
    known: Future = Future()

    async def stay() -> None:
        over = asyncio.Event()
        async with contextlib.AsyncExitStack() as stack:
            sessions = {server.url: await stack.enter_async_context(server.session()) for server in servers}
            known.set_result((asyncio.get_running_loop(), sessions, over))
            await over.wait()
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

    def run() -> None:
        try:
            asyncio.run(stay())
        except BaseException as error:
            if known.done():
                raise
            known.set_exception(error)

    thread = threading.Thread(target=run, name="requests", daemon=True)
    thread.start()
    loop, sessions, over = known.result()
    try:
        yield loop, sessions
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join()


def _stream(work: _Work, ask: "Ask", in_flight: int, report: Callable[[int, int], None] | None) -> Iterator[tuple[int, Any]]:
    look = work.retries > 0 or len(work.servers) > 1  # a server of our own, asked once, needs no second opinion
    if look:
        for server in [server for server in work.servers if not server.healthy()]:
            work.leave(server, "it does not answer")
    # Whoever stops listening, or meets an error, does not wait for answers that are still being written.
    with _wires(work.living) as (loop, sessions):
        running: dict[Future, tuple[int, Any]] = {}
        load = dict.fromkeys(sessions, 0)  # requests under way at each address
        over: queue.SimpleQueue[Future] = queue.SimpleQueue()
        # Only as many requests as may be under way are handed out, so that a failure or a stop ends quickly.
        while work.waiting or running:
            while found := work.take(load, in_flight):
                index, server = found
                load[server.url] += 1
                pause = min(2.0 ** len(work.failures[index]) / 4, LONGEST_PAUSE_S) if index in work.failures else 0.0
                future = asyncio.run_coroutine_threadsafe(_try(ask, server, sessions[server.url], index, pause, look), loop)
                running[future] = (index, server)
                future.add_done_callback(over.put)
            finished = [over.get()]
            with contextlib.suppress(queue.Empty):
                while True:
                    finished.append(over.get_nowait())
            for future in sorted(finished, key=lambda future: future.exception() is not None):  # none is lost to a failure
                index, server = running.pop(future)
                load[server.url] -= 1
                try:
                    answer = future.result()
                except Lost as lost:
                    work.lost(index, server, lost)
                    continue
                except KitError as error:
                    raise KitError(f"{work.names[index]}: {error}") from None
                work.answered(index, server)
                if report:
                    report(work.done, len(work.names))
                yield index, answer


async def _try(ask: "Ask", server: "Server", session: "aiohttp.ClientSession", index: int, pause: float, look: bool) -> Any:
    """One request; where it is lost and `look` is asked for, with word of whether its server still lives."""
    if pause:
        await asyncio.sleep(pause)
    try:
        return await ask(server, session, index)
    except Lost as lost:
        if look and not lost.gone and not await asyncio.to_thread(server.healthy):
            raise Lost(str(lost), gone=True) from None
        raise
