"""Process numbers, signals between processes, pipes between them, and what a launcher's environment says."""

from __future__ import annotations

import os
from typing import Any

import pytest
from sim.running import HEAD, Scripts, ranks

SPAWN = """
import os, signal, sys, threading, time
import multiprocessing as mp
from multiprocessing.connection import wait
import torch, torch.distributed as dist
mp.set_start_method("spawn", force=True)
"""


def launcher(children: str, main: str) -> str:
    """A script that starts processes of its own: functions, and what the parent does."""
    body = "\n".join(f"    {line}" for line in main.strip().splitlines())
    return SPAWN + children + "\nif __name__ == '__main__':\n" + body + "\n"


def test_each_process_has_its_own_pid(script: Scripts) -> None:
    """os, multiprocessing, threading and /proc agree; parents and children know each other; every run alike."""
    text = HEAD + (
        "import multiprocessing as mp, threading\n"
        "with open(f'/proc/{os.getpid()}/status') as told:\n"
        "    status = dict(line.split(':', 1) for line in told)\n"
        "same = {os.getpid(), mp.current_process().pid, threading.get_native_id(), os.getpgrp(), os.getsid(0),\n"
        "        int(os.readlink('/proc/self')), int(status['Pid']), int(open('/proc/self/stat').read().split()[0]),\n"
        "        int(os.path.basename(os.path.realpath('/proc/self')))}\n"
        "os.kill(os.getpid(), 0)\n"
        "print(len(same), os.getpid(), os.getppid(), len(os.listdir(f'/proc/{os.getpid()}/fd')) > 0)\n"
    )
    first = script(text, 2)
    assert first.outcome.exit_code == 0, first.err
    told = [first.of(rank)[0].split() for rank in (0, 1)]
    assert [row[0] for row in told] == ["1", "1"]
    assert [row[3] for row in told] == ["True", "True"]
    assert told[0][1] != told[1][1]
    assert str(os.getpid()) not in told[0] + told[1]
    assert script(text, 2).out == first.out


def test_children_have_pids_of_their_own(script: Scripts) -> None:
    """What a child says of itself and of its parent is what the parent says of both."""
    ran = script(
        launcher(
            "def child(queue):\n"
            "    queue.put((os.getpid(), os.getppid(), mp.current_process().pid, mp.parent_process().pid))\n",
            "queue = mp.Queue()\n"
            "children = [mp.Process(target=child, args=(queue,)) for _ in range(2)]\n"
            "for one in children: one.start()\n"
            "found = sorted(queue.get() for _ in children)\n"
            "print(found == [(one.pid, os.getpid(), one.pid, os.getpid()) for one in children])\n",
        )
    )
    assert ran.of("main") == ["True"]


def test_the_first_signal_handlers_are_pythons() -> None:
    """A rank finds what a new Python process finds, not the simulator's handlers."""

    def body() -> Any:
        import signal

        return [
            signal.getsignal(signal.SIGINT) is signal.default_int_handler,
            signal.getsignal(signal.SIGTERM) is signal.SIG_DFL,
        ]

    assert ranks(body).results == [[True, True]] * 2


