"""A real program that a rank starts gets wall time where the rank waits for it, and finds its parent."""

from __future__ import annotations

import pytest
from sim.running import Scripts

from distsim.sim import run
from distsim.sim.isolation.environ import WALL_S, RealChildren

SERVICE = """
import os, socket, subprocess, sys
path, option, pid = sys.argv[1:]
server = socket.socket(socket.AF_UNIX)
server.bind(path + ".socket")
server.listen()
server.settimeout(60)  # it ends also if nobody asks any more
open(path, "w").close()
connection, _ = server.accept()
connection.settimeout(60)
while asked := connection.recv(100):
    subprocess.run([sys.executable, "-c", "import asyncio"])  # it works for some tenths of a second
    connection.sendall(b"%s %s\\n" % (asked.strip(), str(int(pid) == os.getppid()).encode()))
"""
CLIENT = """
import asyncio, concurrent.futures, os, subprocess, sys, tempfile, threading, time
import torch, torch.distributed as dist
folder = tempfile.mkdtemp()
path = os.path.join(folder, "ready")
here = os.path.dirname(os.path.abspath(__file__))
child = subprocess.Popen([sys.executable, os.path.join(here, "service.py"), path, "--pid", str(os.getpid())])
begun = time.monotonic()
while not os.path.exists(path):
    assert child.poll() is None and time.monotonic() - begun < 30, "the service did not start"
    time.sleep(0.2)

async def ask(what):
    reader, writer = await asyncio.open_unix_connection(path + ".socket")
    writer.write(what)
    answer = await asyncio.wait_for(reader.readline(), 5)
    writer.close()
    return answer.decode().strip()
"""


@pytest.mark.slow
def test_a_rank_waits_for_its_service(script: Scripts) -> None:
    """A service (wandb-core) that is told its parent's pid starts while the rank polls for its file, and answers the
    asyncio loop of the main thread."""
    ran = script(CLIENT + "print(asyncio.run(ask(b'loss')))\nchild.wait()\n", files={"service.py": SERVICE})
    assert ran.outcome.exit_code == 0, ran.outcome.failures
    assert ran.of(0) == ran.of(1) == ["loss True"]


@pytest.mark.slow
def test_a_loop_in_a_thread_waits_for_a_service(script: Scripts) -> None:
    """The main thread waits for a future of a loop in another thread, the other rank in a collective."""
    body = """
dist.init_process_group("gloo")
if dist.get_rank() == 0:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        print(asyncio.run_coroutine_threadsafe(ask(b"loss"), loop).result(timeout=20))
    finally:  # of a loop that is left open Python warns in a later test
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
dist.barrier()
child.kill()
child.wait()
"""
    ran = script(CLIENT + body, files={"service.py": SERVICE})
    assert ran.outcome.exit_code == 0, ran.outcome.failures
    assert ran.of(0) == ["loss True"]


@pytest.mark.slow
def test_a_rank_whose_program_works_is_not_stuck(script: Scripts, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler may take longer than a rank may stay away, and works in a grandchild."""
    monkeypatch.setattr(run, "DEFAULT_HOST_TIMEOUT_S", 0.6)
    works = "import time\nwhile time.process_time() < 1.2: pass"
    starts = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {works!r}])"
    ran = script(
        f"import subprocess, sys\nprint(subprocess.run([sys.executable, '-c', {starts!r}]).returncode)",
        num_ranks=1,
    )
    assert ran.of(0) == ["0"]
    assert not ran.kinds


def test_wall_time_is_given_while_there_is_a_child() -> None:
    """Without a child no wall time passes; a glance leaves half of it for a wait in which nothing else can happen."""

    class Child:
        code: int | None = None

        def poll(self) -> int | None:
            return self.code

    children, child, limits = RealChildren(), Child(), []
    children.wait(limits.append, is_only=True)
    children.add(child)  # type: ignore[arg-type]
    children.wait(limits.append, is_only=False)
    children.wait(limits.append, is_only=True)
    child.code = 0
    children.wait(limits.append, is_only=True)
    assert len(limits) == 2
    assert limits[0] < WALL_S / 2 < limits[1] <= WALL_S
