"""Report on training steps on simulated GPUs.

`entry.py` makes the section of the JSON report (`distsim.report.schema.TrainingEntry` describes its keys),
`terminal.py` that of the terminal, both from `section.py`.
"""

from __future__ import annotations

from distsim.report.training.entry import training_section
from distsim.report.training.terminal import training_parts

__all__ = ["training_parts", "training_section"]
