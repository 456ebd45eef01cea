"""The caller's end: what torch's `rpc_sync`, `rpc_async` and `remote` ask of C++."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.distributed.rpc import WorkerInfo, internal

from distsim.sim.isolation.process import require_task
from distsim.sim.rpc.agent.futures import Reply
from distsim.sim.rpc.agent.message import Failed, Message
from distsim.sim.rpc.agent.profiling import begin_call, reply_came
from distsim.sim.rpc.records import called, ended
from distsim.sim.rpc.requests import request, with_tensors
from distsim.sim.rpc.rref import SimRRef
from distsim.sim.rpc.rref_context import Owner, User
from distsim.sim.rpc.state import agent_here, rrefs_here
from distsim.torch_compat.rpc import JIT_RESOLVE_PACKET

__all__ = [
    "invoke_remote_builtin",
    "invoke_remote_python_udf",
    "invoke_remote_torchscript",
    "invoke_rpc_builtin",
    "invoke_rpc_python_udf",
    "invoke_rpc_torchscript",
]

_jit_resolve_packet = JIT_RESOLVE_PACKET.get()


def invoke_rpc_python_udf(
    dst: WorkerInfo, pickled: bytes, tensors: Sequence[Tensor], timeout_s: float, is_async: bool
) -> Reply:
    """`rpc_async` of a Python function."""
    message = Message("PYTHON_CALL", pickled, fields=is_async)
    return request(dst.id, message, tensors, timeout_s, "a call", record=called(agent_here(), dst.id, timeout_s))


def invoke_rpc_builtin(dst: WorkerInfo, op: str, timeout_s: float, *args: Any, **kwargs: Any) -> Reply:
    """`rpc_async` of an operator."""
    pickled, tensors = _operator(op, args, kwargs)
    message = Message("SCRIPT_CALL", pickled, fields=op)
    record = called(agent_here(), dst.id, timeout_s)
    return request(dst.id, message, tensors, timeout_s, f"{op}", forced=False, record=record)


def invoke_rpc_torchscript(
    dst: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], timeout_s: float, is_async: bool
) -> Reply:
    """`rpc_async` of a TorchScript function."""
    pickled, tensors = internal.serialize((args, kwargs))
    message = Message("TORCHSCRIPT_CALL", pickled, fields=(name, is_async))
    to = agent_here().get_worker_info(dst).id
    return request(to, message, tensors, timeout_s, name, record=called(agent_here(), to, timeout_s))


def invoke_remote_python_udf(
    dst: WorkerInfo, pickled: bytes, tensors: Sequence[Tensor], timeout_s: float, is_async: bool
) -> SimRRef[Any]:
    """`remote` of a Python function."""
    return _remote(dst.id, "PYTHON_REMOTE_CALL", pickled, tensors, is_async, timeout_s)


def invoke_remote_builtin(dst: WorkerInfo, op: str, timeout_s: float, *args: Any, **kwargs: Any) -> SimRRef[Any]:
    """`remote` of an operator."""
    pickled, tensors = _operator(op, args, kwargs)
    return _remote(dst.id, "SCRIPT_REMOTE_CALL", pickled, tensors, op, timeout_s, forced=False)


def invoke_remote_torchscript(
    dst: str, name: str, timeout_s: float, is_async: bool, *args: Any, **kwargs: Any
) -> SimRRef[Any]:
    """`remote` of a TorchScript function."""
    pickled, tensors = internal.serialize((args, kwargs))
    to = agent_here().get_worker_info(dst).id
    return _remote(to, "TORCHSCRIPT_REMOTE_CALL", pickled, tensors, (name, is_async), timeout_s)


def _operator(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bytes, list[Tensor]]:
    _jit_resolve_packet(op, *args, **kwargs)  # raises torch's error where no overload takes them
    pickled, tensors = internal.serialize((args, kwargs))
    return pickled, tensors


def _made(reply: Message | Failed) -> None:
    if isinstance(reply, Failed):
        raise reply.error


def _remote(
    to: int, kind: str, pickled: bytes, tensors: Sequence[Tensor], what: Any, timeout_s: float, forced: bool = True
) -> SimRRef[Any]:
    """Ask *to* to make a value, and give the reference to it at once."""
    agent, context = agent_here(), rrefs_here()
    rref: Owner | User
    if to == agent.id:
        rref = Owner(context, context.new_id())
        context.owners[rref.rref_id] = rref
        context.add_fork(rref.rref_id, rref.rref_id)
        ids = rref.rref_id, rref.rref_id
    else:
        rref = context.new_user(to)
        context.add_pending_user(rref)
        ids = rref.rref_id, rref.fork_id
    message = with_tensors(Message(kind, pickled, fields=(what, *ids)), tensors, to, forced)
    record = called(agent, to, timeout_s, (agent.rank_of(ids[0][0]), ids[0][1]))
    if record is not None:
        message.request = record.rank, record.index
    call = begin_call(message)
    created = Reply(require_task().process, agent.waits_for("remote", to), _made)

    def answered(reply: Message | Failed) -> None:
        reply_came(call, reply)
        if isinstance(reply, Failed) and reply.kind:
            rref.timed_out = True
        if isinstance(rref, User):
            context.user_confirmed(rref.fork_id)
        else:
            context.delete_fork(rref.rref_id, rref.rref_id)
        created.settle(reply)
        ended(record, created.error)

    try:
        agent.send(to, message, answered, timeout_s)
    except RuntimeError:
        context.pending_users.pop(ids[1], None)
        raise
    found: SimRRef[Any] = SimRRef.of(rref, of_script="SCRIPT" in kind)
    found._creation = created
    return found
