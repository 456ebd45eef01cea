"""Process-wide state of torch that each simulated rank needs for itself: C++ flags, and variables of modules.

Every rank is a thread of one process, so all ranks would share what torch keeps in a module's dictionary.
tests/sim/test_torch_walk.py searches torch, and fails if a release adds a variable that is neither listed here nor
known to be harmless.
"""

from __future__ import annotations

from distsim.torch_compat.names import FEATURE, OPTIONAL, SIM, TorchName

SET_DETERMINISTIC_ALGORITHMS = TorchName(
    "torch._C._set_deterministic_algorithms", "torch.use_deterministic_algorithms", SIM
)
SET_DEFAULT_DTYPE = TorchName(
    "torch._C._set_default_dtype", "torch.set_default_dtype", SIM, public="torch.set_default_dtype"
)
SET_FP32_PRECISION_SETTER = TorchName("torch._C._set_fp32_precision_setter", "precision of products", OPTIONAL)
GET_FP32_PRECISION_GETTER = TorchName("torch._C._get_fp32_precision_getter", "precision of products", OPTIONAL)
GET_CUDNN_ALLOW_TF32 = TorchName("torch._C._get_cudnn_allow_tf32", "precision of products", SIM)
SET_FLOAT32_MATMUL_PRECISION = TorchName("torch._C._set_float32_matmul_precision", "precision of products", SIM)
SET_CUDNN_ALLOW_TF32 = TorchName("torch._C._set_cudnn_allow_tf32", "precision of products", SIM)
LIBRARY = TorchName("torch._library", "operators that each rank defines", SIM)
DESTROY_LIBRARY = TorchName("torch.library.Library._destroy", "operators that each rank defines", SIM)
PATCH_STEP_FUNCTION = TorchName("torch.optim.Optimizer._patch_step_function", "hooks of an optimizer's steps", FEATURE)
LOCAL_TENSOR = TorchName(
    "torch.distributed.tensor.DTensor._local_tensor",
    "the part of a DTensor that a rank holds, for silent checks",
    FEATURE,
    public="torch.distributed.tensor.DTensor.to_local, which is an operator",
)
VERSION = TorchName("torch.Tensor._version", "writes to a parameter that FSDP frees, for silent checks", FEATURE)
NOT_IN_CHECKPOINTS = TorchName(
    "torch.nn.Module._non_persistent_buffers_set", "buffers that no checkpoint has, for silent checks", FEATURE
)
VALIDATE_GLOBAL_PLAN = TorchName(
    "torch.distributed.checkpoint.default_planner._validate_global_plan", "checkpoints of equal ranks", FEATURE
)

FLAG_PAIRS = (
    ("_get_autograd_fallback_mode", "_set_autograd_fallback_mode"),
    ("_get_backcompat_broadcast_warn", "_set_backcompat_broadcast_warn"),
    ("_get_backcompat_keepdim_warn", "_set_backcompat_keepdim_warn"),
    ("_get_blas_preferred_backend", "_set_blas_preferred_backend"),
    ("_check_sparse_tensor_invariants", "_set_check_sparse_tensor_invariants"),
    ("_get_cpu_allow_fp16_reduced_precision_reduction", "_set_cpu_allow_fp16_reduced_precision_reduction"),
    ("_get_cublas_allow_fp16_accumulation", "_set_cublas_allow_fp16_accumulation"),
    ("_get_cudnn_benchmark", "_set_cudnn_benchmark"),
    ("_get_cudnn_deterministic", "_set_cudnn_deterministic"),
    ("_get_cudnn_enabled", "_set_cudnn_enabled"),
    ("_get_deterministic_fill_uninitialized_memory", "_set_deterministic_fill_uninitialized_memory"),
    ("_get_dtensor_allow_implicit_replication", "_set_dtensor_allow_implicit_replication"),
    ("_get_linalg_preferred_backend", "_set_linalg_preferred_backend"),
    ("_get_math_sdp_allow_fp16_bf16_reduction", "_set_math_sdp_allow_fp16_bf16_reduction"),
    ("_get_mkldnn_deterministic", "_set_mkldnn_deterministic"),
    ("_get_mkldnn_enabled", "_set_mkldnn_enabled"),
    ("_get_nnpack_enabled", "_set_nnpack_enabled"),
    ("_get_qengine", "_set_qengine"),
    ("_get_sdp_priority_order", "_set_sdp_priority_order"),
    ("_get_cudnn_sdp_enabled", "_set_sdp_use_cudnn"),
    ("_get_flash_sdp_enabled", "_set_sdp_use_flash"),
    ("_get_math_sdp_enabled", "_set_sdp_use_math"),
    ("_get_mem_efficient_sdp_enabled", "_set_sdp_use_mem_efficient"),
    ("_get_overrideable_sdp_enabled", "_set_sdp_use_overrideable"),
    ("_get_warnAlways", "_set_warnAlways"),
)
"""Getters and setters of flags in torch._C: bools, numbers and lists.

Not here: what torch keeps for each thread (autocast, gradient modes), and what only a GPU or the old JIT reads.
"""
FLAGS_IN_C = {
    name: TorchName(f"torch._C.{name}", "flags of torch that each rank has for itself", OPTIONAL)
    for pair in FLAG_PAIRS
    for name in pair
}
SET_CUBLAS_ALLOW_TF32 = TorchName("torch._C._set_cublas_allow_tf32", "precision of products", OPTIONAL)

