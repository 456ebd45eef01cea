"""No place of torch where state is kept for the whole process is unknown to the simulator."""

from __future__ import annotations

import sys

import pytest
import torch
from sim.torch_walk import found

from distsim.torch_compat.names import TorchName
from distsim.torch_compat.state import CONTENTS, GROWING, MODULES_OF_CLASSES, NAMES, RANK_KEYED, REBOUND

HARMLESS = {
    "a pure function of its arguments, or of the machine": """
        torch:get_device_module torch._custom_op.autograd:namedtuple_args_cls torch._guards:*
        torch._jit_internal:can_compile_class torch._sources:make_source_context
        torch._utils:_get_device_module torch._utils_internal:* torch._weights_only_unpickler:_get_allowed_globals
        torch.accelerator:* torch.backends.opt_einsum:is_available torch.backends.python_native:*
        torch.cpu:get_capabilities
        torch.distributed.fsdp._flat_param:_get_dtype_size
        torch.distributed.pipelining.schedules:_get_profiler_function_name
        torch.nn.attention.varlen:_should_use_cudnn torch.overrides:* torch.storage:_new_dtypes
        torch.storage:_dtype_to_storage_type_map torch.storage:_storage_type_to_dtype_map torch.utils._cxx_pytree:*
        torch.utils._device:_device_constructors torch.utils._helion:* torch.utils._import_utils:* torch.utils._pallas:*
        torch.utils._python_dispatch:get_alias_info torch.utils._pytree:treespec_loads torch.utils._triton:*
        torch.distributions.kl:_KL_MEMOIZE
        torch.distributed._tools.runtime_estimator:RuntimeEstimator._no_fallback_kernel
    """,
    "filled where torch or a module of the user's is imported, by objects that are the same or its own": """
        torch:_TritonLibrary.ops_table torch._custom_op.impl:global_registry torch._jit_internal:*
        torch._library._out_variant:* torch._library.custom_ops:* torch._library.opaque_object:*
        torch._library.triton:triton_ops_to_kernels torch._ops:_higher_order_ops torch._ops:cached_ops
        torch._opaque_base:_FakeScriptObject_cls torch.library:* torch.masked.* torch.distributions.kl:_KL_REGISTRY
        torch.distributed._meta_registrations:used_ids torch.distributed.tensor._ops._pointwise_ops:*
        torch.distributed.tensor.debug._op_coverage:graphs
        torch.distributed.device_mesh:_distributed_opaque_types_registered
        torch.nn.attention._registry:_FLASH_ATTENTION_IMPLS torch.nn.utils._expanded_weights.*
        torch.utils._pytree:_cxx_pytree_pending_imports torch.utils.backend_registration:*
        torch.autograd.function:FunctionMeta._backward_cls
    """,
    "by objects that belong to one rank": """
        torch.distributed._composable_state:* torch.distributed.checkpoint.state_dict:_patched_state_dict
        torch.distributed.fsdp._common_utils:* torch.distributed.optim.apply_optimizer_in_backward:*
        torch.storage:_share_memory_map torch.multiprocessing.reductions:shared_cache
        torch.nested._internal.nested_tensor:* torch.utils.data.dataloader:* torch.distributed.rpc:rendezvous_iterator
    """,
    "told once": """
        torch.distributed.fsdp._flat_param:_warn_* torch.nn.attention.flex_attention:_WARNINGS_SHOWN
        torch.profiler.profiler:_WARNINGS_SHOWN torch.random:_fork_rng_warned_already
    """,
    "gone before another rank can run: set and put back around code without collectives": """
        torch._library.fake_impl:global_ctx_getter torch._lobpcg:LOBPCG.call_tracker
        torch._utils:_sparse_tensors_to_validate
        torch.utils._zip:strip_file_dir torch.utils._debug_mode._mode:*
    """,
    "only with an accelerator": """
        torch.backends.cudnn:* torch.backends.cusparselt:* torch.autograd.profiler:_cupti_* torch.nn.attention._fa3:*
        torch.nn.attention._fa4:*
        torch.distributed._symmetric_memory:_symm_mem_pools
    """,
    "ours: replaced or put back by the simulation": """
        torch.autograd.profiler:_is_profiler_enabled torch.distributed.distributed_c10d:_group_count
        torch.utils._python_dispatch:*
    """,
    "a count whose values are only compared": "torch.utils.hooks:RemovableHandle.next_id",
    "of a worker process, and workers run in their rank": """
        torch.utils.data._utils:python_exit_status torch.utils.data._utils.signal_handling:*
    """,
}
"""Why a place need not be swapped -> the places."""


def _harmless(place: str) -> bool:
    return any(
        place.startswith(known[:-1]) if known.endswith("*") else place == known
        for text in HARMLESS.values()
        for known in text.split()
    )


@pytest.mark.soak
@pytest.mark.slow
def test_every_place_is_known() -> None:
    """Each cache, rebound name and changed container is swapped, by mesh, or known to be harmless."""
    swapped = {f"{m}:{n}" for table in (REBOUND, CONTENTS, GROWING) for m, names in table.items() for n in names}
    swapped.update(f"{module}:{name}" for module, name in RANK_KEYED)
    places = found()
    assert len(places) > 200
    unknown = [
        f"{place} ({how})"
        for place, how in places.items()
        if place not in swapped
        and not _harmless(place)
        and not (how == "assigned" and place.startswith(MODULES_OF_CLASSES))  # guarded as classes
    ]
    assert unknown == [], "classify each: torch_places.py if it differs by rank, HARMLESS if not"
    for text in HARMLESS.values():
        for known in text.split():
            assert any(p.startswith(known[:-1]) if known.endswith("*") else p == known for p in places), known


def _is_expected(name: TorchName) -> bool:
    """Whether the entry says that this release has it."""
    since, until, here = (
        tuple(int(part) for part in release.split(".")[:2])
        for release in (name.since, name.until or torch.__version__, torch.__version__)
    )
    return since <= here <= until


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_every_place_exists() -> None:
    """What is swapped by name is there in this release of torch."""
    import importlib

    for table in (REBOUND, CONTENTS, GROWING):
        for module, paths in table.items():
            paths = tuple(path for path in paths if _is_expected(NAMES[f"{module}.{path}"]))
            if paths:
                importlib.import_module(module)
            for path in paths:
                found_here = sys.modules[module]
                found_here = getattr(found_here, "m", found_here)
                for name in path.split("."):
                    assert hasattr(found_here, name), f"{module}:{path}"
                    found_here = getattr(found_here, name)
    for module, path in RANK_KEYED:
        found_here = importlib.import_module(module)
        for name in path.split("."):
            found_here = getattr(found_here, name)
