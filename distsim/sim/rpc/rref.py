"""`torch.distributed.rpc.RRef` in a simulated process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Self, TypeVar

from torch import Tensor
from torch.distributed import autograd
from torch.distributed.rpc import WorkerInfo, api, rref_proxy
from torch.futures import Future

from distsim.sim.rpc.agent.message import Message
from distsim.sim.rpc.records import called
from distsim.sim.rpc.requests import content, request
from distsim.sim.rpc.rref_context import TIMED_OUT, ForkData, Owner, User, shown
from distsim.sim.rpc.state import agent_here, rrefs_here
from distsim.torch_compat.rpc import HANDLE_EXCEPTION, RREF_TYPEOF_ON_OWNER, RREF_TYPEOF_ON_USER

__all__ = ["SimPyRRef", "SimRRef", "arriving"]

_handle_exception = HANDLE_EXCEPTION.get()
_rref_typeof_on_owner = RREF_TYPEOF_ON_OWNER.get()
_rref_typeof_on_user = RREF_TYPEOF_ON_USER.get()

T = TypeVar("T")

arriving: list[Callable[[User], None]] = []
"""Who wants to know of references that are unpickled now (serving.py); a list because calls nest."""


class SimPyRRef(Generic[T]):
    """What torch has in C++ of a reference to a value on some worker."""

    def __init__(self, value: T, type_hint: Any = None) -> None:
        context = rrefs_here()
        self._rref: Owner | User = Owner(context, context.new_id())
        self._rref.set(value)
        self._type_future: Future[Any] | None = None
        self._creation: Future[Any] | None = None
        self._profiling: Future[Any] | None = None
        self._of_script = False

    @classmethod
    def of(cls, rref: Owner | User, of_script: bool = False) -> Self:
        """*of_script*: an operator or a TorchScript function makes its value."""
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
        if isinstance(rref, Owner):
            return self.local_value()
        if rref.timed_out:
            raise RuntimeError(TIMED_OUT)
        if rref.deleted:
            raise RuntimeError(f"{rref} has been deleted. Cannot call to_here() on it after deletion.")
        made = agent_here().rank_of(rref.rref_id[0]), rref.rref_id[1]
        found: T = request(
            rref.owner,
            Message("SCRIPT_RREF_FETCH_CALL" if self._of_script else "PYTHON_RREF_FETCH_CALL", fields=rref.rref_id),
            [],
            timeout,
            f"{self._shown()}.to_here()",
            content,
            record=called(agent_here(), rref.owner, timeout, made, "to_here"),
        ).wait()
        return found

    def local_value(self) -> T:
        rref = self._rref
        if not isinstance(rref, Owner):
            raise RuntimeError(
                f"For {rref}, can't call localValue() on user {_text(agent_here().info)}. "
                f"Call it on owner {_text(self.owner())}"
            )
        value = rref.get()
        _handle_exception(value)
        found: T = value
        return found

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
                self._type_future = _rref_typeof_on_owner(self, blocking=False)
            else:
                asked = _rref_typeof_on_user(self, timeout, blocking=False)
                if not blocking:
                    self._type_future = asked
                else:
                    kind = asked.wait()
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
        """From the value as root, on its owner."""
        if isinstance(self._rref, Owner):
            backward_from(self._rref, dist_autograd_ctx_id, retain_graph)
            return
        if dist_autograd_ctx_id == -1:
            raise RuntimeError("User RRefs require 'dist_autograd_ctx_id' to be specified")
        message = Message("RREF_BACKWARD_REQ", fields=(self._rref.rref_id, dist_autograd_ctx_id, retain_graph))
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
        if isinstance(rref, Owner):
            return f"OwnerRRef({shown(rref.rref_id)})"
        return f"UserRRef(RRefId = {shown(rref.rref_id)}, ForkId = {shown(rref.fork_id)})"

    __repr__ = object.__repr__


class SimRRef(SimPyRRef[T]):
    """A reference to a value: `RRef(value)` on this worker, what `rpc.remote` gives on another."""


def _text(info: WorkerInfo) -> str:
    return f"WorkerInfo(id={info.id}, name={info.name})"


def backward_from(rref: Owner, context_id: int, retain_graph: bool) -> None:
    """Backward with the value of *rref* as root: in a context, or by the local engine."""
    value = rref.get()
    _handle_exception(value)
    if not isinstance(value, Tensor):
        raise RuntimeError("RRef should contain a tensor for .backward()")
    if context_id == -1:
        value.backward(retain_graph=retain_graph)
    else:
        autograd.backward(context_id, [value], retain_graph)
