"""Sending a request from the running thread, and the record of it."""

from __future__ import annotations

import functools
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.distributed import rpc
from torch.distributed.rpc import api

from distsim.debug.records import CallRecord, CallWait, Group, State
from distsim.debug.records.call import SERVE, Remote
from distsim.debug.records.frames import call_stack, defined_at
from distsim.errors import NotSimulated
from distsim.remote_calls.simulated.autograd import attach, received
from distsim.remote_calls.simulated.profiling import begin_call, reply_came
from distsim.remote_calls.simulated.state import RpcState, agent_here, rpc_here
from distsim.remote_calls.simulated.transport import Failed, Reply, RpcMessage, copied
from distsim.sim.isolation.process import current_task, require_task
from distsim.text.tracebacks import error_line
from distsim.torch_compat.rpc import ENABLE_RPC_PROFILER, FINALIZE_SHUTDOWN, HANDLE_EXCEPTION, WAIT_ALL_WORKERS

if TYPE_CHECKING:
    from distsim.remote_calls.simulated.agent import SimAgent
    from distsim.sim.isolation.process import SimProcess

# -- Remote calls as records, as the guard around real RPC writes them: what a hang is told from.

GROUP = "rpc"
TORCHS_OWN = frozenset({api.__name__, "torch.distributed.rpc.backend_registry"})
"""Modules whose functions torch itself calls remotely, to join and to shut down."""
OPERATORS = "_VariableFunctionsClass."
OPS = {"sync": "rpc_sync", "remote": "remote"}
"""Operations by torch's RPCExecMode; all others are rpc_async."""


def called(
    agent: SimAgent, to: int, timeout_s: float, rref: tuple[int, int] | None = None, op: str = ""
) -> CallRecord | None:
    """Return the record of a request of the running thread's; None of torch's own."""
    state = rpc_here()
    mode, function, own = state.calling
    state.calling = ("async", "", False)
    if own:
        return None
    usual_s = agent.timeout_s if agent.limits else 0.0
    limit_s = usual_s if timeout_s < 0 else timeout_s
    op = op or OPS.get(mode, "rpc_async")
    remote = Remote(function, agent.info.name, agent.name_of(to), agent.pool.size, limit_s or None, rref=rref)
    return _record(agent.process, op, agent.rank_of(to), remote, is_async=op in ("rpc_async", "remote"))


def serving(agent: SimAgent, message: RpcMessage, udf: Any) -> CallRecord | None:
    """Return the record of a request for a Python function that the running thread begins to serve; None of torch's
    own.
    """
    if udf is None or message.record is None or getattr(udf.func, "__module__", None) in TORCHS_OWN:
        return None
    name = name_of(udf.func)
    if name.startswith("_local_invoke") and len(udf.args) > 1:
        name = f"RRef.{udf.args[1]}"
    names = agent.name_of(message.sender), agent.info.name
    remote = Remote(name, *names, agent.pool.size, request=(message.record.rank, message.record.index))
    record = _record(agent.process, SERVE, agent.rank_of(message.sender), remote, is_async=False)
    record.site = record.site or defined_at(udf.func)  # until it is seen elsewhere (observe/evidence.py)
    require_task().served = record
    return record


def answers_later(record: CallRecord | None) -> None:
    """Record that the function has returned a future, so that its thread is free."""
    if record is not None:
        record.is_async = True
        require_task().served = None


def ended(record: CallRecord | None, error: BaseException | None = None) -> None:
    """Note that the reply has arrived or was sent."""
    if record is None or record.done:
        return
    task = current_task()
    if task is not None and task.served is record:
        task.served = None
    record.completed_s = task.port.now_s if task is not None else record.issued_s
    record.state = State.COMPLETED if error is None else State.FAILED
    record.error = None if error is None else error_line(error)


def name_of(function: Any) -> str:
    """Return the qualified name of a function, such as `Trainer.step`, or the name of its type if it has none."""
    name = getattr(function, "__qualname__", None)
    return str(name or type(function).__qualname__).removeprefix(OPERATORS)


@functools.cache
def _workers(size: int) -> Group:
    return Group(GROUP, GROUP, tuple(range(size)))


def _record(
    process: SimProcess, op: str, peer: int | None, remote: Remote | None, is_async: bool, size: int = 0
) -> CallRecord:
    task = require_task()
    stack = call_stack(sys._getframe(1))
    record = CallRecord(
        rank=process.rank,
        group=_workers(size or process.port.world_size),
        seq=process.groups.next_number(GROUP if remote is not None else op),
        op=op,
        peer=peer,
        is_async=is_async,
        waited=not is_async,
        site=stack[0] if stack else None,
        stack=stack,
        thread=task.name,
        issued_s=task.now_s(),
        remote=remote,
    )
    process.calls.add(record, process.port.now_s)
    return record


