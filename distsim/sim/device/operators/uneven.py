"""Draws choices of experts and lengths of sequences that are unknown.

The indices of an unknown `topk`, `argmax` or `max` are drawn by `--routing`, alike on all ranks and each time, so that
recomputed layers and tensor-parallel ranks agree. What the program computes from them (counts, orders, masks,
capacities, splits) is computed from the drawn values. With `--lengths`, an unknown mask of a batch of token ids
(`tokens != pad`) is true for the first tokens of each row; ranks whose generators began with one seed draw alike.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from distsim.text.distributions import RouterChoice, Routing
from distsim.torch_compat.device import aten

if TYPE_CHECKING:
    from distsim.sim.device.operators.values import Values

MOST_EXPERTS = 1_024
"""Largest number of experts of a router: an unknown choice among more (a vocabulary, tokens) stays unknown."""
_CHOICES = {aten.topk.default: 1, aten.max.dim: 1, aten.argmax.default: None}
"""Operators that choose, with the place of the indices in their result."""
_PRESENT = frozenset({aten.ne.Scalar, aten.gt.Scalar, aten.ge.Scalar})
_ABSENT = frozenset({aten.eq.Scalar, aten.le.Scalar, aten.lt.Scalar})
DRAWS = frozenset({*_CHOICES, *_PRESENT, *_ABSENT, aten.sum.dim_IntList, aten.histc.default})
"""Operators of whose unknown results some are drawn."""


def draw(values: Values, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
    """Set the values of *result* if *func*, one of `DRAWS`, chooses or counts by values that are unknown."""
    x: Tensor = args[0]
    if values.host(x) is not None or not x.dim():
        return
    if func in _CHOICES:
        position = _CHOICES[func]
        _choose(values, x, result if position is None else result[position], args, kwargs, func is aten.topk.default)
    elif func is aten.histc.default:
        bins = args[1] if len(args) > 1 else kwargs.get("bins", 100)
        if not x.dtype.is_floating_point and bins <= MOST_EXPERTS:
            values.know(
                result, counted(values.routing, RouterChoice(x.numel(), bins, 1)).to(result.dtype), values.routed
            )
    elif func is aten.sum.dim_IntList:
        choice = values.choices.get(x.shape[-1])
        is_of_rows = not x.dtype.is_floating_point and result.numel() == x.shape[-1] == result.shape[-1]
        if choice is not None and is_of_rows and values.host(result) is None:
            values.know(result, counted(values.routing, choice).to(result.dtype).reshape(result.shape), values.routed)
    elif values.lengths is not None and x.dim() == 2 and not x.is_floating_point() and values.host(result) is None:
        mask = _mask(values, x)
        values.know(result, mask if func in _PRESENT else ~mask, values.cut)


def _choose(values: Values, x: Tensor, indices: Tensor, args: Any, kwargs: Any, is_topk: bool) -> None:
    """Set the values of *indices*, with which the rows of *x* choose along its last dimension."""
    position = 2 if is_topk else 1
    dim = args[position] if len(args) > position else kwargs.get("dim", -1 if is_topk else None)
    is_largest = not is_topk or (args[3] if len(args) > 3 else kwargs.get("largest", True))
    bins = x.shape[-1]
    if dim not in (-1, x.dim() - 1) or not is_largest or not 1 < bins <= MOST_EXPERTS or not indices.numel():
        return
    top_k = indices.shape[-1] if is_topk else 1
    choice = values.choices[bins] = RouterChoice(x.numel() // bins, bins, top_k)
    if values.keeps(indices.numel(), indices.dtype):
        values.know(indices, _chosen(values.routing, choice).reshape(indices.shape).clone(), values.routed)


def counted(routing: Routing, choice: RouterChoice) -> Tensor:
    """Return how many rows choose each bin, [bins]."""
    if routing.is_even:
        return torch.bincount(_chosen(routing, choice).reshape(-1), minlength=choice.bins)
    return torch.tensor(routing.counts(*choice), dtype=torch.int64, device="cpu")


def chosen_mask(values: Values, mask: Tensor) -> Tensor | None:
    """Return which bins each row chose, as *mask* has it, which is unknown; None if it is no mask [rows, bins] or
    [bins, rows] of a router, and no row or column of one.
    """
    for choice in values.choices.values():
        sides = (choice.rows, choice.bins)
        is_whole, is_part = tuple(mask.shape) in (sides, sides[::-1]), tuple(mask.shape) == sides[:1]
        if (is_whole or is_part) and mask.untyped_storage().nbytes() == choice.rows * choice.bins:
            drawn = torch.zeros(choice.rows, choice.bins, dtype=torch.bool, device="cpu")
            drawn.scatter_(1, _chosen(values.routing, choice), True)
            if mask.is_contiguous() and mask.shape[-1] == choice.rows:
                drawn = drawn.t().contiguous()
            return drawn.as_strided(mask.shape, mask.stride(), mask.storage_offset()).contiguous()
    return None


@lru_cache(maxsize=64)
def _chosen(routing: Routing, choice: RouterChoice) -> Tensor:
    """Return what each row chooses, [rows, top_k], different in each row.

    Bins in order, each as often as it is chosen, are dealt out to the rows in turn: as no bin is chosen more often than
    there are rows, no row gets one twice. The rows are mixed, so that parts of a batch are alike.
    """
    rows, bins, top_k = choice
    if routing.is_even:
        return torch.arange(rows * top_k, device="cpu").remainder_(bins).view(rows, top_k)
    dealt = torch.repeat_interleave(torch.arange(bins, device="cpu"), counted(routing, choice))
    step = next(n for n in range(max(1, round(0.618 * rows)), rows + 2) if math.gcd(n, rows) == 1)
    mixed = torch.arange(rows, device="cpu").mul_(step).remainder_(rows)
    return dealt.view(top_k, rows).t()[mixed].contiguous()


def _mask(values: Values, tokens: Tensor) -> Tensor:
    """Return which of *tokens* [rows, longest] belong to a sequence; the same for each question about one batch."""
    space = tokens.untyped_storage().__dict__
    drawn: Tensor | None = space.get("_distsim_lengths")
    rows, longest = tokens.shape
    if drawn is None or drawn.numel() != rows:
        assert values.lengths is not None
        values.batches += 1
        lengths = values.lengths.draw(rows, longest, (values.seed, torch.initial_seed(), values.batches))
        drawn = space["_distsim_lengths"] = torch.tensor(lengths, device="cpu")
    return torch.arange(longest, device="cpu") < drawn.unsqueeze(1)
