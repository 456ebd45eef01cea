"""Private names of torch.distributed.rpc with which workers start, make calls and serve them."""

from __future__ import annotations

from distsim.torch_compat.names import FEATURE, OPTIONAL, SIM, TorchName

ASYNC_EXECUTION = "_wrapped_async_rpc_function"
"""The attribute that rpc.functions.async_execution sets on a function."""
LOCAL_INVOKE = "_local_invoke"
"""Beginning of the names of functions that call a method of an RRef's value at its owner."""
API = "torch.distributed.rpc.api."


INIT = TorchName("torch.distributed.rpc.init_rpc", "remote calls", FEATURE)
SEND_FUNCTION = TorchName(API + "_invoke_rpc_python_udf", "the short path of a remote call", OPTIONAL)
PICKLER = TorchName(API + "_default_pickler", "the short path of a remote call", OPTIONAL)
RREF_FUTURE = TorchName("torch.distributed.rpc.PyRRef._get_future", "the end of a call of rpc.remote")
INIT_BACKEND = TorchName("torch.distributed.rpc._init_rpc_backend", "remote calls", FEATURE)
INIT_STATES = TorchName(API + "_init_rpc_states", "remote calls", FEATURE | SIM)
CURRENT_AGENT = TorchName(API + "_get_current_rpc_agent", "remote calls", FEATURE | SIM)
RUN_FUNCTION = TorchName(
    "torch.distributed.rpc.internal._run_function", "the calls that a worker serves", FEATURE | SIM
)
FIND_BUILTIN = TorchName("torch.jit._builtins._find_builtin", "the short path of a remote call", OPTIONAL)

DISTRIBUTED_RPC = TorchName("torch._C._distributed_rpc", "remote calls", SIM)
DISTRIBUTED_AUTOGRAD = TorchName("torch._C._distributed_autograd", "distributed autograd", SIM)
JIT_RESOLVE_PACKET = TorchName("torch._C._jit_resolve_packet", "remote calls of operators", SIM)
JIT_GET_OPERATION = TorchName("torch._C._jit_get_operation", "remote calls of operators", SIM)
INIT_PROCESS_GROUP = TorchName("torch.distributed.rpc.backend_registry._init_process_group", "remote calls", SIM)
TENSORPIPE_EXCHANGE_AND_CHECK_ALL_DEVICE_MAPS = TorchName(
    "torch.distributed.rpc.backend_registry._tensorpipe_exchange_and_check_all_device_maps", "remote calls", SIM
)
VALIDATE_DEVICE_MAPS = TorchName("torch.distributed.rpc.backend_registry._validate_device_maps", "remote calls", SIM)
CREATE_REVERSE_MAPPING = TorchName(
    "torch.distributed.rpc.backend_registry._create_reverse_mapping", "remote calls", SIM
)
CREATE_DEVICE_LIST = TorchName("torch.distributed.rpc.backend_registry._create_device_list", "remote calls", SIM)
ENABLE_RPC_PROFILER = TorchName("torch.distributed.rpc.api._enable_rpc_profiler", "profiles of remote calls", SIM)
WAIT_ALL_WORKERS = TorchName("torch.distributed.rpc.api._wait_all_workers", "remote calls", SIM)
FINALIZE_SHUTDOWN = TorchName("torch.distributed.rpc.api._finalize_shutdown", "remote calls", SIM)
RREF_TYPEOF_ON_OWNER = TorchName("torch.distributed.rpc.api._rref_typeof_on_owner", "remote references", SIM)
RREF_TYPEOF_ON_USER = TorchName("torch.distributed.rpc.api._rref_typeof_on_user", "remote references", SIM)
HANDLE_EXCEPTION = TorchName("torch.distributed.rpc.internal._handle_exception", "exceptions of remote calls", SIM)
SCRIPT = TorchName("torch.jit._script", "remote calls of TorchScript", SIM)
SCRIPT_IMPL = TorchName("torch.jit._script._script_impl", "remote calls of TorchScript", SIM)
PYTHON_CU = TorchName("torch.jit._state._python_cu", "remote calls of TorchScript", SIM)
JIT_INTERNAL = TorchName("torch._jit_internal", "remote calls of TorchScript", SIM)
QUALIFIED_NAME = TorchName("torch._jit_internal._qualified_name", "remote calls of TorchScript", SIM)
ALL_GATHER_DICT_LOCK = TorchName("torch.distributed.rpc.api._all_gather_dict_lock", "meetings of remote workers", SIM)
INIT_COUNTER_LOCK = TorchName("torch.distributed.rpc._init_counter_lock", "several init_rpc in a row", SIM)
