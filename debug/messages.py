"""Texts of diagnoses: calls, lines, ranks and waits as people write them, and advice.

Nothing is decided here. The advice is one sentence for each kind: `{who}` are the culprits, `{mine}` their line,
`{theirs}` that of the other ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from distsim.debug.matching.agreement import BARRIERS, payload_text
from distsim.debug.records import (
    CallRecord,
    CallWait,
    Group,
    HostWait,
    Phase,
    RankState,
    Site,
    StoreWait,
    Wait,
)
from distsim.debug.records.call import SERVE
from distsim.debug.records.frames import packaged
from distsim.debug.records.kinds import Kind
from distsim.debug.records.obligations import obligation
from distsim.debug.report.stack_tree import blank_addresses, short_path
from distsim.text.ranks import format_ranks, some_ranks

FROM_OUTSIDE = frozenset({"SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"})
"""Signals by which people, launchers and schedulers end a job."""
LONGEST = 300
"""Largest number of characters of an exception in a sentence."""
LONGEST_NAME = 60
"""The same of a thread's name."""
MOST_RUNS = 24
"""Ranges of ranks that a sentence holds; the lists of a diagnosis, and its report, have all its culprits."""
RAISES = re.compile(r"[\w.]*(Error|Exception|Interrupt|Exit)\b")
"""Pattern of the beginning of a traceback's last line."""
_NEXT = {
    Kind.MISSING_RANK: "Make every rank of the group reach {theirs}, or none.",
    Kind.EXTRA_COLLECTIVE: "Make the call at {mine} on every rank of the group, or on none.",
    Kind.WRONG_ORDER: (
        "Make both calls in the same order on every rank; beware of loops over sets and of rank-dependent branches."
    ),
    Kind.ROOT_MISMATCH: (
        "Pass the same src or dst on every rank. Both are global ranks, also in a subgroup (group_src=0 is its "
        "first rank)."
    ),
    Kind.GROUP_MISMATCH: "Pass the same group= on every rank at {mine}.",
    Kind.DEVICE_MISMATCH: "Move the tensor of {who} at {mine} to where the other ranks have theirs: .to({theirs}).",
    Kind.SPLITS_MISMATCH: (
        "What rank i sends to rank j must be what rank j expects from rank i: exchange the sizes first, and change "
        "none of them after that."
    ),
    Kind.P2P_SIZE_MISMATCH: "Give both ends the same number of elements and the same dtype.",
    Kind.THREAD_RACE: "Issue a group's collectives from one thread, or give each thread its own group.",
    Kind.UNEVEN_ITERATIONS: (
        "Give every rank the same number of iterations (drop_last, an even sampler) or use DDP's join()."
    ),
    Kind.RANK_RAISED: "Fix the exception of {who} first: other ranks wait only because of it.",
    Kind.RANK_EXITED: (
        "Find out why the program of {who} ends at that line: a rank may leave only when no other rank needs it."
    ),
    Kind.RANK_KILLED: "Look for who ended it: a person, a launcher, a scheduler, a time limit.",
    Kind.PROCESS_FROZEN: (
        "Continue it (kill -CONT) or look for a debugger, a full pipe or a suspended container on its host."
    ),
    Kind.HOST_STUCK: "Look at its stack: it must finish there before it can make the call.",
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
        "Give the tensor at {mine} one shape on every rank. If it holds a batch, pad it to the longest length "
        "(all_reduce MAX of the lengths), or drop a short last batch (drop_last=True)."
    ),
    Kind.DTYPE_MISMATCH: (
        "Use one dtype at {mine} on every rank: autocast, a default that depends on the device, or a loaded state "
        "may differ between ranks."
    ),
}
"""Advice if all ranks are at one line."""


def ranks_text(ranks: Iterable[int]) -> str:
    """Return ranks as text, such as `rank 3` or `ranks 0-2,4-7`."""
    listed = sorted(set(ranks))
    if not listed:
        return "no rank"
    if len(listed) == 1:
        return f"rank {listed[0]}"
    runs = format_ranks(listed).split(",")
    if len(runs) > MOST_RUNS:
        return f"ranks {','.join(runs[: MOST_RUNS // 2])},...,{runs[-1]} ({len(listed)} of them)"
    return f"ranks {','.join(runs)}"


