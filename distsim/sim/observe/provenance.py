"""Origins of the tensors on simulated GPUs: equal origins mean equal values, although no values are computed.

A rank gives each tensor an origin: the operator that computed it, with its numbers and the origins of its arguments.
The origin of a collective's result contains what all members brought, so it is equal on all members of an all-reduce.
Origins are compared between ranks after the run (`resolve`). Two ranks that compute one value in different ways have
different origins: what rests on a difference of origins is a warning.
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
from distsim.debug.records import P2P, CallRecord, Site
from distsim.debug.records.frames import Owner, owner, shown
from distsim.sim.device.generator import of_gpu

__all__ = ["Meetings", "Origin", "Provenance", "first_difference", "resolve"]

STEPS = 3
"""Steps of an optimizer in which origins are followed: as many as sketch all tensors."""
MOST_ORIGINS = 200_000
"""Origins of one rank, of about 250 bytes each."""
CONSTANT = "constant"
_ATTRIBUTE = "_distsim_origins"

_FILLS = {"zero_": 0.0, "zeros": 0.0, "zeros_like": 0.0, "new_zeros": 0.0, "ones": 1.0, "ones_like": 1.0}
_FILLS |= {"new_ones": 1.0}
_FILL_WITH = {"fill_": 1, "full": 1, "full_like": 1, "new_full": 2}
"""Position of the number with which an operator fills a tensor."""
_JOINS = ("cat", "_chunk_cat")
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
"""Operators on lists whose results each depend on their own elements of the lists."""


class Origin:
    """How a value was computed."""

    __slots__ = ("key", "name", "numbers", "order", "site", "sources")

    def __init__(self, name: str, numbers: Any, sources: tuple[Origin, ...], site: Any, order: int) -> None:
        self.name = name
        self.numbers = numbers
        self.sources = sources
        self.site = site
        """Code and line number of the user's program; None in backward."""
        self.order = order
        """Number of the origin on its rank."""
        self.key: int | None = None
        """Equal on all ranks for equal origins, once resolved."""

    def needs(self) -> Sequence[Origin]:
        """Return the origins that decide `key`."""
        return self.sources

    def own_key(self) -> int:
        """Return `key`, made of the keys of all that it needs."""
        return hash((self.name, self.numbers, tuple(source.key for source in self.sources)))


Pieces = Sequence[tuple[int, int, Origin]]
"""First byte, end and origin of parts of a memory, in order."""


class Parts(Origin):
    """Several origins side by side in one memory of *nbytes*."""

    __slots__ = ("pieces",)

    def __init__(self, nbytes: int, pieces: Pieces, order: int) -> None:
        places = tuple((first, last) for first, last, _ in pieces)
        super().__init__("parts", (nbytes, places), tuple(origin for *_, origin in pieces), None, order)
        self.pieces = pieces


class Meeting:
    """One collective, or one message: what its members brought."""

    __slots__ = ("brought", "number", "op", "root", "size")

    def __init__(self, number: int, op: str, root: int, size: int) -> None:
        self.number, self.op, self.root, self.size = number, op, root, size
        self.brought: dict[int, Sequence[Pieces]] = {}
        """Origins of the inputs by rank in the group."""

    def givers(self, place: int, position: tuple[int, int], nbytes: int) -> tuple[list[int], int, int] | None:
        """Return whose inputs make a result, the number of that input and its first byte; None if all inputs do.

        *place* is the member that receives the result, *position* the number of the output and of its part, and
        *nbytes* the size of the output.
        """
        output, part = position
        everyone = sorted(self.brought)
        match self.op.removesuffix("_coalesced"):
            case "all_reduce":
                return everyone, output, 0
            case "broadcast" | "recv":
                return [max(0, self.root)], output, 0
            case "scatter":
                return [self.root], place, 0
            case "all_gather":
                return [output], 0, 0
            case "all_gather_into_tensor":
                return [part], output, 0
            case "reduce_scatter":
                return everyone, place, 0
            case "reduce_scatter_tensor":
                return everyone, output, place * nbytes
        return None


