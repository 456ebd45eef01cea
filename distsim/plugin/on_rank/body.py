"""A test's body as one rank runs it."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from distsim.plugin.on_rank.fixtures import on_this_rank
from distsim.plugin.options import Options

__all__ = ["rank_body"]


def rank_body(
    body: functools.partial[Any],
    kwargs: Mapping[str, Any],
    options: Options,
    instance: object = None,
    joined: Callable[[], object] = lambda: None,
) -> Callable[[], Any]:
    """The body as one rank runs it; *instance* is the `self` of a method. A rank calls *joined* when it has joined the
    others and nothing of the test's own has run in it. It returns what the test returns, an `async`
    one's result, and raises what it raises; `describe` tells that afterwards."""

    def run() -> Any:
        __tracebackhide__ = True
        import torch.distributed as dist

        if options.init and not dist.is_initialized():
            dist.init_process_group(options.backend)
            joined()
        with on_this_rank(body, options.values(dict(kwargs)), instance, share_memory=options.on == "sim") as mine:
            result = mine()
            if inspect.iscoroutine(result):
                result = asyncio.run(result)
        if dist.is_initialized():
            dist.destroy_process_group()
        return result

    return run
