"""Calls on tensors of a simulated GPU: they run on a stream, as NCCL's do, and the host goes on.

Start with `streams.py`.

torch's ProcessGroupNCCL (torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, 2.13) gives each communicator a stream of
its own, which first waits for the stream that makes the call; a synchronous call runs on that stream itself; `wait()`
makes the current stream wait; a barrier makes the host wait, too. A batch of sends and receives is one kernel.
"""

from __future__ import annotations

__all__ = ["device_check", "flat_buffer", "futures", "streams", "values", "watchdog", "work"]
