"""What is told of training steps on simulated GPUs: `section.py` in the JSON report (its docstring has the fields),
`terminal.py` on the terminal; `gains.py` is what a step would take if something were better."""

from __future__ import annotations

from distsim.report.training.section import training_section
from distsim.report.training.terminal import training_parts

__all__ = ["training_parts", "training_section"]
