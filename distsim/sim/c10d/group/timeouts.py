"""What a call raises that waited as long as its group allows."""

from __future__ import annotations

import torch.distributed as dist

from distsim.debug.messages.phrases import ranks_text
from distsim.debug.records import CallRecord, Group
from distsim.sim.c10d.on_gpu import watchdog

__all__ = ["connect_error", "timeout_error"]


def timeout_error(backend: str, record: CallRecord, seconds: float) -> Exception:
    """What a call raises when its group's timeout has passed: gloo's words, with ours behind them."""
    milliseconds = round(seconds * 1000)
    where = f"{record.op} #{record.seq} on group {record.group.label}, rank {record.rank}"
    if backend == "nccl":
        return watchdog.timeout_error(record, seconds)
    direction = "send" if record.op == "send" else "recv"
    return RuntimeError(
        "[../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] "
        f"Timed out waiting {milliseconds}ms for {direction} operation to complete ({where})"
    )


def connect_error(group: Group, seconds: float) -> Exception:
    """gloo's members find each other through the store, and wait there for the addresses of the others."""
    error: Exception = dist.DistStoreError(
        f"wait timeout after {int(seconds * 1000)}ms, keys: /{group.name}//cpu//... "
        f"(the addresses of {ranks_text(group.ranks)})"
    )
    return error
