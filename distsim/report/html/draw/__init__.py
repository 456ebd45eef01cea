"""From a report with its `picture` to what stands on the page: figures of plotly, drawings, tables.

Begin with `run.py`: the parts of one run, in the order of the page. Every function takes the report as JSON data.
"""

from __future__ import annotations

from distsim.report.html.draw.run import run_parts

__all__ = ["run_parts"]
