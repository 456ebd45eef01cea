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

ALIKE = 0.8
"""From this part of the peak on the step whose allocations have names stands for it."""


class Tag:
    """One allocation."""

    __slots__ = ("alive", "kind", "module", "nbytes")

    def __init__(self, nbytes: int, kind: str, module: str = "") -> None:
        self.nbytes = nbytes
        self.kind = kind
        self.module = module
        """In which it was made, where that is known (modules.py)."""
        self.alive = False
        """At the point to which the ledger has been read."""


class Ledger:
    """Allocations of one device in one process."""

    def __init__(self) -> None:
        self.kind = OTHER
        """Of what is allocated now."""
        self.module = ""
        self.named = False
        """Whether `module` is told."""
        self.peak: dict[str, int] = dict.fromkeys(KINDS, 0)
        """Bytes by kind when most were in use."""
        self.peak_modules: dict[str, int] = {}
        """The same bytes by module: those of the step with names, where a later one needs little more."""
        self._named_bytes = 0
        self.peak_bytes = 0
        self.in_use = self.most = 0
        """Bytes now, and the most since `settle`."""
        self._events: list[Tag] = []
        """Tags as they came (the first time) and went (the second)."""
        self._alive: list[Tag] = []

    def born(self, nbytes: int) -> Tag:
        tag = Tag(nbytes, self.kind, self.module)
        self._events.append(tag)
        self.in_use += nbytes
        if self.in_use > self.most:
            self.most = self.in_use
        return tag

    def died(self, tag: Tag) -> None:
        self._events.append(tag)
        self.in_use -= tag.nbytes

    @property
    def _beaten(self) -> int:
        """What a peak has to be more than; one with names is worth as much as one without."""
        return self.peak_bytes - (1 if self.named else 0)

    @property
    def has_risen(self) -> bool:
        """Whether more is, or was, in use since `settle` than ever before: tags matter."""
        return self.most > self._beaten

    def settle(self) -> None:
        """All tags are known: find the peak in what came and went."""
        place = self._peak_at() if self.has_risen else -1
        for number, tag in enumerate(self._events):
            if number == place:
                self._look(self._events[:place])
            tag.alive = not tag.alive
        if place == len(self._events):
            self._look(self._events)
        seen: dict[int, Tag] = {id(tag): tag for tag in (*self._alive, *self._events) if tag.alive}
        self._alive = list(seen.values())
        self._events.clear()
        self.most = self.in_use

    def _peak_at(self) -> int:
        """How many of the events had come when most was in use; -1: never so much as before."""
        now, place, most = sum(tag.nbytes for tag in self._alive), -1, self._beaten
        on = {id(tag) for tag in self._alive}
        for number, tag in enumerate(self._events, 1):
            if id(tag) in on:
                now -= tag.nbytes
            else:
                on.add(id(tag))
                now += tag.nbytes
                if now > most:
                    place, most = number, now
        return place

    def _look(self, events: list[Tag]) -> None:
        """The peak is now, after *events*."""
        tags = {id(tag): tag for tag in (*self._alive, *events) if tag.alive}.values()
        self.peak = dict.fromkeys(KINDS, 0)
        modules: dict[str, int] = {}
        for tag in tags:
            self.peak[tag.kind] += tag.nbytes
            modules[tag.module] = modules.get(tag.module, 0) + tag.nbytes
        self.peak_bytes = sum(self.peak.values())
        if self.named:
            self._named_bytes = self.peak_bytes
        if self.named or self._named_bytes < ALIKE * self.peak_bytes:
            self.peak_modules = modules

    def now(self) -> dict[str, int]:
        """Bytes in use by kind."""
        self.settle()
        return self._held()

    def _held(self) -> dict[str, int]:
        held = dict.fromkeys(KINDS, 0)
        for tag in self._alive:
            held[tag.kind] += tag.nbytes
        return held