_CHECKPOINTS = "torch.distributed.checkpoint."
WRITE_ITEM = TorchName(_CHECKPOINTS + "filesystem._write_item", "the time that a checkpoint takes")
CREATE_GLOBAL_PLAN = TorchName(
    _CHECKPOINTS + "default_planner.DefaultSavePlanner._create_global_plan", "checkpoints of equal ranks"
)
SAVE_STATE_DICT = TorchName(_CHECKPOINTS + "state_dict_saver._save_state_dict", "the time that a checkpoint takes")
_EXECUTOR = "state_dict_saver._{}BasedAsyncCheckpointExecutor"
PROCESS_EXECUTOR, THREAD_EXECUTOR = (
    TorchName(_CHECKPOINTS + _EXECUTOR.format(kind), "checkpoints that another process writes", OPTIONAL)
    for kind in ("Process", "Thread")
)
LOAD_STATE_DICT = TorchName(_CHECKPOINTS + "state_dict_loader._load_state_dict", "the time that a checkpoint takes")

REBOUND: dict[str, tuple[str, ...]] = {
    "torch.__future__": ("_overwrite_module_params_on_conversion", "_swap_module_params_on_conversion"),
    "torch._weights_only_unpickler": ("_marked_safe_globals_set",),
    "torch.autograd.forward_ad": ("_current_level",),
    "torch.autograd.graph": ("_allow_mutation_on_saved_tensors_enabled",),
    "torch.backends": ("__allow_nonbracketed_mutation_flag",),
    "torch.backends.mha": ("_is_fastpath_enabled",),
    "torch.backends.opt_einsum": ("enabled", "strategy"),
    "torch.compiler": ("_is_compiling_flag", "_is_non_strict_tracing_flag"),
    "torch.cpu": ("_current_stream",),
    "torch.distributed._local_tensor": ("_LOCAL_RUNNER_MODE", "_PROCESS_MODE"),
    "torch.distributed._shard.api": ("_CURRENT_PROCESS_GROUP",),
    "torch.distributed._shard.sharded_tensor.api": ("_sharded_tensor_current_id",),
    "torch.distributed._symmetric_memory": ("_is_test_mode", "_mocked_group_names", "_use_implicit_mempool"),
    "torch.distributed.checkpoint._async_process_executor": ("_CHECKPOINT_PROCESS",),
    "torch.distributed.distributed_c10d": ("_backend", "_default_pg_init_method", "_world"),
    "torch.distributed.fsdp._fsdp_extensions": ("_extensions",),
    "torch.distributed.fsdp._fully_shard._fully_shard": ("_enable_fsdp_module_new_init",),
    "torch.distributed.rpc": ("_init_counter",),
    "torch.distributed.rpc.api": ("_ALL_WORKER_NAMES", "_default_pickler", "_ignore_rref_leak"),
    "torch.distributed.rpc.backend_registry": ("BackendType",),
    "torch.distributed.tensor._random": ("_rng_tracker",),
    "torch.distributed.tensor._redistribute": (
        "_DISABLE_REDISTRIBUTE_TRANSFORM_OPTIMIZATION",
        "_FORCE_MIN_COST_REDISTRIBUTION_PLAN",
    ),
    "torch.distributed.tensor.experimental._context_parallel._attention": (
        "_compiled_create_block_mask",
        "_dispatch_mode",
    ),
    "torch.distributed.tensor.experimental._context_parallel._sharding_rules": (
        "_cp_strategy_contexts",
        "_original_strategies",
    ),
    "torch.hub": ("_hub_dir",),
    "torch.multiprocessing": ("_sharing_strategy",),
    "torch.nn.attention._registry": ("_FLASH_ATTENTION_ACTIVE",),
    "torch.nn.modules.module": ("_global_is_full_backward_hook",),
    "torch.nn.parallel._functions": ("_streams",),
    "torch.nn.utils.parametrize": ("_cache", "_cache_enabled"),
    "torch.storage": ("_always_warn_typed_storage_removal",),
    "torch.utils._debug_mode._mode": ("_ACTIVE_DEBUG_MODE_COUNT",),
    "torch.utils._device": ("CURRENT_DEVICE",),
    "torch.utils.checkpoint": ("_checkpoint_debug_enabled", "_enable_checkpoint_early_stop"),
    "torch.utils.data._utils.worker": ("_worker_info",),
}
"""Module -> names that torch's own functions bind anew (`global name`)."""

