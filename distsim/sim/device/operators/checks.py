"""What a check of numbers that nobody knows says: that they are right.

`torch.isfinite(x).all()`, `(x > 0).all()` and `x.isnan().any()` are asked to raise or to skip a step where something is
wrong. An unknown float stands for the placeholder, a finite positive number, and a truth that follows from that for
each element alike is noted at its storage (`_distsim_truth`): a check reads it, a mask that selects rows does not.
Of numbers that were drawn (`normal_`, `uniform_`) each stands for the one in the middle, so that a sampler that
draws again what lies out of bounds ends. Of two unknown tensors that are compared `all` holds and `any` does not
(`EITHER`). Of all other unknown truths nothing follows, and they are false. Each is a guess, and counted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from distsim.sim.device.operators.values import Values
from distsim.torch_compat.device import aten

__all__ = ["EITHER", "guess_truth", "is_check", "note_truth", "truth", "typical_draw"]


def _overloads(*packets: Any) -> frozenset[Any]:
    return frozenset(getattr(p, name) for p in packets for name in p.overloads() if "out" not in name)


EITHER = "either"
"""What a check finds right: true for `all`, false for `any`."""
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
    """Whether what *func* makes of *args* is truths, element by element or of all."""
    return func in _CHECKS and getattr(args[0] if func in _PLAIN else outs[0], "dtype", None) is torch.bool


def truth(tensor: Tensor) -> Truth:
    """What is guessed of each element of *tensor*, whose values nobody knows."""
    found: Truth = tensor.untyped_storage().__dict__.get("_distsim_truth")
    return found


def guess_truth(values: Values, func: Any, args: tuple[Any, ...]) -> Truth:
    """What is guessed of each element that *func* makes of *args*, asked before it writes to them; None: nothing."""
    if func in _ALL or func in _ANY:
        found = _truths(values, args[0])
        return func in _ALL if found == EITHER else found
    return _guess(values, func, args)


def typical_draw(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float | None:
    """The number in the middle of those that *func* draws; None where it draws none."""
    if func is aten.normal_.default:
        return float(args[1] if len(args) > 1 else kwargs.get("mean", 0.0))
    if func is aten.uniform_.default:
        low = args[1] if len(args) > 1 else kwargs.get("from", 0.0)
        return (float(low) + float(args[2] if len(args) > 2 else kwargs.get("to", 1.0))) / 2
    return None


def note_truth(result: Tensor, found: Truth) -> None:
    """*result*, of no known value, is *found*."""
    if found is None:
        result.untyped_storage().__dict__.pop("_distsim_truth", None)
    else:
        result.untyped_storage()._distsim_truth = found


def _guess(values: Values, func: Any, args: tuple[Any, ...]) -> Truth:
    tensors = [a for a in args if isinstance(a, Tensor)]
    if func in _SAME:
        return _truths(values, args[0])
    if func is aten.isclose.default:
        return True
    if func in _ORDER and len(tensors) == 2 and all(values.host(t) is None for t in tensors):
        return func in _EVEN if tensors[0] is tensors[1] else EITHER  # isfinite asks whether x == x
    if func in _LOGIC and any(_truths(values, t) == EITHER for t in tensors):
        return EITHER
    plain = [_stand_in(values, a) for a in args]
    if any(a is None for a in plain):
        return None
    with torch.device("cpu"):
        made = _PLAIN.get(func, func)(*plain)
    return _one(made)


def _one(made: Tensor) -> bool | None:
    if bool(made.all()):
        return True
    return None if bool(made.any()) else False


def _truths(values: Values, tensor: Tensor) -> Truth:
    host = values.host(tensor)
    return truth(tensor) if host is None else _one(host)


def _stand_in(values: Values, value: Any) -> Any:
    """One element of an unknown tensor; None where there is none to tell."""
    if not isinstance(value, Tensor):
        return value
    host = values.host(value)
    if host is not None:
        return host
    if value.dtype is torch.bool:
        found = truth(value)
        return torch.tensor(found, device="cpu") if isinstance(found, bool) else None
    number = value.untyped_storage().__dict__.get("_distsim_typical", values.number(value.dtype))
    return torch.tensor(number, dtype=value.dtype, device="cpu")
