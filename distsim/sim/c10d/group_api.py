"""Process group API besides collectives: dispatch modes, hooks, newer methods, queries."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import FrameType, SimpleNamespace
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed import c10d_logger

from distsim.debug.records import Group
from distsim.debug.records.arguments import SYNCHRONOUS_P2P, MethodCall
from distsim.debug.records.frames import Owner, owner
from distsim.errors import NotSimulated
from distsim.sim.device.operators.kinds import hidden_methods
from distsim.sim.isolation.for_ranks import patch_around
from distsim.sim.isolation.process import current_task
from distsim.torch_compat import groups as group_names
from distsim.torch_compat.device import POP_MODE_TEMPORARILY

# -- A program's own TorchDispatchModes see the calls of simulated groups, as torch's dispatcher shows them:
# CommDebugMode counts them, DebugMode prints them.
#
# torch leads a call of a real group through an operator `c10d::...`. A simulated group is called by Python and carries
# the call out itself; only where somebody looks is each mode handed that operator, above the rank's own mode.

OPERATORS = {
    "all_reduce": "allreduce_",
    "all_reduce_coalesced": "allreduce_coalesced_",
    "broadcast": "broadcast_",
    "reduce": "reduce_",
    "all_gather": "allgather_",
    "all_gather_coalesced": "allgather_coalesced_",
    "all_gather_into_tensor": "_allgather_base_",
    "all_gather_into_tensor_coalesced": "allgather_into_tensor_coalesced_",
    "gather": "gather_",
    "scatter": "scatter_",
    "reduce_scatter": "reduce_scatter_",
    "reduce_scatter_tensor": "_reduce_scatter_base_",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_tensor_coalesced_",
    "all_to_all": "alltoall_",
    "all_to_all_single": "alltoall_base_",
    "barrier": "barrier",
    "monitored_barrier": "monitored_barrier_",
    "send": "send",
    "recv": "recv_",
}
"""The operator `c10d::...` through which torch's dispatcher leads each call (torch/csrc/distributed/c10d/Ops.cpp)."""

_pop_mode_temporarily = POP_MODE_TEMPORARILY.get()


def through_modes(group: Any, call: MethodCall, carry_out: Callable[[], Any]) -> Any:
    """Return the result of *carry_out*, called below all dispatch modes of the program."""
    packet = getattr(torch.ops.c10d, OPERATORS[call.key[0]])
    given = c10d_arguments(OPERATORS[call.key[0]], call.inputs, call.outputs)
    tensors = [argument for argument in given if argument is not None]
    real = getattr(packet, packet.overloads()[0])
    also_tensors = len(real._schema.returns) > 1

    def below(*_: Any, **__: Any) -> Any:
        with _pop_mode_temporarily() as mode:
            if not (mode.is_infra_mode() or _is_ours(mode)):
                return mode.__torch_dispatch__(operator, (), (*tensors, group), {})
        work = carry_out()
        return (tensors[0], work) if also_tensors else work

    operator = _Carried(real, below)
    result = below()
    return result[-1] if also_tensors else result


def _is_ours(mode: Any) -> bool:
    return type(mode).__module__.startswith("distsim.")


class _Carried:
    """Stand-in for torch's operator *real*.

    Calling it continues with the next dispatch mode, or carries out the collective.
    """

    def __init__(self, real: Any, call: Callable[..., Any]) -> None:
        self._real = real
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def __eq__(self, other: object) -> bool:
        return bool(self._real == other)

    def __hash__(self) -> int:
        return hash(self._real)

    def __str__(self) -> str:
        return str(self._real)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._real)