# -- what torch's Python says on its way to C++

_real_profiler = ENABLE_RPC_PROFILER.get()
_real_init = rpc.init_rpc
_real_meeting = WAIT_ALL_WORKERS.get()
_real_end = FINALIZE_SHUTDOWN.get()


def _calling(should_profile: bool, operator: Any, function: Any, mode: Any, to: Any) -> Any:
    """Note that torch is about to call *function*."""
    if current_task() is not None:
        rpc_here().calling = (mode.value, name_of(function), getattr(function, "__module__", None) in TORCHS_OWN)
    return _real_profiler(should_profile, operator, function, mode, to)


def _begin(state: RpcState, op: str, size: int) -> None:
    task = require_task()
    record = _record(task.process, op, None, None, is_async=False, size=size)
    state.rounds[op] = record.seq = state.rounds.get(op, 0) + 1
    record.seq = 2 * record.seq - (op == "init_rpc")
    state.meeting = record


@functools.wraps(_real_init)
def _init(name: Any, backend: Any = None, rank: int = -1, world_size: Any = None, *args: Any, **kwargs: Any) -> Any:
    if current_task() is None or not world_size:
        return _real_init(name, backend, rank, world_size, *args, **kwargs)
    state = rpc_here()
    _begin(state, "init_rpc", world_size)
    try:
        answer = _real_init(name, backend, rank, world_size, *args, **kwargs)
    except BaseException as error:
        ended(state.meeting, error)
        raise
    finally:
        meeting, state.meeting = state.meeting, None
    ended(meeting)
    return answer


def _meet_to_end(*args: Any, **kwargs: Any) -> Any:
    if current_task() is not None:
        state = rpc_here()
        _begin(state, "rpc_shutdown", state.agent.size or 0)
    return _real_meeting(*args, **kwargs)


def _end(*args: Any, **kwargs: Any) -> Any:
    try:
        return _real_end(*args, **kwargs)
    finally:
        if current_task() is not None:
            state = rpc_here()
            ended(state.meeting)
            state.meeting = None


def record_patches() -> list[tuple[Any, str, Any]]:
    """Return patches (holder, attribute, replacement) for the time of a simulation."""
    return [
        *ENABLE_RPC_PROFILER.replaced_by(_calling),
        (rpc, "init_rpc", _init),
        *WAIT_ALL_WORKERS.replaced_by(_meet_to_end),
        *FINALIZE_SHUTDOWN.replaced_by(_end),
    ]


# -- Sending a request from the running thread, with its tensors' history where an autograd context is open.


Content = Callable[[RpcMessage], Any]


def with_tensors(message: RpcMessage, tensors: Sequence[Tensor], to: int, forced: bool) -> RpcMessage:
    """Return *message* with copies of *tensors*, whose history is kept if an autograd context is open.

    With *forced*, the context is attached even if no tensor requires a gradient, because the reply may.
    """
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
    message: RpcMessage,
    tensors: Sequence[Tensor],
    timeout_s: float,
    purpose: str,
    read: Content | None = None,
    forced: bool = True,
    record: CallRecord | None = None,
) -> Reply:
    """Send *message* with *tensors* to worker *to*; what *read* makes of the reply is the future's value."""
    agent, process = agent_here(), require_task().process
    agent.get_worker_info(to)
    with_tensors(message, tensors, to, forced)
    message.record = record
    call = begin_call(message)

    def value(raw: RpcMessage | Failed) -> Any:
        reply_came(call, raw)
        if isinstance(raw, Failed):
            raise raw.error
        return (read or answer)(raw)

    reply = Reply(process, agent.waits_for(purpose, to) if record is None else CallWait(record), value)
    reply.add_done_callback(lambda _: ended(record, reply.error))
    agent.send(to, message, reply.settle, timeout_s, reply)
    return reply


def answer(message: RpcMessage) -> Any:
    """Return the result or raise the exception of a reply. As in torch's C++ future, ValueError and TypeError keep
    their type, and all others become RuntimeErrors with the type in the text."""
    try:
        return content(message)
    except Exception as error:
        kind = next((one for one in (ValueError, TypeError) if isinstance(error, one)), RuntimeError)
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise kind(
            f"{type(error).__name__}: {error}\n\nAt:\n  {frame.filename}({frame.lineno}): {frame.name}\n"
        ) from None


def content(message: RpcMessage) -> Any:
    """Return the content of a reply."""
    from torch.distributed.rpc import internal

    tensors = received(rpc_here().autograd, message)
    value = internal.deserialize(message.payload, tensors) if message.payload else None
    HANDLE_EXCEPTION.get()(value)
    return value
