"""A process that has torch loaded and forks ranks: a real job in half a second instead of four.

Reads one JSON line per job from stdin, `{"script", "args", "ranks", "environ", "directory", "skip"}`, and
answers one line with the exit codes once all ranks have ended.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any


def child(job: dict[str, Any], rank: int) -> None:
    """Become a rank: its environment, its output in files, then the script under guard."""
    directory = Path(job["directory"])
    out = os.open(directory / f"out.{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.environ.update(job["environ"])
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(job["ranks"]))
    sys.argv = [job["script"], *job["args"]]
    code = 0
    try:
        if job["guarded"]:
            from distsim.debug.__main__ import main

            main([job["script"], *job["args"]])
        else:
            import runpy

            runpy.run_path(job["script"], run_name="__main__")
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        import atexit
        import threading

        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
        with contextlib.suppress(BaseException):
            atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    import posix

    posix._exit(code)


def serve(job: dict[str, Any]) -> dict[str, Any]:
    """Fork the ranks and wait; exit codes are left as the launcher leaves them."""
    pids = {}
    for rank in range(job["ranks"]):
        if rank in job["skip"]:
            continue
        pid = os.fork()
        if pid == 0:
            child(job, rank)
        pids[pid] = rank
    codes: dict[int, int] = {}
    directory = Path(job["directory"])
    while pids:
        pid, status = os.waitpid(-1, 0)
        rank = pids.pop(pid)
        codes[rank] = os.waitstatus_to_exitcode(status)
        scratch = directory / f"exit.{rank}.new"
        scratch.write_text(json.dumps({"rank": rank, "attempt": 0, "code": codes[rank], "at": time.monotonic()}))
        scratch.rename(directory / f"exit.{rank:05d}.a0.json")
    (directory / "done.json").write_text("{}")
    return {"codes": codes}


def keep_groups() -> None:
    """Free no group of gloo before the end: up to torch 2.7 that waits with the GIL for a thread that may want it."""
    import torch.distributed as dist

    real, kept = dist.ProcessGroupGloo.__init__, []

    def initialize(group: Any, *args: Any, **kwargs: Any) -> None:
        real(group, *args, **kwargs)
        kept.append(group)

    dist.ProcessGroupGloo.__init__ = initialize


def main() -> None:
    import torch
    import torch._dynamo  # optimizers take it along, at three seconds a rank
    import torch.distributed
    import torch.distributed.fsdp
    import torch.distributed.pipelining
    import torch.distributed.tensor.parallel
    import torch.nn.parallel

    import distsim.debug.__main__
    import distsim.realexec.install
    import distsim.realexec.strict.strict  # noqa: F401  what every rank imports, at a quarter of a second each

    if torch.__version__ < (2, 8):
        keep_groups()
    torch.set_num_threads(1)
    gc.freeze()
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(serve(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
