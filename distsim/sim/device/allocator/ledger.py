"""What a GPU's memory was taken for when most of it was in use.

Every allocation has a tag. What it is for may be known only later (a gradient, when the optimizer looks at it): so what
came and went is kept until the end of a step, and the moment of the peak is looked for then.

The rule, first match: optimizer (its state, and what was allocated while it made its step), gradients (`.grad` of what
it updates), parameters, communication (what a collective reads or writes, tensor-parallel ones excepted, and what
`storage.resize_` brings back: FSDP's gathered parameters), activations (all that is allocated from the first forward
on), other (before).
"""

from __future__ import annotations

__all__ = ["ACTIVATIONS", "COMMUNICATION", "GRADIENTS", "KINDS", "OPTIMIZER", "OTHER", "PARAMETERS", "Ledger", "Tag"]

KINDS = ("parameters", "gradients", "optimizer", "activations", "communication", "other")
PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS, COMMUNICATION, OTHER = KINDS


class Tag:
    """One allocation."""

    __slots__ = ("alive", "kind", "nbytes")

    def __init__(self, nbytes: int, kind: str) -> None:
        self.nbytes = nbytes
        self.kind = kind
        self.alive = False
        """At the point to which the ledger has been read."""


class Ledger:
    """Allocations of one device in one process."""

    def __init__(self) -> None:
        self.kind = OTHER
        """Of what is allocated now."""
        self.peak: dict[str, int] = dict.fromkeys(KINDS, 0)
        """Bytes by kind when most were in use."""
        self.peak_bytes = 0
        self.in_use = self.most = 0
        """Bytes now, and the most since `settle`."""
        self._events: list[Tag] = []
        """Tags as they came (the first time) and went (the second)."""
        self._alive: list[Tag] = []

    def born(self, nbytes: int) -> Tag:
        tag = Tag(nbytes, self.kind)
        self._events.append(tag)
        self.in_use += nbytes
        if self.in_use > self.most:
            self.most = self.in_use
        return tag

    def died(self, tag: Tag) -> None:
        self._events.append(tag)
        self.in_use -= tag.nbytes

    @property
    def has_risen(self) -> bool:
        """Whether more is, or was, in use since `settle` than ever before: tags matter."""
        return self.most > self.peak_bytes

    def settle(self) -> None:
        """All tags are known: find the peak in what came and went."""
        if self.has_risen:
            held = self._held()
            now = best = sum(held.values())
            if best > self.peak_bytes:
                self.peak, self.peak_bytes = {**held}, best
            for tag in self._events:
                change = -tag.nbytes if tag.alive else tag.nbytes
                tag.alive = not tag.alive
                now += change
                held[tag.kind] += change
                if now > self.peak_bytes:
                    self.peak, self.peak_bytes = {**held}, now
        else:
            for tag in self._events:
                tag.alive = not tag.alive
        seen: dict[int, Tag] = {id(tag): tag for tag in (*self._alive, *self._events) if tag.alive}
        self._alive = list(seen.values())
        self._events.clear()
        self.most = self.in_use

    def now(self) -> dict[str, int]:
        """Bytes in use by kind."""
        self.settle()
        return self._held()

    def _held(self) -> dict[str, int]:
        held = dict.fromkeys(KINDS, 0)
        for tag in self._alive:
            held[tag.kind] += tag.nbytes
        return held
