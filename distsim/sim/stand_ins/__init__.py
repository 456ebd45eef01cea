"""Libraries that a GPU machine has and a laptop lacks, made of torch's own operators, which have a price.

`isolation/modules/own_code.py` imports them where a program cannot do without; each module here lists in MODULES what
its libraries' modules hold. What is not listed can be imported and is refused where it is called.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["LIBRARIES", "contents"]

LIBRARIES: dict[str, str | None] = {
    "flash_attn": "attention",
    "flash_attn_interface": "attention",
    "xformers": "attention",
    "apex": "apex",
    "transformer_engine": None,
    "liger_kernel": None,
    "bitsandbytes": None,
    "causal_conv1d": None,
    "mamba_ssm": None,
    "grouped_gemm": None,
    "megablocks": None,
    "deep_ep": None,
    "fbgemm_gpu": None,
}
"""The library's name -> the module here that has its contents; None: it is imported, and refused where it is called."""


def contents(module: str) -> dict[str, Any]:
    """Return the content of *module* of one of these libraries."""
    name = LIBRARIES[module.partition(".")[0]]
    if name is None:
        return {}
    held: dict[str, dict[str, Any]] = importlib.import_module(f"{__name__}.{name}").MODULES
    return held.get(module, {})
