"""What a running job is asked beside its stacks: NCCL's RAS service, Flight Recorder's pipe, PyTorch's debug server."""

from __future__ import annotations

import html
import http.server
import json
import os
import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from distsim.debug.attach import Joined, ask_debug_server, ask_flight_recorders, ask_ras, join, judge, read_status
from distsim.debug.attach import joined as module
from distsim.debug.attach.ranks import RankProcess
from distsim.debug.records.kinds import Kind
from distsim.errors import UsageError
from tests.attach.test_judge import at

# In the format of NCCL's documentation (troubleshooting, RAS), with numbers of our own.
SUMMARY = """\
NCCL version 2.27.3 compiled with CUDA 12.9
CUDA runtime version 12090, driver version 12090

Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      1          4            1          4        4

Communicators... (0.01s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
      0         1         1         4         4         4   RUNNING      OK

Errors
======

"""
NO_WARNINGS = "Warnings\n========\n\n"
BEHIND = f"""{NO_WARNINGS}#0-0 (27a0ff) MISMATCH
  Communicator ranks have different AllReduce operation counts
  3 ranks have launched up to operation 42
  Rank 2 has launched up to operation 41 -- GPU 2 managed by process 102 on node 10.0.0.1
"""
BEFORE_226 = f"""{NO_WARNINGS}#0-0 (27a0ff) MISMATCH
  Communicator ranks have different collective operation counts
  6 ranks have launched up to operation 42
  2 ranks have launched up to operation 41
  Rank 0 -- GPU 0 managed by process 100 on node 10.0.0.1
  Rank 2 -- GPU 2 managed by process 102 on node 10.0.0.1
"""
NOT_ONE = f"""{NO_WARNINGS}#0-0 (27a0ff) MISMATCH
  Communicator ranks have different Broadcast operation counts
  3 ranks have launched up to operation 2
  Rank 1 has not launched any operations -- [process information not found]
"""
ANOTHER_CALL = f"""{BEHIND}
  Communicator ranks have different AllGather operation counts
  3 ranks have not launched any operations
  Rank 2 has launched up to operation 1 -- GPU 2 managed by process 102 on node 10.0.0.1
"""
GONE = f"""INCOMPLETE
  Missing communicator data from 1 job process
  Process 102 on node 10.0.0.1 managing GPU 2

#0-0 (27a0ff) INCOMPLETE
  Missing communicator data from 1 rank
  The missing rank: 2

{NO_WARNINGS}TIMEOUT
  Encountered 2 communication timeouts while gathering communicator data
"""
DEAD = f"""DEAD
  1 job process is considered dead (unreachable via the RAS network)
  Process 102 on node 10.0.0.1 managing GPUs 2,3

#0-0 (27a0ff) INCOMPLETE
  Missing communicator data from 2 ranks
  Rank 2 -- GPU 2 managed by process 102 on node 10.0.0.1
  Rank 3 -- [process information not found]

{NO_WARNINGS}"""
STATUS = f"""{NO_WARNINGS}#0-0 (9e17ff) MISMATCH
  Communicator ranks have different status
  3 ranks have status RUNNING
  Rank 1 has status FINALIZE -- GPU 1 managed by process 101 on node 10.0.0.1
"""


@pytest.mark.parametrize(
    ("text", "behind", "processes"),
    [
        pytest.param(NO_WARNINGS, {}, [], id="all is well"),
        pytest.param(BEHIND, {2: "41 of 42 AllReduce"}, [], id="one is behind"),
        pytest.param(BEFORE_226, {0: "41 of 42 collective", 2: "41 of 42 collective"}, [], id="before 2.26"),
        pytest.param(NOT_ONE, {1: "0 of 2 Broadcast"}, [], id="none at all"),
        pytest.param(ANOTHER_CALL, {}, [], id="another call says not who is wrong"),
        pytest.param(GONE, {}, [(102, "unresponsive")], id="does not answer"),
        pytest.param(DEAD, {}, [(102, "dead")], id="dead"),
        pytest.param(STATUS, {}, [], id="another state"),
    ],
)
def test_the_text_of_ras_is_read(text: str, behind: dict[int, str], processes: list[tuple[int, str]]) -> None:
    """Of every release: who is behind in which operation, and who does not answer."""
    status = read_status(SUMMARY + text)
    assert status.version == "2.27.3"
    comm = status.communicators[0] if status.communicators else None
    assert (comm.behind() if comm else {}) == behind
    assert [(one.pid, one.why) for one in status.processes] == processes


