"""What only the target can tell of files: sizes that must be its own, token ids that it has, special tokens that the draft may
say, and, through `doctor`, faults that no shape shows."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from eagle3kit import content, contracts_draft, mapping, neighbours
from eagle3kit import target as targets
from eagle3kit.errors import KitError
from eagle3kit.faults import Fault
from eagle3kit.samples import StatesSample, load

if TYPE_CHECKING:
    from torch import Tensor

    from eagle3kit.inspection import Found, Report
    from eagle3kit.neighbours import Seen, Surroundings

OTHER = "name the target that they were made for, or make them again"
MOST = 8  # samples that the doctor reads: he runs the target's head on each


def ask(found: "Found", report: "Report", model: str, read_all: bool, trust_remote_code: bool = False) -> None:
    """Add to `report` what the target `model` tells of the files in `found`; KitError when there is no such target."""
    folder = targets.locate(model, base=Path.cwd())
    geometry = targets.geometry(folder, trust_remote_code)
    special = _special(folder, trust_remote_code)
    report.notes.append(f"target {model}: {geometry.layers} layers, hidden size {geometry.hidden_size}, vocabulary "
                        f"{geometry.vocab_size:,}")  # fmt: skip
    for place, seen in found.samples.items():
        beside, _ = neighbours.around(place)
        sound = [one for one in seen if not one.contract.faults]
        report.add(seen[0].contract.kind, _sizes(sound, beside, geometry))
        _examine(place, sound, beside, geometry, folder, report, trust_remote_code)
    for parts in found.mappings.values():
        for path, contract in parts.get("t2d", ()):
            if not contract.faults:
                report.add(contract.kind, _vocabulary(mapping.read(path, "t2d"), str(path), "t2d", geometry, special))
        told = {fault.file for fault in report.faults if fault.key == "d2t"}
        for path, contract in parts.get("d2t", ()):
            if not contract.faults and str(path) not in told:
                report.add(contract.kind, mapping.faults(mapping.read(path, "d2t"), None, None, {"d2t": str(path)},
                                                         geometry.vocab_size))  # fmt: skip
        for path, contract in parts.get("token_freq", ()):
            counts = None if contract.faults else mapping.read(path, "token_freq")
            if counts is not None and len(counts) > geometry.vocab_size:
                report.add(contract.kind, [_other(str(path), "token_freq", f"{len(counts):,} tokens",
                                                  f"{geometry.vocab_size:,}")])  # fmt: skip
    for place in found.drafts:
        _draft(place, geometry, special, report)


def _other(file: str, key: str, found: str, expected: str) -> Fault:
    return Fault(file, key, f"{expected}, the target's", found, "it belongs to another target", OTHER)


def _special(folder: Path, trust_remote_code: bool) -> dict[int, str]:
    tokenizer = targets.tokenizer(folder, trust_remote_code)
    return dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))


def _sizes(sound: "Sequence[Seen]", beside: "Surroundings", geometry: targets.Geometry) -> list[Fault]:
    """Widths and layer ids against the target's; one fault a file."""
    faults = [_other(str(one.path), "hidden_states", f"width {one.contract.width}", str(geometry.hidden_size))
              for one in sound if one.contract.width and one.contract.width != geometry.hidden_size]  # fmt: skip
    outside = [k for k in beside.layers or [] if not 0 <= k < geometry.layers]
    if outside:
        faults.append(_other(str(beside.root / "manifest.json"), "layers", f"layer {outside[0]}", f"0 to {geometry.layers - 1}"))
    return faults


def _examine(
    place: Path, sound: "Sequence[Seen]", beside: "Surroundings", geometry: targets.Geometry, folder: Path, report: "Report",
    trust_remote_code: bool,
) -> None:  # fmt: skip
    """The doctor's signs of a drawn few."""
    from eagle3kit import doctor
    from eagle3kit.inspection import draw

    rows: list[tuple[str, StatesSample]] = []
    drawn = draw(sound, MOST)
    report.notes.append(f"{place}: the doctor looked at {len(drawn):,} of {len(sound):,} samples, first, last and evenly between")
    for one in drawn:
        try:
            parts = content.take_apart(load(one.path), one.path)
        except KitError:
            continue  # told already by whoever looked at its numbers
        mask = parts.mask
        if mask is None and beside.rows is not None and one.number is not None and one.number < len(beside.rows):
            mask = parts.ids.new_tensor(beside.rows.row(one.number)[1])
        outside = (parts.ids < 0) | (parts.ids >= geometry.vocab_size)
        if outside.any():
            at = int(outside.nonzero()[0])
            report.add(one.contract.kind, [_other(str(one.path), "input_ids", f"token id {int(parts.ids[at])} at place {at}",
                                                  f"0 to {geometry.vocab_size - 1}")])  # fmt: skip
        elif mask is not None and mask.shape == parts.ids.shape:
            rows.append((one.path.name, StatesSample(parts.ids, mask, parts.states)))
    if not rows:
        report.notes.append(f"{place}: the doctor looked at none of the samples (no mask, or no sound one)")
        return
    signs = doctor.examine(rows, folder, beside.layers, trust_remote_code=trust_remote_code)
    for sign in signs:
        finite = sign.number if sign.number is not None and math.isfinite(sign.number) else None  # JSON knows no other
        report.signs.append(asdict(sign) | {"number": finite, "where": str(place), "line": sign.line})
    for sign in signs:
        if sign.bad:
            report.add(sound[0].contract.kind, [Fault(str(place), sign.name, f"threshold {sign.threshold:g} ({sign.reason})",
                                                      f"{sign.number:g} ({sign.note})" if sign.number is not None else sign.note,
                                                      sign.effect, "make these samples again")])  # fmt: skip


def _vocabulary(
    t2d: "Tensor", file: str, key: str, geometry: targets.Geometry, special: dict[int, str]
) -> list[Fault]:  # fmt: skip
    """A t2d against the target's vocabulary and the special tokens of its tokenizer."""
    if len(t2d) != geometry.vocab_size:
        return [_other(file, key, f"{len(t2d):,} tokens", f"{geometry.vocab_size:,}")]
    outside = {token: text for token, text in special.items() if token < len(t2d) and not bool(t2d[token])}
    if not outside:
        return []
    token, text = next(iter(outside.items()))
    return [Fault(file, key, "every special token of the tokenizer inside", f"{len(outside)} outside, first {token} ({text!r})",
                  "the draft can never say it: a certain miss wherever it is due, at every end of a turn for an end of turn",
                  "build the mapping again with these tokens forced in")]  # fmt: skip


def _draft(folder: Path, geometry: targets.Geometry, special: dict[int, str], report: "Report") -> None:
    try:
        draft = contracts_draft.read(folder)
    except KitError:
        return  # told already
    place = str(folder / contracts_draft.CONFIG)
    faults = [_other(place, key, f"{found:,}", f"{wanted:,}") for key, found, wanted in (
        ("hidden_size", draft.hidden, geometry.hidden_size), ("vocab_size", draft.vocab, geometry.vocab_size),
    ) if found != wanted]  # fmt: skip
    outside = [k for k in draft.layers or [] if k >= geometry.layers]
    if outside:
        faults.append(_other(place, "eagle_aux_hidden_state_layer_ids", f"layer {outside[0]}", f"0 to {geometry.layers - 1}"))
    if "t2d" in draft.files and not any(fault.key == "t2d" for fault in draft.faults):
        path = draft.files["t2d"]
        faults += _vocabulary(mapping.some(path, ("t2d",))["t2d"], str(path), "t2d", geometry, special)
    report.add("draft", faults)
