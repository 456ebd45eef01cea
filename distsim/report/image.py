"""Writes plotly figures to files: a self-contained page, or a static image by plotly's export."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distsim.errors import UsageError
from distsim.text.output_files import image_kind, open_output, written


def write_image(figure: Mapping[str, Any], path: str) -> None:
    """Write *figure*, plotly's `data` and `layout` as plain data.

    Args:
        figure: The figure; its layout has a `width` and a `height` in pixels.
        path: The file, which `image_file` has accepted.

    Raises:
        UsageError: The file cannot be written, or Chrome cannot be started.
    """
    import plotly.io

    kind = image_kind(path)
    try:
        if kind == "html":
            content = plotly.io.to_html(figure, include_plotlyjs=True, validate=False).encode()
        else:
            content = plotly.io.to_image(figure, format=kind, scale=2, validate=False)
    except RuntimeError as error:  # kaleido finds no Chrome, or one that does not start
        problem = " ".join(str(error).split())
        raise UsageError(
            f"--plot {path}: plotly draws a .{kind} with a Chrome, which could not be started ({problem:.200}); write "
            "a .html instead, or install Chrome (plotly_get_chrome)"
        ) from None
    with written("--plot", path), open_output(path, "wb") as file:
        file.write(content)
