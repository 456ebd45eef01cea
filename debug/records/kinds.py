"""The kinds of diagnosis with their exit codes, and the proof that each needs.

An abort needs proof. Whatever may still continue is a warning (`Proof.NOT_YET`): it is reported at once, withdrawn
if the job continued, and does not change the exit code. A job is ended only if it cannot continue: calls contradict
each other, waits form a cycle, a needed rank is gone, or `Settings.hang_after_s` is over.

How that is decided (`waits.assess_proof`): ranks that may move by themselves (stopped, in a loop, waiting for a
store or on the host, with another running thread) count as moving until other ranks have waited for them for
`hang_after_s`; a rank that is stuck in the wait-for graph in spite of that can never continue. Where nothing moves
by itself any more (a simulation, records of a dead job), `Evidence.hang_after_s` is None or 0, and everything is
proven.
"""

from __future__ import annotations

import enum
from collections.abc import Collection


class Kind(enum.StrEnum):
    """Kind of a diagnosis. The values are part of the report's schema."""

    HEALTHY = "healthy"
    MISSING_RANK = "missing_rank"
    EXTRA_COLLECTIVE = "extra_collective"
    WRONG_ORDER = "wrong_order"
    OP_MISMATCH = "op_mismatch"
    SHAPE_MISMATCH = "shape_mismatch"
    DTYPE_MISMATCH = "dtype_mismatch"
    REDUCE_OP_MISMATCH = "reduce_op_mismatch"
    ROOT_MISMATCH = "root_mismatch"
    GROUP_MISMATCH = "group_mismatch"
    DEVICE_MISMATCH = "device_mismatch"
    SPLITS_MISMATCH = "splits_mismatch"
    P2P_UNMATCHED = "p2p_unmatched"
    P2P_SIZE_MISMATCH = "p2p_size_mismatch"
    DEADLOCK_CYCLE = "deadlock_cycle"
    ASYNC_NEVER_WAITED = "async_never_waited"
    BUFFER_MODIFIED_IN_FLIGHT = "buffer_modified_in_flight"
    ALIASED_OUTPUTS = "aliased_outputs"
    GROUP_CREATION_ORDER = "group_creation_order"
    NEVER_JOINED = "never_joined"
    RANK_EXITED = "rank_exited"
    RANK_RAISED = "rank_raised"
    RANK_KILLED = "rank_killed"
    JOB_ENDED = "job_ended"
    PROCESS_FROZEN = "process_frozen"
    HOST_STUCK = "host_stuck"
    THREAD_RACE = "thread_race"
    UNEVEN_ITERATIONS = "uneven_iterations"
    DDP_UNUSED_PARAMETER = "ddp_unused_parameter"
    NAN = "nan"
    STRAGGLER = "straggler"
    NETWORK_FAULT = "network_fault"

    @property
    def label(self) -> str:
        """Return the kind as text: `missing rank`."""
        return _TITLES.get(self, self.value.replace("_", " "))


_TITLES = {
    Kind.NAN: "NaN",
    Kind.P2P_UNMATCHED: "unmatched send / recv",
    Kind.P2P_SIZE_MISMATCH: "send / recv size mismatch",
    Kind.OP_MISMATCH: "different collectives",
    Kind.REDUCE_OP_MISMATCH: "reduce op mismatch",
    Kind.ASYNC_NEVER_WAITED: "async call never waited for",
    Kind.BUFFER_MODIFIED_IN_FLIGHT: "buffer modified in flight",
    Kind.DDP_UNUSED_PARAMETER: "DDP parameter without gradient",
}

INCONSISTENT = frozenset(
    {
        Kind.EXTRA_COLLECTIVE,
        Kind.WRONG_ORDER,
        Kind.OP_MISMATCH,
        Kind.SHAPE_MISMATCH,
        Kind.DTYPE_MISMATCH,
        Kind.REDUCE_OP_MISMATCH,
        Kind.ROOT_MISMATCH,
        Kind.GROUP_MISMATCH,
        Kind.DEVICE_MISMATCH,
        Kind.SPLITS_MISMATCH,
        Kind.P2P_SIZE_MISMATCH,
        Kind.GROUP_CREATION_ORDER,
        Kind.THREAD_RACE,
        Kind.BUFFER_MODIFIED_IN_FLIGHT,
    }
)
"""Kinds in which the calls of ranks contradict each other (exit code 4), whether or not a rank hangs."""

WARNINGS = frozenset({Kind.STRAGGLER, Kind.ASYNC_NEVER_WAITED, Kind.ALIASED_OUTPUTS})
"""Kinds after which the program can continue. They do not change the exit code unless a rank is stuck."""


class Proof(enum.Enum):
    """Why the job cannot continue, or why it may."""

    MET = "ranks made calls that contradict each other"
    CIRCLE = "ranks wait for each other in a closed circle"
    GONE = "a rank that others need has ended"
    PATIENCE = "other ranks have waited for it as long as --hang-after allows"
    REFUSED = "strict raised at every rank before anything went out; the program may catch it"
    SEEN = "the guard saw it happen; the job continues"
    NOT_YET = "it may still continue by itself"
    NOTHING = "a note only"


END_A_JOB = frozenset({Proof.MET, Proof.CIRCLE, Proof.GONE, Proof.PATIENCE})

