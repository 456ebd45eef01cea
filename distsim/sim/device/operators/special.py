"""Operators that running on meta tensors does not describe: their handlers and checks."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from distsim.kernels import Cost
from distsim.sim.device.operators import values
from distsim.sim.device.operators.plan import NewTensor
from distsim.sim.device.operators.values import Values
from distsim.sim.isolation.process import current_task
from distsim.torch_compat.device import aten

if TYPE_CHECKING:
    from types import TracebackType

    from distsim.sim.device.operators.reading import Reading
    from distsim.sim.isolation.process import RankTask


class Mode(Protocol):
    """dispatch.ComputeMode: within it, operators are dispatched again."""

    def __enter__(self) -> Any: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> Any: ...

    @property
    def task(self) -> RankTask: ...

    @property
    def values(self) -> Values: ...

    def under_meta(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...

    def indexed(self, device: torch.device) -> torch.device: ...

    def cost_of(self, device: torch.device) -> Callable[..., Cost]: ...

    def carry(self, size: Any, stride: Any, dtype: torch.dtype, device: torch.device) -> Tensor: ...

    def make(self, out: NewTensor, device: torch.device) -> Tensor: ...

    def launch(self, device: torch.device, cost: Cost, name: Any) -> None: ...

    def launch_plain(self, device: torch.device, nbytes: int) -> None: ...

    def copy_time(self, tensor: Tensor, to_host: bool, blocking: bool) -> None: ...

    def synchronize(self, tensor: Tensor) -> None: ...

    def where(self) -> Reading: ...


Handler = Callable[[Mode, Any, tuple[Any, ...], dict[str, Any]], Any]
"""Function (mode, operator, arguments) that returns the operator's result, or NotImplemented to treat it like any
other.
"""


# -- Operators with a rule of their own on a simulated GPU.

_CUDA = 1
"""c10::DeviceType::CUDA."""


def _unscale(mode: Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Unscale GradScaler's gradients. Unknown gradients are finite, so `found_inf` keeps its value; known ones are
    checked.
    """
    gradients, found_inf, inverse_scale = args
    scale = mode.values.host(inverse_scale)
    found_inf_value = mode.values.host(found_inf)
    for gradient in gradients:
        known = mode.values.host(gradient)
        if (
            known is not None
            and scale is not None
            and found_inf_value is not None
            and not mode.values.guessed(gradient)
        ):
            func([known], found_inf_value, scale)
    mode.launch_plain(found_inf.device, 2 * sum(t.numel() * t.element_size() for t in gradients))


