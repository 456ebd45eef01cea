"""Every planted fault on real gloo, and in the simulator: the kind, the ranks, the group, the line, the exit code."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from jobs import HERE, Case, Result, Zygote, ring_directory

from distsim.debug.diagnosis.diagnose import Diagnosis
from distsim.debug.records.kinds import Kind
from distsim.errors import UsageError

if TYPE_CHECKING:
    from distsim.sim.outcome import Outcome

CASES = [Case.read(path) for path in sorted((HERE / "faults").glob("*.py"))]

NOT_SIMULATED = {
    "worker_killed": "a data loader's workers run in the rank's own process there: a signal to one is one to the rank",
    "holds_gil": "simulated ranks are threads of one interpreter: who holds it stops the simulator, watchdog and all",
}
"""Programs that show something else in a simulation, and why."""

DIES = {
    "rank_killed": ("Crash", {"ranks": (2,)}),
    "rank_segfault": ("Crash", {"ranks": (0,), "signal": "SIGSEGV"}),
    "process_frozen": ("Freeze", {"ranks": (1,)}),
}
"""Programs whose fault would strike the simulator's own process: a rule strikes the rank at its next call."""

OTHER_LINE = {
    "rank_killed": "no stack is left: the real one is last seen in the call before",
    "rank_segfault": "faulthandler has the faulty line; a rule strikes in the call after it",
    "process_frozen": "py-spy has the faulty line; a rule strikes in the call after it",
    "straggler": "the monitor says where it is while the others wait, the simulator where it came late",
}
"""The two name different lines, and why."""

ON_GPUS = re.compile(r'^(dist\.init_process_group\()"gloo"(.*)$', re.MULTILINE)
MADE = re.compile(r"torch\.ones\(([^()]*)\)")
OTHERWISE_ON_GPUS = {
    "finally_again": "the rank is gone: what it launched on its way out is told before what it raised",
    "modified_in_flight": "writes to a buffer on a GPU are not watched",
    "monitored_barrier": "NCCL has none",
    "rank_exited": "the host is ahead of its kernels: the call before has not ended either",
    "rpc_collective": "who serves the call only launches its kernel, and answers",
    "rpc_then_stuck": "no device map says where a tensor on a GPU goes: torch refuses to send it",
    "thread_order": "the GPU of a new thread is the first, and NCCL takes no two ranks on one",
    "thread_race": "a call on a GPU does not keep its thread inside",
}
"""Programs that end otherwise with CUDA tensors and NCCL, and why."""
ALWAYS_ON_GPUS = {"batch_without_send", "nan"}
"""Those of which the suite runs both; the soak has them all."""

NEEDS = {"fsdp_extra_forward": (2, 7)}
"""The oldest torch whose own code runs a program: FSDP asked CPU tensors for streams before."""

ELSEWHERE = {
    Kind.HEALTHY: "test_healthy",
    Kind.NETWORK_FAULT: "launch/test_hosts",
}
"""Kinds whose real jobs are in another file."""


def by_kind(cases: list[Case]) -> list[Any]:
    """Every program; the first of each kind of diagnosis runs always."""
    always = {
        *{case.head["kind"]: case.path.stem for case in reversed(cases)}.values(),
        "future",
        "rpc_circle",
        "rpc_collective",
    }
    return [
        pytest.param(case, id=case.path.stem, marks=[] if case.path.stem in always else pytest.mark.soak)
        for case in cases
    ]


_ran: dict[str, Result] = {}


def on_gloo(case: Case, zygote: Zygote) -> Result:
    """The real run of a program; two tests look at it."""
    name = case.path.stem
    if name not in _ran:
        with ring_directory() as folder:
            _ran[name] = zygote.run(
                case.path,
                case.ranks,
                directory=folder,
                hang_after_s=float(case.head.get("hang_after", "60")),
                straggler_after_s=float(case.head.get("straggler_after", "10")),
                nan=bool(case.head.get("nan")) or None,
                checksum=bool(case.head.get("checksum")) or None,
            )
    return _ran[name]


def torch_version() -> tuple[int, int]:
    major, minor = version("torch").split(".")[:2]
    return int(major), int(minor)


def moved(text: str) -> str:
    """A program whose ranks compute on GPUs; every line keeps its number."""
    begin = r'\1"nccl"\2; torch.cuda.set_device(dist.get_rank()); torch.set_default_device("cuda")'
    text = MADE.sub(r'torch.ones(\1, device="cuda")', ON_GPUS.sub(begin, text))
    return text.replace('init_device_mesh("cpu"', 'init_device_mesh("cuda"')


