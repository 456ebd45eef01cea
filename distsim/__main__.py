"""`python -m distsim`: the command line without an installed script (a bare clone is enough)."""

from __future__ import annotations

import sys

from distsim.cli import main

if __name__ == "__main__":
    sys.exit(main())
