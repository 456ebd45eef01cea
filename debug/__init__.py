"""The debug layer: flight records, checks and diagnosis of hangs, for real jobs and simulated ones.

`install()` puts every process group of this process under guard, `remove()` takes it off again; a job
without changes in its code runs as `python -m distsim.debug train.py`.
"""

from __future__ import annotations

from distsim.debug.errors import CollectiveMismatch
from distsim.debug.install import install, remove

__all__ = ["CollectiveMismatch", "install", "remove"]
