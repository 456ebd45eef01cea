"""GuardedGroup process group: torch's own group does the work, and every call is recorded first.

Two traps, both measured. The base of a Python process group must never be called (`super().allreduce` holds the GIL
while it waits for gloo's queue lock and deadlocks), so calls go to the plain C++ group inside, whose methods release
the GIL. And methods that are not overridden must reach the real backends, so these are registered with the guarded
group, too.

The methods are entry points to the fast path (`fast_path`): C++ code (DDP's reducer, functional collectives) and
coalesced calls use them.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from distsim.debug.records import P2P, Group
from distsim.debug.records.arguments import FIELDS, METHODS, MethodCall, Reader
from distsim.debug.records.obligations import RECONFIGURE
from distsim.debug.rings import layout as rings
from distsim.realexec.guard.fast_path import BACKWARD, MISSED, looks_of, may_be_kept, remember, through
from distsim.realexec.guard.handle import (
    KEEPS_ALIVE,
    Handle,
    HostHandle,
    MessageHandle,
    MessageWork,
    SyncHandle,
    keep_alive,
    watched,
)
from distsim.realexec.guard.recorder import GroupLog, Made, Recorder
from distsim.realexec.guard.tensor_checks import Checksums, find_nan
from distsim.text.tracebacks import error_line
from distsim.torch_compat import groups

C10D = vars(c10d)

Words = Callable[[tuple[int, ...], tuple[Any, ...], bool], tuple[Sequence[Any], bool, Any]]
"""Function that reads a method's arguments: (ranks, arguments, is C++ the caller) -> (tensors, later, other
arguments).

*later* says that the caller continues at once. Raises TypeError, ValueError or similar if the arguments do not fit
the method, or if no backend accepts them.
"""
Backend = groups.BACKEND.get(None)
profiler_enabled, dispatch_modes = groups.PROFILES.get(groups.unknown), groups.DISPATCH_MODES.get(groups.unknown)
transforms = groups.TRANSFORMS.get(groups.unknown)

GLOO_RANK = 3
PASSED_THROUGH = (
    *("get_group_store", "split_group", "merge_remote_group", "abort", "shutdown", "set_timeout"),
    *("get_reconfigure_handle", "new_window", "register_abort_hook", "unregister_abort_hook"),
)
"""Methods of the C++ group that need its own store or its backends' state, where the installed torch has them."""


def words_of(op: str, read: Reader) -> Words:
    """Return the function that reads the arguments of *op*'s methods. Frequent calls of a training are read without
    a `MethodCall`.
    """
    fields = FIELDS[op]
    reduces, rooted = fields.reduces, fields.rooted

    def in_place(ranks: tuple[int, ...], args: tuple[Any, ...], goes_on: bool) -> tuple[Sequence[Any], bool, Any]:
        tensors, opts = args
        if type(tensors) is not list:
            raise TypeError
        later = goes_on or opts.asyncOp is not False
        return tensors, later, (later, hash(opts.reduceOp) if reduces else 0, opts.rootRank if rooted else 0)

    def out_in(ranks: tuple[int, ...], args: tuple[Any, ...], goes_on: bool) -> tuple[Sequence[Any], bool, Any]:
        output, source, opts = args
        tensors = (*output, *source) if type(output) is list is type(source) else (output, source)
        later = goes_on or opts.asyncOp is not False
        return tensors, later, (later, hash(opts.reduceOp) if reduces else 0, opts.rootRank if rooted else 0)

    def lists(ranks: tuple[int, ...], args: tuple[Any, ...], goes_on: bool) -> tuple[Sequence[Any], bool, Any]:
        output, source, opts = args
        outputs = [*output[0], *output[1:]] if type(output[0]) is list else output
        sources = [*source[0], *source[1:]] if type(source[0]) is list else source
        later = goes_on or opts.asyncOp is not False
        root = opts.rootRank if rooted else 0
        return [*outputs, *sources], later, (later, hash(opts.reduceOp) if reduces else 0, root, len(outputs))

    def no_tensor(ranks: tuple[int, ...], args: tuple[Any, ...], goes_on: bool) -> tuple[Sequence[Any], bool, Any]:
        (opts,) = args
        later = goes_on or opts.asyncOp is not False
        return (), later, later

    def other(ranks: tuple[int, ...], args: tuple[Any, ...], goes_on: bool) -> tuple[Sequence[Any], bool, Any]:
        call = read(ranks, args, {})
        if not call.direct:
            raise TypeError
        return (*call.inputs, *call.outputs), call.is_async, (call.key, call.is_async, call.peer, call.tag)

    if fields.in_place:
        return in_place
    if fields.lists:
        return lists
    return no_tensor if op == "barrier" else out_in if "tensor" in op else other


