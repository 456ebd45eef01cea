"""The kinds of diagnosis, and what each means for the exit code."""

from __future__ import annotations

import enum

__all__ = ["INCONSISTENT", "WARNINGS", "Kind"]


class Kind(enum.StrEnum):
    """What is wrong. The values are part of the report's schema."""

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
        """For people: `missing rank`."""
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
        Kind.SPLITS_MISMATCH,
        Kind.P2P_SIZE_MISMATCH,
        Kind.GROUP_CREATION_ORDER,
        Kind.THREAD_RACE,
        Kind.BUFFER_MODIFIED_IN_FLIGHT,
    }
)
"""Ranks contradict each other (exit code 4), whether or not anybody hangs."""

WARNINGS = frozenset({Kind.STRAGGLER, Kind.ASYNC_NEVER_WAITED, Kind.ALIASED_OUTPUTS})
"""Worth saying, but the program goes on: no exit code of their own unless somebody is stuck."""
