"""From what a run left to the `picture` of its report: plain JSON data, bounded, and enough to draw every part.

Begin with `picture.py`: `Material` is what there is, simulated or recorded; the other files each make one part of it.
"""

from __future__ import annotations

from distsim.report.html.collect.material import Material, of_outcome, of_records
from distsim.report.html.collect.picture import picture

__all__ = ["Material", "of_outcome", "of_records", "picture"]
