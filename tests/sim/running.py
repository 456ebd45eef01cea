"""Tiny simulated worlds for these tests: a function on some ranks, or a script in a folder."""

from __future__ import annotations

import contextlib
import io
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import distsim
from distsim.sim import Outcome, RunRequest, run_program

__all__ = ["HEAD", "Ran", "Scripts", "ranks"]

HEAD = """\
import os, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
"""
"""How most of the scripts begin."""


def ranks(fn: Callable[..., Any], num_ranks: int = 2, *args: Any, **how: Any) -> Outcome:
    """Call *fn* on *num_ranks* simulated ranks, each on a node of its own."""
    return distsim.simulate(fn, on=f"ethernet-cpu:{num_ranks}", nproc_per_node=1, args=args, **how)


@dataclass
class Ran:
    """A script that ran: what it left and what it printed."""

    outcome: Outcome
    out: str
    err: str

    def of(self, label: object, text: str | None = None) -> list[str]:
        """The lines that rank (or `main`) *label* printed."""
        mark = f"[{label}] "
        lines = (self.out if text is None else text).splitlines()
        return [line.removeprefix(mark) for line in lines if line.startswith(mark)]

    @property
    def kinds(self) -> list[str]:
        return [str(diagnosis.kind) for diagnosis in self.outcome.diagnoses]


class Scripts:
    """Writes a program into a folder and simulates it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, text: str, files: dict[str, str] | None = None) -> Path:
        for name, content in {"program.py": text, **(files or {})}.items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(content), encoding="utf-8")
        return self.folder / "program.py"

    def __call__(
        self,
        text: str,
        num_ranks: int = 2,
        files: dict[str, str] | None = None,
        args: tuple[str, ...] = (),
        **request: Any,
    ) -> Ran:
        path = self.write(text, files)
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            outcome = run_program(
                RunRequest(
                    program=request.pop("program", str(path)),
                    args=list(args),
                    on=f"ethernet-cpu:{num_ranks}",
                    nproc_per_node=1,
                    **request,
                )
            )
        return Ran(outcome, out.getvalue(), err.getvalue())
