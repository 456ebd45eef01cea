"""What a simulated process has of RPC: its agent, its references, its autograd contexts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distsim.sim.isolation.process import require_task
from distsim.sim.rpc.autograd.context import Container
from distsim.sim.rpc.rref_context import RRefContext

if TYPE_CHECKING:
    from distsim.debug.records import CallRecord
    from distsim.sim.rpc.agent.agent import SimAgent

__all__ = ["RpcState", "agent_here", "autograd_here", "rpc_here", "rrefs_here"]


class RpcState:
    """One process's own. `SimProcess.rpc` holds it."""

    def __init__(self) -> None:
        self.agent: Any = None
        self.rrefs: RRefContext | None = None
        self.autograd = Container()
        self.calling: tuple[str, str, bool] = ("async", "", False)
        """What torch is about to call: its RPCExecMode, the function's name, whether it is torch's own."""
        self.meeting: CallRecord | None = None
        """The init_rpc or the shutdown that the process is in."""
        self.rounds: dict[str, int] = {}
        """How often it has been in each."""


def rpc_here() -> RpcState:
    """The running process's."""
    process = require_task().process
    if process.rpc is None:
        process.rpc = RpcState()
    state: RpcState = process.rpc
    return state


def agent_here() -> SimAgent:
    """The running process's agent; torch's error where it has none."""
    agent: SimAgent | None = rpc_here().agent
    if agent is None:
        raise RuntimeError(
            "Current RPC agent is not set! Did you initialize the RPC framework (e.g. by calling `rpc.init_rpc`)?"
        )
    return agent


def rrefs_here() -> RRefContext:
    """The running process's references."""
    agent_here()
    found = rpc_here().rrefs
    assert found is not None
    return found


def autograd_here() -> Container:
    """The running process's autograd contexts."""
    return rpc_here().autograd
