"""The trace: what every rank did when, for Perfetto and Holistic Trace Analysis.

Begin with `trace.py`; `gpu.py` is the streams of simulated GPUs, `kineto.py` PyTorch's words for our calls.
"""

from __future__ import annotations

from distsim.report.tracing.trace import rank_events, trace_events, write_trace

__all__ = ["rank_events", "trace_events", "write_trace"]
