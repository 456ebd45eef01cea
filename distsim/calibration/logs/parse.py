"""Parses one log of nccl-tests into its runs, with a note on everything that is left out.

A log is whatever a terminal or a job scheduler kept: lines have the prefixes of mpirun, srun, kubectl or Ray, NCCL's
own lines are between those of the table and sometimes inside one, and several runs may follow each other.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from distsim.network.bench import OPS, busbw_factor
from distsim.text.untrusted_input import brief, printable, read_bytes

FORCING = ("NCCL_ALGO", "NCCL_PROTO")
"""Settings that force a choice of NCCL, as tests do, and do not describe the cluster."""
LARGEST_LOG = 256 << 20
_LONGEST = 4096
"""Maximum length of a line in characters; NCCL's lines are shorter."""
_PREFIX = re.compile(
    r"^(?:\([\w-]+, (?:rank|pid|ip)=[^)]*\)\s?|\[\d+,\d+\]<std(?:out|err)>:\s?|\s*\d+:\s(?=\s*[#\d])|"
    r"\d{4}-\d\d-\d\dT\S+Z\s|\x1b\[[\d;]*m)+"
)
_COLOUR = re.compile(r"\x1b\[[\d;]*m|\[/?(?:green|red|bold|cyan)\]")
_NCCL = re.compile(r"[A-Za-z][\w.-]{0,255}:\d+:\d+ \[\d+\] (?:NCCL (?:INFO|WARN|TRACE)|graph/|misc/|transport/).*$")
_RANK = re.compile(
    r"#\s*Rank\s+(\d+)(?:\s+Group\s+(\d+))?\s+Pid\s+(\d+)\s+on\s+(\S+)\s+device\s+(\d+)\s+\[[^\]]*\]\s*(.*?)\s*$"
)
_HEAD = re.compile(r"#\s*nThread\s+(\d+)\s+nGpus\s+(\d+)\s+minBytes")
_ENDS = re.compile(r"#\s*(?:Out of bounds values|Avg bus bandwidth)")
_STARTS = re.compile(r"#\s*(?:nccl-tests version|Collective test starting)")
_NAMED = re.compile(r"\b(\w+?)_perf(?:_mpi)?\b")
_VERSION = re.compile(r"\b([NR])CCL version\s*:?\s*(\d+\.\d+(?:\.\d+)?)")
_CODE = re.compile(r"nccl-library=(\d+)")
_FAILED = re.compile(r"\bTest (?:NCCL|CUDA) failure \S+ '([^'/]*)|\bTest failure \S+")
_SETTING = re.compile(r"\b((?:NCCL|RCCL|FI)_\w+) set by environment to (.+?)\.?\s*$")
_EXPORTED = re.compile(r"^\+ export '?((?:NCCL|RCCL|FI)_\w+)=(.*?)'?$")
_PLUGIN = re.compile(r"NET/OFI (?:Initializing|Using) aws-ofi-nccl v?(\S+)")
_USING = re.compile(r"NCCL INFO Using network (.+?)\s*$")
_HCA = re.compile(r"NET/IB\s*:\s*Using (.*)$")
_NETS = {"socket": "tcp", "libfabric": "libfabric", "fastrak": "tcpxo", "gpudirecttcpx": "tcpx"}
_NO_TIME = re.compile(
    r"DEBUG|_FILE$|IFNAME|_HCA$|HOSTID|SOCKET_FAMILY|TIMEOUT|RETRY|_PATH$|COMM_ID|CONF_FILE|IB_GID_INDEX|_TC$|_SL$|IGNORE|"
    r"CUMEM|TUNER_PLUGIN$|NET_PLUGIN$|^NCCL_NET$|ASYNC|SET_|TESTS_"
)
"""Settings that name paths or choose a reaction to errors, and so do not influence times."""
_UNEVEN = 0.02
"""Relative difference, beyond rounding, up to which algbw may differ from size / time, and busbw / algbw from its
factor.
"""
_AGREED = 0.06
_WORTH = 1.0
"""Bandwidth in GB/s above which a value with two decimals is precise enough."""


