"""Which conversations are held out, however many are taken: a rung of ten samples and one of a thousand agree on the side of
every conversation, so that what the small one measures on never trains the large one."""

import hashlib
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from eagle3kit.conversations import Conversation


def short_hash(text: str) -> str:
    """16 hex digits; a lone surrogate half, legal in JSON, must not stop it."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def opening(conversation: "Conversation") -> str:
    """The first user turn, spaces and case aside: conversations that begin alike are on one side."""
    text = next(message["content"] for message in conversation.messages if message["role"] == "user")
    return " ".join(text.split()).casefold()


def share(text: str, seed: int) -> float:
    """A number from 0 to 1 that follows from an opening and `seed` alone; those below the held-out share are held out."""
    return int(short_hash(f"side {seed} {text}"), 16) / 16**16


@dataclass
class Sides:
    """Watches all usable conversations go by and, of those taken, sees to it that both sides are there.

    Held out are at least `least`, up to half of what is taken; to train on, at least one. Where the conversations taken have
    fewer, the last ones give way to the next of the missing side *in the order of the sources*, so a larger rung takes the same
    ones first. No conversation ever changes its side for it. Only where all sources together have nothing on a side is the
    opening nearest to it taken for it (by `conversations.split`): the same one in every rung, for it is taken along.
    """

    held_out_percent: float
    seed: int
    least: int = 1
    _ranks: list[array] = field(default_factory=list)
    # By side (held out or not) and source: the lowest ranks, (rank, conversation) each.
    _first: dict[bool, list[list[tuple[int, "Conversation"]]]] = field(default_factory=lambda: {True: [], False: []})
    # By side: (how far from it, rank, conversation) of the nearest.
    _nearest: dict[bool, tuple[float, int, "Conversation"]] = field(default_factory=dict)

    def source(self) -> None:
        """The conversations seen from now on are of the next source."""
        self._ranks.append(array("Q"))
        for of in self._first.values():
            of.append([])

    def see(self, rank: int, conversation: "Conversation") -> None:
        """One more usable conversation; `rank` (64 bits) is its place among those of its source."""
        self._ranks[-1].append(rank)
        mine = share(opening(conversation), self.seed)
        lowest = self._first[mine < self.held_out_percent / 100][-1]
        if len(lowest) < self.least or rank < lowest[-1][0]:
            lowest.append((rank, conversation))
            lowest.sort(key=lambda one: one[0])
            del lowest[self.least :]
        for side, sign in ((True, 1), (False, -1)):
            known = self._nearest.get(side)
            if known is None or (sign * mine, rank) < known[:2]:
                self._nearest[side] = (sign * mine, rank, conversation)

    def complete(self, taken: list["Conversation"]) -> list["Conversation"]:
        """`taken`, which is the beginning of the order of the sources, with its last ones replaced where a side lacks some."""
        wanted: dict[bool, list[Conversation]] = {}
        for side, count in ((True, max(1, min(self.least, len(taken) // 2))), (False, 1)):
            wanted[side] = self._in_order(side)[:count] or [self._nearest[side][2]]
        kept = {conversation.id for found in wanted.values() for conversation in found}
        for side, found in wanted.items():
            there = {conversation.id for conversation in taken}
            lacking = [conversation for conversation in found if conversation.id not in there]
            others = [c.id for c in reversed(taken) if self._held(c) != side and c.id not in kept]
            gone = set(others[: len(lacking)])
            taken = [c for c in taken if c.id not in gone] + lacking[: len(gone)]
        return taken

    def _held(self, conversation: "Conversation") -> bool:
        return share(opening(conversation), self.seed) < self.held_out_percent / 100

    def _in_order(self, side: bool) -> list["Conversation"]:
        """The first conversations of a side: of each source the first, then of each the second, as they are taken."""
        places = []
        for which, lowest in enumerate(self._first[side]):
            for rank, conversation in lowest:
                before = sum(other < rank for other in self._ranks[which])
                places.append((before, which, conversation))
        return [conversation for *_, conversation in sorted(places, key=lambda one: one[:2])]
