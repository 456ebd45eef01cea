"""apex.amp and apex.parallel: autocast, DDP, LARC and synchronized batch norm.

Source of names and arguments: NVIDIA/apex, apex/amp/frontend.py, apex/amp/handle.py, apex/parallel/LARC.py,
apex/parallel/distributed.py, apex/parallel/__init__.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distsim.errors import NotSimulated

__all__ = ["AMP", "LARC", "PARALLEL"]

_SCALE = 2.0**16
"""First factor of apex's dynamic loss scaling."""


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def initialize(models: Any, optimizers: Any = None, enabled: bool = True, opt_level: str = "O1", **options: Any) -> Any:
    """Stand-in for apex.amp.initialize: O0 (fp32) and O1 (matrix products in fp16)."""
    if enabled and opt_level not in ("O0", "O1"):
        raise NotSimulated(f"apex.amp.initialize(opt_level={opt_level!r})", "use O1, or torch.amp")
    if enabled and opt_level == "O1":
        for model in _as_list(models):
            model.forward = torch.autocast("cuda", torch.float16)(model.forward)
        for optimizer in _as_list(optimizers):
            if optimizer is not None:
                optimizer._distsim_scales = True
    return models if optimizers is None else (models, optimizers)


@contextlib.contextmanager
def scale_loss(loss: Tensor, optimizers: Any, *args: Any, **options: Any) -> Iterator[Tensor]:
    """Stand-in for apex.amp.scale_loss: a static factor, by which the gradients are divided after backward."""
    scaled = [one for one in _as_list(optimizers) if getattr(one, "_distsim_scales", False)]
    if not scaled:
        yield loss
        return
    yield loss.float() * _SCALE
    if options.get("delay_unscale"):
        return
    for optimizer in scaled:
        grads = [p.grad for p in master_params(optimizer) if p.grad is not None]
        for grad in grads:
            grad.mul_(1 / _SCALE)
        if grads and grads[0].is_cuda:
            torch.cuda.synchronize(grads[0].device)  # apex reads whether one overflowed


def master_params(optimizer: Any) -> Iterator[Any]:
    for group in optimizer.param_groups:
        yield from group["params"]


class LARC:
    """Stand-in for apex.parallel.LARC.LARC, the same code: an optimizer whose rate follows each layer's norms."""

    def __init__(self, optimizer: Any, trust_coefficient: float = 0.02, clip: bool = True, eps: float = 1e-8) -> None:
        self.optim = optimizer
        self.trust_coefficient = trust_coefficient
        self.clip = clip
        self.eps = eps

    def __getattr__(self, name: str) -> Any:
        if name == "optim":
            raise AttributeError(name)
        return getattr(self.optim, name)

    @property
    def param_groups(self) -> Any:
        return self.optim.param_groups

    @param_groups.setter
    def param_groups(self, value: Any) -> None:
        self.optim.param_groups = value

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        decays = []
        with torch.no_grad():
            for group in self.optim.param_groups:
                decay = group.get("weight_decay", 0)
                decays.append(decay)
                group["weight_decay"] = 0
                for p in group["params"]:
                    if p.grad is None:
                        continue
                    param_norm, grad_norm = torch.norm(p.data), torch.norm(p.grad.data)
                    if param_norm != 0 and grad_norm != 0:
                        rate = self.trust_coefficient * param_norm / (grad_norm + param_norm * decay + self.eps)
                        if self.clip:
                            rate = torch.clamp(rate / group["lr"], max=1)
                        p.grad.data += decay * p.data
                        p.grad.data *= rate
        result = self.optim.step(closure) if closure is not None else self.optim.step()
        for group, decay in zip(self.optim.param_groups, decays, strict=True):
            group["weight_decay"] = decay
        return result


class DistributedDataParallel(nn.parallel.DistributedDataParallel):
    """Stand-in for apex.parallel.DistributedDataParallel, by torch's on the module's own GPU."""

    def __init__(
        self, module: nn.Module, message_size: int = 10_000_000, delay_allreduce: bool = False, **options: Any
    ):
        device = next(module.parameters()).device
        bucket_mb = 1 << 20 if delay_allreduce else message_size * 4 / 2**20
        super().__init__(module, device_ids=[device.index] if device.type == "cuda" else None, bucket_cap_mb=bucket_mb)


def convert_syncbn_model(module: nn.Module, process_group: Any = None, channel_last: bool = False) -> nn.Module:
    converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(module, process_group)
    return converted


def create_syncbn_process_group(group_size: int) -> Any:
    """Stand-in for the function of apex.parallel: groups of *group_size* neighbours, all of them where it is 0."""
    if group_size == 0:
        return None
    size, rank = dist.get_world_size(), dist.get_rank()
    if size % group_size:
        raise AssertionError("world_size must be a multiple of group_size")
    groups = [dist.new_group(range(first, first + group_size)) for first in range(0, size, group_size)]
    return groups[rank // group_size]


AMP: dict[str, Any] = {
    "initialize": initialize,
    "scale_loss": scale_loss,
    "master_params": master_params,
    "state_dict": lambda destination=None: {"loss_scaler0": {"loss_scale": _SCALE, "unskipped": 0}},
    "load_state_dict": lambda state_dict: None,
}
PARALLEL: dict[str, Any] = {
    "DistributedDataParallel": DistributedDataParallel,
    "SyncBatchNorm": nn.SyncBatchNorm,
    "convert_syncbn_model": convert_syncbn_model,
    "create_syncbn_process_group": create_syncbn_process_group,
}
