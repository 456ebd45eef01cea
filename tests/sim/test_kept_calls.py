"""A long run keeps each rank's last calls, and tells as much as if it kept all."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sim.running import ranks

from distsim.debug.records import call_log
from distsim.errors import UsageError
from distsim.report import report_document, write_trace

CALLS = 60


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight calls of each rank are enough."""
    monkeypatch.setattr(call_log, "MOST_KEPT", 8)
    monkeypatch.setattr(call_log, "LEAST_KEPT", 8)


def loop(hangs: bool = False) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    group = dist.new_group([0, 1])
    forgotten = dist.all_reduce(torch.ones(3), async_op=True)
    for number in range(CALLS):
        t = torch.ones(1 + number % 3)
        dist.all_reduce(t, group=group if number % 2 else None)
        if rank == 0:
            dist.send(t, 1)
        else:
            dist.recv(t, 0)
    if hangs and rank == 0:
        dist.broadcast(t, 0)
    elif hangs:
        dist.recv(t, 0)
    del forgotten


def told(outcome: Any) -> tuple[Any, ...]:
    """All that a report says, figures to twelve digits."""
    document = report_document(outcome)
    for name in ("wall_time_s", "events"):
        document.pop(name, None)

    def rounded(value: Any) -> Any:
        if isinstance(value, float):
            return float(f"{value:.12g}")
        if isinstance(value, dict):
            return {key: rounded(one) for key, one in value.items() if "wall" not in key}
        return [rounded(one) for one in value] if isinstance(value, list | tuple) else value

    return outcome.exit_code, [str(d.kind) for d in outcome.diagnoses], rounded(document)


@pytest.mark.parametrize("hangs", [False, True])
def test_it_tells_the_same(hangs: bool, short: None) -> None:
    """Sums, times and diagnosis, of a healthy run with a forgotten handle and of a hang."""
    few, whole = ranks(loop, 2, hangs), ranks(loop, 2, hangs, trace=True)
    assert len(whole.records[0]) == 2 * CALLS + 3 + hangs
    assert len(few.records[0]) < 20
    assert told(few) == told(whole)


def test_a_forgotten_call_is_gone(short: None) -> None:
    """Its record is freed while the run goes on, without the garbage collector."""
    alive: list[int] = []

    class Seen:
        pass

    def body() -> None:
        loop()
        from distsim.sim.isolation.process import require_task

        process = require_task().process
        alive.append(len(process.records))
        seen = Seen()
        process.records[0].thread = seen  # type: ignore[assignment]
        gone = weakref.ref(seen)
        del seen
        for _ in range(20):
            dist.barrier()
        assert gone() is None

    assert not ranks(body).failures
    assert max(alive) <= 12 + 1


def test_no_operators_are_kept_unless_a_trace_asks(tmp_path: Path) -> None:
    """Else a trace is refused, with what to ask for."""
    outcome = ranks(loop)
    assert not any(outcome.compute.values())
    with pytest.raises(UsageError, match="trace=True"):
        write_trace(outcome, str(tmp_path / "trace.json"))
    traced = ranks(loop, trace=True)
    assert all(traced.compute.values())
    write_trace(traced, str(tmp_path / "trace.json"))
