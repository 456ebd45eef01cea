"""Where a tensor leaves a worker and where it comes: the nodes that lead its gradient back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from distsim.sim.rpc.agent.message import Message
from distsim.sim.rpc.autograd.context import NONE, Container, Context, Send
from distsim.sim.rpc.autograd.engine import came_back, label
from distsim.torch_compat.device import DISABLE_TORCH_DISPATCH

__all__ = ["attach", "received"]

_DisableTorchDispatch = DISABLE_TORCH_DISPATCH.get()


class _Recv(torch.autograd.Function):
    """Makes the tensors that came, and sends their gradients where they came from."""

    @staticmethod
    def forward(ctx: Any, dummy: Tensor, origin: tuple[Context, Message], tensors: list[Tensor]) -> Any:
        ctx.origin = origin
        ctx.set_materialize_grads(False)
        return tuple(tensors)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        context, message = ctx.origin
        known = [
            torch.zeros(meta.shape, dtype=meta.dtype, device=meta.device) if grad is None else grad
            for grad, meta in zip(grads, ctx._input_metadata, strict=True)
        ]
        with label("torch::distributed::autograd::RecvRpcBackward"):
            came_back(context, message, known)
        return None, None, None


_Recv.__name__ = _Recv.__qualname__ = "torch::distributed::autograd::RecvRpc"
_Recv._backward_cls.__name__ = "torch::distributed::autograd::RecvRpcBackward"


def _edge(tensor: Tensor) -> Any:
    with torch.enable_grad(), _DisableTorchDispatch():
        if tensor.layout is torch.strided:
            return get_gradient_edge(tensor)
        token = tensor.clone().grad_fn  # torch's way is a view, which no sparse tensor has
        assert token is not None
        return GradientEdge(*token.next_functions[0], token)


def attach(container: Container, message: Message, tensors: Sequence[Tensor], to: int, forced: bool) -> None:
    """Have *message* say which context it belongs to, and keep where the gradients of its *tensors* go."""
    asks = [tensor for tensor in tensors if tensor.requires_grad]
    if container.current_id == NONE or (not forced and not asks):
        return
    context = container.current()
    message.context_id, message.autograd_id = context.id, container.new_message_id()
    if asks:
        context.sends[message.autograd_id] = Send([_edge(tensor) for tensor in asks])
    context.workers[to] = None


def received(container: Container, message: Message) -> list[Tensor]:
    """The tensors of *message*, with a node behind those that require a gradient."""
    tensors = list(message.tensors)
    asks = [i for i, wanted in enumerate(message.wants_grad) if wanted]
    if message.context_id is None:
        for i in asks:
            tensors[i].requires_grad_()
        return tensors
    context = container.get_or_create(message.context_id)
    if asks:
        with torch.enable_grad(), _DisableTorchDispatch():
            dummy = torch.empty(0, requires_grad=True)
            fresh = _Recv.apply(dummy, (context, message), [tensors[i] for i in asks])
        for i, tensor in zip(asks, fresh, strict=True):
            tensors[i] = tensor
        context.recvs[message.autograd_id] = fresh[0].grad_fn
    return tensors
