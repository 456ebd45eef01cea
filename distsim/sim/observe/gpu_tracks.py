"""Kernels of a run's GPUs for the trace, made when somebody asks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from distsim.network.critical_path import operator_name
from distsim.sim.device.timeline import Comm
from distsim.sim.observe.metrics import GpuTrack, KernelSlice

if TYPE_CHECKING:
    from distsim.sim.device.gpu import Device
    from distsim.sim.isolation.process import SimProcess

MOST_SHOWN = 20_000
"""A device's last kernels: more of them make a file that no viewer opens."""


class GpuTracks(Mapping[int, list[GpuTrack]]):
    """GPU tracks by rank."""

    def __init__(self, ranks: Sequence[SimProcess]) -> None:
        self._processes = {
            p.rank: p
            for p in ranks
            if p.accelerators is not None and any(d.timeline.done for d in p.accelerators.devices)
        }

    def __len__(self) -> int:
        return len(self._processes)

    def __iter__(self) -> Iterator[int]:
        return iter(self._processes)

    def __getitem__(self, rank: int) -> list[GpuTrack]:
        process = self._processes[rank]
        ends = process.accelerators.steps.chosen()
        steps = [(end.mark.launched_s, end.mark.reached_s or 0.0) for end in ends]
        return [_track(device, steps) for device in process.accelerators.devices]


def _track(device: Device, steps: list[tuple[float, float]]) -> GpuTrack:
    host_s, launch_s = device.host.operator_s, device.model.launch_s
    slices = []
    done = device.timeline.done
    for stream, item in islice(done, max(0, len(done) - MOST_SHOWN), None):
        if item.begun_s is None or item.ended_s is None:
            continue
        if isinstance(item, Comm):
            facts: tuple[Any, ...] = ("", "", item.launched_s, host_s, tuple(item.records))
        else:
            at_s = item.launched_s - launch_s  # the host goes on while the launch is under way
            facts = (operator_name(item.name), item.kind, at_s, host_s)
        slices.append(KernelSlice(stream, item.begun_s, item.ended_s, *facts))
    slices.sort(key=lambda piece: (piece.begun_s, piece.stream))
    return GpuTrack(device.index, [stream.name for stream in device.streams], slices, steps)
