"""Samples on disk: what a draft learns from, one file a sample, in the layouts that trainers of this field read.

    layout "pt"           DIR/data_N.pt: torch.save of {"input_ids" int64 [T], "loss_mask" int64 [T],
                          "hidden_states": [Tensor [T, H], …]}: the auxiliary layers in rising order, then the last state
                          before the final norm. speculators 0.3 and 0.4 wrote it, with layer ids counted
                          *after* a layer: one lower than ours, which count what enters it.
    layout "pt-v0"        the same with "hidden_state" [T, n·H], the auxiliary layers side by side, and "target" [T, H], the
                          last state: the older layout, which speculators 0.3 still read.
    layout "safetensors"  DIR is a `datasets` folder (columns input_ids, loss_mask, seq_len, in torch format) with
                          DIR/hidden_states/hs_N.safetensors beside it: "hidden_states" [T, states, H], "token_ids" int64
                          [T]. speculators 0.5 to 0.9 read it (train/data.py, ArrowDataset).

N is the number of the sample, from 0. DIR/manifest.json says what the samples were made from; every reader checks it.
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from eagle3kit import headers
from eagle3kit.content import take_apart
from eagle3kit.errors import KitError
from eagle3kit.faults import Fault, Unreadable
from eagle3kit.files import publish, read_json, write_json

if TYPE_CHECKING:
    from torch import Tensor

Layout = Literal["pt", "pt-v0", "safetensors"]
KEYS = ("input_ids", "loss_mask", "hidden_states")
# What a manifest says of each sample; the rest is what all of them were made from.
PER_SAMPLE = ("lengths", "tokens", "sources", "turns")


@dataclass(frozen=True)
class StatesSample:
    """One sample: `input_ids` and `loss_mask` int64 [T], `states` [n + 1][T, H] (auxiliary layers, then the last)."""

    input_ids: "Tensor"
    loss_mask: "Tensor"
    states: list["Tensor"]


@dataclass(frozen=True)
class Store:
    """A folder of samples in one layout."""

    folder: Path
    layout: Layout

    def path(self, number: int) -> Path:
        """Where sample `number` lies."""
        if self.layout != "safetensors":
            return self.folder / f"data_{number}.pt"
        return self.folder / "hidden_states" / f"hs_{number}.safetensors"

    def begin(self, token_ids: list[list[int]], loss_masks: list[list[int]], manifest: dict[str, Any]) -> None:
        """Publish what is known before any state is: the manifest, and in the safetensors layout the data set.

        `manifest` is kept as it is, with the layout and the number of samples added. Samples that were made otherwise are
        removed first: once the new manifest lies beside them nothing could tell them from new ones.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        for leftover in self.path(0).parent.glob(f".{self.path(0).name.partition('0')[0]}*"):
            shutil.rmtree(leftover, ignore_errors=True)  # half a sample that a killed run left beside its place
        if not self.made_as(manifest):
            for other in (Store(self.folder, "pt"), Store(self.folder, "safetensors")):
                for path in other.path(0).parent.glob(other.path(0).name.replace("0", "*")):
                    path.unlink()
        if self.layout == "safetensors":
            self._publish_dataset(token_ids, loss_masks)
        write_json(self.folder / "manifest.json", {**manifest, "layout": self.layout, "samples": len(token_ids)})

    def made_as(self, wanted: dict[str, Any]) -> bool:
        """True when the samples on disk were made from what the manifest `wanted` names, in this layout."""
        if not (self.folder / "manifest.json").exists():
            return False
        found = self.manifest()
        known = {key: value for key, value in wanted.items() if key not in PER_SAMPLE} | {"layout": self.layout}
        return all(found.get(key) == value for key, value in known.items())

    def _publish_dataset(self, token_ids: list[list[int]], loss_masks: list[list[int]]) -> None:
        import datasets

        columns = {"input_ids": token_ids, "loss_mask": loss_masks, "seq_len": [len(ids) for ids in token_ids]}
        with publish(self.folder / "dataset") as inner:
            datasets.Dataset.from_dict(columns).with_format("torch").save_to_disk(inner)
            # speculators looks for the data set in the folder itself; the files move there one by one, state.json last.
            for file in sorted(inner.iterdir(), key=lambda path: path.name == "state.json"):
                file.replace(self.folder / file.name)
        (self.folder / "dataset").rmdir()

    def write(self, number: int, sample: StatesSample) -> None:
        """Publish one sample; OSError when the disk is full, with nothing half-written left."""
        import torch
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        with publish(self.path(number)) as inner:
            if self.layout != "safetensors":
                content = {"input_ids": sample.input_ids, "loss_mask": sample.loss_mask}
                if self.layout == "pt-v0":
                    joined = torch.cat(sample.states[:-1], dim=1)
                    content |= {"hidden_state": joined, "target": sample.states[-1].clone()}
                else:  # a slice would drag its whole storage into the file
                    content |= {"hidden_states": [state.clone() for state in sample.states]}
                try:
                    with open(inner, "wb") as file:
                        torch.save(content, file)
                except RuntimeError as error:  # torch closes its archive over a full disk and reports that instead
                    raise error.__context__ if isinstance(error.__context__, OSError) else error from None
            else:
                content = {"hidden_states": torch.stack(sample.states, dim=1).contiguous(), "token_ids": sample.input_ids}
                try:
                    save_file(content, inner)
                except SafetensorError as error:  # how that library passes on what the system said
                    raise OSError(f"{error}") from None

    def read(self, number: int) -> StatesSample:
        """One sample, mapped from the file rather than copied where the layout allows.

        Raises:
            KitError: no such file, or it is not one of this layout, or a shape does not fit; names file and key.
        """
        path = self.path(number)
        ids, mask, states = self._read_safetensors(number) if self.layout == "safetensors" else self._read_pt(path)
        for position, state in enumerate(states):
            if state.ndim != 2 or state.shape[0] != ids.shape[0]:
                raise KitError(f"{path}, key hidden_states[{position}]: expected [{ids.shape[0]}, H], found "
                               f"{list(state.shape)}; run the stage 03_hidden_states again")  # fmt: skip
        if mask.shape != ids.shape:
            raise KitError(f"{path}, key loss_mask: {list(mask.shape)} beside {list(ids.shape)} input_ids; "
                           "run the stage 03_hidden_states again")  # fmt: skip
        return StatesSample(ids, mask, states)

    def _read_pt(self, path: Path) -> tuple["Tensor", "Tensor", list["Tensor"]]:
        content = load(path)
        self._require(path, content, KEYS if self.layout == "pt" else ("input_ids", "loss_mask", "hidden_state", "target"))
        parts = take_apart(content, path)
        return parts.ids, parts.mask, parts.states

    def _require(self, path: Path, content: dict[str, Any], keys: Sequence[str]) -> None:
        missing = [key for key in keys if key not in content]
        if missing:
            raise KitError(f"{path} lacks the key {missing[0]} (it has {', '.join(content)}); "
                           "run the stage 03_hidden_states again")  # fmt: skip

    def _read_safetensors(self, number: int) -> tuple["Tensor", "Tensor", list["Tensor"]]:
        content = load(self.path(number))
        self._require(self.path(number), content, ("token_ids", "hidden_states"))
        row = self.dataset()[number]
        if content["token_ids"].tolist() != row["input_ids"].tolist():
            raise KitError(f"{self.path(number)}, key token_ids: not the tokens of row {number} of the data set beside it; "
                           "the two are of different runs: run the stage 03_hidden_states again")  # fmt: skip
        return row["input_ids"], row["loss_mask"], list(content["hidden_states"].unbind(1))

    def dataset(self) -> Any:
        """The `datasets.Dataset` of the safetensors layout; opened once for as long as it is the same."""
        state = self.folder / "state.json"
        return _opened(self.folder, state.stat().st_mtime_ns if state.exists() else 0)

    def manifest(self) -> dict[str, Any]:
        """What the samples were made from; KitError when there is none."""
        path = self.folder / "manifest.json"
        if not path.exists():
            raise KitError(f"{path} is missing, so nobody knows what these samples were made from; "
                           "run the stage 03_hidden_states")  # fmt: skip
        return read_json(path)

    def holds(self, number: int, token_ids: Sequence[int], loss_mask: Sequence[int] | None = None) -> bool:
        """True when sample `number` is there, whole, of these tokens and, if given, with this loss mask (which in the
        safetensors layout is the data set's, so always the newest). Reads the tokens, not the states."""
        path = self.path(number)
        if not path.exists():
            return False
        try:
            content = load(path)
            if self.layout == "safetensors":
                return content["token_ids"].tolist() == list(token_ids)
            same_mask = loss_mask is None or content["loss_mask"].tolist() == list(loss_mask)
            return same_mask and content["input_ids"].tolist() == list(token_ids)
        except (KitError, KeyError, AttributeError):
            return False