def some_ranks_text(ranks: Iterable[int]) -> str:
    """Return `ranks 0,2,4,6 and 16 more` if the whole list is elsewhere; a few ranks like `ranks_text`."""
    listed = list(ranks)
    return some_ranks(listed) if listed else ranks_text(listed)


def capital(text: str) -> str:
    """Return *text* with its first letter in upper case."""
    return text[:1].upper() + text[1:]


def several(text: str, ranks: Iterable[int]) -> str:
    """Return *text* in the plural if there are several ranks: `is stopped` -> `are stopped`."""
    if len(set(ranks)) == 1:
        return text
    text = text.replace(" its program", " their program")
    verbs = (("has ", "have "), ("is ", "are "), ("was ", "were "), ("waits ", "wait "), ("runs", "run"))
    for one, many in verbs:
        if text.startswith(one):
            return many + text[len(one) :]
    return text


def are(ranks: Iterable[int], one: str, many: str) -> str:
    """Return the form of a verb for the number of ranks."""
    return one if len(set(ranks)) == 1 else many


def group_text(group: Group) -> str:
    """Return a group as text, such as `group dp (ranks 0-7)`."""
    return f"group {group.label or 'without a name'} ({ranks_text(group.ranks)})"


def group_name(label: str) -> str:
    """Return a group's label as it follows "on": `dp`, or `group 1` where torch has only numbered the group."""
    return f"group {label}" if label.isdigit() else label


def site_text(site: Site | None, *, function: bool = False, through: bool = True) -> str:
    """Return a position as text, such as `train.py:131` or `train.py:131 in step`.

    If a library made the call: `train.py:88 (through accelerate/accelerator.py:2345)`.
    """
    if site is None:
        return "an unknown line"
    text = f"{short_path(site.file)}:{site.line}"
    if function and site.function not in ("", "<module>"):
        text += f" in {site.function}"
    below = site.through
    return f"{text} (through {packaged(below.file)}:{below.line})" if through and below is not None else text


def thread_text(name: str) -> str:
    """Return a thread as text, such as `thread loader`; the program may have given it a name of any length."""
    shown = name if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}..."
    return "main thread" if name == "MainThread" else f"thread {' '.join(shown.split())}"


def call_text(call: CallRecord) -> str:
    """Return a call as text, such as `all_reduce #42`, `send to rank 1 (tag 7)`, `rpc_sync of train.step to
    worker1`.
    """
    if call.remote is not None:
        return remote_text(call)
    if not call.is_p2p:
        return f"{call.op} #{call.seq}"
    if call.group.has_signals:
        channel = call.group.name.partition(", ")[2]
        where = f" ({channel})" if channel else ""
        return f"signal {call.seq} {'to' if call.op == 'send' else 'of'} rank {call.peer}{where}"
    tag = f" (tag {call.tag})" if call.tag is not None else ""
    if call.op == "send":
        return f"send to rank {call.peer}{tag}"
    return f"recv from {'any rank' if call.peer is None else f'rank {call.peer}'}{tag}"


def remote_text(call: CallRecord) -> str:
    """Return `rpc_sync of train.step to worker1 (rank 1)`; for a served call `train.step for worker0 (rank 0)`."""
    remote = call.remote
    if remote is None:
        return call.op
    if call.op == SERVE:
        return f"{remote.function or 'a call'} for {worker_text(remote.caller, call.peer)}"
    to = worker_text(remote.callee, call.peer)
    return f"to_here from {to}" if call.op == "to_here" else f"{call.op} of {remote.function} to {to}"


def worker_text(name: str, rank: int | None) -> str:
    """Return a worker as text, such as `worker1 (rank 1)`."""
    return name if rank is None else f"{name} (rank {rank})"


def shape_of_call(call: CallRecord) -> str:
    """Return a call with its arguments, such as `all_reduce float32[4096,1024] SUM`."""
    if call.remote is not None:
        return remote_text(call)
    if call.op in BARRIERS:
        return call.op
    if call.op == "new_group":
        return f"new_group({list(call.new_ranks)})" if call.new_ranks is not None else "new_group"
    head = call_text(call) if call.is_p2p else call.op
    parts = [head] if call.group.has_signals else [head, payload_text(call)]
    if call.reduce_op:
        parts.append(call.reduce_op)
    if call.root is not None:
        parts.append(f"root {call.root}")
    return " ".join(parts)


