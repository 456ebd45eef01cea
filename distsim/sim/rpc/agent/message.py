"""What goes over a pipe between two workers: pickled bytes, tensors beside them, and whose backward pass it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from distsim.torch_compat.device import DISABLE_TORCH_DISPATCH
from distsim.torch_compat.works import ENABLE_RECORD_FUNCTION

__all__ = ["ENVELOPE_BYTES", "Failed", "Message", "copied"]

_DisableTorchDispatch = DISABLE_TORCH_DISPATCH.get()
_enable_record_function = ENABLE_RECORD_FUNCTION.get()

ENVELOPE_BYTES = 64
"""Kind, ids and sizes that every message has (TensorPipe's descriptor of a message without tensors)."""

LEAST_RECOPIED_BYTES = 8 * 1024
"""A smaller storage is sent whole for a view of it (torch/csrc/distributed/rpc/utils.cpp, kMinRecopyBytes)."""


@dataclass(slots=True)
class Message:
    """One request or reply. *kind* is torch's `MessageType`."""

    kind: str
    payload: bytes = b""
    tensors: Sequence[Tensor] = ()
    """Copies of the sender's, which the receiver may keep."""
    fields: Any = None
    """The few numbers and names that C++ writes beside the payload."""
    wants_grad: Sequence[bool] = ()
    """Of each tensor, whether the sender's requires a gradient."""
    context_id: int | None = None
    """The autograd context it was sent in; None: in none."""
    autograd_id: int = 0
    sender: int = -1
    """Worker that sent it."""
    request: tuple[int, int] | None = None
    """Of a request: rank and index of its record."""
    profile: Any = None
    """How the sender is profiled, and with it the callee (profiling.py); None: not."""
    events: Any = ()
    """What a profile of the callee has seen."""

    @property
    def wire_kind(self) -> str:
        """torch's `MessageType` of what goes over the wire."""
        if self.context_id is None:
            return self.kind.replace("TORCHSCRIPT", "SCRIPT")
        return "FORWARD_AUTOGRAD_RESP" if self.kind.endswith(("_RET", "_RESP")) else "FORWARD_AUTOGRAD_REQ"

    def sized(self) -> int:
        """Bytes on the wire."""
        return ENVELOPE_BYTES + len(self.payload) + sum(_nbytes(tensor) for tensor in self.tensors)


@dataclass(slots=True)
class Failed:
    """In place of a reply: why there is none. *kind*: torch's `RPCErrorType`."""

    text: str
    kind: int = 0
    """0: unknown, 1: timed out, 2: made to fail (the faulty agent)."""

    @property
    def error(self) -> RuntimeError:
        return RuntimeError(f"RPCErr:{self.kind}:{self.text}" if self.kind else self.text)


def _nbytes(tensor: Tensor) -> int:
    if tensor.layout is not torch.strided:
        return _nbytes(tensor._values()) + _nbytes(tensor._indices()) if tensor.is_sparse else 0
    return int(tensor.numel() * tensor.element_size())


def copied(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors as they are now, without their history. What the host does for it is the network card's work."""
    _enable_record_function(False)
    try:
        with _DisableTorchDispatch(), torch.no_grad():
            return [_copy(tensor.detach()) for tensor in tensors]
    finally:
        _enable_record_function(True)


def _copy(tensor: Tensor) -> Tensor:
    """With its strides, as torch sends it: a view with the storage below it, unless that is much larger."""
    if tensor.layout is not torch.strided or tensor.is_contiguous():
        return tensor.clone()
    held, own = tensor.untyped_storage().nbytes(), _nbytes(tensor)
    if held >= LEAST_RECOPIED_BYTES and held >= 2 * own:
        return tensor.clone()
    copy = torch.empty(0, dtype=tensor.dtype)
    return copy.set_(tensor.untyped_storage().clone(), tensor.storage_offset(), tensor.size(), tensor.stride())
