"""The version of distsim, as pyproject.toml has it."""

from __future__ import annotations

import functools

__all__ = ["version"]


@functools.cache
def version() -> str:
    """The installed distribution's version; in a bare clone, pyproject.toml's."""
    from importlib import metadata

    try:
        return metadata.version("torch-distsim")
    except metadata.PackageNotFoundError:
        import tomllib
        from pathlib import Path

        project = Path(__file__).resolve().parents[1] / "pyproject.toml"
        return str(tomllib.loads(project.read_text(encoding="utf-8"))["project"]["version"])