def numbered(call: CallRecord) -> str:
    """Return a call with number and arguments, such as `all_reduce #42 float32[4096,1024] SUM`."""
    text = shape_of_call(call)
    return text if call.is_of_two else text.replace(call.op, f"{call.op} #{call.seq}", 1)


DEFAULT_PREFIX = re.compile(r"^default_pg/\d+//")
"""What torch puts before the program's keys in the default group's store."""


def shown_key(key: str) -> str:
    """Return a key of a store as the program names it."""
    return repr(DEFAULT_PREFIX.sub("", key))


def wait_text(wait: Wait) -> str:
    """Return the object of a wait as text."""
    if isinstance(wait, CallWait):
        call = wait.record
        on = "" if call.is_of_two else f" on {group_text(call.group)}"
        return f"{call_text(call)}{on}"
    if isinstance(wait, StoreWait):
        keys = ", ".join(map(shown_key, wait.keys[:3])) + (", ..." if len(wait.keys) > 3 else "")
        purpose = f" ({wait.purpose})" if wait.purpose else ""
        return f"store key{'s' if len(wait.keys) != 1 else ''} {keys}{purpose}"
    return wait.what


NEVER_COMPLETED = "is_completed() of a message, which gloo ends only in wait()"
ONLY_IN_WAIT = "on gloo is_completed() of a message stays False until then."
SECOND_WAIT = "a second wait() on the "


def second_wait(record: CallRecord) -> HostWait:
    """Return the wait of a rank for a message that it has waited for already, which never ends on gloo."""
    return HostWait(f"{SECOND_WAIT}{call_text(record)} of {site_text(record.site)}")


def exception_text(state: RankState) -> str | None:
    """Return `ValueError: bad batch` without the addresses of objects, so that ranks with the same exception have
    the same text.
    """
    return None if state.exception is None else blank_addresses(state.exception)


def exception_line(state: RankState) -> str | None:
    """Return the exception in one line for a sentence, as the traceback has the whole.

    The last line of an exception from a data loader's worker is the error itself; NCCL gives its reason after `Last
    error:`.
    """
    text = exception_text(state)
    return None if text is None else one_line(text)


def one_line(text: str) -> str:
    """Return the message of an exception in one line that fits into a sentence."""
    lines = [line for line in map(str.strip, text.splitlines()) if line]
    if len(lines) < 2:
        return _cut(text)
    rest = f" {_cut(lines[-1])}" if RAISES.match(lines[-1]) or lines[-2] == "Last error:" else ""
    return f"{_cut(lines[0])} ...{rest}"


def _cut(text: str) -> str:
    if len(text) <= LONGEST:
        return text
    head = text[: LONGEST - 4]
    end = head.rfind(". ") + 1  # of a sentence, where there is one
    return f"{head[:end] if end > LONGEST // 2 else head} ..."


def state_text(state: RankState, waits: Iterable[Wait], last: CallRecord | None) -> str:
    """Return the position of a rank as the rest of a sentence: `waits in barrier #3 ..., at train.py:9`."""
    seen = "" if state.silent_s is None else "last seen "
    at = f", {seen}at {site_text(state.site, function=True)}" if state.site else ""
    match state.phase:
        case Phase.BLOCKED:
            listed = list(waits)
            if not listed:
                return f"is blocked{at}"
            first = listed[0]
            where = state.site
            if isinstance(first, CallWait):
                where = first.record.site or where
            at = f", at {site_text(where)}" if where else ""
            verb = "waits on the host:" if isinstance(first, HostWait) else "waits in"
            if isinstance(first, StoreWait):
                verb = "waits for"
            return f"{verb} {wait_text(first)}{at}"
        case Phase.FINISHED:
            return "has finished its program"
        case Phase.EXITED:
            code = f" with exit code {state.exit_code}" if state.exit_code is not None else ""
            return f"has left its program{code}{at}"
        case Phase.RAISED:
            return f"raised {exception_line(state) or 'an exception'}{at}"
        case Phase.KILLED:
            if state.signal is None:
                return "has ended with an unknown exit code or signal"
            after = ", after its program and all its calls had ended" if state.over else ""
            return f"was killed by {state.signal}{after}"
        case Phase.FROZEN:
            return f"is stopped and does not run{at}"
        case Phase.HOST_STUCK:
            return f"is stuck outside torch.distributed{at}"
        case Phase.ABSENT:
            at = f", last seen at {site_text(state.site, function=True)}" if state.site is not None else ""
            return f"never joined the rendezvous{at}"
        case Phase.RUNNING if state.leaving or state.through:
            return "has ended its program, but its process still exists"
        case _:
            if state.site is not None:
                return f"{'was' if seen else 'is'} {seen}at {site_text(state.site, function=True)}"
            return f"runs, after {call_text(last)}" if last is not None else "runs"


