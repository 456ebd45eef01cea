"""Writes plotly figures to files: a self-contained page, or a static image by plotly's export."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from distsim.errors import UsageError
from distsim.text.output_files import check_writable

__all__ = ["check_image", "write_image"]

PAGE = "html"
STILL = ("jpeg", "jpg", "pdf", "png", "svg", "webp")
"""Image formats that plotly exports with kaleido, which starts Chrome."""


def check_image(path: str | None, flag: str = "--plot") -> None:
    """Refuse, before anything runs, a picture that cannot be drawn or written.

    Args:
        path: The file; without an extension it is a .png. None if no picture is requested.
        flag: Name of the command line's flag, for messages.

    Raises:
        UsageError: The extension is unknown, the folder does not exist, or a package is not installed.
    """
    if path is None:
        return
    check_writable(path, flag, "plot.html")
    kind = _kind(path)
    if kind not in (PAGE, *STILL):
        raise UsageError(f"{flag} {path}: expected a file ending in .{', .'.join((PAGE, *STILL))}, got .{kind}")
    for package in ("plotly",) if kind == PAGE else ("plotly", "kaleido"):
        if find_spec(package) is None:
            raise UsageError(f"{flag}: {package} is not installed; pip install -e '.[plot]' in a clone of distsim")


def write_image(figure: Mapping[str, Any], path: str, flag: str = "--plot") -> None:
    """Write *figure*, plotly's `data` and `layout` as plain data.

    Args:
        figure: The figure; its layout has a `width` and a `height` in pixels.
        path: The file, which `check_image` has accepted.
        flag: Name of the command line's flag, for messages.

    Raises:
        UsageError: The file cannot be written, or Chrome cannot be started.
    """
    import plotly.io

    kind = _kind(path)
    try:
        if kind == PAGE:
            content = plotly.io.to_html(figure, include_plotlyjs=True, validate=False).encode()
        else:
            content = plotly.io.to_image(figure, format=kind, scale=2, validate=False)
    except RuntimeError as error:  # kaleido finds no Chrome, or one that does not start
        problem = " ".join(str(error).split())
        raise UsageError(
            f"{flag} {path}: plotly draws a .{kind} with a Chrome, which could not be started ({problem:.200}); write "
            "a .html instead, or install Chrome (plotly_get_chrome)"
        ) from None
    try:
        Path(path).write_bytes(content)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from None


def _kind(path: str) -> str:
    return Path(path).suffix[1:].lower() or "png"