def test_signals_reach_handlers_in_the_main_thread(script: Scripts) -> None:
    """A sleeping child handles SIGTERM when it comes and sleeps on; a handler may end it; threads interrupt main."""
    ran = script(
        launcher(
            "def child(queue):\n"
            "    signal.signal(signal.SIGTERM, lambda *_: print('handled at', round(time.monotonic(), 3)))\n"
            "    queue.put('ready')\n"
            "    begun = time.monotonic(); time.sleep(5); print('slept', round(time.monotonic() - begun, 3))\n"
            "    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n"
            "    queue.put('again'); time.sleep(100)\n",
            "queue = mp.Queue()\n"
            "one = mp.Process(target=child, args=(queue,)); one.start(); queue.get()\n"
            "time.sleep(1); os.kill(one.pid, signal.SIGTERM)\n"
            "queue.get(); one.terminate(); one.join(); print(one.exitcode)\n"
            "seen = []\n"
            "signal.signal(signal.SIGUSR1, lambda *_: seen.append(threading.current_thread().name))\n"
            "main = threading.main_thread().ident\n"
            "threading.Timer(2, lambda: signal.pthread_kill(main, signal.SIGUSR1)).start()\n"
            "begun = time.monotonic(); threading.Event().wait(5)\n"
            "print(seen, round(time.monotonic() - begun, 3))\n"
            "import _thread; threading.Timer(2, _thread.interrupt_main).start()\n"
            "try: time.sleep(50)\n"
            "except KeyboardInterrupt: print('interrupted')\n",
        )
    )
    assert ran.of(0) == ["handled at 1.0", "slept 5.0"]
    assert ran.of("main") == ["7", "['MainThread'] 5.0", "interrupted"]


def test_a_process_group_is_the_simulated_process(script: Scripts) -> None:
    """`os.killpg(os.getpgrp())` and `os.kill(0)` reach this rank, never the machine's own processes."""
    ran = script(
        HEAD
        + "import signal\nseen = []\nsignal.signal(signal.SIGUSR1, lambda *_: seen.append(rank))\n"
        + "os.killpg(os.getpgrp(), signal.SIGUSR1)\nos.kill(0, signal.SIGUSR1)\nprint(seen)\n"
    )
    assert [ran.of(rank) for rank in (0, 1)] == [["[0, 0]"], ["[1, 1]"]]


def test_wait_for_pipes_and_processes(script: Scripts) -> None:
    """connection.wait takes pipes and sentinels; enums keep their identity; an end that nobody holds is told."""
    ran = script(
        launcher(
            "import enum\n"
            "class Word(enum.Enum):\n    GO = 1\n"
            "def child(pipe):\n"
            "    assert pipe.recv() is Word.GO\n"
            "    pipe.send(Word.GO); time.sleep(3); pipe.send_bytes(b'xy')\n"
            "    try: pipe.recv()\n"
            "    except EOFError: print('end')\n",
            "mine, its = mp.Pipe(); other, unused = mp.Pipe(False)\n"
            "one = mp.Process(target=child, args=(its,)); one.start(); its.close()\n"
            "mine.send(Word.GO)\n"
            "print(wait([mine, other], timeout=1) == [mine], mine.recv() is Word.GO)\n"
            "print(wait([mine, other, one.sentinel], timeout=1), round(time.monotonic(), 3))\n"
            "print(wait([mine, one.sentinel]) == [mine], mine.recv_bytes(), round(time.monotonic(), 3))\n"
            "mine.close()\n"
            "one.join(); print(wait([one.sentinel]) == [one.sentinel])\n",
        )
    )
    assert ran.outcome.exit_code == 0, ran.outcome.failures
    assert ran.of(0) == ["end"]
    assert ran.of("main") == ["True True", "[] 1.0", "True b'xy' 3.0", "True"]


def test_a_dead_child_closes_its_pipe(script: Scripts) -> None:
    """The parent that closed its copy learns that nobody is left to send, or to read."""
    ran = script(
        launcher(
            "def child(pipe):\n    time.sleep(1)\n",
            "mine, its = mp.Pipe()\n"
            "one = mp.Process(target=child, args=(its,)); one.start(); its.close()\n"
            "try: mine.recv()\n"
            "except EOFError: print('nobody sends')\n"
            "try: mine.send(1)\n"
            "except BrokenPipeError: print('nobody reads')\n",
        )
    )
    assert ran.of("main") == ["nobody sends", "nobody reads"]


