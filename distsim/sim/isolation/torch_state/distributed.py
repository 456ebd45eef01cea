"""Keeps the state of torch.distributed's Python code (meshes, sharding rules, shards, late imports) per rank."""

from __future__ import annotations

import copy
import ctypes
import functools
import importlib.abc
import importlib.machinery
import inspect
import sys
from collections.abc import Callable, Hashable, Sequence
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch.distributed import GroupMember
from torch.distributed.device_mesh import DeviceMesh

from distsim.sim.kernel.task import current_process
from distsim.torch_compat.groups import DEBUG_HANDLERS, INIT_ONE_PROCESS_GROUP, MESH_LAYOUT
from distsim.torch_compat.state import RANK_KEYED

# -- DTensor's rules for lists of tensors (clipping, fused optimizers): one rank works them out for all.
#
# torch keeps what it works out by rank, for a mesh is its rank's own, and a list of 300 parameters takes it most of a
# tenth of a second, a third of the first step of FSDP2. What comes out for a list knows nothing of a rank's place in
# its mesh (it is not so for views and factories, whose shapes are local); only the mesh itself has to be the rank's.

SHARDING_MODULE = "torch.distributed.tensor._sharding_prop"
"""Module that computes sharding rules; programs import it with the first DTensor."""
_METHOD = "propagate_op_sharding_non_cached"


class SharedRules:
    """Sharding rules shared for one simulation."""

    def __init__(self) -> None:
        self._real: Any = None
        self._holder: Any = None
        """Its class; its module may be gone from `sys.modules` when the simulation ends."""
        self._known: dict[Hashable, Any] = {}
        """Results by operator and its arguments except the mesh."""

    def begin(self, module: ModuleType | None) -> None:
        """Set *module* (`MODULE`), or None if it is not imported."""
        if module is None or self._real is not None:
            return
        self._holder = module.ShardingPropagator
        self._real = real = getattr(self._holder, _METHOD)

        @functools.wraps(real)
        def propagate(propagator: Any, schema: Any) -> Any:
            if not any(isinstance(value, list | tuple) and value for value in schema.args_schema):
                return real(propagator, schema)
            meshes: list[Any] = []
            arguments = _part(schema.args_schema, meshes), _part(schema.kwargs_schema, meshes)
            if not meshes or any(mesh != meshes[0] for mesh in meshes):
                return real(propagator, schema)
            mesh = meshes[0]
            key = schema.op, arguments, mesh.shape, mesh.device_type, mesh.mesh_dim_names
            try:
                known_result = self._known.get(key)
            except TypeError:  # an argument that cannot be looked up
                return real(propagator, schema)
            if known_result is not None:
                return _on(mesh, known_result)
            result = real(propagator, schema)
            if not result.needs_redistribute and result.redistribute_schema is None and _is_list(result.output_spec):
                self._known[key] = result
            return result

        setattr(self._holder, _METHOD, propagate)

    def end(self) -> None:
        """Discard everything of the simulation."""
        if self._real is not None:
            setattr(self._holder, _METHOD, self._real)
        self._real = self._holder = None
        self._known.clear()


def _part(value: Any, meshes: list[Any]) -> Hashable:
    """Return the part of two calls that must agree for the same rule; the meshes of tensor lists go to *meshes*."""
    if isinstance(value, dict):
        return tuple((name, _part(one, meshes)) for name, one in value.items())
    if isinstance(value, list | tuple):
        return tuple([_part(one, meshes) for one in value])
    if hasattr(value, "placements"):
        meshes.append(value.mesh)
        return value.placements, value.tensor_meta, value.shard_order, value.use_strided_shard_as_shard_order
    return type(value), value


def _is_list(specs: Any) -> bool:
    return specs is None or isinstance(specs, tuple | list)


def _on(mesh: Any, result: Any) -> Any:
    """Return *result* for the same tensors on another rank's *mesh*."""
    moved = copy.copy(result)
    moved.__dict__.pop("mesh", None)  # cached
    if result.output_spec is not None:
        moved.output_spec = type(result.output_spec)([_moved(spec, mesh) for spec in result.output_spec])
    return moved


