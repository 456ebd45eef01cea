"""Measured tables, the constants fitted to them, and the comparison of both."""

from __future__ import annotations

from distsim.calibration.constants import Constants, nccl_constants

__all__ = ["Constants", "nccl_constants"]