@dataclass
class _Open:
    """A run that is being read."""

    op: str | None = None
    ranks: dict[int, tuple[str, str, str]] = field(default_factory=dict)
    """Host, process and GPU by rank."""
    again: bool = False
    """A rank was announced twice."""
    groups: set[str] = field(default_factory=set)
    columns: Columns | None = None
    lines: list[tuple[int, LogLine]] = field(default_factory=list)
    cuts: list[str] = field(default_factory=list)
    """Incomplete lines of the table, with the columns that they have."""
    shared: bool = False
    unlike: str = ""
    """Reasons why the times of this run differ from those of a plain collective."""
    unit: str = ""
    library: str = "nccl"
    version: str | None = None
    net: str | None = None
    plugin: str = ""
    settings: dict[str, str] = field(default_factory=dict)
    failure: str = ""
    """What nccl-tests printed as it failed."""

    @property
    def begun(self) -> bool:
        return bool(self.ranks or self.lines)


def parse_log(path: Path, name: str) -> tuple[list[LogRun], list[str], list[FailedRun]]:
    """Return the runs in *path*, a note for each part that is left out, and the runs that failed. *name* is the file's
    name in messages.

    Raises:
        OSError: The file cannot be read.
    """
    data = read_bytes(path, LARGEST_LOG)
    if b"\0" in data[:4096]:
        return [], [], []
    reader = _Reader(name)
    for number, line in enumerate(data.decode("utf-8", "replace").splitlines(), 1):
        reader.take(number, printable(_COLOUR.sub("", line[:_LONGEST])))
    reader.close()
    return reader.runs, reader.notes, reader.failed


