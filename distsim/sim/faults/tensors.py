"""Guards that check the tensors of calls, and the fault `corrupt`, which flips a bit."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

import numpy as np
import torch
from annotated_types import Ge, Le
from numpy.typing import NDArray

from distsim.debug.evidence import guard_findings as seen
from distsim.debug.records import CallRecord, Finding
from distsim.debug.records.frames import user_stack
from distsim.sim.faults.fault import Fault, Rank, Rule, check_ranks

if TYPE_CHECKING:
    from distsim.cluster import Cluster
    from distsim.sim.c10d.work import Arrival
    from distsim.sim.world import World

# -- What guards of a simulated run look for in tensors.

GUARDS = ("nan", "buffers", "payloads")
"""Names of the checks. nan: NaN in the inputs of a call. buffers: writes to buffers while a call uses them.
payloads: received data that differ from the data sent.
"""
ALWAYS = ("nan", "buffers")
"""Checks of every simulation. They cost little, and their findings are only warnings."""
LARGE_BYTES = 1 << 20
"""Bytes from which a checksum adds words instead of computing a CRC.

This is ten times as fast, and only done if torch counts a write to the tensor.
"""


class Guards:
    """Checks of the tensors of one world's calls. *warns* means that the user did not ask for them, so that findings
    are warnings.
    """

    def __init__(self, watch: Collection[str] = ALWAYS, warns: bool = True) -> None:
        self.watch = frozenset(watch)
        self.warns = warns
        self.found: list[Finding] = []
        self._look_for_nan = "nan" in self.watch

    def on_arrival(self, arrival: Arrival) -> None:
        """Called in the rank's thread with the tensors that it gives to a call."""
        if "buffers" in self.watch and arrival.record.is_async:
            arrival.sums = [(checksum(tensor), _writes(tensor)) for tensor in arrival.inputs]

    def on_finish(self, members: Sequence[Arrival], folded: Sequence[torch.Tensor] = ()) -> None:
        """Check the inputs when the last byte has arrived and nothing is written yet. Runs in the scheduler's
        thread.

        *folded* is the sum of the inputs, if known: without NaN in it, no input has one.
        """
        for member in members:
            if member.sums is not None:
                if any(map(_changed, member.inputs, member.sums)):
                    self._tell(seen.modified(member.record))
                member.sums = None
        if self._look_for_nan and (not folded or any(map(holds_nan, folded))):
            for member in members:
                if any(holds_nan(tensor) for tensor in _known(member)):
                    self._look_for_nan = False  # it spreads: the first is the one
                    self._tell(seen.nan(member.record))
                    break

    def saw_aliased(self, record: CallRecord) -> None:
        """Report that all outputs of a call are one tensor."""
        self._tell(seen.aliased(record))

    def used_in_flight(self, record: CallRecord, writes: bool, was_waited: bool) -> None:
        """Report a kernel that uses a buffer of a GPU call in flight without any ordering by streams."""
        at = next(iter(user_stack()), None)
        self._tell(seen.raced_by_kernel(record, at, writes=writes, was_waited=was_waited))

    def _tell(self, finding: Finding) -> None:
        """Report ranks with the same finding at the same line as one finding."""
        for number, known in enumerate(self.found):
            if (known.kind, known.site, known.group) == (finding.kind, finding.site, finding.group):
                ranks = tuple(sorted({*known.ranks, *finding.ranks}))
                self.found[number] = dataclasses.replace(known, ranks=ranks)
                return
        self.found.append(dataclasses.replace(finding, warns=self.warns))


def _known(arrival: Arrival) -> Sequence[torch.Tensor]:
    """Return the tensors that a member passes to a call.

    On a GPU these are the values that are known and do not depend on a placeholder.
    """
    side = arrival.host_side
    if side is None:
        return arrival.inputs
    return () if side.inputs is None or side.guess else side.inputs


def checksum(tensor: torch.Tensor) -> int | None:
    """Return a checksum of the tensor; None if it has no plain bytes."""
    if not tensor.is_cpu:
        return None
    try:
        raw = _bytes_of(tensor)
    except (RuntimeError, TypeError, NotImplementedError):  # sparse, quantized, fake
        return None
    if raw.nbytes < LARGE_BYTES:
        return zlib.crc32(raw.data) if raw.nbytes else 0
    words = raw.nbytes // 8 * 8
    return int(raw[:words].view(np.uint64).sum(dtype=np.uint64)) ^ zlib.crc32(raw[words:].data)


