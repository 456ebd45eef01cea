"""What a GPU's clock says of one call: with CUDA events, in a graph where it can be captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from distsim.calibration.ops import Probe
from distsim.errors import UsageError
from distsim.kernels.gpu_file import ChipSpec, GpuFile, gpu_names, read_gpu

__all__ = ["chip_facts", "cuda_clock", "same_chip"]

_LEAST_S = 0.3
"""Long enough for clocks to fall under the power limit as they do in training."""


def same_chip(torch: Any) -> str:
    """The data file of the chip that torch sees."""
    title, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    for name in gpu_names():
        if read_gpu(name).title == title:
            return name
    for name in ("h100", "b200", "a100-80gb", "rtx4090"):
        if read_gpu(name).chip.compute_capability == capability[0] * 10 + capability[1]:
            return name
    raise UsageError(
        f"calibrate --ops: no data file is of a chip like {title}: expected --like {'|'.join(gpu_names())}"
    )


def chip_facts(torch: Any, base: GpuFile) -> tuple[GpuFile, dict[str, str]]:
    """*base* with what torch says of this chip, and the same as TOML's keys."""
    there = torch.cuda.get_device_properties(0)
    facts = {"multiprocessors": there.multi_processor_count, "memory": there.total_memory, "l2": there.L2_cache_size}
    facts = {key: value for key, value in facts.items() if value}
    title = torch.cuda.get_device_name()
    name = "-".join(title.lower().removeprefix("nvidia ").split())
    chip = ChipSpec(**(vars(base.chip) | facts))
    spec = GpuFile(**(vars(base) | {"chip": chip, "name": name, "title": title}))
    return spec, {key: str(value) for key, value in facts.items()}


def cuda_clock(torch: Any) -> Callable[[Probe], float | None]:
    """Seconds of one of many calls in a row."""

    def clock(probe: Probe) -> float | None:
        try:
            func, args, kwargs, _ = probe.make(torch, "cuda")
            once = _timed(torch, lambda: func(*args, **kwargs), 3)
            return _timed(torch, lambda: func(*args, **kwargs), max(5, min(2000, int(_LEAST_S / once))))
        except (RuntimeError, NotImplementedError):  # no such kernel, or not the memory for it
            return None
        finally:
            torch.cuda.empty_cache()

    return clock


def _timed(torch: Any, call: Callable[[], Any], times: int) -> float:
    def many() -> None:
        for _ in range(times):
            call()

    call()
    torch.cuda.synchronize()
    run: Callable[[], Any] = many
    if times > 3:
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                many()
            run = graph.replay
        except RuntimeError:  # a copy from pageable memory, or what waits for the device
            torch.cuda.synchronize()
    run()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) * 1e-3 / times
