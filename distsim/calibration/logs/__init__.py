"""nccl-tests' and rccl-tests' printed output, and what of a cluster's model can be fitted to it.

Begin with `parse.py` (one file), `folder.py` (files that have to agree with each other and with a cluster), `fit.py`.
"""

from __future__ import annotations

__all__ = ["fit", "folder", "output", "parse"]
