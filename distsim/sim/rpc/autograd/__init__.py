"""torch.distributed.autograd: `context.py` what a worker knows of each context, `functions.py` the nodes that stand
where a tensor left or came, `engine.py` backward over them (torch's FAST mode), `release.py` the end of a context."""

from __future__ import annotations

__all__ = ()
