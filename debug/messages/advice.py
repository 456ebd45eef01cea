"""What to do next, one sentence a kind. `{who}` the culprits, `{mine}` their line, `{theirs}` the others'."""

from __future__ import annotations

import re
from collections.abc import Sequence

from distsim.debug.records.kinds import Kind
from distsim.text.ranks import format_ranks

__all__ = ["advice", "no_record_advice", "raised_advice"]

_NEXT = {
    Kind.MISSING_RANK: "Make every rank of the group reach {theirs}, or none.",
    Kind.EXTRA_COLLECTIVE: "Make the call at {mine} on every rank of the group, or on none.",
    Kind.WRONG_ORDER: (
        "Make both calls in one order on every rank; beware of loops over sets and of rank-dependent branches."
    ),
    Kind.ROOT_MISMATCH: (
        "Pass the same src or dst on every rank: a global rank, in a group, too (group_src=0: the group's first rank)."
    ),
    Kind.GROUP_MISMATCH: "Pass the same group= on every rank at {mine}.",
    Kind.SPLITS_MISMATCH: (
        "What rank i sends to rank j must be what rank j expects from rank i: exchange the sizes first."
    ),
    Kind.P2P_SIZE_MISMATCH: "Give both ends the same number of elements and the same dtype.",
    Kind.GROUP_CREATION_ORDER: (
        "Call new_group on every rank of the world, in one order, also where the rank is no member; "
        "or pass use_local_synchronization=True."
    ),
    Kind.THREAD_RACE: "Issue a group's collectives from one thread, or give each thread its own group.",
    Kind.UNEVEN_ITERATIONS: (
        "Give every rank the same number of iterations (drop_last, an even sampler) or use DDP's join()."
    ),
    Kind.RANK_RAISED: "Fix the exception of {who} first: whatever waits for it only follows from it.",
    Kind.RANK_EXITED: ("Find what makes {who} leave at that line: a rank may go only when nobody needs it any more."),
    Kind.RANK_KILLED: (
        "Look for the reason on its host: the kernel log (out of memory), the scheduler's log, a core dump."
    ),
    Kind.PROCESS_FROZEN: (
        "Continue it (kill -CONT) or look for a debugger, a full pipe or a suspended container on its host."
    ),
    Kind.HOST_STUCK: "Look at its stack: what it does there must end before it can come to the call.",
    Kind.NEVER_JOINED: (
        "Check that it was started, with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE, "
        "and that its host reaches the master."
    ),
    Kind.ASYNC_NEVER_WAITED: "Keep the handle that async_op=True returns and call wait() on it.",
    Kind.BUFFER_MODIFIED_IN_FLIGHT: (
        "Wait for the handle before writing to the tensor, or give the call its own copy."
    ),
    Kind.ALIASED_OUTPUTS: "Give each part a tensor of its own: [torch.empty_like(t) for _ in range(n)].",
    Kind.DDP_UNUSED_PARAMETER: (
        "Use every parameter in forward on every rank, or pass find_unused_parameters=True to DDP."
    ),
    Kind.NAN: (
        "Look at that rank's inputs and gradients before this call; "
        "torch.autograd.set_detect_anomaly(True) names the operator."
    ),
    Kind.STRAGGLER: "Look at what {who} {spends} time on: data loading, checkpoints, a slow device.",
    Kind.NETWORK_FAULT: "Check that link, its switch port and its NIC.",
}


_ALIKE = {
    Kind.SHAPE_MISMATCH: (
        "Give the tensor at {mine} one shape on every rank. Where it holds a batch: pad it to the longest (all_reduce "
        "MAX of its length first), or leave out a short last batch (drop_last=True)."
    ),
    Kind.DTYPE_MISMATCH: (
        "Use one dtype at {mine} on every rank: autocast, a default that depends on the device, or a loaded state may "
        "choose it for each rank."
    ),
}
"""Where the ranks are at one line."""


def no_record_advice(ranks: Sequence[int]) -> str:
    """The suggestion for ranks that nothing is known of."""
    who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {format_ranks(ranks)}"
    one = len(ranks) == 1
    its, record, host, they = ("its", "record", "host", "it") if one else ("their", "records", "hosts", "they")
    return (
        f"Find what became of {who}: read {its} log and the kernel log of {its} {host} (out of memory), and look for "
        f"{its} {record} (ring, or Flight Recorder dump: TORCH_FR_DUMP_TEMP_FILE says where), if {they} wrote any."
    )


