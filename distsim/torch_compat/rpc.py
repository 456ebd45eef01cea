"""torch.distributed.rpc: where a worker begins, calls and serves."""

from __future__ import annotations

from distsim.torch_compat.names import FEATURE, OPTIONAL, SIM, Name

__all__ = ["ASYNC_EXECUTION", "LOCAL_INVOKE"]

ASYNC_EXECUTION = "_wrapped_async_rpc_function"
"""The attribute that rpc.functions.async_execution sets on a function."""
LOCAL_INVOKE = "_local_invoke"
"""How the functions begin that call a method of an RRef's value at its owner."""
API = "torch.distributed.rpc.api."


INIT = Name("torch.distributed.rpc.init_rpc", "remote calls", FEATURE)
SEND_FUNCTION = Name(API + "_invoke_rpc_python_udf", "the short path of a remote call", OPTIONAL)
PICKLER = Name(API + "_default_pickler", "the short path of a remote call", OPTIONAL)
RREF_FUTURE = Name("torch.distributed.rpc.PyRRef._get_future", "the end of a call of rpc.remote")
INIT_BACKEND = Name("torch.distributed.rpc._init_rpc_backend", "remote calls", FEATURE)
INIT_STATES = Name(API + "_init_rpc_states", "remote calls", FEATURE | SIM)
CURRENT_AGENT = Name(API + "_get_current_rpc_agent", "remote calls", FEATURE | SIM)
RUN_FUNCTION = Name("torch.distributed.rpc.internal._run_function", "the calls that a worker serves", FEATURE | SIM)
FIND_BUILTIN = Name("torch.jit._builtins._find_builtin", "the short path of a remote call", OPTIONAL)
