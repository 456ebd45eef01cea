"""Every fault rule does what it says, inside collectives, and the same each time."""

from __future__ import annotations

from pathlib import Path

import pytest

from distsim.scenario import Result
from tests.kin import one_in
from tests.scenario.made import ran

HANGS = {
    "what = 'link_cut', link = 'n0/nic0->leaf0', call = 'all_reduce #2', after_s = '10us'": (
        "network_fault",
        (0, 1),
    ),
    "what = 'nic_down', nic = 'n1/nic0', at_s = '1ms'": ("network_fault", (2, 3)),
    "what = 'switch_down', switch = 'leaf0', at_s = '1ms'": ("network_fault", (0, 1, 2, 3)),
    "what = 'store_unreachable', ranks = [2]": ("network_fault", (2,)),
    "what = 'master_unreachable'": ("network_fault", (2, 3)),
    "what = 'crash', ranks = [1], call = 'all_reduce #2'": ("rank_killed", (1,)),
    "what = 'crash', ranks = [1], call = 2, after_s = '10us'": ("rank_killed", (1,)),
    "what = 'crash', ranks = [2]": ("rank_killed", (2,)),
    "what = 'freeze', ranks = [1], call = 'all_reduce #3 on default_pg'": ("process_frozen", (1,)),
    "what = 'freeze', ranks = [3], at_s = '1ms'": ("process_frozen", (3,)),
    "what = 'exit', ranks = [0], code = 5, call = 1": ("rank_exited", (0,)),
    "what = 'exception', ranks = [1], exception = 'KeyError', call = 2": ("rank_raised", (1,)),
    "what = 'exception', ranks = [1], at_s = '1ms'": ("rank_raised", (1,)),
    "what = 'exception', ranks = [1], exception = 'torch.cuda.OutOfMemoryError', call = 2": ("rank_raised", (1,)),
}
LATER = {
    "what = 'link_slow', link = 'n0/nic0->leaf0', factor = 0.05": 2e-4,
    "what = 'link_slow', link = 'n0/nic0->leaf0', extra_latency_s = '1ms'": 1e-3,
    "what = 'link_cut', link = 'n0/nic0->leaf0', call = 'all_reduce #2', for_s = 3": 2.9,
    "what = 'link_flap', link = 'n0/nic0->leaf0', period_s = '2ms', down_s = '1.9ms'": 1e-3,
    "what = 'link_lossy', link = 'n*->leaf0', loss = 0.2": 1e-4,
    "what = 'freeze', ranks = [1], call = 2, for_s = 7": 6.9,
    "what = 'freeze', ranks = [1], at_s = '1ms', for_s = 7": 6.9,
    "what = 'delay', ranks = [1], call = 2, delay_s = 5": 4.9,
    "what = 'straggler', ranks = [2], factor = 1000": 1e-3,
    "what = 'straggler', ranks = [2], delay_s = 1, distribution = 'uniform'": 0.1,
    "what = 'jitter', period_s = '15us', pause_s = '10us'": 1e-5,
    "what = 'store_unreachable', ranks = [2], for_s = 4": 3.9,
    "what = 'slow_storage', ranks = [0], delay_s = 9": 8.9,
}
SAVES = """\
import os, tempfile
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
t = torch.ones(1 << 16)
for step in range(4):
    torch.ones(64, 64) @ torch.ones(64, 64)
    dist.all_reduce(t)
if dist.get_rank() == 0:
    open(os.devnull).close()
dist.barrier()
"""


def _with(folder: Path, fault: str, expect: str = "[expect]", program: str = SAVES) -> Result:
    return ran(folder, f"faults = [{{ {fault} }}]\n{expect}", program)


@pytest.fixture(scope="module")
def undisturbed_s(tmp_path_factory: pytest.TempPathFactory) -> float:
    """How long the program takes when nothing goes wrong."""
    return ran(tmp_path_factory.mktemp("undisturbed"), "[expect]", SAVES).virtual_time_s


