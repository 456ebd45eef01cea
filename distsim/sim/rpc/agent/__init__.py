"""A worker's half in C++: `agent.py` stands in for TensorPipeAgent; `group.py` the workers of one init_rpc and the
pipes between them, `pool.py` the threads that serve, `message.py` what crosses, `futures.py` what is waited for."""

from __future__ import annotations

__all__ = ()
