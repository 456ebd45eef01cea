"""The program that mpirun starts: `python -m distsim.mpi.rank train.py ...`.

It sets torchrun's variables as well, and runs the script under the guard.
"""

from __future__ import annotations

import os
import sys

from distsim.debug.__main__ import main as run_guarded
from distsim.errors import UsageError
from distsim.realexec.process.worlds import started_by_mpirun


def main(argv: list[str]) -> None:
    """Run the script in *argv* as the rank that mpirun started."""
    started = started_by_mpirun(os.environ)
    if started is not None:
        os.environ.update(started.environment())
        os.environ.setdefault("PMI_JOBID", started.job)
    run_guarded(argv)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UsageError as error:
        print(f"distsim: error: {error}", file=sys.stderr)
        sys.exit(2)