class _Reader:
    def __init__(self, name: str) -> None:
        self.name = name
        self.runs: list[LogRun] = []
        self.notes: list[str] = []
        self.failed: list[FailedRun] = []
        self._op_seen: str | None = None
        self._open = _Open()
        self._torn: tuple[int, str] | None = None

    def take(self, number: int, raw: str) -> None:
        text = _PREFIX.sub("", raw)
        nccl_text = _NCCL.search(text)
        if nccl_text is not None:
            self._heard(nccl_text[0])
            text = text[: nccl_text.start()]
            if text.strip() and self._open.columns is not None and self._torn is None and text.split()[0].isdigit():
                self._torn = (number, text)  # NCCL spoke inside a line of the table
            return
        if self._torn is not None:
            begun, first = self._torn
            self._torn = None
            if text.strip() and not text.lstrip().startswith("#"):
                self._line(begun, f"{first} {text}")
                return
            self._line(begun, first)
        if text.lstrip().startswith(("#", "size", "(B)")):
            self._comment(number, text.strip())
        else:
            self._heard(text)
            self._line(number, text)

    def _heard(self, text: str) -> None:
        """Record the facts that NCCL's own log lines report."""
        run = self._open
        if match := _VERSION.search(text):
            run.library, run.version = ("rccl" if match[1] == "R" else "nccl"), match[2]
        if "rccl-tests" in text:
            run.library = "rccl"
        if match := _SETTING.search(text) or _EXPORTED.search(text):
            if not _NO_TIME.search(match[1]):
                run.settings[match[1]] = match[2].strip('"')
        if match := _PLUGIN.search(text):
            run.plugin = f"aws-ofi-nccl {match[1].rstrip('.').removesuffix('-aws').removesuffix('aws')}"
        if match := _USING.search(text):
            plain = match[1].lower()
            run.net = next((net for word, net in _NETS.items() if word in plain), run.net or plain)
        if match := _HCA.search(text):
            kinds = Counter(re.findall(r"/(RoCE|IB)\b", match[1]))
            if kinds:
                run.net = "ib" if kinds["IB"] >= kinds["RoCE"] else "roce"
        if named := _NAMED.search(text):
            self._op_seen = _op(named[1]) or self._op_seen
        if failed := _FAILED.search(text):
            run.failure = run.failure or (failed[1] or failed[0]).strip()

    def _comment(self, number: int, text: str) -> None:
        if (_STARTS.match(text) and self._open.begun) or (_ENDS.match(text) and self._open.lines):
            self.close()
        run = self._open
        if match := _CODE.search(text):
            run.version = run.version or _decoded(int(match[1]))
        if match := _HEAD.match(text):
            if run.lines:
                self.close()
                run = self._open
            run.shared = int(match[1]) * int(match[2]) > 1
            run.unlike = run.unlike or _unlike(text)
        elif text.startswith("# Blocking Enabled"):
            run.unlike = "each call was waited for (-z)"
        elif match := _RANK.match(text):
            if run.lines:
                self.close()
                run = self._open
            rank = int(match[1])
            run.again = run.again or rank in run.ranks
            run.ranks[rank] = (match[4], match[3], match[6])
            run.groups.add(match[2] or "0")
        elif (columns := Columns.of(text)) is not None:
            if run.lines:
                self.close()
                run = self._open
            run.columns = columns
        elif run.columns is not None and not run.lines and (unit := run.columns.other_unit(text)):
            run.unit = f"line {number} has {unit}"
        if named := _NAMED.search(text):
            run.op = _op(named[1]) or run.op
        if "RCCL" in text or "rccl" in text or _VERSION.search(text):
            self._heard(text)

    def _line(self, number: int, text: str) -> None:
        run = self._open
        if run.columns is None:
            return
        try:
            line = run.columns.read(text)
        except CutLine as cut:
            run.cuts.append(str(cut))
            self.notes.append(f"{self.name}:{number}: left out: the line is cut ({cut})")
            return
        if line is not None and line.size_bytes > 0:
            run.lines.append((number, line))

    def close(self) -> None:
        """Finish the open run: no more lines belong to it."""
        if self._torn is not None:
            (number, text), self._torn = self._torn, None
            self._line(number, text)
        run = self._open
        # What was said of the software holds for the runs that follow in the same file, until they say otherwise.
        self._open = _Open(
            library=run.library, version=run.version, net=run.net, plugin=run.plugin, settings=dict(run.settings)
        )
        if not run.begun:
            return
        op = run.op or self._op_seen or _named_by_file(self.name)
        self._op_seen = None
        hosts = Counter(host for host, _, _ in run.ranks.values())
        if run.ranks and (run.failure or not run.lines):
            reason = run.failure or "no line of figures"
            self.failed.append(FailedRun(self.name, tuple(hosts), reason))
        why = _refused(run, op)
        if why is not None:
            self.notes.append(f"{self.name}: left out: {why}")
            return
        assert op is not None
        rows = self._rows(run, busbw_factor(op, len(run.ranks)))
        processes = {(host, process) for host, process, _ in run.ranks.values()}
        if rows:
            self.runs.append(
                LogRun(
                    self.name,
                    op,
                    next(iter(run.ranks.values()))[2],
                    len(hosts),
                    len(run.ranks) // len(hosts),
                    "shared" if run.shared or len(processes) < len(run.ranks) else "process",
                    rows,
                    run.library,
                    run.version,
                    run.net,
                    run.plugin,
                    run.settings,
                    tuple(hosts),
                )
            )

    def _rows(self, run: _Open, factor: float) -> tuple[LogRow, ...]:
        if run.columns is not None and len(run.columns.blocks) == 1:
            self.notes.append(f"{self.name}: only one column of times instead of out-of-place and in-place")
        rows: dict[int, LogRow] = {}
        for number, line in run.lines:
            if line.num_wrong:
                problem = f"{line.num_wrong:g} wrong values"
                self.notes.append(f"{self.name}:{number}: left out: {line.size_bytes} bytes came with {problem}")
                continue
            if (off := line.contradiction(factor, (_UNEVEN, _AGREED))) is not None:
                self.notes.append(f"{self.name}:{number}: left out: {off}")
                continue
            known = rows.get(line.size_bytes)
            time_us = min(time for time in line.times_us)
            if known is None or time_us < known.time_us:
                rows[line.size_bytes] = LogRow(line.size_bytes, time_us, number)
        return tuple(sorted(rows.values(), key=lambda row: row.size_bytes))