class _Ended:
    """Handle of a synchronous call that has ended. torch's own function waits for it immediately."""

    def wait(self, timeout: Any = None) -> bool:
        return True


ENDED = _Ended()


def again(
    guard: Any, method: Any, name: str, words: Words, args: tuple[Any, ...], caller: FrameType
) -> tuple[Any, Any]:
    """Make a call of a group's method by the fast path.

    Return its handle, or MISSED, and the key under which `keep` caches the call. Synchronous calls are left to
    torch.
    """
    try:
        tensors, later, options = words(guard.group_log.ranks, args, caller.f_code is BACKWARD)
    except (TypeError, ValueError, AttributeError, LookupError):
        return MISSED, None
    if not (later or caller.f_globals is C10D):
        return MISSED, None
    answer = through(method, name, tensors, args, options, guard, later, caller)
    if answer is MISSED:
        return MISSED, (name, tensors, options)
    if answer is None:
        return ENDED, None
    if type(answer) is MessageHandle and caller.f_globals is not C10D:
        answer = MessageWork.of(answer)
    if KEEPS_ALIVE and isinstance(answer, Handle):
        keep_alive(answer)
    return answer, None


def keep(guard: Any, by: tuple[str, Sequence[Any], Any], made_call: Made, caller: FrameType) -> None:
    """Cache a method's call that the slow path has just made."""
    name, tensors, options = by
    looks = looks_of(tensors)
    if looks is not None and may_be_kept(guard, made_call, made_call.call.is_async, caller):
        words = guard.recorder.ring.words
        remember(guard.group_log, name, tensors, looks, made_call, len(made_call.args), options, caller, words)


