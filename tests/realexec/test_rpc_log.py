"""What a worker under guard notes of its remote calls, without any of them being made."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from distsim.debug.rings import layout as rings
from distsim.debug.rings.reader import RingReader
from distsim.debug.rings.writer import RingWriter
from distsim.realexec.guard.recorder import Recorder
from distsim.realexec.process import introduce_monitors
from distsim.remote_calls.guarded import hooks
from distsim.remote_calls.guarded.log import MOST_ERRORS, NO_LIMIT, Peer, RemoteLog


def test_many_errors_leave_room(tmp_path: Path) -> None:
    """A worker that lives on exceptions, each with words of its own, fills no table: what comes later is recorded."""
    ring = RingWriter(tmp_path / "rank00000.a0.j.ring", rank=0, world_size=2, local_rank=0, job="j", attempt=0)
    recorder = Recorder(ring)
    log = RemoteLog(recorder, "w0", SimpleNamespace(rpc_timeout=60.0), recorder.group_log("rpc", "rpc", (0, 1)))

    def call(number: int) -> int:
        index = log.begin("rpc_sync", Peer("w1", 1, True), "next", NO_LIMIT, rings.WAITING)
        log.fail(index, KeyError(f"{number:<1900}"))
        return index

    for number in range(1000):
        last = call(number)
    used = ring.words[rings.WORDS_AT // 8 + rings.W_TABLE_USED]
    assert used < rings.TABLE_BYTES // 2
    assert len(ring._table) < 2 * MOST_ERRORS
    reader = RingReader(ring.path)
    records, _ = reader.since(0)
    found = [reader.decode(record, 0) for record in records]
    assert (found[0].error or "").startswith("KeyError")
    assert (found[last].error, found[last].done) == (None, True)


@pytest.mark.parametrize(("said", "rank"), [("1 mine", 1), ("1 another", None), ("nonsense", None), (None, None)])
def test_whose_ring_a_worker_has(said: str | None, rank: int | None) -> None:
    """Trainers that have met in a group of their own are another job's: their ranks are other workers here."""
    store = dist.HashStore()
    if said is not None:
        store.set(f"{hooks.KEY}7", said)
    assert hooks._ring_rank(store, 7, "mine") == rank


def test_a_job_without_groups_has_no_store(tmp_path: Path) -> None:
    """init_rpc over several hosts, without init_process_group: the monitors do not meet, and nothing is raised."""
    introduce_monitors.introduce_monitors(tmp_path, 0, first=True)
    assert not list(tmp_path.iterdir())
