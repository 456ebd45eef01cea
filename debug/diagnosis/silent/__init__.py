"""Silent wrong results: replicas that drift apart, gradients that no call reduced, batches that all ranks share.

`collect` records facts on each rank (sketches of tensors, calls, inputs), `facts.py` is their form, `replicas.py` says
which ranks hold one value, `checks` has a rule for each kind, and `judge.py` runs them. Only
`collect` imports torch.
"""

from __future__ import annotations

__all__ = ["allowed", "checks", "collect", "facts", "finding", "judge", "replicas", "view"]