class Received(Origin):
    """The bytes from *begin* to *end* of a result of a collective or message."""

    __slots__ = ("_needed", "begin", "end", "meeting", "nbytes", "place", "position")

    def __init__(
        self,
        meeting: Meeting,
        place: int,
        position: tuple[int, int],
        extent: tuple[int, int, int],
        site: Any,
        order: int,
    ) -> None:
        super().__init__(meeting.op, (), (), site, order)
        self.meeting, self.place, self.position = meeting, place, position
        self.begin, self.end, self.nbytes = extent
        self._needed: list[Origin] | None = None

    def part(self, begin: int, end: int) -> Received:
        """Return the origin of some of the bytes."""
        extent = (self.begin + begin, self.begin + end, self.nbytes)
        return Received(self.meeting, self.place, self.position, extent, self.site, self.order)

    def needs(self) -> Sequence[Origin]:
        if self._needed is None:
            givers = self.meeting.givers(self.place, self.position, self.nbytes)
            brought = self.meeting.brought
            if givers is None:
                inputs = [pieces for _, of_member in sorted(brought.items()) for pieces in of_member]
                self._needed = [origin for pieces in inputs for *_, origin in pieces]
            else:
                members, index, shift = givers
                inputs = [brought[member][index] for member in members if index < len(brought.get(member, ()))]
                self._needed = [_slice(pieces, shift + self.begin, shift + self.end) for pieces in inputs]
        return self._needed

    def own_key(self) -> int:
        needed = self.needs()
        op, extent = self.meeting.op.removesuffix("_coalesced"), (self.position, self.begin, self.end)
        is_moved = op in _MOVES and len(needed) == 1
        if is_moved and needed[0].key is not None:
            return needed[0].key
        if not op.startswith(("all_reduce", "all_gather", "broadcast")):
            extent = (*extent, self.place)  # type: ignore[assignment]
        if len(self.meeting.brought) < self.meeting.size:  # somebody did not come, or is a rank that another stands for
            return hash((op, self.meeting.number, extent))
        keys = tuple(origin.key for origin in needed)
        return hash((op, keys)) if op in _REDUCES else hash((op, extent, keys))


_MOVES = ("broadcast", "recv", "scatter", "all_gather", "all_gather_into_tensor")
_REDUCES = ("all_reduce", "reduce_scatter", "reduce_scatter_tensor")


def _slice(pieces: Pieces, begin: int, end: int) -> Origin:
    """Return the origin of the bytes from *begin* to *end* of a memory."""
    inside = [piece for piece in pieces if piece[0] < end and piece[1] > begin]
    if len(inside) == 1 and inside[0][0] <= begin and end <= inside[0][1]:
        first, last, origin = inside[0]
        return origin if (first, last) == (begin, end) else _part(origin, begin - first, end - first)
    if inside and all(origin.name == CONSTANT and origin.numbers == inside[0][2].numbers for *_, origin in inside):
        return inside[0][2]
    cut = []
    for first, last, origin in inside:
        start, stop = max(first, begin), min(last, end)
        origin = origin if (start, stop) == (first, last) else _part(origin, start - first, stop - first)
        cut.append((start - begin, stop - begin, origin))
    return Parts(end - begin, cut, max((origin.order for *_, origin in cut), default=0))


def _part(origin: Origin, begin: int, end: int) -> Origin:
    """Return the origin of some bytes of a value."""
    if origin.name == CONSTANT:
        return origin
    if isinstance(origin, Received):
        return origin.part(begin, end)
    if isinstance(origin, Parts):
        return _slice(origin.pieces, begin, end)
    if origin.name == "part":
        first = origin.numbers[0]
        return Origin("part", (first + begin, first + end), origin.sources, origin.site, origin.order)
    return Origin("part", (begin, end), (origin,), origin.site, origin.order)


class Meetings:
    """The collectives and messages of all ranks of a run, by group and number."""

    def __init__(self) -> None:
        self._meetings: dict[Any, Meeting] = {}
        self._messages: dict[Any, int] = {}

    def of(self, record: CallRecord) -> Meeting:
        """Return the meeting that a call is part of; the n-th send from a rank to another is its n-th receive's."""
        group = record.group
        key: Any = (group.name, group.ranks, record.op, record.seq)
        if record.op in P2P:
            ends = (record.rank, record.peer) if record.op == "send" else (record.peer, record.rank)
            stream = (group.name, record.op, ends, record.tag)
            number = self._messages[stream] = self._messages.get(stream, 0) + 1
            key = (group.name, ends, record.tag, number)
        meeting = self._meetings.get(key)
        if meeting is None:
            root = -1 if record.root is None else group.ranks.index(record.root)
            op, size = ("recv", 1) if record.op in P2P else (record.op, len(group.ranks))
            meeting = self._meetings[key] = Meeting(len(self._meetings), op, root, size)
        return meeting


