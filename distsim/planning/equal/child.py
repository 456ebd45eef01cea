"""Runs one layout in a process of its own: `python -m distsim.planning.equal.child SPEC` (a `Spec` as JSON)."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_exit = os._exit  # inside of a simulation it ends the rank that calls it


@dataclass
class Spec:
    """Specification of a run: the program, and where its tensors are written."""

    program: str
    module: bool
    arguments: list[str]
    on: str
    nnodes: int | None
    nproc_per_node: int | None
    seed: int
    steps: int
    out: str
    """File of the tensors."""
    start: str | None = None
    """File of the values that parameters begin with, `RANK/NAME` each."""
    perturbed: bool = False
    renamed: dict[str, str] | None = None

    def write(self, path: Path) -> None:
        """Write it as a file for this module."""
        path.write_text(json.dumps(asdict(self)))


def main(path: str) -> int:
    """Run the layout and return 0 if the tensors of all steps were written, even if the program failed later."""
    import numpy as np

    from distsim.planning.equal.record import TensorRecorder, recording, without_dropout, write_run
    from distsim.report import print_summary
    from distsim.sim import RunRequest, run_program
    from distsim.sim.isolation.process import current_task
    from distsim.sim.observe.silent import reader_of

    spec = Spec(**json.loads(Path(path).read_text()))
    given: dict[int, dict[str, Any]] = {}
    if spec.start is not None:
        archive = np.load(spec.start, allow_pickle=False)
        for entry in archive.files:
            rank, _, name = entry.partition("/")
            given.setdefault(int(rank), {})[name] = archive[entry]
    recorders: dict[int, TensorRecorder] = {}

    def current() -> TensorRecorder | None:
        task = current_task()
        if task is None or not task.process.is_rank:
            return None
        process = task.process
        if process.rank not in recorders:
            recorders[process.rank] = TensorRecorder(
                process.rank,
                spec.steps,
                reader_of(process),
                given.get(process.rank, {}),
                spec.perturbed,
                spec.renamed or {},
                world_size=sum(one.is_rank for one in process.port.processes),
            )
        return recorders[process.rank]

    def leave_when_done() -> None:
        refusals = [recorder.refusal for recorder in recorders.values() if recorder.refusal]
        if refusals:
            print(f"distsim: error: {refusals[0]}", file=sys.__stderr__, flush=True)
            _exit(2)
        size = next(iter(recorders.values())).world_size
        if len(recorders) == size and all(recorder.is_done for recorder in recorders.values()):
            write_run(recorders, Path(spec.out))
            _exit(0)

    request = RunRequest(
        spec.program,
        module=spec.module,
        args=spec.arguments,
        on=spec.on,
        nnodes=spec.nnodes,
        nproc_per_node=spec.nproc_per_node,
        seed=spec.seed,
        data="real",
        silent="off",
    )
    with without_dropout(), recording(current, leave_when_done):
        outcome = run_program(request)
    print_summary(outcome)
    if outcome.exit_code == 0:
        write_run(recorders, Path(spec.out))
    return int(outcome.exit_code)


if __name__ == "__main__":
    from distsim.errors import DistsimError

    try:
        sys.exit(main(sys.argv[1]))
    except DistsimError as error:
        print(f"distsim: error: {error}", file=sys.stderr)
        sys.exit(2)
