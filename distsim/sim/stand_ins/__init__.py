"""Libraries that a GPU machine has and a laptop lacks, made of torch's own operators, which have a price.

`isolation/modules/own_code.py` imports them where a program cannot do without; each module here lists in MODULES what
its libraries' modules hold. What is not listed can be imported and is refused where it is called.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

__all__ = ["LIBRARIES", "after_import", "contents", "is_module"]

LIBRARIES: dict[str, str | None] = {
    "flash_attn": "attention",
    "flash_attn_interface": "attention",
    "xformers": "attention",
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
"""The library's name -> the module here that has its contents; None: it is imported, and refused where it is called."""


def is_module(name: str) -> bool:
    """Whether a stand-in has contents for *name* or for a module within it."""
    held = _modules(name)
    return any(module == name or module.startswith(f"{name}.") for module in held)


def after_import(module: ModuleType) -> None:
    """Give DeepSpeed's builders the extensions that they would compile with nvcc."""
    if module.__name__.endswith("op_builder.builder") and hasattr(module, "OpBuilder"):
        module.OpBuilder._loaded_ops |= importlib.import_module(f"{__name__}.apex").DEEPSPEED


def contents(module: str) -> dict[str, Any]:
    """Return the content of *module* of one of these libraries."""
    return _modules(module).get(module, {})


def _modules(module: str) -> dict[str, dict[str, Any]]:
    """The contents of all modules that stand beside *module* in one of the files here."""
    name = LIBRARIES[module.partition(".")[0]]
    if name is None:
        return {}
    held: dict[str, dict[str, Any]] = importlib.import_module(f"{__name__}.{name}").MODULES
    return held
