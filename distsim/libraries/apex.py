"""Replacements for apex, and for the extensions that apex, Megatron and DeepSpeed compile.

Source of names and arguments: NVIDIA/apex, apex/normalization, optimizers, amp, parallel and csrc; NVIDIA/Megatron-LM,
megatron/legacy/fused_kernels; deepspeedai/DeepSpeed, csrc.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.adamw import adamw

from distsim.errors import NotSimulated
from distsim.libraries.fused import FusedKernel, fused, launch, needs_values, refuse_values

# -- Norms and optimizers


class FusedLayerNorm(nn.LayerNorm):
    """Stand-in for apex.normalization.FusedLayerNorm."""

    def __init__(
        self, normalized_shape: Any, eps: float = 1e-5, elementwise_affine: bool = True, **options: Any
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine)


class FusedRMSNorm(nn.RMSNorm):
    """Stand-in for apex.normalization.FusedRMSNorm."""

    def __init__(
        self, normalized_shape: Any, eps: float = 1e-5, elementwise_affine: bool = True, **options: Any
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine)


def fused_layer_norm_affine(
    input: Tensor, weight: Tensor, bias: Tensor, normalized_shape: Any, eps: float = 1e-6, **options: Any
) -> Tensor:
    """Stand-in for apex.normalization.fused_layer_norm_affine."""
    return F.layer_norm(input, normalized_shape, weight, bias, eps)


class FusedAdam(torch.optim.Optimizer):
    """Stand-in for apex.optimizers.FusedAdam. Its moments have 4 bytes per element for parameters of any dtype."""

    tensors_of_a_kernel = 36
    """Number of tensors in 4 lists that one launch of apex's multi_tensor_apply takes."""

    def __init__(
        self, params: Any, lr: float = 1e-3, bias_correction: bool = True, betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8, adam_w_mode: bool = True, weight_decay: float = 0.0, master_weights: bool = False,
        **options: Any,
    ) -> None:  # fmt: skip
        self.adam_w_mode, self.master_weights = adam_w_mode, master_weights
        defaults = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        super().__init__(params, {**defaults, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            params = [p for p in group["params"] if p.grad is not None]
            for p in params:
                if not self.state[p]:
                    self.state[p].update({name: torch.zeros_like(p, dtype=torch.float32) for name in _MOMENTS})
                    if self.master_weights and p.dtype != torch.float32:
                        self.state[p]["master_param"] = p.detach().float()
            if needs_values() or not all(p.is_cuda for p in params):
                for p in params:
                    self._compute(p, p.grad, group)
                continue
            for i in range(0, len(params), self.tensors_of_a_kernel):
                some = params[i : i + self.tensors_of_a_kernel]
                local = [getattr(t, "_local_tensor", t) for p in some for t in (p, *self.state[p].values())]
                grads = [getattr(p.grad, "_local_tensor", p.grad) for p in some]
                launch("apex::fusedadam", [*local, *grads], local, kind="optimizer")
        return loss

    def _compute(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        """Update *p* by torch's operators."""
        state, (beta1, beta2), lr = self.state[p], group["betas"], group["lr"]
        target = state.get("master_param", p)
        grad = grad.float() if self.adam_w_mode else grad.float() + group["weight_decay"] * target
        first, second = state["exp_avg"], state["exp_avg_sq"]
        first.lerp_(grad, 1 - beta1)
        second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        scale1, scale2 = ((1 - beta ** group["step"]) if group["bias_correction"] else 1.0 for beta in (beta1, beta2))
        update = (first / scale1) / ((second / scale2).sqrt() + group["eps"])
        update = update + group["weight_decay"] * target if self.adam_w_mode else update
        target.sub_((lr * update).to(target.dtype))
        if target is not p:
            p.copy_(target)


_MOMENTS = ("exp_avg", "exp_avg_sq")


class FusedSGD(torch.optim.SGD):
    """Stand-in for apex.optimizers.FusedSGD."""

    def __init__(self, params: Any, lr: float, momentum: float = 0.0, dampening: float = 0.0, **options: Any) -> None:
        kept = {name: options[name] for name in ("weight_decay", "nesterov") if name in options}
        super().__init__(params, lr=lr, momentum=momentum, dampening=dampening, fused=True, **kept)


# -- apex.amp and apex.parallel

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
    yield loss.float() * _SCALE if scaled else loss
    for optimizer in [] if options.get("delay_unscale") else scaled:
        grads = [p.grad for p in _master_params(optimizer) if p.grad is not None]
        for grad in grads:
            grad.mul_(1 / _SCALE)
        if grads and grads[0].is_cuda:
            torch.cuda.synchronize(grads[0].device)  # apex reads whether one overflowed


def _master_params(optimizer: Any) -> Iterator[Any]:
    for group in optimizer.param_groups:
        yield from group["params"]


class LARC:
    """Stand-in for apex.parallel.LARC.LARC, the same code: an optimizer whose rate follows each layer's norms."""

    def __init__(self, optimizer: Any, trust_coefficient: float = 0.02, clip: bool = True, eps: float = 1e-8) -> None:
        self.optim, self.trust_coefficient, self.clip, self.eps = optimizer, trust_coefficient, clip, eps

    def __getattr__(self, name: str) -> Any:
        if name == "optim":
            raise AttributeError(name)
        return getattr(self.optim, name)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        decays = [group.get("weight_decay", 0) for group in self.optim.param_groups]
        for group, decay in zip(self.optim.param_groups, decays, strict=True):
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


# -- Extensions that apex, Megatron and DeepSpeed compile


class ScaledSoftmax:
    """Stand-in for scaled_masked_softmax_cuda and related extensions, whose functions the program's autograd calls: one
    kernel each, of which the backward one reads the probabilities."""

    def __init__(self, name: str, causal: bool = False) -> None:
        self.name, self.causal = name, causal

    def forward(self, scores: Tensor, *rest: Any) -> Tensor:
        mask, scale = (rest[0], rest[1]) if len(rest) > 1 else (None, rest[0])

        def by_torch(scores: Tensor, mask: Tensor | None = None) -> Tensor:
            scaled = scores.float() * float(scale)
            if self.causal:
                scaled = scaled.masked_fill(torch.ones_like(scaled, dtype=torch.bool).triu(1), float("-inf"))
            scaled = scaled if mask is None else scaled.masked_fill(mask.bool(), -10000.0)
            return scaled.softmax(-1).to(scores.dtype)

        kernel = FusedKernel(f"megatron::{self.name}", by_torch, "softmax", saves=(), saves_outputs=(0,))
        return fused(kernel, scores, mask)

    def backward(self, grad: Tensor, probabilities: Tensor, scale: Any) -> Tensor:
        if needs_values():
            inner = (grad.float() * probabilities.float()).sum(-1, keepdim=True)
            return (float(scale) * probabilities.float() * (grad.float() - inner)).to(grad.dtype)
        out = torch.empty_like(grad)
        launch(f"megatron::{self.name}_backward", [grad, probabilities], [out], kind="softmax")
        return out

    @staticmethod
    def get_batch_per_block(queries: int, keys: int, batch: int, heads: int) -> int:
        """Return the rows of one block: 128 threads, 32 for each row; each thread takes two rows if rows are short."""
        power = 1 << max(0, keys - 1).bit_length()
        return 4 * (2 if power <= 128 else 1) if power >= 32 else 128 // max(1, power) * 2


def _softmax(name: str, causal: bool = False) -> dict[str, Any]:
    """Return the contents of the extension for one kind of softmax."""
    softmax = ScaledSoftmax(name, causal)
    return {part: getattr(softmax, part) for part in ("forward", "backward", "get_batch_per_block")}


def wgrad_gemm_accum(input: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
    """fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32: add the weight's gradient to *main_grad* in one product."""
    x, grad = (t.reshape(-1, t.shape[-1]) for t in (input, grad_output))
    if needs_values():
        main_grad.add_((grad.t() @ x).to(main_grad.dtype))
        return
    shape = (grad.shape[1], x.shape[1], x.shape[0], 1)
    launch("megatron::wgrad_gemm_accum", [grad, x, main_grad], [main_grad], kind="gemm", shape=shape)


def multi_tensor_applier(op: Callable[..., Any], noop_flag_buffer: Any, tensor_lists: Any, *args: Any) -> Any:
    """apex.multi_tensor_apply.multi_tensor_applier: calls a function of amp_C on lists of tensors."""
    return op(2048 * 32, noop_flag_buffer, tensor_lists, *args)


def multi_tensor_scale(chunk: int, flag: Tensor, lists: Any, scale: float) -> None:
    """Stand-in for amp_C.multi_tensor_scale: write the scaled first list to the second one."""
    if needs_values():
        for source, target in zip(*lists, strict=True):
            target.copy_(source.float() * scale)
    else:
        launch("amp_C::multi_tensor_scale", lists[0], lists[1])


def multi_tensor_l2norm(chunk: int, flag: Tensor, lists: Any, per_tensor: bool = False) -> tuple[Tensor, Tensor]:
    """Stand-in for amp_C.multi_tensor_l2norm: return the norm of all tensors together, and of each."""
    if needs_values():
        each = torch.stack([t.float().norm() for t in lists[0]])
        return each.norm().view(1), each
    each = torch.empty(len(lists[0]), dtype=torch.float32, device=lists[0][0].device)
    launch("amp_C::multi_tensor_l2norm", lists[0], [each], kernels=2)
    return each.new_empty(1), each


def multi_tensor_adam(chunk: int, flag: Tensor, lists: Any, *args: Any) -> None:
    """Stand-in for amp_C.multi_tensor_adam on gradients, parameters and moments, and for DeepSpeed's of Lion."""
    refuse_values("amp_C.multi_tensor_adam", "its values are not computed")
    tensors = [t for each in lists for t in each]
    launch("amp_C::multi_tensor_adam", tensors, tensors[len(lists[0]) :], kind="optimizer")


def lamb(p: Tensor, copy: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor, *args: Any) -> Tensor:
    """Stand-in for DeepSpeed's fused_lamb for one parameter; return the trust ratio."""
    refuse_values("DeepSpeed's FusedLamb", "its values are not computed")
    written = [p, exp_avg, exp_avg_sq, *([copy] if copy.numel() else [])]
    launch("deepspeed::lamb", [p, exp_avg, exp_avg_sq, grad, p, exp_avg], written, kind="optimizer", kernels=3)
    return torch.ones(1, dtype=torch.float32, device=p.device)


def adam_update(number: int, step: int, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float,
                bias_correction: bool, p: Tensor, grad: Tensor, exp_avg: Tensor,
                exp_avg_sq: Tensor) -> None:  # fmt: skip
    """Stand-in for DeepSpeed's cpu_adam: one pass over CPU tensors, like torch's fused AdamW."""
    steps = [torch.tensor(float(step - 1), device=p.device)]
    adamw([p], [grad.to(p.dtype)], [exp_avg], [exp_avg_sq], [], steps, fused=exp_avg.dtype == p.dtype, amsgrad=False,
          beta1=beta1, beta2=beta2, lr=lr, weight_decay=weight_decay, eps=eps, maximize=False)  # fmt: skip


DEEPSPEED = {
    "fused_adam": SimpleNamespace(multi_tensor_adam=multi_tensor_adam),
    "fused_lion": SimpleNamespace(multi_tensor_lion=multi_tensor_adam),
    "fused_lamb": SimpleNamespace(lamb=lamb),
    "cpu_adam": SimpleNamespace(
        create_adam=lambda *args: None, adam_update=adam_update, destroy_adam=lambda *args: None
    ),
}
"""Extensions that DeepSpeed compiles at their first use, by the name in its builders."""
MULTI_TENSOR: dict[str, Any] = {
    "multi_tensor_scale": multi_tensor_scale, "multi_tensor_l2norm": multi_tensor_l2norm,
    "multi_tensor_adam": multi_tensor_adam, "multi_tensor_applier": multi_tensor_applier,
}  # fmt: skip
"""Functions of amp_C on lists of tensors, which Transformer Engine provides, too."""
_NORMS = {"FusedLayerNorm": FusedLayerNorm, "FusedRMSNorm": FusedRMSNorm, "MixedFusedLayerNorm": FusedLayerNorm,
          "MixedFusedRMSNorm": FusedRMSNorm, "fused_layer_norm_affine": fused_layer_norm_affine}  # fmt: skip
_OPTIMIZERS = {"FusedAdam": FusedAdam, "FusedSGD": FusedSGD}
MODULES: dict[str, dict[str, Any]] = {
    "apex.normalization": _NORMS,
    "apex.normalization.fused_layer_norm": _NORMS,
    "apex.optimizers": _OPTIMIZERS,
    "apex.optimizers.fused_adam": _OPTIMIZERS,
    "apex.multi_tensor_apply": MULTI_TENSOR,
    "apex.amp": {
        "initialize": initialize, "scale_loss": scale_loss, "master_params": _master_params,
        "state_dict": lambda destination=None: {"loss_scaler0": {"loss_scale": _SCALE, "unskipped": 0}},
        "load_state_dict": lambda state_dict: None,
    },
    "apex.parallel": {
        "DistributedDataParallel": DistributedDataParallel, "SyncBatchNorm": nn.SyncBatchNorm,
        "convert_syncbn_model": convert_syncbn_model, "create_syncbn_process_group": create_syncbn_process_group,
    },
    "apex.parallel.LARC": {"LARC": LARC},
    "amp_C": MULTI_TENSOR,
    "fused_weight_gradient_mlp_cuda": dict.fromkeys(
        ("wgrad_gemm_accum_fp32", "wgrad_gemm_accum_fp16"), wgrad_gemm_accum
    ),
    "scaled_softmax_cuda": _softmax("scaled_softmax"),
    "scaled_masked_softmax_cuda": _softmax("scaled_masked_softmax"),
    "scaled_upper_triang_masked_softmax_cuda": _softmax("scaled_upper_triang_masked_softmax", causal=True),
}  # fmt: skip
