"""Silent wrong results: replicas that drift apart, gradients that no call reduced, batches that all ranks share.

`collect` records facts on each rank (sketches of tensors, calls, inputs), `facts.py` is their form, `view.py` says
which ranks hold one value, `checks` has a rule for each kind, and `judge.py` runs them. The ranks of a real job leave
their facts in files (`facts_file.py`). Only `collect` imports torch.
"""

from __future__ import annotations

__all__ = ["checks", "collect", "facts", "facts_file", "finding", "judge", "view"]
