"""Names DDP's parameters without a gradient, and keeps handles alive that its C++ code uses.

DDP's own error gives such parameters only as numbers.
"""

from __future__ import annotations

import functools
import re
import sys
import weakref
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from distsim.debug.records.frames import frame_of, outward
from distsim.text.tracebacks import message
from distsim.torch_compat import groups
from distsim.torch_compat.names import Patches

_INDICES = re.compile(r"did not receive grad for rank \d+: ([\d ]+)")


class DdpHook:
    """The DDP models of this process."""

    def __init__(self) -> None:
        self._models: weakref.WeakSet[Any] = weakref.WeakSet()
        self._patches = Patches()
        self._kept: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        """Handle that each reducer holds in C++. If the Python object of the handle were freed, C++ would call its
        own wait(), which never returns (seen in `ddp.join(divide_by_initial_world_size=False)`).
        """

    def install(self) -> None:
        original: Any = DistributedDataParallel.__init__
        models = self._models

        @functools.wraps(original)
        def init(ddp: Any, *args: Any, **kwargs: Any) -> None:
            original(ddp, *args, **kwargs)
            models.add(ddp)

        self._patches.put(DistributedDataParallel, "__init__", init)
        self._patches.wrap(groups.KEEP_HANDLE, self._keep)

    def remove(self) -> None:
        self._patches.remove()

    def _keep(self, hand_over: Any, reducer: Any, work: Any, *args: Any, **kwargs: Any) -> Any:
        self._kept[reducer] = work
        return hand_over(reducer, work, *args, **kwargs)

    def explain(self, error: BaseException) -> str | None:
        """Return a sentence about DDP's error that a reduction was not finished; None for other errors."""
        text = message(error)
        if "Expected to have finished reduction in the prior iteration" not in text:
            return None
        match = _INDICES.search(text)
        indices = [int(word) for word in match[1].split()] if match else []
        for ddp in list(self._models):
            names = parameter_names(ddp)
            if indices and max(indices) < len(names):
                return _sentence([names[i] for i in indices])
        return "parameters of a DDP model got no gradient in the last backward pass"

    def without_gradient(self) -> str | None:
        """Return a sentence about parameters without a gradient in a model whose other parameters have one.

        It is called while a rank does not progress and is outside any backward pass, when no gradient is being
        computed.
        """
        if _in_backward():
            return None
        for ddp in list(self._models):
            if getattr(ddp, "find_unused_parameters", False) or getattr(ddp, "static_graph", False):
                continue
            named = [(name, p) for name, p in ddp.module.named_parameters() if p.requires_grad]
            missing = [name for name, p in named if p.grad is None]
            if missing and len(missing) < len(named):
                return _sentence(missing)
        return None


def _in_backward() -> bool:
    """Return whether a thread of this process is inside autograd's engine."""
    codes = (one.f_code for thread in [*sys._current_frames()] for one in outward(frame_of(thread)))
    return any(code.co_name == groups.RUN_BACKWARD.attribute for code in codes)


def parameter_names(ddp: Any) -> list[str]:
    """Return the names of parameters in the order of DDP's indices."""
    ignored: set[str] = getattr(ddp, "parameters_to_ignore", set())
    return [
        name for name, parameter in ddp.module.named_parameters() if parameter.requires_grad and name not in ignored
    ]


def _sentence(names: list[str]) -> str:
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    noun = "parameter" if len(names) == 1 else "parameters"
    return f"DDP {noun} {shown} got no gradient in the last backward pass"
