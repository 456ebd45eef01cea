"""Report on training steps on simulated GPUs.

`section.py` makes the section of the JSON report (its docstring describes the fields), `terminal.py` that of the
terminal.
"""

from __future__ import annotations

from distsim.report.training.section import training_section
from distsim.report.training.terminal import training_parts

__all__ = ["training_parts", "training_section"]
