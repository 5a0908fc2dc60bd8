"""Is a server that somebody else started the one we need? Asked before the first row: version, model, room, layer ids, files."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from eagle3kit import given_states, target, versions
from eagle3kit.asking import Server, is_loopback
from eagle3kit.errors import KitError
from eagle3kit.files import read_json

if TYPE_CHECKING:
    from eagle3kit.params import Params
    from eagle3kit.server import Settings

OLDEST = (0, 10, 2)  # the first vLLM that gives token ids in its answers (vllm#22587)
PROBE = "The capital of France is Paris. One, two, three"


@dataclass(frozen=True)
class Checked:
    """A server that fits, with the name it gives the target; and what was found, in words."""

    server: Server
    words: str


def same_version(servers: Sequence[Server]) -> str:
    """The vLLM version that all of `servers` run; KitError when one does not answer or is no vLLM, or when they differ."""
    found = {one.url: _version(one) for one in servers}
    if len(set(found.values())) > 1:
        told = ", ".join(f"{url} runs {version}" for url, version in found.items())
        raise KitError(f"server.url: the servers run different versions of vLLM ({told}); what they give would be mixed in one "
                       "run; name servers of one version")  # fmt: skip
    return next(iter(found.values()))


def check(one: Server, settings: "Settings", params: "Params", storage: Path | None = None) -> Checked:
    """`one` with the model's name filled in, when it is as `settings` need it; KitError says what is not, and the way out.

    A few tokens are asked: the answer must be the served model's, and for states, of the layer ids asked for and readable here.
    `storage` is the folder of `server.shared_path`, None where none is named.
    """
    _old_enough(one, settings)
    card = _model(one, settings, params)
    one = replace(one, model=card["id"])
    room = card.get("max_model_len")
    if room is not None and settings.max_model_len and room < settings.max_model_len:
        raise KitError(f"{one.url} holds {room} tokens of prompt and answer (its max_model_len), but {settings.max_model_len} "
                       f"are needed; lower dataset.max_length, or start it anew:\n{command(settings)}")  # fmt: skip
    words = target.tokenizer(Path(settings.model), params.target.trust_remote_code)
    ids = words(PROBE, add_special_tokens=False)["input_ids"]
    _same_tokens(one, ids)
    try:
        _, answer = next(iter(one.complete([ids], max_tokens=1, in_flight=1)))
    except KitError as error:
        raise KitError(f"{one.url} does not answer a first prompt of {len(ids)} tokens: {error}{_key(one, str(error))}") from None
    if settings.kv_transfer is None:
        if answer.extra.get("hidden_states_path"):
            if storage is None:
                raise KitError(f"{one.url} writes hidden states beside every answer ({answer.extra['hidden_states_path']}), and "
                               "nobody would remove them; name that folder, as this machine sees it, in server.shared_path, or "
                               "name a server that does not extract")  # fmt: skip
            given_states.drop(answer, storage)
        return Checked(one, f"model {card['id']}, {room} tokens")
    proof = given_states.check(one, ids, answer, settings, params, command(settings))
    return Checked(one, f"model {card['id']}, {room} tokens, {proof}")


def command(settings: "Settings") -> str:
    """The command line that starts a server as needed, for a person to adapt."""
    parts = ["vllm", "serve", settings.model, "--dtype", settings.dtype, "--max-model-len", str(settings.max_model_len),
             "--no-enable-prefix-caching"]  # fmt: skip
    for name, value in (("speculative-config", settings.speculative), ("kv-transfer-config", settings.kv_transfer)):
        parts += [f"--{name}", json.dumps(value)] if value else []
    module = (settings.kv_transfer or {}).get("kv_connector_module_path")
    place = f"PYTHONPATH={shlex.quote(str(Path(__file__).resolve().parents[1]))} " if module else ""  # found by its name there
    return f"  {place}{shlex.join(parts)}"


def _ask(one: Server, path: str, **body: Any) -> httpx.Response:
    """GET, or POST where there is a body; KitError when nobody answers."""
    try:
        with one.client() as client:
            url = f"{one.url}{path}"
            return client.post(url, json=body, timeout=60) if body else client.get(url, timeout=60)
    except httpx.HTTPError as error:
        raise KitError(f"{one.url} does not answer ({type(error).__name__}: {error}); is it started, and its address right "
                       "(server.url)?") from None  # fmt: skip


def _json(reply: httpx.Response) -> dict[str, Any]:
    """The object in an answer, {} where there is none."""
    try:
        content = reply.json() if reply.status_code == 200 else {}
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def _version(one: Server) -> str:
    reply = _ask(one, "/version")
    found = _json(reply).get("version")
    if not isinstance(found, str):
        raise KitError(f"{one.url} answers, but is no vLLM server: /version gives {reply.status_code} "
                       f"{reply.text.strip()[:80]!r}; name the address that `vllm serve` prints when it starts")  # fmt: skip
    return found


def _old_enough(one: Server, settings: "Settings") -> None:
    """KitError when the server's vLLM is too old, or known to get this target's states wrong."""
    version = _version(one)
    if (versions.release(version) or OLDEST) < OLDEST:  # a build from source that tells no release is believed
        raise KitError(f"{one.url} runs vLLM {version}; the first that gives token ids in its answers is "
                       f"{'.'.join(map(str, OLDEST))}; update it, or leave server.url out")  # fmt: skip
    try:
        versions.require({"vllm": version}, read_json(Path(settings.model) / "config.json"),
                         ["extract"] if settings.kv_transfer else [])  # fmt: skip
    except KitError as error:
        raise KitError(f"{one.url}: {error}") from None


def _key(one: Server, said: str) -> str:
    """What to do about a refusal for want of a key."""
    if not any(f"answered {status}" in said for status in (401, 403)):
        return ""
    if one.key:
        return ". The key in the variable that server.api_key_env names is not the one it wants"
    return ". It wants a key: put it into an environment variable and name that in server.api_key_env"


def _model(one: Server, settings: "Settings", params: "Params") -> dict[str, Any]:
    """The card (id, root, max_model_len) of the model that is our target."""
    reply = _ask(one, "/v1/models")
    if reply.status_code in (401, 403):
        raise KitError(f"{one.url} answered {reply.status_code}{_key(one, f'answered {reply.status_code}')}")
    cards = [card for card in _json(reply).get("data") or () if isinstance(card, dict) and card.get("id")]
    named = params.server.model
    names = ", ".join(str(card["id"]) for card in cards) or "none"
    if named is not None:
        found = [card for card in cards if card["id"] == named]
        if not found:
            raise KitError(f"{one.url} has no model {named!r} (server.model); it has: {names}")
    else:
        found = [card for card in cards if not card.get("parent")]  # adapters have one
        if len(found) != 1:
            raise KitError(f"{one.url} has {len(found)} models ({names}); say in server.model which is the target")
    root, folder = str(found[0].get("root") or ""), Path(settings.model)
    there = Path(root).is_dir() and (Path(root) / "config.json").is_file() if root else False
    if there and is_loopback(one.url):
        if Path(root).resolve() != folder.resolve() and target.identity(Path(root)) != target.identity(folder):
            raise KitError(_other(one, root, settings, params))
    elif named is None and root not in (params.target.model, str(folder)):
        raise KitError(f"{_other(one, root, settings, params)}\nOr, if that is the target by another name or place, say so: "
                       f"server.model: {found[0]['id']}")  # fmt: skip
    return found[0]


def _other(one: Server, root: str, settings: "Settings", params: "Params") -> str:
    return (f"{one.url} serves {root or 'a model that it does not name'}, but the target is {params.target.model} "
            f"({settings.model}); name a server of the target in server.url, or start one:\n{command(settings)}")  # fmt: skip


def _same_tokens(one: Server, ids: list[int]) -> None:
    """The server cuts words as the target's tokenizer does; a server without the route is believed."""
    reply = _ask(one, "/tokenize", model=one.model, prompt=PROBE, add_special_tokens=False)
    theirs = _json(reply).get("tokens")
    if reply.status_code == 200 and theirs != ids:
        raise KitError(f"{one.url} cuts {PROBE!r} into the tokens {theirs}, the target's tokenizer into {ids}: it serves another "
                       "model; name a server of the target in server.url")  # fmt: skip
