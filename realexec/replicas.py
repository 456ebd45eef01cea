"""Process groups that torchft makes for its quorums, past torch.distributed.

The ranks of a job of torchft are numbered as torchft numbers them: the number at the end of the replica's id, times
the ranks of a replica, plus the rank in the replica. A quorum is recorded as a reconfiguration of one group. Source:
torchft 0.2.0 (`Manager._async_quorum`, `ProcessGroupWrapper.configure`).
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from distsim.debug.messages import ranks_text
from distsim.debug.records import Group
from distsim.debug.records.obligations import RECONFIGURE
from distsim.debug.rings import layout as rings
from distsim.debug.rings.files import LIGHTHOUSE, RecordedWorld, WorldKind
from distsim.debug.rings.reader import ranks_here
from distsim.realexec.process.session import Session
from distsim.text import original_print
from distsim.text.tracebacks import error_line
from distsim.text.untrusted_input import MOST_RANKS
from distsim.torch_compat.names import Patches

MODULE = "torchft.process_group"
CREATE, RANKS, QUORUM, RANK = "_create_pg", "_global_ranks", "_quorum_id", "_group_rank"
"""torchft's names of the method that makes a group, and of what the group's wrapper has of the quorum."""
NAME = "torchft"
"""Identifier of the world of all replicas, and name of their group."""


class ReplicaGroups:
    """Patches of torchft's classes.

    Args:
        patches: Takes the patches.
        open_session: Creates the ring, as in `Hooks`.
        session: Returns the session of this process.
    """

    def __init__(
        self,
        patches: Patches,
        open_session: Callable[[RecordedWorld | None, str], Session | None],
        session: Callable[[], Session | None],
    ) -> None:
        self._patches, self._open, self._session = patches, open_session, session
        self._world: RecordedWorld | None = None
        """The replicas that quorums have had so far."""
        self._module: Any = None
        """torchft's module, once its classes are patched."""
        self._has_said = os.environ.get("LOCAL_RANK", "0") != "0"  # one line for each replica

    def watch(self) -> None:
        """Patch torchft's classes if the program has imported them. A manager makes a store before any group."""
        module = sys.modules.get(MODULE)
        wrapper = getattr(module, "ProcessGroupWrapper", None)
        if module is self._module or wrapper is None:
            return
        self._module = module
        for kind in [kind for kind in vars(module).values() if isinstance(kind, type)]:
            if issubclass(kind, wrapper) and kind is not wrapper and CREATE in vars(kind):
                self._patches.put(kind, CREATE, self._recording(vars(kind)[CREATE]))
        if (baby := getattr(module, "ProcessGroupBaby", None)) is not None:
            self._patches.put(baby, "configure", self._refusing(baby.configure))

    def _refusing(self, original: Any) -> Callable[..., None]:
        @functools.wraps(original)
        def configure(group: Any, *args: Any, **kwargs: Any) -> None:
            self._leave(f"{type(group).__name__} makes its calls in a process of its own; use ProcessGroupGloo or NCCL")
            original(group, *args, **kwargs)

        return configure

    def _leave(self, why: str) -> None:
        """Print once that groups of torchft are not watched, and *why*."""
        if not self._has_said:
            self._has_said = True
            line = f"torchft's groups are not watched, so hangs in their calls are not reported: {why}"
            original_print(f"distsim: {line}", file=sys.stderr, flush=True)
        if (session := self._session()) is not None:
            session.heartbeat.makes_unwatched_calls = True

    def _recording(self, original: Any) -> Callable[..., Any]:
        """Wrap `_create_pg(store, rank, world_size)`, which waits until the members of a quorum have met."""

        @functools.wraps(original)
        def create(group: Any, store: Any, rank: int, world_size: int) -> Any:
            ranks = tuple(getattr(group, RANKS, None) or ())
            if len(set(ranks)) != world_size or max(ranks) >= MOST_RANKS:
                self._leave(f"expected replica ids that end in the replica's number, got ranks {ranks or 'unknown'}")
                return original(group, store, rank, world_size)
            world = self._world
            if world is None or world.size <= max(ranks):
                where = f"torchft's lighthouse {os.environ.get(LIGHTHOUSE, '')}"
                world = RecordedWorld(NAME, ranks[rank], max(ranks) + 1, WorldKind.REPLICAS, where)
            session = self._session() or self._open(world, "")
            if session is None:
                return original(group, store, rank, world_size)
            self._join(session, world)
            quorum = Group(f"{NAME} {getattr(group, RANK)}", NAME, ranks).reconfigured(getattr(group, QUORUM), ranks)
            log = session.recorder.group_log(quorum.name, quorum.description, ranks, world)
            index = session.recorder.note(log, RECONFIGURE, 1)
            try:
                pg = original(group, store, rank, world_size)
            except BaseException as error:
                session.ring.fail(index, error_line(error))
                raise
            session.ring.finish(index, rings.COMPLETED)
            unseen = set(ranks) - ranks_here(session.directory, session.ring.job, world).keys()
            if not unseen:
                return session.guard(pg, log)
            self._leave(
                f"the flight records of {ranks_text(unseen)} are not in {session.directory}; start all replicas on one "
                f"host by python -m distsim.debug, with the same {LIGHTHOUSE}"
            )
            return pg

        return create

    def _join(self, session: Session, world: RecordedWorld) -> None:
        """Note that this process is a member of *world*, if that is new."""
        if world is self._world:
            return
        self._world = world
        session.recorder.join(world)
        session.heartbeat.has_replicas = True
        session.ring.header(rings.W_LOCAL_WORLD, 0)  # the launcher has started this replica only
        session.ring.header(rings.W_JOINED, time.monotonic_ns())
        session.ring.header(rings.W_LIFE, rings.LIFE_JOINED)