def ras_json(counts: list[dict[str, int]], gone: dict[int, dict[str, bool]] | None = None, **status: Any) -> str:
    fine = {"init_state": 0, "async_error": 0, "finalize_called": False, "destroy_flag": False, "abort_flag": False}
    place = {"host": "10.0.0.1", "cuda_dev": 0, "nvml_dev": 0}
    ranks = [
        {"rank": n, "pid": 100 + n, **place, "status": {**fine, **status}, "collective_counts": each}
        for n, each in enumerate(counts)
    ]
    missing = [{"rank": n, "pid": 100 + n, **place, "status": said} for n, said in (gone or {}).items()]
    comm = {"hash": "0xae94", "secondary_hash": "0x1:0x2", "size": len(counts) + len(missing)}
    comm |= {"ranks_count": len(ranks), "missing_ranks_count": len(missing), "ranks": ranks, "missing_ranks": missing}
    ras = {"collection_time_sec": 0.0, "timeouts_count": 1}
    return json.dumps({"nccl_version": "2.29.1", "communicators_count": 1, "communicators": [comm], "ras": ras})


@pytest.mark.parametrize(
    ("answer", "behind", "gone"),
    [
        (ras_json([{"AllReduce": 7, "Reduce": 0}, {"AllReduce": 7, "Reduce": 0}]), {}, []),
        (ras_json([{"AllReduce": 7}, {"AllReduce": 5}]), {1: "5 of 7 AllReduce"}, []),
        (ras_json([{"AllReduce": 7}], {1: {"unresponsive": True, "considered_dead": False}}), {}, ["unresponsive"]),
        (ras_json([{}], {1: {"unresponsive": True, "considered_dead": True}}), {}, ["dead"]),
        (ras_json([{}], {1: {"unresponsive": False, "considered_dead": False}}), {}, []),
        (ras_json([{}], abort_flag=True), {}, []),
    ],
)
def test_the_json_of_ras_is_read(answer: str, behind: dict[int, str], gone: list[str]) -> None:
    """Since NCCL 2.28.7: the same facts, of all ranks."""
    status = read_status(answer)
    (comm,) = status.communicators
    assert (status.version, comm.name, comm.behind()) == ("2.29.1", "ae94", behind)
    assert [one.why for one in status.processes] == gone


def test_a_comma_that_ras_leaves_out_is_no_reason_not_to_read() -> None:
    """NCCL 2.28.7 to 2.28.9 leave one out behind `nvml_dev` of a missing rank, and not of the others."""
    gone = {number: {"unresponsive": True, "considered_dead": True} for number in (1, 2)}
    there, missing = json.dumps(json.loads(ras_json([{"AllReduce": 7}], gone)), indent=2).split('"missing_ranks":')
    assert missing.count('"nvml_dev": 0,') == 2
    status = read_status(there + '"missing_ranks":' + missing.replace('"nvml_dev": 0,', '"nvml_dev": 0'))
    assert [(one.rank, one.why) for one in status.processes] == [(1, "dead"), (2, "dead")]
    assert status.communicators[0].counts == {"AllReduce": {0: 7}}


@pytest.mark.parametrize("answer", ["", "HTTP/1.1 400", '{"communicators": [{}]}', '{"nccl_version": 1}', "{"])
def test_what_is_no_status_is_refused(answer: str) -> None:
    """By an error that says so."""
    with pytest.raises((ValueError, KeyError, TypeError)):
        read_status(answer)


@contextmanager
def serving(kind: type[Any]) -> Iterator[int]:
    """A server of *kind* on a free port."""
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), kind) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield int(server.server_address[1])
        server.shutdown()
        thread.join()


