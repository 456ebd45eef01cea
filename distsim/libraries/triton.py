"""Stand-in for Triton, which torch for CUDA brings along, and prices of well-known libraries' Triton kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from distsim.kernels import KnownKernel
from distsim.sim.isolation.modules.own_code import launch

_VERSION = "3.7.0"
"""Version of Triton that torch 2.13 requires."""


class _Kernel:
    """A function under triton.jit, which is not compiled, and is priced at its launch."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn
        self.__name__ = getattr(fn, "__name__", "kernel")
        self._qualname = f"triton::{self.__name__}"  # what distsim.kernel_cost asks for
        self.__doc__ = fn.__doc__

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self.run

    def run(self, *args: Any, **kwargs: Any) -> None:
        launch(self._qualname, args, kwargs, self.fn)

    def warmup(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: compilation takes no time in a simulation."""

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError("Cannot call @triton.jit'd outside of the scope of a kernel")  # as Triton says it


def _jit(fn: Any = None, **options: Any) -> Any:
    return _Kernel if fn is None else _Kernel(fn)


def _autotune(configs: Any, *args: Any, **options: Any) -> Callable[[Any], Any]:
    """Choose the first of *configs*: a launch takes the same time with each."""

    def decorate(kernel: Any) -> Any:
        kernel.configs, kernel.best_config = list(configs), configs[0]
        return kernel

    return decorate


def _heuristics(values: Any) -> Callable[[Any], Any]:
    return lambda kernel: kernel


class _Config:
    def __init__(self, kwargs: Any = None, **others: Any) -> None:
        self.kwargs = kwargs or {}
        vars(self).update(others)


def _cdiv(x: int, y: int) -> int:
    return -(-x // y)


def _next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length() if n > 0 else 0


TRITON: dict[str, dict[str, Any]] = {
    "triton": {
        "__version__": _VERSION, "jit": _jit, "cdiv": _cdiv, "next_power_of_2": _next_power_of_2, "Config": _Config,
        "autotune": _autotune, "heuristics": _heuristics, "set_allocator": lambda allocator: None,
    },
}  # fmt: skip
"""Contents of Triton's modules; all other names can be imported."""

# -- Prices of libraries' kernels. One that is not here is priced like a program's own, with a note.

_PASS, _SOFTMAX = KnownKernel(), KnownKernel("softmax")
_NORM, _NORM_BACKWARD = KnownKernel("norm"), KnownKernel("norm backward")
_IN_PLACE = KnownKernel(passes=2.0)
_INTO_TWO_OF_THREE = KnownKernel(passes=5 / 3)
"""Reads three tensors of one size and writes its results into two of them."""
_IN_PLACE_SOFTMAX = KnownKernel("softmax", passes=3.0)
"""Reads each row for its largest number, and again for the gradient that it writes there."""

_ROWS = (
    ("flash_attn", _PASS, "rotary_kernel"),
    ("flash_attn", _NORM, "_layer_norm_fwd_1pass_kernel"),
    ("flash_attn", _NORM_BACKWARD, "_layer_norm_bwd_kernel"),
    ("flash_attn", _SOFTMAX, "cross_entropy_fwd_kernel cross_entropy_bwd_kernel"),
    ("liger_kernel", _NORM, "_rms_norm_forward_kernel _block_rms_norm_forward_kernel _layer_norm_forward_kernel"),
    ("liger_kernel", _NORM, "_fused_add_rms_norm_forward_kernel"),
    ("liger_kernel", _NORM_BACKWARD, "_rms_norm_backward_kernel _block_rms_norm_backward_kernel"),
    ("liger_kernel", _NORM_BACKWARD, "_layer_norm_backward_kernel _fused_add_rms_norm_backward_kernel"),
    ("liger_kernel", _PASS, "_swiglu_forward_kernel _swiglu_forward_kernel_tiled _geglu_tanh_forward_kernel"),
    ("liger_kernel", _PASS, "_swiglu_fused_gate_up_forward_kernel _swiglu_fused_gate_up_backward_kernel"),
    ("liger_kernel", _INTO_TWO_OF_THREE, "_swiglu_backward_kernel _swiglu_backward_kernel_tiled"),
    ("liger_kernel", _INTO_TWO_OF_THREE, "_geglu_tanh_backward_kernel"),
    ("liger_kernel", _IN_PLACE, "_triton_rope _triton_qwen2vl_mrope _llama4_rope_kernel element_mul_kernel"),
    ("liger_kernel", _IN_PLACE_SOFTMAX, "liger_cross_entropy_kernel"),
    ("mamba_ssm", _NORM, "_layer_norm_fwd_1pass_kernel"),
    ("mamba_ssm", _NORM_BACKWARD, "_layer_norm_bwd_kernel"),
    ("mamba_ssm", _PASS, "_bmm_chunk_fwd_kernel _chunk_cumsum_fwd_kernel _chunk_state_fwd_kernel"),
    ("mamba_ssm", _PASS, "_state_passing_fwd_kernel _chunk_scan_fwd_kernel _selective_scan_update_kernel"),
    ("mamba_ssm", _PASS, "_bmm_chunk_bwd_kernel _chunk_cumsum_bwd_kernel _chunk_state_bwd_db_kernel"),
    ("mamba_ssm", _PASS, "_chunk_state_bwd_dx_kernel _state_passing_bwd_kernel _chunk_scan_bwd_dc_kernel"),
    ("mamba_ssm", _PASS, "_chunk_scan_bwd_dcb_kernel _chunk_scan_bwd_dstates_kernel _chunk_scan_bwd_dx_kernel"),
    ("mamba_ssm", _PASS, "_chunk_scan_bwd_dz_kernel _chunk_scan_bwd_ddAcs_stable_kernel"),
    ("mamba_ssm", _PASS, "_chunk_scan_chunk_state_bwd_dx_kernel _chunk_state_bwd_ddAcs_stable_kernel"),
    ("megablocks", _PASS, "_padded_copy _padded_copy_wgrad _binned_copy _binned_copy_wgrad"),
)
"""Libraries, prices and names of kernels: flash_attn 2.8.3, liger_kernel 0.8.5, mamba_ssm 2.3.2, megablocks 0.10.0.

Kernels of matrix products within a chunk (mamba_ssm) have so few flops for each of their bytes that memory limits them.
"""
_KNOWN = {(library, name): price for library, price, names in _ROWS for name in names.split()}


def known_kernel(function: Callable[..., Any]) -> KnownKernel | None:
    """Return the price of the Triton kernel *function*; None if it is not one of a well-known library."""
    return _KNOWN.get((function.__module__.partition(".")[0], function.__name__))