_CRASHES = {
    "SIGABRT": "the process ended itself (terminate called, an assertion, a check of a library)",
    "SIGSEGV": "native code used memory that is not its own",
    "SIGBUS": "native code used memory that is not there (a full /dev/shm, a mapped file that was cut)",
    "SIGFPE": "native code divided an integer by zero",
    "SIGILL": "native code was built for another CPU",
}
"""Signals that a process sends itself, or gets for an instruction of its own."""


OUT_OF_MEMORY = "the kernel of its host killed a process for want of memory while the job ran"
INJECTED = "the fault was injected"
STARTED_ALONE = f"{INJECTED}, and the rank started again without the others"


def killed_advice(signal: str | None, who: str, reason: str | None = None) -> str:
    """Return the suggestion for ranks that *signal* ended; only SIGKILL may mean that memory was used up."""
    if reason == OUT_OF_MEMORY:
        return (
            f"Let {who} need less memory of the host (fewer data loader workers, a smaller cache, pinned memory), or "
            "give the job more (--mem): dmesg on that host names the process that the kernel killed."
        )
    if signal == "SIGKILL":
        return "Look for the reason on its host: the kernel log (out of memory), the scheduler's log."
    if signal not in _CRASHES:
        return advice(Kind.RANK_KILLED)
    return f"Read the last lines of {who} on stderr, and a core dump: {signal} usually means that {_CRASHES[signal]}."


def injected_advice(victims: Sequence[int]) -> str:
    """Return the suggestion for ranks that an injected fault has ended or stopped, for which *victims* wait."""
    if not victims:
        return "No other rank waited for it."
    return (
        f"{capital(some_ranks_text(victims))} {are(victims, 'does', 'do')} not get past it. A job survives such a "
        "fault if all its ranks are started again from a checkpoint (name all in the fault, with restart_after_s), or "
        "if it recovers, by torchft or enable_reconfigure=True (docs/elastic.md)."
    )


def after_the_end(states: Iterable[RankState]) -> list[str]:
    """Return a line for ranks that were killed after their program had ended, which is no fault of the job.

    A launcher ends the other ranks by SIGTERM, which is left out beside another signal.
    """
    together: dict[str, list[int]] = {}
    over = [state for state in states if state.over]
    for state in [state for state in over if state.signal not in FROM_OUTSIDE] or over:
        together.setdefault(state_text(state, (), None), []).append(state.rank)
    return [
        f"{ranks_text(ranks)} {several(text, ranks)}: only the exit code is lost" for text, ranks in together.items()
    ]


def no_record_advice(ranks: Sequence[int]) -> str:
    """Return the suggestion for ranks without any records."""
    who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {format_ranks(ranks)}"
    one = len(ranks) == 1
    its, record, host, they = ("its", "record", "host", "it") if one else ("their", "records", "hosts", "they")
    return (
        f"Find out what happened to {who}: read {its} log and the kernel log of {its} {host} (out of memory), and look "
        f"for {its} {record} (ring, or Flight Recorder dump: TORCH_FR_DUMP_TEMP_FILE says where), if {they} wrote any."
    )