def ras_service(answer: str, knows_json: bool, greeting: str = "SERVER PROTOCOL 2") -> type[Any]:
    class Service(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            for line in self.rfile:
                word = line.split()[0].upper()
                if word == b"VERBOSE":
                    self.wfile.write(answer.encode())
                    return
                ok = b"OK\n" if knows_json else b"ERROR: Unknown command\n"
                self.wfile.write(f"{greeting}\n".encode() if word == b"CLIENT" else ok)

    return Service


@pytest.mark.parametrize(("answer", "knows_json"), [(SUMMARY + BEHIND, False), (ras_json([{"A": 2}, {"A": 1}]), True)])
def test_the_service_is_asked(answer: str, knows_json: bool) -> None:
    """For JSON first; an older one answers in text."""
    with serving(ras_service(answer, knows_json)) as port:
        assert ask_ras(f"127.0.0.1:{port}").communicators[0].behind()


@pytest.mark.parametrize(
    ("address", "line"),
    [
        ("localhost:1", "--ras localhost:1: no RAS service there (Connection refused); run it on a host of the job"),
        ("no.such.host.invalid", "--ras no.such.host.invalid: no RAS service there ("),
        ("a:b:c", "--ras: expected HOST or HOST:PORT, got 'a:b:c'"),
        ("localhost:99999", "--ras: expected HOST or HOST:PORT"),
    ],
)
def test_a_closed_port_is_one_line(address: str, line: str) -> None:
    """With what to do."""
    with pytest.raises(UsageError) as refused:
        ask_ras(address)
    assert str(refused.value).startswith(line)
    assert "\n" not in str(refused.value)


def test_another_service_is_one_line() -> None:
    """Whatever answers at the port."""
    with serving(ras_service("", True, "220 smtp")) as port, pytest.raises(UsageError, match="expected NCCL's RAS"):
        ask_ras(f"127.0.0.1:{port}")
    with serving(ras_service("nothing", True)) as port, pytest.raises(UsageError, match="its answer cannot be read"):
        ask_ras(f"127.0.0.1:{port}")


def answers(*texts: str) -> Joined:
    return Joined(ras=[read_status(text) for text in texts])


def test_ras_names_a_rank_that_stacks_do_not() -> None:
    """All wait at one line; by its process the rank in the communicator is found among the job's."""
    places = [at(0), at(1), at(2), at(3)]  # pids 100 to 103
    stuck = [{"AllReduce": 42}, {"AllReduce": 42}, {"AllReduce": 41}, {"AllReduce": 42}]
    judged = join(judge(places, 4), answers(ras_json(stuck), ras_json(stuck)))
    (found,) = judged.diagnoses
    assert (found.kind, found.culprits, found.victims) == (Kind.MISSING_RANK, (2,), (0, 1, 3))
    assert "in communicator ae94 rank 2 has launched 41 of 42 AllReduce" in found.explanation
    assert judged.inconclusive is None
    moving = [{"AllReduce": 43}] * 4
    assert join(judge(places, 4), answers(ras_json(stuck), ras_json(moving))).diagnoses == []


def test_ras_is_beside_what_stacks_name() -> None:
    """The diagnosis stays, with a sentence more; a process that does not answer is named where nothing is."""
    gone = {2: {"unresponsive": True, "considered_dead": False}}
    judged = join(judge([at(0), at(1), at(2, "barrier", 12)], 3), answers(ras_json([{}, {}], gone)))
    assert judged.diagnoses[0].kind is Kind.MISSING_RANK
    assert "the process 102 on 10.0.0.1 is unresponsive" in judged.diagnoses[0].explanation
    (found,) = join(judge([at(0), at(1), at(2)], 3), answers(ras_json([{}, {}], gone))).diagnoses
    assert (found.kind, found.culprits) == (Kind.PROCESS_FROZEN, (2,))


def dump(*ops: str) -> dict[str, Any]:
    """As gloo's recorder has it: no lines, no members, the last call open."""
    entries = [
        {
            "record_id": n, "pg_id": 0, "process_group": ["0", "default_pg"], "collective_seq_id": n + 1,
            "p2p_seq_id": 0, "op_id": n + 1, "profiling_name": f"gloo:{op}", "time_created_ns": 1000 + n,
            "input_sizes": [[4]],
            "input_dtypes": ["Float"], "output_sizes": [[4]], "output_dtypes": ["Float"], "state": "scheduled",
            "time_discovered_started_ns": 0, "time_discovered_completed_ns": 0, "retired": n + 1 < len(ops),
            "timeout_ms": 1800000, "is_p2p": False,
        }
        for n, op in enumerate(ops)
    ]  # fmt: skip
    return {"version": "2.10", "entries": entries}


RECORDS = {0: dump("all_reduce", "all_reduce"), 1: dump("all_reduce", "all_reduce"), 2: dump("all_reduce", "broadcast")}


def is_named(joined: Joined) -> None:
    """Rank 2, by the records, with the lines of the stacks."""
    judged = join(judge([at(0), at(1), at(2, "broadcast", 12)], 3), joined)
    assert (judged.diagnoses[0].kind, judged.diagnoses[0].culprits) == (Kind.OP_MISMATCH, (2,)), joined.notes
    assert "broadcast float32[4] at train.py:12" in judged.diagnoses[0].explanation
    assert joined.source in judged.diagnoses[0].explanation


def page_of(records: Callable[[str], str]) -> type[Any]:
    class Pages(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            text = records(self.path).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: Any) -> None:
            pass

    return Pages


def test_the_debug_server_is_read() -> None:
    """What the recorders of all ranks say, and who did not answer it."""

    def page(path: str) -> str:
        of_cpu = path == "/fr_trace_json"
        ranks = [
            f"<h2>Rank {rank}: http://h:1/handler/{path}?</h2>\n <pre>"
            + html.escape(json.dumps(one if of_cpu else {"version": "2.10", "entries": []}, indent=2))
            + "</pre>"
            for rank, one in RECORDS.items()
        ]
        return "\n".join([*ranks, "<h2>Rank 3: http://h:1</h2> <p>Failed to fetch: status=503</p><pre>no</pre>"])

    with serving(page_of(page)) as port:
        joined = ask_debug_server(f"127.0.0.1:{port}")
    assert "debug server: rank 3 did not answer it" in joined.notes
    is_named(joined)
    refused = ask_debug_server("127.0.0.1:1")
    assert refused.records is None
    assert any("Connection refused" in note for note in refused.notes)


def test_flight_recorders_are_asked_by_their_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each writes its dump then; one without a pipe, and one that writes nothing, are said."""
    environ = {"TORCH_NCCL_DEBUG_INFO_PIPE_FILE": f"{tmp_path}/pipe_", "TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/dump_"}
    monkeypatch.setattr(module, "environment_of", lambda pid: environ)
    monkeypatch.setattr(module, "DUMP_S", 3.0)
    pipes = []
    for rank in RECORDS:
        os.mkfifo(tmp_path / f"pipe_{rank}.pipe")
        pipes.append(os.open(tmp_path / f"pipe_{rank}.pipe", os.O_RDONLY | os.O_NONBLOCK))

    def recorder(rank: int) -> None:
        while True:
            try:
                if os.read(pipes[rank], 128):
                    break
            except BlockingIOError:
                pass
            os.sched_yield()
        (tmp_path / f"dump_{rank}").write_text(json.dumps(RECORDS[rank]))

    threads = [threading.Thread(target=recorder, args=(rank,)) for rank in RECORDS]
    for thread in threads:
        thread.start()
    joined = ask_flight_recorders([RankProcess(100 + rank, rank) for rank in (*RECORDS, 7)])
    for thread in threads:
        thread.join()
    for pipe in pipes:
        os.close(pipe)
    assert "Flight Recorder: rank 7 did not open the pipe of TORCH_NCCL_DEBUG_INFO_PIPE_FILE" in joined.notes
    is_named(joined)
