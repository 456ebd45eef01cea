"""`sim` as torch backend, and torch.distributed's state kept per simulated process.

torch's own `init_process_group`, `new_group` and all the rest run unchanged; only four things are
led elsewhere while a simulation runs: the `_world` that holds a process's groups, the helper that
makes a group (so that "gloo", "nccl" and "mpi" land here), the stores, and `Future.wait`.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from operator import attrgetter
from types import CodeType, SimpleNamespace
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from distsim.debug.records import CallRecord, Group, State, StoreWait
from distsim.debug.records.arguments import FIRST_CALLS, came_out
from distsim.errors import NotSimulated, UsageError
from distsim.sim.c10d import communicator, stores, work
from distsim.sim.c10d.extensions import reconfigure
from distsim.sim.c10d.extensions.symmetric_memory import symmetric_memory_patches
from distsim.sim.c10d.extensions.windows import new_window
from distsim.sim.c10d.group import SimGroup
from distsim.sim.c10d.group_api import ShrinkChecked, ddp_patches, hook_patches
from distsim.sim.c10d.operations import algorithms
from distsim.sim.c10d.rendezvous import Rendezvous, creations, default_group, meeting_place, recorded, start_patches
from distsim.sim.isolation.for_ranks import for_ranks, name_for_ranks, patch_around, patch_for_ranks
from distsim.sim.isolation.process import RankTask, SimProcess, current_task, require_task
from distsim.sim.isolation.torch_state.torch_state import STATE
from distsim.sim.kernel.port import RankPort
from distsim.torch_compat import groups as group_names

_World = group_names.DISTRIBUTED_C10D_WORLD.get()
_plugins = group_names.PLUGINS.get()
_register_process_group = group_names.REGISTER.get()

_real_world = group_names.WORLD.get()
_real_helper = group_names.NEW_GROUP_HELPER.get()
_SIMULATED = frozenset({"gloo", "nccl", "mpi", "sim", "undefined"})
_DEFAULT_TIMEOUTS = (timedelta(minutes=30), timedelta(minutes=10))


_MAPS = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "tags_to_pg", "pg_to_tag")
"""Attributes of the torch module that torch's `_World` reads."""


class ProcessWorld(_World):  # type: ignore[misc,valid-type]
    """torch's `_World` with everything in the instance, one for each simulated process."""

    def __init__(self) -> None:
        super().__init__()
        for name in _MAPS:
            self.__dict__["_" + name] = _GroupRanks() if name == "pg_group_ranks" else {}
        self._groups_made = 0

    @property
    def group_count(self) -> int:
        return self._groups_made

    @group_count.setter
    def group_count(self, value: int) -> None:
        self._groups_made = value


for _name in _MAPS:  # torch's are properties, which read one module's; no frame of Python's
    setattr(ProcessWorld, _name, property(attrgetter("_" + _name)))


class _GroupRanks(dict[Any, Any]):
    """Map of global rank to group rank, by group. All members share one map, because thousands of maps would be too
    large."""

    def __setitem__(self, pg: Any, places: dict[int, int]) -> None:
        if isinstance(pg, SimGroup):
            places = pg.shared_places(places)
        super().__setitem__(pg, places)