@pytest.mark.parametrize("fault", HANGS)
def test_a_fault_that_stops_the_job_is_the_diagnosis(tmp_path: Path, fault: str) -> None:
    """Kind and culprits come from the fault, and the report says that it was injected."""
    result = _with(tmp_path, fault)
    assert (result.kind, result.culprits) == HANGS[fault]
    assert "note: injected: " in result.report
    of_ranks, report = result.kind != "network_fault", " ".join(result.report.split())
    assert ("; the fault was injected. Rank" in report) == of_ranks
    assert ("not get past it. A job survives such a fault if all its ranks are started again" in report) == of_ranks


IN_RENDEZVOUS = {
    "what = 'crash', ranks = [1], at_s = 1": "rank_killed",
    "what = 'exit', ranks = [1], at_s = 1, code = 5": "rank_exited",
    "what = 'freeze', ranks = [1], at_s = 1": "process_frozen",
    "what = 'exception', ranks = [1], at_s = 1": "rank_raised",
}


@pytest.mark.parametrize("fault", IN_RENDEZVOUS)
def test_a_rank_may_be_struck_while_it_still_connects(tmp_path: Path, fault: str) -> None:
    """It tries to reach the store for 30 s, and dies, leaves, stops or raises after one."""
    away = "what = 'store_unreachable', ranks = [1], for_s = 30"
    result = ran(tmp_path, f"faults = [{{ {away} }}, {{ {fault} }}]\n[expect]", SAVES)
    assert (result.kind, result.culprits) == (IN_RENDEZVOUS[fault], (1,))
    assert result.exit_code != 0


def test_a_fault_that_finds_its_rank_gone_has_not_struck(tmp_path: Path) -> None:
    """Two ends of one rank: the second strikes nobody, and the scenario says so."""
    first, second = ("what = 'crash', ranks = [1], at_s = '1ms'", "what = 'crash', ranks = [1], at_s = '2ms'")
    result = ran(tmp_path, f"faults = [{{ {first} }}, {{ {second} }}]\n[expect]\nkind = 'rank_killed'", SAVES)
    assert any(line.startswith("faults[1]: never struck") for line in result.wrong)


@pytest.mark.parametrize("fault", LATER)
def test_a_fault_that_passes_costs_time_and_nothing_else(tmp_path: Path, fault: str, undisturbed_s: float) -> None:
    """The run ends well, later by at least what the fault takes."""
    result = _with(tmp_path, fault)
    assert result.wrong == []
    assert result.virtual_time_s - undisturbed_s > LATER[fault]


LASTING = (
    "what = 'straggler', ranks = [2], factor = 1000",
    "what = 'straggler', ranks = [2], delay_s = 1",
    "what = 'jitter', period_s = '15us', pause_s = '10us'",
    "what = 'slow_storage', ranks = [0], delay_s = 9",
)


@pytest.mark.parametrize("fault", LASTING)
def test_a_fault_that_lasts_begins_at_its_call(tmp_path: Path, fault: str, undisturbed_s: float) -> None:
    """From a late call on it costs less than from the start (but for the file, which comes last); of a call that never
    came it is said that it never struck."""
    always, late = _with(tmp_path, fault), _with(tmp_path, f"{fault}, call = 'all_reduce #3'")
    assert late.wrong == []
    assert undisturbed_s < late.virtual_time_s
    assert (late.virtual_time_s < always.virtual_time_s) != ("storage" in fault)
    never = _with(tmp_path, f"{fault}, call = 'all_reduce #99'")
    assert never.virtual_time_s == undisturbed_s
    assert any(line.startswith("faults[0]: never struck") for line in never.wrong), never.wrong


@pytest.mark.parametrize("fault", one_in(3, [*HANGS, *LATER]))
def test_the_same_seed_gives_the_same_run(tmp_path: Path, fault: str) -> None:
    """Bit for bit: the JSON reports are equal."""
    assert _with(tmp_path, fault).document == _with(tmp_path, fault).document


