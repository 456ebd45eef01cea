"""torch.distributed.rpc: where a worker begins, calls and serves."""

from __future__ import annotations

from distsim.torch_compat.names import FEATURE, OPTIONAL, SIM, Name

__all__: list[str] = []

INIT_BACKEND = Name("torch.distributed.rpc._init_rpc_backend", "remote calls", FEATURE)
INIT_STATES = Name("torch.distributed.rpc.api._init_rpc_states", "remote calls", FEATURE | SIM)
CURRENT_AGENT = Name("torch.distributed.rpc.api._get_current_rpc_agent", "remote calls", FEATURE | SIM)
RUN_FUNCTION = Name("torch.distributed.rpc.internal._run_function", "the calls that a worker serves", FEATURE | SIM)
FIND_BUILTIN = Name("torch.jit._builtins._find_builtin", "the short path of a remote call", OPTIONAL)