PROOFS: dict[Kind, frozenset[Proof]] = {
    Kind.HEALTHY: frozenset({Proof.NOTHING}),
    # Who is absent has ended, waits for those who wait for it, or was waited for long enough; that calls were
    # left out shows also where the next ones meet.
    Kind.MISSING_RANK: frozenset({Proof.GONE, Proof.CIRCLE, Proof.PATIENCE, Proof.MET}),
    Kind.EXTRA_COLLECTIVE: frozenset({Proof.GONE, Proof.CIRCLE, Proof.PATIENCE, Proof.MET}),
    Kind.UNEVEN_ITERATIONS: frozenset({Proof.GONE, Proof.CIRCLE, Proof.PATIENCE, Proof.MET}),
    Kind.GROUP_MISMATCH: frozenset({Proof.GONE, Proof.CIRCLE, Proof.PATIENCE, Proof.MET}),
    Kind.DEVICE_MISMATCH: frozenset({Proof.GONE, Proof.CIRCLE, Proof.PATIENCE, Proof.SEEN}),
    Kind.GROUP_CREATION_ORDER: frozenset({Proof.GONE, Proof.CIRCLE, Proof.PATIENCE, Proof.MET}),
    Kind.P2P_UNMATCHED: frozenset({Proof.GONE, Proof.CIRCLE, Proof.PATIENCE}),
    # Two calls of one meeting, or the two ends of a message. Lines that were swapped between calls that fit
    # each other are seen, and stop nobody. What strict did not let go out a program may catch.
    Kind.WRONG_ORDER: frozenset({Proof.MET, Proof.SEEN, Proof.REFUSED}),
    Kind.OP_MISMATCH: frozenset({Proof.MET, Proof.REFUSED}),
    Kind.SHAPE_MISMATCH: frozenset({Proof.MET, Proof.REFUSED}),
    Kind.DTYPE_MISMATCH: frozenset({Proof.MET, Proof.REFUSED}),
    Kind.REDUCE_OP_MISMATCH: frozenset({Proof.MET, Proof.REFUSED}),
    Kind.ROOT_MISMATCH: frozenset({Proof.MET, Proof.REFUSED}),
    Kind.SPLITS_MISMATCH: frozenset({Proof.MET, Proof.REFUSED}),
    Kind.P2P_SIZE_MISMATCH: frozenset({Proof.MET, Proof.REFUSED}),
    Kind.DEADLOCK_CYCLE: frozenset({Proof.CIRCLE, Proof.PATIENCE}),
    # The process is over. Where nobody needs it, that ends nothing: its launcher decides.
    Kind.RANK_EXITED: frozenset({Proof.GONE}),
    Kind.RANK_RAISED: frozenset({Proof.GONE, Proof.MET}),  # MET: what it calls on its way out
    Kind.RANK_KILLED: frozenset({Proof.GONE}),
    Kind.JOB_ENDED: frozenset({Proof.NOTHING}),  # from outside, which is no fault of a rank
    Kind.ASYNC_NEVER_WAITED: frozenset({Proof.GONE, Proof.NOTHING}),
    # It lives, and may go on at any moment: a debugger, a container's pause, a long computation, a slow start.
    Kind.NEVER_JOINED: frozenset({Proof.PATIENCE, Proof.GONE}),
    Kind.PROCESS_FROZEN: frozenset({Proof.PATIENCE}),
    Kind.HOST_STUCK: frozenset({Proof.PATIENCE, Proof.CIRCLE}),
    Kind.NETWORK_FAULT: frozenset({Proof.PATIENCE, Proof.SEEN}),  # a host that does not answer may answer again
    Kind.DDP_UNUSED_PARAMETER: frozenset({Proof.GONE, Proof.PATIENCE, Proof.CIRCLE, Proof.MET}),
    # Facts that stop nobody.
    Kind.BUFFER_MODIFIED_IN_FLIGHT: frozenset({Proof.SEEN}),
    Kind.ALIASED_OUTPUTS: frozenset({Proof.SEEN, Proof.NOTHING}),
    Kind.THREAD_RACE: frozenset({Proof.MET, Proof.SEEN}),
    Kind.NAN: frozenset({Proof.SEEN}),
    Kind.STRAGGLER: frozenset({Proof.NOTHING}),
}
"""Possible proofs of each kind. A kind without one in `END_A_JOB` never ends a job."""

SHOW_BY_THEMSELVES = frozenset({Kind.RANK_EXITED, Kind.RANK_RAISED, Kind.RANK_KILLED, Kind.DDP_UNUSED_PARAMETER})
"""Kinds about ranks that have ended. They end a job only if other ranks need the rank."""


def ends(kind: Kind, proof: Proof | None, victims: Collection[int]) -> bool:
    """Return whether a verdict may end a job. If *proof* is None, the evidence is of a job that is already over."""
    if proof is not None:
        return proof in END_A_JOB and (proof is not Proof.GONE or bool(victims) or kind not in SHOW_BY_THEMSELVES)
    return bool(PROOFS[kind] & END_A_JOB) and (bool(victims) or kind not in SHOW_BY_THEMSELVES)


def until_when(patience_s: float | None, waited_s: float = 0.0) -> str:
    """Return the sentence of a warning on how long the wait may last."""
    if patience_s and waited_s >= patience_s:
        return "Other ranks still make calls, so the job is not ended; set --hang-after to end it after that time."
    limit = "as long as --hang-after allows" if patience_s is None else f"{patience_s:g} s (--hang-after)"
    return f"This may still continue by itself: it counts as a hang once others have waited {limit}."
