"""torch.compile: its frame evaluator and its guards on tensors."""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import Any

from distsim.torch_compat.names import FEATURE, OPTIONAL, Name

__all__ = ["DISABLED", "leaves_code"]

DISABLED = "_torchdynamo_disable"
"""The mark of a function that torch.compile is to call and not to trace (torch.compiler.disable loads all of it)."""

EVAL_FRAME = Name("torch._C._dynamo.eval_frame", "torch.compile does not trace the guard", FEATURE)
TENSOR_GUARDS = Name("torch._C._dynamo.guards.TensorGuards", "the quick comparison of tensors", OPTIONAL)


def leaves_code() -> Callable[[CodeType], None] | None:
    """A function that keeps torch.compile from tracing a code object; None in a release that has no such way."""
    eval_frame: Any = EVAL_FRAME.get(None)
    action, strategy = getattr(eval_frame, "_FrameAction", None), getattr(eval_frame, "_FrameExecStrategy", None)
    tell = getattr(eval_frame, "set_code_exec_strategy", None)
    if action is None or strategy is None or tell is None:
        EVAL_FRAME.leave_out()
        return None
    skip = strategy(action.SKIP, action.SKIP)
    return lambda code: tell(code, skip)
