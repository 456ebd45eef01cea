"""Has torch accept a CUDA tensor without data: meta tensors and the hooks of the device."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distsim.errors import NotSimulated
from distsim.sim.device.timeline.steps import EVENT_FUNCTIONS
from distsim.torch_compat import device as device_names
from distsim.torch_compat.cuda_api import ACCELERATOR_GET_ACCELERATOR
from distsim.torch_compat.groups import EXECUTION_ENGINE
from distsim.torch_compat.names import SIM
from distsim.torch_compat.releases import tested_range

# -- Tensors on a simulated GPU: shape, strides, dtype, device and storage are true, and there is no data.
#
# `torch.Tensor._make_wrapper_subclass` makes a tensor without data, of a class of ours; assigning it to `.data` of a
# plain tensor gives that one its device, its storage and all else (`Variable::set_data` shares the storage and keeps
# the class). Nothing that a program can ask then tells it from a tensor on a GPU, except for its data pointer.

_DisableTorchDispatch = device_names.DISABLE_TORCH_DISPATCH.get()
_PreserveDispatchKeyGuard = device_names.PRESERVE_DISPATCH_KEY_GUARD.get()
_set_meta_in_tls_dispatch_include = device_names.SET_META_IN_TLS_DISPATCH_INCLUDE.get()


class _Bare(Tensor):
    """Base tensor from which a carrier is made."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _COMPATIBLE:
            return True  # set_data asks whether the two are of one kind
        raise AssertionError(f"{func} reached a bare carrier")


_COMPATIBLE = device_names.HAS_COMPATIBLE_SHALLOW_COPY_TYPE.get()
_make = device_names.MAKE_WRAPPER_SUBCLASS.get()
_empty = torch.empty
_HOST = torch.device("cpu")
"""The CPU. It is named for every tensor created here, because the program may have set another default device."""