def test_a_second_rail_takes_over(tmp_path: Path) -> None:
    """A NIC that is down stops the job; with a second rail it goes on, and loses the failover's time."""
    place = 'on = "dgx-h100:2"\nnproc_per_node = 2\n'
    fault = "what = 'nic_down', nic = 'n0/nic0', at_s = '300us'"
    alone = ran(tmp_path, f"{place}faults = [{{ {fault} }}]\n[expect]", SAVES)
    assert alone.kind == "network_fault"
    rail = f"{fault}, second_rail = 'n0/nic1', failover_s = '20ms'"
    both = ran(tmp_path, f"{place}faults = [{{ {rail} }}]\n[expect]", SAVES)
    assert both.wrong == []
    assert 0.02 < both.virtual_time_s < 0.05


def test_losing_packets_costs_more_where_the_window_is_sent_again(tmp_path: Path, undisturbed_s: float) -> None:
    """go_back_n is dearer than selective repeat, which is dearer than no loss."""
    place = 'on = "ethernet-cpu:2"\nnproc_per_node = 1\n'  # whose links, not a rank's thread, say how fast it goes
    program = SAVES.replace("1 << 16", "1 << 22")
    times = []
    for recovery in ("selective", "go_back_n"):
        fault = f"what = 'link_lossy', link = 'n*->leaf*', loss = 0.05, recovery = '{recovery}'"
        times.append(ran(tmp_path, f"{place}faults = [{{ {fault} }}]\n[expect]", program).virtual_time_s)
    assert times[1] > 1.2 * times[0]


def test_jitter_strikes_in_the_middle_of_computing(tmp_path: Path, undisturbed_s: float) -> None:
    """Also where no rank makes a call between the beginning of a long computation and the rule's time, and only until
    its time is over: at most half of its millisecond is lost, whatever is computed later."""
    program = SAVES.replace("range(4)", "range(1)").replace(
        "torch.ones(64, 64) @ torch.ones(64, 64)", "torch.ones(999, 999) @ torch.ones(999, 999)"
    )
    began = "what = 'jitter', period_s = '20us', pause_s = '10us', at_s = '%s', for_s = '1ms'"
    plain_s = ran(tmp_path, "[expect]", program).virtual_time_s
    for at in ("500us", "700us"):
        struck = _with(tmp_path, began % at, program=program)
        assert struck.wrong == []
        assert 1e-4 < struck.virtual_time_s - plain_s < 5.2e-4
    assert _with(tmp_path, began % "60s", program=program).virtual_time_s == plain_s


ON_GPUS = """
import torch
import torch.distributed as dist
dist.init_process_group("nccl")
torch.cuda.set_device(dist.get_rank())
t = torch.ones(64, 64, device="cuda")
for _ in range(50):
    t = t + t
dist.all_reduce(t)
torch.cuda.synchronize()
"""


def test_jitter_and_stragglers_strike_on_simulated_gpus(tmp_path: Path) -> None:
    """The operating system takes the CPU away that launches kernels; a slow GPU takes longer for each of them."""
    place = 'on = "dgx-h100:1"\nnproc_per_node = 2\n'
    plain_s = ran(tmp_path, f"{place}[expect]", ON_GPUS).virtual_time_s
    for fault in ("what = 'jitter', period_s = '40us', pause_s = '20us'",
                  "what = 'straggler', ranks = [1], factor = 20"):  # fmt: skip
        struck = ran(tmp_path, f"{place}faults = [{{ {fault} }}]\n[expect]", ON_GPUS)
        assert struck.wrong == []
        assert struck.virtual_time_s > plain_s + 1e-4


