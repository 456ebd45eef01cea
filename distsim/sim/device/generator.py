"""Random generator of a simulated GPU: draws from a host generator, with a state like CUDA's.

CUDA's generators (Philox) have a state of 16 bytes, seed and offset, which torch.distributed.tensor modifies; the
host's (Mersenne Twister) have 5,056 bytes. Here a state names a stored moment of the host's generator. A state that
never occurred, such as an offset that DTensor computed, begins a new sequence.
"""

from __future__ import annotations

import functools
import struct
import weakref
from typing import Any

import torch

from distsim.torch_compat.cuda_api import DTENSOR_REGION

PlainGenerator = torch.Generator
_Bytes = torch.frombuffer
_DEFAULT_SEED = 67280421310721
"""c10::detail::default_rng_seed_val."""
_STEP = 4
"""Smallest increment of CUDA's offset."""
_MOST = 4_096


_for_gpus: weakref.WeakValueDictionary[int, CudaGenerator] = weakref.WeakValueDictionary()
"""Generators by their object in C++: operators get that object, and not the one that Python derived from it."""


def is_for_gpu(generator: torch.Generator) -> bool:
    return generator._cdata in _for_gpus


def of_gpu(generator: torch.Generator) -> CudaGenerator | None:
    """Return the generator of a GPU that an operator has received; None for one of the CPU."""
    return _for_gpus.get(generator._cdata)


def be_known_to_dtensor() -> None:
    """Let DTensor, which reads and sets the state of the generator that an operator received, have that of the GPU's.

    A rank that sets an attribute of a class of torch sets its own, so each does it.
    """
    region: Any = DTENSOR_REGION.get(None)
    if region is None or hasattr(region, "of_generators"):
        return

    @functools.wraps(region)
    def of_generator(tracker: Any, *args: Any, generator: Any = None, **kwargs: Any) -> Any:
        if generator is not None:
            kwargs["generator"] = of_gpu(generator) or generator
        return region(tracker, *args, **kwargs)

    of_generator.of_generators = True  # type: ignore[attr-defined]
    for holder, name, value in DTENSOR_REGION.replaced_by(of_generator):
        setattr(holder, name, value)


class CudaGenerator(torch.Generator):
    """torch.Generator(device="cuda")."""

    _moments: dict[tuple[int, int], bytes]
    """State of the host's generator by seed and offset."""

    def __new__(cls, index: int, entropy: Any = None) -> Any:
        result = super().__new__(cls)
        result._index = index
        result._entropy = entropy
        result._moments = {}
        _for_gpus[result._cdata] = result
        result.manual_seed(_DEFAULT_SEED)
        return result

    def host_state(self) -> torch.Tensor:
        """Return the state of the underlying host generator."""
        return super().get_state()

    def set_host_state(self, state: torch.Tensor) -> None:
        super().set_state(state)

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self._index)

    def initial_seed(self) -> int:
        return int(self._seed)

    def manual_seed(self, seed: int) -> CudaGenerator:
        super().manual_seed(seed)
        self._seed, self._offset = seed % (1 << 64), 0
        self._seen = self._now()
        return self

    def seed(self) -> int:
        """Seed from the entropy of the process, which the simulation's seed determines."""
        value = self._entropy.getrandbits(63) if self._entropy is not None else PlainGenerator().seed()
        self.manual_seed(value)
        return int(value)

    def get_state(self) -> torch.Tensor:
        return _Bytes(bytearray(struct.pack("<QQ", self._seed, self.get_offset())), dtype=torch.uint8)

    def set_state(self, new_state: torch.Tensor) -> CudaGenerator:
        if new_state.dtype is not torch.uint8 or new_state.device.type != "cpu":
            raise TypeError("RNG state must be a torch.ByteTensor")
        if new_state.numel() not in (8, 16):
            raise RuntimeError("RNG state is wrong size")
        seed, offset = struct.unpack("<QQ", bytes(new_state.tolist()).ljust(16, b"\0"))
        self._go_to(seed, offset)
        return self

    def get_offset(self) -> int:
        now = self._now()
        if now != self._seen:
            self._seen = now
            self._offset += _STEP
        if len(self._moments) >= _MOST:
            self._moments.pop(next(iter(self._moments)))
        self._moments[self._seed, self._offset] = now
        return int(self._offset)

    def set_offset(self, offset: int) -> None:
        if offset % _STEP:
            raise RuntimeError("offset must be a multiple of 4")
        self._go_to(self._seed, offset)

    def clone_state(self) -> CudaGenerator:
        result: CudaGenerator = CudaGenerator(self._index, self._entropy)
        result._moments = self._moments
        self.get_offset()
        result._go_to(self._seed, self._offset)
        return result

    graphsafe_get_state = clone_state

    def graphsafe_set_state(self, other: CudaGenerator) -> None:
        self._moments = other._moments
        self._go_to(other._seed, other.get_offset())

    def __reduce__(self) -> Any:
        return _made_again, (self._index, self.get_state())

    def _go_to(self, seed: int, offset: int) -> None:
        self._seed, self._offset = seed, offset
        known = self._moments.get((seed, offset))
        if known is not None:
            super().set_state(_Bytes(bytearray(known), dtype=torch.uint8))
        else:
            super().manual_seed(seed if not offset else _mixed(seed, offset))
        self._seen = self._now()

    def _now(self) -> bytes:
        return bytes(self.host_state().numpy().tobytes())


def _mixed(seed: int, offset: int) -> int:
    """Return a different seed for each offset (the last steps of splitmix64), because the host's generator uses only
    32 bits.
    """
    mixed = (seed + 0x9E3779B97F4A7C15 * offset) & (1 << 64) - 1
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & (1 << 64) - 1
    return (mixed ^ mixed >> 27) >> 16 & (1 << 32) - 1


def _made_again(index: int, state: torch.Tensor) -> CudaGenerator:
    generator: CudaGenerator = CudaGenerator(index)
    return generator.set_state(state)
