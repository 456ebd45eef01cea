"""Flags of Python and torch that hold for the whole process: turned by one rank, for it alone."""

from __future__ import annotations

import builtins
import copy
import gc
import locale
import logging
import multiprocessing.context
import multiprocessing.process
import os
import socket
import sys
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch.backends import ContextProp

from distsim.sim.isolation.for_ranks import patch_for_ranks
from distsim.sim.isolation.modules.modules import SharedImports
from distsim.sim.isolation.torch_state.torch_state import STATE, TorchState
from distsim.sim.kernel.task import current_process
from distsim.torch_compat import state as state_names

# -- torch's flags in C++ that hold for the whole process: turned by one simulated rank, for it alone.

_get_cudnn_allow_tf32 = state_names.GET_CUDNN_ALLOW_TF32.get()
_get_fp32_precision_getter = state_names.GET_FP32_PRECISION_GETTER.get()
_set_cudnn_allow_tf32 = state_names.SET_CUDNN_ALLOW_TF32.get()
_set_float32_matmul_precision = state_names.SET_FLOAT32_MATMUL_PRECISION.get()

Flag = tuple[Callable[[], Any], Callable[[Any], None], tuple[tuple[Any, str], ...]]


def _flags() -> list[Flag]:
    props = [p for m in sys.modules.copy().values() for p in vars(type(m)).values() if isinstance(p, ContextProp)]
    result: list[Flag] = []
    for getter, setter in state_names.FLAG_PAIRS:
        get, put = state_names.FLAGS_IN_C[getter].get(None), state_names.FLAGS_IN_C[setter].get(None)
        if get is None or put is None:
            continue
        holders = [(state_names.FLAGS_IN_C[setter].holder(), setter)]
        holders += [(prop, "setter") for prop in dict.fromkeys(props) if prop.setter is put]
        result.append((get, put, tuple(holders)))
    ways = [(torch, "set_float32_matmul_precision")]
    for name in (
        state_names.SET_CUBLAS_ALLOW_TF32,
        state_names.SET_CUDNN_ALLOW_TF32,
        state_names.SET_FP32_PRECISION_SETTER,
    ):
        put = name.get(None)
        if put is not None:
            ways.append((name.holder(), name.attribute))
            ways += [(prop, "setter") for prop in dict.fromkeys(props) if prop.setter is put]
    result.append((_precisions, _set_precisions, tuple(ways)))
    return result


_PRECISIONS = tuple(
    [("generic", "all")]
    + [(backend, operation) for backend in ("cuda", "mkldnn") for operation in ("all", "matmul", "conv", "rnn")]
)
_set_precision = state_names.SET_FP32_PRECISION_SETTER.get(None)


def _precisions() -> tuple[str | None, bool | None, tuple[str, ...]]:
    """Read the precision of 32-bit products. Four setters of torch write to the same few places, and older getters
    raise after a newer setter was used."""
    exact = () if _set_precision is None else tuple(_get_fp32_precision_getter(*of) for of in _PRECISIONS)
    return _asked(torch.get_float32_matmul_precision), _asked(_get_cudnn_allow_tf32), exact


def _asked(get: Any) -> Any:
    try:
        return get()
    except RuntimeError:
        return None


def _set_precisions(values: tuple[str | None, bool | None, tuple[str, ...]]) -> None:
    products, convolutions, exact = values
    if products is not None:
        _set_float32_matmul_precision(products)
    if convolutions is not None:
        _set_cudnn_allow_tf32(convolutions)
    for of, value in zip(_PRECISIONS, exact, strict=False):  # last: the others write to them
        assert _set_precision is not None
        _set_precision(*of, value)


FLAGS = _flags()


# -- Process-wide state of Python and torch, kept once for each simulated process.
#
# Two sorts. *Places* are module attributes that a program simply assigns (`sys.stdout`,
# `builtins.print`): they are swapped with the baton always. *Switches* are turned by a call
# (`torch.set_default_dtype`, `os.chdir`): a switch costs nothing until a program first turns it;
# from then on each process has its own position of it.

_set_deterministic_algorithms = state_names.SET_DETERMINISTIC_ALGORITHMS.get()

