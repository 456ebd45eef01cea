"""CUDA tensors without a GPU: dispatch modes and keys, fake tensors, what prints and saves a tensor."""

from __future__ import annotations

from typing import Any

import torch

from distsim.torch_compat.names import FEATURE, OPTIONAL, SIM, TorchName

FOREACH_COPY = TorchName("torch._foreach_copy_", "copies of many tensors at once", SIM)
GET_USER_FN = TorchName(
    "torch.autograd.function.BackwardCFunction._get_user_fn",
    "what an autograd.Function costs the host",
    OPTIONAL,
    since="2.13",
)
MAKE_WRAPPER_SUBCLASS = TorchName("torch.Tensor._make_wrapper_subclass", "CUDA tensors without a GPU", SIM)
HAS_COMPATIBLE_SHALLOW_COPY_TYPE = TorchName(
    "torch.ops.aten._has_compatible_shallow_copy_type.default", "assignments to .data of CUDA tensors", FEATURE
)
DISABLE_TORCH_DISPATCH = TorchName("torch._C._DisableTorchDispatch", "operators below a rank's dispatch mode", SIM)
PRESERVE_DISPATCH_KEY_GUARD = TorchName("torch._C._PreserveDispatchKeyGuard", "CUDA tensors without a GPU", SIM)
SET_META_IN_TLS_DISPATCH_INCLUDE = TorchName(
    "torch._C._set_meta_in_tls_dispatch_include", "CUDA tensors without a GPU", SIM
)
SET_ONLY_LIFT_CPU_TENSORS = TorchName(
    "torch._C._set_only_lift_cpu_tensors", "torch.tensor(..., device='cuda')", FEATURE
)
DISPATCH_KEY = TorchName("torch._C.DispatchKey", "operators below a rank's dispatch mode", SIM)
TORCH_DISPATCH_MODE = TorchName(
    "torch.utils._python_dispatch.TorchDispatchMode", "the mode that meets every operator of a rank", SIM
)
DISABLE_CURRENT_MODES = TorchName(
    "torch.utils._python_dispatch._disable_current_modes", "operators below a rank's dispatch mode", SIM
)
GET_CURRENT_DISPATCH_MODE_STACK = TorchName(
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack", "the mode that meets every operator of a rank", SIM
)
POP_MODE_TEMPORARILY = TorchName(
    "torch.utils._python_dispatch._pop_mode_temporarily", "calls that a program's own modes see", SIM
)
GET_DISPATCH_MODE = TorchName("torch._C._get_dispatch_mode", "fake tensors inside a rank", SIM)
TORCH_DISPATCH_MODE_KEY = TorchName("torch._C._TorchDispatchModeKey", "fake tensors inside a rank", SIM)
DISABLED_TORCH_DISPATCH_IMPL = TorchName("torch._C._disabled_torch_dispatch_impl", "tensors of subclasses", SIM)
IS_FUNCTORCH_WRAPPED_TENSOR = TorchName(
    "torch._C._functorch.is_functorch_wrapped_tensor", "tensors inside a transform of torch.func", SIM
)
FAKE_TENSOR = TorchName("torch._subclasses.fake_tensor.FakeTensor", "fake tensors inside a rank", SIM)
FAKE_TENSOR_MODE = TorchName("torch._subclasses.fake_tensor.FakeTensorMode", "fake tensors inside a rank", SIM)
DISPATCH_CACHE_KEY = TorchName(
    "torch._subclasses.fake_tensor._DispatchCacheKey", "what fake tensors remember of each rank's GPU", SIM
)
DISPATCH_GET_ALL_OP_NAMES = TorchName(
    "torch._C._dispatch_get_all_op_names", "operators below a rank's dispatch mode", SIM
)
DISPATCH_HAS_KERNEL_FOR_DISPATCH_KEY = TorchName(
    "torch._C._dispatch_has_kernel_for_dispatch_key", "operators below a rank's dispatch mode", SIM
)
DISPATCH_TLS_LOCAL_EXCLUDE_SET = TorchName(
    "torch._C._dispatch_tls_local_exclude_set", "the first use of a GPU", FEATURE
)
DISPATCH_TLS_LOCAL_INCLUDE_SET = TorchName(
    "torch._C._dispatch_tls_local_include_set", "the first use of a GPU", FEATURE
)
FORCE_DISPATCH_KEY_GUARD = TorchName("torch._C._ForceDispatchKeyGuard", "the first use of a GPU", FEATURE)
ENSURE_CUDA_DEVICE_GUARD_SET = TorchName("torch._C._ensureCUDADeviceGuardSet", "simulated GPUs", FEATURE)
TENSOR_STR = TorchName("torch._tensor_str._tensor_str", "printed CUDA tensors", SIM)
STR = TorchName("torch._tensor_str._str", "printed CUDA tensors", SIM)
PY_TORCH_FILE_WRITER = TorchName("torch._C.PyTorchFileWriter", "files of torch.save", SIM)
SET_DEFAULT_TENSOR_TYPE = TorchName("torch._C._set_default_tensor_type", "torch.set_default_tensor_type", FEATURE)
PYOBJ_DISPATCHER = TorchName(
    "torch._ops.OpOverload._is_pyobj_dispatcher_enabled",
    "operators that torch's observers miss",
    OPTIONAL,
    since="2.14",
)
FLEX_ATTENTION = TorchName("torch._higher_order_ops.flex_attention.flex_attention", "flex_attention", SIM)
FLEX_ATTENTION_BACKWARD = TorchName(
    "torch._higher_order_ops.flex_attention.flex_attention_backward", "flex_attention", SIM
)
CONSTRUCT_STRIDES = TorchName("torch._higher_order_ops.flex_attention._construct_strides", "flex_attention", SIM)
RUN_DTENSOR_RNG_OP = TorchName("torch._prims.rng_prims.run_dtensor_rng_op", "random DTensors", OPTIONAL, since="2.12")
DECOMPOSITION_TABLE = TorchName("torch._decomp.decomposition_table", "values of operators that only a GPU has", SIM)
CONJ = TorchName("torch._conj", "conjugate views of known values", SIM)
NEG_VIEW = TorchName("torch._neg_view", "negative views of known values", SIM)
CURRENT_AUTOGRAD_NODE = TorchName("torch._C._current_autograd_node", "kernels of a compiled backward pass", SIM)
SAVING_HOOKS = TorchName(
    "torch._C._autograd._top_saved_tensors_default_hooks",
    "memory that a compiled forward within a checkpoint keeps",
    OPTIONAL,
    since="2.11",
)
GET_SEQUENCE_NR = TorchName("torch._C._autograd._get_sequence_nr", "kernels of a compiled backward pass", SIM)

