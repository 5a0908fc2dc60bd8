"""A Ray cluster on this machine: every node a raylet of its own with an object store of its own, all on loopback.

`python twonodes.py` is the process that holds the nodes (Ray's own helper for its tests, since `ray start` listens on every
address): each line on its standard input adds a node of so many cores, and is answered with a line that tells of it.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

# Nodes and whoever joins them take 127.0.0.1 for the machine's address, and listen there alone.
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@dataclass
class Cluster:
    """The first node is the head; `raylets` are the nodes' processes by Ray's id, `address` and `client` what users write.

    `given` are variables that what runs on the nodes is to see.
    """

    given: dict[str, str] = field(default_factory=dict)
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="r", dir="/tmp")))  # names of sockets are short
    raylets: dict[str, psutil.Process] = field(default_factory=dict)
    address: str = ""
    client: str = ""

    def __enter__(self) -> "Cluster":
        here = Path(__file__).parent
        variables = {**os.environ, **LOOPBACK, **self.given, "PYTHONPATH": str(here.parent), "OMP_NUM_THREADS": "1",
                     "RAY_memory_monitor_refresh_ms": "0",  # it would end workers for the memory that others use
                     "GRPC_ENABLE_FORK_SUPPORT": "0",  # with it some processes that serve a client die as they are forked
                     "RAY_TMPDIR": str(self.folder)}  # fmt: skip
        command = [sys.executable, __file__]
        with open(self.folder / "log.txt", "wb") as log:
            self._holder = subprocess.Popen(command, env=variables, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                            stderr=log, start_new_session=True)  # fmt: skip
        return self

    def add(self, cpus: int = 1) -> str:
        """One node more; its id."""
        self._holder.stdin.write(f"{cpus}\n")
        self._holder.stdin.flush()
        while not (line := self._holder.stdout.readline()).startswith("{"):
            assert line, (self.folder / "log.txt").read_text()
        said = json.loads(line)
        self.address, self.client = said["address"], said["client"]
        self.raylets[said["id"]] = psutil.Process(said["pid"])
        while not self._open(self.client):  # the server for clients is the last to listen
            assert self._holder.poll() is None, (self.folder / "log.txt").read_text()
            time.sleep(0.1)
        return said["id"]

    @staticmethod
    def _open(client: str) -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", int(client.rpartition(":")[2])), 5):
            return True
        return False

    def kill(self, node: str) -> None:
        """As a machine that loses its power: every process of the node (so its id begins) at once, none of them asked."""
        raylet = next(process for name, process in self.raylets.items() if name.startswith(node))
        family = [raylet, *raylet.children(recursive=True)]
        for number in (signal.SIGSTOP, signal.SIGKILL):  # stopped first: none is to see another die and act on it
            for process in family:
                with suppress(psutil.Error):
                    process.send_signal(number)

    @property
    def variables(self) -> dict[str, str]:
        """What who joins needs in his environment, so that `auto` means this cluster and no other."""
        return {**LOOPBACK, "RAY_ADDRESS": self.address}

    def listened(self) -> set[str]:
        """The addresses that processes of the cluster listen on."""
        found = set()
        for process in psutil.Process(self._holder.pid).children(recursive=True):
            with suppress(psutil.Error):
                found |= {one.laddr.ip for one in process.net_connections("inet") if one.status == psutil.CONN_LISTEN}
        return found

    def __exit__(self, *_: object) -> None:
        family = psutil.Process(self._holder.pid).children(recursive=True) if self._holder.poll() is None else []
        for process in [*family, *self.raylets.values()]:
            with suppress(psutil.Error):
                process.kill()
        self._holder.kill()
        self._holder.communicate()
        psutil.wait_procs(family, timeout=10)
        shutil.rmtree(self.folder, ignore_errors=True)


def hold() -> None:
    """Add nodes as standard input asks."""
    from ray.cluster_utils import Cluster as Nodes

    nodes = Nodes()
    for line in sys.stdin:
        options = {"num_cpus": int(line), "object_store_memory": 80 * 2**20, "include_log_monitor": False, "no_monitor": True}
        if nodes.head_node is None:
            options |= {"include_dashboard": False, "ray_client_server_port": free_port()}
        node = nodes.add_node(**options)
        raylet = node.all_processes["raylet"][0].process.pid
        host = nodes.address.partition(":")[0]
        client = f"ray://{host}:{nodes.head_node._ray_params.ray_client_server_port}"
        print(json.dumps({"pid": raylet, "id": node.node_id, "address": nodes.address, "client": client}), flush=True)


if __name__ == "__main__":
    hold()
