"""Goodput: which share of weeks of training is new steps, when nodes fail and checkpoints are written.

The job runs in periods of `every_s` seconds of steps and `write_s` seconds of writing a checkpoint. A failure ends the
period: what was computed since the last checkpoint is lost, and the job is down until the failure is noticed
(`detect_s`) and the job has started again (`restart_s`, with reading the checkpoint). A failure while it is down makes
it start again. Failures of nodes are independent and have exponential times between them, or times that were measured.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distsim.errors import UsageError
from distsim.text.units import format_time, seconds_of
from distsim.text.untrusted_input import read_text

if TYPE_CHECKING:
    import numpy as np

    from distsim.sim.outcome import Outcome

DAY_S = 86_400.0
WEEK_S = 7 * DAY_S
"""Length of a job whose number of tokens is not given."""
RUNS = 400
"""Simulated jobs, each with other failures."""
MOST_FAILURES = 100_000
"""Failures of one simulated job after which it is taken to make no progress."""


@dataclass(frozen=True, slots=True)
class FailurePlan:
    """How a job fails, and what it does about it. All times in seconds."""

    mtbf_s: float | None
    """Mean time between failures of one node."""
    between_s: tuple[float, ...]
    """Measured times between failures of the job, which `mtbf_s` replaces; they are drawn from at random."""
    every_s: float | None
    """Seconds of steps between checkpoints; None: the best."""
    write_s: float | None
    """Seconds for which a checkpoint stops the job; None: as the script's own."""
    detect_s: float
    restart_s: float


@dataclass(frozen=True, slots=True)
class Goodput:
    """Shares of the wall time of a long job. They add up to 1."""

    length_s: float
    """Seconds of steps that the job has to do."""
    every_s: float
    write_s: float
    job_mtbf_s: float
    """Mean time between failures of the whole job."""
    failures: float
    """Mean number of failures."""
    good: float
    """New steps."""
    saving: float
    """Writing checkpoints."""
    lost: float
    """Steps and checkpoints since the last complete checkpoint, which are computed again."""
    down: float
    """Noticing a failure and starting again."""
    low: float
    high: float
    """Tenth and ninetieth percentile of `good` over the simulated jobs."""
    best_every_s: float
    best_good: float
    """The interval with most new steps, and its expected share."""
    young_s: float
    """Interval by Young (CACM 17(9), 1974): sqrt(2 write mtbf)."""
    daly_s: float
    """Interval by Daly (FGCS 22(3), 2006, equation 37)."""

    @property
    def warning(self) -> str:
        """Return the line about an interval shorter than a checkpoint; empty for a longer one."""
        if self.every_s >= min(self.write_s, self.length_s):
            return ""
        return (
            f"a checkpoint takes {_long(self.write_s)}, longer than the {_long(self.every_s)} of steps between two: "
            "writing them leaves little time for steps"
        )


def add_failure_flags(parser: Any) -> None:
    """Add the flags of a job's failures."""
    group = parser.add_argument_group("failures in weeks of training (a job of --tokens, or of a week)")
    group.add_argument("--mtbf", metavar="TIME", help="mean time between failures of one node, such as 5000h")
    group.add_argument(
        "--failures", metavar="FILE", help="measured instead: hours between failures of the whole job, one in a line"
    )
    group.add_argument("--checkpoint-every", metavar="TIME", help="such as 30m (default: the best interval)")
    group.add_argument(
        "--checkpoint-takes", metavar="TIME", help="how long it stops the job (default: as the script's own)"
    )
    group.add_argument(
        "--detect", default="10m", metavar="TIME", help="until a failure is noticed (default: 10m, NCCL's timeout)"
    )
    group.add_argument(
        "--restart", default="5m", metavar="TIME", help="until it runs again, with reading the checkpoint (default: 5m)"
    )


def asks_for_goodput(args: argparse.Namespace) -> bool:
    """Return whether a flag asks for the cost of failures."""
    return not {args.mtbf, args.failures, args.checkpoint_every, args.checkpoint_takes} <= {None}


