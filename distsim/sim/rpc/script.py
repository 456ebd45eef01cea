"""TorchScript functions as targets. All ranks live in one process and share its compilation unit, so that a function is
found by its name there. One that takes a reference or makes calls itself would ask torch's C++ agent, of which there is
none: its Python text runs instead."""

from __future__ import annotations

from typing import Any

import torch

from distsim.errors import NotSimulated
from distsim.sim.isolation.process import current_task
from distsim.sim.rpc.rref import SimRRef
from distsim.sim.rpc.state import rpc_here
from distsim.torch_compat.rpc import JIT_INTERNAL, PYTHON_CU, QUALIFIED_NAME, SCRIPT, SCRIPT_IMPL

__all__ = ["call_script", "qualified_name", "run_script", "script"]

_jit_internal = JIT_INTERNAL.get()
_python_cu = PYTHON_CU.get()
_script = SCRIPT.get()

_real_name = QUALIFIED_NAME.get()
_real_script = SCRIPT_IMPL.get()
_functions: dict[str, Any] = {}
"""By qualified name: TorchScript functions whose Python text is known."""


def qualified_name(obj: Any, *args: Any, **kwargs: Any) -> Any:
    """torch's own; the function is remembered, for its text."""
    name = _real_name(obj, *args, **kwargs)
    if isinstance(obj, torch.jit.ScriptFunction):
        _functions[name] = obj
    return name


def script(obj: Any, optimize: Any = None, _frames_up: int = 0, *args: Any, **kwargs: Any) -> Any:
    """What `torch.jit.script` calls; but of a functional optimizer and a remote module, which compiled would ask C++,
    the text runs."""
    if current_task() is not None and any(kind.__name__ in _AS_TEXT for kind in type(obj).__mro__):
        return obj
    return _real_script(obj, optimize, _frames_up + 1, *args, **kwargs)


_AS_TEXT = frozenset({"_ScriptLocalOptimizer", "_RemoteModule"})
_real_call = torch.jit.ScriptFunction.__call__
_CALLS = ("rpc_sync", "rpc_async", "rpc_remote", "RRef", "get_gradients", "dist_backward", "aten::backward")
_makes_calls: dict[str, bool] = {}
"""By qualified name: whether a TorchScript function asks RPC or distributed autograd for something."""


def call_script(self: Any, *args: Any, **kwargs: Any) -> Any:
    """A TorchScript function is called in a rank: as text where it would ask C++ for RPC."""
    text = getattr(self, "_torchdynamo_inline", None)
    if text is None or current_task() is None or rpc_here().agent is None:
        return _real_call(self, *args, **kwargs)
    name = self.qualified_name
    asks = _makes_calls.get(name)
    if asks is None:
        asks = _makes_calls[name] = any(word in str(self.inlined_graph) for word in _CALLS)
    return text(*args, **kwargs) if asks or _has_reference((args, kwargs)) else _real_call(self, *args, **kwargs)


def run_script(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the TorchScript function *name*."""
    known = _functions.get(name)
    if known is None and _has_reference((args, kwargs)):
        raise NotSimulated(f"the TorchScript function {name} on an RRef", "call the Python function instead")
    function = known if known is not None else _python_cu.find_function(name)
    return function(*args, **kwargs)


def _has_reference(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(_has_reference(item) for item in value)
    if isinstance(value, dict):
        return any(_has_reference(item) for item in value.values())
    return isinstance(value, SimRRef)