@pytest.mark.parametrize("way", ["os.environ['WORLD_SIZE'] = '4'", "os.environ.setdefault('MASTER_PORT', '29512')"])
def test_what_a_launcher_sets_reaches_its_ranks(script: Scripts, way: str) -> None:
    """Also the value that torchrun would have set, and a default that torchrun's value stood before."""
    ran = script(
        launcher(
            "def child(): print({k: os.environ.get(k) for k in ('WORLD_SIZE', 'MASTER_PORT', 'RANK')})\n",
            way + "\none = mp.Process(target=child); one.start(); one.join()\n",
        ),
        num_ranks=4,
    )
    expected = {"WORLD_SIZE": None, "MASTER_PORT": None, "RANK": None}
    expected |= {"WORLD_SIZE": "4"} if "WORLD_SIZE" in way else {"MASTER_PORT": "29512"}
    assert ran.of(0) == [str(expected)]


def test_the_launcher_around_a_simulation_is_not_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under an outer torchrun or mpirun the simulated ranks see their own job, and meet."""
    outer = {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "outer",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM",
        "OMPI_COMM_WORLD_RANK": "3",
        "SLURM_PROCID": "5",
        "MASTER_ADDR": "elsewhere",
        "RANK": "3",
    }
    for name, value in outer.items():
        monkeypatch.setenv(name, value)

    def body() -> Any:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        return sorted(name for name, value in outer.items() if os.environ.get(name) == value), dist.get_rank()

    outcome = ranks(body, 2, check=False)
    assert outcome.results == [([], 0), ([], 1)]
    assert outcome.virtual_time_s < 1


def test_exit_codes_that_the_parent_reads_are_messages(script: Scripts) -> None:
    """Torch's tests skip by an exit code: the parent reads it and ends well. All four ranks are told apart."""
    text = launcher(
        "def child(): sys.exit(84)\n",
        "children = [mp.Process(target=child) for _ in range(4)]\n"
        "for one in children: one.start()\n"
        "for one in children: one.join()\n"
        "print([one.exitcode for one in children])\n"
        "sys.exit(CODE)\n",
    )
    ran = script(text.replace("CODE", "0"), num_ranks=4)
    assert ran.of("main") == ["[84, 84, 84, 84]"]
    assert (ran.outcome.exit_code, ran.kinds, ran.outcome.world_size) == (0, [], 4)
    failed = script(text.replace("CODE", "1"), num_ranks=4)
    assert failed.outcome.exit_code == 1
    assert any("main" in note and "exit code 1" in note for note in failed.outcome.notes)


def test_what_a_launcher_raises_is_shown(script: Scripts) -> None:
    """Its traceback is on its stderr, as Python prints it: no rank's report has it."""
    ran = script(
        launcher(
            "def child(): pass\n",
            "one = mp.Process(target=child); one.start(); one.join()\nraise ValueError('main is wrong')\n",
        )
    )
    assert ran.outcome.exit_code == 1
    assert ran.of("main", ran.err)[-1] == "ValueError: main is wrong"


def test_forked_children_have_the_pipes_of_their_parent(script: Scripts) -> None:
    """A pipe in a global of the script: the forked child writes into its parent's, and its end is told."""
    ran = script(
        "import multiprocessing as mp\n"
        "mp.set_start_method('fork', force=True)\n"
        "reader, writer = mp.Pipe(False)\n"
        "def child(): writer.send('from child')\n"
        "if __name__ == '__main__':\n"
        "    one = mp.Process(target=child); one.start(); writer.close()\n"
        "    print(reader.recv())\n"
        "    try: reader.recv()\n"
        "    except EOFError: print('end')\n"
    )
    assert ran.of("main") == ["from child", "end"]


def test_builtins_of_a_rank_are_of_one_type(script: Scripts) -> None:
    """Programs add arguments to `print` unless somebody has already: they compare its type with that of `open`."""
    text = HEAD + (
        "import builtins\n"
        "assert type(print) is type(open), type(print)\n"
        "real = builtins.print\n"
        "builtins.print = lambda *args, clean=False: real('changed', *args)\n"
        "assert type(print) is not type(open)\n"
        "print(os.path.exists('/proc/self'), clean=True)\n"
    )
    result = script(text, 2)
    assert result.outcome.exit_code == 0, result.err
    assert result.out.count("changed True") == 2
