"""A small HTTP server on loopback that speaks the part of vLLM's protocol the kit uses; what it says is up to the test."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from eagle3kit.server import Server

Reply = dict[str, Any] | tuple[int, str]


def completion(token_ids: list[int], finish_reason: str = "length", *, states: Path | None = None,
               accepted: list[int] | None = None) -> dict[str, Any]:
    """The body of an answer: `states` is the file of an extracting server, `accepted` a count a verify step."""
    body: dict[str, Any] = {"choices": [{"token_ids": token_ids, "finish_reason": finish_reason, "text": ""}]}
    if states is not None:
        body["kv_transfer_params"] = {"hidden_states_path": str(states)}
    if accepted is not None:
        body["metrics"] = {"speculative_decoding": {"per_step_accepted": accepted}}
    return body


def counters_text(drafts: int, accepted: list[int]) -> str:
    """vLLM's counters of speculation in the text form of Prometheus."""
    name = "vllm:spec_decode_num"
    lines = [f"# TYPE {name}_drafts_total counter", f'{name}_drafts_total{{engine="0"}} {drafts}.0',
             f"# TYPE {name}_accepted_tokens_per_pos_total counter"]
    lines += [f'{name}_accepted_tokens_per_pos_total{{engine="0",position="{k}"}} {count}.0' for k, count in enumerate(accepted)]
    return "\n".join([*lines, ""])


@contextmanager
def peer(answer: Callable[[dict[str, Any]], Reply], folder: Path, metrics: Callable[[], str] = str) -> Iterator[Server]:
    """Serve until the block ends. `answer` gets the body of a request and gives a reply, or a status with a text."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            said = answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self._send(*(said if isinstance(said, tuple) else (200, json.dumps(said))))

        def do_GET(self) -> None:
            self._send(200, metrics() if self.path == "/metrics" else "")

        def _send(self, status: int, text: str) -> None:
            data = text.encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            """Nothing: pytest shows what matters."""

    class Quick(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 64

    with Quick(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield Server(f"http://127.0.0.1:{http.server_address[1]}", folder / "peer.log", 30)
        finally:
            http.shutdown()
            thread.join()
