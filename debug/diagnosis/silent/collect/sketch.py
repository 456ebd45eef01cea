"""Sketches of tensors (16 weighted sums each), and the parameters of a rank with their sketches.

A sketch is computed in one pass over memory. CPU tensors are read in place and without torch's operators, which
would trigger the modes, hooks and autocast of the program. `Tensor.numpy` is not used either: it makes a storage
that FSDP can no longer resize. A tensor that is passed to a collective is recognized as a parameter or a gradient by
its current address.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import Module

from distsim.debug.diagnosis.silent.facts import ParameterFact, Vector
from distsim.torch_compat.state import LOCAL_TENSOR, NOT_IN_CHECKPOINTS, VERSION

WIDTH = 16
MEAN_SQUARE = 13 / 12
"""Mean square of a number drawn uniformly between 0.5 and 1.5."""
Reader = Callable[[Any], "NDArray[Any] | None"]
"""Function that returns the values of a tensor, or None if they are unknown."""

_TYPES = {
    torch.float64: "<f8",
    torch.float32: "<f4",
    torch.float16: "<f2",
    torch.bfloat16: "<u2",
    torch.int64: "<i8",
    torch.int32: "<i4",
    torch.int16: "<i2",
    torch.int8: "|i1",
    torch.uint8: "|u1",
    torch.bool: "|b1",
}
_of_dtensor = LOCAL_TENSOR.getter()
_signs = np.ones(0, dtype=np.float32)

MOST_ELEMENTS = 1 << 20
"""Largest number of elements of an input that are sketched or read."""
MOST_SAMPLES, LEAST = 128, 4
"""Largest number of samples of a batch that are told apart, and number of elements that each must exceed."""


def _signs_of(count: int) -> Vector:
    """Return the first *count* numbers of a random sequence that is the same in every process: mean 0, mean square
    1.

    Plain signs of -1 and 1 would often cancel a constant that was added to all elements.
    """
    global _signs
    if len(_signs) < count:
        size = max(1024, 1 << (count - 1).bit_length())
        draw = np.random.Generator(np.random.PCG64(20)).random((size, 2), dtype=np.float32)
        _signs = np.where(draw[:, 0] < 0.5, -1, 1).astype(np.float32) * (draw[:, 1] + 0.5) * MEAN_SQUARE**-0.5
        _signs = _signs.astype(np.float32)
    return _signs[:count]


def sketch_array(values: NDArray[Any]) -> Vector:
    """Return the sketch of an array of any shape, read in the order of its elements."""
    flat = values.reshape(-1)
    if flat.dtype != np.float32:
        flat = flat.astype(np.float32)
    rows, tail = divmod(flat.size, WIDTH)
    signs = _signs_of(rows + 1)
    total: Vector = signs[:rows] @ flat[: rows * WIDTH].reshape(rows, WIDTH)
    if tail:
        total[:tail] += signs[rows] * flat[rows * WIDTH :]
    return total


class _Memory:
    """NumPy array interface to a tensor's memory. An array made from it keeps the tensor alive."""

    __slots__ = ("__array_interface__", "tensor")

    def __init__(self, tensor: torch.Tensor, kind: str) -> None:
        self.tensor = tensor
        size = tensor.element_size()
        self.__array_interface__ = {
            "data": (tensor.data_ptr(), True),
            "shape": tuple(tensor.shape),
            "strides": None if tensor.is_contiguous() else tuple(step * size for step in tensor.stride()),
            "typestr": kind,
            "version": 3,
        }


def tensors_in(values: Any, depth: int = 0) -> Iterator[Any]:
    """Yield the tensors in lists, tuples, dictionaries and the outputs of Hugging Face's models."""
    if isinstance(values, torch.Tensor):
        yield values
    elif depth < 3 and isinstance(values, list | tuple | Mapping):
        for value in values.values() if isinstance(values, Mapping) else values:
            yield from tensors_in(value, depth + 1)


def local_part(tensor: Any) -> Any:
    """Return this rank's part of a DTensor, or any other tensor itself."""
    return _of_dtensor(tensor) if type(tensor).__name__ == "DTensor" else tensor