PLACES: tuple[tuple[Any, str], ...] = (
    (sys, "stdin"),
    (sys, "stdout"),
    (sys, "stderr"),
    (sys, "excepthook"),
    (sys, "unraisablehook"),
    (sys, "displayhook"),
    (sys, "breakpointhook"),
    (sys, "meta_path"),
    (sys, "path_hooks"),
    (sys, "dont_write_bytecode"),
    (threading, "excepthook"),
    (warnings, "showwarning"),
    (warnings, "_showwarnmsg_impl"),
    (warnings, "filters"),
    (logging, "_warnings_showwarning"),  # of `captureWarnings`
    (multiprocessing.context._default_context, "_actual_context"),  # what set_start_method sets
    (multiprocessing.process, "_current_process"),
    (multiprocessing.process, "_parent_process"),
    (multiprocessing.process, "_process_counter"),
    (multiprocessing.process, "_children"),
    (builtins, "print"),  # many programs silence all ranks but the first this way
)
"""Module attributes that a program assigns."""


@dataclass(slots=True)
class HostState:
    """State that simulated processes find at their start, and that is restored after their end."""

    environ: dict[bytes, bytes]
    imports: SharedImports
    places: list[Any] = field(default_factory=lambda: [getattr(holder, name) for holder, name in PLACES])
    turned: dict[Switch, Any] = field(default_factory=dict)
    """Switches that some process has turned, with the position of all that have not."""
    shared: list[Any] = field(default_factory=list)
    """Queues, locks and their like that have crossed from one process into another."""
    torch: TorchState = STATE

    def __post_init__(self) -> None:
        self.torch.swapped_anyway = frozenset((id(holder), name) for holder, name in PLACES)

    def first_places(self) -> list[Any]:
        """Return the places of a new process, without the hooks and start method of the surrounding program."""
        places = list(self.places)
        for number, value in _FIRST:
            places[number] = value()
        return places


_FIRST: tuple[tuple[int, Callable[[], Any]], ...] = (
    (PLACES.index((sys, "excepthook")), lambda: sys.__excepthook__),
    (PLACES.index((sys, "meta_path")), lambda: list(sys.meta_path)),
    (PLACES.index((sys, "path_hooks")), lambda: list(sys.path_hooks)),
    (PLACES.index((threading, "excepthook")), lambda: threading.__excepthook__),
    (PLACES.index((warnings, "filters")), lambda: list(warnings.filters)),
    (PLACES.index((multiprocessing.context._default_context, "_actual_context")), lambda: None),
)
"""Initial values, by index, of settings that differ between processes."""


@dataclass(frozen=True, slots=True, eq=False)
class Switch:
    """A process-wide setting of torch. *setters* are the public functions that change it."""

    get: Callable[[], Any]
    set: Callable[[Any], object]
    setters: tuple[tuple[Any, str], ...]
    own: Callable[[Any], Any] = copy.copy
    """Makes of the position that all share one that a process may change in place."""


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _set_deterministic(value: tuple[bool, bool]) -> None:
    _set_deterministic_algorithms(value[0], warn_only=value[1])


def _anomaly() -> tuple[bool, bool]:
    return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()


_set_anomaly_enabled = torch.set_anomaly_enabled
_set_default_dtype = state_names.SET_DEFAULT_DTYPE.get()
_chdir = os.chdir
_shown = sys.modules["torch._tensor_str"].PRINT_OPTS

DEEPEST = 50_000
"""Frames of a rank's thread. Python unwinds and shows that many in a second; recursive algorithms stay far below."""
_set_umask = os.umask
_set_recursion_limit, _set_switch_interval = sys.setrecursionlimit, sys.setswitchinterval
_set_max_digits, _set_socket_timeout = sys.set_int_max_str_digits, socket.setdefaulttimeout
_real_setlocale = locale.setlocale
_gc_enable, _gc_disable, _gc_threshold, _gc_debug = gc.enable, gc.disable, gc.set_threshold, gc.set_debug
_gc_get_threshold = gc.get_threshold


def _umask() -> int:
    mask = _set_umask(0o077)  # to read it is to set it
    _set_umask(mask)
    return mask


