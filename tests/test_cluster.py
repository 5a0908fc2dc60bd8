"""Two machines joined by Ray, one of them lost midway: 02, 03 and 06 end as on one machine.

The machines are raylets of this one, each with its own object store; everything else is what users run: the command line,
papermill, vLLM on every node. One request at a time, for company in a batch rounds the last bits otherwise.
"""

import hashlib
import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import tinystates
import torch
import wholepass
from twonodes import Cluster
from wholepass import ONE_PROCESS, Door, Ran, make_taught_target, tensors, write_chats

from eagle3kit import cluster, server, shards, training, vocabulary
from eagle3kit.conversations import read_samples
from eagle3kit.errors import KitError
from eagle3kit.params import Params, Training
from eagle3kit.samples import open_store

pytestmark = pytest.mark.slow
torch.set_num_threads(1)
SAMPLES = 60


@dataclass
class Together:
    """The stages of one run alone and of one run together, and what the command line said."""

    door: Door
    alone: Door  # outputs of its own: a run takes what another of the same outputs has made
    target: Path
    ran: dict[str, Ran] = field(default_factory=dict)
    listened: set[str] = field(default_factory=set)
    lost: str = ""
    by_client: bytes | None = None

    def run(self, name: str, *arguments: str | Path, door: Door | None = None, **how) -> None:
        door = door or self.door
        ran = self.ran[name] = door.run("run", door.file, *arguments, **how)
        assert ran.code == 0, (name, ran.printed)

    def log(self, stage: str) -> Path:
        return self.door.outputs / "together" / stage / "log.txt"

    def text(self, stage: str) -> str:
        return self.log(stage).read_text()


@pytest.fixture(scope="module")
def together(tmp_path_factory) -> Together:
    home = tmp_path_factory.mktemp("together")
    found = Together(Door(home), Door(tmp_path_factory.mktemp("alone")), make_taught_target(home / "target"))
    sources = write_chats(home)
    for door, run in ((found.door, "together"), (found.alone, "alone")):
        door.write(run=run, target={"model": str(found.target)},
                   dataset={"sources": sources, "samples": SAMPLES, "in_flight": 1}, hidden_states={"in_flight": 1},
                   training={"epochs": 2})  # fmt: skip
    with Cluster(ONE_PROCESS) as nodes, pytest.MonkeyPatch.context() as variables:
        nodes.add(cpus=0)  # the head: it only knows who is there
        workers = [nodes.add(), nodes.add()]
        for name, value in nodes.variables.items():
            variables.setenv(name, value)
        with cluster.joined(nodes.client) as ray:
            where = cluster.on(cluster.nodes(ray)[0], gpus=0, cpus=0)
            found.by_client = ray.get(ray.remote(shards.Worker).options(**where).remote().log.remote())
        found.run("02", "-p", "cluster=auto", "--only", "02")
        place = home / "outputs/together/03_hidden_states"

        def lose_a_busy_one() -> None:
            found.lost = answering(place / "log.txt")[0]
            nodes.kill(found.lost)

        found.run("03", "-p", "cluster=auto", "--only", "03", until=lambda: len(list(place.glob("*/data_*.pt"))) > 4,
                  meanwhile=lose_a_busy_one)  # fmt: skip
        assert any(node.startswith(found.lost) for node in workers)
        found.run("04", "-p", "cluster=auto", "--only", "04")
        found.run("06", "-p", "cluster=auto", "--only", "06")
        found.listened = nodes.listened()
    for stage in ("02", "03"):
        found.run(f"alone {stage}", "--only", stage, door=found.alone)
    return found


def answering(log: Path) -> list[str]:
    """How the ids of the nodes begin whose servers answer, in order."""
    return re.findall(r"127.0.0.1 \((\w+)\): vLLM \S+ answers", log.read_text())


def hashes(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("*/data_*.pt")}


def test_answers_are_those_of_one_machine(together):
    said = together.text("02_dataset")
    assert "3 machines, 2 cores, 0 GPUs" in said and answering(together.log("02_dataset")), said
    places = [together.door.outputs / "together", together.alone.outputs / "alone"]
    for side in ("train", "held_out"):
        mine, alone = (read_samples(place / "02_dataset" / f"{side}.parquet") for place in places)
        assert mine == alone and len(mine) > 4
    numbers = together.door.result("02_dataset", "together")["numbers"]
    assert numbers["answers_written"] == together.alone.result("02_dataset", "alone")["numbers"]["answers_written"] >= SAMPLES
    logs = list((places[0] / "02_dataset").glob("vllm-127.0.0.1-*.log"))
    assert logs and all("Traceback" not in log.read_text() for log in logs)


def test_a_lost_machine_costs_its_shard_only_and_states_are_those_of_one_machine_byte_for_byte(together):
    said = together.text("03_hidden_states")
    assert re.search(rf"127.0.0.1 \({together.lost}\) is out: it was lost .*; its \d+ prompts go elsewhere", said), said
    assert len(set(answering(together.log("03_hidden_states")))) == 2, said
    places = [together.door.outputs / "together", together.alone.outputs / "alone"]
    mine, alone = (hashes(place / "03_hidden_states") for place in places)
    assert len(mine) >= SAMPLES and mine == alone
    numbers = together.door.result("03_hidden_states", "together")["numbers"]
    assert numbers["written"] == len(mine) and numbers["agreeing"] == numbers["compared"] > 100


