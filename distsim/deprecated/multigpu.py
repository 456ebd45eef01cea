"""The collectives of several devices a rank, which torch has dropped with 2.2: each rank gives a tensor on each of its
devices, and the operation goes over all devices of all ranks.

A rank's own devices are gone over first, on the device of its first tensor, and one tensor a rank goes out: backends of
today take no more. So any backend does it, on CPU tensors too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = [
    "all_gather_multigpu",
    "all_reduce_multigpu",
    "broadcast_multigpu",
    "reduce_multigpu",
    "reduce_scatter_multigpu",
]

SUM = dist.ReduceOp.SUM


class MultiWork:
    """A request whose last step, the copy to the rank's other devices, runs when it is waited for."""

    def __init__(self, work: Any, finish: Callable[[], None]) -> None:
        self._work = work
        self._finish: Callable[[], None] | None = finish

    def is_completed(self) -> bool:
        """Return whether the data from the network have arrived."""
        return bool(self._work.is_completed())

    def wait(self, *timeout: Any) -> bool:
        """Wait until the tensors of all devices are written."""
        self._work.wait(*timeout)
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
        return True


def broadcast_multigpu(
    tensor_list: Sequence[Tensor], src: int, group: Any = None, async_op: bool = False, src_tensor: int = 0
) -> Any:
    """Copy `tensor_list[src_tensor]` of rank *src* to every tensor in every rank's list."""
    _check("broadcast_multigpu", tensor_list)
    is_source = dist.get_rank() == src
    if is_source and not 0 <= src_tensor < len(tensor_list):
        raise ValueError(f"broadcast_multigpu: src_tensor {src_tensor} of a list of {len(tensor_list)} tensors")
    first = tensor_list[0]  # NCCL waits for ever where some ranks change to another GPU
    if is_source:
        first.copy_(tensor_list[src_tensor])
    work = dist.broadcast(first, src, group, async_op)

    def finish() -> None:
        for tensor in tensor_list[1:]:
            tensor.copy_(first)

    return _ended(work, finish, group)


def all_reduce_multigpu(tensor_list: Sequence[Tensor], op: Any = SUM, group: Any = None, async_op: bool = False) -> Any:
    """Combine all tensors in all ranks' lists with *op*; every one of them gets the result."""
    _check("all_reduce_multigpu", tensor_list)
    total = _reduced(tensor_list, op)
    work = dist.all_reduce(total, op, group, async_op)

    def finish() -> None:
        for tensor in tensor_list:
            tensor.copy_(total)

    return _ended(work, finish, group)


def reduce_multigpu(
    tensor_list: Sequence[Tensor],
    dst: int,
    op: Any = SUM,
    group: Any = None,
    async_op: bool = False,
    dst_tensor: int = 0,
) -> Any:
    """Combine all tensors in all ranks' lists with *op*; only `tensor_list[dst_tensor]` of rank *dst* gets the
    result.
    """
    _check("reduce_multigpu", tensor_list)
    is_destination = dist.get_rank() == dst
    if is_destination and not 0 <= dst_tensor < len(tensor_list):
        raise ValueError(f"reduce_multigpu: dst_tensor {dst_tensor} of a list of {len(tensor_list)} tensors")
    total = _reduced(tensor_list, op)
    work = dist.reduce(total, dst, op, group, async_op)

    def finish() -> None:
        if is_destination:
            tensor_list[dst_tensor].copy_(total)

    return _ended(work, finish, group)


