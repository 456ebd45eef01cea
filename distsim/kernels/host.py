"""What launching work on a GPU costs the host: by class of work, on the CPU that a cluster file names.

The classes are those whose costs differ by more than a factor of two. What is in none of them (module calls, data
loading, logging, a user's own Python between operators) is not charged.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["Host", "core_speed", "host_of"]

VIEW_SHARE = 0.4
"""Of an operator: a view launches no kernel (torch/benchmarks: about 2 of 5 us; on a core of an EPYC 7003, torch 2.13,
1.9 of 4.5)."""
AUTOGRAD_FUNCTION_S = 10e-6
"""A torch.autograd.Function in Python, forward and backward together, beyond the operators that both call.

Source: measured with torch 2.13 on a core of an EPYC 7003, CPU tensors: 16.6 us with one `clone` each way, of which
clone and its node in C++ are 6.4 us (tests/benchmarks/host_classes.py).
"""
COLLECTIVE_S = 50e-6
"""A call of torch.distributed outside a batch: Python, ProcessGroupNCCL with its events and its work, NCCL's enqueue.

Source: pytorch/pytorch issue 138773, torch 2.4: 89 us for all_reduce, under the profiler, which is the upper end. The
lower end is 5 us of Python (tests/benchmarks/host_classes.py), four events of 1 us, and 13 to 17 us for NCCL's enqueue
and launch, which is what nccl-tests shows of small all_reduces inside a node. Estimate: between the two.
"""
MESSAGE_S = 20e-6
"""A send or receive inside a batch (`batch_isend_irecv`), whose events and launch are the batch's.

Estimate: 7 us of Python (tests/benchmarks/host_classes.py), and NCCL's enqueue without the launch.
"""

_PER_CLOCK = {
    "zen2": 1 / 1.19,  # AMD: 19 % more instructions a clock in Zen 3
    "zen3": 1.0,  # the reference
    "zen4": 1.14,  # AMD at the launch of EPYC 9004: 14 % over Zen 3
    "zen5": 1.14 * 1.17,  # AMD at the launch of EPYC 9005: 17 % over Zen 4
    "skylake": 1 / 1.19,  # estimate: as Zen 2
    "ice lake": 1.0,  # Intel: 20 % over Cascade Lake
    "golden cove": 1.15,  # Intel at the launch of Sapphire Rapids: 15 % over Ice Lake
    "neoverse v2": 1.0,  # estimate: as Zen 3
}
"""Instructions a clock beside Zen 3, as the makers state them; nobody measured Python on all of them."""
_CORES: tuple[tuple[str, str, float], ...] = (
    # pattern in the model's name, core, GHz of one busy core as specified
    (r"EPYC 7\w\w2", "zen2", 3.4),  # AMD: EPYC 7742
    (r"EPYC 7\w\w3", "zen3", 3.6),  # AWS: p5's EPYC 7R13
    (r"EPYC 9\w\w4", "zen4", 3.75),  # AMD: EPYC 9554
    (r"EPYC 9\w\w5F", "zen5", 5.0),  # AMD: EPYC 9575F
    (r"EPYC 9\w\w5", "zen5", 4.1),  # AMD: EPYC 9655, its clock on one core less what many cores cost
    (r"Xeon.* 82\d\d", "skylake", 3.6),  # AWS: p4d's 8275CL, all cores
    (r"Xeon.* [86]3\d\d", "ice lake", 3.4),  # Intel: 8358
    (r"Xeon.* 8[45]\d\d", "golden cove", 3.8),  # Intel: 8480
    (r"Xeon.* 67\d\dP", "golden cove", 4.0),  # estimate: Intel's 6776P between its base and 4.6 GHz
    (r"Grace", "neoverse v2", 3.4),  # NVIDIA: Grace
)
_OPERATOR_S = 14.1e-6
"""An eager operator within a model, on `_OPERATOR_SPEED`. In a loop of one operator it is a third of that: its code is
in the caches then.

Source: pytorch.org/blog/accelerating-generative-ai-2 (2023-11): Llama-7B, eager, 25.5 tokens a second on an A100 and
bound by the CPU, so 1.22 ms for each of 32 layers, which launch 61 kernels and make 65 views
(tests/benchmarks/host_classes.py), a view at `VIEW_SHARE`.
"""
_OPERATOR_SPEED = 3.6 / 1.19
"""Estimate: the blog names no CPU; a Xeon Platinum 8275CL, which comes with A100 at AWS."""
_MEASURED_SPEED = 3.6
"""Of the core on which the other classes were measured."""


@dataclass(frozen=True, slots=True)
class Host:
    """Seconds of each class of work on one host."""

    operator_s: float
    """An eager operator that launches one kernel: Python, dispatch, autograd, launch."""
    view_s: float
    function_s: float
    collective_s: float
    message_s: float
    cpu: str = ""
    """The core that the times are scaled to; empty where the cluster file's CPU is not known."""


def core_speed(model: str) -> tuple[str, float] | None:
    """The kind of core that a CPU of this name has and its speed, in GHz of Zen 3; None for an unknown name."""
    for pattern, core, clock in _CORES:
        if re.search(pattern, model):
            return core, clock * _PER_CLOCK[core]
    return None


def host_of(cpu_model: str, operator_s: float) -> Host:
    """The host with CPUs of this name.

    Args:
        cpu_model: as the cluster file names them.
        operator_s: seconds of an operator on hosts that come with the GPU, for a CPU whose core is not known.
    """
    known = core_speed(cpu_model)
    if known is not None:
        core, speed = known
        operator_s = _OPERATOR_S * _OPERATOR_SPEED / speed
        slower = _MEASURED_SPEED / speed
    else:
        core, slower = "", operator_s / _OPERATOR_S * _MEASURED_SPEED / _OPERATOR_SPEED
    return Host(
        operator_s=operator_s,
        view_s=VIEW_SHARE * operator_s,
        function_s=AUTOGRAD_FUNCTION_S * slower,
        collective_s=COLLECTIVE_S * slower,
        message_s=MESSAGE_S * slower,
        cpu=core,
    )