def _batch_norm_stats(mode: Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return SyncBatchNorm's (mean, inverse deviation) of each channel, in float32 for half precision."""
    x: Tensor = args[0]
    return tuple(_channels(mode, x, 2, _wide(x.dtype)))


def _batch_norm_gather(mode: Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, mean = args[0], args[1]
    for running in args[3:5]:
        if isinstance(running, Tensor) and not mode.values.everything:
            mode.values.write(running, None)
    return tuple(_channels(mode, x, 2, mean.dtype))


def _batch_norm_elemt(mode: Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x: Tensor = args[0]
    result = mode.carry(tuple(x.shape), x.stride(), x.dtype, x.device)
    mode.launch_plain(x.device, 2 * x.numel() * x.element_size())
    return result


def _batch_norm_backward_reduce(mode: Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = args[1]
    return tuple(_channels(mode, x, 4, _wide(x.dtype)))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _channels(mode: Mode, x: Tensor, count: int, dtype: torch.dtype) -> list[Tensor]:
    results = [mode.carry((x.shape[1],), (1,), dtype, x.device) for _ in range(count)]
    mode.launch_plain(x.device, x.numel() * x.element_size())
    return results


def _record_stream(mode: Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Implement Tensor.record_stream: the memory is not free before that stream has reached this point."""
    held = args[0].untyped_storage().__dict__.get("_distsim_held")
    stream = args[1]
    if held is not None and stream.device_type == _CUDA:
        held.streams = [*(held.streams or ()), held.device.streams[stream.stream_id]]


def _gru_cell(mode: Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Implement aten._thnn_fused_gru_cell: return (state, workspace of five gates)."""
    state: Tensor = args[2]
    rows, width = state.shape
    result = mode.carry((rows, width), (width, 1), state.dtype, state.device)
    workspace = mode.carry((rows, 5 * width), (5 * width, 1), state.dtype, state.device)
    mode.launch_plain(state.device, 13 * state.numel() * state.element_size())
    return result, workspace


def _gru_cell_backward(mode: Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    gradient, has_bias = args[0], args[2]
    rows, width = gradient.shape

    def make(count: int) -> Tensor:
        return mode.carry((rows, count * width), (count * width, 1), gradient.dtype, gradient.device)

    gates, hidden, state = make(3), make(3), make(1)
    mode.launch_plain(gradient.device, 13 * gradient.numel() * gradient.element_size())
    if not has_bias:
        return gates, hidden, state, None, None
    biases = [mode.carry((3 * width,), (1,), gradient.dtype, gradient.device) for _ in range(2)]
    return gates, hidden, state, *biases


def _drawn(mode: Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Draw one value per element, for draws without a meta kernel in torch, and their derivatives."""
    x: Tensor = args[0]
    hosts = [mode.values.host(value) if isinstance(value, Tensor) else value for value in args]
    result = mode.carry(tuple(x.shape), x.stride(), x.dtype, x.device)
    mode.launch_plain(x.device, 2 * x.numel() * x.element_size())
    if not any(host is None and value is not None for host, value in zip(hosts, args, strict=True)):
        if mode.values.keeps(x.numel(), x.dtype):
            mode.values.know(result, func(*hosts))
    return result


def _with_values(handler: Handler, formula: Callable[..., list[Tensor | None]]) -> Handler:
    """Return *handler*, extended to compute the values of its results by *formula* if all values are known."""

    def call(mode: Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not mode.values.everything:  # few values that are known are not followed through these
            return handler(mode, func, args, kwargs)
        hosts = [mode.values.host(value) if isinstance(value, Tensor) else value for value in args]
        results = handler(mode, func, args, kwargs)
        parts = results if isinstance(results, tuple) else (results,)
        for part, value in zip(parts, formula(*hosts), strict=True):
            if isinstance(part, Tensor) and value is not None:
                mode.values.know(part, value.to(part.dtype, copy=True))
        return results

    return call


SPECIAL: dict[Any, Handler] = {
    aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
    aten.batch_norm_stats.default: _with_values(_batch_norm_stats, values.batch_norm_stats),
    aten.batch_norm_gather_stats_with_counts.default: _with_values(_batch_norm_gather, values.batch_norm_gather),
    aten.batch_norm_elemt.default: _with_values(_batch_norm_elemt, values.batch_norm_elemt),
    aten.batch_norm_backward_reduce.default: _with_values(
        _batch_norm_backward_reduce, values.batch_norm_backward_reduce
    ),
    aten.batch_norm_backward_elemt.default: _with_values(
        lambda mode, func, args, kwargs: _batch_norm_elemt(mode, func, (args[1],), {}),
        values.batch_norm_backward_elemt,
    ),
    aten.record_stream.default: _record_stream,
    aten._sample_dirichlet.default: _drawn,
    aten._dirichlet_grad.default: _drawn,
    aten._thnn_fused_gru_cell.default: _with_values(_gru_cell, values.gru_cell),
    aten._thnn_fused_gru_cell_backward.default: _with_values(_gru_cell_backward, values.gru_cell_backward),
}


# -- Random numbers of the host that several ranks draw alike are drawn once.
#
# Ranks that begin with one seed initialise the same weights: each makes them for itself, and on this machine one after
# the other. What an operator draws is decided by the generator's state, its shape, its dtype and its arguments; a rank
# that draws the same gets a copy, and its generator goes on from where the first one's went on.

FEWEST = 1 << 16
"""Elements below which a copy is hardly quicker."""
MOST_BYTES = 2 << 30
"""Maximum bytes of random numbers that are kept in one run."""
_state, _set_state = torch.default_generator.get_state, torch.default_generator.set_state
_copy = torch.ops.aten.copy_.default
_aten = torch.ops.aten
_IN_PLACE = frozenset(
    {_aten.uniform_.default, _aten.normal_.default, _aten.random_.default, _aten.random_.to,
     getattr(_aten.random_, "from"), _aten.bernoulli_.float, _aten.exponential_.default, _aten.log_normal_.default}
)  # fmt: skip


class RandomFills:
    """Random fills of the ranks of one run, kept until each of *num_ranks* can have used them."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._known: dict[Any, tuple[Tensor, Tensor]] = {}
        """Random numbers and the generator's state after them, by what determines them."""
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
    """Return *draw*, which runs the random operator *func*, changed to use the world's `RandomFills` where possible."""
    return partial(_drawn_in_place, func, draw) if func in _IN_PLACE else draw


def _drawn_in_place(func: Any, draw: Callable[..., Any], target: Tensor, *args: Any, **kwargs: Any) -> Any:
    task = current_task()
    fills = None if task is None else task.port.shared.random_fills
    is_plain = target.is_cpu and target.numel() >= FEWEST and target.is_contiguous()
    if fills is None or not is_plain or kwargs.get("generator") is not None:
        return draw(target, *args, **kwargs)
    fills.fill(draw, func, target, args, kwargs)
    return target


# -- What a check of numbers that nobody knows says: that they are right.
#
# `torch.isfinite(x).all()`, `(x > 0).all()` and `x.isnan().any()` are asked to raise or to skip a step where something
# is wrong. An unknown float stands for the placeholder, a finite positive number, and a truth that follows from that
# for each element alike is noted at its storage (`_distsim_truth`): a check reads it, a mask that selects rows does
# not. Of numbers that were drawn (`normal_`, `uniform_`) each stands for the one in the middle, so that a sampler that
# draws again what lies out of bounds ends. Of two unknown tensors that are compared `all` holds and `any` does not
# (`EITHER`). Of all other unknown truths nothing follows, and they are false. Each is a guess, and counted. A truth of
# every finite number (`x.abs() < inf`, `~x.isnan()`) is no matter of the placeholder: a mask of it selects all rows.


def _overloads(*packets: Any) -> frozenset[Any]:
    return frozenset(getattr(p, name) for p in packets for name in p.overloads() if "out" not in name)


EITHER = "either"
"""Unknown truth that passes every check: true for `all`, false for `any`."""
ALWAYS, NEVER = "always", "never"
"""Truths of every finite number."""
Truth = bool | str | None
_ALL = _overloads(aten.all)
_ANY = _overloads(aten.any, aten._is_any_true)
_PLAIN = {
    getattr(inplace, name): getattr(plain, name)
    for inplace, plain in (
        (aten.logical_not_, aten.logical_not), (aten.logical_and_, aten.logical_and),
        (aten.logical_or_, aten.logical_or), (aten.bitwise_not_, aten.bitwise_not),
        (aten.bitwise_and_, aten.bitwise_and), (aten.bitwise_or_, aten.bitwise_or),
    )
    for name in inplace.overloads()
}  # fmt: skip
_LOGIC = frozenset(_PLAIN) | _overloads(
    aten.logical_not, aten.logical_and, aten.logical_or, aten.logical_xor, aten.bitwise_not, aten.bitwise_and,
    aten.bitwise_or, aten.bitwise_xor, aten.mul,
)  # fmt: skip
_ORDER = _overloads(aten.lt, aten.le, aten.gt, aten.ge, aten.eq, aten.ne)
_EVEN = _overloads(aten.le, aten.ge, aten.eq)
_CLASS = _overloads(aten.isfinite, aten.isnan, aten.isinf, aten.isposinf, aten.isneginf)
_SAME = frozenset({aten.clone.default, aten._to_copy.default})
_CHECKS = _ALL | _ANY | _LOGIC | _ORDER | _CLASS | _SAME | _overloads(aten.isclose)


def is_check(func: Any, args: tuple[Any, ...], outs: list[Any]) -> bool:
    """Return whether *func* computes booleans from *args*, for each element or for all."""
    return func in _CHECKS and getattr(args[0] if func in _PLAIN else outs[0], "dtype", None) is torch.bool


def truth(tensor: Tensor) -> Truth:
    """Return a guess for each element of *tensor*, whose values are unknown."""
    known_truth: Truth = tensor.untyped_storage().__dict__.get("_distsim_truth")
    return known_truth


def guess_truth(values: Values, func: Any, args: tuple[Any, ...]) -> Truth:
    """Return a guess for each element of the result of *func*, made before it writes to *args*; None without a
    guess."""
    if func in _ALL or func in _ANY:
        known_truth = _truths(values, args[0])
        return func in _ALL if known_truth == EITHER else _plain_truth(known_truth)
    return _guess(values, func, args)


def typical_draw(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float | None:
    """Return the median of the distribution from which *func* draws; None if it draws nothing."""
    if func is aten.normal_.default:
        return float(args[1] if len(args) > 1 else kwargs.get("mean", 0.0))
    if func is aten.uniform_.default:
        low = args[1] if len(args) > 1 else kwargs.get("from", 0.0)
        return (float(low) + float(args[2] if len(args) > 2 else kwargs.get("to", 1.0))) / 2
    return None


def note_truth(result: Tensor, known_truth: Truth) -> None:
    """Note that *result*, whose value is unknown, has the truth value *known_truth*."""
    if known_truth is None:
        result.untyped_storage().__dict__.pop("_distsim_truth", None)
    else:
        result.untyped_storage()._distsim_truth = known_truth


def _guess(values: Values, func: Any, args: tuple[Any, ...]) -> Truth:
    tensors = [a for a in args if isinstance(a, Tensor)]
    if func in _SAME:
        return _truths(values, args[0])
    if func is aten.isclose.default:
        return True
    if func in _ORDER and len(tensors) == 2 and all(values.host(t) is None for t in tensors):
        if tensors[0] is not tensors[1]:
            return EITHER
        return ALWAYS if func in _EVEN else NEVER  # isfinite asks whether x == x
    if func in _LOGIC and any(_truths(values, t) == EITHER for t in tensors):
        return EITHER
    plain = [_stand_in(values, a) for a in args]
    if any(a is None for a in plain):
        return None
    with torch.device("cpu"):
        guessed = _one(_PLAIN.get(func, func)(*plain))
    if guessed is None or not _is_of_finite_numbers(values, func, args, tensors):
        return guessed
    return ALWAYS if guessed else NEVER


def _is_of_finite_numbers(values: Values, func: Any, args: tuple[Any, ...], tensors: list[Tensor]) -> bool:
    """Return whether the truth that *func* computes is that of every finite number, not of the placeholder alone."""
    if func in _LOGIC:
        return all(values.host(t) is None and truth(t) in (ALWAYS, NEVER) for t in tensors)
    is_infinite = func in _ORDER and isinstance(args[1], float) and math.isinf(args[1])
    return (func in _CLASS or is_infinite) and values.host(tensors[0]) is None


def _plain_truth(known_truth: Truth) -> Truth:
    return known_truth == ALWAYS if known_truth in (ALWAYS, NEVER) else known_truth


def _one(tensor: Tensor) -> bool | None:
    if bool(tensor.all()):
        return True
    return None if bool(tensor.any()) else False


def _truths(values: Values, tensor: Tensor) -> Truth:
    host = values.host(tensor)
    return truth(tensor) if host is None else _one(host)


def _stand_in(values: Values, value: Any) -> Any:
    """Return one element that represents an unknown tensor; None if there is none."""
    if not isinstance(value, Tensor):
        return value
    host = values.host(value)
    if host is not None:
        return host
    if value.dtype is torch.bool:
        known_truth = _plain_truth(truth(value))
        return torch.tensor(known_truth, device="cpu") if isinstance(known_truth, bool) else None
    number = value.untyped_storage().__dict__.get("_distsim_typical", values.number(value.dtype))
    return torch.tensor(number, dtype=value.dtype, device="cpu")
