"""What guards of a simulated run look for in tensors, and what is damaged on the way."""

from __future__ import annotations

import zlib

import torch

from distsim.sim.fault_rules import Corrupt

__all__ = ["GUARDS", "checksum", "flip", "holds_nan"]

GUARDS = ("nan", "buffers", "payloads")
"""nan: NaN in what goes into a call. buffers: written to while a call has them. payloads:
what arrives against what was sent."""


def checksum(tensor: torch.Tensor) -> int:
    return zlib.crc32(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def holds_nan(tensor: torch.Tensor) -> bool:
    tensor = tensor.detach()
    return tensor.is_floating_point() and bool(torch.isnan(tensor).any())


def flip(tensor: torch.Tensor, rule: Corrupt) -> None:
    if tensor.numel() == 0:
        return
    whole = tensor.detach().clone(memory_format=torch.contiguous_format)
    raw = whole.reshape(-1).view(torch.uint8)
    place = (rule.element % tensor.numel()) * tensor.element_size() + rule.bit // 8 % tensor.element_size()
    raw[place] ^= 1 << rule.bit % 8
    with torch.no_grad():
        tensor.data.copy_(whole)
