"""Guard of a process group by torch's own hooks (torch 2.14): the group and its type stay torch's.

A hook sees every call, also those that C++ makes (DDP's buckets, functional collectives), but not the reduce
operation, the tag, the splits, or who waits. Therefore the public methods of `ProcessGroup` record calls from
Python, as a `GuardedGroup` does, and the hooks record the others.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Mapping
from threading import get_ident
from types import FrameType
from typing import Any

import torch
from torch.distributed import ProcessGroup

from distsim.debug.records.arguments import FIELDS, METHODS, MethodCall
from distsim.debug.records.signature import REDUCE_OPS
from distsim.debug.rings import layout as rings
from distsim.debug.settings import Level, Settings
from distsim.realexec.guard.fast_path import BACKWARD
from distsim.realexec.guard.group import HOOKED, ONE_TENSOR, Guarded, hook_methods, record_method
from distsim.realexec.guard.recorder import GroupLog, Recorder
from distsim.realexec.guard.tensor_checks import find_nan
from distsim.torch_compat import groups
from distsim.torch_compat.names import Patches

__all__ = ["UNSEEN", "HookedGroup", "attach_note", "call_of", "patch_methods", "refusal"]

HOOK_ID = 0x64697374
"""Id of the guard's hook. Programs and torch number their own hooks from 0."""
UNSEEN = (
    "of the calls that C++ makes (DDP's buckets, functional collectives) it does not see who waits, nor how a compiled "
    "one reduces and splits, nor sends and receives"
)
"""Sentence about calls that a guard with hooks does not see."""


def refusal(settings: Settings) -> str:
    """Return why the guard cannot use hooks; empty if it can."""
    if not groups.PRE_HOOK.works():
        return f"torch {torch.__version__} has no hooks on groups (2.14 has)"
    if settings.level is Level.STRICT:
        return "a hook cannot hold an asynchronous call until its members have come, as level strict does"
    if settings.checksum:
        return "a hook cannot give a call the copy of its buffer that DISTSIM_CHECKSUM needs"
    return ""


def attach_note(settings: Settings) -> str:
    """Return the note for users who request hooks: their limits, or the reason why they are not used."""
    if why := refusal(settings):
        return f"note: the guard attaches by patches, in spite of DISTSIM_GUARD_ATTACH=hooks: {why}"
    return f"note: the guard attaches by hooks: {UNSEEN}"


WAITS_AT_ONCE = frozenset(
    {"_verify_params_across_processes", "_verify_param_shape_across_processes", "_sync_params_and_buffers"}
)
FUNCTIONAL = "_functional_collectives.py"
FAR = 16
"""Largest number of frames between a hook and the functional collective that makes the call; the dispatcher's and
autograd's frames lie between.
"""

_issuing: dict[int, Any] = {}
"""Group whose call is being made by a method that has already recorded it, by thread."""


class HookedGroup(Guarded):
    """One of torch's own groups, which reports its calls through hooks."""

    def __init__(self, group: ProcessGroup, log: GroupLog, recorder: Recorder) -> None:
        # The hooks belong to the group in C++, where no garbage collector looks: they must not keep it alive.
        self.ref = weakref.ref(group, functools.partial(HOOKED.pop, id(group)))
        super().__init__(None, log, recorder)
        self.backends = groups.backends_of(group)
        self.group_desc = str(group.group_desc)
        self.inherited: Any = None
        """In a forked child: object that notes calls on the parent's group."""
        self._open: dict[int, tuple[GroupLog, int]] = {}
        """Log and record index of the call that C++ is making, by thread."""

    def forked(self, stand_in: Callable[[Any], Any]) -> None:
        """See `Guarded.forked`."""
        self.recorder = None
        self.unhook()
        self.inherited = stand_in(None)

    def attach(self) -> None:
        """Register the hooks."""
        group = self.ref()
        group.register_pre_hook(HOOK_ID, self._begin)  # type: ignore[union-attr]
        group.register_post_hook(HOOK_ID, self._issued)  # type: ignore[union-attr]
        HOOKED[id(group)] = self  # from now on hooks are the program's

    def detach(self) -> None:
        """See `Guarded.detach`."""
        super().detach()
        self.unhook()
        HOOKED.pop(id(self.ref()), None)

    def unhook(self) -> None:
        """Remove the hooks. In torch 2.14.1, a Python hook on a group that outlives the interpreter crashes the
        process (SIGSEGV).
        """
        group = self.ref()
        if group is not None and HOOKED.get(id(group)) is self:
            group.unregister_pre_hook(HOOK_ID)
            group.unregister_post_hook(HOOK_ID)

    def _begin(self, hook_call: Any) -> None:
        """Record a call before torch makes it."""
        me = get_ident()
        if _issuing.get(me) is self or self.recorder is None:
            return
        caller = sys._getframe().f_back  # None: a thread of C++
        call = call_of(hook_call, self.group_log.ranks, caller)
        if call is None:
            return
        guard = self if self.on_host is None or not call.is_for_host() else self.on_host
        recorder, log = self.recorder, guard.group_log
        self._never_issued(me, recorder)
        site = recorder.sites.here(2 if caller is not None else 1)
        index = recorder.begin(log, call, site)[0]
        if self.nan:
            find_nan(recorder, call, index, log.world.rank)
        self._open[me] = log, index
        waits = rings.WAITING | rings.WAITED if site[2] in WAITS_AT_ONCE else rings.FUTURE
        recorder.ring.mark(index, waits)

    def _issued(self, hook_call: Any) -> None:
        """Take the call's handle after torch has made it."""
        _, index = self._open.pop(get_ident(), (None, None))
        recorder, work = self.recorder, hook_call.work
        if index is None or recorder is None:
            return
        if work is None:
            recorder.ring.finish(index, rings.COMPLETED)
        else:
            recorder.watch(index, work, again=True)

    def _never_issued(self, thread: int, recorder: Recorder) -> None:
        """Mark the thread's last call as refused by the backend or by another hook; torch calls no post-hook then."""
        log, index = self._open.pop(thread, (None, None))
        if log is not None and index is not None:
            recorder.not_issued(log, None, index, "the call did not go out")


