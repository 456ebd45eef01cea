"""The callee's end: what a thread of the pool does with each kind of request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.rpc import internal

from distsim.sim.rpc.agent.agent import SimAgent, error_text
from distsim.sim.rpc.agent.message import Failed, Message
from distsim.sim.rpc.agent.profiling import profiled, with_events
from distsim.sim.rpc.autograd.engine import gradients_came
from distsim.sim.rpc.autograd.functions import received
from distsim.sim.rpc.autograd.release import release_if_there
from distsim.sim.rpc.records import answers_later, ended, serving
from distsim.sim.rpc.requests import with_tensors
from distsim.sim.rpc.rref import arriving, backward_from
from distsim.sim.rpc.rref_context import Owner, User
from distsim.sim.rpc.script import run_script
from distsim.sim.rpc.state import autograd_here, rrefs_here
from distsim.torch_compat.rpc import JIT_GET_OPERATION, RUN_FUNCTION
from distsim.torch_compat.works import FUTURE

__all__ = ["serve"]

_jit_get_operation = JIT_GET_OPERATION.get()
_run_function = RUN_FUNCTION.get()
_Future = FUTURE.get()

Respond = Callable[[Message | Failed], None]
Finish = Callable[[Any, BaseException | None], None]


def serve(agent: SimAgent, message: Message, respond: Respond) -> None:
    """Do what *message* asks, in the running thread; *respond* at once or later, from another."""

    def tell(reply: Message | Failed) -> None:
        with_events(message, reply)
        respond(reply)

    _HANDLERS[message.kind](agent, message, respond if message.profile is None else tell)


# -- calls


def _call(agent: SimAgent, message: Message, respond: Respond) -> None:
    def finish(value: Any, error: BaseException | None) -> None:
        if error is not None:
            respond(Failed(error_text(error)))
            return
        with autograd_here().entered(message.context_id):
            _reply(message, value, respond)

    _run(agent, message, finish)


def _remote_call(agent: SimAgent, message: Message, respond: Respond) -> None:
    """A call whose value stays here, as that of a reference."""
    rref_id, fork_id = message.fields[-2:]
    context = rrefs_here()
    owner = context.owner_of(rref_id)
    if rref_id != fork_id:
        context.add_fork(rref_id, fork_id)

    def finish(value: Any, error: BaseException | None) -> None:
        owner.set(value, None if error is None else RuntimeError(error_text(error)))
        respond(Message("REMOTE_RET", fields=(rref_id, fork_id)))

    message.fields = message.fields[0]
    _run(agent, message, finish)


def _run(agent: SimAgent, message: Message, finish: Finish) -> None:
    """Call what *message* names once all references among its arguments are known to their owners."""
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


def _loaded(message: Message, pending: list[User]) -> tuple[Callable[[], Any], bool, Any]:
    """What is to be done, whether it gives a future, and what of Python's it calls."""
    tensors = received(autograd_here(), message)
    arriving.append(pending.append)
    try:
        loaded = internal.deserialize(message.payload, tensors)
    finally:
        arriving.pop()
    if isinstance(loaded, AttributeError):
        raise loaded
    if message.kind.startswith("PYTHON"):
        return lambda: _run_function(loaded), bool(message.fields), loaded
    args, kwargs = loaded
    if message.kind.startswith("TORCHSCRIPT"):
        name, is_async = message.fields
        return lambda: run_script(name, args, kwargs), is_async, None
    operator = _jit_get_operation(message.fields)[0]
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
            found = future.value()
        except Exception as error:
            finish(None, error)
        else:
            finish(found, None)

    value.add_done_callback(done)


def _reply(request: Message, value: Any, respond: Respond) -> None:
    try:
        payload, tensors = internal.serialize(value)
        reply = with_tensors(Message("PYTHON_RET", payload), tensors, request.sender, forced=False)
    except Exception as error:
        respond(Failed(error_text(error)))
        return
    respond(reply)


# -- references


def _fetch(agent: SimAgent, message: Message, respond: Respond) -> None:
    received(autograd_here(), message)
    owner = rrefs_here().owner_of(message.fields)

    def ready() -> None:
        if owner.error is not None:
            respond(Failed(error_text(owner.error)))
            return
        with autograd_here().entered(message.context_id):
            _reply(message, owner.value, respond)

    owner.when_set(ready)


def _delete(agent: SimAgent, message: Message, respond: Respond) -> None:
    rref_id, fork_id = message.fields
    rrefs_here().delete_fork(rref_id, fork_id)
    respond(Message("RREF_ACK"))


def _fork(agent: SimAgent, message: Message, respond: Respond) -> None:
    rref_id, fork_id = message.fields
    rrefs_here().add_fork(rref_id, fork_id)
    respond(Message("RREF_ACK"))


def _child(agent: SimAgent, message: Message, respond: Respond) -> None:
    rrefs_here().child_accepted(message.fields)
    respond(Message("RREF_ACK"))


def _rref_backward(agent: SimAgent, message: Message, respond: Respond) -> None:
    rref_id, context_id, retain_graph = message.fields
    owner: Owner = rrefs_here().owner_of(rref_id)

    def ready() -> None:
        backward_from(owner, context_id, retain_graph)
        respond(Message("RREF_BACKWARD_RESP"))

    owner.when_set(ready)


# -- autograd


def _gradients(agent: SimAgent, message: Message, respond: Respond) -> None:
    def done(error: Exception | None) -> None:
        respond(Message("BACKWARD_AUTOGRAD_RESP") if error is None else Failed(str(error)))

    gradients_came(autograd_here(), agent, message, done)


def _cleanup(agent: SimAgent, message: Message, respond: Respond) -> None:
    release_if_there(autograd_here(), agent, message.fields)
    respond(Message("CLEANUP_AUTOGRAD_CONTEXT_RESP"))


_HANDLERS: dict[str, Callable[[SimAgent, Message, Respond], None]] = {
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
"""By torch's `MessageType`."""
