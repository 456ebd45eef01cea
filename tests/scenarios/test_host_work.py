"""scenarios/training: what the host of one rank does for a step does not grow with the number of replicas."""

from __future__ import annotations

from pathlib import Path

import pytest

from distsim.sim import RunRequest, run_program

FOLDER = Path(__file__).parents[2] / "scenarios" / "training"
SHAPE = ("--layers", "2", "--hidden", "64", "--heads", "4", "--vocab", "128", "--seq", "16", "--steps", "2")

pytestmark = pytest.mark.filterwarnings("ignore")  # a program's warnings are its own

COUNTING = """
import os
import runpy
import sys

from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, sys.argv[1])
import log

class Counting(TorchDispatchMode):
    operators = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operators += 1
        return func(*args, **(kwargs or {}))

class Log(log.Log):
    at = 0

    def step(self, number, loss):
        of_step, Log.at = counting.operators - Log.at, counting.operators
        if number == 2 and os.environ["RANK"] == "0":
            print("operators of a step:", of_step, flush=True)

log.Log = Log
del sys.argv[:2]
with Counting() as counting:
    runpy.run_path(os.path.join(sys.path[0], sys.argv[0]), run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("on", "program"),
    [
        ("dgx-h100:1", ("zero1.py", "--arch", "llama")),
        pytest.param("dgx-b200:1", ("zero1.py", "--arch", "llama"), marks=pytest.mark.soak),
        *(
            pytest.param("dgx-h100:1", program, marks=pytest.mark.soak)
            for program in (
                ("tp_pp.py", "--arch", "llama"),
                ("ddp.py",),
                ("fsdp1.py",),
                ("fsdp2.py",),
                ("moe.py",),
                ("context_parallel.py",),
                ("trainer.py",),
            )
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_more_replicas_are_no_more_operators(
    on: str, program: tuple[str, ...], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Rank 0 runs as many operators for a step on eight replicas as on two."""
    counting = tmp_path / "counting.py"
    counting.write_text(COUNTING)
    operators = []
    for replicas in (2, 8):
        args = (str(FOLDER), *program, *SHAPE)
        ran = run_program(RunRequest(program=str(counting), args=args, on=on, nproc_per_node=replicas))
        printed = capfd.readouterr().out
        assert ran.exit_code == 0, printed
        (line,) = [line for line in printed.splitlines() if "operators of a step:" in line]
        operators.append(int(line.rpartition(" ")[2]))
    assert operators[0] > 300
    assert operators[1] <= operators[0]
