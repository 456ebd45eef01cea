"""Random numbers of the host that several ranks draw alike are drawn once.

Ranks that begin with one seed initialise the same weights: each makes them for itself, and on this machine one after
the other. What an operator draws is decided by the generator's state, its shape, its dtype and its arguments; a rank
that draws the same gets a copy, and its generator goes on from where the first one's went on.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from distsim.sim.isolation.process import current_task

__all__ = ["RandomFills", "drawn_once"]

FEWEST = 1 << 16
"""Elements below which a copy is hardly quicker."""
MOST_BYTES = 2 << 30
"""Of all that is kept in one run."""
_state, _set_state = torch.default_generator.get_state, torch.default_generator.set_state
_copy = torch.ops.aten.copy_.default
aten = torch.ops.aten
_IN_PLACE = frozenset(
    {aten.uniform_.default, aten.normal_.default, aten.random_.default, aten.random_.to, getattr(aten.random_, "from"),
     aten.bernoulli_.float, aten.exponential_.default, aten.log_normal_.default}
)  # fmt: skip


class RandomFills:
    """What the ranks of one run have drawn so far, until each of *num_ranks* can have had it."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._known: dict[Any, tuple[Tensor, Tensor]] = {}
        """By what decides it: the numbers, and the generator's state behind them."""
        self._left: dict[Any, int] = {}
        self._nbytes = 0

    def fill(self, draw: Callable[..., Any], func: Any, target: Tensor, args: Any, kwargs: Any) -> None:
        """Do to *target* what `draw(target, *args, **kwargs)` does."""
        key = (func, tuple(target.shape), target.dtype, args, tuple(kwargs.items()), bytes(_state().numpy()))
        known = self._known.get(key)
        if known is None:
            draw(target, *args, **kwargs)
            if self._nbytes + target.nbytes <= MOST_BYTES and self._num_ranks > 1:
                self._known[key] = target.detach().clone(), _state()
                self._left[key] = self._num_ranks - 1
                self._nbytes += target.nbytes
            return
        _copy(target, known[0])
        _set_state(known[1])
        self._left[key] -= 1
        if not self._left[key]:
            del self._known[key], self._left[key]
            self._nbytes -= target.nbytes


def drawn_once(func: Any, draw: Callable[..., Any]) -> Callable[..., Any]:
    """*draw*, which runs the operator *func*, or the same with the help of the world's `RandomFills`."""
    return partial(_drawn, func, draw) if func in _IN_PLACE else draw


def _drawn(func: Any, draw: Callable[..., Any], target: Tensor, *args: Any, **kwargs: Any) -> Any:
    task = current_task()
    fills = None if task is None else task.world.random_fills
    is_plain = target.is_cpu and target.numel() >= FEWEST and target.is_contiguous()
    if fills is None or not is_plain or kwargs.get("generator") is not None:
        return draw(target, *args, **kwargs)
    fills.fill(draw, func, target, args, kwargs)
    return target
