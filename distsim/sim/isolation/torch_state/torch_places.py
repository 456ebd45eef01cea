"""Where torch keeps state for the whole process: the places that each simulated rank has for itself.

Every rank is a thread of one process, so what torch keeps in a module's dictionary would be one for
all. This is the list of what differs by rank; tests/sim/test_torch_walk.py walks torch itself and
fails when a release brings a place that is neither here nor known to be harmless.
"""

from __future__ import annotations

__all__ = ["CONTENTS", "GROWING", "MODULES_OF_CLASSES", "RANK_KEYED", "REBOUND"]

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
    "torch.distributed._symmetric_memory": ("_group_name_to_store", "_group_name_to_workspace_tensor"),
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
"""The same, where nothing is ever exchanged for another under the same key (torch raises): only their
sizes are looked at."""

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
