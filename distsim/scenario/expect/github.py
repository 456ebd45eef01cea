"""A failed scenario as an annotation of GitHub Actions."""

from __future__ import annotations

from distsim.scenario.expect.result import Result
from distsim.text.github import error_line, on_github

__all__ = ["annotation", "on_github"]


def annotation(result: Result, root: str | None = None) -> str:
    """The line that GitHub reads, at the culprit's line."""
    file, line = result.place or (result.path, 1)
    title = f"scenario {result.name}: {result.wrong[0]}" if result.wrong else f"scenario {result.name}"
    return error_line(file, line, title, result.text, root)
