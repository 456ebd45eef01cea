"""scenarios/rpc: the programs of torch's RPC tutorials print what they print on real TensorPipe."""

from __future__ import annotations

from pathlib import Path

import pytest
from scenarios.printed import lines_of

from distsim.scenario import load_scenario, run_scenario

FOLDER = Path(__file__).parents[2] / "scenarios" / "rpc"

ON_TENSORPIPE = {
    "batched_updates": ["trainer 1: loss 0.4002", "trainer 2: loss 0.5482"],
    "parameter_server_ddp": ["both trainers have one dense layer: True"],
    "pipeline": ["step 0: loss 0.2269", "step 1: loss 0.2116", "step 2: loss 0.1987"],
    "reinforcement": [f"episode {i}: reward {n} of 16" for i, n in enumerate((8, 10, 16, 16))],
    "rnn": ["step 0: loss 3.4063", "step 1: loss 3.2858", "step 2: loss 3.1547"],
}
"""What `distsim run --on gloo --nproc-per-node N` printed (torch 2.13, TensorPipe)."""


@pytest.mark.filterwarnings("ignore")  # a program's warnings are its own
@pytest.mark.slow
@pytest.mark.parametrize("name", ON_TENSORPIPE)
def test_prints_what_tensorpipe_prints(name: str) -> None:
    """Simulated, the program is healthy and prints the same."""
    result = run_scenario(load_scenario(FOLDER / f"{name}.toml"))
    assert result.passed, result.text
    printed = [line for line in lines_of(result.output, prefixed=True) if line in ON_TENSORPIPE[name]]
    assert printed == ON_TENSORPIPE[name], result.output
