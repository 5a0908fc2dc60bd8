"""Pre-flight of a draft directory, without a GPU and without serving: everything that vLLM will take for granted.

A finding is good, a FAULT (the draft would fail or lose acceptance), a note (worth knowing), or not checked, with the reason:
what nobody looked at is never called good.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from eagle3kit import checkpoint, conventions, draft_layout, preflight_target, target
from eagle3kit import preflight_draft as mine
from eagle3kit.errors import KitError
from eagle3kit.files import publish, write_json
from eagle3kit.findings import FAULT, GOOD, NOTE, UNKNOWN, Finding

if TYPE_CHECKING:
    import torch


def check(folder: Path, target_folder: Path | None = None, reference: Path | None = None, *, trust_remote_code: bool = False
          ) -> list[Finding]:
    """Every check of the draft in `folder`; against the model it drafts for and a reference draft where these are given.

    Raises:
        KitError: the folder holds no EAGLE-3 draft (or the target or reference none of theirs).
    """
    draft = draft_layout.read(folder)
    parts = (mine.kind, mine.tensors, mine.mapping, mine.layers, mine.served, mine.values, mine.files)
    found = [finding for part in parts for finding in part(draft)]
    if target_folder is None:
        why = "no target given: eagle3kit check DRAFT --target TARGET"
        found += [Finding(what, UNKNOWN, "the target's", why) for what in
                  ("layer ids against the target", "vocabulary size", "hidden size", "RoPE", "position limit", "embedding",
                   "head")]  # fmt: skip
    else:
        found += preflight_target.against(draft, target_folder, trust_remote_code)
        layers = target.geometry(target_folder, trust_remote_code).layers
        if suspicion := conventions.doubt(draft.layer_ids or [], layers, draft.kind == "speculators"):
            found.append(Finding("how layer ids are counted", NOTE, "as vLLM counts", str(draft.layer_ids), suspicion))
    if reference is not None:
        found += preflight_target.reference(draft, draft_layout.read(reference))
    return found


def faults(findings: list[Finding]) -> list[Finding]:
    """The faults among them."""
    return [one for one in findings if one.state == FAULT]


def summary(findings: list[Finding]) -> str:
    """How many of each, in words."""
    counts = {state: sum(one.state == state for one in findings) for state in (GOOD, FAULT, NOTE, UNKNOWN)}
    verdict = "not fit to serve" if counts[FAULT] else "fit to serve, as far as was looked"
    told = [f"{count} {'fault' + 's' * (count > 1) if state == FAULT else state}" for state, count in counts.items() if count]
    return f"{verdict}; {', '.join(told)}"


def export_for(folder: Path, destination: Path, target_folder: Path | None, trust_remote_code: bool = False) -> Path:
    """`export` in the number type that the target's config names; KitError without a target."""
    import torch

    if target_folder is None:
        raise KitError("--export needs --target: the directory names the model it drafts for, and is written in its number type")
    dtype = getattr(torch, target.geometry(target_folder, trust_remote_code).dtype)
    return export(folder, destination, target_folder=target_folder, dtype=dtype)


def export(folder: Path, destination: Path, *, target_folder: Path, dtype: "torch.dtype") -> Path:
    """Publish the draft as a plain servable directory: config and weights as `dtype`, the target's place in the config.

    A speculators checkpoint goes through `checkpoint.export`; the other kind keeps its own config and names.
    """
    from safetensors.torch import save_file

    draft = draft_layout.read(folder)
    if draft.kind == "speculators":
        return checkpoint.export(folder, destination, target=target_folder, dtype=dtype)
    config = {**draft.config}
    for key in {"dtype", "torch_dtype"} & config.keys():
        config[key] = str(dtype).removeprefix("torch.")
    tensors = {name: draft.tensor(name) for name in draft.tensors}
    tensors = {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}
    with publish(destination) as inner:
        inner.mkdir()
        save_file(tensors, inner / checkpoint.WEIGHTS, metadata={"format": "pt"})
        write_json(inner / checkpoint.CONFIG, config)
    return destination


def require_draft(path: Path) -> None:
    """KitError unless `path` is a directory."""
    if not path.is_dir():
        raise KitError(f"{path} is not a directory; check takes a draft directory or a parameter file (.yaml)")
