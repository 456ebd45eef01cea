"""The circumstances of a call: what of torch and Python runs the user's line.

A recorded stack holds the user's frames alone. Whether a line runs in a backward pass, in a recomputation of activation
checkpointing or in a signal handler is in the frames between them: each stretch of these is kept as labels
(`Site.inside`).
"""

from __future__ import annotations

import functools
import signal
from collections.abc import Sequence
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any

from distsim.debug.records import Site

RECOMPUTATION, BACKWARD, DDP, FUNCTIONAL = "recomputation", "backward", "ddp", "functional"
JOIN, MESH, OBJECT_LIST = "join", "mesh", "object list"
HANDLER, EXIT_HANDLER, FINALIZER = "signal handler", "exit handler", "finalizer"
REDUCER = "_engine_run_backward"
"""torch's function that runs a backward pass in C++; a call right above it is of DDP's reducer."""
_LABELS: tuple[tuple[str, frozenset[str], str], ...] = (
    (
        "/torch/utils/checkpoint.py",
        frozenset({"recompute_fn", "unpack_hook", "CheckpointFunction.backward"}),
        RECOMPUTATION,
    ),
    ("/torch/autograd/", frozenset({"backward", "grad", REDUCER}), BACKWARD),
    ("/torch/nn/parallel/distributed.py", frozenset(), DDP),
    ("/torch/distributed/fsdp/", frozenset(), "fsdp"),
    ("/torch/distributed/_composable/", frozenset(), "fsdp"),
    ("/torch/distributed/pipelining/", frozenset(), "pipeline"),
    ("/torch/distributed/checkpoint/", frozenset(), "dcp"),
    ("/torch/distributed/optim/", frozenset(), "sharded optimizer"),
    ("/torch/distributed/tensor/", frozenset(), "dtensor"),
    ("/torch/distributed/algorithms/join.py", frozenset(), JOIN),
    ("/torch/distributed/device_mesh.py", frozenset(), MESH),
    ("/torch/distributed/_functional_collectives.py", frozenset(), FUNCTIONAL),
    ("/torch/nn/modules/_functions.py", frozenset(), "sync batch norm"),
    ("/sim/processes/lifetime.py", frozenset({"_finalize"}), EXIT_HANDLER),
)
"""Part of a path, the functions there (none: all) by the end of their names, and the label."""


@lru_cache(maxsize=4096)
def label(file: str, function: str) -> str:
    """Return what a frame that is not the user's tells of the frames above it; empty if nothing."""
    if file.startswith("<"):
        return file[1:-1] if file.startswith((f"<{HANDLER}", f"<{EXIT_HANDLER}")) else ""
    if function.endswith(("object_list", "gather_object", "all_gather_object")) and file.endswith(
        "distributed_c10d.py"
    ):
        return OBJECT_LIST
    for part, functions, name in _LABELS:
        if part in file and (not functions or any(function == f or function.endswith(f".{f}") for f in functions)):
            return name
    return ""


_TOLD_BY = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGCONT", "SIGXCPU")
"""Signals by which jobs are told something. To ask for all 64 takes 150 us."""
_handlers: dict[CodeType, str] = {}
"""Code of the functions that handle signals, with the signal's name."""


def note_handler(number: int, handler: Any) -> None:
    """Note that *handler* is called on signal *number*."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    function = getattr(handler, "__func__", handler)
    code = getattr(function, "__code__", None) or getattr(type(handler).__call__, "__code__", None)
    if isinstance(code, CodeType):
        _handlers[code] = signal.Signals(number).name


def note_handlers() -> None:
    """Note all functions of this process that handle signals."""
    for name in _TOLD_BY:
        number = getattr(signal, name)
        if callable(handler := signal.getsignal(number)):
            note_handler(number, handler)


def handled_signal(frame: FrameType) -> str:
    """Return the name of the signal that *frame* handles; empty if it handles none, or was called by hand."""
    name = _handlers.get(frame.f_code, "") if _handlers else ""
    if not name:
        return ""
    names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
    taken = frame.f_code.co_flags & 0x04  # *args
    values = [frame.f_locals.get(n) for n in frame.f_code.co_varnames[: len(names) + bool(taken)]]
    flat = [v for value in values for v in (value if isinstance(value, tuple) else (value,))]
    return name if any(isinstance(value, FrameType) for value in flat) else ""


def circumstances(way: Sequence[Site]) -> dict[str, Site]:
    """Return the labels of a call's stack, the innermost first, each with the user's line above the stretch."""
    labels: dict[str, Site] = {}
    for site in way:
        for name in site.inside:
            labels.setdefault(name, site)
        if site.function.rpartition(".")[2] == "__del__":
            labels.setdefault(FINALIZER, site)
    return labels
