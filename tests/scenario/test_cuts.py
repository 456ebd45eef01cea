"""Hosts cut off for real: which ones a rule means, when the plug is pulled, and what comes of it."""

from __future__ import annotations

import json
import subprocess
from functools import cached_property
from pathlib import Path

import pytest

from distsim.cluster import load_cluster
from distsim.debug.records import Evidence, RankState, Site
from distsim.debug.records.diagnosis import Diagnosis
from distsim.debug.records.kinds import Kind
from distsim.errors import UsageError
from distsim.scenario.file.load import read_faults
from distsim.scenario.real.inject import Injector
from distsim.scenario.real.namespaces import Cuts, Hosts, cut_off, hosts, missing
from distsim.scenario.real.real import Ended, placed, verdict, with_texts
from distsim.sim.faults.link_faults import NetworkRule
from tests.scenario.made import made, ran

STEPS = """\
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
t = torch.ones(4)
for step in range(100):
    dist.all_reduce(t)
print("done")
"""
BOTH = 'on = "ethernet-cpu:3"\nnproc_per_node = 2\n'
REAL = f'backend = "gloo"\n{BOTH}'


def rule(**table: object) -> NetworkRule:
    made = read_faults([table])[0]
    assert isinstance(made, NetworkRule)
    return made


@pytest.mark.parametrize(
    ("on", "table", "found"),
    [
        ("ethernet-cpu:3", {"what": "nic_down", "nic": "n1/nic0"}, (1,)),
        ("ethernet-cpu:3", {"what": "link_cut", "link": "n2/nic0->leaf0"}, (2,)),
        ("ethernet-cpu:3", {"what": "link_cut", "link": "leaf0->n0/nic0"}, (0,)),
        ("ethernet-cpu:3", {"what": "link_cut", "link": ["n0/nic0->*", "n1/nic0->*"]}, (0, 1)),
        ("ethernet-cpu:3", {"what": "switch_down", "switch": "leaf0"}, (0, 1, 2)),
        ("dgx-h100:2", {"what": "link_cut", "link": "n1/nic*->leaf*"}, (1,)),
    ],
)
def test_a_rule_cuts_off_the_hosts_whose_nics_it_takes(on: str, table: dict[str, object], found: tuple[int]) -> None:
    """All ways out, or all ways in."""
    cluster = load_cluster(on)
    assert cut_off(cluster, rule(**table), cluster.num_nodes) == found


@pytest.mark.parametrize(
    ("on", "table", "told"),
    [
        ("dgx-h100:2", {"what": "nic_down", "nic": "n1/nic0"}, "but this rule cuts off none"),
        ("dgx-h100:2", {"what": "link_cut", "link": "n0/gpu0->n0/pcie0"}, "but this rule cuts off none"),
        (
            "dgx-h100:2",
            {"what": "nic_down", "nic": "n1/nic0", "second_rail": "n1/nic1"},
            "a real run has no second way",
        ),
        ("ethernet-cpu:1", {"what": "link_cut", "link": "n0/nic0->*"}, "one host has no network to cut"),
    ],
)
def test_what_no_real_network_can_do_is_refused(on: str, table: dict[str, object], told: str) -> None:
    """A part of a host's ways, a detour, a job without network."""
    cluster = load_cluster(on)
    with pytest.raises(UsageError, match=told):
        cut_off(cluster, rule(**table), cluster.num_nodes)


class Plugs(Hosts):
    """Hosts whose plugs write down what happens to them."""

    def cut(self, host: int) -> None:
        self.said.append(f"cut {host}")

    def mend(self, host: int) -> None:
        self.said.append(f"mend {host}")

    @cached_property
    def said(self) -> list[str]:
        return []