class GuardedGroup(ProcessGroup):
    """A group that replaces torch's own, `inner`, and records its calls."""

    def __init__(self, inner: ProcessGroup, log: GroupLog, recorder: Recorder) -> None:
        super().__init__(inner.rank(), inner.size())
        self.inner: Any = inner
        """torch's own group."""
        self.group_log = log
        self.first_ranks = log.ranks
        """Global ranks before the group was first reconfigured."""
        self.recorder: Recorder | None = recorder
        self.fast: Any = None
        """The gloo backend if calls may take the fast path (`fast_path`), else None."""
        self.nan = False
        """Whether outgoing tensors are searched for NaN (opt-in)."""
        self.checksums: Checksums | None = None
        """Detector of buffers that the program writes to while a call uses them; None unless the user opts in."""
        self.strict: Any = None
        """Strict level: compares a call with its peers' before any byte is sent; None at other levels."""
        self.silent: Any = None
        """Collector for the search for silent faults; None unless the user opts in."""
        self.later: type[HostHandle] = HostHandle
        """Handle class of asynchronous collectives on CPU tensors."""
        self.hooks: set[tuple[str, int]] = set()
        """The program's own hooks on the group, by kind and id. They run in torch's group, so no call may bypass it."""
        self.on_host: Any = None
        """Guard of the backend of CPU tensors, if they have a separate one (`Group.on_host`)."""
        if inner.bound_device_id is not None:
            self.bound_device_id = inner.bound_device_id
        self.backends: dict[str, Any] = dict(groups.share_backends(inner, self, _backend_type))
        """Backends by device type; empty if *inner* is a Python group."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return global ranks in group order."""
        return self.group_log.ranks

    def has_two_backends(self) -> bool:
        """Return whether the CPU's backend differs from the others."""
        host = self.backends.get("cpu")
        return host is not None and any(backend.name() != host.name() for backend in self.backends.values())

    def decide_way(self) -> None:
        """Decide whether calls may take the fast path. Call it after the opt-in checks are set."""
        gloo = self.backends.get("cpu")
        plain = not self.nan and self.checksums is None and self.silent is None
        plain = plain and self.on_host is None and not self.hooks
        self.later = HostHandle if self.strict is None else self.strict.handle
        self.fast = gloo if plain and type(gloo).__name__ == "ProcessGroupGloo" else None

    def detach(self) -> None:
        """Stop recording; the calls continue."""
        self.recorder = None

    def note_hook(self, kind: str, hook_id: int, registered: bool) -> None:
        """Note that the program has registered or removed a hook on the group."""
        for guard in (self, self.on_host):
            if guard is not None:
                (guard.hooks.add if registered else guard.hooks.discard)((kind, hook_id))
                guard.decide_way()

    def forked(self, stand_in: Callable[[Any], Any]) -> None:
        """Switch to a forked child: *stand_in* creates the object that notes its calls, which are not recorded."""
        self.recorder = None
        self.inner = stand_in(self.inner)

    def ranks_of(self, handles: Any) -> tuple[int, ...]:
        """Return the global ranks that handles name: gloo's have the rank in the first group as their fourth field,
        those of NCCL only the rank in the present one.
        """
        ordered = sorted(handles) if isinstance(handles, set) else list(handles)
        fields = [handle.split(":") for handle in ordered]
        of_gloo = all(field[0] == "gloo" and len(field) > GLOO_RANK for field in fields)
        before = self.first_ranks if of_gloo else self.group_log.ranks
        numbers = [field[GLOO_RANK if of_gloo else 1] if len(field) > 1 else "" for field in fields]
        known = all(number.isdigit() and int(number) < len(before) for number in numbers)
        return tuple(before[int(number)] for number in numbers) if known else tuple(range(len(ordered)))

    @property
    def group_name(self) -> str:
        return str(self.inner.group_name)

    @property
    def group_desc(self) -> str:
        return str(self.inner.group_desc)

    def _has_hooks(self) -> bool:
        return bool(self.backends) and bool(groups.HAS_HOOKS.get(groups.without_hooks)(self.inner))


class HeldGroup(GuardedGroup):
    """Guard of a group that the program created before the guard was installed.

    torch.distributed gets this group in place of the old one. Calls on the program's old references are not
    recorded.
    """

    def __eq__(self, other: object) -> bool:
        return other is self or other is self.inner

    def __hash__(self) -> int:
        return hash(self.inner)


def _backend_type(backend: Any) -> Any:
    kinds = ProcessGroup.BackendType
    name = str(backend.name()).upper()
    return getattr(kinds, name, kinds.CUSTOM)


UNWATCHED = frozenset({"backward", "_verify_params_across_processes"})
"""Library functions that call from C++ and take futures. Their buffers are not checksummed."""


PUBLIC = frozenset({*FIELDS, "isend", "irecv", "all_gather_single", "reduce_scatter_single", "gather_single"})
"""Functions that return a handle to the user. torch's own code (such as DDP's join) drops some handles without harm."""