_STALE_STORE = (
    "gloo connected to a process or group that no longer exists: a rank died just before, or the store still holds "
    "what an earlier init_process_group wrote there (in this job, or of a crashed run in a file:// store). Give each "
    "init_process_group keys of its own (store=PrefixStore(str(n), store), or another port), or remove the file."
)
_RAISED = (
    (r"^NotSimulated: [\s\S]*? is not simulated: (.+)", "{0}."),
    (
        r"^OutOfMemoryError: CUDA out of memory",
        "Let {who} need less: a smaller micro-batch, activation checkpointing, sharding; "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True where much is reserved but unallocated.",
    ),
    (
        r"has no attribute '_cuda_|not compiled with CUDA|no NVIDIA driver|No CUDA GPUs|have NCCL built in"
        r"|no GPUs found",
        "The program needs a GPU, and there is none here: simulate it, distsim run --on dgx-h100:1 train.py.",
    ),
    (
        r"trying to initialize the default process group twice",
        "Call init_process_group once: guard it by `if not dist.is_initialized()`, make further groups with "
        "new_group, or call destroy_process_group() before.",
    ),
    (r"connectFullMesh", _STALE_STORE),
    (
        r"\bport: (\d+)\b.*\bEADDRINUSE\b",
        "Give this job another MASTER_PORT than {0} (torchrun --standalone finds a free one), or end the process that "
        "listens there on the host of {who}: another job, or a rest of an earlier run.",
    ),
    (
        r"Global rank (\d+) is not part of group",
        "Pass group_src= (or group_dst=) for a rank within the group: src= and dst= are global ranks, and rank {0} is "
        "not a member.",
    ),
    (
        r"waiting for clients\. (\d+)/(\d+) clients joined",
        "Only {0} of the {1} ranks that world_size says joined this rendezvous: correct world_size, or start the "
        "missing ranks with the same address and port.",
    ),
    (
        r"DistStoreError: wait timeout",
        "A rank has not set the key that the others wait for: look for a rank that has not joined this rendezvous, and "
        "compare world_size with the number of ranks that make this call.",
    ),
    (
        r"(?:environment variable |_get_env_or_raise\(\")(\w+)(?: expected|\"\))",
        "Set {0} for {who} as a launcher does: torchrun sets RANK and WORLD_SIZE, which are numbers, MASTER_ADDR and "
        "MASTER_PORT. Or pass rank= and world_size= to init_process_group.",
    ),
)
"""Patterns of an exception, and what to do about it: `{0}` is the pattern's first group."""
_MISSING_FILE = (
    "Look for what writes that file: if another rank does, {who} may have read it too early; call dist.barrier() "
    "between writing and reading."
)


def raised_advice(who: str, exception: str, awaited: bool, *, everyone: bool = False, traceback: str = "") -> str:
    """Return the suggestion for ranks that raised *exception*, `ValueError: bad batch`, with that *traceback*;
    *awaited*: others wait for them; *everyone*: all ranks raised it.
    """
    text = exception
    if exception.startswith("ValueError"):  # which variable is not a number, only a line of torch's says
        text = traceback or exception
    for pattern, cure in _RAISED:
        if (match := re.search(pattern, text)) is not None:
            return capital(cure.format(*match.groups(), who=who))
    if not everyone and exception.startswith("FileNotFoundError"):
        return _MISSING_FILE.format(who=who)
    return advice(Kind.RANK_RAISED, who=who) if awaited else f"Fix the exception of {who}."


def creation_advice(call: CallRecord, line: str) -> str:
    """Return the suggestion for ranks that did not create a group: *line* of the program, which makes *call*, does."""
    entry = obligation(line, call.op)
    function, parent = ("the call", "the parent group") if entry is None else (entry.function, entry.parent)
    ranks = f"{parent} ({ranks_text(call.group.ranks)})"
    text = f"Call {function} on every rank of {ranks}, in the same order, also on ranks that are not members"
    if call.op == "split_group" and function != call.op:
        without = " and without use_local_synchronization" if "use_local_synchronization" in line else ""
        return f"{text}{without}: with device_id= in init_process_group NCCL divides their common communicator."
    return f"{text}; or pass use_local_synchronization=True." if function == "new_group" else f"{text}."


def advice(kind: Kind, *, who: str = "the rank", mine: str = "", other: str = "") -> str:
    """Return the advice for a kind; if it has none of its own, to make the calls at the two lines match."""
    text = _NEXT.get(kind)
    if text is not None:
        spends = "spend their" if who.startswith("ranks ") else "spends its"
        return text.format(who=who, mine=mine, theirs=other, spends=spends)
    if mine == other and kind in _ALIKE:
        return _ALIKE[kind].format(mine=mine)
    if mine == other:
        return f"Make the call at {mine} match on every rank (operation, dtype, shape, peers)."
    return f"Make the calls at {mine} and {other} match (operation, dtype, shape, peers)."
