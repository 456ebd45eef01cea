"""A torch without CUDA that accepts CUDA tensors: the private parts of torch that this takes, all in this file.

Two objects of C++ decide whether a tensor may lie on device type `cuda`. The *device guard* (c10's registry,
c10/core/impl/DeviceGuardImplInterface.h) knows the current device and stream; torch brings a stand-in for tests,
`FakeGuardImpl<CUDA>`, which keeps them by thread and is installed by `torch._C._ensureCUDADeviceGuardSet()` where a
guard of zero devices is registered; it has no events, so those are ours (`timeline`). The *accelerator hooks*
(ATen/detail/AcceleratorHooksInterface.h) tell autograd that there is an accelerator; three slots of their table of
functions are exchanged.

Both are in force within `accepted()` only. What C++ may still point to afterwards is never freed.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from pathlib import Path

import torch

from distsim.errors import NotSimulated
from distsim.sim.device.timeline.autograd_events import EVENT_FUNCTIONS

__all__ = ["MOST_DEVICES", "accepted"]

MOST_DEVICES = 8
"""Devices of one process: `kFakeGuardImplMaxDevices` (c10/core/impl/FakeGuardImpl.h)."""

_CUDA = 1
"""c10::DeviceType::CUDA (torch/headeronly/core/DeviceType.h)."""
_GUARD_SLOTS = 32
"""More than a device guard has virtual functions."""
_HOOK_SLOTS = 80
"""More than CUDA's hooks have virtual functions; what follows the table is copied and never used."""
_BEFORE = 2
"""Words of a C++ table of functions in front of its first one: offset to the top, type information."""
_ANSWERED = (2, 3, 4)
"""isBuilt, isAvailable, hasPrimaryContext, behind the two destructors."""

_Word = ctypes.c_void_p
_kept: list[object] = []


def _for_ever(value: object) -> None:
    """C++ points to it until the process is gone, later than Python's own end."""
    _kept.append(value)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


def _words(count: int) -> ctypes.Array[ctypes.c_void_p]:
    made = (_Word * count)()
    _for_ever(made)
    return made


class _Parts:
    """The addresses of what is exchanged."""

    def __init__(self) -> None:
        libraries = Path(torch.__file__).parent / "lib"
        core = ctypes.CDLL(str(libraries / "libc10.so"))
        tensors = ctypes.CDLL(str(libraries / "libtorch_cpu.so"))
        self._guards = (_Word * (_CUDA + 1)).in_dll(core, "_ZN3c104impl26device_guard_impl_registryE")
        self._register = core["_ZN3c104impl19registerDeviceGuardENS_10DeviceTypeEPKNS0_24DeviceGuardImplInterfaceE"]
        self._register.argtypes, self._register.restype = [ctypes.c_byte, _Word], None
        hooks = tensors["_ZN2at6detail12getCUDAHooksEv"]
        hooks.restype = _Word
        self._hooks = _Word.from_address(hooks())
        self.plain_guard = self._guards[_CUDA]
        self.plain_hooks = self._hooks.value
        self.guard = self._make_guard()
        self.hooks = self._make_hooks()

    def _make_guard(self) -> int:
        """torch's stand-in belongs to the thread that asked for it, and dies with that thread: what is registered is
        another object of its kind, which has no members, and whose events are ours."""
        none = ctypes.CFUNCTYPE(ctypes.c_byte, _Word)(lambda _: 0)
        _for_ever(none)
        functions, empty, ours = _words(_GUARD_SLOTS), _words(1), _words(1)
        for slot in range(_GUARD_SLOTS):
            functions[slot] = ctypes.cast(none, _Word).value
        empty[0] = ctypes.addressof(functions)
        self._register(_CUDA, ctypes.addressof(empty))
        torch._C._ensureCUDADeviceGuardSet()
        stand_in = self._guards[_CUDA]
        if stand_in in (None, ctypes.addressof(empty)):
            self._register(_CUDA, self.plain_guard)
            raise LookupError("torch._C._ensureCUDADeviceGuardSet installed no guard")
        table = _words(_BEFORE + _GUARD_SLOTS)
        size = ctypes.sizeof(_Word)
        its = _Word.from_address(stand_in).value
        assert its is not None
        ctypes.memmove(table, its - _BEFORE * size, len(table) * size)
        for slot, function in EVENT_FUNCTIONS.items():
            table[_BEFORE + slot] = ctypes.cast(function, _Word).value
        _for_ever(EVENT_FUNCTIONS)
        ours[0] = ctypes.addressof(table) + _BEFORE * size
        self._register(_CUDA, self.plain_guard)
        return ctypes.addressof(ours)

    def _make_hooks(self) -> int:
        """The hooks' own table of functions, but that it is built, available and begun."""
        yes = ctypes.CFUNCTYPE(ctypes.c_bool, _Word)(lambda _: True)
        _for_ever(yes)
        assert self.plain_hooks is not None
        table = _words(_BEFORE + _HOOK_SLOTS)
        size = ctypes.sizeof(_Word)
        ctypes.memmove(table, self.plain_hooks - _BEFORE * size, len(table) * size)
        for slot in _ANSWERED:
            table[_BEFORE + slot] = ctypes.cast(yes, _Word).value
        return ctypes.addressof(table) + _BEFORE * size

    def exchange(self, guard: int | None, hooks: int | None) -> None:
        self._register(_CUDA, guard)
        self._hooks.value = hooks


@functools.cache
def _parts() -> _Parts:
    try:
        return _Parts()
    except (OSError, AttributeError, ValueError, LookupError) as error:
        raise NotSimulated(
            f"CUDA with this build of torch ({torch.__version__}: {error})",
            "install torch==2.13.0 for Linux on x86-64 (pip install torch==2.13.0), with or without CUDA",
        ) from None


@contextlib.contextmanager
def accepted() -> Iterator[None]:
    """Within this, tensors may lie on `cuda:0` to `cuda:7` and autograd runs their backward. Not nested.

    Raises NotSimulated where this build of torch does not have what it takes.
    """
    parts = _parts()
    parts.exchange(parts.guard, parts.hooks)
    try:
        yield
    finally:
        parts.exchange(parts.plain_guard, parts.plain_hooks)