class _WorldProxy:
    """Replacement for `distributed_c10d._world` until the running process first asks for its own
    (torch_compat/state.py, REBOUND), and during shared imports."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_own_world(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_own_world(), name, value)  # past the property, too


def _own_world() -> Any:
    task = current_task()
    if task is None or STATE.importer is task:  # what a shared module takes as a default (group.WORLD) is everyone's
        return _real_world
    process = task.process
    if process.groups.c10d is None:
        parent = process.family.parent if process.family.is_forked else None
        inherited = None if parent is None else parent.groups.c10d
        process.groups.c10d = vars(c10d)[group_names.WORLD.attribute] = inherited or ProcessWorld()
    return process.groups.c10d


def register_backend() -> None:
    """Register the backend `sim` in torch."""
    if "SIM" not in _plugins:
        c10d.Backend.register_backend("sim", create_group, extended_api=True, devices=["cpu", "cuda"])
    if torch.__version__ >= "2.14":  # a TorchVersion, which compares by release
        for name in _NCCL_KINDS:  # a build without NCCL lacks them
            if name.upper() not in _plugins:
                c10d.Backend.register_backend(name, create_group, extended_api=True, devices=["cuda"])


def _new_process_group_helper(
    group_size: int,
    group_rank: int | None,
    global_ranks_in_group: list[int],
    backend: Any,
    store: Any,
    group_name: str,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call torch's helper with the backend replaced by `sim`, and restore the requested name afterwards."""
    task = current_task()
    if task is None:
        return _real_helper(group_size, group_rank, global_ranks_in_group, backend, store, group_name, *args, **kwargs)
    process = task.process
    if not global_ranks_in_group or process.rank in global_ranks_in_group:  # torch does not ask the others
        _check_names(str(backend).lower())
    config = c10d.BackendConfig(backend)
    by_device = {device: _family(name) for device, name in config.get_device_backend_map().items()}
    reconfigure.check_backends(kwargs, config.get_device_backend_map().values())
    names_asked = dict.fromkeys(by_device.values())
    alone = frozenset({"fake"}) if group_size == 1 else frozenset()  # where nobody else is, nothing is fake about it
    third_party = [name for name in names_asked if name not in _SIMULATED | alone]
    if third_party and len(third_party) < len(names_asked):
        simulated = next(name for name in names_asked if name in _SIMULATED)
        raise NotSimulated(
            f"backend {third_party[0]!r} beside {simulated!r}", "use gloo, nccl, mpi or sim for both devices"
        )
    if third_party:
        # torch's own `fake` moves nothing between ranks: a mesh has it for axes over which nothing is ever sent
        if third_party[0] in ("ucc", "xccl"):
            raise NotSimulated(f"backend {third_party[0]!r}", "use gloo, nccl, mpi or sim")
        if third_party[0] == "fake" and not global_ranks_in_group:
            task.port.note("backend fake: only one rank runs; its collectives move nothing and take no time")
        return _real_helper(group_size, group_rank, global_ranks_in_group, backend, store, group_name, *args, **kwargs)
    default = not global_ranks_in_group
    if group_size == -1:  # MPI assigns size and rank itself
        group_size, group_rank = task.port.world_size, process.rank
        if not isinstance(store, stores.PrefixStore):  # all ranks meet by MPI itself
            store = stores.HashStore(task.port.shared.open_store(("mpi", "")))
    record = None
    if not default:
        ranks = tuple(global_ranks_in_group)
        # a hashed name: made with use_local_synchronization, by the members alone and in any order
        local = not str(group_name).isdigit()
        where = Group(str(group_name), kwargs.get("group_desc") or "undefined", ranks) if local else creations(process)
        if (rendezvous := process.groups.rendezvous) is not None:
            where, ranks = rendezvous.in_job(where), rendezvous.in_job(Group("", "", ranks)).ranks
        record = recorded(process, "new_group", where, ranks, is_numbered=not local)
    if str(backend) == "undefined":
        by_device = {"cpu": "gloo", "cuda": "nccl"} if task.port.facts.cluster.node.num_gpus else {"cpu": "gloo"}
    process.groups.requested = (by_device, kwargs.get("group_desc"), record)
    parent = None if default else _own_world().default_pg
    if isinstance(parent, SimGroup) and parent.bound_device_id is not None and by_device.get("cuda") == "nccl":
        _divide(parent)
    pg, prefix_store = _real_helper(
        group_size, group_rank, global_ranks_in_group, c10d.Backend("sim"), store, group_name, *args, **kwargs
    )
    if pg is c10d.GroupMember.NON_GROUP_MEMBER:
        assert record is not None
        process.groups.requested = None
        record.started_s = record.completed_s = task.now_s()
        record.state = State.COMPLETED
        return pg, prefix_store
    world = _own_world()
    if isinstance(pg, SimGroup):
        pg.bound_device_id = kwargs.get("device_id")
    world.pg_map[pg] = (c10d.Backend(backend), prefix_store)
    world.pg_backend_config[pg] = str(config)
    return pg, prefix_store


MOST_RECORDED = 512
"""World size up to which a rank's calls that make groups of other ranks are on record; beyond it they are counted."""


