"""Fused norms, softmax and optimizers of apex, Megatron and bitsandbytes.

Source of names and arguments: NVIDIA/apex, apex/normalization/fused_layer_norm.py, apex/optimizers, csrc;
NVIDIA/Megatron-LM, megatron/legacy/fused_kernels; bitsandbytes 0.50.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.adamw import adamw

from distsim.sim.stand_ins.apex_training import AMP, LARC, PARALLEL
from distsim.sim.stand_ins.fused import FusedKernel, fused, launch, needs_values, refuse_values

__all__ = ["DEEPSPEED", "MODULES", "MULTI_TENSOR", "FusedAdam", "FusedSGD"]

# -- Norms


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


def fused_rms_norm_affine(
    input: Tensor, weight: Tensor, normalized_shape: Any, eps: float = 1e-6, **options: Any
) -> Tensor:
    """Stand-in for apex.normalization.fused_rms_norm_affine."""
    return F.rms_norm(input, normalized_shape, weight, eps)


# -- Optimizers whose step is one kernel for many tensors


class FusedOptimizer(torch.optim.Optimizer):
    """Optimizer whose step is one kernel for the tensors of a group with gradients; it reads and writes their
    states.
    """

    library, states = "apex", ("exp_avg", "exp_avg_sq")
    tensors_of_a_kernel = 36
    """Number of tensors in 4 lists that one launch of apex's multi_tensor_apply takes."""

    def __init__(self, params: Any, defaults: dict[str, Any], master_weights: bool = False) -> None:
        self.master_weights = master_weights
        super().__init__(params, defaults)

    def new_states(self, p: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """Return the states of *p* before its first step."""
        states = {name: torch.zeros(p.shape, dtype=torch.float32, device=p.device) for name in self.states}
        if self.master_weights and p.dtype != torch.float32:
            states["master_param"] = p.detach().float()
        return states

    def compute(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        """Update *p* by torch's operators."""
        refuse_values(f"{self.library}'s {type(self).__name__}", "its values are not computed")

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
                    self.state[p].update(self.new_states(p, group))
            if needs_values() or not all(p.is_cuda for p in params):
                for p in params:
                    self.compute(p, p.grad, group)
                continue
            for i in range(0, len(params), self.tensors_of_a_kernel):
                some = params[i : i + self.tensors_of_a_kernel]
                local = [getattr(t, "_local_tensor", t) for p in some for t in (p, *self.state[p].values())]
                grads = [getattr(p.grad, "_local_tensor", p.grad) for p in some]
                launch(f"{self.library}::{type(self).__name__.lower()}", [*local, *grads], local, kind="optimizer")
        return loss


class FusedAdam(FusedOptimizer):
    """Stand-in for apex.optimizers.FusedAdam. Its moments have 4 bytes per element for parameters of any dtype."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        **options: Any,
    ) -> None:
        if amsgrad:
            raise RuntimeError("FusedAdam does not support the AMSGrad variant.")
        self.adam_w_mode = adam_w_mode
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults, master_weights)

    def compute(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
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


class FusedLAMB(FusedOptimizer):
    """Stand-in for apex.optimizers.FusedLAMB, without its second pass for the norms of parameters and updates."""

    def __init__(self, params: Any, lr: float = 1e-3, bias_correction: bool = True,
                 betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-6, weight_decay: float = 0.01,
                 **options: Any) -> None:  # fmt: skip
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})


class FusedSGD(torch.optim.SGD):
    """Stand-in for apex.optimizers.FusedSGD."""

    def __init__(self, params: Any, lr: float, momentum: float = 0.0, dampening: float = 0.0, **options: Any) -> None:
        kept = {name: options[name] for name in ("weight_decay", "nesterov") if name in options}
        super().__init__(params, lr=lr, momentum=momentum, dampening=dampening, fused=True, **kept)


# -- bitsandbytes: optimizers whose states have one byte a number and a scale for each block of 256.

_BLOCK = 256


class EightBit(FusedOptimizer):
    """Stand-in for optimizers of bitsandbytes.optim: one kernel for each parameter."""

    library, tensors_of_a_kernel = "bitsandbytes", 1
    defaults_of_kind: Mapping[str, Any] = MappingProxyType({})
    bits = 8

    def __init__(self, params: Any, lr: float | None = None, *args: Any, **options: Any) -> None:
        names = [name for name in self.defaults_of_kind if name != "lr"]
        given = {**dict(zip(names, args, strict=False)), **options}
        self.min_8bit_size, self.bits = (
            given.get("min_8bit_size", 4096),
            8 if self.bits == 8 else given.get("optim_bits", 32),
        )
        defaults = {**self.defaults_of_kind, **{name: given[name] for name in names if name in given}}
        super().__init__(params, {**defaults, "lr": defaults.get("lr") if lr is None else lr})

    def new_states(self, p: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        if self.bits == 32 or p.numel() < self.min_8bit_size:
            return super().new_states(p, group)
        states: dict[str, Tensor] = {}
        blocks = -(-p.numel() // _BLOCK)
        for i, _ in enumerate(self.states, 1):
            states[f"state{i}"] = torch.zeros(p.shape, dtype=torch.uint8, device=p.device)
            states[f"absmax{i}"] = torch.zeros(blocks, dtype=torch.float32, device=p.device)
        return states


_ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0}
_KINDS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "Adam": (("exp_avg", "exp_avg_sq"), _ADAM),
    "AdamW": (("exp_avg", "exp_avg_sq"), {**_ADAM, "weight_decay": 0.01}),
    "Lion": (("exp_avg",), {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0}),
    "SGD": (("momentum_buffer",), {"lr": None, "momentum": 0, "dampening": 0, "weight_decay": 0, "nesterov": False}),
    "RMSprop": (("square_avg",), {"lr": 1e-2, "alpha": 0.99, "eps": 1e-8, "weight_decay": 0}),
    "Adagrad": (("sum",), {"lr": 1e-2, "lr_decay": 0, "weight_decay": 0}),
}


def _optimizers() -> dict[str, type[EightBit]]:
    """Return each kind of optimizer with 8-bit, 32-bit and paged states. Paged states are kept on the GPU."""
    kinds: dict[str, type[EightBit]] = {}
    for name, (states, defaults) in _KINDS.items():
        for paged in ("", "Paged") if name in ("Adam", "AdamW", "Lion") else ("",):
            for bits, suffix in ((8, "8bit"), (32, "32bit"), (32, "")):
                body = {"states": states, "defaults_of_kind": defaults, "bits": bits, "__doc__": EightBit.__doc__}
                kinds[paged + name + suffix] = type(paged + name + suffix, (EightBit,), body)
    return kinds


class GlobalOptimManager:
    """Stand-in for bitsandbytes.optim.GlobalOptimManager, whose settings have no effect."""

    @classmethod
    def get_instance(cls) -> GlobalOptimManager:
        return cls()

    def register_parameters(self, params: Any) -> None:
        """Do nothing: settings of parameters have no effect."""

    def override_config(self, parameters: Any, key: Any = None, value: Any = None, key_value_dict: Any = None) -> None:
        """Do nothing: settings of parameters have no effect."""

    def register_module_override(self, module: Any, param_name: str, config: Any) -> None:
        """Do nothing: settings of a module's parameter have no effect."""


# -- Extensions that apex and Megatron compile


def _masked_softmax(name: str, scores: Tensor, scale: float, mask: Tensor | None, causal: bool) -> Tensor:
    """Return the softmax of scaled and masked scores: one kernel forward and one backward, which reads the
    probabilities.
    """

    def by_torch(scores: Tensor, mask: Tensor | None = None) -> Tensor:
        scaled = scores.float() * scale
        if causal:
            scaled = scaled.masked_fill(torch.ones_like(scaled, dtype=torch.bool).triu(1), float("-inf"))
        scaled = scaled if mask is None else scaled.masked_fill(mask.bool(), -10000.0)
        return scaled.softmax(-1).to(scores.dtype)

    out: Tensor = fused(
        FusedKernel(f"megatron::{name}", by_torch, "softmax", saves=(), saves_outputs=(0,)), scores, mask
    )
    return out


class ScaledSoftmax:
    """Stand-in for scaled_masked_softmax_cuda and related extensions, whose functions the program's autograd calls."""

    parts = ("forward", "backward", "get_batch_per_block")

    def __init__(self, name: str, causal: bool = False) -> None:
        self.name, self.module, self.causal = name, f"{name}_cuda", causal

    def forward(self, scores: Tensor, *rest: Any) -> Tensor:
        mask, scale = (rest[0], rest[1]) if len(rest) > 1 else (None, rest[0])
        return _masked_softmax(self.name, scores, float(scale), mask, self.causal)

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


def wgrad_gemm_accum(input: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
    """fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32: add the weight's gradient to *main_grad* in one product."""
    x, grad = (t.reshape(-1, t.shape[-1]) for t in (input, grad_output))
    if needs_values():
        main_grad.add_((grad.t() @ x).to(main_grad.dtype))
        return
    gemm = (grad.shape[1], x.shape[1], x.shape[0], 1)
    launch("megatron::wgrad_gemm_accum", [grad, x, main_grad], [main_grad], kind="gemm", gemm=gemm)


class MultiTensorApply:
    """apex.multi_tensor_apply.MultiTensorApply: calls a function of amp_C on lists of tensors."""

    available = True

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def __call__(self, op: Callable[..., Any], noop_flag_buffer: Tensor, tensor_lists: Any, *args: Any) -> Any:
        return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args)


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
    """Stand-in for amp_C.multi_tensor_adam on gradients, parameters and moments."""
    refuse_values("amp_C.multi_tensor_adam", "its values are not computed")
    tensors = [t for each in lists for t in each]
    launch("amp_C::multi_tensor_adam", tensors, tensors[len(lists[0]) :], kind="optimizer")


def multi_tensor_lion(chunk: int, flag: Tensor, lists: Any, *args: Any) -> None:
    """Stand-in for DeepSpeed's fused_lion on gradients, parameters and one moment."""
    refuse_values("DeepSpeed's FusedLion", "its values are not computed")
    tensors = [t for each in lists for t in each]
    launch("deepspeed::multi_tensor_lion", tensors, tensors[len(lists[0]) :], kind="optimizer")


def lamb(p: Tensor, copy: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor, *args: Any) -> Tensor:
    """Stand-in for DeepSpeed's fused_lamb for one parameter; return the trust ratio."""
    refuse_values("DeepSpeed's FusedLamb", "its values are not computed")
    ratio = torch.ones(1, dtype=torch.float32, device=p.device)
    written = [p, exp_avg, exp_avg_sq, *([copy] if copy.numel() else [])]
    launch("deepspeed::lamb", [p, exp_avg, exp_avg_sq, grad, p, exp_avg], written, kind="optimizer", kernels=3)
    return ratio


def adam_update(number: int, step: int, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float,
                bias_correction: bool, p: Tensor, grad: Tensor, exp_avg: Tensor,
                exp_avg_sq: Tensor) -> None:  # fmt: skip
    """Stand-in for DeepSpeed's cpu_adam: one pass over CPU tensors, like torch's fused AdamW."""
    steps = [torch.tensor(float(step - 1), device=p.device)]
    adamw([p], [grad.to(p.dtype)], [exp_avg], [exp_avg_sq], [], steps, fused=exp_avg.dtype == p.dtype, amsgrad=False,
          beta1=beta1, beta2=beta2, lr=lr, weight_decay=weight_decay, eps=eps, maximize=False)  # fmt: skip


def _leave(*args: Any) -> None:
    """Do nothing when an optimizer is destroyed, because nothing is stored for it."""


DEEPSPEED = {
    "fused_adam": SimpleNamespace(multi_tensor_adam=multi_tensor_adam),
    "fused_lion": SimpleNamespace(multi_tensor_lion=multi_tensor_lion),
    "fused_lamb": SimpleNamespace(lamb=lamb),
    "cpu_adam": SimpleNamespace(create_adam=_leave, adam_update=adam_update, destroy_adam=_leave),
}
"""Extensions that DeepSpeed compiles at their first use, by the name in its builders."""


_NORMS = {"FusedLayerNorm": FusedLayerNorm, "FusedRMSNorm": FusedRMSNorm, "MixedFusedLayerNorm": FusedLayerNorm,
          "MixedFusedRMSNorm": FusedRMSNorm, "fused_layer_norm_affine": fused_layer_norm_affine,
          "fused_rms_norm_affine": fused_rms_norm_affine}  # fmt: skip
_APPLY = {"MultiTensorApply": MultiTensorApply, "multi_tensor_applier": MultiTensorApply(2048 * 32)}
_SOFTMAXES = (ScaledSoftmax("scaled_softmax"), ScaledSoftmax("scaled_masked_softmax"),
              ScaledSoftmax("scaled_upper_triang_masked_softmax", causal=True))  # fmt: skip
MULTI_TENSOR: dict[str, Any] = {
    "multi_tensor_scale": multi_tensor_scale, "multi_tensor_l2norm": multi_tensor_l2norm,
    "multi_tensor_adam": multi_tensor_adam, **_APPLY,
}  # fmt: skip
"""Functions of amp_C on lists of tensors, which Transformer Engine provides, too."""
_OPTIMIZERS = {"FusedAdam": FusedAdam, "FusedSGD": FusedSGD, "FusedLAMB": FusedLAMB}
_EIGHT_BIT = {**_optimizers(), "GlobalOptimManager": GlobalOptimManager}
MODULES: dict[str, dict[str, Any]] = {
    "apex.normalization": _NORMS,
    "apex.normalization.fused_layer_norm": _NORMS,
    "apex.optimizers": _OPTIMIZERS,
    "apex.optimizers.fused_adam": {"FusedAdam": FusedAdam},
    "apex.optimizers.fused_lamb": {"FusedLAMB": FusedLAMB},
    "apex.multi_tensor_apply": _APPLY,
    "apex.amp": AMP,
    "apex.parallel": PARALLEL,
    "apex.parallel.LARC": {"LARC": LARC},
    "amp_C": MULTI_TENSOR,
    "fused_weight_gradient_mlp_cuda": {
        "wgrad_gemm_accum_fp32": wgrad_gemm_accum, "wgrad_gemm_accum_fp16": wgrad_gemm_accum
    },
    **{kernel.module: {part: getattr(kernel, part) for part in ScaledSoftmax.parts} for kernel in _SOFTMAXES},
    "bitsandbytes": {"__version__": "0.50.0"},
    "bitsandbytes.optim": _EIGHT_BIT,
}  # fmt: skip
