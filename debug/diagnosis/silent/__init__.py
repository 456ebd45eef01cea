"""Search for silent wrong results of data-parallel and model-parallel training.

Examples: replicas that drift apart, gradients that no call reduced, a batch that all ranks share. `collect` records
facts on each rank (sketches of tensors, calls, inputs) in the form of `facts.py`. `view.py` finds which ranks should
hold equal values, `checks` has one rule for each kind of fault, and `judge.py` runs the rules. The ranks of a real
job save their facts to files (`facts_file.py`). Only `collect` imports torch.
"""

from __future__ import annotations

__all__ = ["checks", "collect", "facts", "facts_file", "judge", "view"]
