"""What the user knows to be right: parameters that may differ between ranks, and findings that are not reported."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Sequence
from typing import TypeVar

from distsim.debug.diagnosis.silent.finding import Sighting, SilentKind
from distsim.errors import UsageError

__all__ = ["check_patterns", "is_allowed", "may_vary", "varies"]

_MARK = "_distsim_varies"

Marked = TypeVar("Marked")


def varies(module_or_parameter: Marked) -> Marked:
    """Say that parameters may hold other values on each rank, so that the search for silent faults does not compare
    them: experts, adapters, ensembles. Without that search the call changes nothing.

    Mark the parameters that the optimizer is given: after `fully_shard` or another wrapper that replaces them.

    Args:
        module_or_parameter: A `torch.nn.Module`, with all parameters in it, or one parameter.

    Returns:
        The argument.

    Raises:
        UsageError: It is neither.
    """
    parameters = getattr(module_or_parameter, "parameters", None)
    if callable(parameters):
        for parameter in parameters():
            setattr(parameter, _MARK, True)
    elif hasattr(module_or_parameter, "requires_grad"):
        setattr(module_or_parameter, _MARK, True)
    else:
        raise UsageError(f"distsim.varies: expected a module or a parameter, got {type(module_or_parameter).__name__}")
    return module_or_parameter


def may_vary(parameter: object) -> bool:
    """Whether the program marked *parameter* by `varies`."""
    return hasattr(parameter, _MARK)


def is_allowed(sighting: Sighting, patterns: Sequence[str]) -> bool:
    """Whether one of the *patterns* KIND:TENSOR fits; without a tensor it fits all."""
    for pattern in patterns:
        kind, _, tensor = pattern.partition(":")
        if fnmatch.fnmatchcase(sighting.kind.value, kind) and fnmatch.fnmatchcase(sighting.tensor, tensor or "*"):
            return True
    return False


def check_patterns(patterns: Sequence[str]) -> None:
    """Raise `UsageError` for a pattern whose kind no finding has."""
    kinds = [kind.value for kind in SilentKind]
    for pattern in patterns:
        kind = pattern.partition(":")[0]
        if not fnmatch.filter(kinds, kind):
            near = difflib.get_close_matches(kind, kinds, n=1) or ["replicas_diverge"]
            raise UsageError(
                f"silent_allow: expected KIND:TENSOR with a kind of docs/silent.md, such as {near[0]}:*.experts.*, "
                f"got {pattern!r}"
            )
