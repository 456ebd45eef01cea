"""A page as one file: the template filled, plotly's script and all data in it, compressed.

Compressed, since plotly.js alone is 4.8 MB, and since a hang of 1,024 ranks names each of them in each of its lists: a
browser of 2023 or later unpacks both by itself (`DecompressionStream`). The page asks for nothing else: its policy
forbids it every request. What comes from the program is escaped by the template, or travels as data and becomes text.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distsim import __version__
from distsim.errors import UsageError
from distsim.text.untrusted_input import printable

if TYPE_CHECKING:
    from distsim.report.html.draw.run import Part, RunParts
    from distsim.report.html.draw.tables import Table

__all__ = ["Page", "html", "write_page"]


@dataclass(slots=True)
class Page:
    """What stands on a page: of several runs an overview first."""

    title: str
    heading: str
    runs: list[RunParts]
    overview: bool = False
    lines: list[str] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    document: Mapping[str, Any] | None = None
    """The overview's own JSON."""


def write_page(page: Page, path: str) -> None:
    """Write the file. An OSError where that fails."""
    Path(path).write_text(html(page), encoding="utf-8", errors="backslashreplace", newline="\n")


def html(page: Page) -> str:
    """The page as text."""
    template = _template()
    figures = {f"overview-{part.name}": part.figure for part in page.parts if part.figure is not None}
    for run in page.runs:
        figures |= {f"{run.key}-{part.name}": part.figure for part in run.parts if part.figure is not None}
    data = {
        "figures": figures,
        "calls": {run.key: run.calls for run in page.runs},
        "documents": {run.key: run.document for run in page.runs},
        "overview": page.document,
    }
    script, version = _plotly() if figures else ("", "")
    text: str = template.render(
        page=page,
        version=__version__,
        data=packed(json.dumps(data, allow_nan=False, separators=(",", ":"))),
        plotly=script,
        plotly_version=version,
    )
    return text


def packed(text: str) -> str:
    """gzip, in base64; the same for the same text."""
    return base64.b64encode(gzip.compress(text.encode("utf-8", "backslashreplace"), 6, mtime=0)).decode("ascii")


@cache
def _template() -> Any:
    try:
        import jinja2
        from markupsafe import Markup
    except ImportError:
        raise UsageError("jinja2 is not installed; pip install 'torch-distsim[html]'") from None
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, finalize=_finalize)
    environment.globals.update(css=Markup(_text("page.css")), js=Markup(_text("page.js")))
    return environment.from_string(_text("page.html.j2"))


def _finalize(value: object) -> object:
    """Nothing that a browser would obey: no bidirectional marks, no controls."""
    return printable(value) if type(value) is str else value


@cache
def _text(name: str) -> str:
    return files("distsim.report.html").joinpath("templates", name).read_text(encoding="utf-8")


@cache
def _plotly() -> tuple[str, str]:
    """Its script, packed, and plotly.py's version."""
    from importlib.metadata import version

    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise UsageError("plotly is not installed; pip install 'torch-distsim[html]'") from None
    return packed(get_plotlyjs()), version("plotly")
