"""Annotations of GitHub Actions: a failure is a mark at the guilty line of the pull request.

pytest's plugin imports it, so nothing of distsim and no torch comes with it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping


def on_github(environ: Mapping[str, str]) -> bool:
    """Return whether the process runs in GitHub Actions, which reads annotations."""
    return environ.get("GITHUB_ACTIONS") == "true"


def error_line(file: str, line: int, title: str, text: str, root: str | None = None) -> str:
    """Return a line `::error file=,line=,title=::text` with paths relative to the repository's root.

    See https://docs.github.com/actions/reference/workflow-commands-for-github-actions.
    """
    root = root or os.environ.get("GITHUB_WORKSPACE") or os.getcwd()
    relative = os.path.relpath(file, root)
    return f"::error file={_value(relative)},line={line},title={_value(title)}::{_text(text)}"


def _text(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _value(text: str) -> str:
    return _text(text).replace(":", "%3A").replace(",", "%2C")