def all_gather_multigpu(
    output_tensor_lists: Sequence[Sequence[Tensor]],
    input_tensor_list: Sequence[Tensor],
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """Collect all inputs of all ranks in every list of *output_tensor_lists*, which has a list for each device.

    Input j of rank k is at index `k * len(input_tensor_list) + j`.
    """
    _check("all_gather_multigpu", input_tensor_list)
    number = len(input_tensor_list)
    size = _size(group) * number
    _check_lists("all_gather_multigpu", "output", output_tensor_lists, number, size)
    mine = torch.stack([tensor.to(input_tensor_list[0].device) for tensor in input_tensor_list])
    parts = [torch.empty_like(mine) for _ in range(size // number)]
    work = dist.all_gather(parts, mine, group, async_op)

    def finish() -> None:
        for outputs in output_tensor_lists:
            for i, tensor in enumerate(outputs):
                tensor.copy_(parts[i // number][i % number])

    return _ended(work, finish, group)


def reduce_scatter_multigpu(
    output_tensor_list: Sequence[Tensor],
    input_tensor_lists: Sequence[Sequence[Tensor]],
    op: Any = SUM,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """Combine parts of the inputs of all ranks with *op*, and scatter the results.

    Output i of rank k combines the inputs at index `k * len(output_tensor_list) + i` of the lists of all devices of
    all ranks.
    """
    _check("reduce_scatter_multigpu", output_tensor_list)
    number = len(output_tensor_list)
    size = _size(group) * number
    _check_lists("reduce_scatter_multigpu", "input", input_tensor_lists, number, size)
    places = [_reduced(tensors, op) for tensors in zip(*input_tensor_lists, strict=True)]
    parts = [torch.stack(places[i : i + number]) for i in range(0, size, number)]
    mine = torch.empty_like(parts[0])
    work = dist.reduce_scatter(mine, parts, op, group, async_op)

    def finish() -> None:
        for tensor, value in zip(output_tensor_list, mine, strict=True):
            tensor.copy_(value)

    return _ended(work, finish, group)


_TOGETHER: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.AVG: torch.add,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.BAND: torch.bitwise_and,
    dist.ReduceOp.BOR: torch.bitwise_or,
    dist.ReduceOp.BXOR: torch.bitwise_xor,
}


def _reduced(tensors: Sequence[Tensor], op: Any) -> Tensor:
    """Return the reduction of *tensors* as a new tensor on the device of the first."""
    kind = next((known for known in _TOGETHER if op == known), None)
    if kind is None:
        raise ValueError(
            f"{op}: collectives over several devices per rank support SUM, AVG, PRODUCT, MIN, MAX and bits"
        )
    total = tensors[0].detach().clone()
    for tensor in tensors[1:]:
        total = _TOGETHER[kind](total, tensor.detach().to(total.device))
    return total / len(tensors) if kind == dist.ReduceOp.AVG else total


def _check(name: str, tensors: Sequence[Tensor]) -> None:
    if isinstance(tensors, Tensor) or not len(tensors):
        got = "a tensor" if isinstance(tensors, Tensor) else "an empty list"
        raise ValueError(f"{name}: expected a list with a tensor for each device of this rank, got {got}")
    first = tensors[0]
    for i, tensor in enumerate(tensors[1:], 1):
        if (tensor.shape, tensor.dtype) != (first.shape, first.dtype):
            raise ValueError(
                f"{name}: expected tensors of one shape and dtype, got {tuple(first.shape)} {first.dtype} and at index "
                f"{i} {tuple(tensor.shape)} {tensor.dtype}"
            )


def _check_lists(name: str, role: str, lists: Sequence[Sequence[Tensor]], number: int, size: int) -> None:
    """Check that there are *number* lists, one for each device of this rank, with *size* tensors, one for each
    device of every rank.
    """
    length = next((len(tensors) for tensors in lists if len(tensors) != size), size)
    if length != size or len(lists) != number:
        raise ValueError(
            f"{name}: expected {number} {role} lists of {size} tensors (ranks times devices), "
            f"got {len(lists)} of {length}"
        )


def _size(group: Any) -> int:
    return max(int(dist.get_world_size(group)), 1)  # who is not in the group is told so by the call itself


def _ended(work: Any, finish: Callable[[], None], group: Any) -> Any:
    if work is not None:
        return MultiWork(work, finish)
    if dist.get_world_size(group) > 0:  # else: not in the group
        finish()
    return None
