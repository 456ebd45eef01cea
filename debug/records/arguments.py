"""Reads the arguments of torch's process group methods, for simulated and real groups.

`FIELDS` is the table of operations: their methods, and what their arguments mean. A *reader* returns a `MethodCall`,
whose `key` is cheap to build and to hash, because it runs at every call. `signature.py` expands a key for a record,
once for each new one. torch is not imported here: a tensor is an object with a shape, a dtype and a device.

A public function of torch.distributed may refuse a call before it reaches a process group: torch checks most arguments
itself (`Invalid function argument`), pickles objects, and looks the group up. Such an exception leaves no trace in any
group, but torch's exception log reports it, which the real and the simulated mode read (`came_out`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import index
from traceback import walk_tb
from types import CodeType
from typing import Any, NamedTuple

Key = tuple[Any, ...]
"""(operation, input shapes, output shapes, dtype, number of the reduce op, root, input splits, output splits,
device).

The dtype is a tuple if tensors differ in it; root is a global rank; missing items are None or empty.
"""


class MethodCall(NamedTuple):
    """One call, described by its arguments."""

    key: Key
    is_async: bool = True
    """Whether the caller continues at once; for sends and receives only torch's own function knows (see
    `SYNCHRONOUS_P2P`).
    """
    first: Any = None
    """The first tensor: its device decides which backend serves the call."""
    direct: bool = False
    """The arguments are as c10d passes them (lists and an options object), so a backend takes them as they are."""
    peer: int = -1
    """Global rank of the other end; -1: none, or any."""
    tag: int = 0
    inputs: Sequence[Any] = ()
    """Tensors that are read."""
    outputs: Sequence[Any] = ()
    """Tensors that are written; the inputs where an operation works in place (its key has no output shapes then)."""
    opts: Any = None
    """torch's options object, or the argument given instead (a root, a reduce operation); None without one."""

    def is_for_host(self) -> bool:
        """Return whether the CPU's backend serves the call, if a group has several backends.

        torch dispatches by the first tensor; a barrier has it in its options (distributed_c10d.py, `barrier`).
        """
        device = getattr(self.opts, "device", None) if self.first is None else self.first.device
        return device is None or device.type == "cpu"


Ranks = Sequence[int]
"""Global ranks of the group, in its order."""
Reader = Callable[[Ranks, tuple[Any, ...], Mapping[str, Any]], MethodCall]
"""Function that reads a method's arguments. Raises TypeError, AttributeError or similar if they do not fit the
method.
"""


@dataclass(frozen=True, slots=True)
class Fields:
    """Describes the arguments of one operation."""

    methods: tuple[str, ...]
    """Methods of torch's ProcessGroup, named as in torch 2.11 and in 2.13 (which renamed the `_base` forms and kept
    the old names).
    """
    reader: Callable[[str, Fields, str], Reader]
    """Makes the reader of an operation and a method."""
    reduces: bool = False
    rooted: bool = False
    in_place: bool = False
    lists: tuple[int, ...] = ()
    """Parts of the key that hold one tensor for each member."""
    pairwise: bool = False
    """Whether equal arguments on all ranks do not prove that the calls match."""
    sized_by: int = 1
    """Part of the key whose bytes are the call's payload, in nccl-tests' meaning of size: the whole buffer of
    all_gather, reduce_scatter and all_to_all, one rank's share of all else."""


TAGS = 1 << 31
"""torch's tags are C's int."""
INPUTS, OUTPUTS = 1, 2
"""Parts of a key."""

_OUTPUT = ("output_tensors", "output", "outputs", "outputTensor", "output_lists", "output_tensor")
_INPUT = ("input_tensors", "input", "inputs", "inputTensor", "input_list", "input_tensor")
_new = tuple.__new__  # a NamedTuple's own constructor takes three times as long


