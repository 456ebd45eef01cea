"""Follows the origins of a rank's tensors on simulated GPUs.

Each tensor gets an origin (origins.py): the operator that computed it, with its numbers and the origins of its
arguments. Origins belong to ranges of bytes of a storage, so views and flat buffers need no rule of their own.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from distsim.debug.diagnosis.silent.collect.sketch import WIDTH, array_of, local_part, sketch
from distsim.debug.diagnosis.silent.facts import Vector
from distsim.debug.records import P2P, CallRecord
from distsim.debug.records.frames import Owner, owner
from distsim.sim.device.generator import of_gpu
from distsim.sim.observe.origins import CONSTANT, Meetings, Origin, Parts, Pieces, Received, part_of, slice_of

STEPS = 3
"""Number of optimizer steps in which origins are followed: those in which all tensors are sketched."""
MOST_ORIGINS = 200_000
"""Number of origins after which a rank is not followed any more; each takes about 250 bytes."""
_ATTRIBUTE = "_distsim_origins"

_FILLS = {"zero_": 0.0, "zeros": 0.0, "zeros_like": 0.0, "new_zeros": 0.0, "ones": 1.0, "ones_like": 1.0}
_FILLS |= {"new_ones": 1.0}
_FILL_WITH = {"fill_": 1, "full": 1, "full_like": 1, "new_full": 2}
"""Position of the number with which an operator fills a tensor."""
_JOINS = ("cat", "_chunk_cat")
_CUTS_AS_INPUT = ("all_reduce", "reduce_scatter_tensor")
"""Collectives whose result consists of the same pieces as their input."""
_COPIES = frozenset({"copy_", "clone", "_to_copy"})
_OVERWRITES = frozenset(
    {
        "copy_",
        "zero_",
        "fill_",
        "normal_",
        "uniform_",
        "random_",
        "exponential_",
        "bernoulli_",
        "set_",
        "_foreach_copy_",
    }
)
"""Operators that replace the values of their first argument without reading them."""
_ONE_BY_ONE = ("_foreach_", "_fused_", "_amp_foreach_")
"""Operators on lists that compute each result only from the corresponding elements of the lists."""


class _Reading(NamedTuple):
    """How an operator treats its arguments."""

    name: str
    written: tuple[Any, ...]
    """Positions and names of the arguments that it writes to."""
    unread: frozenset[Any]
    """Those outputs whose earlier values do not matter."""
    is_random: bool
    one_by_one: bool


@lru_cache(maxsize=4096)
def _reading(func: Any) -> _Reading:
    schema = getattr(func, "_schema", None)  # a higher-order operator has none
    name = str(func) if schema is None else schema.name.partition("::")[2]
    written = [
        argument.name if argument.kwarg_only else index
        for index, argument in enumerate(() if schema is None else schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    unread = {key for key in written if isinstance(key, str) or (key == 0 and name in _OVERWRITES)}
    is_random = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
    return _Reading(name, tuple(written), frozenset(unread), is_random, name.startswith(_ONE_BY_ONE))


class Provenance:
    """Follows the origins of the tensors of one rank.

    *generator(index)* returns the generator of one of its GPUs, and *step()* its number of optimizer steps so far.
    """

    def __init__(self, meetings: Meetings, generator: Any, step: Any) -> None:
        self._meetings = meetings
        self._generator = generator
        self._step = step
        self._count = 0
        self._draws: dict[int, tuple[Any, int]] = {}
        self.vectors: list[tuple[Vector, Origin]] = []
        """Sketches that `resolve` fills."""

    @property
    def has_ended(self) -> bool:
        """Return whether origins are not followed any more."""
        return self._count > MOST_ORIGINS or self._step() > STEPS

    # -- what a rank computes

    def ran(self, func: Any, args: Any, kwargs: Mapping[str, Any], result: Any) -> None:
        """Record an operator that launched kernels."""
        if self.has_ended:
            return
        how = _reading(func)
        outs = [*self._written(how, args, kwargs), *_tensors(result)]
        outs = list({id(out): out for out in outs if out.is_cuda}.values())
        if not outs:
            return
        site = _site()
        if (value := _filled_with(how.name, args)) is not None:
            origin = self._new(CONSTANT, value, (), site)
            for out in outs:
                self._write(out, origin)
            return
        given = [arg for index, arg in enumerate(args) if index not in how.unread]
        given += [arg for name, arg in kwargs.items() if name not in how.unread]
        numbers = (tuple(map(_number, given)), self._draw(outs[0], kwargs) if how.is_random else None)
        for out, origin in self._computed(how, outs, given, numbers, site):
            self._write(out, origin)

    def _computed(
        self, how: _Reading, outs: Sequence[Tensor], given: Sequence[Any], numbers: Any, site: Any
    ) -> Iterator[tuple[Tensor, Origin]]:
        """Yield the tensors that an operator computed, with their origins."""
        if how.name == "_foreach_copy_":
            for out, source in zip(outs, given[0], strict=False):
                copied = self._copied(out, [source])
                yield out, copied or self._new("_to_copy", str(out.dtype), (self._read(source),), site)
        elif how.name in _COPIES and (copied := self._copied(outs[0], given)) is not None:
            yield outs[0], copied
        elif how.name in _JOINS and (joined := self._joined(how.name, outs[0], given)) is not None:
            yield outs[0], joined
        elif how.one_by_one:
            length = max((len(arg) for arg in given if isinstance(arg, list | tuple)), default=0)
            elements = [tuple(self._read_all(_element(given, index, length))) for index in range(length)]
            scalars = tuple(_number(arg) for arg in given if not isinstance(arg, Tensor | list | tuple))
            origins = tuple(self._new(how.name, scalars, sources, site) for sources in elements)
            for index, out in enumerate(outs):
                if length and len(outs) % length == 0:
                    yield out, self._new("result", index // length, (origins[index % length],), site)
                else:  # of all elements together, such as whether one is infinite
                    yield out, self._new(how.name, index, origins, site)
        else:
            sources = tuple(self._read_all(given))
            for index, out in enumerate(outs):
                yield out, self._new(how.name, (index, numbers), sources, site)

    def called(self, record: CallRecord, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Record a collective, send or receive of the rank."""
        if self.has_ended:
            return
        meeting, ranks = self._meetings.of(record), record.group.ranks
        member = 0 if record.op in P2P else ranks.index(record.rank)
        own_inputs = [self._pieces(tensor) for tensor in inputs]
        if record.op != "recv":
            meeting.inputs[member] = own_inputs
        if record.op in ("send", "barrier") or (record.op in ("reduce", "gather") and member != meeting.root):
            return
        site, op = _site(), record.op.removesuffix("_coalesced")
        for index, out in enumerate(outputs):
            begin, end, is_dense = _span(out)
            gathers = op == "all_gather_into_tensor" and is_dense and (end - begin) % len(ranks) == 0
            num_parts = len(ranks) if gathers else 1
            nbytes = (end - begin) // num_parts
            cuts = [(0, nbytes)]
            if is_dense and op in _CUTS_AS_INPUT:
                cuts = _cuts(own_inputs[index], member * nbytes if op == "reduce_scatter_tensor" else 0, nbytes) or cuts
            for part in range(num_parts):
                for first, last in cuts:
                    extent, start = (first, last, nbytes), begin + part * nbytes
                    origin = Received(meeting, member, (index, part), extent, site, self._next())
                    self._write_bytes(out.untyped_storage(), start + first, start + last, origin)

    def wrote(self, name: str, tensors: Sequence[Tensor]) -> None:
        """Record a kernel of the program that has read and written *tensors*."""
        if not self.has_ended:
            sources, site = tuple(self._read_all(tensors)), _site()
            for index, tensor in enumerate(tensors):
                self._write(tensor, self._new(name, index, sources, site))

    # -- what the recorder of silent faults asks for

    def sketch(self, tensor: Any) -> Vector | None:
        """Return the sketch of a tensor; for one on a GPU `resolve` fills it after the run."""
        tensor = local_part(tensor)
        if not getattr(tensor, "is_cuda", False):
            return sketch(tensor)
        if self.has_ended or not tensor.numel() or not tensor.untyped_storage().nbytes():
            return None
        vector: Vector = np.zeros(WIDTH, dtype=np.float32)
        self.vectors.append((vector, self._read(tensor)))
        return vector

    def read(self, tensor: Any) -> Any:
        """Return the values of a tensor on the CPU; for one on a GPU its number if all elements are filled with it."""
        tensor = local_part(tensor)
        if not getattr(tensor, "is_cuda", False):
            return array_of(tensor)
        if self.has_ended or not tensor.numel() or not tensor.untyped_storage().nbytes():
            return None
        origin = self._read(tensor)
        return np.full(1, origin.numbers) if origin.name == CONSTANT else None

    # -- origins of memory

    def _next(self) -> int:
        self._count += 1
        return self._count

    def _new(self, name: str, numbers: Any, sources: tuple[Origin, ...], site: Any = None) -> Origin:
        return Origin(name, numbers, sources, site, self._next())

    def _written(self, how: _Reading, args: Any, kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
        for key in how.written:
            value = kwargs.get(key) if isinstance(key, str) else args[key] if key < len(args) else None
            yield from _tensors(value)

    def _read_all(self, values: Iterable[Any]) -> Iterator[Origin]:
        for tensor in _tensors(list(values)):
            yield self._read(tensor)

    def _read(self, tensor: Tensor) -> Origin:
        if not tensor.is_cuda:
            values = array_of(tensor)
            content = None if values is None else zlib.crc32(np.ascontiguousarray(values).tobytes())
            return self._new("from the host", (tuple(tensor.shape), str(tensor.dtype), content), (), _site())
        begin, end, is_dense = _span(tensor)
        origin = self._read_bytes(tensor.untyped_storage(), begin, end)
        if is_dense or origin.name == CONSTANT:
            return origin
        return self._new("view", (tuple(tensor.shape), tensor.stride()), (origin,), origin.site)

    def _read_bytes(self, storage: Any, begin: int, end: int) -> Origin:
        return slice_of(storage.__dict__.get(_ATTRIBUTE, ()), begin, end)

    def _pieces(self, tensor: Tensor) -> Pieces:
        """Return the pieces of a tensor's memory, from its first byte on."""
        begin, end, is_dense = _span(tensor) if tensor.is_cuda else (0, tensor.numel() * tensor.element_size(), False)
        origin = self._read(tensor)
        if is_dense and isinstance(origin, Parts):
            return origin.pieces
        return [(0, end - begin, origin)]

    def _write(self, tensor: Tensor, origin: Origin) -> None:
        begin, end, is_dense = _span(tensor)
        storage = tensor.untyped_storage()
        if not is_dense:
            how = (tuple(tensor.shape), tensor.stride())
            origin = self._new("strided", how, (self._read_bytes(storage, begin, end), origin), origin.site)
        self._write_bytes(storage, begin, end, origin)

    def _write_bytes(self, storage: Any, begin: int, end: int, origin: Origin) -> None:
        if begin == end:
            return
        pieces: list[tuple[int, int, Origin]] = []
        for first, last, old in storage.__dict__.get(_ATTRIBUTE, ()):
            if first < begin:
                stop = min(last, begin)
                pieces.append((first, stop, old if stop == last else part_of(old, 0, stop - first)))
            if last > end:
                start = max(first, end)
                pieces.append((start, last, old if start == first else part_of(old, start - first, last - first)))
        if isinstance(origin, Parts):
            pieces += [(begin + first, begin + last, part) for first, last, part in origin.pieces]
        else:
            pieces.append((begin, end, origin))
        setattr(storage, _ATTRIBUTE, sorted(pieces, key=lambda piece: piece[0]))

    def _copied(self, out: Tensor, given: Sequence[Any]) -> Origin | None:
        """Return the origin of the copied tensor, if the copy changes neither dtype nor order."""
        source = next((arg for arg in given if isinstance(arg, Tensor) and arg is not out), None)
        if source is None:
            return None
        origin = self._read(source)
        is_plain = source.is_contiguous() and out.is_contiguous()
        alike = source.dtype == out.dtype and source.shape == out.shape and is_plain
        return origin if alike or origin.name == CONSTANT else None

    def _joined(self, name: str, out: Tensor, given: Sequence[Any]) -> Origin | None:
        """Return the origins side by side where an operator joins tensors along their first dimension."""
        tensors = [tensor for tensor in _tensors(given[0]) if tensor.numel()]
        numbers = [number for number in given[1:] if isinstance(number, int)]
        if any(numbers[:1]) or not out.is_contiguous() or not all(t.is_cuda and t.is_contiguous() for t in tensors):
            return None
        chunks = numbers[1] if name == "_chunk_cat" else 1
        pieces: list[tuple[int, int, Origin]] = []
        sizes = [-(-t.shape[0] // chunks) * (t.numel() // t.shape[0]) if t.dim() else 1 for t in tensors]
        row = sum(sizes) * out.element_size()
        first = 0
        for tensor, size in zip(tensors, sizes, strict=True):
            origin, wide = self._read(tensor), tensor.element_size()
            for chunk in range(chunks):
                begin, end = (min(tensor.numel(), number * size) * wide for number in (chunk, chunk + 1))
                if begin == end:
                    continue
                part = origin if (begin, end) == (0, tensor.numel() * wide) else part_of(origin, begin, end)
                if tensor.dtype != out.dtype:
                    part = self._new("_to_copy", str(out.dtype), (part,), part.site)
                start = chunk * row + first
                pieces.append((start, start + (end - begin) // wide * out.element_size(), part))
            first += size * out.element_size()
        return Parts(out.numel() * out.element_size(), sorted(pieces, key=lambda piece: piece[0]), self._next())

    def _draw(self, out: Tensor, kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return the state of the generator that an operator draws from."""
        given = kwargs.get("generator")
        generator = None if given is None else of_gpu(given)
        if generator is None:
            generator = self._generator(out.device.index or 0)
        state = (generator._seed, generator._offset)
        before, drawn = self._draws.get(id(generator), (None, 0))
        drawn = drawn if before == state else 0
        self._draws[id(generator)] = state, hash((drawn, tuple(out.shape)))
        return (*state, drawn)


def _span(tensor: Tensor) -> tuple[int, int, bool]:
    """Return the first byte and the end of a tensor's memory, and whether all bytes between belong to it in order."""
    size, begin = tensor.element_size(), tensor.storage_offset()
    if tensor.is_contiguous():
        return begin * size, (begin + tensor.numel()) * size, True
    reach = 1 + sum((length - 1) * step for length, step in zip(tensor.shape, tensor.stride(), strict=True))
    return begin * size, (begin + (reach if tensor.numel() else 0)) * size, False


def _cuts(pieces: Pieces, shift: int, nbytes: int) -> list[tuple[int, int]]:
    """Return the bounds of the pieces between *shift* and *shift* + *nbytes*, counted from *shift*."""
    bounds = [(max(first - shift, 0), min(last - shift, nbytes)) for first, last, _ in pieces]
    return [(first, last) for first, last in bounds if first < last]


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _element(given: Sequence[Any], index: int, length: int) -> list[Any]:
    """Return element *index* of each list with *length* elements, and all other arguments unchanged."""
    return [arg[index] if isinstance(arg, list | tuple) and len(arg) == length else arg for arg in given]


def _number(value: Any) -> Any:
    """Return an argument that is not a tensor in hashable form. Devices are ignored, because they differ by rank."""
    if isinstance(value, float):
        return value if value == value else "nan"
    if isinstance(value, int | str | bool | torch.dtype):
        return value
    return tuple(map(_number, value)) if isinstance(value, list | tuple) else None


def _filled_with(name: str, args: Any) -> float | None:
    """Return the number with which an operator fills its result; None for all others."""
    if name in _FILLS:
        return _FILLS[name]
    index = _FILL_WITH.get(name)
    value = args[index] if index is not None and index < len(args) else None
    return float(value) if isinstance(value, int | float) and value == value else None


def _site() -> Any:
    """Return code and line number of the user's innermost frame."""
    frame = sys._getframe(2)
    while frame is not None and owner(frame.f_code.co_filename) is not Owner.USER:
        frame = frame.f_back  # type: ignore[assignment]
    return None if frame is None else (frame.f_code, frame.f_lineno)
