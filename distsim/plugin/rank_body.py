"""A test's body as one rank runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from distsim.plugin.options import Options
from distsim.plugin.shared_fixtures import on_this_rank

__all__ = ["rank_body"]


def rank_body(body: Callable[..., Any], kwargs: Mapping[str, Any], options: Options) -> Callable[[], None]:
    """The body as one rank runs it. It raises what the test raises; `describe` tells it afterwards."""

    def run() -> None:
        __tracebackhide__ = True
        import torch.distributed as dist

        if options.init and not dist.is_initialized():
            dist.init_process_group(options.backend)
        with on_this_rank(options.values(dict(kwargs)), share_memory=options.on == "sim") as arguments:
            body(**arguments)
        if dist.is_initialized():
            dist.destroy_process_group()

    return run
