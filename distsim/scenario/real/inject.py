"""`python -m distsim.scenario.real.inject PLAN.json`: runs a program as one real rank, with faults injected at its
calls.

The plan contains `program` (a script's path or a module's name), `function`, `args` and `faults`. Only calls that
the program makes to torch.distributed in Python are counted, not those that C++ makes by itself (DDP's reducer).
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from distsim.sim.faults.fault import CallPoint
from distsim.sim.faults.links import CUTS
from distsim.text.exceptions import exception_named

OPERATIONS = (
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "all_gather_into_tensor",
    "gather",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "send",
    "recv",
    "isend",
    "irecv",
)


CUT_WAIT_S = 30.0


class Injector:
    """Counts the calls of this rank and strikes."""

    def __init__(self, rank: int, faults: Sequence[Mapping[str, Any]], folder: str = "") -> None:
        self.folder = folder
        self.faults = [
            {**fault, "number": number}
            for number, fault in enumerate(faults)
            if rank in fault.get("ranks", (rank,)) and fault.get("call") is not None
        ]
        self.index = 0
        self.numbers: dict[tuple[int, bool], int] = {}

    def install(self, dist: Any) -> None:
        """Wrap functions of torch.distributed so that faults can be injected into their calls."""
        for op in OPERATIONS:
            setattr(dist, op, self.counted(op, getattr(dist, op)))

    def counted(self, op: str, real: Callable[..., Any]) -> Callable[..., Any]:
        p2p = op in ("send", "recv", "isend", "irecv")
        name = op.removeprefix("i") if p2p else op

        @functools.wraps(real)
        def call(*args: Any, **kwargs: Any) -> Any:
            stream = (id(kwargs.get("group")) if kwargs.get("group") is not None else 0, p2p)
            self.index += 1
            self.numbers[stream] = self.numbers.get(stream, 0) + 1
            for fault in self.faults:
                point = CallPoint.parse(fault["call"])
                hit = self.index if point.op is None else self.numbers[stream]
                if hit == point.number and point.op in (None, name):
                    self._strike(fault)
            return real(*args, **kwargs)

        return call

    def _strike(self, fault: Mapping[str, Any]) -> None:
        if fault["what"] in CUTS:
            self._cut(fault)
            return
        time.sleep(float(fault.get("after_s", 0.0)))
        with open(os.path.join(self.folder, f"struck.{fault['number']}"), "w"):  # the run asks whether it ever came
            pass
        match fault["what"]:
            case "crash":
                os.kill(os.getpid(), signal.Signals[str(fault.get("signal", "SIGKILL"))])
                time.sleep(60)
            case "freeze":
                if fault.get("for_s") is not None:
                    command = f"sleep {float(fault['for_s'])}; kill -CONT {os.getpid()}"
                    subprocess.Popen(["sh", "-c", command], start_new_session=True)
                os.kill(os.getpid(), signal.SIGSTOP)
            case "exit":
                sys.stdout.flush()
                os._exit(int(fault.get("code", 1)))
            case "exception":
                kind = exception_named(str(fault.get("exception", "RuntimeError")))
                raise kind(fault.get("message", "injected fault"))
            case "delay":
                time.sleep(float(fault["delay_s"]))

    def _cut(self, fault: Mapping[str, Any]) -> None:
        """Report to namespaces.py that the call of this fault has begun, and wait until the network is cut."""
        with open(os.path.join(self.folder, f"strike.{fault['number']}"), "w"):
            pass
        done, deadline = os.path.join(self.folder, f"struck.{fault['number']}"), time.monotonic() + CUT_WAIT_S
        while not fault.get("after_s") and not os.path.exists(done) and time.monotonic() < deadline:
            time.sleep(0.005)


def main(path: str) -> None:
    """Run the plan's program as `__main__` (or its function) in this process."""
    with open(path, encoding="utf-8") as file:
        plan = json.load(file)
    program, function = str(plan["program"]), plan.get("function")
    import torch.distributed as dist

    rank, folder = int(os.environ.get("RANK", "0")), os.path.dirname(os.path.abspath(path))
    Injector(rank, plan.get("faults", ()), folder).install(dist)
    with open(os.path.join(folder, f"begun.{rank}"), "w"):
        pass
    sys.argv[:] = [program, *plan.get("args", ())]
    if function is None:
        sys.path[0] = os.path.dirname(os.path.abspath(program))
        runpy.run_path(program, run_name="__main__")
        return
    if program.endswith(".py"):
        sys.path[0] = os.path.dirname(os.path.abspath(program))
        module: Any = runpy.run_path(program, run_name=os.path.basename(program).removesuffix(".py"))
        module[function](*plan.get("args", ()))
    else:
        sys.path[0] = os.getcwd()
        getattr(importlib.import_module(program), function)(*plan.get("args", ()))


if __name__ == "__main__":
    main(sys.argv[1])
