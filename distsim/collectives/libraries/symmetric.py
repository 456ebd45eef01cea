"""Times of torch's kernels on symmetric memory: ranks read and write each other's memory over NVLink.

A synchronization, and a round of reads or writes, is a flag or a load that crosses NVLink: one hop of NCCL's LL
protocol, whose constants are fitted. The bytes move at the speed of the links. No measurement of these kernels is among
the tables, so their times have no interval.

Source of the rounds: torch/csrc/distributed/c10d/symm_mem/CUDASymmetricMemoryOps.cu (2.13).
"""

from __future__ import annotations

from distsim.collectives.algorithms.direct import all_to_all_loads, direct_phase, longest_latency_s, pair_loads
from distsim.collectives.libraries.nccl_timing import NcclTiming
from distsim.collectives.libraries.nccl_tuning import Machine
from distsim.collectives.members import Members
from distsim.collectives.plan import Plan, PlanPhase, TransferCost
from distsim.errors import UsageError

_CHANNELS = 24
"""Maximum number of blocks of these kernels (CUDASymmetricMemory-inl.h)."""


def compile_symmetric(timing: NcclTiming, machine: Machine, group: Members, algo: str, op: str, nbytes: float) -> Plan:
    """The plan of *op* by the algorithm *algo*: one of `plan.SYMMETRIC`."""
    hop_s = timing.hops_s(machine, "tree", "LL")[0]
    if op == "send":  # a copy of a peer's memory
        phase = PlanPhase(pair_loads(group), nbytes, latency_s=hop_s)
        return Plan(algo, "NVLink", 0, 0.0, (phase,))
    round_s = hop_s + longest_latency_s(group)
    if op == "barrier":
        return Plan(algo, "NVLink", 1, round_s)
    share = nbytes / group.size
    if algo == "multimem":
        phases: tuple[PlanPhase, ...] = (timing.nvls(group, machine, op, nbytes, tree=False).phase,)
        rounds = 2
    elif op == "all_reduce" and algo == "one_shot":
        phases, rounds = (direct_phase(group, all_to_all_loads(group), nbytes, TransferCost()),), 2
    elif op == "all_reduce":
        phases, rounds = 2 * (direct_phase(group, all_to_all_loads(group), share, TransferCost()),), 3
    elif op == "reduce_scatter":
        phases, rounds = (direct_phase(group, all_to_all_loads(group), share, TransferCost()),), 2
    else:
        raise UsageError(f"expected all_reduce, all_gather, reduce_scatter or barrier on symmetric memory, got {op}")
    return Plan(algo, "NVLink", _CHANNELS, (rounds + len(phases)) * round_s, phases)
