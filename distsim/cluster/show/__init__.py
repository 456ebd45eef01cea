"""Clusters for people: tables, trees, summaries and pictures.

`summary.py` counts; `render.py` prints; `plot.py` draws.
"""

from __future__ import annotations

__all__ = ["plot", "render", "summary"]
