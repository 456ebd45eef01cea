"""Annotations of GitHub Actions: a failed scenario is a mark at the guilty line of the pull request."""

from __future__ import annotations

import os
from collections.abc import Mapping

from distsim.scenario.result import Result

__all__ = ["annotation", "on_github"]


def on_github(environ: Mapping[str, str]) -> bool:
    return environ.get("GITHUB_ACTIONS") == "true"


def annotation(result: Result, root: str | None = None) -> str:
    """`::error file=,line=,title=::text`, paths from the repository's root
    (https://docs.github.com/actions/reference/workflow-commands-for-github-actions)."""
    file, line = result.place or (result.path, 1)
    root = root or os.environ.get("GITHUB_WORKSPACE") or os.getcwd()
    relative = os.path.relpath(file, root)
    title = f"scenario {result.name}: {result.wrong[0]}" if result.wrong else f"scenario {result.name}"
    return f"::error file={_value(relative)},line={line},title={_value(title)}::{_text(result.text)}"


def _text(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _value(text: str) -> str:
    return _text(text).replace(":", "%3A").replace(",", "%2C")