def _in_order(args: tuple[Any, ...], kwargs: Mapping[str, Any], *names: tuple[str, ...]) -> list[Any]:
    """Return the arguments by position; *names* are the keywords that each may have.

    None for an argument that is not given.
    """
    result = [*args, *[None] * (len(names) - len(args))]
    for i in range(len(args), len(names)):
        for name in names[i]:
            if name in kwargs:
                result[i] = kwargs[name]
    return result


def _tensors(given: Any) -> Sequence[Any]:
    if given is None:
        raise TypeError("no tensors")
    return given if isinstance(given, (list, tuple)) else (given,)


def _flat(given: Sequence[Any]) -> Sequence[Any]:
    """Flatten a list of tensors, or of lists of them."""
    if not given or not isinstance(given[0], (list, tuple)):
        return given
    if len(given) == 1:
        return given[0]
    return [tensor for part in given for tensor in _tensors(part)]


def _shapes(tensors: Sequence[Any]) -> tuple[Any, ...]:
    if len(tensors) == 1:
        return (tensors[0].shape,)
    return tuple([tensor.shape for tensor in tensors])


def _dtype(tensors: Sequence[Any], first: Any) -> Any:
    dtype = first.dtype
    if len(tensors) > 1:
        dtypes = tuple([tensor.dtype for tensor in tensors])
        if dtypes.count(dtype) < len(dtypes):
            return dtypes
    return dtype


def _reduce_op(opts: Any) -> int:
    """Return torch's number of the reduce op, which is its hash; that of the sum if none is given."""
    return 0 if opts is None else hash(getattr(opts, "reduceOp", opts))


def _root(ranks: Ranks, opts: Any) -> int | None:
    """Return a global rank; None for a root that is none of the group, which the backend refuses."""
    root = getattr(opts, "rootRank", opts) or 0
    return ranks[root] if 0 <= root < len(ranks) else None