_NOT_SIMULATED = ("NotSimulated: ", " is not simulated: ")
_STALE_STORE = (
    "gloo has called the address of a process or group that is gone: a rank died just before, or the store still holds "
    "what an earlier init_process_group wrote there (in this job, or of a crashed run in a file:// store). Give each "
    "init_process_group keys of its own (store=PrefixStore(str(n), store), or another port), or remove the file."
)
_OUT_OF_MEMORY = "OutOfMemoryError: CUDA out of memory"
_FROM_ENVIRONMENT = re.compile(r"environment variable (\w+) expected|_get_env_or_raise\(\"(\w+)\"\)")
"""torch's words, and its line, for a variable of the rendezvous that is missing, or no number."""
_CLIENTS = re.compile(r"waiting for clients\. (\d+)/(\d+) clients joined")
_NOT_A_MEMBER = re.compile(r"Global rank (\d+) is not part of group")


def raised_advice(who: str, exception: str, awaited: bool, *, everyone: bool = False, traceback: str = "") -> str:
    """The suggestion for ranks that raised *exception*, `ValueError: bad batch`, with that *traceback*; *awaited*:
    others wait for them; *everyone*: all ranks raised it."""
    kind, says = _NOT_SIMULATED
    if exception.startswith(kind) and says in exception:
        remedy = exception.partition(says)[2].splitlines()[0]
        return f"{remedy[:1].upper()}{remedy[1:]}."
    if exception.startswith(_OUT_OF_MEMORY):
        return (
            f"Let {who} need less: a smaller micro-batch, activation checkpointing, sharding; "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True where much is reserved but unallocated."
        )
    if "trying to initialize the default process group twice" in exception:
        return (
            "Call init_process_group once: guard it by `if not dist.is_initialized()`, make further groups with "
            "new_group, or call destroy_process_group() before."
        )
    if "connectFullMesh" in exception:
        return _STALE_STORE
    if (stranger := _NOT_A_MEMBER.search(exception)) is not None:
        return (
            f"Pass group_src= (or group_dst=) for a rank within the group: src= and dst= are global ranks, and rank "
            f"{stranger[1]} is not a member."
        )
    if (came := _CLIENTS.search(exception)) is not None:
        return (
            f"Only {came[1]} of the {came[2]} ranks that world_size says came to this rendezvous: correct world_size, "
            "or start the others, with the same address and port, and let them make this call."
        )
    if "DistStoreError: wait timeout" in exception:
        return (
            "Some rank has not set the key that is waited for: look for one that has not come to this rendezvous, and "
            "compare world_size with the number of ranks that make this call."
        )
    if exception.startswith("ValueError") and (read := _FROM_ENVIRONMENT.search(traceback or exception)) is not None:
        return (
            f"Set {read[1] or read[2]} for {who} as a launcher does: torchrun sets RANK and WORLD_SIZE, which are "
            "numbers, MASTER_ADDR and MASTER_PORT. Or pass rank= and world_size= to init_process_group."
        )
    if not everyone and exception.startswith("FileNotFoundError"):
        return (
            f"Look for what writes that file: where another rank does, {who} may have come too early; call "
            "dist.barrier() between the writing and the reading."
        )
    return advice(Kind.RANK_RAISED, who=who) if awaited else f"Fix the exception of {who}."


def advice(kind: Kind, *, who: str = "the rank", mine: str = "", theirs: str = "") -> str:
    """The suggestion for a kind; where there is none of its own, to make the two lines alike."""
    text = _NEXT.get(kind)
    if text is not None:
        spends = "spend their" if who.startswith("ranks ") else "spends its"
        return text.format(who=who, mine=mine, theirs=theirs, spends=spends)
    if mine == theirs and kind in _ALIKE:
        return _ALIKE[kind].format(mine=mine)
    if mine == theirs:
        return f"Make the call at {mine} alike on every rank."
    return f"Make the calls at {mine} and {theirs} alike."