CONTENTS: dict[str, tuple[str, ...]] = {
    "torch.autograd.profiler": ("KinetoStepTracker._step_dict",),
    "torch.distributed": ("_breakpoint_cache",),
    "torch.distributed._dist2": ("_BACKENDS",),
    "torch.distributed._shard.sharded_tensor.api": ("_sharded_tensor_map",),
    "torch.distributed._shard.sharding_spec.api": ("_CUSTOM_SHARDING_SPEC_OPS",),
    "torch.distributed._symmetric_memory": (
        "_backend_streams",
        "_group_name_to_store",
        "_group_name_to_workspace_tensor",
    ),
    "torch.distributed.algorithms._optimizer_overlap.optimizer_overlap": ("_registered_overlapped_optims",),
    "torch.distributed.checkpoint._experimental.barriers": ("BARRIER_REGISTRY",),
    "torch.distributed.checkpoint.planner": (
        "SavePlanner._cached_all_plans",
        "SavePlanner._cached_final_save_plan",
        "SavePlanner._cached_global_plan",
        "SavePlanner._cached_metadata",
        "SavePlanner._cached_save_plan",
    ),
    "torch.distributed.distributed_c10d": (
        "Backend._plugins",
        "Backend.backend_capability",
        "Backend.backend_list",
        "Backend.backend_type_map",
        "Backend.default_device_backend_map",
    ),
    "torch.distributed.fsdp._debug_utils": ("SimpleProfiler.profiling", "SimpleProfiler.results"),
    "torch.distributed.optim.utils": ("functional_optim_map",),
    "torch.distributed.rendezvous": ("_rendezvous_handlers",),
    "torch.distributed.rpc.api": ("_all_gather_sequence_id", "_all_gather_sequence_id_to_states"),
    "torch.distributed.rpc.internal": ("_internal_rpc_pickler._class_reducer_dict",),
    "torch.distributed.tensor._api": (
        "DTensor._op_dispatcher._custom_op_handlers",
        "DTensor._op_dispatcher._random_ops",
        "DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs",
        "DTensor._op_dispatcher.sharding_propagator.op_to_rules",
        "DTensor._op_dispatcher.sharding_propagator.op_to_schema_info",
    ),
    "torch.distributed.tensor.experimental._context_parallel._attention": ("_cp_options", "_replaced_functions"),
    "torch.distributed.tensor.experimental._context_parallel._sharding_rules": (
        "_cp_strategy_contexts",
        "_original_strategies",
    ),
    "torch.nn.modules.module": (
        "_global_backward_hooks",
        "_global_backward_pre_hooks",
        "_global_buffer_registration_hooks",
        "_global_forward_hooks",
        "_global_forward_hooks_always_called",
        "_global_forward_hooks_with_kwargs",
        "_global_forward_pre_hooks",
        "_global_module_registration_hooks",
        "_global_parameter_registration_hooks",
    ),
    "torch.optim.optimizer": ("_global_optimizer_post_hooks", "_global_optimizer_pre_hooks"),
    "torch.serialization": ("_package_registry",),
    "torch.utils._pytree": ("CONSTANT_NODES",),
    "torch.utils._stats": ("simple_call_counter",),
    "torch.utils.flop_counter": ("flop_registry",),
}
"""Module -> containers (or plain objects) that are changed in place."""