def _of_others(real: Callable[..., Any]) -> Callable[..., Any]:
    """Return *real*, which makes a group, with a short way for a rank that is no member."""

    def new_group(
        ranks: Any = None, timeout: Any = None, backend: Any = None, options: Any = None, tag: Any = None, **kwargs: Any
    ) -> Any:
        task = current_task()
        default = _own_world().default_pg if task is not None else None
        if (
            task is None
            or not isinstance(default, SimGroup)
            or default.size() <= MOST_RECORDED
            or task.process.groups.rendezvous is None
            or not isinstance(ranks, list)
            or set(map(type, ranks)) != {int}
            or (len(set(ranks)) < len(ranks) or min(ranks) < 0 or max(ranks) >= default.size())
            or not (backend is None or str(backend).lower() in _SIMULATED)
            or not (timeout is None or isinstance(timeout, timedelta))
            or (tag or kwargs.get("use_local_synchronization") or kwargs.get("device_id") or default.bound_device_id)
            or os.environ.get("TORCH_DIST_INIT_BARRIER") == "1"
        ):
            return real(ranks, timeout, backend, options, tag, **kwargs)
        process, in_job = task.process, task.process.groups.rendezvous.in_job
        members = in_job(Group("", "", tuple(ranks if kwargs.get("sort_ranks") is False else sorted(ranks)))).ranks
        process.groups.parts.append(task.port.shared.members.setdefault(members, members))
        if default.rank() in ranks:
            return real(ranks, timeout, backend, options, tag, **kwargs)
        process.groups.leave_out(1)
        _own_world().pg_group_ranks[c10d.GroupMember.NON_GROUP_MEMBER] = {rank: i for i, rank in enumerate(members)}
        return c10d.GroupMember.NON_GROUP_MEMBER

    return new_group


_real_rendezvous = c10d.rendezvous


def _rendezvous(url: str, rank: int = -1, world_size: int = -1, **kwargs: Any) -> Any:
    """Wrap torch's rendezvous: from here on, a rank that waits waits in `init_process_group`."""
    caller = sys._getframe(1)
    if caller.f_code.co_name == "init_process_group" and caller.f_globals is vars(c10d):  # no world made by hand
        joining(world_size if world_size >= 0 else int(os.environ.get("WORLD_SIZE", "-1")))
    return _real_rendezvous(url, rank, world_size, **kwargs)


def joining(size: int) -> None:
    """Note that from here on the rank that calls waits in `init_process_group` of *size* ranks."""
    task = current_task()
    if task is not None and size > 0:
        record = recorded(task.process, "init_process_group", default_group(size), None)
        task.process.groups.joining = record


def backend_requested(backend: Any) -> None:
    """Note a backend that works only on GPUs (NCCL), so that ranks may be sampled before the first of them waits."""
    task = current_task()
    name = str(backend).lower().removeprefix("cuda:")
    if task is not None and task.process.accelerators is not None and _family(name) == "nccl":
        task.process.accelerators.begin_work()


_real_message = group_names.LOG_MESSAGE.get()
_ON_RECORD = frozenset(module.__file__ for module in (communicator, work))


def _on_record(code: CodeType, innermost: bool) -> bool:
    return code is SimGroup._call.__code__ or code.co_filename in _ON_RECORD


def _raised(name: str, *args: Any, **kwargs: Any) -> Any:
    """Record a call that torch's public function *name* refused before it reached a group."""
    task, error, op = current_task(), sys.exc_info()[1], FIRST_CALLS.get(name)
    if task is not None and error is not None and op is not None and not came_out(error, _on_record):
        given = kwargs
        with contextlib.suppress(TypeError):  # arguments that do not fit its signature
            given = inspect.signature(getattr(c10d, name)).bind_partial(*args, **kwargs).arguments
        group = given.get("group") or _own_world().default_pg
        if isinstance(group, SimGroup):
            group.refused(op, error)
    return _real_message(name, *args, **kwargs)


