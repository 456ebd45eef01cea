"""Every documented name of torch.distributed, RPC, autograd and futures: what becomes of it, where that is shown.

`python -m tests.conformance.api_names` writes docs/api_table.md from it. One line a name, in the order of torch's pages
(distributed.html, rpc.html, futures.html, elastic):

    name | simulated | guarded | real | shown in [| since]

simulated: `yes`; `same`: torch's own object, which needs nothing; `refused`: NotSimulated, with a remedy.
guarded: `recorded`: the call is in the flight record, compared and diagnosed; `-`: nothing to record.
real: `gloo`, or what else serves it. shown in: a file of tests whose programs use the name. since: the first release of
torch that has the name, `cuda` behind it where only a torch that is built for CUDA has it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from conformance.api_modules import modules_section

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "api_table.md"

HEAD = """\
# Every name of torch.distributed

Written by `python -m tests.conformance.api_names`; `tests/conformance/test_api_table.py` holds each line.
*simulated*: `yes`; `same`: torch's own object, which needs nothing; `refused`: `NotSimulated`, with a remedy.
*guarded*: `recorded`: in the flight record, compared and diagnosed; `-`: nothing to record.
*real*: what serves it. *shown in*: tests whose programs use the name.
"""


@dataclass(frozen=True)
class Row:
    """One name."""

    section: str
    name: str
    simulated: str
    guarded: str
    real: str
    shown: str
    since: str = ""

    @property
    def here(self) -> bool:
        """Whether this torch may have the name."""
        release, _, build = self.since.partition(" ")
        return (not release or bool(torch.__version__ >= release)) and (not build or torch.version.cuda is not None)


def rows() -> list[Row]:
    """All of `api_names.txt`."""
    found: list[Row] = []
    section = ""
    for line in (Path(__file__).parent / "api_names.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("# "):
            section = line[2:]
        elif line.strip():
            found.append(Row(section, *(word.strip() for word in line.split("|"))))
    return found


def page() -> str:
    """docs/api_table.md."""
    lines, section = [HEAD], ""
    for row in rows():
        if row.section != section:
            section = row.section
            lines += [f"\n## {section}\n", "| name | simulated | guarded | real | shown in |", "| --- " * 5 + "|"]
        shown = f"`tests/{row.shown}`"
        since = f" (torch {row.since})".replace(" cuda", ", built for CUDA") if row.since else ""
        lines.append(f"| `{row.name}`{since} | {row.simulated} | {row.guarded} | {row.real} | {shown} |")
    return "\n".join(lines) + "\n" + modules_section()


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