def patch_methods(patches: Patches) -> None:
    """Patch the methods of torch's groups so that they record calls from Python."""
    readers: dict[str, tuple[str, Any]] = {name: (op, METHODS[name]) for op in FIELDS for name in FIELDS[op].methods}
    readers |= {name: (op, FIELDS[op].reader(op, FIELDS[op], name)) for name, op in ONE_TENSOR.items()}
    for name, (op, read) in readers.items():
        original = getattr(ProcessGroup, name, None)
        if original is not None:
            method = record_method(op, name, read, _issuer(name, original))
            patches.put(ProcessGroup, name, functools.update_wrapper(method, original))
    for name, method in hook_methods().items():
        patches.put(ProcessGroup, name, method)


def _issuer(name: str, original: Any) -> Callable[..., Any]:
    """Return a function that calls torch's own method and makes the hooks skip this call, which is already recorded."""

    def issue(guard: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(guard, HookedGroup):
            return original(guard, *args, **kwargs)
        if guard.inherited is not None:
            guard.inherited.note(name)
        me = get_ident()
        before = _issuing.get(me)
        _issuing[me] = guard
        try:
            return original(guard.ref(), *args, **kwargs)
        finally:
            if before is None:
                del _issuing[me]
            else:
                _issuing[me] = before

    return issue


# What a hook is told -------------------------------------------------------------------------------

ONE_LIST = {"ALLREDUCE": "all_reduce", "BROADCAST": "broadcast", "REDUCE": "reduce", "BARRIER": "barrier"}
TWO_LISTS = {"GATHER": "gather", "SCATTER": "scatter", "ALLTOALL": "all_to_all"}


def call_of(hook_call: Any, ranks: tuple[int, ...], caller: FrameType | None) -> MethodCall | None:
    """Return the call that a pre-hook reports, or None if it moves no data.

    Messages give None, too, because a hook does not get their tag.
    """
    name, inputs, outputs = hook_call.name.name, hook_call.input_tensors, hook_call.output_tensors
    num_in, num_out, size = len(inputs), len(outputs), len(ranks)
    single = num_in == num_out == 1
    given: Mapping[str, Any] = {}
    if name in ("ALLREDUCE", "REDUCE_SCATTER", "ALLTOALL"):
        given = _of_functional(caller)
    if name in ONE_LIST:
        op = "all_reduce_coalesced" if name == "ALLREDUCE" and num_in > 1 else ONE_LIST[name]
    elif name == "ALLGATHER":
        op = "all_gather_into_tensor"
        if num_in == num_out > 1:
            op = "all_gather_into_tensor_coalesced"
        elif num_out > 1:
            op = "all_gather" if num_in == 1 else "all_gather_coalesced"
    elif name == "REDUCE_SCATTER":
        op = "reduce_scatter_tensor" if single else "reduce_scatter_tensor_coalesced"
        if num_in == num_out * size > num_out:
            op = "reduce_scatter"
    elif name in TWO_LISTS:
        op = "all_to_all_single" if name == "ALLTOALL" and single else TWO_LISTS[name]
    else:
        return None
    fields = FIELDS[op]
    some = inputs or outputs
    first = some[0] if some else None
    dtypes = tuple([tensor.dtype for tensor in some])
    root = hook_call.root if fields.rooted and 0 <= hook_call.root < size else None
    splits = op == "all_to_all_single"
    unsaid = splits and not given  # as shares of one size they might contradict each other
    key = (
        op,
        () if unsaid else tuple([tensor.shape for tensor in inputs]),
        () if unsaid or fields.in_place else tuple([tensor.shape for tensor in outputs]),
        None if first is None else dtypes if len(set(dtypes)) > 1 else dtypes[0],
        _reduce_op(given, caller) if fields.reduces else None,
        None if root is None else ranks[root],
        _splits(given.get("input_split_sizes")) if splits else None,
        _splits(given.get("output_split_sizes")) if splits else None,
        None if first is None else first.device,
    )
    return MethodCall(key, True, first, False, -1, 0, inputs, inputs if fields.in_place else outputs)


def _of_functional(caller: FrameType | None) -> Mapping[str, Any]:
    """Return the arguments of the functional collective that makes the call.

    Empty if no functional collective makes it, or if it is compiled.
    """
    for _ in range(FAR):
        if caller is None:
            break
        if caller.f_code.co_filename.endswith(FUNCTIONAL):
            return caller.f_locals
        caller = caller.f_back
    return {}


def _reduce_op(given: Mapping[str, Any], caller: FrameType | None) -> int | None:
    """Return torch's number of the reduce operation, or None if it is unknown. None matches any operation."""
    name = given.get("reduceOp")
    if name is None:  # DDP divides by itself, and sums
        return 0 if caller is not None and caller.f_code is BACKWARD else None
    name = str(name).upper()
    return REDUCE_OPS.index(name) if name in REDUCE_OPS else None


def _splits(given: Any) -> tuple[int, ...]:
    try:
        return tuple([int(one) for one in given or ()])
    except (TypeError, ValueError):
        return ()