def create_group(options: Any, backend_options: Any) -> SimGroup:
    """Create a group of backend `sim` for torch."""
    task = current_task()
    if task is None:
        raise UsageError(
            "backend 'sim' exists only inside a simulation: run the program with `distsim run` or distsim.simulate"
        )
    process, port = task.process, task.port
    if backend_options is not None and type(backend_options).__qualname__ == "ProcessGroupNCCL.Options":
        port.note("ProcessGroupNCCL.Options (stream priority, CTAs, ...) changes no time of a simulation")
    groups = process.groups
    backends, description, record = groups.requested or ({"cpu": "sim", "cuda": "sim"}, None, None)
    groups.requested = None
    ranks = tuple(options.global_ranks_in_group) or default_group(options.group_size).ranks
    group = Group(str(options.group_id), description or "undefined", ranks)
    rendezvous = None
    if options.global_ranks_in_group:
        if groups.rendezvous is not None:
            group = groups.rendezvous.in_job(group)
    else:
        rendezvous = _joined(port, process, options, is_default=description == "default_pg")
    joining, groups.joining = groups.joining, None
    if record is None:
        record = joining or recorded(process, "init_process_group", group, None)
    where = rendezvous or groups.rendezvous
    groups.creation_counts[where, group.name] = groups.creation_counts.get((where, group.name), 0) + 1
    # a description may differ
    key = (groups.job, where, Group(group.name, "", ranks), groups.creation_counts[where, group.name])
    flavour = algorithms(backends.get("cuda") or next(iter(backends.values())))
    communicator = port.communicator(key, group, flavour)
    group, timeout = communicator.group, options.timeout
    pg = reconfigure.kind_of_group(options, backends)(
        process,
        communicator,
        options.group_rank,
        backends,
        timeout,
        timeout not in _DEFAULT_TIMEOUTS,
        options.store,
    )
    process.groups.objects.append(pg)
    if isinstance(pg, reconfigure.ReconfigurableGroup):  # connects nobody yet
        record.started_s = record.completed_s = task.now_s()
        record.state = State.COMPLETED
        if rendezvous is not None:
            rendezvous.is_job = True
        return pg
    by_hand = rendezvous is not None and not rendezvous.is_default
    pg.meet(group, StoreWait((f"members of group {group.name}",), "its rendezvous") if by_hand else None, record)
    if rendezvous is not None:
        rendezvous.form(port)
        record.group = rendezvous.in_job(group)
        pg.belongs_to(record.group)
    return pg


def _joined(port: RankPort, process: SimProcess, options: Any, is_default: bool) -> Rendezvous:
    """Return the world that a process joins, by init_process_group (*is_default*) or by hand, with the rank that it
    says.
    """
    groups, size, rank = process.groups, options.group_size, options.group_rank
    if not 0 <= rank < size:
        raise RuntimeError(f"[enforce fail at ../third_party/gloo/gloo/context.cc:23] rank < size. {rank} vs {size}")
    meeting = *meeting_place(options.store), size
    times = groups.creation_counts[meeting] = groups.creation_counts.get(meeting, 0) + 1
    key = *meeting, times
    rendezvous: Rendezvous | None = port.shared.rendezvous.get(key)
    if rendezvous is None or rendezvous.is_over(rank):
        rendezvous = port.shared.rendezvous[key] = Rendezvous(size, is_default)
    if not process.is_rank:
        port.claim_rank(process, rank)
    rendezvous.join(rank, process)
    if is_default:
        groups.rendezvous = rendezvous
    started = process.family.parent is None and port.launcher is None  # else the program starts the ranks itself
    if is_default and not started and size > min(port.world_size, len(port.facts.slots)):
        port.widen(size)
    return rendezvous


_NCCL_KINDS = ("nccl2", "nccl-lazy", "nccl-legacy")
"""Backends that torch 2.14 and later have beside `nccl`, where they are built with it."""


def _family(backend: str) -> str:
    """Return the backend whose algorithms *backend* has."""
    return "nccl" if backend in _NCCL_KINDS else str(backend)


def _check_names(backend: str) -> None:
    """Raise torch's error, with a remedy, for a backend that this torch does not know."""
    if ":" not in backend and "," in backend:
        raise AssertionError(f"Unknown backend type {backend}. Give each device its backend, as in cpu:gloo,cuda:nccl.")
    for name in (part.rpartition(":")[2].strip() for part in backend.split(",")):
        if name in _SIMULATED or name == "fake" or name.upper() in _plugins or name in c10d.Backend.backend_list:
            continue
        if name in _NCCL_KINDS:
            remedy = f"Torch 2.14 and later have it, and this is torch {torch.__version__}. Use nccl."
        else:
            near = difflib.get_close_matches(name, sorted(_SIMULATED - {"undefined"}), 1)
            remedy = f"Use {near[0]}." if near else "Use gloo, nccl or mpi, or register it by Backend.register_backend."
        raise AssertionError(f"Unknown backend type {name}. {remedy}")


_BY_HAND = (
    "ProcessGroupGloo",
    "ProcessGroupNCCL",
    "ProcessGroupNCCL2",
    "ProcessGroupNCCLLazy",
    "ProcessGroupMPI",
    "ProcessGroupUCC",
)


