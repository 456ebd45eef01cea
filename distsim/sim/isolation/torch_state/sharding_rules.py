"""DTensor's rules for lists of tensors (clipping, fused optimizers): one rank works them out for all.

torch keeps what it works out by rank, for a mesh is its rank's own, and a list of 300 parameters takes it most of a
tenth of a second, a third of the first step of FSDP2. What comes out for a list knows nothing of a rank's place in its
mesh (it is not so for views and factories, whose shapes are local); only the mesh itself has to be the rank's.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Hashable
from types import ModuleType
from typing import Any

__all__ = ["MODULE", "SharedRules"]

MODULE = "torch.distributed.tensor._sharding_prop"
"""What works them out; programs import it with the first DTensor."""
_METHOD = "propagate_op_sharding_non_cached"


class SharedRules:
    """For the time of one simulation."""

    def __init__(self) -> None:
        self._real: Any = None
        self._holder: Any = None
        """Its class; its module may be gone from `sys.modules` when the simulation ends."""
        self._known: dict[Hashable, Any] = {}
        """By operator and what is known of its arguments but their mesh."""

    def begin(self, module: ModuleType | None) -> None:
        """*module* (`MODULE`) is there, or None."""
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
                found = self._known.get(key)
            except TypeError:  # an argument that cannot be looked up
                return real(propagator, schema)
            if found is not None:
                return _on(mesh, found)
            result = real(propagator, schema)
            if not result.needs_redistribute and result.redistribute_schema is None and _is_list(result.output_spec):
                self._known[key] = result
            return result

        setattr(self._holder, _METHOD, propagate)

    def end(self) -> None:
        """Nothing of the simulation is kept."""
        if self._real is not None:
            setattr(self._holder, _METHOD, self._real)
        self._real = self._holder = None
        self._known.clear()


def _part(value: Any, meshes: list[Any]) -> Hashable:
    """What two calls must have in common for the same rule; the meshes of lists of tensors go to *meshes*."""
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
    """*result*, for the same tensors on another rank's mesh."""
    made = copy.copy(result)
    made.__dict__.pop("mesh", None)  # cached
    if result.output_spec is not None:
        made.output_spec = type(result.output_spec)([_moved(spec, mesh) for spec in result.output_spec])
    return made


def _moved(spec: Any, mesh: Any) -> Any:
    if spec is None:
        return None
    made = copy.copy(spec)
    vars(made).update(mesh=mesh, _hash=None)
    return made