def _ask_for_recursion_limit(limit: int) -> None:
    """Replace `sys.setrecursionlimit` in a rank.

    With a limit of a billion, an endless recursion ends only when memory is used up, and kills all other ranks.
    Unwinding then needs as much memory again.
    """
    process = current_process()
    if process is not None and limit > DEEPEST:
        process.port.note(f"a simulated rank recurses to a depth of {DEEPEST:,} at most; the program asked for more")
        limit = DEEPEST
    _set_recursion_limit(limit)


def _set_collector(value: tuple[bool, tuple[int, int, int], int]) -> None:
    enabled, thresholds, debug = value
    (_gc_enable if enabled else _gc_disable)()
    _gc_threshold(*thresholds)
    _gc_debug(debug)


def _set_locale(value: str) -> None:
    _real_setlocale(locale.LC_ALL, value)


SWITCHES: tuple[Switch, ...] = (
    Switch(
        torch.get_default_dtype,
        _set_default_dtype,
        ((torch, "set_default_dtype"), (torch, "set_default_tensor_type")),
    ),
    Switch(
        _deterministic,
        _set_deterministic,
        ((torch, "use_deterministic_algorithms"), (torch, "set_deterministic_debug_mode")),
    ),
    Switch(_anomaly, lambda value: _set_anomaly_enabled(*value), ((torch, "set_anomaly_enabled"),)),
    Switch(
        lambda: dict(vars(_shown)),
        lambda value: vars(_shown).update(value),
        ((torch, "set_printoptions"), (sys.modules["torch._tensor_str"], "set_printoptions")),
    ),
    Switch(os.getcwd, _chdir, ((os, "chdir"), (os, "fchdir"))),
    *(Switch(get, put, setters) for get, put, setters in FLAGS),
    Switch(_umask, _set_umask, ((os, "umask"),)),
    Switch(
        lambda: (gc.isenabled(), _gc_get_threshold(), gc.get_debug()),
        _set_collector,
        ((gc, "enable"), (gc, "disable"), (gc, "set_threshold"), (gc, "set_debug")),
    ),
    Switch(sys.getrecursionlimit, _set_recursion_limit, ((sys, "setrecursionlimit"),)),
    Switch(sys.getswitchinterval, _set_switch_interval, ((sys, "setswitchinterval"),)),
    Switch(sys.get_int_max_str_digits, _set_max_digits, ((sys, "set_int_max_str_digits"),)),
    Switch(socket.getdefaulttimeout, _set_socket_timeout, ((socket, "setdefaulttimeout"),)),
    Switch(lambda: _real_setlocale(locale.LC_ALL), _set_locale, ((locale, "setlocale"),)),
)


_BOUNDED: dict[tuple[Any, str], Callable[..., Any]] = {(sys, "setrecursionlimit"): _ask_for_recursion_limit}
"""Setters whose effect is limited in a rank."""


def _turning(switch: Switch, real: Callable[..., Any]) -> Callable[..., Any]:
    """Return the setter *real*, noting that its switch is turned in the running process."""

    def turn(*args: Any, **kwargs: Any) -> Any:
        process = current_process()
        if process is not None and switch not in process.interpreter.switches:
            shared = process.interpreter.host.turned.setdefault(switch, switch.get())
            position = switch.own(shared)
            process.interpreter.switches[switch] = position
            switch.set(position)
        return real(*args, **kwargs)

    return turn


def _remember(name: str, task: Any, number: int) -> None:
    """Keep a number that a simulated process may set without effect."""
    if number < 1:
        raise RuntimeError(f"set_{name} expects a positive integer")
    setattr(task.process.notes, name, number)


def switch_patches() -> list[tuple[Any, str, Any]]:
    """Return patches (holder, attribute, replacement) for all functions that change a setting."""
    patches = [
        (holder, name, _turning(switch, _BOUNDED.get((holder, name), getattr(holder, name))))
        for switch in SWITCHES
        for holder, name in switch.setters
    ]
    for name in ("num_threads", "num_interop_threads"):  # more threads would be another order of additions
        get = attrgetter(f"process.notes.{name}")
        patches.append(patch_for_ranks(torch, "get_" + name, get))
        patches.append(patch_for_ranks(torch, "set_" + name, partial(_remember, name)))
    return patches
