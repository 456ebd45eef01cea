"""The caller's end: `rpc_sync`, `rpc_async`, `remote`, and the RRef that the latter returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, Self, TypeVar

from torch import Tensor
from torch.distributed import autograd
from torch.distributed.rpc import WorkerInfo, api, internal, rref_proxy
from torch.futures import Future

from distsim.remote_calls.simulated.profiling import begin_call, reply_came
from distsim.remote_calls.simulated.requests import called, content, ended, request, with_tensors
from distsim.remote_calls.simulated.state import TIMED_OUT, ForkData, OwnedValue, User, agent_here, rrefs_here, shown
from distsim.remote_calls.simulated.transport import Failed, Reply, RpcMessage
from distsim.sim.isolation.process import require_task
from distsim.torch_compat.rpc import HANDLE_EXCEPTION, JIT_RESOLVE_PACKET, RREF_TYPEOF_ON_OWNER, RREF_TYPEOF_ON_USER

# -- `torch.distributed.rpc.RRef` in a simulated process.

_handle_exception = HANDLE_EXCEPTION.get()

T = TypeVar("T")

arriving: list[Callable[[User], None]] = []
"""Callbacks for references that are being unpickled (serving.py); a list because calls nest."""


class SimPyRRef(Generic[T]):
    """Reference to a value on some worker, which torch has in C++."""

    def __init__(self, value: T, type_hint: Any = None) -> None:
        context = rrefs_here()
        self._rref: OwnedValue | User = OwnedValue(context, context.new_id())
        self._rref.set(value)
        self._type_future: Future[Any] | None = None
        self._creation: Future[Any] | None = None
        self._profiling: Future[Any] | None = None
        self._of_script = False

    @classmethod
    def of(cls, rref: OwnedValue | User, of_script: bool = False) -> Self:
        """Return the reference for *rref*. *of_script* says that an operator or TorchScript function creates its
        value.
        """
        self = cls.__new__(cls)
        self._rref = rref
        self._type_future = self._creation = self._profiling = None
        self._of_script = of_script
        return self

    # -- what it is

    def is_owner(self) -> bool:
        return self._rref.is_owner

    def owner(self) -> WorkerInfo:
        return agent_here().get_worker_info(self._rref.owner)

    def owner_name(self) -> str:
        return str(self.owner().name)

    def confirmed_by_owner(self) -> bool:
        return self._rref.confirmed if isinstance(self._rref, User) else True

    # -- its value

    def to_here(self, timeout: float = -1.0) -> T:
        rref = self._rref
        if isinstance(rref, OwnedValue):
            return self.local_value()
        if rref.timed_out:
            raise RuntimeError(TIMED_OUT)
        if rref.deleted:
            raise RuntimeError(f"{rref} has been deleted. Cannot call to_here() on it after deletion.")
        creation = agent_here().rank_of(rref.rref_id[0]), rref.rref_id[1]
        result: T = request(
            rref.owner,
            RpcMessage("SCRIPT_RREF_FETCH_CALL" if self._of_script else "PYTHON_RREF_FETCH_CALL", fields=rref.rref_id),
            [],
            timeout,
            f"{self._shown()}.to_here()",
            content,
            record=called(agent_here(), rref.owner, timeout, creation, "to_here"),
        ).wait()
        return result

    def local_value(self) -> T:
        rref = self._rref
        if not isinstance(rref, OwnedValue):
            raise RuntimeError(
                f"For {rref}, can't call localValue() on user {_text(agent_here().info)}. "
                f"Call it on owner {_text(self.owner())}"
            )
        value = rref.get()
        _handle_exception(value)
        result: T = value
        return result

    def _shown(self) -> str:
        return "RRef"

    # -- calls on it

    def rpc_sync(self, timeout: float = -1.0) -> Any:
        return rref_proxy.RRefProxy(self, api.rpc_sync, timeout)

    def rpc_async(self, timeout: float = -1.0) -> Any:
        return rref_proxy.RRefProxy(self, api.rpc_async, timeout)

    def remote(self, timeout: float = -1.0) -> Any:
        return rref_proxy.RRefProxy(self, api.remote, timeout)

    def _get_type(self, timeout: float = -1.0, blocking: bool = True) -> Any:
        if self._type_future is None:
            if self.is_owner():
                self._type_future = RREF_TYPEOF_ON_OWNER.get()(self, blocking=False)
            else:
                type_future = RREF_TYPEOF_ON_USER.get()(self, timeout, blocking=False)
                if not blocking:
                    self._type_future = type_future
                else:
                    kind = type_future.wait()
                    self._type_future = Future()
                    self._type_future.set_result(kind)
        assert self._type_future is not None
        return self._type_future.wait() if blocking else self._type_future

    def _get_future(self) -> Future[Any]:
        if self._creation is None:
            raise RuntimeError("RRef has no future")
        return self._creation

    def _get_profiling_future(self) -> Future[Any]:
        if self._profiling is None:
            raise RuntimeError("Profiling future has not been set!")
        return self._profiling

    def _set_profiling_future(self, future: Future[Any]) -> None:
        self._profiling = future

    def backward(self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
        """Run backward from the value, on its owner."""
        if isinstance(self._rref, OwnedValue):
            backward_from(self._rref, dist_autograd_ctx_id, retain_graph)
            return
        if dist_autograd_ctx_id == -1:
            raise RuntimeError("User RRefs require 'dist_autograd_ctx_id' to be specified")
        message = RpcMessage("RREF_BACKWARD_REQ", fields=(self._rref.rref_id, dist_autograd_ctx_id, retain_graph))
        request(self._rref.owner, message, [], -1.0, "RRef.backward()").wait()

    # -- crossing

    def _serialize(self) -> ForkData:
        return self._rref.context.fork(self._rref)

    @staticmethod
    def _deserialize(data: ForkData) -> SimRRef[Any]:
        rref = rrefs_here().arrived(data)
        if isinstance(rref, User) and not rref.confirmed and arriving:
            arriving[-1](rref)
        return SimRRef.of(rref)

    def __reduce__(self) -> Any:
        return self.__getstate__()

    def __getstate__(self) -> Any:
        raise RuntimeError("Can not pickle rref in python pickler, rref can only be pickled when using RPC")

    def __str__(self) -> str:
        rref = self._rref
        if isinstance(rref, OwnedValue):
            return f"OwnerRRef({shown(rref.rref_id)})"
        return f"UserRRef(RRefId = {shown(rref.rref_id)}, ForkId = {shown(rref.fork_id)})"

    __repr__ = object.__repr__


class SimRRef(SimPyRRef[T]):
    """A reference to a value: `RRef(value)` on this worker, what `rpc.remote` gives on another."""


def _text(info: WorkerInfo) -> str:
    return f"WorkerInfo(id={info.id}, name={info.name})"


def backward_from(rref: OwnedValue, context_id: int, retain_graph: bool) -> None:
    """Run backward from the value of *rref*: in an autograd context, or by the local engine."""
    value = rref.get()
    _handle_exception(value)
    if not isinstance(value, Tensor):
        raise RuntimeError("RRef should contain a tensor for .backward()")
    if context_id == -1:
        value.backward(retain_graph=retain_graph)
    else:
        autograd.backward(context_id, [value], retain_graph)


# -- The caller's end: what torch's `rpc_sync`, `rpc_async` and `remote` ask of C++.


def invoke_rpc_python_udf(
    dst: WorkerInfo, pickled: bytes, tensors: Sequence[Tensor], timeout_s: float, is_async: bool
) -> Reply:
    """Implement `rpc_async` of a Python function."""
    message = RpcMessage("PYTHON_CALL", pickled, fields=is_async)
    return request(dst.id, message, tensors, timeout_s, "a call", record=called(agent_here(), dst.id, timeout_s))


def invoke_rpc_builtin(dst: WorkerInfo, op: str, timeout_s: float, *args: Any, **kwargs: Any) -> Reply:
    """Implement `rpc_async` of an operator."""
    pickled, tensors = _operator(op, args, kwargs)
    message = RpcMessage("SCRIPT_CALL", pickled, fields=op)
    record = called(agent_here(), dst.id, timeout_s)
    return request(dst.id, message, tensors, timeout_s, f"{op}", forced=False, record=record)


def invoke_rpc_torchscript(
    dst: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], timeout_s: float, is_async: bool
) -> Reply:
    """Implement `rpc_async` of a TorchScript function."""
    pickled, tensors = internal.serialize((args, kwargs))
    message = RpcMessage("TORCHSCRIPT_CALL", pickled, fields=(name, is_async))
    to = agent_here().get_worker_info(dst).id
    return request(to, message, tensors, timeout_s, name, record=called(agent_here(), to, timeout_s))


def invoke_remote_python_udf(
    dst: WorkerInfo, pickled: bytes, tensors: Sequence[Tensor], timeout_s: float, is_async: bool
) -> SimRRef[Any]:
    """Implement `remote` of a Python function."""
    return _remote(dst.id, "PYTHON_REMOTE_CALL", pickled, tensors, is_async, timeout_s)


def invoke_remote_builtin(dst: WorkerInfo, op: str, timeout_s: float, *args: Any, **kwargs: Any) -> SimRRef[Any]:
    """Implement `remote` of an operator."""
    pickled, tensors = _operator(op, args, kwargs)
    return _remote(dst.id, "SCRIPT_REMOTE_CALL", pickled, tensors, op, timeout_s, forced=False)


def invoke_remote_torchscript(
    dst: str, name: str, timeout_s: float, is_async: bool, *args: Any, **kwargs: Any
) -> SimRRef[Any]:
    """Implement `remote` of a TorchScript function."""
    pickled, tensors = internal.serialize((args, kwargs))
    to = agent_here().get_worker_info(dst).id
    return _remote(to, "TORCHSCRIPT_REMOTE_CALL", pickled, tensors, (name, is_async), timeout_s)


def _operator(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bytes, list[Tensor]]:
    JIT_RESOLVE_PACKET.get()(op, *args, **kwargs)  # raises torch's error where no overload takes them
    pickled, tensors = internal.serialize((args, kwargs))
    return pickled, tensors


def _made(reply: RpcMessage | Failed) -> None:
    if isinstance(reply, Failed):
        raise reply.error


def _remote(
    to: int, kind: str, pickled: bytes, tensors: Sequence[Tensor], payload: Any, timeout_s: float, forced: bool = True
) -> SimRRef[Any]:
    """Request a value from worker *to*, and return the reference to it immediately."""
    agent, context = agent_here(), rrefs_here()
    rref: OwnedValue | User
    if to == agent.id:
        rref = OwnedValue(context, context.new_id())
        context.owners[rref.rref_id] = rref
        context.add_fork(rref.rref_id, rref.rref_id)
        ids = rref.rref_id, rref.rref_id
    else:
        rref = context.new_user(to)
        context.add_pending_user(rref)
        ids = rref.rref_id, rref.fork_id
    message = with_tensors(RpcMessage(kind, pickled, fields=(payload, *ids)), tensors, to, forced)
    record = called(agent, to, timeout_s, (agent.rank_of(ids[0][0]), ids[0][1]))
    message.record = record
    call = begin_call(message)
    created = Reply(require_task().process, agent.waits_for("remote", to), _made)

    def answered(reply: RpcMessage | Failed) -> None:
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
    result: SimRRef[Any] = SimRRef.of(rref, of_script="SCRIPT" in kind)
    result._creation = created
    return result