def array_of(tensor: Any) -> NDArray[Any] | None:
    """Return the values of a CPU tensor as an array, or None for any other tensor.

    The array shares the tensor's memory, except for bfloat16, which is converted to float32.
    """
    tensor = local_part(tensor)
    kind = type(tensor)
    if kind is not torch.Tensor and kind is not torch.nn.Parameter:
        return None
    if not tensor.is_cpu or tensor.layout is not torch.strided or not tensor.numel():
        return None
    typestr = _TYPES.get(tensor.dtype)
    if typestr is None or tensor.is_neg():
        return None
    try:
        if not tensor.untyped_storage().nbytes():  # FSDP has freed it
            return None
        values = np.asarray(_Memory(tensor, typestr))
    except RuntimeError:  # a wrapper of torch.func, a storage that was freed
        return None
    if tensor.dtype is torch.bfloat16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values


def sketch(tensor: Any, read: Reader = array_of) -> Vector | None:
    """Return the sketch of a tensor, or None if its values are unknown."""
    values = read(tensor)
    return None if values is None or not values.size else sketch_array(values)


def is_constant(tensor: Any, read: Reader = array_of) -> bool:
    """Return whether all elements are equal; False if the values are unknown."""
    values = read(tensor)
    return values is not None and bool(values.size) and bool((values == values.flat[0]).all())


_not_in_checkpoints = NOT_IN_CHECKPOINTS.getter()
_version = VERSION.getter()


class Tracked:
    """A parameter that is followed, and the sketches of its local gradients since its last step."""

    __slots__ = ("before", "has_optimizer", "index", "local", "reference", "sampled")

    def __init__(self, index: int, parameter: Any) -> None:
        self.index = index
        self.has_optimizer = False
        self.before: Vector | None = None
        """Sketch before the first backward pass since the program last updated it; None if an optimizer has it."""
        self.reference = weakref.ref(parameter)
        self.sampled = True
        """Whether its gradients are sketched before the next step."""
        self.local: list[Vector] = []
        """Sketch of the gradient of each backward pass, before any reduction."""


class Parameters:
    """All parameters of a rank that are followed. `on_gradient(tracked, gradient)` is called for each local
    gradient.
    """

    def __init__(self, read: Reader, on_gradient: Callable[[Tracked, Any], None]) -> None:
        self.facts: list[ParameterFact] = []
        self._read = read
        self._on_gradient = on_gradient
        self._by_id: dict[int, Tracked] = {}
        self._frozen: dict[int, tuple[weakref.ref[Any], str, str]] = {}
        """Reference, name and module of each parameter that did not require a gradient when its model was added, by
        id.
        """

    def get(self, parameter: Any) -> Tracked | None:
        """Return the record of *parameter*; None if it is unknown."""
        tracked = self._by_id.get(id(parameter))
        return tracked if tracked is not None and tracked.reference() is parameter else None

    def living(self) -> Iterable[tuple[Any, Tracked]]:
        """Yield the followed parameters that still exist."""
        for tracked in list(self._by_id.values()):
            parameter = tracked.reference()
            if parameter is not None:
                yield parameter, tracked

    def add_model(self, model: Any) -> None:
        """Follow the parameters of *model* that are not followed yet, under their names in the model."""
        for name, parameter, module in parameters_of(model):
            if not parameter.requires_grad:
                self._frozen[id(parameter)] = weakref.ref(parameter), name, module
            elif self.get(parameter) is None:
                self.add(parameter, name, module)

    def of_optimizer(self, parameter: Any, name: str) -> Tracked:
        """Return the record of an optimizer's *parameter*. *name* is used if no known model has the parameter."""
        tracked = self.get(parameter)
        if tracked is None:
            reference, *known = self._frozen.get(id(parameter), (None, "", ""))
            of_model = reference is not None and reference() is parameter
            tracked = self.add(parameter, *(known if of_model else (name, "")))
        return tracked

    def add(self, parameter: Any, name: str, module: str) -> Tracked:
        """Start to follow *parameter*."""
        tracked = Tracked(len(self.facts), parameter)
        self._by_id[id(parameter)] = tracked
        shape = tuple(int(size) for size in local_part(parameter).shape)
        fact = ParameterFact(name, shape, module, is_constant(parameter, self._read))
        if type(parameter).__name__ == "DTensor":
            fact.mesh = mesh_ranks(parameter.device_mesh, parameter.placements)
        elif parameter.is_leaf and parameter.requires_grad:
            parameter.register_hook(lambda gradient: self._on_gradient(tracked, gradient))
        self.facts.append(fact)
        return tracked


