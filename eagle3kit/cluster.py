"""Several machines joined by Ray (`cluster`): join them, and see who is there.

The cluster is the user's: it was started with `ray start`, and every machine has the kit in the same environment. We join it
and leave it; nothing is started that listens, but for vLLM, on each machine's loopback, and what Ray itself needs of who joins.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from eagle3kit.errors import KitError

KNOCK_S = 10.0  # before an address is taken for dead
JOINS = 5  # how often a cluster is asked whose client's server fails to start a process for us


@dataclass(frozen=True)
class Node:
    """A machine of the cluster: Ray's id and address of it, its cores and GPUs as Ray counts them."""

    id: str
    address: str
    cpus: int
    gpus: int

    @property
    def name(self) -> str:
        """What it is called in messages, e.g. "10.0.0.7 (3fa09c)": two nodes may share an address."""
        return f"{self.address} ({self.id[:6]})"


@contextmanager
def joined(address: str) -> Iterator[Any]:
    """The module `ray`, connected to the cluster at `address` for the length of the block.

    Raises:
        KitError: Ray is not installed, or there is no such cluster.
    """
    try:
        import ray
    except ModuleNotFoundError:
        raise KitError(f"cluster is {address}, but Ray is not installed; install it on every machine: pip install "
                       "'eagle3kit[cluster]', or make setup EXTRAS=cpu,cluster") from None  # fmt: skip
    _require_open(address)
    for join in range(1, JOINS + 1):
        try:
            ray.init(address=address, log_to_driver=False, logging_level="ERROR", configure_logging=False)
            break
        except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
            if "Initialization failure from server" in str(error) and join < JOINS:
                # Ray forks the process that is to serve us from one whose threads are inside gRPC; such a child may die at
                # once (Ray 2.60; one in twenty on busy cores). The next one is a new process.
                continue
            words = " ".join(str(error).split()) or type(error).__name__
            raise KitError(f"cluster is {address}, but no Ray cluster answers there ({words[:150]} … {words[-250:]}); start it "
                           "(ray start --head), or leave cluster out") from None  # fmt: skip
    try:
        yield ray
    finally:
        ray.shutdown()


def _require_open(address: str) -> None:
    """KitError when nobody listens where the cluster should be: Ray would knock for many minutes."""
    place = os.environ.get("RAY_ADDRESS", "auto") if address == "auto" else address
    host, _, port = place.removeprefix("ray://").rpartition(":")
    if not port.isdigit():
        return  # auto: Ray looks for a cluster of this machine, and says so when there is none
    try:
        socket.create_connection((host, int(port)), KNOCK_S).close()
    except OSError as error:
        raise KitError(f"cluster is {address}, but nobody answers at {host}:{port} ({error.strerror or error}); start it (ray "
                       "start --head), or leave cluster out") from None  # fmt: skip


def nodes(ray: Any) -> list[Node]:
    """The machines that are there now, those with most GPUs and cores first."""
    found = [Node(row["NodeID"], row["NodeManagerAddress"], int(row["Resources"].get("CPU", 0)),
                  int(row["Resources"].get("GPU", 0))) for row in ray.nodes() if row["Alive"]]  # fmt: skip
    return sorted(found, key=lambda node: (-node.gpus, -node.cpus, node.id))


def on(node: Node, *, gpus: int, cpus: int = 1) -> dict[str, Any]:
    """Ray's options for something that is to run on this machine and no other."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return {"num_gpus": gpus, "num_cpus": 0 if gpus else cpus, "max_restarts": 0,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node.id, soft=False)}  # fmt: skip


def first_line(error: Exception) -> str:
    """Why Ray gave up on a worker, in a line: what its machine's Python said, where that is known."""
    words = str(getattr(error, "cause", "") or "").strip() or str(error).strip()
    telling = [line.strip() for line in words.splitlines() if "Error:" in line] or words.splitlines()[:1]
    return f"it was lost ({(telling or [type(error).__name__])[-1][:300]})"