def test_the_plug_is_pulled_when_the_rule_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a call; some time after all ranks have begun; and put back after a while."""
    now_s = 0.0
    monkeypatch.setattr("distsim.scenario.real.namespaces.monotonic", lambda: now_s)
    faults = "what = 'nic_down', nic = 'n1/nic0', call = 3, for_s = 5", "what = 'nic_down', nic = 'n2/nic0', at_s = 2"
    scenario = made(tmp_path, f"{REAL}faults = [{{ {faults[0]} }}, {{ {faults[1]} }}]\n[expect]", STEPS)
    job = Plugs(("a", "b", "c"), ("1", "2", "3"))
    cuts = Cuts.of(scenario, tmp_path, job)
    for rank in range(6):
        (tmp_path / f"begun.{rank}").touch()
        cuts.tick()
    for node in (1, 2):
        now_s += 1.0
        cuts.tick()
        (tmp_path / f"rings{node}").mkdir()
        (tmp_path / f"rings{node}" / "follow.json").touch()
    seen = []
    for tenths in range(20, 110):  # monitors were told at 2.0 and know each other at 3.0
        now_s = tenths / 10
        if tenths == 70:
            (tmp_path / "strike.0").touch()
        before = len(job.said)
        cuts.tick()
        seen += [(now_s, what) for what in job.said[before:]]
        assert (tmp_path / "struck.0").exists() == (tenths >= 70)
    assert seen == [(5.0, "cut 2"), (7.0, "cut 1")]
    now_s = 12.1
    cuts.tick()
    cuts.tick()
    assert job.said == ["cut 2", "cut 1", "mend 1"]
    assert cuts.struck == [0, 1]


def test_a_job_whose_monitors_never_meet_is_cut_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten seconds after its ranks have begun."""
    now_s = 0.0
    monkeypatch.setattr("distsim.scenario.real.namespaces.monotonic", lambda: now_s)
    scenario = made(tmp_path, f"{REAL}faults = [{{ what = 'nic_down', nic = 'n1/nic0' }}]\n[expect]", STEPS)
    job = Plugs(("a", "b", "c"), ("1", "2", "3"))
    cuts = Cuts.of(scenario, tmp_path, job)
    for rank in range(6):
        cuts.tick()
        now_s += 20.0
        (tmp_path / f"begun.{rank}").touch()
    cuts.tick()
    assert cuts.struck == []
    now_s += 10.1
    cuts.tick()
    assert job.said == ["cut 1"]


