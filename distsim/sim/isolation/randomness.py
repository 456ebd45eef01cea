"""Random numbers of a simulated process: its own generators, all from the world's seed."""

from __future__ import annotations

import contextlib
import os
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from distsim.sim.kernel.task import current_process

__all__ = ["random_patches", "undrawn"]


@contextlib.contextmanager
def undrawn() -> Iterator[None]:
    """Return a context whose draws from `random` do not change the surrounding program's sequence."""
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)


def random_patches() -> list[tuple[Any, str, Any]]:
    """Return patches of everything that draws random numbers.

    `random` and `numpy.random` use the running process's own generators, and the operating system's random numbers
    come from its seed.
    """
    patches: list[tuple[Any, str, Any]] = []
    for name, bound in list(vars(random).items()):
        if getattr(bound, "__self__", None) is random._inst:
            patches.append((random, name, _per_process(name, bound, lambda p: p.random)))
    legacy = np.random.mtrand._rand
    for name, bound in list(vars(np.random).items()):
        if getattr(bound, "__self__", None) is legacy:
            patches.append((np.random, name, _per_process(name, bound, _numpy_generator)))
    for name, method in (("seed", "seed"), ("ranf", "random_sample"), ("sample", "random_sample")):
        patches.append((np.random, name, _per_process(method, getattr(np.random, name), _numpy_generator)))
    real_urandom, real_seed, real_torch_seed = os.urandom, random.Random.seed, torch.seed

    def urandom(size: int) -> bytes:
        process = current_process()
        return real_urandom(size) if process is None else process.entropy.randbytes(size)

    def seed(self: random.Random, a: Any = None, version: int = 2) -> None:
        process = current_process()
        real_seed(self, a if a is not None or process is None else process.entropy.getrandbits(64), version)

    def torch_seed() -> int:
        process = current_process()
        if process is None:
            return int(real_torch_seed())
        value: int = process.entropy.getrandbits(63)
        torch.manual_seed(value)
        return value

    patches += [
        (os, "urandom", urandom),
        (random, "_urandom", urandom),
        (random.Random, "seed", seed),
        (torch, "seed", torch_seed),
        (sys.modules["torch.random"], "seed", torch_seed),
    ]
    return patches


def _numpy_generator(process: Any) -> Any:
    if process.numpy_random is None:
        process.numpy_random = np.random.RandomState(process.entropy.getrandbits(32))
    return process.numpy_random


def _per_process(name: str, bound: Callable[..., Any], generator: Callable[[Any], Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        process = current_process()
        return bound(*args, **kwargs) if process is None else getattr(generator(process), name)(*args, **kwargs)

    call.__name__ = name
    return call
