"""Machines: their names, and which of them a store's address means."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from sim.running import Scripts, ranks

import distsim


def test_every_machine_has_its_name() -> None:
    """Python's ways to ask agree; ranks of one machine share it; MASTER_ADDR is the first one's everywhere."""

    def body() -> Any:
        import os
        import platform
        import socket

        names = {socket.gethostname(), socket.getfqdn(), os.uname().nodename, platform.node()}
        own = socket.gethostbyname(socket.gethostname())
        return sorted(names), own, os.environ["MASTER_ADDR"], socket.getaddrinfo("node1", 80)[0][4][0]

    assert ranks(body).results == [
        (["node0"], "10.0.0.1", "node0", "127.0.0.1"),
        (["node1"], "10.0.0.2", "node0", "127.0.0.1"),
    ]


def test_loopback_is_each_machines_own() -> None:
    """A store on 127.0.0.1 port 29999 on each of two machines is legal; by name each is reached from the other."""

    def body() -> Any:
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        own = dist.TCPStore("127.0.0.1", 29_999, 1, True)
        dist.barrier()
        dist.TCPStore(f"node{1 - rank}", 29_999, is_master=False).set("from", str(rank))
        dist.barrier()
        return own.get("from")

    assert ranks(body).results == [b"1", b"0"]


def test_loopback_as_master_address_of_two_machines(script: Scripts) -> None:
    """The classic mistake: the ranks of the second machine never find the store, and the report says why."""
    ran = script(
        "import os, torch.distributed as dist\n"
        "os.environ['MASTER_ADDR'] = '127.0.0.1'\n"
        "dist.init_process_group('gloo')\n"
    )
    assert ran.outcome.exit_code == 3
    first = ran.outcome.diagnoses[0]
    assert (str(first.kind), first.culprits) == ("never_joined", (1,))
    assert "127.0.0.1:29500" in first.explanation
    assert "the store is on node0" in first.explanation
    assert "MASTER_ADDR" in first.suggestion


def test_loopback_on_one_machine() -> None:
    """Where all ranks are on one machine it is right."""

    def body() -> int:
        import os

        os.environ["MASTER_ADDR"] = "localhost"
        dist.init_process_group("gloo")
        return dist.get_world_size()

    assert distsim.simulate(body, on="ethernet-cpu:1", nproc_per_node=2).results == [2, 2]


def test_a_name_that_nobody_has() -> None:
    """It does not resolve: torch's words after the timeout, also for the master itself; a note names the machines."""

    def body() -> Any:
        try:
            dist.TCPStore("dnsnotexist", 23_456, 2, True, timedelta(seconds=1))
        except dist.DistNetworkError as error:
            return str(error)

    outcome = ranks(body)
    text = "The client socket has timed out after 1000ms while trying to connect to (dnsnotexist, 23456)."
    assert outcome.results == [text] * 2
    assert any("'dnsnotexist'" in note and "node0 to node1" in note for note in outcome.notes)


def test_an_address_of_the_real_cluster_is_the_first_machine() -> None:
    """A script's own tcp://10.1.1.20 is taken for the machine that it stands for, with a note."""

    def body() -> int:
        import os

        rank = int(os.environ["RANK"])
        dist.init_process_group("gloo", init_method="tcp://10.1.1.20:23456", rank=rank, world_size=2)
        return dist.get_world_size()

    outcome = ranks(body)
    assert outcome.results == [2, 2]
    assert any("10.1.1.20" in note for note in outcome.notes)
