"""Sending a request from the running thread, with its tensors' history where an autograd context is open."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from distsim.debug.records import CallRecord, CallWait
from distsim.errors import NotSimulated
from distsim.sim.isolation.process import require_task
from distsim.sim.rpc.agent.futures import Reply
from distsim.sim.rpc.agent.message import Failed, Message, copied
from distsim.sim.rpc.agent.profiling import begin_call, reply_came
from distsim.sim.rpc.autograd.functions import attach, received
from distsim.sim.rpc.records import ended
from distsim.sim.rpc.state import agent_here, rpc_here
from distsim.torch_compat.rpc import HANDLE_EXCEPTION

__all__ = ["content", "request", "with_tensors"]

_handle_exception = HANDLE_EXCEPTION.get()

Content = Callable[[Message], Any]


def with_tensors(message: Message, tensors: Sequence[Tensor], to: int, forced: bool) -> Message:
    """*message* with copies of *tensors*, and their history kept if an autograd context is open. *forced*: even where
    no tensor requires a gradient, for the reply may."""
    _refuse_gpus(tensors, to)
    message.wants_grad = [tensor.requires_grad for tensor in tensors]
    attach(rpc_here().autograd, message, tensors, to, forced)
    message.tensors = copied(tensors)
    return message


def _refuse_gpus(tensors: Sequence[Tensor], to: int) -> None:
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return
    agent = agent_here()
    peer = agent.get_worker_info(to).name
    if agent.options.device_maps.get(peer) or agent.reverse_device_maps.get(peer):
        raise NotSimulated(f"a GPU's tensor over RPC (device map to {peer})", "send tensor.cpu(), and .cuda() it there")
    raise RuntimeError(
        "TensorPipe RPC backend only supports CPU tensors by default, please move your tensors to CPU before "
        "sending them over RPC, or call `set_device_map` on `TensorPipeRpcBackendOptions` to explicitly configure "
        "device mapping."
    )


def request(
    to: int,
    message: Message,
    tensors: Sequence[Tensor],
    timeout_s: float,
    what: str,
    read: Content | None = None,
    forced: bool = True,
    record: CallRecord | None = None,
) -> Reply:
    """Send *message* with *tensors* to worker *to*; what *read* makes of the reply is the future's value."""
    agent, process = agent_here(), require_task().process
    agent.get_worker_info(to)
    with_tensors(message, tensors, to, forced)
    if record is not None:
        message.request = record.rank, record.index
    call = begin_call(message)

    def value(raw: Message | Failed) -> Any:
        reply_came(call, raw)
        if isinstance(raw, Failed):
            raise raw.error
        return (read or answer)(raw)

    reply = Reply(process, agent.waits_for(what, to) if record is None else CallWait(record), value)
    reply.add_done_callback(lambda _: ended(record, reply.error))
    agent.send(to, message, reply.settle, timeout_s, reply)
    return reply


def answer(message: Message) -> Any:
    """What the reply to a call holds. An exception comes as torch's future has it, in C++ by then: ValueError and
    TypeError stay what they are, all others become RuntimeErrors that tell their kind."""
    try:
        return content(message)
    except Exception as error:
        kind = next((one for one in (ValueError, TypeError) if isinstance(error, one)), RuntimeError)
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise kind(
            f"{type(error).__name__}: {error}\n\nAt:\n  {frame.filename}({frame.lineno}): {frame.name}\n"
        ) from None


def content(message: Message) -> Any:
    """What a reply holds."""
    from torch.distributed.rpc import internal

    tensors = received(rpc_here().autograd, message)
    value = internal.deserialize(message.payload, tensors) if message.payload else None
    _handle_exception(value)
    return value
