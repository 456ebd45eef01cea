"""RPC state of a simulated process, and the protocol that counts remote references."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from distsim.debug.records import HostWait
from distsim.remote_calls.simulated.autograd import Container
from distsim.remote_calls.simulated.transport import Failed, RpcMessage
from distsim.sim.isolation.process import require_task
from distsim.sim.kernel.clocks import START, Clock
from distsim.sim.kernel.scheduler import Event
from distsim.sim.kernel.turns import meet_clock

if TYPE_CHECKING:
    from distsim.debug.records import CallRecord
    from distsim.remote_calls.simulated.agent import SimAgent

# -- Who counts remote references: torch's protocol (torch's "Remote Reference Protocol" note), message for message.
#
# An owner keeps a value as long as some fork of the reference is known to it. A user tells the owner when its fork
# dies, and holds what it passes on until the next one is known there. Nothing here is sent twice or lost: a simulated
# network either delivers or names a worker that is gone.

Id = tuple[int, int]
"""Identifier of a reference: the worker that created it, and a number in this worker."""
ForkData = tuple[int, Id, Id, int]
"""Owner, reference, fork and parent: how a reference crosses."""

TIMED_OUT = (
    "RRef creation via rpc.remote() timed out, and it is possible that the RRef on the owner node does not exist."
)
FLUSH_S = 100.0
"""Seconds that a graceful shutdown waits for references (torch's default)."""


def shown(id_: Id) -> str:
    """Format the reference as torch does."""
    return f"GloballyUniqueId(created_on={id_[0]}, local_id={id_[1]})"


class OwnedValue:
    """The value, on the worker that has it."""

    is_owner = True

    def __init__(self, context: RRefContext, rref_id: Id) -> None:
        self.context = context
        self.owner = context.agent.id
        self.rref_id = rref_id
        self.has_value = False
        self.value: Any = None
        self.error: BaseException | None = None
        self.timed_out = False
        self.clock: Clock = START
        """In an exploration, what happens before it has its value."""
        self._waiting: list[Callable[[], object]] = []

    def set(self, value: Any, error: BaseException | None = None) -> None:
        if self.has_value:
            return
        self.value, self.error, self.has_value = value, error, True
        self.clock = require_task().clock
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            call()

    def when_set(self, call: Callable[[], None]) -> None:
        """Call *call* once the value is set, in the thread that sets it."""
        if self.has_value:
            call()
        else:
            self._waiting.append(call)

    def get(self) -> Any:
        """Return the value; waits for it."""
        if self.timed_out:
            raise RuntimeError(TIMED_OUT)
        if not self.has_value:
            task = require_task()
            event: Event = task.port.event()
            self._waiting.append(event.succeed)
            task.wait(event, HostWait("the value of an RRef that is not made yet"))
            meet_clock(task, self.clock)
        if self.error is not None:
            raise self.error
        return self.value

    def __str__(self) -> str:
        return f"OwnerRRef(rref_id={shown(self.rref_id)})"


class User:
    """A fork of a reference, on a worker that does not have the value."""

    is_owner = False

    def __init__(self, context: RRefContext, owner: int, rref_id: Id, fork_id: Id) -> None:
        self.context = context
        self.owner = owner
        self.rref_id = rref_id
        self.fork_id = fork_id
        self.confirmed = False
        self.deleted = False
        self.timed_out = False
        self.when_confirmed: list[Callable[[], None]] = []

    def confirm(self) -> None:
        """Record that the owner has registered this reference."""
        self.confirmed = True
        waiting, self.when_confirmed = self.when_confirmed, []
        for call in waiting:
            call()

    def delete(self) -> None:
        if not self.deleted:
            self.deleted = True
            self.context.delete_user(self)

    def __del__(self) -> None:
        self.delete()

    def __str__(self) -> str:
        return f"UserRRef(rref_id={shown(self.rref_id)}, fork_id={shown(self.fork_id)})"


class RRefContext:
    """The references that one worker has or owns."""

    def __init__(self, agent: SimAgent) -> None:
        self.agent = agent
        self.destroyed = False
        self.owners: dict[Id, OwnedValue] = {}
        self.forks: dict[Id, dict[Id, None]] = {}
        self.pending_users: dict[Id, User] = {}
        self.pending_children: dict[Id, User] = {}
        self.confirmed_users: dict[Id, Any] = {}
        self.pending_futures = 0
        self._next_id = 0
        self._changed: list[Event] = []

    def new_id(self) -> Id:
        self._next_id += 1
        return self.agent.id, self._next_id - 1

    def debug_info(self) -> dict[str, str]:
        return {
            "num_owner_rrefs": str(len(self.owners)),
            "num_pending_futures": str(self.pending_futures),
            "num_pending_users": str(len(self.pending_users)),
            "num_forks": str(sum(len(forks) for forks in self.forks.values())),
        }

    def change(self) -> None:
        waiting, self._changed = self._changed, []
        for event in waiting:
            event.succeed()

    # -- the owner's side

    def owner_of(self, rref_id: Id) -> OwnedValue:
        """Return the owner's side of *rref_id*, which is created when it is first mentioned."""
        result = self.owners.get(rref_id)
        if result is None:
            result = self.owners[rref_id] = OwnedValue(self, rref_id)
            self.change()
        return result

    def add_fork(self, rref_id: Id, fork_id: Id) -> None:
        self.forks.setdefault(rref_id, {})[fork_id] = None

    def delete_fork(self, rref_id: Id, fork_id: Id) -> None:
        forks = self.forks.get(rref_id)
        if forks is None or fork_id not in forks:
            return
        del forks[fork_id]
        if not forks:
            del self.forks[rref_id]
            self.owners.pop(rref_id, None)
        self.change()

    # -- the user's side

    def new_user(self, owner: int) -> User:
        rref_id = self.new_id()
        return User(self, owner, rref_id, self.new_id())

    def add_pending_user(self, user: User) -> None:
        self.pending_users[user.fork_id] = user

    def user_confirmed(self, fork_id: Id) -> None:
        user = self.pending_users.pop(fork_id, None)
        if user is not None:
            self.confirmed_users[fork_id] = weakref.ref(user)
            user.confirm()
            self.change()

    def delete_user(self, user: User) -> None:
        """Delete a reference. Python's garbage collector may call this in any thread."""
        self.confirmed_users.pop(user.fork_id, None)
        if self.destroyed or not self.agent.running:
            return
        self.pending_futures += 1
        self.agent.tell(user.owner, RpcMessage("RREF_USER_DELETE", fields=(user.rref_id, user.fork_id)), self._acked)

    def _acked(self, _: RpcMessage | Failed) -> None:
        self.pending_futures -= 1
        self.change()

    # -- crossing

    def fork(self, rref: OwnedValue | User) -> ForkData:
        """Note that *rref* is being sent to another worker."""
        if isinstance(rref, User) and rref.deleted:
            raise RuntimeError(f"{rref} has been deleted. Cannot call fork an UserRRef after deletion.")
        fork_id = self.new_id()
        if isinstance(rref, OwnedValue):
            self.add_fork(rref.rref_id, fork_id)
            self.owners[rref.rref_id] = rref
        else:
            self.pending_children[fork_id] = rref
        return rref.owner, rref.rref_id, fork_id, self.agent.id

    def arrived(self, data: ForkData) -> OwnedValue | User:
        """Return the local reference for one that was received from its parent."""
        owner, rref_id, fork_id, parent = data
        me = self.agent.id
        if owner == me:
            mine = self.owner_of(rref_id)
            if parent == me:
                self.delete_fork(rref_id, fork_id)
            else:
                self.pending_futures += 1
                self.agent.tell(parent, RpcMessage("RREF_CHILD_ACCEPT", fields=fork_id), self._acked)
            return mine
        user = User(self, owner, rref_id, fork_id)
        if parent == owner:
            self.confirmed_users[fork_id] = weakref.ref(user)
            user.confirm()
            return user
        self.add_pending_user(user)
        self.pending_futures += 1

        def known(reply: RpcMessage | Failed) -> None:
            self._acked(reply)
            self.user_confirmed(fork_id)
            if isinstance(reply, RpcMessage):
                self.pending_futures += 1
                self.agent.tell(parent, RpcMessage("RREF_CHILD_ACCEPT", fields=fork_id), self._acked)

        self.agent.tell(owner, RpcMessage("RREF_FORK_REQUEST", fields=(rref_id, fork_id)), known)
        return user

    def child_accepted(self, fork_id: Id) -> None:
        self.pending_children.pop(fork_id, None)
        self.change()

    # -- the end

    def flush(self, timeout_s: float = FLUSH_S) -> None:
        """Prepare a graceful shutdown: every user is confirmed and then deleted; after that every owner may be
        deleted.
        """
        self._wait(lambda: not self.pending_users and not self.pending_children, timeout_s)
        users, self.confirmed_users = self.confirmed_users, {}
        for weak in users.values():
            user = weak()
            if user is not None:
                user.delete()
        for rref_id in [rref_id for rref_id in self.owners if rref_id not in self.forks]:
            del self.owners[rref_id]
        self._wait(lambda: not self.owners, timeout_s)

    def _wait(self, is_so: Callable[[], bool], timeout_s: float) -> None:
        task = require_task()
        give_up_s = task.now_s() + timeout_s
        while not is_so():
            event: Event = task.port.event()
            self._changed.append(event)
            if not task.wait_until(event, HostWait("shutdown: RRefs to be deleted"), give_up_s - task.now_s()):
                return

    def destroy(self, ignore_leaks: bool) -> None:
        self.destroyed = True
        leaks = "".join(
            f"Leaking RRef {shown(rref_id)} with fork Id {shown(fork_id)}\n"
            for rref_id, forks in self.forks.items()
            for fork_id in forks
        )
        self.owners.clear()
        if leaks and not ignore_leaks:
            raise RuntimeError(leaks)


# -- What a simulated process has of RPC: its agent, its references, its autograd contexts.


class RpcState:
    """RPC state of one process, in `SimProcess.rpc`."""

    def __init__(self) -> None:
        self.agent: Any = None
        self.rrefs: RRefContext | None = None
        self.autograd = Container()
        self.calling: tuple[str, str, bool] = ("async", "", False)
        """The call that torch is about to make: its RPCExecMode, the function's name, and whether it is torch's own."""
        self.meeting: CallRecord | None = None
        """The init_rpc or the shutdown that the process is in."""
        self.rounds: dict[str, int] = {}
        """Number of rounds of each barrier that the process has completed."""


def rpc_here() -> RpcState:
    """Return the running process's."""
    process = require_task().process
    if process.rpc is None:
        process.rpc = RpcState()
    state: RpcState = process.rpc
    return state


def agent_here() -> SimAgent:
    """Return the running process's agent; raise torch's error if it has none."""
    agent: SimAgent | None = rpc_here().agent
    if agent is None:
        raise RuntimeError(
            "Current RPC agent is not set! Did you initialize the RPC framework (e.g. by calling `rpc.init_rpc`)?"
        )
    return agent


def rrefs_here() -> RRefContext:
    """Return the running process's references."""
    agent_here()
    result = rpc_here().rrefs
    assert result is not None
    return result


def autograd_here() -> Container:
    """Return the running process's autograd contexts."""
    return rpc_here().autograd
