"""Handles, futures and the state of a thread that decides which way a call takes."""

from __future__ import annotations

import gc
import weakref
from typing import Any

from distsim.torch_compat.names import FEATURE, GUARD, OPTIONAL, SIM, Name

__all__ = ["outlive_python"]


def outlive_python() -> bool:
    """Whether C++ that holds a Work of Python's keeps the Python object alive, too (since torch 2.7)."""
    from torch.distributed import Work
    from torch.futures import Future

    class Probe(Work):
        pass

    future: Any = Future()
    work = Probe()
    alive = weakref.ref(work)
    future.set_result(work)  # C++ holds the value
    del work
    gc.collect()
    return alive() is not None


FUTURE = Name(
    "torch._C.Future", "futures of calls that are held back, and of remote calls", GUARD | SIM, public="torch.futures"
)
COLLECT_ALL = Name("torch._C._collect_all", "futures that collect others", FEATURE, public="torch.futures.collect_all")
PROFILES = Name("torch._C._autograd._profiler_enabled", "calls under the profiler", GUARD)
DISPATCH_MODES = Name("torch._C._len_torch_dispatch_stack", "calls under a TorchDispatchMode", GUARD)
FUNCTION_MODES = Name("torch._C._len_torch_function_stack", "calls under a TorchFunctionMode", GUARD)
TRANSFORMS = Name("torch._C._functorch.peek_interpreter_stack", "calls inside a transform of torch.func", GUARD)
RUN_BACKWARD = Name("torch.autograd.graph._engine_run_backward", "DDP's calls on the short path", GUARD | SIM)
SOURCE_RANK = Name(
    "torch._C._distributed_c10d.Work._source_rank", "the sender that recv without a source met", OPTIONAL
)
