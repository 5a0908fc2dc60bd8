"""Behind the estimate: one pass of the draft over a sample, the target's own words for it, and the tables of hits."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from eagle3kit.acceptance import everywhere, hits, replay, total, walk
from eagle3kit.hidden_states import normalised
from eagle3kit.samples import StatesSample

if TYPE_CHECKING:
    from eagle3kit.predict import Prediction

ROWS = 256  # positions whose logits over the whole vocabulary are held at once


@dataclass(frozen=True)
class Step:
    """One verify step: the draft has read the token at `place`, proposed these target ids, and `accepted` were kept."""

    place: int
    proposed: tuple[int, ...]
    accepted: int


def expected(overlap: np.ndarray) -> tuple[float, ...]:
    """(drafts, accepted …) expected along one answer, from `overlap` [n, K]: the chance that draft token k of a draft that
    starts at place i is accepted, given that those before it were; n places, the last tokens of a draft may lie past the end.

    overlap all 1, n = 4, K = 3  ->  (1, 1, 1, 1): one draft of three and the target's own token
    """
    places, depth = overlap.shape
    starts, accepted = np.zeros(places + depth + 1), np.zeros(depth)
    starts[0] = 1.0
    for place in range(places):
        inside = np.arange(depth) < places - place
        joint = np.cumprod(np.where(inside, overlap[place], 0.0))
        accepted += starts[place] * joint
        exactly = np.append(1.0, joint) - np.append(joint, 0.0)  # [K + 1], the chance of a tokens accepted
        starts[place + 1 : place + depth + 2] += starts[place] * exactly
    return (float(starts[:places].sum()), *accepted.tolist())


class Tables:
    """The tables of hits of one sample after another, and what is counted from them (see `predict.predict`)."""

    def __init__(self, model, weights, geometry, depth, temperature, mapping, known, kept, final_norm):
        self.model, self.geometry, self.depth, self.temperature = model, geometry, depth, temperature
        self.mapping, self.known, self.kept, self.final_norm = mapping, known, kept, final_norm
        self.device = next(model.parameters()).device
        self.head, self.norm = weights["head"].to(self.device), weights["final_norm"].to(self.device)

    def add(self, found: "Prediction", number: int, sample: StatesSample, turns: list[tuple[int, int]]) -> None:
        """Count one sample into `found`."""
        ids = sample.input_ids.cpu()
        rows = [slice(start - 1, max(start - 1, end - 2)) for start, end in turns]
        drafted, logits = self._ask(sample, rows)
        own, inside = ids.clone(), ids.clone()
        chances = [self._target(sample, turn, own, inside, kept) for turn, kept in zip(turns, logits, strict=True)]
        table, recorded = hits(drafted, own, self.mapping), hits(drafted, ids, self.mapping)
        restricted = hits(drafted, inside, self.mapping)
        outside = table | _shifted(~self.known[own].numpy(), self.depth)
        foreign = table | _shifted((own != ids).numpy(), self.depth)
        found.conversations += [number] * len(turns)
        for name, mine in (("records", table), ("recorded", recorded), ("outside", outside), ("foreign", foreign),
                           ("restricted", restricted)):  # fmt: skip
            getattr(found, name).extend(replay(mine, turns))
        too = [(before, end) for before, (_, end) in zip((1, *(end for _, end in turns[:-1])), turns, strict=True)]
        for name, mine, spans in (("everywhere_records", table, turns), ("everywhere_restricted_records", restricted, turns),
                                  ("everywhere_recorded", recorded, turns), ("with_prompts", recorded, too)):  # fmt: skip
            getattr(found, name).extend(everywhere(mine, [span]) for span in spans)
        found.everywhere = total([found.everywhere, everywhere(table, turns)])
        found.everywhere_restricted = total([found.everywhere_restricted, everywhere(restricted, turns)])
        for of, walks in zip((found.sampled, found.pointed), zip(*chances, strict=True), strict=True):
            of += map(expected, walks)
        self._count(found, ids, own, table, turns)
        targets = [(step[0].cpu() + self.mapping[step[0].cpu()]).tolist() for step in drafted]
        found.steps += [[Step(row + 1, tuple(step[row] for step in targets), kept) for row, kept in walk(table, turn)]
                        for turn in turns]  # fmt: skip

    def _ask(self, sample: StatesSample, rows: list[slice]) -> tuple[list, list[list]]:
        """The draft tokens of all places, and for each turn its K logits [n, D] at the places that matter."""
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        kept: list[list[torch.Tensor]] = [[] for _ in rows]

        def keep(_module, _inputs, output) -> None:
            for place, span in zip(kept, rows, strict=True):
                place.append(output[0, span].float())

        dtype = next(self.model.parameters()).dtype
        states = torch.cat(sample.states[:-1], dim=-1)[:-1].unsqueeze(0).to(self.device, dtype)
        ids = sample.input_ids[1:].unsqueeze(0).to(self.device)
        places = torch.arange(1, len(sample.input_ids), device=self.device).unsqueeze(0)
        hook = self.model.lm_head.register_forward_hook(keep)
        # cuDNN's attention plans anew for every length, and every sample has another.
        attention = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
        try:
            with torch.no_grad(), torch.compiler.set_stance("force_eager"), sdpa_kernel(attention):
                drafted = self.model(hidden_states=states, input_ids=ids, document_ids=torch.zeros_like(ids),
                                     position_ids=places, ttt_steps=self.depth)  # fmt: skip
        finally:
            hook.remove()
        return drafted, kept

    def _target(self, sample: StatesSample, turn: tuple[int, int], own, inside, logits: list) -> list[np.ndarray]:
        """Write the target's own tokens of the turn into `own` and `inside` (the best of the draft vocabulary); the
        chances [n, K] of acceptance at the temperature, for the n places where a draft may start: of a draft that samples, and
        of one that proposes its best token."""
        import torch

        (start, end), temperature = turn, self.temperature
        kept, probable = self.kept.to(self.device), []
        for first in range(start, end, ROWS):  # token t is said by the last state of token t - 1
            span = slice(first, min(first + ROWS, end))
            last = sample.states[-1][span.start - 1 : span.stop - 1].to(self.device)
            if self.final_norm:
                last = normalised(last, self.norm, eps=self.geometry.rms_norm_eps, adds_one=self.geometry.norm_adds_one)
            said = last.float() @ self.head.float().T
            mine = said[:, kept]
            own[span] = said.argmax(-1).cpu()
            inside[span] = kept[mine.argmax(-1)].cpu()
            # The softmax over the whole vocabulary, of the draft's tokens alone.
            probable.append((mine / temperature - torch.logsumexp(said / temperature, dim=-1, keepdim=True)).exp())
        p = torch.cat(probable)[1:]  # [n, D]: the answer's first token is never drafted
        chances, best = np.zeros((len(p), self.depth)), np.zeros((len(p), self.depth))
        for k, step in enumerate(logits):
            both = len(p) - k
            if both > 0:
                q = torch.softmax(step[:both] / temperature, dim=-1)
                chances[:both, k] = torch.minimum(p[k:], q).sum(-1).clamp(max=1.0).cpu().numpy()
                best[:both, k] = p[k:].gather(1, q.argmax(-1, keepdim=True)).squeeze(1).cpu().numpy()
        return [chances, best]

    def _count(self, found: "Prediction", ids, own, table: np.ndarray, turns: list[tuple[int, int]]) -> None:
        """Coverage, on-policy rate and per-step accuracies."""
        known = self.known[own].numpy()
        for start, end in turns:
            n = end - start
            found.covered = (found.covered[0] + int(known[start:end].sum()), found.covered[1] + n)
            same = int((own[start:end] == ids[start:end]).sum())
            found.on_policy = (found.on_policy[0] + same, found.on_policy[1] + n)
            for k, row in enumerate(found.accuracy):
                places = np.arange(start - 1, max(start - 1, end - 2 - k))
                hit, inside = table[places, k], known[places + 2 + k]
                for column, count in enumerate((hit.sum(), len(places), (hit & inside).sum(), inside.sum())):
                    row[column] += int(count)


def _shifted(marks: np.ndarray, depth: int) -> np.ndarray:
    """Marks of tokens [T] as a table [T - 1, K] of the draft tokens that stand for them: row j, step k is token j + 2 + k."""
    length = len(marks)
    table = np.zeros((length - 1, depth), dtype=bool)
    for k in range(depth):
        table[: max(0, length - 2 - k), k] = marks[2 + k :]
    return table
