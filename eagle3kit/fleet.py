"""Servers that run already (`server.url`): told apart, checked before the first row, and shared by the rows.

They answer in 02_dataset and 03_hidden_states. 01, 07 and 08 measure and start servers of their own: a draft is served by a
server that was started with it, and speed and counters mean something only where nobody else asks.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3kit import arriving, given, given_states, interpreter, places, server
from eagle3kit.asking import Fleet, Server, is_loopback
from eagle3kit.errors import KitError

if TYPE_CHECKING:
    from eagle3kit.params import Params
    from eagle3kit.server import Settings

SEVERAL = 4  # times what is under way at once must fit into memory: what has been answered waits there for its reader too


def addresses(params: "Params") -> list[Server]:
    """The servers that the parameters name, unasked; [] when the kit is to start its own.

    Raises:
        KitError: `server.api_key_env` names a variable that is not set.
    """
    asked = params.server
    key = ""
    if asked.url and asked.api_key_env:
        key = os.environ.get(asked.api_key_env, "").strip()
        if not key:
            raise KitError(f"server.api_key_env is {asked.api_key_env}, but that environment variable is not set; set it to the "
                           "servers' key, or leave the parameter out where they ask for none")  # fmt: skip
    return [Server(url, None, asked.request_timeout_s, key, asked.model or "") for url in asked.url or ()]


def version(params: "Params") -> str:
    """The version of the vLLM that 02 and 03 will ask, e.g. "0.32.0+cpu": of `server.url`, of `server.python`, or the kit's own.

    Raises:
        KitError: a server does not answer or is no vLLM, or they differ.
    """
    servers = addresses(params)
    return given.same_version(servers) if servers else interpreter.look(params.server.python).vllm


def storage(params: "Params", own: Path, at_once: int = 0) -> Path:
    """The folder in which states arrive. Where the kit starts its server: one in memory, if `at_once` bytes (`arriving.at_once`)
    fit there several times over, else `own`; `servers` removes it. With a cluster `own`; else `server.shared_path`.

    Raises:
        KitError: servers are named, but not the folder they share with us, or there is none.
    """
    if not params.server.url:
        return own if params.cluster else arriving.place(own, SEVERAL * at_once)
    if params.server.shared_path is None:
        raise KitError("server.url names servers that run already, and the states they write must be read here: name the folder "
                       "they write to (shared_storage_path of their --kv-transfer-config) in server.shared_path, as it is called "
                       "on this machine")  # fmt: skip
    folder = places.root() / Path(params.server.shared_path).expanduser()
    if not folder.is_dir():
        raise KitError(f"server.shared_path is {folder}, which is no folder here; mount what the servers write to, or mend the "
                       "path")  # fmt: skip
    return folder


@contextmanager
def servers(params: "Params", settings: "Settings", log: Path, told: Callable[[str], None], *, at_once: bool = False
            ) -> Iterator[Any]:  # fmt: skip
    """What 02 and 03 ask: the servers of `server.url` as a Fleet, checked; else one of ours, started when it is first asked or
    `at_once`.

    With `cluster`, a server on each machine of it (`cluster_servers`), started when they are first asked.

    All have `complete` and `version`. `settings` say what is needed: the target, its longest row, and for states the layer ids.
    `told` hears a line for each server, and of every request that failed.

    Raises:
        KitError: a server does not answer, is no vLLM or too old a one, serves another model, other layer ids or shorter rows, or
            what it writes cannot be read here. Each names the server, what was found, what is needed, and the way out.
    """
    if params.cluster:
        from eagle3kit import cluster_servers  # late: it needs what a shard needs

        with cluster_servers.servers(params, settings, log, told) as joined:
            yield joined
        return
    named = addresses(params)
    if not named:
        states = settings.kv_transfer and Path(settings.kv_transfer["kv_connector_extra_config"]["shared_storage_path"])
        with arriving.removed(states), (server.serve if at_once else server.on_demand)(settings, log) as own:
            yield own
        return
    same = given.same_version(named)
    ready, folder = [], storage(params, log.parent) if params.server.shared_path else None
    for one in named:
        found = given.check(one, settings, params, folder)
        told(f"{one.url}: vLLM {same}, {found.words}" + ("" if is_loopback(one.url) else "; beyond this machine"))
        ready.append(found.server)
    # A server that extracts leaves states beside every answer; where words alone are wanted, they go at once.
    after = partial(given_states.drop, storage=folder) if folder and settings.kv_transfer is None else None
    yield Fleet(ready, same, params.server.retries, told, after)