def _not_by_hand(name: str, *_: Any, **__: Any) -> NoReturn:
    """Refuse a group made by hand: it would wait for the other ranks in C++ while holding the baton."""
    raise NotSimulated(f"{name}(store, rank, size) made by hand", "use init_process_group or new_group")


def backend_patches() -> list[tuple[Any, str, Any]]:
    """Return patches (holder, attribute, replacement) for the time of a simulation."""
    patches: list[tuple[Any, str, Any]] = [
        *start_patches(),
        *group_names.WORLD.replaced_by(_WorldProxy()),
        *group_names.NEW_GROUP_HELPER.replaced_by(_new_process_group_helper),
        *group_names.NEW_GROUP_WITH_TAG.replaced_by(_of_others(group_names.NEW_GROUP_WITH_TAG.get())),
        (c10d, "rendezvous", _rendezvous),
        (c10d, "default_pg_nccl_timeout", timedelta(minutes=10)),
        *group_names.LOG_MESSAGE.replaced_by(_raised),
        *hook_patches(),
        *ddp_patches(),
    ]
    for name in _BY_HAND:
        kind = getattr(dist, name, None) or getattr(c10d, name, None)
        if isinstance(kind, type):
            patches.append(patch_for_ranks(kind, "__init__", functools.partial(_not_by_hand, name)))
    patches.append((SimGroup, "split_group", _split_group))
    if hasattr(dist.ProcessGroup, "new_window"):
        patches.append((SimGroup, "new_window", new_window))
    patches += symmetric_memory_patches()
    if hasattr(c10d, "shrink_group"):
        patches += [patch_around(holder, "shrink_group", _shrink_group) for holder in (c10d, dist)]
    if "type" in c10d.batch_isend_irecv.__code__.co_names:
        patches += _batch_patches()
    if not hasattr(c10d, "set_timeout"):  # the public one of torch 2.14, which asks the group alone
        patches += name_for_ranks(group_names.SET_PG_TIMEOUT, _set_pg_timeout)
    replaced = {
        "TCPStore": (dist.TCPStore, stores.TCPStore),
        "FileStore": (dist.FileStore, stores.FileStore),
        "HashStore": (dist.HashStore, stores.HashStore),
        "PrefixStore": (dist.PrefixStore, stores.PrefixStore),
        "split_group": (c10d.split_group, for_ranks(c10d.split_group, functools.partial(_splitting, c10d.split_group))),
    }
    for module_name in sorted(
        name for name in sys.modules if name.startswith(("torch.distributed", "torch._C._distributed_c10d"))
    ):
        module = sys.modules[module_name]
        for name, (real, simulated) in replaced.items():
            if getattr(module, "__dict__", {}).get(name) is real:
                patches.append((module, name, simulated))
    return patches


def _set_pg_timeout(_: RankTask, timeout: timedelta, group: Any = None) -> None:
    """Set a group's timeout. torch's version tests for NCCL's class, which a build without CUDA lacks."""
    group = group or group_names.GET_DEFAULT_GROUP.get()()
    if isinstance(group, SimGroup):
        group._set_default_timeout(timeout)


