"""Stand-ins for GPU libraries (flash_attn, apex, transformer_engine, ...), made of torch's own operators.

torch's operators have a price. `isolation/modules/own_code.py` imports the stand-ins if a program needs them. Each
module here lists in MODULES the contents of its libraries' modules. Other names can be imported and are refused when
called.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

from distsim.errors import UsageError

__all__ = ["LIBRARIES", "after_import", "contents", "is_module", "libraries_of"]

LIBRARIES: dict[str, str | None] = {
    "flash_attn": "attention",
    "flash_attn_interface": "attention",
    "xformers": "xformers_ops",
    "rotary_emb": "attention",
    "xentropy_cuda_lib": "attention",
    "dropout_layer_norm": "attention",
    "apex": "apex",
    "transformer_engine": "transformer_engine",
    "liger_kernel": "layers",
    "bitsandbytes": "apex",
    "causal_conv1d": "layers",
    "mamba_ssm": "layers",
    "grouped_gemm": "experts",
    "megablocks": "experts",
    "deep_ep": "experts",
    "amp_C": "apex",
    "fused_weight_gradient_mlp_cuda": "apex",
    "scaled_softmax_cuda": "apex",
    "scaled_masked_softmax_cuda": "apex",
    "scaled_upper_triang_masked_softmax_cuda": "apex",
    "fused_layer_norm_cuda": None,
    "fbgemm_gpu": None,
}
"""Module with the contents of each library. A library with None can be imported and is refused when called."""


def libraries_of(text: str | None) -> frozenset[str] | None:
    """Return the libraries that the option `gpu_libraries` names; None if it is not given.

    Raises:
        UsageError: There is no stand-in for one of them.
    """
    if text is None:
        return None
    names = [name.strip().replace("-", "_") for name in text.split(",")] if text != "none" else []
    for name in names:
        if name not in LIBRARIES:
            raise UsageError(f"--gpu-libraries {name}: expected none, or some of {', '.join(LIBRARIES)}")
    return frozenset(names)


def is_module(name: str) -> bool:
    """Return whether a stand-in has contents for *name* or for a module within it."""
    held = _modules(name)
    return any(module == name or module.startswith(f"{name}.") for module in held)


def after_import(module: ModuleType) -> None:
    """Replace the extensions that DeepSpeed's builders would compile with nvcc."""
    if module.__name__.endswith("op_builder.builder") and hasattr(module, "OpBuilder"):
        module.OpBuilder._loaded_ops |= importlib.import_module(f"{__name__}.apex").DEEPSPEED


def contents(module: str) -> dict[str, Any]:
    """Return the content of *module* of one of these libraries."""
    return _modules(module).get(module, {})


def _modules(module: str) -> dict[str, dict[str, Any]]:
    """Return the contents of all modules in the same file as *module*."""
    name = LIBRARIES[module.partition(".")[0]]
    if name is None:
        return {}
    held: dict[str, dict[str, Any]] = importlib.import_module(f"{__name__}.{name}").MODULES
    return held
