"""`--fault`: faults in words on a command line, and the ranks that they touch in a sample."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from distsim.cli.dispatch import main
from distsim.errors import UsageError
from distsim.scenario.file.fault_words import fault_of
from distsim.scenario.file.load import read_faults
from distsim.scenario.file.schema import FAULT_TABLES
from tests.planning.test_sweep_scripts import TRAIN


@pytest.mark.parametrize(
    ("words", "table"),
    [
        ("link_slow n3/nic0 0.25", {"what": "link_slow", "link": "n3/nic0", "factor": 0.25}),
        ("gpu_slow n2/gpu5 0.8 at_s=2", {"what": "gpu_slow", "gpu": "n2/gpu5", "factor": 0.8, "at_s": 2}),
        ("straggler 1,4-6 1.5", {"what": "straggler", "ranks": [1, 4, 5, 6], "factor": 1.5}),
        ("crash 3 call='all_reduce #2'", {"what": "crash", "ranks": [3], "call": "all_reduce #2"}),
        ("link_cut 'n0/nic0->leaf0' for_s=5us", {"what": "link_cut", "link": "n0/nic0->leaf0", "for_s": "5us"}),
    ],
)  # fmt: skip
def test_words_are_a_table(words: str, table: dict[str, Any]) -> None:
    """Values in the order of the keys, or by name; a rule can be made of each."""
    assert fault_of(words) == table
    assert len(read_faults([table])) == 1


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("slow 3", "--fault 'slow 3': expected a fault such as 'link_slow n3/nic0 0.25'; kinds: "),
        ("", "--fault '': expected a fault such as"),
        ("crash '3", "expected a fault such as"),
        ("crash 3 SIGKILL x y", "--fault 'crash 3 SIGKILL x y': crash has no further key for 'y'"),
        ("strggler 3", "; did you mean 'straggler'?"),
        ("crash 3 at=2", "at: unknown key (expected one of at_s, call, after_s, for_s, ranks, "),
        ("crash 3 at=2", "; did you mean 'at_s'?; expected a fault such as 'crash 3 at_s=2'"),
        ("crash", "--fault 'crash': ranks: expected a value, got nothing; expected a fault such as 'crash 3 at_s=2'"),
        ("exit 3 at_s=2 call=#3", "at_s=2 call=#3': expected at_s or call, got both; expected a fault such as 'exit 3"),
    ],
)
def test_a_mistake_is_one_line(words: str, line: str) -> None:
    """What was expected, and the kinds that there are."""
    with pytest.raises(UsageError) as caught:
        fault_of(words)
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", FAULT_TABLES)
def test_the_example_of_each_kind_is_a_fault(kind: str) -> None:
    """What a message recommends can be given."""
    with pytest.raises(UsageError) as caught:
        fault_of(f"{kind} unheard=of")
    words = str(caught.value).rpartition("expected a fault such as '")[2].removesuffix("'")
    assert fault_of(words)["what"] == kind


def test_a_table_that_does_not_fit_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """As in a file; and a real run takes none."""
    (tmp_path / "train.py").write_text("")
    for flags, line in (
        (["--fault", "gpu_slow n9/gpu0 0.5"], "no GPU 'n9/gpu0' in dgx-h100: it has n0/gpu0 to n0/gpu7"),
        (
            ["--fault", "link_slow n0/nic0 5"],
            "factor: expected less than or equal to 1, got 5 (int); expected a fault such as",
        ),
        (["--on", "gloo", "--fault", "crash 1"], "--fault: faults are injected into simulations only"),
    ):
        assert main(["run", *flags, str(tmp_path / "train.py")]) == 2
        assert line in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "slow"), [("gpu_slow n2/gpu5 0.5", [21]), ("straggler 9,21 2", [9]), ("link_slow n3/nic0 0.9", [])]
)
def test_a_sample_contains_the_ranks_that_a_fault_touches(words: str, slow: list[int], tmp_path: Path) -> None:
    """They are of a kind of their own, and only they are slower; a link is of no rank. The report names the fault."""
    (tmp_path / "train.py").write_text(
        TRAIN.replace("default=256", "default=8192").replace("dist.get_rank()", "dist.get_rank() % 8")
    )
    report = tmp_path / "report.json"
    command = ["run", "--on", "dgx-h100:4", "--ranks", "sample", "--quiet", "--report", str(report), "--fault", words]
    assert main([*command, str(tmp_path / "train.py")]) == 0
    document = json.loads(report.read_text())
    busy = {rank["rank"]: rank["compute_s"] for rank in document["training"]["ranks"]}
    assert len(busy) < 32
    usual = busy[0]
    assert sorted(rank for rank, seconds in busy.items() if seconds > 1.5 * usual)[: len(slow)] == slow
    assert set(slow) <= set(busy)
    assert sum("injected" in note for note in document["notes"]) == 1


def test_a_fault_that_struck_is_noted_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The verdict has the note; what follows the verdict does not repeat it."""
    (tmp_path / "train.py").write_text(
        "import torch, torch.distributed as dist\ndist.init_process_group()\n"
        "for _ in range(3):\n    dist.all_reduce(torch.ones(4))\n"
    )
    command = ["run", "--on", "ethernet-cpu:1", "--nproc-per-node", "2", "--fault"]
    assert main([*command, "crash 1 call=2", str(tmp_path / "train.py")]) == 3
    assert capsys.readouterr().out.count("note: injected:") == 1
    assert main([*command, "straggler 1 1.5", "--fault", "crash 1 call=9", str(tmp_path / "train.py")]) == 0
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]
    assert [note.partition(":")[2].split()[0] for note in notes] == ["--fault[1]:", "injected:"]