def _torchs_own(name: str, of_backend: Any) -> Callable[..., Any]:
    """Return the function that makes a recorded call: method *name* of torch's group, or *of_backend* if it does the
    same.
    """

    def raw(self: GuardedGroup, call: MethodCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # The group goes through torch's dispatcher, which sparse, fake and quantized tensors, negated and conjugated
        # views, modes, transforms of torch.func and the profiler need, and which costs more than all of the guard;
        # plain tensors go to their backend at once.
        first = call.first
        if (
            first is not None
            and call.direct
            and not kwargs
            and not self.hooks
            and of_backend is not None
            and (type(first) is Tensor or type(first) is Parameter)
            and first.layout is torch.strided
            and not first.is_neg()
            and not first.is_conj()
            and not first.is_quantized
            and transforms() is None
            and not profiler_enabled()
            and not dispatch_modes()
        ):
            backend = self.backends.get(first.device.type)
            if backend is not None:
                return of_backend(backend, *args)
        return getattr(self.inner, name)(*args, **kwargs)

    return raw


def _remember_call(guard: GuardedGroup, made_call: Made, key: Any, caller: FrameType) -> None:
    """Cache a call: in the group's log if `fast_path.learn` waits for it, else under *key*."""
    log = guard.group_log
    if log.last is not None:
        log.last = made_call
    elif key is not None:
        keep(guard, key, made_call, caller)


def _note_failure(
    recorder: Recorder, log: GroupLog, name: str, call: MethodCall, index: int, error: BaseException
) -> None:
    """Record that torch raised an exception instead of making a call."""
    if name == "monitored_barrier":
        recorder.ring.fail(index, error_line(error))
        log.busy = 0
        return
    op = call.key[0]
    recorder.not_issued(log, (op, call.peer, call.tag) if op in P2P else None, index, error_line(error))


def _handle_of(
    guard: Any,
    recorder: Recorder,
    work: Any,
    op: str,
    index: int,
    is_async: bool,
    on_host: bool,
    owned: bool,
    by_torch: bool,
    after: Any,
) -> Any:
    """Return the handle of a call that torch has made. *by_torch* says that one of torch's public functions made it."""
    if is_async and on_host and after is None:
        message = MessageHandle if by_torch else MessageWork
        handle = watched(message if op in P2P else guard.later, work, guard.group_log, index, owned)
    else:
        handle = Handle(work, recorder, guard.group_log, index, is_async, on_host, owned, op in P2P)
        handle._after = after
    if KEEPS_ALIVE:
        keep_alive(handle)
    return handle


def record_method(op: str, name: str, read: Reader) -> Callable[..., Any]:
    """Return a method that records the call that it makes.

    Args:
        op: torch.distributed's name of the operation.
        name: Name of the method.
        read: Reads its arguments.
    """
    of_backend = getattr(Backend, groups.BACKEND_NAMES.get(name, name), None)
    words, only_options = words_of(op, read), op == "barrier"
    raw = _torchs_own(name, of_backend)

    def plain(self: GuardedGroup, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return getattr(self.inner, name)(*args, **kwargs)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.on_host is not None:
            with suppress(TypeError, ValueError, AttributeError, LookupError):  # torch says so below
                self = self.on_host if read(self.ranks, args, kwargs).is_for_host() else self
        recorder = self.recorder
        if recorder is None:
            return plain(self, args, kwargs)
        log = self.group_log
        key = None
        caller = sys._getframe().f_back  # None: a thread of C++ calls, with nothing of Python below
        if only_options and len(kwargs) == 1 and not args:  # torch's own function gives them by name
            args, kwargs = tuple(kwargs.values()), {}
        if self.fast is not None and log.last is None and not kwargs and of_backend is not None and caller is not None:
            work, key = again(self, of_backend, name, words, args, caller)
            if work is not MISSED:
                return work
        try:
            call = read(log.ranks, args, kwargs)
        except (
            TypeError,
            ValueError,
            AttributeError,
            LookupError,
        ):  # arguments of no such method: torch says so in its words
            return plain(self, args, kwargs)
        if self.silent is not None:
            self.silent.on_call(call, log.ranks, log.world.rank, caller)
        site = recorder.sites.here(2 if caller is not None else 1)
        index, is_async, seq, fingerprint = recorder.begin(log, call, site)
        op, device, owned = call.key[0], call.key[8], site[2] in PUBLIC
        on_host = device is None or device.type == "cpu"
        if (
            (key is not None or log.last is not None)
            and self.fast is not None
            and on_host
            and call.direct
            and caller is not None
        ):
            body = recorder.ring.template(index)
            made_call = Made(threading.get_ident(), call, index, body, args or tuple(kwargs.values()), owned)
            _remember_call(self, made_call, key, caller)
        after = None
        if self.nan:
            find_nan(recorder, call, index, log.world.rank)
        if self.checksums is not None and is_async and site[2] not in UNWATCHED:
            args, after = self.checksums.begin(call, index, args, log.world.rank)
        if self.strict is not None:
            deferred = self.strict.hold(
                self, call, index, seq, fingerprint, is_async, lambda: raw(self, call, args, kwargs)
            )
            if deferred is not None:
                deferred._after = after
                deferred._touched = not (is_async and owned)
                if KEEPS_ALIVE:
                    keep_alive(deferred)
                return deferred
        try:
            work = raw(self, call, args, kwargs)
        except BaseException as error:
            _note_failure(recorder, log, name, call, index, error)
            raise
        if work is None:  # monitored_barrier has ended; a coalesced call ends with its block
            recorder.ring.finish(index, rings.COMPLETED)
            log.busy = 0
            return None
        by_torch = caller is not None and caller.f_globals is C10D  # one of its public functions
        if by_torch and not is_async and self.fast is not None and on_host and op not in P2P:
            return SyncHandle(work, recorder.ring, log, index)
        return _handle_of(self, recorder, work, op, index, is_async, on_host, owned, by_torch, after)

    call.__name__ = name
    call.__qualname__ = f"GuardedGroup.{name}"
    return call


def _pass_through(name: str) -> Callable[..., Any]:
    raw = getattr(ProcessGroup, name)

    def call(self: GuardedGroup, *args: Any, **kwargs: Any) -> Any:
        return raw(self.inner, *args, **kwargs)

    call.__name__ = name
    return call


def _reconfigure(self: GuardedGroup, opts: Any) -> Any:
    """Record the call by which the members of the group change (torch 2.14), and from then on their new group."""
    recorder, log = self.recorder, self.group_log
    if recorder is None:
        return self.inner.reconfigure(opts)
    group = Group(log.name, self.group_desc, log.ranks).reconfigured(opts.uuid, self.ranks_of(opts.handles))
    new = recorder.group_log(group.name, group.description, group.ranks, log.world)
    index = recorder.note(new, RECONFIGURE, 1)
    try:
        work = self.inner.reconfigure(opts)
    except BaseException as error:
        recorder.ring.error(index, error_line(error))
        recorder.ring.finish(index, rings.FAILED)
        raise
    recorder.ring.finish(index, rings.COMPLETED)
    self.group_log = new
    log.forget_all()
    return work


def _hook_method(name: str) -> Callable[..., None]:
    """Return the method *name* that registers or removes a hook (torch 2.14), which the guard has to know of."""
    raw, kind = getattr(ProcessGroup, name), name.split("_")[1]

    @functools.wraps(raw)
    def call(self: GuardedGroup, hook_id: int, *hook: Any) -> None:
        raw(self.inner, hook_id, *hook)
        self.note_hook(kind, hook_id, name.startswith("register"))

    return call


ONE_TENSOR = {"gather_single": "gather", "gather_into_tensor": "gather"}
"""Methods of torch 2.14 that take one tensor instead of a list, and the operation under which they are recorded."""


def _install_methods() -> None:
    if hasattr(ProcessGroup, "reconfigure"):
        setattr(GuardedGroup, "reconfigure", _reconfigure)  # noqa: B010
    for name, op in ONE_TENSOR.items():
        if hasattr(ProcessGroup, name):
            setattr(GuardedGroup, name, record_method(op, name, FIELDS[op].reader(op, FIELDS[op], name)))
    for name in ("register_pre_hook", "unregister_pre_hook", "register_post_hook", "unregister_post_hook"):
        if hasattr(ProcessGroup, name):
            setattr(GuardedGroup, name, _hook_method(name))
    for op, fields in FIELDS.items():
        for name in fields.methods:
            if hasattr(ProcessGroup, name):
                setattr(GuardedGroup, name, record_method(op, name, METHODS[name]))
    for name in PASSED_THROUGH:
        if hasattr(ProcessGroup, name):
            setattr(GuardedGroup, name, _pass_through(name))


_install_methods()


def guard_of(group: Any) -> GuardedGroup | None:
    """Return the recorder of a group's calls, or None."""
    return group if isinstance(group, GuardedGroup) else None


def group_ranks(inner: ProcessGroup, ranks: Sequence[int]) -> tuple[int, ...]:
    """Return the global ranks of a group. An empty list means the whole world, as in torch's own helper."""
    return tuple(ranks) or tuple(range(inner.size()))
