"""Remote calls (torch.distributed.rpc, .autograd): simulated, guarded, and diagnosed.

`simulated` carries remote calls in virtual time, `guarded` records those of a real job, and both leave the same
records, of which `diagnosis.py` explains the calls that nobody answers. The core finds each by `shelves`.
"""

from __future__ import annotations

__all__ = ()
