"""`python -m distsim.debug train.py ...` (or `-m package.module ...`): a script under guard, as one rank.

For jobs that have a launcher already: `torchrun --no-python python -m distsim.debug train.py`, or under
srun. The settings come from the environment (`DISTSIM_LEVEL`, `DISTSIM_ON_HANG`, `DISTSIM_DIR`, ...).
"""

from __future__ import annotations

import importlib
import runpy
import sys

from distsim.errors import UsageError


def main(argv: list[str]) -> None:
    """Install the guard, then run the script as `__main__` with its own arguments."""
    module = bool(argv) and argv[0] == "-m"
    words = argv[1:] if module else argv
    if not words or words[0].startswith("-"):
        raise UsageError(f"expected a script or -m MODULE, got {' '.join(argv) or 'nothing'}; {__doc__.splitlines()[0]}")
    guard = importlib.import_module("distsim.realexec.install")
    guard.install()
    sys.argv[:] = words
    try:
        if module:
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        else:
            import os

            sys.path[0] = os.path.dirname(os.path.abspath(words[0]))
            runpy.run_path(words[0], run_name="__main__")
    except BaseException as error:
        session = guard.current_session()
        if session is not None:
            session.raised(error)
        raise


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UsageError as error:
        print(f"distsim: error: {error}", file=sys.stderr)
        sys.exit(2)
