"""Which of torch's fused attentions comes nearest to the one that a framework's published figures were taken with."""

from __future__ import annotations

import torch


def as_published(device: torch.device, *, first: bool = False) -> None:
    """FlashAttention-2 before Blackwell, whose frameworks have cuDNN's; where *first*, FlashAttention-1.

    torch takes cuDNN's on Hopper, too, since 2.10; torchtitan's and nanotron's figures are older. llm-foundry's are
    of 2023 and of Triton's FlashAttention-1, whose speed the memory-efficient kernel has.
    """
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(torch.cuda.get_device_capability(device)[0] >= 10)
        torch.backends.cuda.enable_flash_sdp(not first)


def by_nanotron(device: torch.device) -> bool:
    """Whether a Llama's nearest figures are nanotron's, on Hopper, or Megatron-LM's as SimuMax ran it, on Blackwell."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] < 10