def _in_place(op: str, fields: Fields, method: str) -> Reader:
    """Return the reader for methods with (tensors, opts): a list or one tensor; instead of options a root or reduce
    operation.
    """
    reduces, rooted = fields.reduces, fields.rooted

    def read(ranks: Ranks, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> MethodCall:
        if kwargs or len(args) < 2:
            tensors, opts, third = _in_order(
                args, kwargs, ("tensors", "tensor"), ("opts", "root") if rooted else ("opts", "op"), ("op",)
            )[:3]
        else:
            tensors, opts = args[0], args[1]
            third = args[2] if len(args) > 2 else None
        if type(tensors) is not list:
            tensors = _tensors(tensors)
        first = tensors[0] if tensors else None
        key = (
            op,
            _shapes(tensors),
            (),
            None if first is None else _dtype(tensors, first),
            _reduce_op(opts if not rooted or hasattr(opts, "reduceOp") else third) if reduces else None,
            _root(ranks, opts) if rooted else None,
            None,
            None,
            None if first is None else first.device,
        )
        later = getattr(opts, "asyncOp", None)
        return _new(MethodCall, (key, later is not False, first, later is not None, -1, 0, tensors, tensors, opts))

    return read


def _out_in(op: str, fields: Fields, method: str) -> Reader:
    """Return the reader for methods with (outputs, inputs, opts): each a tensor, a list, or a list of lists."""
    reduces, rooted = fields.reduces, fields.rooted

    def read(ranks: Ranks, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> MethodCall:
        if kwargs or len(args) != 3:
            args = tuple(_in_order(args, kwargs, _OUTPUT, _INPUT, ("opts", "root", "op")))
        outputs, inputs, opts = args[0], args[1], args[2]
        outputs = _flat(outputs) if isinstance(outputs, (list, tuple)) else (outputs,)
        inputs = _flat(inputs) if isinstance(inputs, (list, tuple)) else (inputs,)
        some = inputs or outputs
        first = some[0] if some else None
        key = (
            op,
            _shapes(inputs),
            _shapes(outputs),
            None if first is None else _dtype(some, first),
            _reduce_op(opts) if reduces else None,
            _root(ranks, opts) if rooted else None,
            None,
            None,
            None if first is None else first.device,
        )
        later = getattr(opts, "asyncOp", None)
        return _new(MethodCall, (key, later is not False, first, later is not None, -1, 0, inputs, outputs, opts))

    return read


def _splits(given: Any) -> tuple[int, ...]:
    """Return splits as integers. torch accepts lists and arrays of any integers, such as NumPy's or scalar tensors."""
    return () if given is None else tuple([int(one) for one in given])


def _by_splits(op: str, fields: Fields, method: str) -> Reader:
    """Return (output, input, output splits, input splits, opts)."""

    def read(ranks: Ranks, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> MethodCall:
        output, source, output_splits, input_splits, opts = _in_order(
            args, kwargs, _OUTPUT, _INPUT, ("output_split_sizes",), ("input_split_sizes",), ("opts",)
        )[:5]
        key = (
            op,
            (source.shape,),
            (output.shape,),
            source.dtype,
            None,
            None,
            _splits(input_splits),
            _splits(output_splits),
            source.device,
        )
        later = getattr(opts, "asyncOp", None)
        direct = later is not None and type(output_splits) is list is type(input_splits)
        return _new(MethodCall, (key, later is not False, source, direct, -1, 0, (source,), (output,), opts))

    return read


def _message(op: str, fields: Fields, method: str) -> Reader:
    """Return a reader of (tensors, rank in the group, tag), or of (tensors, tag) if the sender may be any rank."""
    names: tuple[tuple[str, ...], ...] = (("tensors", "arg0"), ("dstRank", "srcRank"), ("tag",))
    if method == "recv_anysource":
        names = (names[0], ("tag", "arg1"))
    num, sends = len(names), op == "send"

    def read(ranks: Ranks, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> MethodCall:
        direct = not kwargs and len(args) == num
        if not direct:
            args = tuple(_in_order(args, kwargs, *names))
        tensors, end = _tensors(args[0]), args[1]
        first = tensors[0]
        tag = args[num - 1] or 0
        if type(tag) is not int:
            tag = index(tag)  # TypeError: torch says so in its words
        if not -TAGS <= tag < TAGS:
            raise ValueError("no tag of torch's")
        peer = -1
        if num == 3 and 0 <= end < len(ranks):  # the backend refuses another
            peer = ranks[end]
        shapes = _shapes(tensors)
        key = (
            op,
            shapes if sends else (),
            () if sends else shapes,
            _dtype(tensors, first),
            None,
            None,
            None,
            None,
            first.device,
        )
        inputs, outputs = (tensors, ()) if sends else ((), tensors)
        return _new(MethodCall, (key, True, first, direct, peer, tag, inputs, outputs, end))

    return read


def _nothing(op: str, fields: Fields, method: str) -> Reader:
    """Return (opts), or (timeout): no tensor."""
    key = (op, (), (), None, None, None, None, None, None)

    def read(ranks: Ranks, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> MethodCall:
        opts = args[0] if args else kwargs.get("opts")
        later = getattr(opts, "asyncOp", None)
        return _new(MethodCall, (key, later is not False, None, later is not None, -1, 0, (), (), opts))

    return read


def _in_its_own_way(op: str, fields: Fields, method: str) -> Reader:
    """Return the reader for monitored_barrier, which only gloo has, and which always waits."""
    call = MethodCall((op, (), (), None, None, None, None, None, None), is_async=False)
    return lambda ranks, args, kwargs: call


FIELDS: dict[str, Fields] = {
    "all_reduce": Fields(("allreduce",), _in_place, reduces=True, in_place=True),
    "all_reduce_coalesced": Fields(("allreduce_coalesced",), _in_place, reduces=True, in_place=True),
    "broadcast": Fields(("broadcast",), _in_place, rooted=True, in_place=True),
    "reduce": Fields(("reduce",), _in_place, reduces=True, rooted=True, in_place=True),
    "all_gather": Fields(("allgather",), _out_in, lists=(OUTPUTS,), pairwise=True, sized_by=OUTPUTS),
    "all_gather_into_tensor": Fields(("all_gather_single", "_allgather_base"), _out_in, sized_by=OUTPUTS),
    "all_gather_coalesced": Fields(("allgather_coalesced",), _out_in, pairwise=True, sized_by=OUTPUTS),
    "all_gather_into_tensor_coalesced": Fields(
        ("all_gather_single_coalesced", "allgather_into_tensor_coalesced"), _out_in, sized_by=OUTPUTS
    ),
    "gather": Fields(("gather",), _out_in, rooted=True, lists=(OUTPUTS,), pairwise=True),
    "scatter": Fields(("scatter",), _out_in, rooted=True, lists=(INPUTS,), pairwise=True, sized_by=OUTPUTS),
    "reduce_scatter": Fields(("reduce_scatter",), _out_in, reduces=True, lists=(INPUTS,), pairwise=True),
    "reduce_scatter_tensor": Fields(("reduce_scatter_single", "_reduce_scatter_base"), _out_in, reduces=True),
    "reduce_scatter_tensor_coalesced": Fields(
        ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"), _out_in, reduces=True
    ),
    "all_to_all": Fields(("alltoall",), _out_in, lists=(INPUTS, OUTPUTS), pairwise=True),
    "all_to_all_single": Fields(("all_to_all_single", "alltoall_base"), _by_splits, pairwise=True),
    "send": Fields(("send",), _message),
    "recv": Fields(("recv", "recv_anysource"), _message, sized_by=OUTPUTS),
    "barrier": Fields(("barrier",), _nothing),
    "monitored_barrier": Fields(("monitored_barrier",), _in_its_own_way),
}
"""Every operation that moves data, by torch.distributed's public name."""

METHODS: dict[str, Reader] = {
    method: fields.reader(op, fields, method) for op, fields in FIELDS.items() for method in fields.methods
}
"""Every method of torch's ProcessGroup that moves data, and what reads its arguments."""

SYNCHRONOUS_P2P = frozenset({"send", "recv", "send_object_list", "recv_object_list"})
"""Public functions of torch.distributed that wait for their own isend / irecv."""


_ITS_OWN = (
    "all_gather", "all_reduce", "all_to_all", "all_to_all_single", "barrier", "broadcast", "gather", "recv", "reduce",
    "reduce_scatter", "scatter", "send",
)  # fmt: skip
FIRST_CALLS: dict[str, str] = {op: op for op in _ITS_OWN} | {
    "all_gather_object": "all_gather",
    "all_gather_single": "all_gather_into_tensor",
    "broadcast_object_list": "broadcast",
    "gather_object": "all_gather",
    "recv_object_list": "recv",
    "reduce_scatter_single": "reduce_scatter_tensor",
    "scatter_object_list": "broadcast",
    "send_object_list": "send",
}
"""First operation of each public function of torch.distributed that logs its exceptions. (`isend`, `irecv`,
`batch_isend_irecv` and `monitored_barrier` do not log.)
"""

_LOGGER = "c10d_logger.py"
_AFTERWARDS = "_tensor_to_object"
"""Function in which torch unpickles received data, after the calls have ended."""


def came_out(error: BaseException, made_record: Callable[[CodeType, bool], bool]) -> bool:
    """Return whether a call was recorded, or another public function reported it, before *error* was raised.

    *made_record(code, innermost)* says whether a frame of this code has made a record; the outermost frame of the
    traceback is that of the logging decorator.
    """
    codes = [frame.f_code for frame, _ in walk_tb(error.__traceback__)][1:]
    return any(
        code.co_name == _AFTERWARDS or code.co_filename.endswith(_LOGGER) or made_record(code, number == len(codes))
        for number, code in enumerate(codes, 1)
    )