class _Reading(NamedTuple):
    """How an operator treats its arguments."""

    name: str
    written: tuple[Any, ...]
    """Positions and names of the arguments that it writes to."""
    unread: frozenset[Any]
    """Those of them whose earlier values do not matter."""
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
    unread = {place for place in written if isinstance(place, str) or (place == 0 and name in _OVERWRITES)}
    is_random = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
    return _Reading(name, tuple(written), frozenset(unread), is_random, name.startswith(_ONE_BY_ONE))


class Provenance:
    """Origins of the tensors of one rank. *generator(index)* returns the generator of one of its GPUs."""

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
        """Whether origins are not followed any more."""
        return self._count > MOST_ORIGINS or self._step() > STEPS

    # -- what a rank computes

    def ran(self, func: Any, args: Any, kwargs: Mapping[str, Any], result: Any) -> None:
        """An operator with kernels has run."""
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
        given = [arg for place, arg in enumerate(args) if place not in how.unread]
        given += [arg for name, arg in kwargs.items() if name not in how.unread]
        numbers = (tuple(map(_number, given)), self._draw(outs[0], kwargs) if how.is_random else None)
        if how.name in _COPIES and (source := self._copied(outs[0], given)) is not None:
            self._write(outs[0], source)
        elif how.name in _JOINS and (joined := self._joined(how.name, outs[0], given)) is not None:
            self._write(outs[0], joined)
        elif how.name == "_foreach_copy_":
            for out, source in zip(outs, given[0], strict=False):
                copied = self._copied(out, [source])
                self._write(out, copied or self._new("_to_copy", str(out.dtype), (self._read(source),), site))
        elif how.one_by_one:
            length = max((len(arg) for arg in given if isinstance(arg, list | tuple)), default=0)
            origins = [
                self._new(how.name, (), tuple(self._read_all(_element(given, index, length))), site)
                for index in range(length)
            ]
            for index, out in enumerate(outs):
                if length and len(outs) % length == 0:
                    self._write(out, self._new("result", index // length, (origins[index % length],), site))
                else:  # of all elements together, such as whether one is infinite
                    self._write(out, self._new(how.name, index, tuple(origins), site))
        else:
            sources = tuple(self._read_all(given))
            for index, out in enumerate(outs):
                self._write(out, self._new(how.name, (index, numbers), sources, site))

    def called(self, record: CallRecord, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """The rank takes part in a collective, or sends or receives."""
        if self.has_ended:
            return
        meeting, ranks = self._meetings.of(record), record.group.ranks
        place = 0 if record.op in P2P else ranks.index(record.rank)
        brought = [self._pieces(tensor) for tensor in inputs]
        if record.op != "recv":
            meeting.brought[place] = brought
        if record.op in ("send", "barrier") or (record.op in ("reduce", "gather") and place != meeting.root):
            return
        site, op = _site(), record.op.removesuffix("_coalesced")
        for index, out in enumerate(outputs):
            begin, end, is_dense = _span(out)
            nbytes = end - begin
            layout = [(0, nbytes)]
            if op == "all_reduce" and is_dense:
                layout = [(first, last) for first, last, _ in brought[index]] or layout
            elif op == "reduce_scatter_tensor" and is_dense:
                shift = place * nbytes
                layout = [
                    (max(first - shift, 0), min(last - shift, nbytes))
                    for first, last, _ in brought[index]
                    if first < shift + nbytes and last > shift
                ] or layout
            parts = len(ranks) if op == "all_gather_into_tensor" and is_dense and nbytes % len(ranks) == 0 else 1
            each = nbytes // parts
            for part in range(parts):
                for first, last in layout if parts == 1 else [(0, each)]:
                    extent = (first, last, each)
                    origin = Received(meeting, place, (index, part), extent, site, self._next())
                    start = begin + part * each
                    self._write_bytes(out.untyped_storage(), start + first, start + last, origin)

    def wrote(self, name: str, tensors: Sequence[Tensor]) -> None:
        """A kernel of the program has read and written *tensors*."""
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
        for place in how.written:
            value = kwargs.get(place) if isinstance(place, str) else args[place] if place < len(args) else None
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
        return _slice(storage.__dict__.get(_ATTRIBUTE, ()), begin, end)

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
                pieces.append((first, stop, old if stop == last else _part(old, 0, stop - first)))
            if last > end:
                start = max(first, end)
                pieces.append((start, last, old if start == first else _part(old, start - first, last - first)))
        if isinstance(origin, Parts):
            pieces += [(begin + first, begin + last, part) for first, last, part in origin.pieces]
        else:
            pieces.append((begin, end, origin))
        setattr(storage, _ATTRIBUTE, sorted(pieces, key=lambda piece: piece[0]))

    def _copied(self, out: Tensor, given: Sequence[Any]) -> Origin | None:
        """Return the origin of what a copy copies, if it changes neither dtype nor order."""
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
                part = origin if (begin, end) == (0, tensor.numel() * wide) else _part(origin, begin, end)
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


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _element(given: Sequence[Any], index: int, length: int) -> list[Any]:
    """Return element *index* of each list with *length* elements, and all that is no such list."""
    return [arg[index] if isinstance(arg, list | tuple) and len(arg) == length else arg for arg in given]


def _number(value: Any) -> Any:
    """Return an argument that is no tensor in a form that can be hashed; nothing of devices, which differ by rank."""
    if isinstance(value, float):
        return value if value == value else "nan"
    if isinstance(value, int | str | bool | torch.dtype):
        return value
    return tuple(map(_number, value)) if isinstance(value, list | tuple) else None


def _filled_with(name: str, args: Any) -> float | None:
    """Return the number with which an operator fills its result; None for all others."""
    if name in _FILLS:
        return _FILLS[name]
    place = _FILL_WITH.get(name)
    value = args[place] if place is not None and place < len(args) else None
    return float(value) if isinstance(value, int | float) and value == value else None


def _site() -> Any:
    """Return code and line number of the user's innermost frame."""
    frame = sys._getframe(2)
    while frame is not None and owner(frame.f_code.co_filename) is not Owner.USER:
        frame = frame.f_back  # type: ignore[assignment]
    return None if frame is None else (frame.f_code, frame.f_lineno)


# -- after the run


def resolve(ranks: Iterable[Provenance]) -> None:
    """Fill the sketches of all *ranks*: equal for equal origins, and otherwise without any relation."""
    for provenance in ranks:
        for vector, origin in provenance.vectors:
            if origin.name == CONSTANT:
                vector[:] = origin.numbers
            else:
                draw = np.random.Generator(np.random.PCG64(_key(origin) & (1 << 64) - 1))
                vector[:] = draw.standard_normal(WIDTH, dtype=np.float32)


def _key(origin: Origin) -> int:
    """Return the key of an origin, after those of all that it comes from."""
    waiting = [origin]
    while waiting:
        last = waiting[-1]
        missing = [source for source in last.needs() if source.key is None] if last.key is None else []
        if missing:
            waiting += missing
        else:
            last.key = last.own_key() if last.key is None else last.key
            waiting.pop()
    assert origin.key is not None
    return origin.key


def first_difference(one: Origin, other: Origin) -> tuple[str, Site | None] | None:
    """Return the operation, and its line, with which the origins of two different values begin to differ.

    Of several the first in the program's order counts, but for what comes from other differences.
    """
    roots: list[Origin] = []
    seen: set[tuple[int, int]] = set()
    waiting = [(one, other)]
    while waiting:
        left, right = waiting.pop()
        if (id(left), id(right)) in seen:
            continue
        seen.add((id(left), id(right)))
        needs = list(zip(left.needs(), right.needs(), strict=False))
        unlike = [(a, b) for a, b in needs if _key(a) != _key(b)]
        if unlike and left.name == right.name:
            waiting += unlike
        else:
            roots.append(left)
    named = [root for root in roots if root.site is not None]
    if not named:
        return None
    root = min(named, key=lambda origin: origin.order)
    code, line = root.site
    return root.name, Site(shown(code.co_filename), line, code.co_name)