def _moved(spec: Any, mesh: Any) -> Any:
    if spec is None:
        return None
    moved = copy.copy(spec)
    vars(moved).update(mesh=mesh, _hash=None)
    return moved


# -- FSDP2's shards: parts that are made when they are asked for, and word of it where they are not all of one size.
#
# Each rank cuts each parameter for all ranks and keeps its own part, and the first for its size.

FSDP_MODULE = "torch.distributed.fsdp._fully_shard._fsdp_param"
"""Module that shards parameters; programs import it with the first `fully_shard`."""
_FUNCTION = "_chunk_with_empty"


class _Parts(Sequence[torch.Tensor]):
    """Parts of a tensor as torch/distributed/fsdp/_fully_shard/_fsdp_common.py (2.13) cuts it, each made once."""

    def __init__(self, tensor: torch.Tensor, num_chunks: int, dim: int) -> None:
        self._tensor, self._count, self._dim = tensor, num_chunks, dim
        self._made: dict[int, torch.Tensor] = {}
        process: Any = current_process()
        if process is not None and tensor.size(dim) % num_chunks:
            process.port.traced.cuts_unevenly = True

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[one] for one in range(self._count)[index]]
        number = range(self._count)[index]
        if number not in self._made:
            size = self._tensor.size(self._dim)
            each = -(-size // self._count)
            length = min(each, size - number * each)
            is_empty = length <= 0 < size
            part = self._tensor.new_empty(0) if is_empty else self._tensor.narrow(self._dim, number * each, length)
            self._made[number] = part
        return self._made[number]


class LazyShards:
    """FSDP2's cutting of parameters, replaced for one simulation."""

    def __init__(self) -> None:
        self._real: Any = None

    def begin(self, module: ModuleType | None) -> None:
        """Set *module* (`MODULE`), or None if it is not imported."""
        if module is not None and self._real is None and hasattr(module, _FUNCTION):
            self._real = getattr(module, _FUNCTION)
            setattr(module, _FUNCTION, _Parts)

    def end(self) -> None:
        """Restore torch's own function."""
        if self._real is not None:
            setattr(sys.modules[FSDP_MODULE], _FUNCTION, self._real)
        self._real = None


# -- Device meshes: each its rank's own, and what torch keeps by mesh.


def _owner() -> int | None:
    process = current_process()
    return None if process is None else process.index


def mesh_patches() -> list[tuple[Any, str, Any]]:
    """Return patches that keep the meshes of ranks apart.

    torch's caches treat meshes of equal shape as one although their entries hold for one coordinate; torch itself
    distinguishes the meshes of threads by `_thread_id`.
    """
    real_init, real_get, real_set = DeviceMesh.__init__, DeviceMesh.__getstate__, DeviceMesh.__setstate__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        real_init(self, *args, **kwargs)
        self._thread_id, self._hash = _owner(), None
        root = self._root_mesh
        if root is not None and root._rank_map is self._rank_map:  # as many numbers as the job has ranks
            self._flatten_rank_map = root._flatten_rank_map

    def get_state(self: Any) -> dict[str, Any]:
        return {**real_get(self), "_thread_id": None, "_hash": None}

    def set_state(self: Any, state: dict[str, Any]) -> None:
        real_set(self, {**state, "_thread_id": _owner(), "_hash": None})

    named: list[tuple[str, Callable[..., Any]]] = [
        ("__init__", init),
        ("__getstate__", get_state),
        ("__setstate__", set_state),
    ]
    real_one = INIT_ONE_PROCESS_GROUP.get(None)
    if real_one is not None and _names(real_one)[:4] == _OF_ONE and _names(_MeshLayout) == ["axes"]:  # torch 2.13 on
        named.append((INIT_ONE_PROCESS_GROUP.attribute, staticmethod(_own_group_only(real_one))))
    return [(DeviceMesh, name, function) for name, function in named]


def _names(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


_MeshLayout = MESH_LAYOUT.get(None)
_OF_ONE = ["sub_layout", "rank_map", "dim_name", "backend_override"]  # torch 2.15 adds `preserve_rank_order`


def _own_group_only(real: Callable[..., Any]) -> Callable[..., Any]:
    """Return *real*, which makes the groups of one dimension of a mesh, for the caller's own group.

    Every rank makes all groups, which is quadratic in the ranks of a job. The others are only counted, so that names
    and numbers of later groups are those of a rank that has made all.
    """

    def init_one(sub_layout: Any, rank_map: torch.Tensor, dim_name: str, backend_override: Any, *more: Any) -> Any:
        process: Any = current_process()
        default: Any = process and process.groups.c10d and process.groups.c10d.default_pg
        is_simulated = process is not None and default in process.groups.objects and "fake" not in backend_override
        if not is_simulated or default.bound_device_id is not None:  # NCCL divides one communicator in one call
            return real(sub_layout, rank_map, dim_name, backend_override, *more)
        rows = _MeshLayout([sub_layout]).remap_to_tensor(rank_map)
        before, *others = (rows == default.rank()).any(1).nonzero().flatten().tolist() or [len(rows)]
        if others or before == len(rows) or rows.shape[1] == default.size():
            return real(sub_layout, rank_map, dim_name, backend_override, *more)
        if rows.shape[1] > 1:
            process.groups.parts += map(tuple, rows.tolist())
        process.groups.leave_out(before)
        own = rows[before].contiguous()
        name = real(type(sub_layout)((len(own),), (1,)), own, dim_name, backend_override, *more)
        process.groups.leave_out(len(rows) - before - 1)
        if len(rows) > 1:  # as torch notes the last group that the rank is no member of
            last = rows[-1 if before < len(rows) - 1 else -2].tolist()
            process.groups.c10d.pg_group_ranks[GroupMember.NON_GROUP_MEMBER] = {rank: i for i, rank in enumerate(last)}
        return name

    return init_one


def forget_meshes() -> None:
    """Clear torch's caches by mesh, which would keep the ranks of a finished simulation alive."""
    for name, path in RANK_KEYED:
        module = sys.modules.get(name)
        cache = None if module is None else follow(module, path)
        clear = getattr(cache, "cache_clear", None) or getattr(cache, "clear", None)
        if clear is not None:
            clear()


def follow(module: ModuleType, path: str) -> Any:
    target: Any = module
    for name in path.split("."):
        target = getattr(target, name, None)
    return target


class TorchFinder(importlib.abc.MetaPathFinder):
    """Sees the torch modules that a rank is the first to import."""

    def __init__(self, state: Any) -> None:
        self._state = state

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        process = current_process()
        if process is None or not fullname.startswith("torch."):
            return None
        process.port.ticks += 1  # a sign of life
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _TorchLoader(spec.loader, self._state)
        return spec


class _TorchLoader(importlib.abc.Loader):
    """Loads as *real* does; then the module is watched."""

    def __init__(self, real: Any, state: Any) -> None:
        self._real = real
        self._state = state

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._real.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._real
        with self._state.everyones():
            self._real.exec_module(module)
            if module.__name__ in self._state.shared:
                self._state.shared[module.__name__].begin(module)
            self._state.adopt([sys.modules.get(module.__name__, module)])


_kept_handlers: set[str] = set()


def keep_debug_handlers() -> None:
    """Keep torch's handlers of its debug server alive for ever, if they are imported.

    A static object of C++ frees them after Python has ended (torch 2.13, HandlerRegistry). Python aborts if they then
    have a `__dict__` to free, and a simulation that looks at a function gives it one.
    """
    for name, value in vars(sys.modules.get(DEBUG_HANDLERS.path, object)).items():
        if isinstance(value, FunctionType) and name not in _kept_handlers:
            _kept_handlers.add(name)
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
