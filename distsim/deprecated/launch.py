"""Starts a script like torch.distributed.launch: `python -m distsim.deprecated.launch [flags] SCRIPT ...`.

The flags are those of `distsim run`. The script gets its local rank by the argument `--local_rank=N` unless
`--use_env` is given; the environment has it in both cases.
"""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec

from distsim.text.untrusted_input import read_text


def local_rank_flag(script: str, module: bool) -> str:
    """Return the flag that passes *script* its local rank: `--local_rank`, or `--local-rank` if its source has that.

    torch.distributed.launch passes the first up to torch 1.13, and the second since.
    """
    path: str | None = script
    if module:
        try:
            spec = find_spec(script)
        except (ImportError, ValueError):
            spec = None
        path = None if spec is None else spec.origin
    try:
        text = read_text(path or "")
    except OSError:
        text = ""
    return "--local-rank" if "--local-rank" in text else "--local_rank"


def main(argv: list[str]) -> int:
    """Run `distsim run` with these arguments of torch.distributed.launch."""
    sys.argv[1:] = ["run", "--no-use-env", *argv]
    return int(importlib.import_module("distsim.cli").main())  # of all parts the command line lies furthest out


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