def simulated(case: Case, folder: Path, on_gpus: bool = False) -> Outcome:
    """The same program simulated; skipped where only the guard works."""
    try:
        from distsim.sim.patches import all_patches

        all_patches()
    except UsageError as refusal:
        pytest.skip(str(refusal))
    from distsim.sim.faults.fault import CallPoint, When
    from distsim.sim.faults.rank_faults import Crash, Freeze
    from distsim.sim.run import RunRequest, run_program
    from distsim.sim.world.conditions import Conditions

    guards = [guard for guard, word in (("nan", "nan"), ("buffers", "checksum")) if case.head.get(word)]
    text = case.path.read_text()
    rules: list[Any] = []
    if case.path.stem in DIES:
        kind, where = DIES[case.path.stem]
        after_three: Any = When(call=CallPoint(4, "all_reduce"))
        rules = [{"Crash": Crash, "Freeze": Freeze}[kind](when=after_three, **where)]
        text = re.sub(r"^( +)(os\.kill|ctypes\.).*$", r"\1pass", text, flags=re.MULTILINE)
    program = folder / case.path.name
    program.write_text(moved(text) if on_gpus else text)
    return run_program(
        RunRequest(
            str(program),
            on="dgx-h100:1" if on_gpus else "ethernet-cpu:1",
            nproc_per_node=case.ranks,
            # Who never gives a sign of life is waited for; on a loaded machine two seconds may pass in an import.
            host_timeout_s=2.0 if "host_stuck" in case.head["kind"] else 20.0,
            conditions=Conditions(rules=rules, guards=guards),
        )
    )


def held_against_its_head(case: Case, first: Diagnosis, exit_code: int, text: str) -> None:
    assert first.kind.value in case.head["kind"].split("|"), text
    assert first.culprits == case.culprits, text
    assert str(exit_code) in case.head["exit"].split("|"), text
    assert case.head.get("says", "") in " ".join(text.split()), text
    if case.lines():
        assert lines(first), text
        assert lines(first) <= set(case.lines()), text


def lines(found: Diagnosis) -> set[int]:
    """Where the culprits are."""
    return {found.sites[rank].line for rank in found.culprits if rank in found.sites}


@pytest.mark.slow
@pytest.mark.xdist_group("faults")
@pytest.mark.parametrize("case", by_kind(CASES))
def test_fault_is_named(case: Case, zygote: Zygote) -> None:
    """The first diagnosis of a faulty program is the fault that was planted."""
    oldest = NEEDS.get(case.path.stem, (0, 0))
    if torch_version() < oldest:
        pytest.skip(f"{case.path.stem} needs torch {oldest[0]}.{oldest[1]}")
    result = on_gloo(case, zygote)
    assert result.diagnoses, result.outputs
    held_against_its_head(case, result.diagnoses[0], result.exit_code, result.report)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # a program's warnings are its own
@pytest.mark.xdist_group("faults")
@pytest.mark.parametrize("case", by_kind([case for case in CASES if case.path.stem not in NOT_SIMULATED]))
def test_its_simulation_says_the_same(case: Case, zygote: Zygote, tmp_path: Path) -> None:
    """A program simulated and the program on gloo have one diagnosis: kind, culprits, group, line."""
    name = case.path.stem
    outcome = simulated(case, tmp_path)
    assert outcome.diagnoses, outcome.failures
    mine, real = outcome.diagnoses[0], on_gloo(case, zygote).diagnoses[0]
    assert aspects(mine, name) == aspects(real, name), f"simulated: {mine.explanation}\nreal: {real.explanation}"
    if name not in OTHER_LINE:
        held_against_its_head(case, mine, outcome.exit_code, mine.explanation)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # a program's warnings are its own
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.path.stem, marks=[] if case.path.stem in ALWAYS_ON_GPUS else pytest.mark.soak)
        for case in CASES
        if case.path.stem not in NOT_SIMULATED.keys() | OTHERWISE_ON_GPUS.keys()
    ],
)
def test_its_simulation_on_gpus_says_the_same(case: Case, tmp_path: Path) -> None:
    """With CUDA tensors and NCCL the diagnosis is that of CPU tensors: kind, culprits, group, line."""
    name = case.path.stem
    on_cpus, on_gpus = simulated(case, tmp_path), simulated(case, tmp_path, on_gpus=True)
    assert on_gpus.diagnoses, on_gpus.failures
    expected, found = on_cpus.diagnoses[0], on_gpus.diagnoses[0]
    assert aspects(found, name) == aspects(expected, name), f"CPU: {expected.explanation}\nGPU: {found.explanation}"


def aspects(found: Diagnosis, name: str) -> Mapping[str, Any]:
    """What must be alike."""
    assert found.group is not None
    return {
        "kind": found.kind,
        "culprits": found.culprits,
        "group": (found.group.label, found.group.ranks),
        "call": found.call,
        "pair": found.pair,
        "lines": None if name in OTHER_LINE else lines(found),
        "exit code": found.exit_code,
    }


def test_every_kind_has_a_program() -> None:
    """No kind of diagnosis is without a real job, and no exception in the lists above without a program."""
    planted = {kind for case in CASES for kind in case.head["kind"].split("|")}
    assert {kind.value for kind in Kind} == planted | {kind.value for kind in ELSEWHERE}
    names = {case.path.stem for case in CASES}
    assert {*NOT_SIMULATED, *DIES, *OTHER_LINE, *OTHERWISE_ON_GPUS, *ALWAYS_ON_GPUS} <= names
