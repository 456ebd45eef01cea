"""HTML report: one self-contained file, made from the JSON report and its `picture`.

`collect.py` makes the picture from a run, `draw` the parts of a page from both, and `page.py` the file. Begin with
`reports.py`, which leads from a run to its page. All of them need the extra `html`; a missing package is reported in
one line before the run.
"""

from __future__ import annotations

from importlib.util import find_spec

from distsim.errors import UsageError
from distsim.text.output_files import check_writable

__all__ = ["check_page", "needed"]


def needed(flag: str) -> None:
    """Raise UsageError if the extra `html` is not installed."""
    missing = [name for name in ("jinja2", "plotly") if find_spec(name) is None]
    if missing:
        packages = " and ".join(missing)
        verb = "is" if len(missing) == 1 else "are"
        raise UsageError(f"{flag}: {packages} {verb} not installed; pip install -e '.[html]' in a clone of distsim")


def check_page(path: str | None, flag: str = "--html") -> None:
    """Raise UsageError if a page cannot be created, or not at *path*."""
    if path is not None:
        check_writable(path, flag, "report.html")
        needed(flag)
