"""Training on a machine of a cluster (`cluster`): the one with most GPUs that sees the run's folder; if it is lost, another.

States are too many to be sent about: the machine must have the run's folder and the target's under the same paths (shared
storage, EAGLE3KIT_OUTPUTS on it), or be the one that the notebook runs on. All ranks are on that one machine; the draft is one
decoder layer, and more machines would rather wait for each other than be quicker.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from eagle3kit import cluster, epochs, ranks, shards
from eagle3kit.cluster import Node
from eagle3kit.errors import KitError
from eagle3kit.files import read_json, sha256

LOOK_S = 0.5  # between looks at what rank 0 has written


class Trainer:
    """What trains, on its machine. An actor of Ray; errors are returned, {"error": words}."""

    def looks(self, job: ranks.Job) -> dict[str, str]:
        """What this machine has for a job: a hash of the kit, of the samples' manifest and of the target's config, "" = none."""
        files = {"samples": Path(job.train) / "manifest.json", "target": Path(job.target) / "config.json"}
        return {"kit": shards.kit(), **{name: sha256(path) if path.exists() else "" for name, path in files.items()}}

    def train(self, job: ranks.Job, logs: str) -> dict[str, str]:
        """`ranks.launch`; what rank 0 says lies in `logs`, which the machine that asked reads too."""
        try:
            ranks.launch(job, Path(logs), report=lambda row: None, told=lambda line: None)
        except KitError as error:
            return {"error": str(error)}
        return {}


def find(ray: Any, job: ranks.Job, told: Callable[[str], None]) -> list[tuple[Node, int]]:
    """The machines that can train `job`, best first, and how many processes each would run: `job.processes`, or of 0 as many as
    it has GPUs, at least one.

    Raises:
        KitError: there is none; with what each lacks.
    """
    here, found, lacks = Trainer().looks(job), [], []
    there = cluster.nodes(ray)
    on_gpus = any(node.gpus for node in there)
    for node in there:
        processes = job.processes or max(1, node.gpus)
        if processes > node.gpus if on_gpus else not node.cpus:
            lacks.append(f"{node.name} has {node.gpus} GPUs and {node.cpus} cores for {processes} processes")
            continue
        actor = ray.remote(Trainer).options(**cluster.on(node, gpus=0, cpus=0)).remote()
        try:
            seen = ray.get(actor.looks.remote(job), timeout=60)
        except ray.exceptions.RayError as error:
            lacks.append(f"{node.name}: {cluster.first_line(error)}")
            continue
        finally:
            ray.kill(actor)
        if seen["kit"] != here["kit"]:
            lacks.append(f"{node.name} has another version of eagle3kit; install the same on every machine")
        elif seen != here:
            lacks.append(f"{node.name} does not see {job.train if seen['samples'] != here['samples'] else job.target}")
        else:
            found.append((node, processes))
    if not found:
        raise KitError("no machine of the cluster can train:\n" + "".join(f"- {line}\n" for line in lacks) + "Put outputs and "
                       "target on storage that all see under one path (EAGLE3KIT_OUTPUTS), lower training.processes, or leave "
                       "cluster out for this stage")  # fmt: skip
    for line in lacks:
        told(f"not for training: {line}")
    return found


def run(address: str, job: ranks.Job, logs: Path, prepare: Callable[[int], None], *, report: Callable[[dict[str, Any]], None],
        told: Callable[[str], None]) -> None:  # fmt: skip
    """Train `job` on a machine of the cluster at `address`; `prepare` is called with the number of processes before the first
    try. A machine that is lost is followed by the next best, from the last whole epoch.

    Raises:
        KitError: as `ranks.fit`, and when no machine is left.
    """
    with cluster.joined(address) as ray:
        places = find(ray, job, told)
        job = replace(job, processes=places[0][1])
        prepare(job.processes)
        left: set[str] = set()
        while True:
            node = places[0][0]
            told(f"training on {node.name}, {job.processes} processes")
            lost = _try(ray, node, job, logs, report, told)
            if not lost:
                return
            told(f"{node.name} is out: {lost}; training goes on elsewhere after its last whole epoch")
            left.add(node.id)
            places = [place for place in find(ray, job, told) if place[0].id not in left]
            if not places:
                raise KitError(f"{node.name}: {lost}, and no other machine can train; run the stage again: it goes on after "
                               "the last whole epoch")  # fmt: skip
            # The same number of processes: another number would be another training.
            folder = Path(job.checkpoints)
            epochs.only_whole(folder, read_json(folder / "identity.json"))


def _try(ray: Any, node: Node, job: ranks.Job, logs: Path, report: Callable[[dict[str, Any]], None],
         told: Callable[[str], None]) -> str:  # fmt: skip
    """Train on this machine: "" when it is done, else how the machine was lost; KitError for what is no machine's fault."""
    (logs / ranks.PROGRESS).unlink(missing_ok=True)
    where = cluster.on(node, gpus=job.processes if node.gpus else 0, cpus=min(node.cpus, job.processes))
    actor = ray.remote(Trainer).options(**where).remote()
    heard, task = 0, actor.train.remote(job, str(logs))
    try:
        while not ray.wait([task], timeout=LOOK_S)[0]:
            heard = ranks.hear(logs, heard, report, told)
        said = ray.get(task)
    except ray.exceptions.RayTaskError as error:
        raise KitError(f"training on {node.name}: {cluster.first_line(error)}") from None
    except ray.exceptions.RayError as error:
        return cluster.first_line(error)
    finally:
        ranks.hear(logs, heard, report, told)
        ray.kill(actor)
    if said:
        raise KitError(said["error"])
    return ""