@lru_cache(maxsize=4)
def _opened(folder: Path, since: int) -> Any:
    """The data set in `folder`, last published at `since` ns. To open it takes longer than to read a sample."""
    import datasets

    return datasets.load_from_disk(str(folder))


def open_store(folder: Path) -> Store:
    """The samples in `folder`, in the layout that their manifest names; KitError when there is no manifest."""
    layout = Store(folder, "pt").manifest()["layout"]
    return Store(folder, layout)


def load(path: Path) -> dict[str, Any]:
    """The content of one tensor file, mapped, never run: only tensors, numbers, text, lists and dictionaries pass.

    Raises:
        KitError: missing, cut short, or holding something else.
    """
    import pickle

    import numpy
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not path.exists():
        raise KitError(f"{path} does not exist; run the stage that makes it")
    container = headers.read(path).container  # the same look that the inspector takes; it costs a fraction of the reading
    try:
        if container == "safetensors":
            return load_file(path)
        if container == "npy":
            return {"": torch.from_numpy(numpy.load(path, allow_pickle=False))}
        content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (RuntimeError, OSError, EOFError, SafetensorError, pickle.UnpicklingError, ValueError) as error:
        first = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        raise Unreadable(Fault(str(path), "", "a whole tensor file", first, "it is cut short or not a tensor file",
                               "delete it and run its stage again")) from None  # fmt: skip
    return content if isinstance(content, dict) else {"": content}


def anatomy(path: Path) -> list[dict[str, Any]]:
    """What is in one tensor file, by its header alone: a row a tensor with key, shape, dtype and bytes."""
    return [{"key": tensor.key, "shape": list(tensor.shape), "dtype": tensor.dtype, "bytes": tensor.bytes}
            for tensor in headers.read(path).tensors]  # fmt: skip
