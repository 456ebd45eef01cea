"""What torch offers beside collectives and messages: symmetric memory, windows, and groups whose members change."""

from __future__ import annotations

__all__ = ["reconfigure", "symmetric_memory", "windows"]