def failures_of(args: argparse.Namespace) -> FailurePlan:
    """Return the plan that the flags describe.

    Raises:
        UsageError: A value is not a time, the file has no times, or a flag lacks --mtbf or --failures.
    """
    if args.mtbf is None and args.failures is None:
        flag = "--checkpoint-takes" if args.checkpoint_every is None else "--checkpoint-every"
        raise UsageError(f"{flag} says what failures cost: expected --mtbf TIME or --failures FILE, too")
    if args.mtbf is not None and args.failures is not None:
        raise UsageError("expected --mtbf or --failures, got both")
    every, takes = args.checkpoint_every, args.checkpoint_takes
    return FailurePlan(
        None if args.mtbf is None else seconds_of(args.mtbf, "--mtbf", "5000h"),
        () if args.failures is None else _measured(args.failures),
        None if every is None else seconds_of(every, "--checkpoint-every", "30m"),
        None if takes is None else seconds_of(takes, "--checkpoint-takes", "40s"),
        seconds_of(args.detect, "--detect", "10m"),
        seconds_of(args.restart, "--restart", "5m"),
    )


def _measured(path: str) -> tuple[float, ...]:
    try:
        lines = [line.split("#")[0].strip() for line in read_text(path).splitlines()]
    except OSError as error:
        raise UsageError(f"--failures {path}: expected a file with hours in each line ({error.strerror})") from None
    hours = []
    for number, line in enumerate(lines, 1):
        if line:
            try:
                hours.append(float(line))
            except ValueError:
                hours.append(-1.0)
            if not 0.0 < hours[-1] < 1e7:
                raise UsageError(f"--failures {path}:{number}: expected hours between two failures, got {line[:40]!r}")
    if not hours:
        raise UsageError(f"--failures {path}: expected hours between failures, a number in each line, got none")
    return tuple(hour * 3_600.0 for hour in hours)


def expected_good(mtbf_s: float, every_s: float, write_s: float, down_s: float) -> float:
    """Return the expected share of new steps when failures of the job are exponential.

    Formula: Daly (FGCS 22(3), 2006, equation 20): a period of `every_s + write_s` takes
    `mtbf e^(down/mtbf) (e^((every+write)/mtbf) - 1)` seconds of wall time.

    Args:
        mtbf_s: Mean seconds between failures of the job.
        every_s: Seconds of steps in a period.
        write_s: Seconds of writing a checkpoint.
        down_s: Seconds from a failure to the first new step.
    """
    exponent = (every_s + write_s + down_s) / mtbf_s
    if exponent > 700.0:
        return 0.0
    return every_s / (mtbf_s * math.exp(down_s / mtbf_s) * math.expm1((every_s + write_s) / mtbf_s))


def best_interval(mtbf_s: float, write_s: float) -> float:
    """Return the seconds of steps between checkpoints with the largest `expected_good`, whatever the time down.

    The derivative vanishes where `(1 - x) e^(x + write/mtbf) = 1` for x = every/mtbf; solved by bisection.
    """
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2.0
        if (1.0 - middle) * math.exp(middle + write_s / mtbf_s) > 1.0:
            low = middle
        else:
            high = middle
    return high * mtbf_s


def daly_interval(mtbf_s: float, write_s: float) -> float:
    """Return Daly's estimate of the best interval (FGCS 22(3), 2006, equation 37)."""
    if write_s >= 2.0 * mtbf_s:
        return mtbf_s
    root = math.sqrt(write_s / (2.0 * mtbf_s))
    return math.sqrt(2.0 * write_s * mtbf_s) * (1.0 + root / 3.0 + root * root / 9.0) - write_s


def add_goodput(outcome: Outcome, plan: FailurePlan, num_nodes: int, seed: int) -> None:
    """Give the report of *outcome* its goodput, or a note why there is none."""
    training = outcome.training
    if training is None or not training.step_time_s:
        outcome.notes.append("no goodput: no optimizer completed a step on a GPU")
        return
    if plan.write_s is None and not training.saved.by_step:
        outcome.notes.append(
            "no goodput: the script wrote no checkpoint in the simulated steps; --checkpoint-takes TIME says how long "
            "one stops the job"
        )
        return
    tokens, rate = training.planned_tokens, training.tokens_per_s
    length_s = WEEK_S if tokens is None or rate is None else tokens / rate
    training.goodput = goodput(plan, length_s, num_nodes, training.saved.mean_s, seed)


