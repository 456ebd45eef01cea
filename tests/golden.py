"""Golden files: text that users depend on, kept beside the test that holds it.

`DISTSIM_UPDATE_GOLDEN=1 pytest tests/cli` writes them anew; the diff is then for the reviewer.
"""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["assert_golden"]


def assert_golden(path: Path, text: str) -> None:
    """*text* is what the golden file *path* holds."""
    if os.environ.get("DISTSIM_UPDATE_GOLDEN"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    expected = path.read_text(encoding="utf-8") if path.exists() else ""
    assert text == expected, f"differs from {path}; if it is meant, run again with DISTSIM_UPDATE_GOLDEN=1"
