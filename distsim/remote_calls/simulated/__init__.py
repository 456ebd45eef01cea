"""torch.distributed.rpc and torch.distributed.autograd in virtual time.

torch's own Python (api.py, internal.py, functions.py, RemoteModule, DistributedOptimizer) runs unchanged; only the
names that it takes from C++ are led here (`patches.py`), because that half is one per operating-system process: one
agent, one table of RRefs, one engine. Here each simulated process has its own (`state.py`, which counts references).
`transport.py` and `agent.py` send and receive, `calls.py` and `serving.py` are the two ends of a call, `autograd.py`
has gradients over workers.
"""

from __future__ import annotations

__all__ = ()
