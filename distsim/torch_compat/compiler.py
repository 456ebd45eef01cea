"""torch.compile: its frame evaluator and its guards on tensors."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType
from typing import Any

from distsim.torch_compat.names import FEATURE, OPTIONAL, TorchName

DISABLED = "_torchdynamo_disable"
"""The mark of a function that torch.compile is to call and not to trace (torch.compiler.disable loads all of it)."""

EVAL_FRAME = TorchName("torch._C._dynamo.eval_frame", "torch.compile does not trace the guard", FEATURE)
TENSOR_GUARDS = TorchName("torch._C._dynamo.guards.TensorGuards", "the quick comparison of tensors", OPTIONAL)

HAS_TRITON_PACKAGE = TorchName("torch.utils._triton.has_triton_package", "a stand-in for Triton", OPTIONAL)
MICRO_PIPELINE_TP = TorchName(
    "torch._inductor.config._micro_pipeline_tp", "the note that async TP of compiled code is not simulated", OPTIONAL
)
OPTIMIZED_MODULE = TorchName("torch._dynamo.eval_frame.OptimizedModule", "torch.compile of a module", FEATURE)
HAS_ANY_GLOBAL_HOOK = TorchName(
    "torch.nn.modules.module._has_any_global_hook", "the compiler's warning of hooks", OPTIONAL, since="2.8"
)
WARN_ONCE = TorchName("torch.nn.attention.flex_attention._warn_once", "flex_attention's warning", OPTIONAL, since="2.8")
GET_BUILTIN_TABLE = TorchName(
    "torch.jit._builtins._get_builtin_table", "TorchScript's names of patched functions", OPTIONAL
)
SET_IS_IN_MODE_WITHOUT_IGNORE_COMPILE_INTERNALS = TorchName(
    "torch.utils._python_dispatch.set_is_in_mode_without_ignore_compile_internals",
    "Dynamo's guard on dispatch modes",
    OPTIONAL,
    since="2.12",
)


def scripted_as(original: Callable[..., Any], wrapper: Callable[..., Any]) -> Callable[..., Any]:
    """Mark *wrapper* so that torch.jit.script compiles *original* in its place, as for torch.jit.script_if_tracing."""
    vars(wrapper).update({"__script_if_tracing_wrapper": True, "__original_fn": original})
    return wrapper


def has_hooks_of_the_program() -> bool:
    """Return whether there are hooks on all modules besides ours; torch warns about any when a compiled module is
    called.
    """
    modules: Any = sys.modules["torch.nn.modules.module"]
    hooks = [
        hook
        for name, known in vars(modules).items()
        if name.startswith("_global_") and name.endswith("_hooks")
        for hook in known.values()
    ]
    owners = [getattr(hook, "__self__", hook) for hook in hooks]
    return any(not str(getattr(owner, "__module__", "")).startswith("distsim.") for owner in owners)


def leaves_code() -> Callable[[CodeType], None] | None:
    """Return a function that keeps torch.compile from tracing a code object; None in a release that has no such way."""
    eval_frame: Any = EVAL_FRAME.get(None)
    if (skip_code := getattr(eval_frame, "skip_code", None)) is not None:  # up to torch 2.6
        return skip_code  # type: ignore[no-any-return]
    action, strategy = getattr(eval_frame, "_FrameAction", None), getattr(eval_frame, "_FrameExecStrategy", None)
    tell = getattr(eval_frame, "set_code_exec_strategy", None)
    if action is None or strategy is None or tell is None:
        EVAL_FRAME.leave_out()
        return None
    skip = strategy(action.SKIP, action.SKIP)
    return lambda code: tell(code, skip)