def test_where_namespaces_cannot_be_made_one_line_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `ip`, the package that has it."""
    monkeypatch.setenv("PATH", str(tmp_path))
    fault = "faults = [{ what = 'nic_down', nic = 'n1/nic0' }]"
    result = ran(tmp_path, f"{REAL}{fault}\n[expect]\nkind = 'network_fault'", STEPS)
    need = "faults that cut hosts off for real need network namespaces: `ip` is not installed (package iproute2)"
    assert result.wrong == [f"{tmp_path / 'made.toml'}: {need}"]


needs_namespaces = pytest.mark.skipif(missing() is not None, reason=f"no network namespaces here: {missing()}")


@needs_namespaces
def test_namespaces_reach_each_other_until_the_plug_is_pulled() -> None:
    """Each has its own name, as the cluster calls it, and nothing of them is left afterwards."""

    def reaches(job: Hosts) -> bool:
        ping = ["ip", "netns", "exec", job.names[0], "python3", "-c"]
        refused = "s.connect_ex((sys.argv[1], 9)) == 111"
        connect = f"import socket, sys; s = socket.socket(); s.settimeout(1); sys.exit(not ({refused}))"
        return subprocess.run([*ping, connect, job.addresses[1]], check=False).returncode == 0

    with hosts(2) as job:
        who = "import socket; print(socket.gethostname(), socket.gethostbyname('n0'))"
        said = subprocess.run([*job.enter(1), "python3", "-c", who], check=True, capture_output=True, text=True).stdout
        assert said.split() == ["n1", job.addresses[0]]
        assert reaches(job)
        job.cut(1)
        assert not reaches(job)
        job.mend(1)
    left = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True).stdout.split()
    assert not set(job.names) & set(left)


@pytest.mark.slow
@needs_namespaces
@pytest.mark.parametrize("backend", ["sim", pytest.param("gloo", marks=pytest.mark.soak)])
def test_a_host_that_is_cut_off_is_the_diagnosis_simulated_and_for_real(tmp_path: Path, backend: str) -> None:
    """The same file, the same verdict: the ranks behind the cut, at the call at which it struck."""
    fault = "faults = [{ what = 'nic_down', nic = 'n2/nic0', call = 'all_reduce #50' }]"
    limits = "[limits]\nwall_time_s = 240.0"
    expect = f"{limits}\n[expect]\nkind = 'network_fault'\nculprits = [4, 5]\nexit_code = 3"
    result = ran(tmp_path, f"backend = '{backend}'\n{BOTH}{fault}\n{expect}", STEPS)
    assert result.wrong == [], result.text
    assert "done" not in result.output


@pytest.mark.soak
@pytest.mark.slow
@needs_namespaces
def test_of_two_halves_the_one_that_was_cut_off_is_named_with_its_line(tmp_path: Path) -> None:
    """Each host takes the other for lost; the scenario knows whose plug it pulled, and where its ranks stood."""
    place = 'backend = "gloo"\non = "ethernet-cpu:2"\nnproc_per_node = 2\n'
    fault = "faults = [{ what = 'nic_down', nic = 'n0/nic0', call = 'all_reduce #50' }]"
    expect = "[limits]\nwall_time_s = 240.0\n[expect]\nkind = 'network_fault'\nculprits = [0, 1]"
    result = ran(tmp_path, f"{place}{fault}\n{expect}", STEPS)
    assert result.wrong == [], result.text
    assert result.site == (str(tmp_path / "made.py"), 7)
    assert "made.py:7  |  dist.all_reduce(t)" in result.report
    assert "does not answer host n1" in result.report
    assert "note: injected: n0/nic0 down, at all_reduce #50" in result.report


@pytest.mark.soak
@pytest.mark.slow
@needs_namespaces
def test_a_cut_that_heals_costs_time_only(tmp_path: Path) -> None:
    """TCP sends again what was lost: the job ends well, and each line has its rank."""
    place = 'backend = "gloo"\non = "ethernet-cpu:2"\nnproc_per_node = 2\n'
    fault = "faults = [{ what = 'link_cut', link = 'n1/nic0->*', call = 20, for_s = 0.2 }]"
    result = ran(tmp_path, f"{place}{fault}\n[expect]\nprints = {{ all = ['done'] }}", STEPS)
    assert result.wrong == [], result.text


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (
            "what = 'nic_down', nic = 'n1/nic0', call = 'all_reduce #5000'",
            "(n1/nic0 down, at all_reduce #5000); name an earlier call",
        ),
        ("what = 'crash', ranks = [1], call = 99", "(rank 1 killed by SIGKILL, at #99); name an earlier call"),
        (
            "what = 'nic_down', nic = 'n1/nic0', at_s = 1e6",
            "(n1/nic0 down, at 1e+06 s); the run was over after 2 s: choose an earlier at_s, or a call (call = 3)",
        ),
    ],
)
def test_a_real_fault_that_never_comes_fails_the_scenario(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, told: str
) -> None:
    """A scenario that does not test what it says is wrong; the line says what to change."""
    times = iter((3.0, 5.0))
    monkeypatch.setattr("distsim.scenario.real.real.monotonic", lambda: next(times))
    monkeypatch.setattr("distsim.scenario.real.real._run", lambda *_: Ended([0, 0, 0]))
    assert ran(tmp_path, f"{REAL}faults = [{{ {fault} }}]\n[expect]", STEPS).wrong == [
        f"faults[0]: never struck {told}"
    ]


def test_a_real_rank_says_that_its_fault_has_struck(tmp_path: Path) -> None:
    """Before it does: it may be the last thing that the rank does."""
    fault = {"what": "exception", "ranks": [1], "call": 2}
    injector = Injector(1, [fault], str(tmp_path))
    barrier = injector.counted("barrier", lambda: None)
    barrier()
    assert not (tmp_path / "struck.0").exists()
    with pytest.raises(RuntimeError, match="injected fault"):
        barrier()
    assert (tmp_path / "struck.0").exists()


def test_the_culprits_line_is_found_where_no_host_knew_it(tmp_path: Path) -> None:
    """From the rank's own ring, and its text from the file; what cannot be read is left out."""
    (tmp_path / "train.py").write_text("raise SystemExit(3)")
    here, gone = Site(str(tmp_path / "train.py"), 1, ""), Site(str(tmp_path / "gone.py"), 1, "")
    evidence = Evidence(2, {0: RankState(0, site=here), 1: RankState(1, site=gone)}, {})
    diagnosis = placed(Diagnosis(Kind.RANK_EXITED, (0, 1)), evidence)
    assert diagnosis.sites == {0: here, 1: gone}
    assert with_texts({}, [diagnosis]) == {here.file: "raise SystemExit(3)"}


def test_most_hosts_are_right(tmp_path: Path) -> None:
    """A host that was cut off takes the others for lost; of two halves, rank 0's counts unless that was cut off."""
    for node, culprits in enumerate([(2, 3, 4, 5), (0, 1), (0, 1), ()]):
        found = [Diagnosis(Kind.NETWORK_FAULT, culprits, explanation="cut").to_json()] if culprits else []
        (tmp_path / f"report{node}.json").write_text(json.dumps({"diagnoses": found}))
    for codes, wanted, code in [([3, 4, 4, 1], (0, 1), 4), ([3, 4], (2, 3, 4, 5), 3)]:
        diagnoses, exit_code = verdict(tmp_path, codes)
        assert (diagnoses[0].culprits, exit_code) == (wanted, code)
    diagnoses, exit_code = verdict(tmp_path, [3, 4], cut_off=[0, 1])
    assert (diagnoses[0].culprits, exit_code) == ((0, 1), 4)
    assert verdict(tmp_path / "none", [0, -15]) == ([], -15)
