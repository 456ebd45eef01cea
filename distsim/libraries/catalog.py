"""Table of the GPU libraries: how each is found in a simulation, and how pip installs its Python without CUDA."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from distsim.errors import UsageError


@dataclass(frozen=True)
class Library:
    """How a library is found in a simulation."""

    functions: str = ""
    """Module here with replacements of its functions, made of torch's operators; empty: all are refused when called."""
    install: str = ""
    """Command that installs its own Python, which then runs as it is; empty: it cannot be had without CUDA."""
    instead: str = ""
    """What is there instead of the functions, for the report; empty: replacements made of torch's operators."""
    compiled: bool = False
    """Whether it is the compiled extension of a library: it is there for that library, on whatever machine."""


def _unbuilt(variables: str, package: str) -> str:
    """Return the command that installs a source package whose setup would compile CUDA."""
    flags = f"{variables}_FORCE_BUILD=TRUE {variables}_SKIP_CUDA_BUILD=TRUE"
    return f"{flags} pip install --no-build-isolation --no-deps {package}"


LIBRARIES = {
    "flash_attn": Library("flash_attn", _unbuilt("FLASH_ATTENTION", "flash-attn")),
    "flash_attn_interface": Library("flash_attn"),
    "xformers": Library("xformers"),
    "rotary_emb": Library("compiled"),
    "xentropy_cuda_lib": Library("compiled"),
    "dropout_layer_norm": Library("compiled"),
    "apex": Library("apex"),
    "transformer_engine": Library("transformer_engine"),
    "liger_kernel": Library(install="pip install --no-deps liger-kernel"),
    "bitsandbytes": Library(install="pip install --no-deps bitsandbytes"),
    "causal_conv1d": Library(install=_unbuilt("CAUSAL_CONV1D", "causal-conv1d")),
    "mamba_ssm": Library(install=_unbuilt("MAMBA", "mamba-ssm")),
    "grouped_gemm": Library("experts"),
    "megablocks": Library(install="pip install --no-build-isolation --no-deps megablocks stanford-stk"),
    "deep_ep": Library("experts"),
    "amp_C": Library("apex"),
    "fused_weight_gradient_mlp_cuda": Library("apex"),
    "scaled_softmax_cuda": Library("apex"),
    "scaled_masked_softmax_cuda": Library("apex"),
    "scaled_upper_triang_masked_softmax_cuda": Library("apex"),
    "fused_layer_norm_cuda": Library(),
    "fbgemm_gpu": Library(),
    "flash_attn_2_cuda": Library("compiled", compiled=True),
    "causal_conv1d_cuda": Library("compiled", compiled=True),
    "selective_scan_cuda": Library("compiled", compiled=True),
    "megablocks_ops": Library("compiled", compiled=True),
    **dict.fromkeys(
        ("torchft._torchft", "torchft.otel"),
        Library("torchft", compiled=True, instead="torchft's lighthouse, managers and checkpoints are simulated"),
    ),
    "bitsandbytes.cextension": Library(compiled=True),
}


_MODULES_OF_APEX = {name for name, library in LIBRARIES.items() if library.functions == "apex"}


def library_of(module: str) -> Library | None:
    """Return the library of a module, or of an attribute in it; None if it is not one of the table."""
    first, _, rest = module.partition(".")
    return LIBRARIES.get(f"{first}.{rest.partition('.')[0]}") or LIBRARIES.get(first)


def check_names(text: str) -> frozenset[str]:
    """Return the libraries that the option `gpu_libraries` names, and the extensions that apex installs beside itself.

    Raises:
        UsageError: One of them is not in the table.
    """
    known = [name for name, library in LIBRARIES.items() if not library.compiled]
    names = [name.strip().replace("-", "_") for name in text.split(",")] if text != "none" else []
    for name in names:
        if name not in known:
            raise UsageError(f"--gpu-libraries {name}: expected none, or some of {', '.join(known)}")
    return frozenset(names).union(*(_MODULES_OF_APEX for name in names if name == "apex"))


def is_module(name: str) -> bool:
    """Return whether there are replacements for *name* or for a module within it."""
    return any(module == name or module.startswith(f"{name}.") for module in _modules(name))


def contents(module: str) -> dict[str, Any]:
    """Return the replacements for the module *module* of a library."""
    return _modules(module).get(module, {})


def _modules(module: str) -> dict[str, dict[str, Any]]:
    """Return the replacements in the same file as those for *module*, by module."""
    library = library_of(module)
    if library is None or not library.functions:
        return {}
    modules: dict[str, dict[str, Any]] = importlib.import_module(f"distsim.libraries.{library.functions}").MODULES
    return modules
