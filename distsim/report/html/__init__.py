"""The report one can look at: one HTML file with everything in it, from the JSON report and its `picture`.

`collect` makes the picture from what a run left, `draw` the parts of a page from both, `page.py` the file; it needs the
extra `html` (`extra.py`). Begin with `reports.py`, which goes from a run to its page.
"""

from __future__ import annotations

from distsim.report.html.extra import check_page, needed

__all__ = ["check_page", "needed"]