def _splitting(
    real: Callable[..., Any], _: RankTask, parent_pg: Any = None, split_ranks: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """Note the parts for which no call of the rank is recorded, and split as torch does."""
    parent = parent_pg or _own_world().default_pg
    if isinstance(parent, SimGroup) and split_ranks:
        parent.process.groups.parts += [tuple(parent.in_job(part)) for part in split_ranks]
    return real(parent_pg, split_ranks, *args, **kwargs)


def _divide(parent: SimGroup) -> None:
    """Meet all members of *parent*: NCCL divides its communicator with all of them, members of a part or not."""
    group = parent._group
    group = Group(f"{group.name}/split", group.label, group.ranks)
    parent.divide(recorded(parent.process, "split_group", group, None))


def _split_group(
    self: SimGroup,
    ranks: list[int],
    timeout: timedelta | None = None,
    opts: Any = None,
    group_name: str = "",
    group_desc: str | None = None,
    device_types: Sequence[torch.device] | None = None,
) -> SimGroup | None:
    """Do what `ProcessGroup.split_group` does: create the group of *ranks* if this member is one of them."""
    if "nccl" not in self.backend_config():
        raise NotSimulated("torch.distributed.split_group of gloo groups", "make the groups by new_group")
    _divide(self)
    if self.group_rank not in ranks:
        return None
    kept = [device.type for device in device_types or self._device_types]
    backends = {device: backend for device, backend in self._backends.items() if device in kept}
    group = Group(group_name, group_desc or "undefined", tuple(self.in_job(ranks)))
    return _part(self, ranks, backends, recorded(self.process, "new_group", group, None), opts)


def _shrink_group(
    real: Callable[..., Any], ranks_to_exclude: list[int], group: Any = None, *args: Any, **kwargs: Any
) -> Any:
    try:
        return real(ranks_to_exclude, group, *args, **kwargs)
    except ShrinkChecked as checked:
        excluded, flags, options = checked.args
    pg = group or _own_world().default_pg
    if flags & c10d.SHRINK_ABORT:
        pg.revoke()
    return _shrunk(pg, excluded, options)


def _shrunk(pg: SimGroup, excluded: Sequence[int], options: Any) -> SimGroup:
    """Return the group of the members of *pg* that are not *excluded*, and destroy *pg*; with the default group all
    others. The members of a new default group are numbered anew."""
    process, world = require_task().process, _own_world()
    groups, is_default = process.groups, pg is world.default_pg
    kept = [member for member in range(pg.size()) if member not in excluded]
    ranks = pg.in_job(kept)
    global_ranks = [dist.get_process_group_ranks(pg)[member] for member in kept]
    name, description = f"{pg._group.first_name}@without {excluded}", f"{pg.group_name}:shrunk"
    (backend, store), config = world.pg_map[pg], world.pg_backend_config[pg]
    record = recorded(process, "shrink_group", Group(name, description, tuple(ranks)), None)
    new = _part(pg, kept, pg._backends, record, options)
    if is_default and (others := len(world.pg_map) - 1):
        c10d.logger.warning("shrink_group of the default group destroys all other groups (%d)", others)
    dist.destroy_process_group(pg)
    tag = f"ptd:{name}"
    world.pg_map[new], world.pg_names[new], world.pg_backend_config[new] = (backend, store), name, config
    world.pg_group_ranks[new] = {rank: group_rank for group_rank, rank in enumerate(global_ranks)}
    world.pg_to_tag[new], world.tags_to_pg[tag] = tag, [new]
    _register_process_group(name, new)
    if is_default:
        world.default_pg = new
        shrunk = Rendezvous(len(ranks), False, ranks=tuple(ranks))
        groups.rendezvous = process.port.shared.rendezvous.setdefault((groups.rendezvous, name), shrunk)
    return new


def _part(pg: SimGroup, members: Sequence[int], backends: dict[str, str], record: CallRecord, options: Any) -> SimGroup:
    """Return the group of some members of *pg*, which they create in the call *record*."""
    groups, ranks = pg.process.groups, pg.in_job(members)
    groups.requested = backends, record.group.description, record
    numbers = {rank: number for number, rank in enumerate(groups.rendezvous.ranks)}
    creation = SimpleNamespace(
        group_id=record.group.name,
        group_size=len(ranks),
        group_rank=members.index(pg.rank()),
        global_ranks_in_group=[numbers[rank] for rank in ranks],
        timeout=pg._timeout,
        store=pg._store,
    )
    return create_group(creation, options)


def _batch_patches() -> list[tuple[Any, str, Any]]:
    """Return patches for torch up to 2.13, which makes a batch one kernel only if `type(group) is ProcessGroup`."""
    batch = c10d.batch_isend_irecv

    def batch_isend_irecv(p2p_op_list: Any) -> Any:
        group_names.CHECK_P2P_OP_LIST.get()(p2p_op_list)
        group = p2p_op_list[0].group or _own_world().default_pg
        if not isinstance(group, SimGroup) or not p2p_op_list[0].tensor.is_cuda:
            return batch(p2p_op_list)
        device = p2p_op_list[0].tensor.device
        group._start_coalescing(device)
        batch(p2p_op_list)
        return [group._end_coalescing(device)]

    return [(holder, "batch_isend_irecv", batch_isend_irecv) for holder in (c10d, dist)]


def adopt_groups(process: SimProcess) -> None:
    """Make the process's groups known in the calling thread (torch's registry is per thread)."""
    if process.groups.c10d is None:
        return
    for pg, name in process.groups.c10d.pg_names.items():
        _register_process_group(name, pg)