def goodput(plan: FailurePlan, length_s: float, num_nodes: int, write_s: float, seed: int = 0) -> Goodput:
    """Simulate `RUNS` jobs with failures.

    Args:
        plan: How the job fails.
        length_s: Seconds of steps that it has to do.
        num_nodes: Nodes, each of which may fail.
        write_s: Seconds of a checkpoint, unless the plan says.
        seed: Of the random numbers.
    """
    import numpy as np

    write_s = write_s if plan.write_s is None else plan.write_s
    mtbf_s = plan.mtbf_s / num_nodes if plan.mtbf_s is not None else sum(plan.between_s) / len(plan.between_s)
    best_s = best_interval(mtbf_s, write_s)
    every_s = min(best_s if plan.every_s is None else plan.every_s, length_s)
    random = np.random.default_rng(seed)
    jobs = np.array([_job(plan, length_s, every_s, write_s, _times(plan, mtbf_s, random)) for _ in range(RUNS)])
    wall = jobs[:, :4].sum(axis=1)
    share = jobs[:, 0] / wall
    good, saving, lost, down = jobs[:, :4].sum(axis=0) / wall.sum()
    best_good = expected_good(mtbf_s, best_s, write_s, plan.detect_s + plan.restart_s)
    return Goodput(
        length_s, every_s, write_s, mtbf_s, float(jobs[:, 4].mean()),
        float(good), float(saving), float(lost), float(down),
        float(np.percentile(share, 10)), float(np.percentile(share, 90)),
        best_s, best_good, math.sqrt(2.0 * write_s * mtbf_s), daly_interval(mtbf_s, write_s),
    )  # fmt: skip


def _times(plan: FailurePlan, mtbf_s: float, random: np.random.Generator) -> Iterator[float]:
    """Yield the times from the job's start, or from one failure, to the next failure."""
    while True:
        yield from random.choice(plan.between_s, 64) if plan.mtbf_s is None else random.exponential(mtbf_s, 64)


def _job(
    plan: FailurePlan, length_s: float, every_s: float, write_s: float, failures: Iterator[float]
) -> tuple[float, float, float, float, int]:
    """Return seconds of new steps, of saving, lost and down, and the number of failures of one job.

    The last period ends with the job, without a checkpoint.
    """
    done_s = saving_s = lost_s = down_s = 0.0
    restart_s, count = 0.0, 0
    for until_s in failures:
        up_s = until_s - restart_s
        if up_s > 0.0:
            left_s = length_s - done_s
            periods = max(0, math.ceil(left_s / every_s) - 1)
            if left_s + periods * write_s <= up_s:
                return length_s, saving_s + periods * write_s, lost_s, down_s + restart_s, count
            complete = min(int(up_s / (every_s + write_s)), periods)
            done_s += complete * every_s
            saving_s += complete * write_s
            lost_s += up_s - complete * (every_s + write_s)
        down_s += min(until_s, restart_s)
        restart_s, count = plan.detect_s + plan.restart_s, count + 1
        if count > MOST_FAILURES:
            raise UsageError(
                f"--mtbf, --checkpoint-every: the job makes no progress: {count - 1:,} failures before its end; "
                "expected a shorter interval, quicker checkpoints or fewer failures"
            )
    raise AssertionError("failures never end")


def goodput_text(of: Goodput) -> str:
    """Return the shares, the failures and the best interval in two lines."""
    text = (
        f"{of.good:.1%} of the time ({of.low:.1%} to {of.high:.1%} in 8 jobs of 10): {of.length_s / DAY_S:.3g} days of "
        f"steps take {of.length_s / of.good / DAY_S:.3g} days; checkpoints {of.saving:.1%}, computed again "
        f"{of.lost:.1%}, down {of.down:.1%}; {of.failures:.3g} failures, one in {_long(of.job_mtbf_s)}"
    )
    if of.warning:
        text += f"\n{of.warning}"
    if abs(of.every_s - of.best_every_s) > 0.01 * of.best_every_s:
        text += f"\nwith a checkpoint every {_long(of.every_s)}; best {_long(of.best_every_s)}: {of.best_good:.1%}"
    else:
        text += f"\nwith a checkpoint every {_long(of.every_s)}, which is best"
    return f"{text} (Young {_long(of.young_s)}, Daly {_long(of.daly_s)})"


def _long(seconds: float) -> str:
    for unit, length_s in (("days", 86_400.0), ("h", 3_600.0), ("min", 60.0)):
        if seconds >= 2.0 * length_s:
            return f"{seconds / length_s:.3g} {unit}"
    return format_time(seconds)
