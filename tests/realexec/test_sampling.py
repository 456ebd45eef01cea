"""Why a rank is slow: where its main thread stands more often than those of the others, and waits for a core."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from distsim.debug.monitor.slow_cause import CauseSearch, core_text, positions_text
from distsim.debug.records import Site
from distsim.debug.rings import layout as rings
from distsim.debug.rings.files import Samples
from distsim.debug.rings.reader import RingReader
from distsim.debug.rings.writer import RingWriter
from distsim.realexec.process.sampling import PositionSampler

MEET, BATCH, LOG = Site("train.py", 40, "step"), Site("data.py", 41, "next_batch"), Site("train.py", 50, "log")


def samples(**counts: int) -> Samples:
    sites = {"meet": MEET, "batch": BATCH, "log": LOG}
    return Samples(1, sum(counts.values()), tuple((sites[name], count) for name, count in counts.items()))


CASES = [
    ({0: samples(meet=300), 1: samples(meet=273, batch=27), 2: samples(meet=300)},
     ["stands more often in next_batch at data.py:41: 9% of samples, others 0%"], "an input wait"),
    ({0: samples(meet=290, batch=10), 1: samples(meet=275, batch=25), 2: samples(meet=290, batch=10)}, [], "noise"),
    ({0: samples(meet=300), 1: samples(meet=200, batch=40, log=60), 2: samples(meet=300)},
     ["stands more often in log at train.py:50: 20% of samples, others 0%",
      "stands more often in next_batch at data.py:41: 13% of samples, others 0%"], "two places, the worse first"),
    ({1: samples(batch=300)}, [], "nobody to compare with"),
    ({0: samples(meet=300)}, [], "no samples of the slow rank"),
]  # fmt: skip


@pytest.mark.parametrize(("by_rank", "texts", "reason"), CASES, ids=[case[2] for case in CASES])
def test_where_the_slow_rank_stands(by_rank: dict[int, Samples], texts: list[str], reason: str) -> None:
    """Only what stands out by six points."""
    assert positions_text(1, by_rank) == texts, reason


@pytest.mark.parametrize(
    ("delays", "texts"),
    [
        ({0: 0.02, 1: 0.31, 2: 0.03}, ["waits for a core 31% of the time, others 2%"]),
        ({0: 0.30, 1: 0.31, 2: 0.28}, []),
        ({1: 0.31}, []),
    ],
)
def test_who_waits_for_a_core(delays: dict[int, float], texts: list[str]) -> None:
    """More than the others do."""
    assert core_text(1, delays) == texts


def test_samples_are_taken_only_when_asked_for(tmp_path: Path) -> None:
    """From the monitor's request to the clause about the slow rank, by two rings; a second request begins anew."""
    writers = [
        RingWriter(tmp_path / f"rank{rank}.ring", rank=rank, world_size=2, local_rank=rank, job="j", attempt=0)
        for rank in range(2)
    ]
    readers = [RingReader(writer.path) for writer in writers]
    samplers = [PositionSampler(writer, threading.main_thread().ident or 0) for writer in writers]

    def beats(number: int) -> list[bool]:
        for _ in range(number):
            for sampler in samplers:
                sampler.step()
        return [writer.path.with_suffix(".samples").exists() for writer in writers]

    assert beats(60) == [False, False]
    search = CauseSearch()
    for _ in range(2):
        search.begin(1)
        assert search.step(readers) == []
        beats(rings.SAMPLES // 2)
        assert search.step(readers) == []
        assert beats(rings.SAMPLES) == [True, True]
        assert search.step(readers) == [], "both stand at this line"
        assert search.step(readers) == [], "nobody is slow"


def test_a_job_that_ends_early_says_what_it_has(tmp_path: Path) -> None:
    """A hundred samples are enough; fewer say nothing."""
    for number, texts in (
        (100, ["rank 1 stands more often in next_batch at data.py:41: 50% of samples, others 0%"]),
        (50, []),
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        paths = [folder / f"rank{rank}.ring" for rank in range(2)]
        for rank, path in enumerate(paths):
            RingWriter(path, rank=rank, world_size=2, local_rank=rank, job="j", attempt=0)
        readers, search = [RingReader(path) for path in paths], CauseSearch()
        search.begin(1)
        search.step(readers)
        half = f"""["data.py",41,"next_batch",null,[]],{number // 2}"""
        paths[0].with_suffix(".samples").write_text(f"""[1,{number},[[["t.py",1,"f",null,[]],{number}]]]""")
        paths[1].with_suffix(".samples").write_text(f"""[1,{number},[[{half}]]]""")
        assert [note.text for note in search.step(readers, is_last=True)] == texts
