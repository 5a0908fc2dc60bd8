"""The section `server`: how vLLM is started, or where it runs already."""

import re
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field

from eagle3kit.params_base import Float, Int, Section


def address(text: Any) -> str:
    """The address of a server as it is asked: "http://gpu1:8000/v1/" -> "http://gpu1:8000".

    ValueError for what is no address, and for one that holds a password: addresses are written into results.
    """
    parts = urlsplit(text) if isinstance(text, str) else None
    if parts is None or parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{text!r} is not the address of a server; write it as http://127.0.0.1:8000")
    if parts.username or parts.password or parts.query:
        raise ValueError(f"the address of {parts.hostname} holds a name, password or query, which would be written into "
                         "results; put a key into an environment variable and name that in server.api_key_env")  # fmt: skip
    return re.sub(r"/+(v1/*)?$", "", text.strip())


def _addresses(value: Any) -> Any:
    # One server is a list of one; what is no list is left for pydantic to name.
    if value is None:
        return None
    listed = [value] if isinstance(value, str) else value
    found = [address(one) for one in listed] if isinstance(listed, list) else value
    doubled = next((one for one in found if found.count(one) > 1), None) if isinstance(found, list) else None
    if doubled:
        raise ValueError(f"{doubled} is named twice; name each server once")
    return found


class Server(Section):
    """How vLLM is started, or where it runs already."""

    max_model_len: Int | None = Field(None, ge=16, description="tokens of prompt and answer; null: what is needed")
    max_num_seqs: Int = Field(64, ge=1, le=8192, description="sequences served at once")
    gpu_memory_utilization: Float = Field(0.2, gt=0, lt=1, description="share of a GPU's memory vLLM takes")
    kv_cache_gib: Int = Field(2, ge=1, le=4096, description="GiB for keys and values: on a CPU, and of servers that share a GPU")
    enforce_eager: bool = Field(True, description="no compilation, no CUDA graphs: quicker start, slower tokens")
    tensor_parallel: Int = Field(1, ge=1, le=64, description="GPUs one model is spread over")
    start_timeout_s: Int = Field(600, ge=1, description="seconds until the server must answer")
    request_timeout_s: Int = Field(600, ge=1, description="seconds until one request must be answered")
    threads: Int | None = Field(None, ge=1, le=1024, description="CPU threads of the server; null: all cores")
    python: str | None = Field(
        None, min_length=1, description="interpreter (or its environment's folder) that starts vLLM; null: the kit's own"
    )
    # Servers that run already. They answer in 02 and 03; 01, 07 and 08 measure, and start their own.
    url: Annotated[list[str] | None, BeforeValidator(_addresses)] = Field(
        None, min_length=1, description="one or several running servers of the target that share 02 and 03; null: start one"
    )
    model: str | None = Field(None, min_length=1, description="what they call the target; null: found out and compared")
    api_key_env: str | None = Field(
        None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", description="environment variable that holds their key"
    )
    shared_path: str | None = Field(
        None, min_length=1, description="folder here in which the states they write appear (their shared_storage_path)"
    )
    retries: Int = Field(3, ge=0, le=100, description="times one of their requests is asked again")
