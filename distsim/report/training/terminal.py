"""Training section of the terminal summary: step time, time by rank, operators, gains and memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from distsim.collectives.uncertainty import LAUNCH_BOUND, step_error
from distsim.debug.messages import ranks_text
from distsim.report.tables import bar, plain_table, short_ranges
from distsim.report.training.section import cost_of, cost_text, gains, memory_table, saving_share, shortage
from distsim.text.distributions import UNIFORM
from distsim.text.ranks import format_ranks
from distsim.text.units import format_bytes, format_time, plural

if TYPE_CHECKING:
    from distsim.sim.observe.metrics import Fused, RankTraining, RateRange, Training

MOST_ROWS = 12
"""Largest number of rows of different ranks; with more, the slowest are shown."""
MOST_OPERATORS = 8
MOST_PARTS = 6
MOST_READS = 5
LEAST_SHARE = 0.005
"""Smallest share of a step that is told."""
NAMED_RATE = 0.02
"""Smallest share of a step that kernels of a kind take for the uncertainty of their rate to be printed."""

Part = tuple[str, RenderableType]


def training_parts(training: Training) -> Iterator[Part]:
    """Yield the parts of the section: a title and what is printed under it."""
    gpus = f"{plural(training.num_gpus, 'GPU')} ({training.gpu})"
    for short in training.out_of_memory:
        yield f"out of memory: {ranks_text(short.ranks)}", shortage(short, training)
    yield f"training on {gpus}", _head(training)
    if training.steps:
        yield f"where a step goes (mean of {_steps(training)})", _ranks(training)
        yield "slowest operators, per step", _operators(training)
        yield "memory at its peak", memory_table(training)
        if training.critical_path:
            yield f"critical path of {_traced_part(training)}", _path(training)
        helps = _gains(training)
        if helps is not None:
            yield f"what would help most (estimates: the slowest rank's {_mean_step(training)}without that cost)", helps
    if training.saved.writes or training.saved.reads:
        yield "checkpoints", _saved(training)
    if training.reads:
        yield "unknown values that the program read", _reads(training)


def _steps(training: Training) -> str:
    first, last = training.first_counted, training.steps
    return f"step {last}" if first == last else f"steps {first}-{last}"


def _mean_step(training: Training) -> str:
    """Return a remark with the length of the mean step, if single slow steps make it differ from the median above."""
    rank, middle_s = training.pacing, training.step_time_s
    if rank is None or middle_s is None or abs(rank.step_s - middle_s) < 0.01 * middle_s:
        return "step "
    return f"mean step, {format_time(rank.step_s)}, "


def _traced_part(training: Training) -> str:
    """Return the part of the step that the critical path covers: all of it, or its end if there are too many
    kernels."""
    share = training.critical_path_share or 0.0
    return f"{'' if share > 0.995 else f'the last {share:.0%} of '}step {training.steps}"


def _head(training: Training) -> RenderableType:
    lines = Table.grid(padding=(0, 2))
    lines.add_column(style="dim")
    lines.add_column()
    if training.steps:
        lines.add_row("step", _step(training))
        if training.step_low_s is not None and training.step_high_s is not None:
            lines.add_row("likely", _sure(training))
        if training.host_bound or training.step_regime == LAUNCH_BOUND:
            lines.add_row("host", _launch_bound(training))
        lines.add_row("tokens", _tokens(training))
        use = _use(training)
        if use is not None:
            lines.add_row("MFU", use)
        if training.routing:
            lines.add_row("routing", _routing(training))
        if (cost := cost_of(training)) is not None:
            lines.add_row("cost", cost_text(cost, training))
        if training.goodput is not None:
            from distsim.report.training.goodput import goodput_text

            lines.add_row("goodput", goodput_text(training.goodput))
    else:
        lines.add_row("step", "none: no optimizer completed a step")
    if training.fused is not None:
        lines.add_row("fused", _fused(training.fused))
    room = training.memory_bytes - training.context_bytes
    share = training.peak_reserved_bytes / room
    memory = Text.assemble(
        (format_bytes(training.peak_reserved_bytes), "bold red" if share > 0.95 else "bold"),
        f" reserved at the peak, {format_bytes(training.peak_allocated_bytes)} allocated, "
        f"of {format_bytes(room)} ({share:.0%})",
    )
    lines.add_row("memory", memory)
    return lines


def _routing(training: Training) -> str:
    """Return how tokens chose among the experts, and what the unevenness costs."""
    if training.routing == UNIFORM:
        return "even: the scores of the experts have no values (--routing zipf:1.2, measured:FILE or worst)"
    pacing, step_s = training.pacing, training.step_time_s
    if pacing is None or not step_s or training.routing_s < LEAST_SHARE * step_s:
        return f"{training.routing}, which costs nothing to speak of"
    more = training.routing_s / (step_s - training.routing_s)
    holds = f"the slowest expert's rank ({pacing.rank}) holds the step: about {more:.0%} above even routing"
    return f"{training.routing}: {holds}"


def _saved(training: Training) -> RenderableType:
    saved = training.saved
    lines = []
    for verb, calls, nbytes, seconds in (
        ("wrote", saved.writes, saved.written_bytes, saved.write_s),
        ("read", saved.reads, saved.read_bytes, saved.read_s),
    ):
        if calls:
            rate = f"{nbytes / seconds / 1e9:.3g} GB/s" if seconds else "no time"
            lines.append(
                f"{verb} {format_bytes(nbytes)} in {calls:,} part{'s' * (calls > 1)}: {format_time(seconds)}, {rate}"
            )
    text = f"rank {training.saved_rank}, the slowest, " + "; ".join(lines)
    share = saving_share(training)
    if share is not None:
        often = "every step" if saved.every == 1 else f"every {saved.every:g} steps"
        text += f"\na checkpoint {often} takes {format_time(saved.mean_s)}: {share:.1%} of the time"
    return Text(text)


def _fused(fused: Fused) -> Text:
    calls = sum(fused.functions.values())
    names = ", ".join(list(fused.functions)[:2]) + (", ..." if len(fused.functions) > 2 else "")
    host = f"{format_time(abs(fused.host_saved_s))} {'less' if fused.host_saved_s >= 0 else 'more'} on the host"
    return Text.assemble(
        (f"{fused.kernels_before:,} kernels are {fused.kernels_after:,}", "bold"),
        f" in {calls:,} calls of compiled code ({names}; all of rank {fused.rank}'s run)\n"
        f"{format_time(fused.gpu_saved_s)} less of the GPU's time, {host}, than eagerly",
    )


def _step(training: Training) -> Text:
    assert training.step_time_s is not None
    times = training.step_times_s[-(training.steps - training.first_counted + 1) :]
    which = _steps(training)
    if training.steps < 3:
        which += ": fewer than three steps, so it includes the allocations of the first"
    elif min(times) < max(times) * 0.99:
        kind = "shorter" if len(times) == 2 and training.step_time_s == min(times) else "median"
        which = f"{kind} of {which}, {format_time(min(times))} to {format_time(max(times))}"
    else:
        which = f"median of {which}"
    bound = ", host-bound" if training.host_bound else ""
    return Text.assemble((format_time(training.step_time_s), "bold"), (bound, "yellow"), f" ({which})")


def _sure(training: Training) -> Text:
    """Return the interval of measured steps and its basis."""
    assert training.step_low_s is not None
    assert training.step_high_s is not None
    assert training.step_regime is not None
    known = step_error(training.step_regime, training.num_gpus, training.gpu)
    rates = [f"{rate.kind} ({_sources(rate)})" for rate in training.rates if rate.share >= NAMED_RATE]
    return Text.assemble(
        f"{format_time(training.step_low_s)} to {format_time(training.step_high_s)} ",
        (
            f"in 8 cases of 10, by {known.rows} published steps of {known.frameworks} frameworks ({known.regime}), "
            f"exposed communication, and the {training.gpu}'s {', '.join(rates) or 'rates'}",
            "dim",
        ),
        *(f"; {reason}" for reason in known.unmeasured),
    )


def _sources(rate: RateRange) -> str:
    """Return how well a rate of the GPU is known: the range of its time, by how many sources."""
    number = {0: "no source of its own", 1: "one source"}.get(rate.sources, f"{rate.sources} sources")
    return f"{number}: {rate.shortest - 1:+.0%} to {rate.longest - 1:+.0%}"


def _launch_bound(training: Training) -> Text:
    """Return how much of a step the host needs for launches."""
    assert training.host_work_s is not None
    assert training.step_time_s is not None
    share = training.host_work_s / training.step_time_s
    rank = training.pacing
    needs = f"needs {format_time(training.host_work_s)}, {share:.0%} of the step, to launch its work"
    if rank is not None and training.host_bound:
        needs += f", and the GPU waits {format_time(rank.host_s)} for it"
    return Text.assemble(
        (f"{needs}: ", "yellow"),
        "module calls, data loading and logging come on top and may dominate; published steps of this kind took longer",
    )


def _tokens(training: Training) -> Text:
    if training.tokens_per_s is None or training.tokens_per_s_per_gpu is None:
        return Text(training.tokens_how, style="dim")
    return Text.assemble(
        (f"{training.tokens_per_s_per_gpu:,.0f}/s per GPU", "bold"),
        f", {training.tokens_per_s:,.0f}/s in total; {training.tokens_per_step:,.0f} per step",
        (f" ({training.tokens_how})", "dim"),
    )


def _use(training: Training) -> Text | None:
    if training.mfu is None or training.hfu is None or training.peak_flops_per_s is None:
        return None
    line = Text(f"{training.mfu:.1%}", style="bold")
    if training.recomputes and training.hfu > training.mfu * 1.005:
        line.append(f", HFU {training.hfu:.1%} including recomputation", "not bold")
    peak = f"{training.peak_flops_per_s / 1e12:,.0f} TFLOP/s in {training.peak_dtype}"
    line.append(f" of {peak}", "not bold")
    if max(training.mfu, training.hfu) > 1.0:
        line.append(
            "\nmore than the GPU can do: the counted steps do not all do the same work: some steps lack the work of "
            "others (such as an optimizer's step), or part of the work is not in "
            f"{training.peak_dtype}",
            "bold yellow",
        )
    return line


def _ranks(training: Training) -> RenderableType:
    alike: dict[tuple[str, ...], list[RankTraining]] = {}
    saves = any(rank.saving_s for rank in training.ranks)
    for rank in training.ranks:
        if rank.step_s:
            alike.setdefault(_cells(rank, saves), []).append(rank)
    rows = sorted(alike.items(), key=lambda item: item[1][0].rank)
    if len(rows) > MOST_ROWS:
        rows = sorted(rows, key=lambda item: -item[1][0].step_s)[:MOST_ROWS]
    parts_of_step = (">step", ">compute", ">exposed", ">bubble", ">host-bound", *([">saving"] if saves else []))
    table = plain_table(">ranks", *parts_of_step, ">overlap", ">memory")
    table.columns[0].no_wrap = True
    paces = training.pacing
    for cells, ranks in rows:
        numbers = short_ranges(format_ranks(rank.rank for rank in ranks))
        others = sum(len(rank.like) for rank in ranks) - len(ranks)
        numbers += f" (for {others} more)" if others else ""
        table.add_row(numbers, *cells, style="bold" if paces in ranks and len(rows) > 1 else "")
    lines = [
        "exposed: communication that no computation hides; bubble: waiting for a",
        "pipeline message; host-bound: waiting for launches; overlap: the share of",
        "communication that computation hides",
        *(["saving: waiting until a checkpoint is written"] if saves else []),
    ]
    legend = Text("\n".join(lines), style="dim")
    left = len(alike) - len(rows)
    if left > 0:
        legend = Text.assemble((f"and {left} more with shorter steps\n", "dim"), legend)
    parts: list[RenderableType] = [table, legend]
    if paces is not None and paces.waits and paces.exposed_s + paces.bubble_s > 0.01 * paces.step_s:
        parts.append(_waits(paces))
    return Group(*parts)


def _waits(rank: RankTraining) -> Text:
    """Return what the slowest rank waits for."""
    waits = []
    for wait in rank.waits[:3]:
        shown_s = wait.moving_s + wait.late_s
        if shown_s > 0.005 * rank.step_s:
            late = f", {format_time(wait.late_s)} of it for a late rank" if wait.late_s > 0.1 * shown_s else ""
            waits.append(f"{wait.op} of {wait.group} {format_time(shown_s)}{late}")
    return Text(f"rank {rank.rank}, the slowest, waits for: {'; '.join(waits) or 'nothing for long'}")


def _cells(rank: RankTraining, saves: bool) -> tuple[str, ...]:
    step_s = rank.step_s
    parts = [rank.compute_s, rank.exposed_s, rank.bubble_s, rank.host_s, *([rank.saving_s] if saves else [])]
    shares = [f"{part / step_s:.1%}" for part in parts]
    busy_s = rank.overlapped_s + rank.exposed_s
    hidden = f"{rank.overlapped_s / busy_s:.0%}" if busy_s else "-"
    return format_time(step_s), *shares, hidden, format_bytes(rank.peak_reserved_bytes)


def _operators(training: Training) -> RenderableType:
    table = plain_table("operator", ">calls", ">time", "of the step")
    for operator in training.operators[:MOST_OPERATORS]:
        assert training.pacing is not None
        share = operator.time_s / training.pacing.step_s  # means, both
        table.add_row(operator.name, f"{operator.count:,.0f}", format_time(operator.time_s), bar(share))
    return table


def _path(training: Training) -> RenderableType:
    total_s = sum(part.time_s for part in training.critical_path)
    table = plain_table("", "", ">", "")
    for part in training.critical_path[:MOST_PARTS]:
        table.add_row(part.kind, part.name, format_time(part.time_s), bar(part.time_s / total_s))
    left = training.critical_path[MOST_PARTS:]
    if not left:
        return table
    rest_s = format_time(sum(part.time_s for part in left))
    return Group(table, Text(f"and {len(left)} more that take {rest_s}: --report FILE has all", style="dim"))


def _gains(training: Training) -> RenderableType | None:
    gain_list = gains(training)
    if not gain_list:
        return None
    table = plain_table("if", ">step", ">less", "that is")
    for gain in gain_list:
        assert training.pacing is not None
        less = 1 - gain.step_s / training.pacing.step_s
        table.add_row(gain.name, format_time(gain.step_s), f"-{less:.1%}", Text(gain.how, style="dim"))
    return table


def _reads(training: Training) -> RenderableType:
    from distsim.sim.device.operators.reading import COPIED, EMPTY, INTEGER, ROUTED

    instead = {COPIED: "zeros", EMPTY: "selects nothing", INTEGER: "placeholder 0"}
    lines = []
    for read in training.reads[:MOST_READS]:
        got = instead.get(read.what, f"placeholder {training.placeholder:g}")
        got += f", {read.count:,} time{'s' if read.count > 1 else ''}"
        if read.what.startswith((ROUTED, "lengths ")):
            got = read.what
        line = Text(f"{read.expression or read.what} at {read.where}: {got}")
        if read.condition:
            line.append(f"; the placeholder decided the {read.condition} there", "yellow")
        elif not read.expression and read.code:
            line.append(f"  {read.code}", "dim")
        lines.append(line)
    left = len(training.reads) - MOST_READS
    if left > 0:
        lines.append(Text(f"and {plural(left, 'more line')}: --report FILE has all", style="dim"))
    return Group(*lines)