MODE_FLAGS = {
    flag: TorchName(f"torch.utils._python_dispatch.{flag}", "torch's count of dispatch modes", OPTIONAL, since=since)
    for flag, since in (
        ("_is_in_torch_dispatch_mode", "2.6"),
        ("_is_in_non_infra_torch_dispatch_mode", "2.6"),
        ("_is_in_any_mode_without_ignore_compile_internals", "2.12"),
    )
}
CACHE_KEY = TorchName(
    "torch._subclasses.fake_tensor.FakeTensorMode._cache_key", "what fake tensors remember of each rank's GPU", SIM
)

OpOverload: Any = type(torch.ops.aten.add.Tensor)
_WITH_ATTENTION = "attention on simulated GPUs"
_KERNELS = "operators on simulated GPUs"
PRIVATE = {
    name: TorchName(f"torch.ops.aten.{name}", feature, OPTIONAL)
    for feature, names in (
        (
            _WITH_ATTENTION,
            "_scaled_dot_product_attention_math _scaled_dot_product_cudnn_attention "
            "_scaled_dot_product_cudnn_attention_backward _scaled_dot_product_efficient_attention "
            "_scaled_dot_product_efficient_attention_backward _scaled_dot_product_flash_attention "
            "_scaled_dot_product_flash_attention_backward _scaled_dot_product_flash_attention_for_cpu "
            "_scaled_dot_product_flash_attention_for_cpu_backward",
        ),
        (
            _KERNELS,
            "_amp_foreach_non_finite_check_and_unscale_ _dirichlet_grad _embedding_bag _embedding_bag_forward_only "
            "_fused_adamw_ "
            "_has_compatible_shallow_copy_type _is_all_true _is_any_true _local_scalar_dense _log_softmax "
            "_log_softmax_backward_data _pack_padded_sequence _pin_memory _sample_dirichlet _softmax "
            "_softmax_backward_data _thnn_fused_gru_cell _thnn_fused_gru_cell_backward _thnn_fused_lstm_cell "
            "_thnn_fused_lstm_cell_backward_impl _to_copy _unique2 _unsafe_view",
        ),
    )
    for name in names.split()
}


class _Absent:
    """Placeholder for an operator that this torch does not have."""

    def __getattr__(self, name: str) -> _Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def overloads(self) -> list[str]:
        return []


_ABSENT = _Absent()


class _Aten:
    """torch.ops.aten with the private operators of `PRIVATE` alone."""

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_"):
            value = getattr(torch.ops.aten, name)
        elif name in PRIVATE:
            value = PRIVATE[name].get(_ABSENT)
        else:
            raise AttributeError(f"{name!r} is not in distsim.torch_compat.device")
        self.__dict__[name] = value
        return value


aten: Any = _Aten()


def is_unobserved(func: Any) -> bool:
    """Return whether torch's profiler and execution trace miss an operator.

    From torch 2.14 on, an operator of `torch.library.custom_op` that returns tensors is dispatched in Python
    (torch/_ops.py, "PyObject Dispatcher"), past the observers.
    """
    dispatched: Any = PYOBJ_DISPATCHER.get(None)
    return dispatched is not None and isinstance(func, OpOverload) and bool(dispatched(func))