def parameters_of(model: Module, prefix: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, Any, str]]:
    """Yield (name, parameter, name of its module) for all parameters of *model*.

    Methods that a subclass overrides are not called: `named_modules` of a RemoteModule raises, and a RemoteModule
    that arrived by RPC does not even have a dictionary of parameters.
    """
    seen = set() if seen is None else seen
    if id(model) in seen or not {"_parameters", "_modules"} <= vars(model).keys():
        return
    seen.add(id(model))
    for leaf, parameter in Module.named_parameters(model, recurse=False):
        yield f"{prefix}.{leaf}".lstrip("."), parameter, prefix
    for name, part in Module.named_children(model):
        yield from parameters_of(part, f"{prefix}.{name}".lstrip("."), seen)


def unreduced_of(model: Module) -> Iterator[tuple[str, Any]]:
    """Yield (name, tensor) of what no gradient reaches: buffers that a checkpoint contains, then parameters, which
    DistributedDataParallel broadcasts in its constructor alone; nothing of normalization layers.
    """
    parts = [(prefix, part) for prefix, part in _modules_of(model) if "norm" not in type(part).__name__.lower()]
    for prefix, part in parts:
        for leaf, buffer in Module.named_buffers(part, recurse=False):
            if leaf not in _not_in_checkpoints(part):
                yield f"{prefix}.{leaf}".lstrip("."), buffer
    for prefix, part in parts:
        for leaf, parameter in Module.named_parameters(part, recurse=False):
            if not parameter.requires_grad:
                yield f"{prefix}.{leaf}".lstrip("."), parameter


def _modules_of(model: Module, prefix: str = "") -> Iterator[tuple[str, Module]]:
    if {"_buffers", "_parameters", "_modules"} <= vars(model).keys():
        yield prefix, model
        for name, part in Module.named_children(model):
            yield from _modules_of(part, f"{prefix}.{name}".lstrip("."))


def mesh_ranks(mesh: Any, placements: Any) -> tuple[int, ...]:
    """Return the ranks that hold the same shard as this one: their coordinates agree in every sharded mesh
    dimension.
    """
    return ranks_along(mesh, [placement.is_replicate() for placement in placements])


def ranks_along(mesh: Any, varies: Sequence[bool]) -> tuple[int, ...]:
    """Return the ranks whose coordinates agree with this one's in every mesh dimension but those that *varies*."""
    ranks, coordinate = mesh.mesh, mesh.get_coordinate()
    if coordinate is None:
        return ()
    shape = tuple(ranks.shape)
    numbers = _numbers(ranks)
    same = []
    for dim in range(len(numbers)):
        at: list[int] = []
        rest = dim
        for size in reversed(shape):
            rest, step = divmod(rest, size)
            at.insert(0, step)
        if all(varies_here or mine == other for varies_here, mine, other in zip(varies, coordinate, at, strict=True)):
            same.append(numbers[dim])
    return tuple(same)


def _numbers(ranks: Any) -> list[int]:
    """Return the ranks of a mesh in order, without triggering the program's dispatch modes."""
    values = array_of(ranks)
    return [int(rank) for rank in (ranks.flatten().tolist() if values is None else values.reshape(-1))]


class ShardedModules:
    """The modules that fully_shard shards, and the parameters that the program wrote to while they were gathered.

    fully_shard keeps the gathered tensor object and only frees its memory, so the version counter of the object
    shows writes.
    """

    def __init__(self, parameters: Parameters) -> None:
        self._parameters = parameters
        self._sharded: weakref.WeakKeyDictionary[Any, dict[str, Tracked]] = weakref.WeakKeyDictionary()
        self._writes: dict[int, tuple[weakref.ref[Any], int]] = {}

    def enter(self, module: Any) -> None:
        """Remember the shards of *module* before its forward pass gathers them."""
        if module not in self._sharded:
            known = ((name, self._parameters.get(parameter)) for name, parameter, _ in parameters_of(module))
            self._sharded[module] = {name: tracked for name, tracked in known if tracked is not None}

    def written(self, module: Any) -> Iterator[str]:
        """Yield the names of gathered parameters that were written to since the last call.

        Call it at the end of the module's forward pass, while its own parameters are still gathered.
        """
        of_module = self._sharded.get(module, {})
        for name, parameter, _ in parameters_of(module):
            shard = of_module[name].reference() if name in of_module else None
            if shard is None or shard is parameter or type(shard).__name__ != "DTensor":
                continue
            if type(parameter).__name__ == "DTensor":  # not gathered, or divided by tensor parallelism, too
                continue
            fact = self._parameters.facts[of_module[name].index]
            fact.fsdp = fact.fsdp or tuple(sorted(_numbers(shard.device_mesh.mesh)))
            reference, before = self._writes.get(id(parameter), (None, 0))
            writes = _version(parameter)
            self._writes[id(parameter)] = weakref.ref(parameter), writes
            if reference is not None and reference() is parameter and writes > before:
                yield fact.name


