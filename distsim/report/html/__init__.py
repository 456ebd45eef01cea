"""HTML report: one self-contained file, made from the JSON report and its `picture`.

`collect.py` makes the picture from a run, `draw` the parts of a page from both, and `page.py` the file. Begin with
`reports.py`, which leads from a run to its page. All of them need the extra `html`; a missing package is reported in
one line before the run.
"""

from __future__ import annotations

from distsim.report.html.page import html, run_page, write_page

__all__ = ["html", "run_page", "write_page"]
