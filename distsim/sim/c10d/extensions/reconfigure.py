"""Groups whose members change while the job runs (torch 2.14).

A group of `init_process_group(enable_reconfigure=True)` connects nobody until `reconfigure`, which all its next members
call with the same number and the same handles. A member that dies breaks the connections of the others, as with gloo,
and they may reconfigure without it.

Source: ProcessGroupGloo's reconfigure (pytorch PR 187381), whose error messages these are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from distsim.debug.records.obligations import RECONFIGURE
from distsim.errors import NotSimulated
from distsim.sim.c10d.gpu_work import GroupStreams
from distsim.sim.c10d.group import SimGroup
from distsim.sim.c10d.rendezvous import Rendezvous, meeting_place, recorded
from distsim.sim.c10d.stores import PrefixStore

NOT_CONNECTED = "has not been initialized. Call reconfigure() before issuing collectives when enable_reconfigure=True."
KINDS = {"gloo": ("gloo", "ProcessGroupGloo", 4), "nccl": ("nccl2", "ProcessGroupNCCL", 3)}
"""For each library: the first word of a handle, the class of torch, and the colons in a handle."""


class ReconfigurableGroup(SimGroup):
    """A group made with `enable_reconfigure=True`, of gloo or of NCCL.

    A call of NCCL that takes longer than the timeout revokes the group, and does not end the process.
    """

    supports_reconfigure = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._first = self._group
        """The group that was made, whose name torch knows."""
        self._first_rank = self.group_rank
        self._uuid = -1
        self._word, kind, self._colons = KINDS[self.name()]
        self._communicator.broken = f"{kind} {NOT_CONNECTED}"
        self._explicit = True

    @property
    def group_name(self) -> str:
        return self._first.name

    @property
    def group_desc(self) -> str:
        return self._first.description

    def getRank(self) -> int:
        """Return the rank in the present group, also to C++."""
        return self.group_rank

    def getSize(self) -> int:
        """Return the number of present members, also to C++."""
        return self._members

    def get_reconfigure_handle(self) -> str:
        """Return the text by which the other members name this one."""
        store = self._store
        while isinstance(store, PrefixStore):
            store = store.underlying_store
        address = f"{store.host}:{store.port}" if hasattr(store, "port") else ""
        first = f"{self._first_rank}:" if self.name() == "gloo" else ""
        handle = f"{self._word}:{self.group_rank}:{self._uuid}:{first}{address}"
        self.process.port.shared.handles[*meeting_place(self._store), handle] = self.process
        return handle

    def reconfigure(self, opts: Any) -> Any:
        """Connect the members whose handles *opts* names, in that order; a set is sorted.

        Raises:
            RuntimeError: The handles are not unique or not known, or the number was used before.
            DistStoreError: A member did not come within the timeout.
        """
        shared, own = self.process.port.shared, self.get_reconfigure_handle()
        handles = sorted(opts.handles) if isinstance(opts.handles, set) else list(opts.handles)
        meeting = (*meeting_place(self._store), RECONFIGURE, opts.uuid)
        if not handles:
            raise RuntimeError("Reconfigure requires at least one handle")
        if len(set(handles)) < len(handles):
            raise RuntimeError("Reconfigure handles must be unique")
        known: list[Any] = [shared.handles.get((*meeting_place(self._store), handle)) for handle in handles]
        for handle, process in zip(handles, known, strict=True):
            if process is None and (own in handles or handle.count(":") < self._colons):
                raise RuntimeError(f"Invalid {self._word} reconfigure handle: {handle}")
        if own not in handles:
            raise RuntimeError(f"Local {self._word} reconfigure handle is not part of the new communicator")
        if own == handles[0] and shared.handles.setdefault(meeting, own) != own:
            raise RuntimeError(
                f"{self._word} reconfigure uuid {opts.uuid} was already used; each reconfigure() requires a unique uuid"
            )
        before = self._group, self._communicator, self.group_rank, self._members, self._timeout
        group = self._first.reconfigured(opts.uuid, tuple(process.rank for process in known))
        record = recorded(self.process, RECONFIGURE, group, None)
        self._communicator = self.process.port.communicator((*meeting, *handles), group, self._communicator.flavour)
        self._group, self.group_rank, self._members = group, handles.index(own), len(handles)
        self._timeout = opts.timeout or self._timeout
        try:
            work = self.meet(group, None, record)
        except BaseException:
            self._group, self._communicator, self.group_rank, self._members, self._timeout = before
            raise
        self._timeout, self._uuid = before[-1], opts.uuid
        self._numbers, self.others, self._on_gpu = dict.fromkeys(self._numbers, 0), {}, GroupStreams(self._communicator)
        self._communicator.is_revocable = True
        if self.name() == "gloo":
            self._communicator.breaks_with(known)
        if self is self.process.groups.c10d.default_pg:
            self.process.groups.rendezvous = Rendezvous(len(handles), False, ranks=group.ranks)
        return work


def check_backends(options: Mapping[str, Any], backends: Iterable[str]) -> None:
    """Raise torch's error if *options* ask for members that change, and a class of NCCL's group cannot."""
    if not options.get("enable_reconfigure"):
        return
    legacy = {"nccl-legacy"} | ({"nccl"} if torch.__version__ < "2.15" else set())  # a TorchVersion
    if names := sorted(legacy.intersection(backends)):
        raise RuntimeError(f"ProcessGroupNCCL ({names[0]}) does not support enable_reconfigure; use nccl2")


def kind_of_group(options: Any, backends: dict[str, str]) -> type[SimGroup]:
    """Return the class of a group that torch makes with *options*.

    Raises:
        NotSimulated: The members of a group of two backends, or of none that can, are to change.
    """
    if not getattr(options, "enable_reconfigure", False):
        return SimGroup
    names = sorted(set(backends.values()))
    if len(names) > 1 or names[0] not in KINDS:
        asked_for = f"init_process_group({', '.join(names)!r}, enable_reconfigure=True)"
        raise NotSimulated(asked_for, "use backend gloo, or nccl2")
    return ReconfigurableGroup
