"""Tensors on a simulated GPU: shape, strides, dtype, device and storage are true, and there is no data.

`torch.Tensor._make_wrapper_subclass` makes a tensor without data, of a class of ours; assigning it to `.data` of a
plain tensor gives that one its device, its storage and all else (`Variable::set_data` shares the storage and keeps
the class). Nothing that a program can ask then tells it from a tensor on a GPU, except for its data pointer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from distsim.torch_compat.device import (
    DISABLE_TORCH_DISPATCH,
    HAS_COMPATIBLE_SHALLOW_COPY_TYPE,
    MAKE_WRAPPER_SUBCLASS,
    PRESERVE_DISPATCH_KEY_GUARD,
    SET_META_IN_TLS_DISPATCH_INCLUDE,
)

__all__ = ["carrier", "under_meta"]

_DisableTorchDispatch = DISABLE_TORCH_DISPATCH.get()
_PreserveDispatchKeyGuard = PRESERVE_DISPATCH_KEY_GUARD.get()
_set_meta_in_tls_dispatch_include = SET_META_IN_TLS_DISPATCH_INCLUDE.get()


class _Bare(Tensor):
    """What a carrier is made from; seen by nobody."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _COMPATIBLE:
            return True  # set_data asks whether the two are of one kind
        raise AssertionError(f"{func} reached a bare carrier")


_COMPATIBLE = HAS_COMPATIBLE_SHALLOW_COPY_TYPE.get()
_make = MAKE_WRAPPER_SUBCLASS.get()
_empty = torch.empty
_HOST = torch.device("cpu")
"""Said wherever we make a tensor of our own: the program may have chosen another default (torch.set_default_device)."""


def carrier(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor on *device* with a storage of its own that holds no data. No dispatch mode may be active."""
    made = _empty(0, device=_HOST)
    made.data = _make(_Bare, size, stride, dtype=dtype, device=device)
    return made


def under_meta(func: Any, args: Any, kwargs: Any) -> Any:
    """Call *func*, an operator that makes a view or changes what a tensor looks like, by its meta kernel: it shares
    storages and computes nothing."""
    with _DisableTorchDispatch(), _PreserveDispatchKeyGuard():
        _set_meta_in_tls_dispatch_include(True)
        return func(*args, **kwargs)
