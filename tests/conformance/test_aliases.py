"""Tensors that share memory, within a list or between input and output, and tensors that are not contiguous."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conformance.arms import Conform
from conformance.plain import mine
from sim.running import ranks
from torch import Tensor

from distsim.errors import NotSimulated

ONES = torch.ones(8)


def forms(rank: int) -> dict[str, Callable[[], Tensor]]:
    """Tensors whose memory is not what they show."""
    return {
        "strided": lambda: mine(rank, 12)[::2],
        "transposed": lambda: mine(rank, 2, 3).t(),
        "channels last": lambda: mine(rank, 24).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last),
        "part": lambda: mine(rank, 8)[2:],
        "no dimension": lambda: torch.tensor(1.0 + rank),
        "empty": lambda: torch.empty(0),
    }


def one_tensor(rank: int, world_size: int) -> dict[str, Any]:
    """all_reduce, broadcast, reduce, scatter and the gathers on each form: gloo goes by the memory."""
    found: dict[str, Any] = {}
    for name, make in forms(rank).items():
        tensors = [make() for _ in range(6)]
        dist.all_reduce(tensors[0])
        dist.broadcast(tensors[1], 1)
        dist.reduce(tensors[2], 0)
        if rank:
            tensors[2] = torch.zeros(1)  # undefined elsewhere
        parts = [make().clone(memory_format=torch.contiguous_format) + 100 * k for k in range(world_size)]
        dist.scatter(tensors[3], parts if rank == 0 else None, 0)
        dist.all_gather(parts, tensors[4])
        outputs = [make() for _ in range(world_size)]
        dist.all_gather(outputs, mine(rank, *outputs[0].shape) if outputs[0].dim() else torch.tensor(float(rank)))
        found[name] = [*tensors, *parts, *outputs]
        whole = torch.zeros_like(make())
        dist.scatter(whole, [make() for _ in range(world_size)] if rank == 0 else None, 0)
        found[f"{name} scattered"] = whole
    return found


def listed_twice(rank: int, world_size: int) -> dict[str, Any]:
    """One tensor, or tensors that overlap, in the lists of the coalesced operations."""
    found: dict[str, Any] = {}
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MAX):
        t = mine(rank, 4)
        dist.all_reduce_coalesced([t, t], op=op)
        found[f"same, {op}"] = t
    t = mine(rank, 4)
    dist.all_reduce_coalesced([t[:3], t[1:]])
    found["overlapping"] = t
    t = mine(rank, 6)
    dist.all_reduce_coalesced([t.view(2, 3), mine(rank, 2), t.view(3, 2)])
    found["views"] = t
    shared = torch.zeros(3)
    dist.all_gather_coalesced([[shared, shared] for _ in range(world_size)], [mine(rank, 3), mine(rank, 3) * 2])
    found["gathered into one"] = shared
    own = mine(rank, 3)
    others = [torch.zeros(3) for _ in range(world_size - 1)]
    dist.all_gather_coalesced([[t] for t in (*others, own)], [own])
    found["gathered into its input"] = [own, *others]
    return found


def input_is_output(rank: int, world_size: int) -> dict[str, Any]:
    """Gathers and scatters in place, and where a rank's input is another's place among the outputs."""
    found: dict[str, Any] = {}
    for place in range(world_size):
        own, outputs = mine(rank, 4), [torch.zeros(4) for _ in range(world_size)]
        outputs[place] = own
        dist.all_gather(outputs, own)
        found[f"all_gather {place}"] = outputs
        own, outputs = mine(rank, 4), [torch.zeros(4) for _ in range(world_size)]
        outputs[place] = own
        dist.gather(own, outputs if rank == 0 else None, 0)
        found[f"gather {place}"] = outputs if rank == 0 else own
    parts = [mine(rank, 4) + 100 * k for k in range(world_size)]
    dist.reduce_scatter(parts[rank], parts)
    found["reduce_scatter"] = parts
    table = mine(rank, 4 * world_size)
    dist.all_gather(list(table.chunk(world_size)), table[4 * rank : 4 * rank + 4])
    found["all_gather views"] = table
    table = mine(rank, 4 * world_size)
    dist.all_gather_into_tensor(table, table[2:6])
    found["into overlapping"] = table
    table = mine(rank, 4 * world_size)
    dist.reduce_scatter_tensor(table[4 * rank : 4 * rank + 4], table)
    found["reduce_scatter_tensor"] = table
    parts = [mine(rank, 3) + 100 * k for k in range(world_size)]
    dist.all_to_all(parts, parts)
    found["all_to_all"] = parts
    one = torch.zeros(4)
    dist.all_gather([one] * world_size, mine(rank, 4))
    found["one output"] = one
    out = torch.zeros(16)[::2]
    dist.all_to_all_single(out, mine(rank, 8))
    found["all_to_all_single strided"] = out
    return found


@pytest.mark.parametrize("body", [one_tensor, listed_twice, input_is_output])
def test_shared_memory(conform: Conform, body: Callable[[int, int], Any]) -> None:
    """The same numbers on both arms."""
    conform(body)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: dist.all_reduce(torch.ones(1).expand(6)), "all_reduce on a tensor of shape (6,) and strides (0,)"),
        (lambda: dist.broadcast(torch.ones(4).as_strided((3, 2), (1, 1)), 0), "broadcast on a tensor of shape (3, 2)"),
        (lambda: dist.reduce((torch.ones(4) + 1j).conj(), 0), "reduce into a conjugate or negated view"),
        (lambda: dist.all_reduce((torch.ones(4) + 1j).conj().imag), "all_reduce into a conjugate or negated view"),
        (
            lambda: dist.reduce_scatter(ONES[:2], [ONES[:2], ONES[:2]]),
            "reduce_scatter with an output that overlaps its input",
        ),
        (
            lambda: dist.reduce_scatter(torch.ones(2, 3).t(), [torch.ones(3, 2)] * 2),
            "reduce_scatter with tensors that are not contiguous",
        ),
        (lambda: dist.all_to_all_single(ONES, ONES), "all_to_all_single into the memory it sends from"),
    ],
)
def test_what_gloo_leaves_undefined(call: Callable[[], None], words: str) -> None:
    """It is refused by name, with the remedy, on every rank."""

    def body() -> str:
        dist.init_process_group("gloo")
        with pytest.raises(NotSimulated) as refused:
            call()
        return str(refused.value)

    assert all(words in text for text in ranks(body).results)
