"""A test's body on every rank: run it on its arm, and make one failure of what the ranks say."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from distsim.plugin.place import Options

__all__ = ["RankReport", "Verdict", "describe", "everywhere", "rank_body"]

_ADDRESS = re.compile(r"0x[0-9a-f]+")
_OWN_ARGUMENTS = re.compile(r"^(.*\b)?(rank = \d+|world = World\(.*\)).*$", re.MULTILINE)
"""The line in which pytest shows the arguments of the body."""


@dataclass(slots=True)
class RankReport:
    """How the body ended on one rank that did not pass."""

    kind: str
    """`failed`, `skipped`, `xfailed`."""
    text: str
    """The failure as pytest shows it, introspection included; the reason of a skip."""
    headline: str
    """Its last line: `AssertionError: assert 3 == 4`."""


@dataclass(slots=True)
class Verdict:
    """What an arm says when all ranks have ended or been ended."""

    ranks: dict[int, RankReport] = field(default_factory=dict)
    report: str = ""
    """The diagnosis, as people read it; empty where there is none."""
    headline: str = ""
    """Its first line."""
    notes: list[str] = field(default_factory=list)


def everywhere(item: pytest.Function, body: Callable[..., Any], marker: pytest.Mark) -> Callable[..., None]:
    """What pytest calls instead of *body*."""

    @functools.wraps(body)
    def run(*args: Any, **kwargs: Any) -> None:
        __tracebackhide__ = True
        try:
            for options in _options(item, marker):
                verdict = _arm(options.on)(item, functools.partial(body, *args), kwargs, options)
                _judge(verdict, options)
        except pytest.UsageError as mistake:
            raise pytest.fail.Exception(str(mistake), pytrace=False) from None

    return run


def _options(item: pytest.Function, marker: pytest.Mark) -> list[Options]:
    params: Mapping[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
    sizes = params.get("distsim_world_size", marker.args[0] if marker.args else marker.kwargs.get("n"))
    arms = params.get("distsim_on", marker.kwargs.get("on", "sim"))
    # A method of a unittest.TestCase cannot be parametrized: there all combinations run one after the other.
    listed = [
        (n, on)
        for on in (arms if isinstance(arms, list | tuple) else [arms])
        for n in (sizes if isinstance(sizes, list | tuple) else [sizes])
    ]
    return [Options.read(marker, n, on) for n, on in listed]


def _arm(on: str) -> Callable[..., Verdict]:
    if on == "sim":
        from distsim.plugin.sim_arm import run_simulated

        return run_simulated
    from distsim.plugin.gloo_arm import run_real

    return run_real


def rank_body(
    item: pytest.Function, body: Callable[..., Any], kwargs: Mapping[str, Any], options: Options
) -> Callable[[], None]:
    """The body as one rank runs it. It raises what the test raises; `describe` tells it afterwards."""

    def run() -> None:
        __tracebackhide__ = True
        import torch.distributed as dist

        if options.init and not dist.is_initialized():
            dist.init_process_group(options.backend)
        body(**options.values(dict(kwargs)))
        if dist.is_initialized():
            dist.destroy_process_group()

    return run


def describe(item: pytest.Function, error: BaseException) -> RankReport:
    """A rank's exception as pytest would show it if the rank were all there is."""
    info = pytest.ExceptionInfo.from_exception(error)
    if isinstance(error, pytest.skip.Exception):
        return RankReport("skipped", str(error.msg or error), f"skipped: {error}")
    if isinstance(error, pytest.xfail.Exception):
        return RankReport("xfailed", str(error.msg or error), f"xfail: {error}")
    lines = info.exconly().splitlines()
    return RankReport("failed", str(item.repr_failure(info)), lines[0] if lines else type(error).__name__)


def _judge(verdict: Verdict, options: Options) -> None:
    __tracebackhide__ = True
    failed = {rank: report for rank, report in verdict.ranks.items() if report.kind == "failed"}
    stopped = {rank: report for rank, report in verdict.ranks.items() if report.kind != "failed"}
    if not failed and len(stopped) == options.n:
        first = stopped[min(stopped)]
        (pytest.skip if first.kind == "skipped" else pytest.xfail)(first.text)
    if not failed and not stopped and not verdict.report:
        return
    text = _text(verdict, failed, stopped, options)
    pytest.fail(text, pytrace=False)


def _text(
    verdict: Verdict, failed: Mapping[int, RankReport], stopped: Mapping[int, RankReport], options: Options
) -> str:
    parts: list[str] = []
    merged: dict[str, list[int]] = {}
    for rank in sorted(failed):
        merged.setdefault(_essence(failed[rank].text), []).append(rank)
    heads = [f"{_who(ranks)}: {failed[ranks[0]].headline}" for ranks in merged.values()]
    parts.append(heads[0] if heads else verdict.headline or "some ranks did not end well")
    for ranks in merged.values():
        parts += [
            "",
            f"_____ {_who(ranks)} of {options.n} on {options.on} _____",
            failed[ranks[0]].text.rstrip(),
        ]
    for rank in sorted(stopped):
        parts += ["", f"rank {rank} was {stopped[rank].kind}, others were not: {stopped[rank].text}"]
    if verdict.report:
        parts += ["", verdict.report.rstrip()]
    parts += [f"note: {note}" for note in verdict.notes]
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    if test:
        parts += ["", f"replay: pytest '{test}'  (seed {options.seed})"]
    return "\n".join(parts)


def _who(ranks: list[int]) -> str:
    from distsim.debug.stacks import format_ranks

    return f"rank{'s' if len(ranks) > 1 else ''} {format_ranks(ranks)}"


def _essence(text: str) -> str:
    """What two ranks' failures must share to be shown once: all but addresses and their own rank."""
    text = _ADDRESS.sub("0x", text)
    return _OWN_ARGUMENTS.sub("", text)
