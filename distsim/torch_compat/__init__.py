"""Private names of torch that distsim uses: no other package may write one.

`names.py` says what an entry is and looks it up; each other module holds the entries of one subject.
"""

from __future__ import annotations

__all__ = ["compiler", "ddp", "elastic", "groups", "names", "patches", "rpc", "stores", "works"]