def c10d_arguments(operator: str, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
    """Return the arguments of `c10d::operator`: tensors where its schema has them, and None for the others."""
    packet = getattr(torch.ops.c10d, operator)
    arguments: list[Any] = []
    for argument in getattr(packet, packet.overloads()[0])._schema.arguments:
        value = (outputs if argument.name.startswith("output") else inputs) or inputs or outputs
        kind = str(argument.type)
        if "Tensor" not in kind or kind.startswith("Optional"):
            arguments.append(None)
        elif kind == "List[List[Tensor]]":
            arguments.append([list(value)])
        elif kind == "List[Tensor]":
            arguments.append(list(value))
        else:  # one tensor; that of a barrier only says which device
            arguments.append(value[0] if value else torch.empty(1, device="meta"))
    return arguments


# -- Where in the user's program a call was made.

_BETWEEN = (
    "/distributed_c10d.py",
    "/c10d_logger.py",
    "/torch/_library/autograd.py",
    "/torch/_ops.py",
    "/torch/overrides.py",
    "/utils/_device.py",
    "/_comm_mode.py",
)
"""Files of torch between a user's call of torch.distributed and us; the last two under torch.set_default_device and
CommDebugMode."""
_C10D = (vars(c10d), vars(c10d_logger))


def handle_is_the_users(frame: FrameType) -> bool:
    """Return whether the user's own code called torch.distributed.

    Calls by torch's own code (DDP's join, ZeRO, functional collectives) keep or drop handles as torch decides.
    """
    walk: FrameType | None = frame
    while walk is not None and owner(walk.f_code.co_filename) is not Owner.USER:
        file = walk.f_code.co_filename
        if "/torch/" in file and not file.endswith(_BETWEEN):
            return False
        walk = walk.f_back
    return True


def waits_itself(frame: FrameType | None) -> bool:
    """Return whether the function of torch.distributed that a program called waits for its message.

    `send` calls `isend`, and `send_object_list` calls `send`.
    """
    while frame is not None and any(frame.f_globals is one for one in _C10D):
        if frame.f_code.co_name in SYNCHRONOUS_P2P:
            return True
        frame = frame.f_back
    return False


def with_methods(call: MethodCall) -> MethodCall:
    """Return *call* with an alias for each tensor that has lost methods to its own attributes."""

    def aliases(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        return [torch.Tensor.detach(t) if hidden_methods(t) else t for t in tensors]

    inputs = aliases(call.inputs)
    outputs = inputs if call.outputs is call.inputs else aliases(call.outputs)
    return call._replace(inputs=inputs, outputs=outputs)


# -- What groups of torch 2.14 and later have beside those of older releases: hooks on calls, windows, reconfiguration.
#
# A method is there only where torch's own groups have it, so that `hasattr` answers as for a real group.


def _refused(name: str, advice: str) -> Callable[..., NoReturn]:
    def method(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotSimulated(f"ProcessGroup.{name}", advice)

    return method


_REFUSED = {
    **dict.fromkeys(
        (f"{verb}_{kind}_hook" for verb in ("register", "unregister") for kind in ("pre", "post", "abort")),
        "leave it out: the report has every call (--report FILE)",
    ),
    **dict.fromkeys(("gather_single", "gather_into_tensor"), "call torch.distributed.gather"),
    **dict.fromkeys(("get_reconfigure_handle", "reconfigure"), "call init_process_group(enable_reconfigure=True)"),
}


def _add_ephemeral_timeout(self: Any, timeout: Any) -> None:
    """Do nothing: a simulated call gets its timeout (its own or that of the group) when it is made."""


_METHODS: dict[str, Any] = {
    **{name: _refused(name, advice) for name, advice in _REFUSED.items()},
    "supports_window": property(lambda self: "nccl" in self._backends.values()),
    "supports_reconfigure": False,
    "_add_ephemeral_timeout": _add_ephemeral_timeout,
    "get_backend": lambda self, device: self._get_backend(device),
}


def hook_patches() -> list[tuple[Any, str, Any]]:
    """Return patches (holder, attribute, replacement) for the hooks that torch brings itself: C++ would call them,
    and does not.
    """
    patches = []
    for name, advice in (
        (group_names.NAN_CHECK_HOOK, "distsim names the rank whose tensor has the first NaN"),
        (group_names.FLIGHT_RECORDER_HOOK, "the report has every call (--report FILE)"),
    ):
        hook = name.get(None)
        if hook is not None:
            patches.append((hook, "attach", staticmethod(_attach(hook.attach, name.attribute, advice))))
    return patches


def _attach(real: Callable[..., Any], name: str, advice: str) -> Callable[..., Any]:
    def attach(pg: Any, *args: Any, **kwargs: Any) -> Any:
        task = current_task()
        if task is None:
            return real(pg, *args, **kwargs)
        if sys._getframe(1).f_globals.get("__name__") != c10d.__name__:
            raise NotSimulated(f"torch's {name}", f"leave it out: {advice}")
        if not args:  # TORCH_DIST_NAN_CHECK; torch 2.15 attaches its recorder, with arguments, to every group of NCCL
            task.port.note(f"torch's {name} records nothing in a simulation; {advice}")
        return SimpleNamespace(remove=lambda: None)

    return attach


# -- DistributedDataParallel's own questions to its group's C++.


def ddp_patches() -> list[tuple[Any, str, Any]]:
    """Return patches (holder, attribute, replacement) for what DDP asks of its group or of CUDA in C++."""
    return [
        patch_around(name.holder(), name.attribute, ours)
        for name, ours in (
            (group_names.GET_DDP_LOGGING_DATA, _logging_data),
            (group_names.SET_RUNTIME_STATS_AND_LOG, _set_runtime_stats),
            (group_names.REGISTER_BUILTIN_COMM_HOOK, _register_builtin_comm_hook),
        )
        if name.get()
    ]


def _logging_data(real: Callable[[Any], Any], self: Any) -> Any:
    data = real(self)
    if "backend_name" in data and isinstance(self.process_group, Questions):
        data["backend_name"] = self.process_group.name()  # C++ asked getBackendName
    return data


def _set_runtime_stats(real: Callable[[Any], None], self: Any) -> None:
    """Ignore the call: its timer of CUDA events is in a library that a build without CUDA lacks."""
    task = current_task()
    if task is None or task.process.accelerators is None or not task.process.accelerators.used:
        real(self)


def _register_builtin_comm_hook(real: Callable[[Any, Any], None], self: Any, comm_hook_type: Any) -> None:
    """Register Python's hook of that kind: C++ asks the group's future for a list that only C++ can make."""
    if not isinstance(self.process_group, Questions):
        real(self, comm_hook_type)
        return
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    kinds = dist.BuiltinCommHookType
    hooks = {kinds.ALLREDUCE: default_hooks.allreduce_hook, kinds.FP16_COMPRESS: default_hooks.fp16_compress_hook}

    @functools.wraps(hooks[comm_hook_type])
    def hook(state: Any, bucket: Any) -> Any:
        return hooks[comm_hook_type](state, bucket)

    hook.__qualname__ = str(comm_hook_type)  # which DDP's logging data repeat
    self.register_comm_hook(self.process_group, hook)


def add_newer_methods(group: type) -> None:
    """Add to class *group* those methods that this torch's groups have."""
    for name, method in _METHODS.items():
        if hasattr(dist.ProcessGroup, name):
            setattr(group, name, method)


class ShrinkChecked(Exception):
    """Ends torch's `shrink_group` once it has checked its arguments: the excluded ranks, flags and options."""


class Questions(dist.ProcessGroup):
    """Answers of *group*'s member *group_rank* to queries. *backends* maps device types to the requested backend."""

    def __init__(
        self,
        group: Group,
        group_rank: int,
        backends: dict[str, str],
        timeout: timedelta,
        explicit_timeout: bool,
        store: Any,
    ) -> None:
        super().__init__(group_rank, len(group.ranks))
        self.group_rank, self._members = group_rank, len(group.ranks)  # past C++, which every call would ask
        self._group = group
        self._backends = backends
        names = list(backends.values())
        self.backend = "nccl" if "nccl" in names else next(iter(names), "sim")
        """The default backend: NCCL where several are given, as `_new_process_group_helper` decides."""
        host, gpu = backends.get("cpu"), backends.get("cuda")
        self.has_two_backends = host is not None and gpu is not None and host != gpu
        self.others: dict[str, Questions] = {}
        """Groups of calls that are matched apart, by kind (`Group.beside`); each is made when first used."""
        self._timeout = timeout
        self._explicit = explicit_timeout
        self._store = store
        self._numbers = {"collective": 0, "p2p": 0}

    def getBackendName(self) -> str:
        """Return the name for C++. It must not be `gloo`, because DDP's logger would take the group for a C++
        ProcessGroupGloo."""
        return "sim"

    def name(self) -> str:
        return self.backend

    _get_backend_name = name

    def backend_config(self) -> str:
        """Return `nccl`, or `cpu:gloo,cuda:nccl` if backends differ by device."""
        if len(set(self._backends.values())) < 2:
            return self.name()
        return ",".join(f"{device}:{backend}" for device, backend in self._backends.items())

    @property
    def group_name(self) -> str:
        return self._group.name

    @property
    def group_desc(self) -> str:
        return self._group.description

    def _set_group_name(self, name: str) -> None:
        """Do nothing: the name is set when the group is created."""

    _set_group_desc = _set_group_name

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(kind) for kind in self._backends]

    def _flavour(self, device: torch.device) -> str:
        flavour = self._backends.get(device.type)
        if flavour is None:
            raise RuntimeError(f"No backend type associated with device type {device.type}")
        return flavour

    def flavour_on(self, device: str) -> str:
        """Return the library whose algorithms a call with tensors on *device* uses."""
        return self._backends.get(device.partition(":")[0]) or self.name()

    if dist.is_gloo_available():  # torch may be built without
        create_device = staticmethod(dist.ProcessGroupGloo.create_device)
        create_default_device = staticmethod(dist.ProcessGroupGloo.create_default_device)

    options: Any = None
    """Options of the communicator, which change nothing here."""
    num_splits = 0
    """Times that the communicator of this group was divided."""

    supports_time_estimate = _supports_time_estimate = False  # torch up to 2.14, and from 2.15 on

    @property
    def supports_shrinking(self) -> bool:
        return "nccl" in self._backends.values()

    def shrink(self, excluded: list[int], flags: int, options: Any) -> Any:
        """Return to `shrink_group` (backend.py), once torch has checked the arguments."""
        raise ShrinkChecked(excluded, flags, options)

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return False

    @property
    def supports_coalescing(self) -> bool:
        return "nccl" in self._backends.values()

    def get_group_store(self) -> Any:
        return self._store

    def _register_on_completion_hook(self, hook: Any) -> None:
        if self.name() == "gloo":  # torch's own words, spelling included
            raise RuntimeError("Only ProcessGrouppNCCL supports onCompletion hook, but got gloo backend.")
        raise NotSimulated("ProcessGroup._register_on_completion_hook", "call work.get_future().then(...)")

    @property
    def mem_allocator(self) -> Any:
        raise NotSimulated("ProcessGroup.mem_allocator", "allocate with torch.empty(..., device='cuda')")

    def comm_split_count(self) -> int:
        return self.num_splits

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self._explicit = True
        for other in self.others.values():
            other.set_timeout(timeout)

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self) -> None:
        pass

    def _get_sequence_number_for_group(self) -> int:
        return self._numbers["collective"]

    def _wait_for_pending_works(self) -> None:
        pass

    def _enable_collectives_timing(self) -> None:
        pass

    def shutdown(self) -> None:
        pass