def test_jitter_at_the_same_moments_costs_less(tmp_path: Path) -> None:
    """Pauses that all ranks have together are lost once, others are lost by whoever waits."""
    program = SAVES.replace("(64, 64)", "(256, 256)").replace("range(4)", "range(20)")
    jitter = "what = 'jitter', period_s = '200us', pause_s = '100us'"
    together = _with(tmp_path, jitter, program=program).virtual_time_s
    apart = _with(tmp_path, f"{jitter}, synchronous = false", program=program).virtual_time_s
    assert apart > together


@pytest.mark.parametrize("guarded", [True, False])
def test_a_flipped_bit_is_found_by_the_guard_alone(tmp_path: Path, guarded: bool) -> None:
    """With the guard the run stops at the call; without it the ranks end with other numbers."""
    program = """
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
t = torch.ones(3)
for _ in range(2):
    dist.all_reduce(t)
print(t.tolist())
"""
    fault = "what = 'corrupt', rank = 2, element = 1, bit = 23, call = 'all_reduce #2'"
    guards = "guards = ['payloads']\n" if guarded else ""
    result = ran(tmp_path, f"{guards}faults = [{{ {fault} }}]\n[expect]", program)
    if guarded:
        assert (result.kind, result.culprits) == ("network_fault", (2,))
    else:
        assert result.wrong == []
        assert "[2] [16.0, 8.0, 16.0]" in result.output
        assert "[1] [16.0, 16.0, 16.0]" in result.output


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (
            "what = 'crash', ranks = [1], call = 'all_reduce #99'",
            "faults[0]: never struck (rank 1 killed by SIGKILL",
        ),
        (
            "what = 'slow_storage', delay_s = 1, files = '*.nothing'",
            "faults[0]: never struck (files *.nothing",
        ),
        ("what = 'corrupt', rank = 1, call = 'broadcast #1'", "faults[0]: never struck (bit 0"),
        (
            "what = 'crash', ranks = [1], at_s = 500",
            "faults[0]: never struck (rank 1 killed by SIGKILL, at 500 s); the run was over after ",
        ),
    ],
)
def test_a_fault_that_never_struck_fails_the_scenario(tmp_path: Path, fault: str, told: str) -> None:
    """A scenario that does not test what it says is wrong."""
    wrong = _with(tmp_path, fault).wrong
    assert len(wrong) == 1
    assert wrong[0].startswith(told)


def test_a_straggler_is_named_once_it_is_a_habit(tmp_path: Path) -> None:
    """Late at every step: a warning with its rank. Late once: nothing."""
    habit = _with(tmp_path, "what = 'straggler', ranks = [2], factor = 1000", "[expect]\nkind = 'straggler'")
    assert habit.wrong == []
    assert habit.culprits == (2,)
    assert "came late to 3 of 4 collectives" in habit.report
    assert _with(tmp_path, "what = 'delay', ranks = [2], call = 2, delay_s = 5").kind == "healthy"


ENDLESS = {
    "virtual_time_s = 0.05": "while True:\n    dist.barrier()\n",
    "events = 2000": "while True:\n    dist.barrier()\n",
    "wall_time_s = 0.6": "while True:\n    t = t + 0.0\n",
}


@pytest.mark.parametrize("limit", ENDLESS)
def test_a_program_that_never_ends_is_ended(tmp_path: Path, limit: str) -> None:
    """By virtual time, by events, by wall time; the report says where every rank was."""
    head = 'import torch\nimport torch.distributed as dist\ndist.init_process_group("gloo")\nt = torch.ones(1)\n'
    result = ran(tmp_path, f"[limits]\n{limit}\n[expect]", head + ENDLESS[limit])
    assert not result.passed
    name = limit.split()[0]
    if result.kind != "host_stuck":  # a rank that spins is found out at the same moment
        assert result.wrong[0].startswith(f"limits.{name}: the program still ran after "), result.text
        assert result.verdict == f"ended by limits.{name}"
        assert "\nended by a limit after " in result.report
    assert "made.py:" in result.report
