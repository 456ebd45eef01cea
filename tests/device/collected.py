"""Where the snippets are collected, and what several of them use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

__all__ = ["SNIPPETS", "raised", "small_model", "snippet"]

SNIPPETS: dict[str, Callable[[], Any]] = {}


def snippet(fn: Callable[[], Any]) -> Callable[[], Any]:
    SNIPPETS[fn.__name__] = fn
    return fn


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).cuda()


def raised(call: Callable[[], Any]) -> tuple[str, str]:
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""
