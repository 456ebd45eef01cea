"""torch's own tests run ranks as threads of a process, with a table of groups each: the guard leaves them alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import run

PROGRAM = """
import threading
import torch, torch.distributed as dist
import distsim.debug
distsim.debug.install()
from torch.testing._internal.distributed import multi_threaded_pg as threaded

torch._C._distributed_c10d._set_thread_isolation_mode(True)
threaded._install_threaded_pg()
store, sums, failed = dist.HashStore(), [], []

def rank(number):
    try:
        dist.init_process_group("threaded", rank=number, world_size=2, store=store)
        tensor = torch.full((2,), float(number))
        for _ in range(3):
            dist.all_reduce(tensor)
        dist.new_group([0, 1])
        sums.append(tensor.tolist())
    except BaseException as error:
        failed.append(error)
        threaded.ProcessLocalGroup.exception_handle(error)

threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
threaded._uninstall_threaded_pg()
torch._C._distributed_c10d._set_thread_isolation_mode(False)
assert not failed, failed
assert sums == [[4.0, 4.0]] * 2, sums
assert distsim.realexec.install.current_session() is None
"""


@pytest.mark.slow
def test_ranks_as_threads_run_as_without_the_guard(tmp_path: Path) -> None:
    """Nothing of the process's own groups is looked at for them, and they become no ranks of a job."""
    program = tmp_path / "threads.py"
    program.write_text(PROGRAM)
    done = run(str(program), cwd=tmp_path, DISTSIM_DIR=str(tmp_path / "rings"))
    assert done.returncode == 0, done.stderr
