"""torch's faulty agent (`torch.distributed.rpc._testing`): messages that fail or are late by their kind."""

from __future__ import annotations

from typing import Any

import torch.distributed.rpc as rpc

from distsim.sim.isolation.process import current_task
from distsim.sim.rpc.agent.agent import Answered, Call, SimAgent
from distsim.sim.rpc.agent.futures import Reply
from distsim.sim.rpc.agent.message import Failed, Message
from distsim.torch_compat.rpc import DISTRIBUTED_RPC_TESTING, FAULTY_AGENT_INIT

__all__ = ["faulty_init"]

_real_init = FAULTY_AGENT_INIT.get()
_real_kinds: dict[str, Any] = {name: getattr(rpc, name) for name in ("TensorPipeAgent", "RpcAgent")}


class FaultyAgent(SimAgent):
    """`FaultyTensorPipeAgent` of a simulated process."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._failed: dict[tuple[str, bytes, str], int] = {}

    def send(
        self,
        to: int,
        message: Message,
        answered: Answered,
        timeout_s: float = -1.0,
        future: Reply | None = None,
    ) -> Call:
        kind = message.wire_kind
        options = self.options
        key = kind, message.payload, str(message.fields)
        if kind in options.messages_to_fail and self._failed.get(key, 0) < options.num_fail_sends:
            attempt = self._failed[key] = self._failed.get(key, 0) + 1
            call = Call(self, -1, to, 0.0, True, answered, future)
            self.active_calls += 1
            self.end_call(call, Failed(f"Send attempt {attempt} failed intentionally for {kind}", 2))
            return call
        return super().send(to, message, answered, timeout_s, future)

    def delay_s(self, kind: str) -> float:
        return float(self.options.messages_to_delay.get(kind, 0.0))


def faulty_init() -> bool:
    """torch's C++ makes its classes upon those it finds in torch.distributed.rpc: it has to find its own."""
    if current_task() is None:
        return bool(_real_init())
    led = {name: vars(rpc)[name] for name in _real_kinds}
    vars(rpc).update(_real_kinds)
    try:
        done = bool(_real_init())
    finally:
        vars(rpc).update(led)
    testing: Any = DISTRIBUTED_RPC_TESTING.get()  # made by torch's own init
    real = testing.FaultyTensorPipeAgent
    testing.FaultyTensorPipeAgent = lambda *args: (real if current_task() is None else FaultyAgent)(*args)
    return done
