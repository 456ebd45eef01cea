"""torch.compile: its frame evaluator and its guards on tensors."""

from __future__ import annotations

from distsim.torch_compat.names import FEATURE, OPTIONAL, Name

__all__: list[str] = []

EVAL_FRAME = Name("torch._C._dynamo.eval_frame", "torch.compile does not trace the guard", FEATURE)
TENSOR_GUARDS = Name("torch._C._dynamo.guards.TensorGuards", "the quick comparison of tensors", OPTIONAL)
