"""Exceptions by the names that users give them."""

from __future__ import annotations

import builtins
import importlib

from distsim.errors import UsageError
from distsim.text.untrusted_input import brief


def exception_named(name: str) -> type[Exception]:
    """Return the exception class with this name: `ValueError`, `DistBackendError` (of torch.distributed), or a full
    name such as `torch.cuda.OutOfMemoryError`.

    Raises UsageError if there is none.
    """
    module, dot, last = name.rpartition(".")
    if dot:
        try:
            result = getattr(importlib.import_module(module), last, None)
        except Exception as error:  # the module's own code may raise anything
            why = (
                f"no module {brief(module)}" if isinstance(error, ModuleNotFoundError) else f"its module says: {error}"
            )
            raise UsageError(f"no exception {brief(name)!r}: {brief(why)}") from None
        if not _is_exception(result):
            raise UsageError(f"no exception {brief(name)!r}: {brief(module)} does not define it")
    else:
        import torch.distributed as dist

        result = getattr(builtins, name, None) or getattr(dist, name, None)
        if not _is_exception(result):
            raise UsageError(f"no exception {brief(name)!r} in Python or torch.distributed; try RuntimeError")
    assert isinstance(result, type)
    return result


def _is_exception(candidate: object) -> bool:
    return isinstance(candidate, type) and issubclass(candidate, Exception)
