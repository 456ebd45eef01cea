"""Causes in the threads of a rank: a lock held in a call, and what keeps a process alive."""

from __future__ import annotations

from distsim.debug.diagnosis.causes.program_text import TAKES_LOCK, ProgramText
from distsim.debug.diagnosis.context import Case, Cause
from distsim.debug.diagnosis.waits.locks import HeldLock, held_locks
from distsim.debug.messages import are, capital, ranks_text, site_text, thread_text
from distsim.debug.records import RankThread
from distsim.debug.records.diagnosis import Diagnosis
from distsim.debug.records.kinds import Kind

MAIN = "MainThread"
CHILDREN = ("/torch/utils/data/", "/multiprocessing/", "/subprocess.py")
"""Parts of the paths of functions that wait for child processes."""


def lock_in_a_call(case: Case, d: Diagnosis, text: ProgramText) -> Cause | None:
    """Return the cause if a thread of a rank waits for a lock that another thread of it holds in a call.

    A victim's lock is no cause outside a circle: it is free once the culprit has come.
    """
    in_question = (*d.culprits, *d.victims) if d.kind is Kind.DEADLOCK_CYCLE else d.culprits
    ranks = [rank for rank in in_question if rank in case.index.states]
    locks = [(rank, lock) for rank in ranks for lock in held_locks(case.index, rank, text)]
    if not locks:
        return None
    says = [_held(rank, lock) for rank, lock in locks[:2]]
    rank, lock = locks[0]
    name = f"`{lock.name}`" if lock.name != "a lock" else lock.name
    return Cause(
        f"Hold no lock during a collective: release {name} before {lock.call.op} at {site_text(lock.call.site)}, or "
        f"let all ranks agree on which thread calls first (one thread that makes all calls, say): on rank {rank} "
        f"{thread_text(lock.waiter.name)} waits for it at {site_text(lock.site)}.",
        " ".join(says),
        tuple(dict.fromkeys(one.site for _, one in locks[:2])),
        leads=True,
    )


def _held(rank: int, lock: HeldLock) -> str:
    name = f"lock `{lock.name}`" if lock.name != "a lock" else lock.name
    return (
        f"{capital(thread_text(lock.waiter.name))} of rank {rank} waits at {site_text(lock.site)} for {name}, which "
        f"its {thread_text(lock.holder)} holds in {lock.call.op} at {site_text(lock.call.site)}."
    )


def waits_for_child(case: Case, d: Diagnosis, text: ProgramText) -> Cause | None:
    """Return the cause if a culprit waits for a child process of its own (a data loader's worker), which stands in the
    program.
    """
    for rank in d.culprits:
        state = case.index.states[rank]
        above = (
            [site.file for site in state.stack[: state.stack.index(state.site)]] if state.site in state.stack else []
        )
        if state.children and any(part in file for file in above for part in CHILDREN):
            child = state.children[0]
            at = site_text(child.stack[0], function=True)
            more = f" ({len(state.children)} child processes are in the program)" if len(state.children) > 1 else ""
            cure = (
                f"Look at what {at} waits for: rank {rank} waits for its child process {child.name}, which is there. "
                "With timeout= a DataLoader raises instead of waiting for good."
            )
            if TAKES_LOCK.search(text.line(child.stack[0])):
                cure = (
                    f"If another thread held the lock of {at} at the fork, it stays locked in the child for good: "
                    "start the child processes before that thread, or with multiprocessing_context='spawn' (or "
                    "'forkserver'). Else look for who holds it."
                )
            return Cause(
                cure,
                f"The child process {child.name} of rank {rank}, for which it waits, is at {at}{more}.",
                child.stack[:1],
                leads=True,
            )
    return None


def alive_after_its_end(case: Case, d: Diagnosis, text: ProgramText) -> Cause | None:
    """Return the cause if the scripts of the culprits have ended, and threads keep their processes alive."""
    states = case.index.states
    if not all(states[rank].through for rank in d.culprits):
        return None
    rank = d.culprits[0]
    who = (
        f"{capital(ranks_text(d.culprits))} {are(d.culprits, 'has', 'have')} finished {are(d.culprits, 'its', 'their')}"
    )
    threads = _keeps(states[rank].threads)
    if not threads and any(states[one].threads_cut or _keeps(states[one].threads) for one in d.culprits):
        return None
    if not threads:
        return Cause(
            "End the child processes before the program ends (terminate() or join() them, close the pool), or start "
            f"them with daemon=True: Python waits for those of {ranks_text(d.culprits)}.",
            f"{who} program, but Python waits for child processes.",
            leads=True,
        )
    thread = threads[0]
    stack = thread.stack or (() if thread.pool is None else (thread.pool,))
    origin = "" if thread.pool is None else f" (made at {site_text(thread.pool)})"
    at = f" at {site_text(stack[0])}" if thread.stack else f", a worker of a pool{origin} that was not shut down"
    least = "at least " if states[rank].threads_cut else ""
    more = f" (and {least}{len(threads) - 1} more)" if len(threads) > 1 else ""
    return Cause(
        "End the thread before the program ends (put its stop value into the queue, set its event, shut its pool "
        f"down), or start it with daemon=True: {thread_text(thread.name)}{at}{more}.",
        f"{who} program, but the process lives: Python waits for {thread_text(thread.name)}{at}{more}, which "
        "is not a daemon.",
        stack[:1],
        leads=True,
        sites=dict.fromkeys(d.culprits, stack[0]) if stack else {},
    )


def _keeps(threads: tuple[RankThread, ...]) -> list[RankThread]:
    """Return the threads for which Python waits at the end of a program."""
    return [thread for thread in threads if not thread.daemon and thread.name != MAIN]
