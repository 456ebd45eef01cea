"""What a rank computes on: what operators cost, and how much memory tensors hold.

`cpu.py` prices operators by the cluster file's CPU.
"""

from __future__ import annotations

__all__ = ["accelerators", "cpu", "memory"]
