"""Callee's side of RPC: what a thread of the pool does with each kind of request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.rpc import internal

from distsim.errors import NotSimulated
from distsim.remote_calls.simulated.agent import SimAgent, error_text
from distsim.remote_calls.simulated.autograd import gradients_came, received, release_if_there
from distsim.remote_calls.simulated.calls import SimRRef, arriving, backward_from
from distsim.remote_calls.simulated.profiling import profiled, with_events
from distsim.remote_calls.simulated.requests import answers_later, ended, serving, with_tensors
from distsim.remote_calls.simulated.state import OwnedValue, User, autograd_here, rpc_here, rrefs_here
from distsim.remote_calls.simulated.transport import Failed, RpcMessage
from distsim.sim.isolation.process import current_task
from distsim.torch_compat import rpc as rpc_names
from distsim.torch_compat.groups import FUTURE

# -- TorchScript functions as targets. All ranks live in one process and share its compilation unit, so that a function
# is found by its name there. One that takes a reference or makes calls itself would ask torch's C++ agent, of which
# there is none: its Python text runs instead.


_real_name = rpc_names.QUALIFIED_NAME.get()
_real_script = rpc_names.SCRIPT_IMPL.get()
_functions: dict[str, Any] = {}
"""TorchScript functions with known Python source, by qualified name."""


def qualified_name(obj: Any, *args: Any, **kwargs: Any) -> Any:
    """Call torch's own function, and remember *obj* for its source."""
    name = _real_name(obj, *args, **kwargs)
    if isinstance(obj, torch.jit.ScriptFunction):
        _functions[name] = obj
    return name


def script(obj: Any, optimize: Any = None, _frames_up: int = 0, *args: Any, **kwargs: Any) -> Any:
    """Replace `torch.jit.script`. A functional optimizer and a remote module run as Python, because compiled code
    would call C++.
    """
    if current_task() is not None and any(kind.__name__ in _AS_TEXT for kind in type(obj).__mro__):
        return obj
    return _real_script(obj, optimize, _frames_up + 1, *args, **kwargs)


_AS_TEXT = frozenset({"_ScriptLocalOptimizer", "_RemoteModule"})
_real_call = torch.jit.ScriptFunction.__call__
_CALLS = ("rpc_sync", "rpc_async", "rpc_remote", "RRef", "get_gradients", "dist_backward", "aten::backward")
_makes_calls: dict[str, bool] = {}
"""Whether a TorchScript function uses RPC or distributed autograd, by qualified name."""


