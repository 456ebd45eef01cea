"""Parts of the page from a report with its `picture`: plotly figures, drawings, tables.

Begin with `run.py`, which lists the parts of one run in the order of the page. Every function takes the report as
JSON data.
"""

from __future__ import annotations

from distsim.report.html.draw.run import run_parts

__all__ = ["run_parts"]
