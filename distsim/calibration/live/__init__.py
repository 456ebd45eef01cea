"""Measuring the machine at hand: gloo's collectives as a cluster file, a GPU's kernels as its data file.

`measure.py` runs and fits gloo, `worker.py` is one rank of it; `gpu_clock.py` times what `../ops.py` asks for.
"""

from __future__ import annotations

__all__ = ["gpu_clock", "measure", "worker"]
