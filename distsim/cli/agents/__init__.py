"""The door for programs: JSON Schemas of the reports, and the commands as tools of agents.

`schema.py` names the type of each document, and `mcp.py` serves the commands. SKILL.md is what an agent reads.
"""

from __future__ import annotations

__all__ = ["mcp", "schema"]