GROWING: dict[str, tuple[str, ...]] = {
    "torch.utils._pytree": ("SERIALIZED_TYPE_TO_PYTHON_TYPE", "SUPPORTED_NODES", "SUPPORTED_SERIALIZED_TYPES"),
}
"""Containers in which no key ever gets another value (torch raises), so that only their sizes are compared."""

RANK_KEYED: tuple[tuple[str, str], ...] = (
    ("torch.distributed.tensor._redistribute", "_gen_transform_infos"),
    ("torch.distributed.tensor._collective_utils", "MeshTopoInfo.build_from_mesh"),
    ("torch.distributed.tensor._sharding_prop", "ShardingPropagator._propagate_tensor_meta_cached"),
    ("torch.distributed.tensor._redistribute", "_planner_cache"),
    ("torch.distributed.tensor._redistribute", "_warned_flatten_issues"),
)
"""Caches by device mesh. What they hold depends on the rank's coordinate, and a mesh of one rank is
never equal to another's (`meshes.mesh_patches`)."""

MODULES_OF_CLASSES = (
    "torch._tensor",
    "torch.amp",
    "torch.autograd",
    "torch.distributed",
    "torch.distributions",
    "torch.nn",
    "torch.optim",
    "torch.profiler",
    "torch.utils.checkpoint",
    "torch.utils.data",
)
"""Packages whose classes a program patches (`nn.Linear.forward = f`): each rank sees its own."""

CLASSES_THAT_TORCH_ASSIGNS = frozenset({"DistributedDataParallel"})
"""Names of classes that torch assigns an attribute of in each step (`_active_ddp_module`), with a guard each."""

_SINCE_2_12 = frozenset(
    {
        "torch.compiler._is_non_strict_tracing_flag",
        "torch.distributed._dist2._BACKENDS",
        "torch.distributed._local_tensor._LOCAL_RUNNER_MODE",
        "torch.distributed._local_tensor._PROCESS_MODE",
        "torch.distributed._symmetric_memory._mocked_group_names",
        "torch.distributed._symmetric_memory._use_implicit_mempool",
        "torch.distributed.checkpoint._async_process_executor._CHECKPOINT_PROCESS",
        "torch.distributed.checkpoint._experimental.barriers.BARRIER_REGISTRY",
        "torch.distributed.checkpoint.planner.SavePlanner._cached_all_plans",
        "torch.distributed.checkpoint.planner.SavePlanner._cached_final_save_plan",
        "torch.distributed.checkpoint.planner.SavePlanner._cached_global_plan",
        "torch.distributed.checkpoint.planner.SavePlanner._cached_metadata",
        "torch.distributed.checkpoint.planner.SavePlanner._cached_save_plan",
        "torch.distributed.fsdp._fully_shard._fully_shard._enable_fsdp_module_new_init",
        "torch.distributed.tensor._redistribute._DISABLE_REDISTRIBUTE_TRANSFORM_OPTIMIZATION",
        "torch.distributed.tensor._redistribute._FORCE_MIN_COST_REDISTRIBUTION_PLAN",
        "torch.distributed.tensor.experimental._context_parallel._attention._compiled_create_block_mask",
        "torch.distributed.tensor.experimental._context_parallel._attention._cp_options",
        "torch.distributed.tensor.experimental._context_parallel._attention._dispatch_mode",
        "torch.distributed.tensor.experimental._context_parallel._attention._replaced_functions",
        "torch.distributed.tensor.experimental._context_parallel._sharding_rules._cp_strategy_contexts",
        "torch.distributed.tensor.experimental._context_parallel._sharding_rules._original_strategies",
        "torch.nn.attention._registry._FLASH_ATTENTION_ACTIVE",
        "torch.utils._debug_mode._mode._ACTIVE_DEBUG_MODE_COUNT",
        "torch.utils._pytree.CONSTANT_NODES",
    }
)
_UNTIL = {"torch.distributed._dist2._BACKENDS": "2.13"}
NAMES = {
    path: TorchName(
        path, "state of each rank", OPTIONAL, since="2.12" if path in _SINCE_2_12 else "2.6", until=_UNTIL.get(path)
    )
    for places in (REBOUND, CONTENTS, GROWING)
    for module, names in places.items()
    for path in (f"{module}.{name}" for name in names)
}
"""Names of all these entries; an entry that a release of torch lacks is empty there."""
LOADER_ITERATOR = TorchName("torch.utils.data.dataloader._SingleProcessDataLoaderIter", "a data loader's workers", SIM)