def test_training_on_the_cluster_is_training_here(together):
    assert re.search(r"training on 127.0.0.1 \(\w+\), 1 processes", together.text("06_training"))
    folder = together.door.outputs / "together"
    numbers = together.door.result("06_training", "together")["numbers"]
    assert {path.name for path in (folder / "06_training" / "ranks").iterdir()} >= {"rank-0.log", "torchrun.log"}
    recipe = Training(**{**wholepass.PARAMETERS["training"], "epochs": 2})
    from eagle3kit import draft

    stores = [open_store(folder / "03_hidden_states" / side) for side in ("train", "held_out")]
    model = draft.build(together.target, *vocabulary.read(folder / "04_vocabulary"), recipe, layer_ids=tinystates.LAYERS, seed=0)
    here = training.fit(model, *stores, together.door.home / "here", recipe, seed=0, report=lambda _: None, told=lambda _: None)
    there = tensors(folder / "06_training" / "checkpoints" / numbers["last"] / "model.safetensors")
    for key, value in tensors(here.last / "model.safetensors").items():
        torch.testing.assert_close(there[key], value, rtol=1e-4, atol=1e-5)
    assert numbers["processes"] == 1 and numbers["steps"] == len(here.steps)


def test_nothing_is_left_and_nothing_could_be_reached(together):
    assert {name: left for name, ran in together.ran.items() if (left := ran.left())} == {}
    assert together.listened and together.listened <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}


def test_the_address_of_rays_own_client_leads_there_too(together):
    assert together.by_client == b"", "the log of a worker that has no server yet"


# ---- What is refused


def test_an_address_where_nobody_answers_and_one_that_is_none():
    with pytest.raises(KitError, match=r"cluster is 127.0.0.1:9, but nobody answers at 127.0.0.1:9 .*ray start --head"), \
            cluster.joined("127.0.0.1:9"):  # fmt: skip
        pass
    with pytest.raises(ValueError, match="cluster"):
        Params(cluster="http://somewhere")
    with pytest.raises(ValueError, match="both say who answers; leave one out"):
        Params(cluster="auto", server={"url": "http://127.0.0.1:8000"})


def test_a_server_that_does_not_start_is_asked_for_again(monkeypatch):
    """What Ray raises when the process that was to serve us dies at once: killing one for real takes Ray a minute to see."""
    import ray

    fails: list[int] = []
    really = ray.init

    def init(**how: object) -> object:
        if len(fails) < fails_first:
            fails.append(1)
            raise ConnectionAbortedError("Initialization failure from server:\nRuntimeError: Starting Ray client server failed.")
        return really(**how)

    monkeypatch.setattr(ray, "init", init)
    with Cluster() as nodes:
        nodes.add(cpus=0)
        for name, value in nodes.variables.items():
            monkeypatch.setenv(name, value)
        fails_first = 1  # and the others are left for real ones
        with cluster.joined(nodes.client) as joined:
            assert len(cluster.nodes(joined)) == 1 and len(fails) == 1
        fails_first = 99
        with pytest.raises(KitError, match="no Ray cluster answers there .*Starting Ray client server failed.*ray start"), \
                cluster.joined(nodes.client):  # fmt: skip
            pass
        assert len(fails) == 1 + cluster.JOINS, "then it is said"


def test_a_shard_is_small_and_named_by_what_it_is_made_of(tmp_path):
    assert shards.size(90, 2, 8, 0) == 12 and shards.size(10_000, 2, 8, 0) == 32 and shards.size(3, 8, 4, 0) == 1
    assert shards.size(10_000, 2, 64, 2048 * 57_344) == 18
    order = shards.Order(kit="k", vllm="v", model="m", revision=None, files="f", settings=server.Settings(model="here"))
    first = shards.name(order, [[1, 2]], [4], None, 0.0)
    elsewhere = shards.Order(**{**vars(order), "settings": server.Settings(model="there")})
    assert first == shards.name(elsewhere, [[1, 2]], [4], None, 0.0), "the same work, wherever its files lie"
    others = [shards.name(order, *other) for other in ([[[1, 3]], [4], None, 0.0], [[[1, 2]], [5], None, 0.0],
                                                        [[[1, 2]], [4], [1], 0.0], [[[1, 2]], [4], None, 0.5])]  # fmt: skip
    assert len({first, *others}) == 5


@pytest.mark.parametrize("change, words", [
    ({"kit": "other"}, "another version of eagle3kit"), ({"vllm": "0.1"}, "vLLM is .* there and 0.1 here"),
    ({"files": "other"}, "is another target there than here"), ({"model": "no/where"}, "no/where"),
])  # fmt: skip
def test_a_machine_that_cannot_take_part_says_why(together, change, words):
    params = Params.load(together.door.file)
    order = shards.Order.of(params, server.Settings.of(params, together.target, max_model_len=64))
    said = shards.Worker().begin(shards.Order(**{**vars(order), **change}))
    assert re.search(words, said["error"]), said