class Addresses:
    """Index of parameters and gradients by memory address. Each hit is verified, because memory is reused."""

    def __init__(self, parameters: Parameters) -> None:
        self._parameters = parameters
        self._gradients: dict[int, Tracked] = {}
        self._values: dict[int, Tracked] = {}
        self._are_stale = True

    def forget(self) -> None:
        """Mark the index as stale, because new gradients have unknown addresses."""
        self._are_stale = True

    def gradient_of(self, tensor: Any) -> Tracked | None:
        """Return the parameter whose `.grad` is *tensor*, or None."""
        return self._look_up(tensor, self._gradients, of_gradient=True)

    def value_of(self, tensor: Any) -> Tracked | None:
        """Return the parameter that shares its memory with *tensor*, or None."""
        return self._look_up(tensor, self._values, of_gradient=False)

    def _look_up(self, tensor: Any, table: dict[int, Tracked], of_gradient: bool) -> Tracked | None:
        if self._are_stale:
            self._learn()
        address = _address(tensor)
        tracked = table.get(address) if address else None
        parameter = None if tracked is None else tracked.reference()
        current = parameter.grad if of_gradient and parameter is not None else parameter
        if current is None or tensor.numel() != local_part(current).numel() or _address(current) != address:
            return None
        return tracked

    def _learn(self) -> None:
        self._are_stale = False
        self._gradients.clear()
        self._values.clear()
        for parameter, tracked in self._parameters.living():
            self._values[_address(parameter)] = tracked
            if parameter.grad is not None:
                self._gradients[_address(parameter.grad)] = tracked


def _address(tensor: Any) -> int:
    """Return the address of a tensor's memory, or 0 if it has none of its own."""
    try:
        return int(local_part(tensor).data_ptr())
    except RuntimeError:  # sparse, fake
        return 0


def sample_hashes(batch: NDArray[Any]) -> tuple[int, ...]:
    """Return a hash of each sample of a batch, except those whose elements are all equal, such as padding."""
    if batch.ndim < 2 or len(batch) > MOST_SAMPLES or not LEAST * len(batch) < batch.size <= MOST_ELEMENTS:
        return ()
    return tuple(zlib.crc32(np.ascontiguousarray(one).tobytes()) for one in batch if (one != one.flat[0]).any())


def share_memory(tensors: Sequence[Any]) -> bool:
    """Return whether two of *tensors* overlap in memory."""
    ranges = []
    for tensor in tensors:
        with contextlib.suppress(RuntimeError):  # sparse, fake
            if tensor.numel() and tensor.is_contiguous() and tensor.data_ptr():
                ranges.append((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes))
    ranges.sort()
    return any(end > begin for (_, end), (begin, _) in itertools.pairwise(ranges))


def hyperparameters_of(group: Mapping[str, Any]) -> tuple[tuple[str, float], ...]:
    """Return the numeric settings of a parameter group, such as its learning rate."""
    numbers: list[tuple[str, float]] = []
    for name, value in group.items():
        if name == "params":
            continue
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            known = array_of(value)
            value = None if known is None else float(known.reshape(-1)[0])
        if isinstance(value, bool | int | float):
            numbers.append((str(name), float(value)))
        elif isinstance(value, tuple | list) and all(isinstance(one, int | float) for one in value):
            numbers += [(f"{name}[{i}]", float(one)) for i, one in enumerate(value)]
    return tuple(numbers)