def _refused(run: _Open, op: str | None) -> str | None:
    """Return why a run is unusable, or None if it is usable."""
    ranks = run.ranks
    if run.columns is not None and run.columns.lacking:
        return f"its table has no column {run.columns.lacking}"
    if not run.lines and run.cuts:
        return f"all {len(run.cuts)} of its lines are cut ({run.cuts[0]}), as its head has them"
    if not run.lines:
        return "it has the head of a run and no line of figures"
    if not ranks:
        return "no '# Rank' line: on how many GPUs and nodes it ran is not known"
    if op is None:
        return "it does not name its operation: put that into the file's name, as in all_reduce_2nodes.log"
    if run.columns is not None and run.columns.cpu_time:
        return "it has the CPU's time (-C 1), not the collective's"
    if run.unit or run.unlike:
        return run.unit or run.unlike
    if run.again:
        return "it contains a rank twice: lines of two runs are mixed, or nccl-tests was built without MPI=1"
    if sorted(ranks) != list(range(len(ranks))):
        return f"of {max(ranks) + 1} ranks {len(ranks)} have a '# Rank' line: its head is cut"
    if len(run.groups) > 1:
        return f"its ranks are split into {len(run.groups)} groups (NCCL_TESTS_SPLIT): several collectives at once"
    if len(ranks) == 1:
        return "it ran on one GPU"
    gpus = sorted({gpu for _, _, gpu in ranks.values()})
    if len(gpus) > 1:
        return f"it ran on GPUs of several kinds ({', '.join(brief(gpu) for gpu in gpus)})"
    return _uneven(ranks) or _disordered(run) or _unsound(run, op, len(ranks))


def _uneven(ranks: dict[int, tuple[str, str, str]]) -> str | None:
    counts = Counter(host for host, _, _ in ranks.values())
    if len({*counts.values()}) > 1:
        return f"hosts have unequal numbers of GPUs ({', '.join(str(n) for n in sorted({*counts.values()}))})"
    each = len(ranks) // len(counts)
    if any(len({ranks[rank][0] for rank in range(first, first + each)}) > 1 for first in range(0, len(ranks), each)):
        return "its ranks are dealt out to the hosts in turn: distsim has them in blocks (mpirun --map-by slot)"
    return None


def _disordered(run: _Open) -> str | None:
    """Return what is wrong with the order of sizes. Sizes should rise, and start again with each cycle (-N)."""
    sizes = [line.size_bytes for _, line in run.lines]
    for before, after in itertools.pairwise(sizes):
        if after <= before and after != sizes[0]:
            return f"{after} bytes come after {before}: lines of two runs are mixed"
    return None