def carrier(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor on *device* whose storage holds no data. No dispatch mode may be active."""
    result = _empty(0, device=_HOST)
    result.data = _make(_Bare, size, stride, dtype=dtype, device=device)
    return result


def under_meta(func: Any, args: Any, kwargs: Any) -> Any:
    """Call *func*, a view or metadata operator, by its meta kernel, which shares storages and computes nothing."""
    with _DisableTorchDispatch(), _PreserveDispatchKeyGuard():
        _set_meta_in_tls_dispatch_include(True)
        return func(*args, **kwargs)


# -- A torch that accepts CUDA tensors without a GPU: the private parts of torch that this takes, all in this file.
#
# Two objects of C++ decide whether a tensor may lie on device type `cuda`. The *device guard* (c10's registry,
# c10/core/impl/DeviceGuardImplInterface.h) knows the current device and stream; torch brings a stand-in for tests,
# `FakeGuardImpl<CUDA>`, which keeps them by thread and is installed by `torch._C._ensureCUDADeviceGuardSet()` where a
# guard of zero devices is registered; it has no events, so those are ours (`timeline`). The *accelerator hooks*
# (ATen/detail/CUDAHooksInterface.h) tell autograd that there is an accelerator; they get the table of functions that a
# build without CUDA has, three slots of it exchanged.
#
# A build with CUDA has a guard and hooks of its own, which would call the driver, and cuDNN's recurrent networks; both
# stand aside in the same way. It has DDP's timer for CUDA as well (torch/csrc/distributed/c10d/reducer_timer.hpp),
# which records real events: DDP does without one where none is registered, as in the other build. Its kernels are
# `cuda_api/compiled.py`'s to keep away.
#
# All is in force within `accepted()` only. Before the first use it is `tested()`: torch finds its accelerator and one
# backward goes through it. What C++ may still point to afterwards is never freed. Run with torch 2.13.0 and 2.14.1,
# with and without CUDA, on Linux x86-64 without a GPU; never beside a real one.

below_modes = device_names.DISABLE_CURRENT_MODES.get()
_DispatchKey = device_names.DISPATCH_KEY.get()
_dispatch_tls_local_exclude_set = device_names.DISPATCH_TLS_LOCAL_EXCLUDE_SET.get()
_dispatch_tls_local_include_set = device_names.DISPATCH_TLS_LOCAL_INCLUDE_SET.get()
_ensureCUDADeviceGuardSet = device_names.ENSURE_CUDA_DEVICE_GUARD_SET.get()
_ForceDispatchKeyGuard = device_names.FORCE_DISPATCH_KEY_GUARD.get()
TorchDispatchMode = device_names.TORCH_DISPATCH_MODE.get()
_execution_engine = EXECUTION_ENGINE.get()

MOST_DEVICES = 8
"""Devices of one process: `kFakeGuardImplMaxDevices` (c10/core/impl/FakeGuardImpl.h)."""

_CUDA = 1
"""c10::DeviceType::CUDA (torch/headeronly/core/DeviceType.h)."""
_GUARD_SLOTS = 32
"""Upper bound of the number of virtual functions of a device guard."""
_HOOK_SLOTS = 80
"""Upper bound of the number of virtual functions of CUDA's hooks; entries beyond the table are copied and never
used.
"""
_BEFORE = 2
"""Words of a C++ table of functions in front of its first one: offset to the top, type information."""
_ANSWERED = (2, 3, 4)
"""isBuilt, isAvailable, hasPrimaryContext, behind the two destructors."""
_NO_TYPE = 127
"""A number that is no c10::DeviceType, so that it matches no device."""

_Word = ctypes.c_void_p
_kept: list[object] = []


def _for_ever(value: object) -> None:
    """Keep *value* alive until the process ends, because C++ refers to it longer than Python runs."""
    _kept.append(value)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


def _words(count: int) -> ctypes.Array[ctypes.c_void_p]:
    result = (_Word * count)()
    _for_ever(result)
    return result


class _Parts:
    """Addresses of the C++ objects that are exchanged."""

    def __init__(self) -> None:
        libraries = Path(torch.__file__).parent / "lib"
        suffix = "dylib" if sys.platform == "darwin" else "so"
        core = ctypes.CDLL(str(libraries / f"libc10.{suffix}"))
        tensors = ctypes.CDLL(str(libraries / f"libtorch_cpu.{suffix}"))
        self._guards = (_Word * (_CUDA + 1)).in_dll(core, "_ZN3c104impl26device_guard_impl_registryE")
        self._register = core["_ZN3c104impl19registerDeviceGuardENS_10DeviceTypeEPKNS0_24DeviceGuardImplInterfaceE"]
        self._register.argtypes, self._register.restype = [ctypes.c_byte, _Word], None
        hooks = tensors["_ZN2at6detail12getCUDAHooksEv"]
        hooks.restype = _Word
        self._hooks = _Word.from_address(hooks())
        self.plain_guard = self._guards[_CUDA]
        self.plain_hooks = self._hooks.value
        interface = ctypes.addressof(_Word.in_dll(tensors, "_ZTVN2at18CUDAHooksInterfaceE"))
        timers = tensors["_ZN4c10d13TimerRegistryEv"]
        timers.restype = _Word
        self._timer = _key_of(timers())
        self.guard = self._make_guard()
        self.hooks = self._make_hooks(interface)

    def _make_guard(self) -> int:
        """Return the address of a device guard without members, whose events are simulated.

        torch's own stand-in belongs to the thread that created it, and is destroyed with that thread.
        """
        none = ctypes.CFUNCTYPE(ctypes.c_byte, _Word)(lambda _: 0)
        _for_ever(none)
        functions, empty, ours = _words(_GUARD_SLOTS), _words(1), _words(1)
        for slot in range(_GUARD_SLOTS):
            functions[slot] = ctypes.cast(none, _Word).value
        empty[0] = ctypes.addressof(functions)
        plain_table = _Word.from_address(self.plain_guard).value if self.plain_guard else None
        self._register(_CUDA, ctypes.addressof(empty))
        _ensureCUDADeviceGuardSet()
        stand_in = self._guards[_CUDA]
        if stand_in in (None, ctypes.addressof(empty)):
            self._register(_CUDA, self.plain_guard)
            raise LookupError("torch._C._ensureCUDADeviceGuardSet installed no guard")
        table = _words(_BEFORE + _GUARD_SLOTS)
        size = ctypes.sizeof(_Word)
        its = _Word.from_address(stand_in).value
        assert its is not None
        if its == plain_table:  # `install_stand_in` was there before, and torch 2.11 has destroyed the one of then
            self.plain_guard = stand_in
        ctypes.memmove(table, its - _BEFORE * size, len(table) * size)
        for slot, function in EVENT_FUNCTIONS.items():
            table[_BEFORE + slot] = ctypes.cast(function, _Word).value
        _for_ever(EVENT_FUNCTIONS)
        ours[0] = ctypes.addressof(table) + _BEFORE * size
        self._register(_CUDA, self.plain_guard)
        return ctypes.addressof(ours)

    def _make_hooks(self, interface: int) -> int:
        """Return the table of functions at *interface*, except that CUDA is reported as built, available and
        initialized.
        """
        yes = ctypes.CFUNCTYPE(ctypes.c_bool, _Word)(lambda _: True)
        _for_ever(yes)
        table = _words(_BEFORE + _HOOK_SLOTS)
        size = ctypes.sizeof(_Word)
        ctypes.memmove(table, interface, len(table) * size)
        for slot in _ANSWERED:
            table[_BEFORE + slot] = ctypes.cast(yes, _Word).value
        return ctypes.addressof(table) + _BEFORE * size

    def take(self) -> None:
        self._exchange(self.guard, self.hooks, _NO_TYPE)

    def give_back(self) -> None:
        self._exchange(self.plain_guard, self.plain_hooks, _CUDA)

    def _exchange(self, guard: int | None, hooks: int | None, timer: int) -> None:
        self._register(_CUDA, guard)
        self._hooks.value = hooks
        if self._timer is not None:
            self._timer.value = timer


def _key_of(registry: int) -> ctypes.c_byte | None:
    """Return CUDA's key in a c10::Registry by device types (c10/util/Registry.h); None if it is not registered.

    The registry begins with a std::unordered_map, whose first node follows the address and number of its buckets; a
    node is the address of the next node and a pair that begins with its key.
    """
    size = ctypes.sizeof(_Word)
    node = _Word.from_address(registry + 2 * size).value
    while node:
        key = ctypes.c_byte.from_address(node + size)
        if key.value == _CUDA:
            return key
        node = _Word.from_address(node).value
    return None


class _Looks(TorchDispatchMode):  # type: ignore[misc,valid-type]
    """Whatever is computed is one number on the first GPU."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False; otherwise torch would import its compiler."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Tensor:
        return _number()


def _number() -> Tensor:
    return carrier((1,), (1,), torch.float32, torch.device("cuda", 0))


def _modes_heard() -> Any:
    """Return a context in which dispatch modes are active again; torch.tensor(..., device="cuda") disables them, and
    may be the first use of a GPU."""
    keys = _DispatchKey
    excluded = _dispatch_tls_local_exclude_set()
    for key in (keys.Python, keys.PythonTLSSnapshot):
        excluded = excluded.remove(key)
    return _ForceDispatchKeyGuard(_dispatch_tls_local_include_set(), excluded)


_accelerator = ACCELERATOR_GET_ACCELERATOR.get()


@functools.cache
def tested() -> None:
    """Test once, when a GPU is first used, whether torch accepts simulated tensors as an accelerator's.

    It imports torch.distributed.tensor, which takes a second. Call it within `accepted()`.

    Raises:
        NotSimulated: torch does not accept them.
    """
    engine = _execution_engine  # torch.autograd.backward has more to ask
    try:
        device = _accelerator()
        if device is None or device.type != "cuda":
            raise LookupError(f"its accelerator is {device}, not cuda")
        with (
            _modes_heard(),
            below_modes(),
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autograd.set_multithreading_enabled(False),
        ):
            leaf, grad = _number().requires_grad_(), _number()
            with _Looks():
                engine.run_backward((leaf * 2,), (grad,), False, False, (), True, True)
        if leaf.grad is None or leaf.grad.device != leaf.device:
            raise LookupError("backward gives no gradient on cuda:0")
    except (LookupError, RuntimeError) as error:
        raise _unlike(error) from None


@functools.cache
def _parts() -> _Parts:
    try:
        return _Parts()
    except (OSError, AttributeError, ValueError, LookupError) as error:
        raise _unlike(error) from None


def _unlike(error: Exception) -> NotSimulated:
    why = str(error).partition("\n")[0]
    return NotSimulated(
        f"CUDA with this build of torch ({torch.__version__}: {why})",
        f"use {tested_range(SIM)} for Linux on x86-64, with or without CUDA; a CPU program needs none of it",
    )


def install_stand_in() -> None:
    """Let torch install its stand-in for CUDA's guard on this thread, if it needs one (a build with CUDA, no GPU).

    FakeTensorMode would install it on the thread of a rank. torch 2.11 destroys it with its thread and goes on using
    it, so the ranks of a second simulation would crash.
    """
    _ensureCUDADeviceGuardSet()


@contextlib.contextmanager
def accepted() -> Iterator[None]:
    """Return a context in which tensors may be on `cuda:0` to `cuda:7` and autograd runs their backward. It cannot
    be nested.

    Raises:
        NotSimulated: This build of torch lacks something that is needed.
    """
    parts = _parts()
    parts.take()
    try:
        yield
    finally:
        parts.give_back()