def call_script(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a TorchScript function in a rank; as Python if it would call C++ for RPC."""
    text = getattr(self, "_torchdynamo_inline", None)
    if text is None or current_task() is None or rpc_here().agent is None:
        return _real_call(self, *args, **kwargs)
    name = self.qualified_name
    asks = _makes_calls.get(name)
    if asks is None:
        asks = _makes_calls[name] = any(word in str(self.inlined_graph) for word in _CALLS)
    return text(*args, **kwargs) if asks or _has_reference((args, kwargs)) else _real_call(self, *args, **kwargs)


def run_script(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the TorchScript function *name*."""
    known = _functions.get(name)
    if known is None and _has_reference((args, kwargs)):
        raise NotSimulated(f"the TorchScript function {name} on an RRef", "call the Python function instead")
    function = known if known is not None else rpc_names.PYTHON_CU.get().find_function(name)
    return function(*args, **kwargs)


def _has_reference(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(_has_reference(item) for item in value)
    if isinstance(value, dict):
        return any(_has_reference(item) for item in value.values())
    return isinstance(value, SimRRef)


_Future = FUTURE.get()

Respond = Callable[[RpcMessage | Failed], None]
Finish = Callable[[Any, BaseException | None], None]


def serve(agent: SimAgent, message: RpcMessage, respond: Respond) -> None:
    """Carry out the request *message* in the running thread; call *respond* at once, or later from another thread."""

    def tell(reply: RpcMessage | Failed) -> None:
        with_events(message, reply)
        respond(reply)

    _HANDLERS[message.kind](agent, message, respond if message.profile is None else tell)


# -- calls


def _call(agent: SimAgent, message: RpcMessage, respond: Respond) -> None:
    def finish(value: Any, error: BaseException | None) -> None:
        if error is not None:
            respond(Failed(error_text(error)))
            return
        with autograd_here().entered(message.context_id):
            _reply(message, value, respond)

    _run(agent, message, finish)


def _remote_call(agent: SimAgent, message: RpcMessage, respond: Respond) -> None:
    """Serve a call whose result stays here as the value of a remote reference."""
    rref_id, fork_id = message.fields[-2:]
    context = rrefs_here()
    owner = context.owner_of(rref_id)
    if rref_id != fork_id:
        context.add_fork(rref_id, fork_id)

    def finish(value: Any, error: BaseException | None) -> None:
        owner.set(value, None if error is None else RuntimeError(error_text(error)))
        respond(RpcMessage("REMOTE_RET", fields=(rref_id, fork_id)))

    message.fields = message.fields[0]
    _run(agent, message, finish)


def _run(agent: SimAgent, message: RpcMessage, finish: Finish) -> None:
    """Call the function that *message* names, after the owners have registered all references among its arguments."""
    pending: list[User] = []
    try:
        call, is_async, function = _loaded(message, pending)
    except Exception as error:
        finish(None, error)
        return

    def go() -> None:
        record = serving(agent, message, function)

        def over(value: Any, error: BaseException | None) -> None:
            ended(record)
            finish(value, error)

        try:
            with autograd_here().entered(message.context_id), profiled(message):
                value = call()
                if is_async and not isinstance(value, internal.RemoteException):
                    answers_later(record)
                    _when_done(value, over, message.kind.startswith("TORCHSCRIPT"))
                    return
        except Exception as error:
            over(None, error)
            return
        over(value, None)

    waiting = [user for user in pending if not user.confirmed]
    if not waiting:
        go()
        return
    left = len(waiting)

    def one_more() -> None:
        nonlocal left
        left -= 1
        if not left:
            agent.pool.submit(go)

    for user in waiting:
        user.when_confirmed.append(one_more)


def _loaded(message: RpcMessage, pending: list[User]) -> tuple[Callable[[], Any], bool, Any]:
    """Return the job of a request, whether it returns a future, and the Python function it calls."""
    tensors = received(autograd_here(), message)
    arriving.append(pending.append)
    try:
        loaded = internal.deserialize(message.payload, tensors)
    finally:
        arriving.pop()
    if isinstance(loaded, AttributeError):
        raise loaded
    if message.kind.startswith("PYTHON"):
        return lambda: rpc_names.RUN_FUNCTION.get()(loaded), bool(message.fields), loaded
    args, kwargs = loaded
    if message.kind.startswith("TORCHSCRIPT"):
        name, is_async = message.fields
        return lambda: run_script(name, args, kwargs), is_async, None
    operator = rpc_names.JIT_GET_OPERATION.get()(message.fields)[0]
    return lambda: operator(*args, **kwargs), False, None


def _when_done(value: Any, finish: Finish, is_script: bool) -> None:
    if not isinstance(value, _Future):
        kind = type(value)
        if is_script:
            raise RuntimeError(f"Async functions must return an IValue of Future type, but got {kind.__name__}")
        raise RuntimeError(
            "Failed to get the future of an async function. Functions decorated with @rpc.async_function must return a "
            f"torch.futures.Future object, but got {kind.__module__}.{kind.__qualname__}"
        )

    def done(future: Any) -> None:
        try:
            value = future.value()
        except Exception as error:
            finish(None, error)
        else:
            finish(value, None)

    value.add_done_callback(done)


def _reply(request: RpcMessage, value: Any, respond: Respond) -> None:
    try:
        payload, tensors = internal.serialize(value)
        reply = with_tensors(RpcMessage("PYTHON_RET", payload), tensors, request.sender, forced=False)
    except Exception as error:
        respond(Failed(error_text(error)))
        return
    respond(reply)


# -- references


def _fetch(agent: SimAgent, message: RpcMessage, respond: Respond) -> None:
    received(autograd_here(), message)
    owner = rrefs_here().owner_of(message.fields)

    def ready() -> None:
        if owner.error is not None:
            respond(Failed(error_text(owner.error)))
            return
        with autograd_here().entered(message.context_id):
            _reply(message, owner.value, respond)

    owner.when_set(ready)


def _delete(agent: SimAgent, message: RpcMessage, respond: Respond) -> None:
    rref_id, fork_id = message.fields
    rrefs_here().delete_fork(rref_id, fork_id)
    respond(RpcMessage("RREF_ACK"))


def _fork(agent: SimAgent, message: RpcMessage, respond: Respond) -> None:
    rref_id, fork_id = message.fields
    rrefs_here().add_fork(rref_id, fork_id)
    respond(RpcMessage("RREF_ACK"))


def _child(agent: SimAgent, message: RpcMessage, respond: Respond) -> None:
    rrefs_here().child_accepted(message.fields)
    respond(RpcMessage("RREF_ACK"))


def _rref_backward(agent: SimAgent, message: RpcMessage, respond: Respond) -> None:
    rref_id, context_id, retain_graph = message.fields
    owner: OwnedValue = rrefs_here().owner_of(rref_id)

    def ready() -> None:
        backward_from(owner, context_id, retain_graph)
        respond(RpcMessage("RREF_BACKWARD_RESP"))

    owner.when_set(ready)


# -- autograd


def _gradients(agent: SimAgent, message: RpcMessage, respond: Respond) -> None:
    def done(error: Exception | None) -> None:
        respond(RpcMessage("BACKWARD_AUTOGRAD_RESP") if error is None else Failed(str(error)))

    gradients_came(autograd_here(), agent, message, done)


def _cleanup(agent: SimAgent, message: RpcMessage, respond: Respond) -> None:
    release_if_there(autograd_here(), agent, message.fields)
    respond(RpcMessage("CLEANUP_AUTOGRAD_CONTEXT_RESP"))


_HANDLERS: dict[str, Callable[[SimAgent, RpcMessage, Respond], None]] = {
    "PYTHON_CALL": _call,
    "SCRIPT_CALL": _call,
    "TORCHSCRIPT_CALL": _call,
    "PYTHON_REMOTE_CALL": _remote_call,
    "SCRIPT_REMOTE_CALL": _remote_call,
    "TORCHSCRIPT_REMOTE_CALL": _remote_call,
    "PYTHON_RREF_FETCH_CALL": _fetch,
    "SCRIPT_RREF_FETCH_CALL": _fetch,
    "RREF_USER_DELETE": _delete,
    "RREF_FORK_REQUEST": _fork,
    "RREF_CHILD_ACCEPT": _child,
    "RREF_BACKWARD_REQ": _rref_backward,
    "BACKWARD_AUTOGRAD_REQ": _gradients,
    "CLEANUP_AUTOGRAD_CONTEXT_REQ": _cleanup,
}
"""Handlers of requests by torch's `MessageType`."""