class _Memory:
    """NumPy array interface to the bytes of a tensor in place."""

    def __init__(self, tensor: torch.Tensor) -> None:
        where = (tensor.data_ptr(), True)
        self.__array_interface__ = {"data": where, "shape": (tensor.nbytes,), "typestr": "|u1", "version": 3}


def _bytes_of(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """Return the bytes of a tensor, if possible without an operator, which the rank's dispatch mode and profile would
    see."""
    if type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_quantized:
        if not tensor.numel():
            return np.empty(0, dtype=np.uint8)
        if tensor.is_contiguous():
            return np.asarray(_Memory(tensor))
    raw: NDArray[np.uint8] = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return raw


def _writes(tensor: torch.Tensor) -> int | None:
    """Return how many writes torch has counted; None if it does not count them (`torch.inference_mode`)."""
    return None if tensor.is_inference() else tensor._version


def _changed(tensor: torch.Tensor, before: tuple[int | None, int | None]) -> bool:
    total, writes = before
    if total is None or (writes is not None and writes == _writes(tensor) and tensor.nbytes >= LARGE_BYTES):
        return False
    return checksum(tensor) != total


def holds_nan(tensor: torch.Tensor) -> bool:
    """Return whether a tensor contains NaN. Infinity is often sent on purpose (the start of a minimum, a mask)."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.layout is not torch.strided:
        return False
    tensor = tensor.detach()
    if tensor.dtype.itemsize == 1:  # 8 bits cannot be added up, nor two of 4, which have no NaN
        if tensor.dtype is torch.float4_e2m1fn_x2:
            return False
        tensor = tensor.float()
    elif tensor.dtype is torch.complex32:
        tensor = torch.view_as_real(tensor.resolve_conj())
    total = tensor.sum().item()  # NaN where one is, and where infinities cancel: then look closely
    return total != total and bool(torch.isnan(tensor).any())


# -- `corrupt`: a bit flipped in what a rank receives.


@dataclass(frozen=True, slots=True, kw_only=True)
class Corrupt(Rule):
    """Flips a bit in the data that a rank receives."""

    what: ClassVar[str] = "corrupt"
    rank: Rank
    """Rank that receives the corrupted data."""
    element: Annotated[int, Ge(0)] = 0
    """Index of the element in the tensor, from 0."""
    bit: Annotated[int, Ge(0), Le(127)] = 0
    """Index of the bit in the element, from the lowest."""

    def __str__(self) -> str:
        return f"bit {self.bit} of element {self.element} flipped on the way to rank {self.rank}"

    def check(self, cluster: Cluster, world_size: int) -> None:
        check_ranks((self.rank,), world_size)


class _Corrupt(Fault[Corrupt], rule=Corrupt):
    def __init__(self, rule: Corrupt, world: World, number: int) -> None:
        super().__init__(rule, world, number)
        self._found: list[Finding] = []

    def after_data(self, members: Sequence[Arrival]) -> None:
        for member in members:
            if member.record.rank == self.rule.rank and member.outputs and self._meant(member.record):
                tensor = member.outputs[0]
                sent = checksum(tensor)
                flip(tensor, self.rule)
                self.hit()
                if "payloads" in self.world.guards.watch and checksum(tensor) != sent:
                    self._found.append(seen.corrupted(member.record, str(self.rule)))
                    self.world.stop_for_fault()

    def _meant(self, record: CallRecord) -> bool:
        when = self.rule.when
        if when.call is None:
            return when.start_s <= self.world.now_s < when.end_s
        return self.struck_s is None and when.call.matches(record)

    def findings(self) -> list[Finding]:
        return self._found


def flip(tensor: torch.Tensor, rule: Corrupt) -> None:
    """Flip the bit of *tensor* that *rule* selects."""
    if tensor.numel() == 0:
        return
    whole = tensor.detach().clone(memory_format=torch.contiguous_format)
    raw = whole.reshape(-1).view(torch.uint8)
    byte = (rule.element % tensor.numel()) * tensor.element_size() + rule.bit // 8 % tensor.element_size()
    raw[byte] ^= 1 << rule.bit % 8
    with torch.no_grad():
        tensor.data.copy_(whole)