def _unsound(run: _Open, op: str, size: int) -> str | None:
    """Return what is wrong if the bandwidths do not follow from sizes and times: they have other units or belong to
    another operation.
    """
    off: list[bool] = []
    factors: list[float] = []
    wrong_at: int | None = None
    for number, line in run.lines:
        for time_us, algbw, busbw in line.bandwidths():
            if time_us <= 0:
                return f"line {number} has a time of {time_us:g} us"
            own = line.size_bytes / time_us / 1e3
            if own > _WORTH or algbw > _WORTH:
                off.append(abs(algbw / own - 1) > _UNEVEN)
                if off[-1] and wrong_at is None:
                    wrong_at = number
            if algbw > _WORTH and busbw > 0:
                factors.append(busbw / algbw)
    if off and sum(off) > len(off) / 2:
        return f"its algbw is not size / time in bytes and us (line {wrong_at}): other units?"
    if factors:
        middle = sorted(factors)[len(factors) // 2]
        if abs(middle / busbw_factor(op, size) - 1) > _AGREED:
            fits = [one for one in OPS if abs(middle / busbw_factor(one, size) - 1) < _UNEVEN]
            like = f", as that of {' or '.join(fits)}" if fits else ""
            return f"named {op}, but its busbw is {middle:.3g} times algbw on {size} ranks{like}"
    return None


def _unlike(head: str) -> str:
    """Return options of the head that make another thing of a time."""
    settings = dict(re.findall(r"(agg iters|graph|unalign):\s*(\d+)", head))
    if int(settings.get("agg iters", 1)) > 1:
        return f"{settings['agg iters']} calls were started together (-m)"
    if int(settings.get("graph", 0)):
        return "it ran as a CUDA graph (-G), which is launched at another cost"
    if int(settings.get("unalign", 0)):
        return "its buffers were not aligned (-u)"
    return ""


def _decoded(code: int) -> str:
    """Return the version for an NCCL_VERSION_CODE of nccl.h: 22902 is 2.29.2; before 2.9, 2806 is 2.8.6."""
    if code >= 10000:
        return f"{code // 10000}.{code // 100 % 100}.{code % 100}"
    return f"{code // 1000}.{code // 100 % 10}.{code % 100}"


def _op(name: str) -> str | None:
    plain = name.lower().replace("_", "")
    return next((op for op in OPS if op.replace("_", "") == plain), None)


def _named_by_file(name: str) -> str | None:
    """Return the one operation that a file's name has; None if it has none or several."""
    rest, ops = re.sub(r"[-_. ]", "", Path(name).name.lower()), set()
    for op in sorted(OPS, key=len, reverse=True):
        if op.replace("_", "") in rest:
            ops.add(op)
            rest = rest.replace(op.replace("_", ""), " ")
    return next(iter(ops)) if len(ops) == 1 else None


@dataclass(frozen=True, slots=True)
class LogRow:
    """A size with the smaller of the out-of-place and in-place time, because first touch slows down either one at
    random."""

    size_bytes: int
    time_us: float
    line: int


@dataclass(frozen=True)
class FailedRun:
    """A run that began on some nodes and failed, or left no figures."""

    file: str
    hosts: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class LogRun:
    """All sizes of one operation on the same GPUs."""

    file: str
    op: str
    """nccl-tests' name: all_reduce, alltoall, ..."""
    gpu: str
    """Name of the GPU as the driver gives it (NVIDIA H100 80GB HBM3); empty if the log does not (some builds of
    rccl-tests).
    """
    nnodes: int
    nproc_per_node: int
    launcher: str
    """`process` if each GPU has a process; `shared` if one process drives several."""
    rows: tuple[LogRow, ...]
    library: str = "nccl"
    """nccl or rccl."""
    version: str | None = None
    """Version of the library; None if the log does not give it."""
    net: str | None = None
    """Network that NCCL reports (NCCL_DEBUG=INFO): ib, roce, tcp, libfabric, tcpx, tcpxo."""
    plugin: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Environment that NCCL read and that changes times."""
    hosts: tuple[str, ...] = ()
    """Names of the nodes, in the order of their ranks."""

    @property
    def where(self) -> str:
        """Return the number of nodes and the GPUs on each, such as `2 x 8`."""
        return f"{self.nnodes} x {self.nproc_per_node}"

    @property
    def configuration(self) -> tuple[object, ...]:
        """Return what determines the time: runs with equal configurations should take the same time."""
        forced = tuple(self.settings.get(name, "") for name in FORCING)
        return (self.op, self.nnodes, self.nproc_per_node, self.launcher, *forced)


# -- The table in a log: its head says which columns there are and in which units, a line has a size and its times.
#
# Source: NVIDIA/nccl-tests (2.0 to 2.19, src/common.cu and src/util.cu) and ROCm/rccl-tests (src/common.cu): `%12li`
# for size and count, type, redop (blank in old all_gathers), root (since 2.8), then for out-of-place, in-place or both
# time, algbw, busbw and #wrong, with -I also i_min, i_max, i_p99, i_cv%, with -S a timestamp of two words at the end.

_UNITS = {"time": "(us)", "algbw": "(GB/s)", "busbw": "(GB/s)", "i_cv%": "(%)"}
_UNITS |= dict.fromkeys(("i_min", "i_max", "i_p99"), "(us)")
_TYPES = re.compile(r"^(u?int(8|32|64)|u?char|half|float(16|8\w*)?|double|b(float|f)16|f(p)?8_?e\dm\d\w*|fp\d+)$")
_REDOPS = re.compile(r"^(sum|prod|min|max|avg|mulsum|none)$")


class CutLine(ValueError):
    """A line of the table that lacks columns; the text names what is missing."""


def _last_digit(figure: str) -> float:
    """Return the value of one unit in the last printed digit: 0.01 for 60.25."""
    digits, _, power = figure.lower().partition("e")
    return float(10.0 ** (int(power or 0) - len(digits.partition(".")[2])))


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line of the table: by block (out-of-place, in-place) the time, both bandwidths, and wrong values if any."""

    size_bytes: int
    redop: str
    blocks: tuple[dict[str, str], ...]

    @property
    def times_us(self) -> list[float]:
        """Return the times of each block in microseconds."""
        return [float(block["time"]) for block in self.blocks]

    @property
    def num_wrong(self) -> float:
        """Number of wrong values in all blocks; 0 if nccl-tests did not check them (N/A)."""
        return sum(float(block.get("#wrong", "0").replace("N/A", "0") or 0) for block in self.blocks)

    def contradiction(self, factor: float, shares: tuple[float, float]) -> str | None:
        """Return how a line's time and bandwidths contradict each other; None if they agree.

        *factor* is busbw / algbw. *shares* are the tolerated relative differences of algbw and busbw, beyond their
        rounding.
        """
        for block in self.blocks:
            time_us = float(block["time"])
            own = self.size_bytes / time_us / 1e3
            unprinted = _last_digit(block["time"]) / time_us
            for name, expected, share in (("algbw", own, shares[0]), ("busbw", own * factor, shares[1])):
                if abs(float(block[name]) - expected) > expected * (share + unprinted) + _last_digit(block[name]):
                    return (
                        f"{self.size_bytes} bytes in {block['time']} us make {expected:.2f} GB/s of {name}, it says "
                        f"{block[name]}"
                    )
        return None

    def bandwidths(self) -> list[tuple[float, float, float]]:
        """Return (time_us, algbw, busbw) of each block."""
        return [(float(b["time"]), float(b["algbw"]), float(b["busbw"])) for b in self.blocks]


@dataclass(frozen=True)
class Columns:
    """Columns of a table, read from its header."""

    lead: tuple[str, ...]
    blocks: tuple[tuple[str, ...], ...]
    timestamp: bool
    cpu_time: bool

    @staticmethod
    def of(text: str) -> Columns | None:
        """Parse the header line with column names; None for any other line."""
        names = text.replace("#wrong", "wrong#").lstrip("# ").split()
        names = ["#wrong" if name == "wrong#" else name for name in names]
        if names[:2] != ["size", "count"] or not {"time", "cputime"} & set(names):
            return None
        first = next(index for index, name in enumerate(names) if name in ("time", "cputime"))
        timestamp, rest = names[-1] == "timestamp", names[first : -1 if names[-1] == "timestamp" else None]
        blocks: list[list[str]] = []
        for name in rest:
            if name in ("time", "cputime"):
                blocks.append([])
            blocks[-1].append("time" if name == "cputime" else name)
        return Columns(tuple(names[:first]), tuple(map(tuple, blocks)), timestamp, "cputime" in names)

    def other_unit(self, text: str) -> str | None:
        """Return a unit in the header line that nccl-tests does not use; None if all are known."""
        units = re.findall(r"\([^)]*\)", text)
        if not text.lstrip("# ").startswith("(") or not units:
            return None
        expected = ["(B)", "(elements)", *(_UNITS[name] for block in self.blocks for name in block if name in _UNITS)]
        pairs = zip(units, expected, strict=False)
        return next((f"{one} where {other} is expected" for one, other in pairs if one != other), None)

    @property
    def lacking(self) -> str | None:
        """Return a column that is missing and needed; None if all are there."""
        needed = ("time", "algbw", "busbw")
        return next((name for name in needed for block in self.blocks if name not in block), None)

    def read(self, text: str) -> LogLine | None:
        """Return the figures of a line of the table; None for any other line; CutLine where some are missing."""
        words = text.split()
        if self.lacking or len(words) < 2 or not (words[0].isdigit() and words[1].isdigit()):
            return None
        if len(words) < 3:
            raise CutLine(f"2 of {self.width} columns")
        if not _TYPES.match(words[2]):
            return None
        lead = list(self.lead)
        redop = words[3] if len(words) > 3 else ""
        if "redop" in lead and not _REDOPS.match(redop):
            lead.remove("redop")  # blank in old versions where nothing is reduced
        figures = words[len(lead) :]
        wanted = sum(map(len, self.blocks))
        if len(figures) < wanted:
            raise CutLine(f"{len(words)} of {len(lead) + wanted} columns")
        blocks = []
        for names in self.blocks:
            blocks.append(dict(zip(names, figures, strict=False)))
            figures = figures[len(names) :]
        line = LogLine(int(words[0]), redop if "redop" in lead else "none", tuple(blocks))
        try:
            known = [*(figure for block in line.bandwidths() for figure in block), line.num_wrong]
        except ValueError as error:
            raise CutLine(f"a figure that is not a number ({error})") from None
        if not all(map(math.isfinite, known)):
            raise CutLine("a figure that is not a number (inf or nan)")
        return line

    @property
    def width(self) -> int:
        """Return the number of columns in a line."""
        return len(self.lead) + sum(map(len, self.blocks))
