"""Monitors of several hosts: they meet only with the secret, and what is sent arrives unchanged."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distsim.debug.evidence.processes import Numbering
from distsim.debug.monitor import protocol as exchange
from distsim.debug.monitor.peers import PeerSession
from distsim.debug.monitor.protocol import LENGTH, Follower, Hello, Leader, Look, Message, PeerLink, Status
from distsim.debug.monitor.sent_evidence import HostEvidence, SentEvidence, received, sent
from distsim.debug.records import (
    CallRecord,
    CallWait,
    Caught,
    Evidence,
    Finding,
    Group,
    HostWait,
    Phase,
    RankState,
    RankThread,
    Site,
    State,
    StoreWait,
)
from distsim.debug.records.call import Remote
from distsim.debug.records.diagnosis import Call, Diagnosis, Stuck, diagnoses_from_json, diagnoses_to_json
from distsim.debug.records.kinds import Kind, Proof
from distsim.debug.rings.files import Process
from distsim.realexec.process import introduce_monitors as real_hosts
from distsim.realexec.process.introduce_monitors import job_addresses
from distsim.text.codec import pack, unpack


def processes(*ranks: int) -> list[Process]:
    """Of one host."""
    return [Process("second", 100 + rank, rank, 8, True, 0, 0) for rank in ranks]


STATUS = Status(processes(2, 3), [5, 5])
NOTHING = SentEvidence(HostEvidence({}, {}, [], {}), [], [])


def framed(content: bytes) -> bytes:
    """A message as it is on the wire."""
    return len(content).to_bytes(LENGTH) + content


SECRET = "a secret of this job"


def port_of(folder: Path) -> int:
    """Where the leader listens."""
    said = json.loads((folder / "monitor.json").read_text())
    assert said == {"address": "127.0.0.1", "port": said["port"], "salt": "salt"}
    return int(said["port"])


@contextmanager
def pair(
    tmp_path: Path,
    secret: str = SECRET,
    feed: Callable[[int, Any, Any], object] = lambda *data: None,
    notes: list[str] | None = None,
) -> Iterator[tuple[Leader, Follower]]:
    """A leader and a follower on this machine."""
    notes = [] if notes is None else notes
    leader = Leader(tmp_path, ["192.0.2.1", "127.0.0.1"], SECRET, "salt", feed, notes)  # type: ignore[arg-type]
    follower = Follower("127.0.0.1", port_of(tmp_path), secret, "other", notes)
    yield leader, follower
    leader.close()
    follower.close()


def until(condition: Callable[[], bool], step: Callable[[], Any]) -> bool:
    """Step both ends until something is so; bounded, so that a fault fails the test."""
    deadline = time.monotonic() + 5
    while not condition() and time.monotonic() < deadline:
        step()
    return condition()


def test_rows_and_looks_cross_over(tmp_path: Path) -> None:
    """A follower that knows the secret is welcomed; its rows arrive, and it hears the verdict."""
    got: list[Any] = []
    told: list[Any] = []
    rows = np.arange(6, dtype=np.uint64).reshape(2, 3)
    outbox = [(2, ("0", (0, 2), 0), rows)]
    with pair(tmp_path, feed=lambda *data: got.append(data)) as (leader, follower):

        def step() -> None:
            leader.step()
            told.extend(follower.step(STATUS, outbox, lambda request: NOTHING))

        assert until(lambda: bool(got) and bool(leader.links[0].processes), step)
        rank, key, data = got[0]
        assert (rank, key) == (2, ("0", (0, 2), 0))
        assert (data == rows).all()
        assert [process.rank for process in leader.links[0].processes] == [2, 3]
        assert leader.lost == []
        leader.tell(Message(verdict={"x": 1}))
        assert until(lambda: bool(told), step)
    assert told == [Message(verdict={"x": 1})]


def test_a_wrong_secret_is_shown_the_door(tmp_path: Path) -> None:
    """Who does not know the job's secret is cut off and heard of no more."""
    got: list[Any] = []
    rows = np.zeros((1, 3), dtype=np.uint64)
    with pair(tmp_path, "guess", lambda *data: got.append(data)) as (leader, follower):

        def step() -> None:
            leader.step()
            follower.step(STATUS, [(2, ("0", (0, 2), 0), rows)], lambda request: NOTHING)

        assert until(lambda: follower.link is not None and not follower.link.open, step)
        assert got == []
        assert not any(link.known for link in leader.links)


RUBBISH: dict[str, bytes] = {
    "a wrong proof": framed(pack(Hello("0" * 64, "0" * 64))),
    "no proof": framed(pack(Hello("0" * 64))),
    "a proof of other letters": framed(pack({"nonce": "0" * 64, "proof": "\u00e9" * 64})),
    "a nonce that is a list": framed(pack({"nonce": [1], "proof": {}})),
    "nested lists": framed(b"\x91" * 900),
    "a number": framed(b"1"),
    "a message before any proof": framed(pack(Message(rows=[(0, ("0", (0,), 0), b"AAAA")]))),
    "a torn message": framed(b"\xdd\xff\xff\xff\xff"),
    "an empty message": framed(b""),
    "another protocol": b"GET / HTTP/1.1\r\n\r\n",
    "more than a proof has": framed(b"x" * 100_000),
}


@pytest.mark.parametrize("what", RUBBISH)
def test_sixty_strangers_change_nothing(what: str, tmp_path: Path) -> None:
    """Whatever they send before any proof: they are shown the door, no fault is counted, the follower goes on."""
    notes: list[str] = []
    with pair(tmp_path, notes=notes) as (leader, follower):

        def step() -> None:
            leader.step()
            follower.step(STATUS, [], lambda request: NOTHING)

        assert until(lambda: bool(leader.links and leader.links[0].processes), step)
        strangers = []
        for _ in range(60):
            stranger = socket.create_connection(("127.0.0.1", port_of(tmp_path)), timeout=5)
            with suppress(OSError):  # shown the door already
                stranger.sendall(RUBBISH[what])
            strangers.append(stranger)
            leader.step()
        assert until(lambda: len(leader.links) == 1, step)
        for stranger in strangers:
            stranger.close()
        assert follower.connected
        assert leader.lost == []
        assert notes == []


def test_connections_that_say_nothing_make_room_and_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred that only knock: never more than a few are kept, none for long, and a follower still gets in."""
    with pair(tmp_path) as (leader, follower):
        knocking = [socket.create_connection(("127.0.0.1", port_of(tmp_path)), timeout=5) for _ in range(100)]

        def step() -> None:
            leader.step()
            follower.step(STATUS, [], lambda request: NOTHING)

        assert until(lambda: bool([link for link in leader.links if link.processes]), step)
        assert len(leader.links) <= exchange.MOST_UNKNOWN + 1
        assert until(lambda: follower.connected, step)
        monkeypatch.setattr(exchange, "MEET_S", 0.0)
        assert until(lambda: len(leader.links) == 1, step)
        assert follower.connected
        for stranger in knocking:
            stranger.close()


def test_a_leader_that_does_not_know_the_secret_is_told_nothing(tmp_path: Path) -> None:
    """Somebody else at the leader's address: it gets a proof that it can use nowhere, and no word more."""
    server = socket.create_server(("127.0.0.1", 0))
    follower = Follower("127.0.0.1", server.getsockname()[1], SECRET, "other", [])
    follower.step(STATUS, [], lambda request: NOTHING)
    false, _ = server.accept()
    false.sendall(framed(pack(Hello("0" * 64))))
    heard = bytearray()
    false.settimeout(5)

    def step() -> None:
        follower.step(STATUS, [(2, ("0", (0, 2), 0), np.zeros((1, 3), dtype=np.uint64))], lambda request: NOTHING)

    step()
    false.sendall(framed(pack(Hello(proof="0" * 64))) + framed(pack(Message(look=Look(Numbering(), False, 0, {})))))
    assert until(lambda: follower.link is not None and not follower.link.open, step)
    with suppress(OSError):
        while data := false.recv(4096):
            heard += data
    said = unpack(bytes(heard[LENGTH:]), Hello)
    assert framed(pack(said)) == heard
    assert said.nonce is not None
    assert said.proof is not None
    false.close()
    server.close()


def _met() -> tuple[PeerLink, PeerLink]:
    """Two ends that know each other."""
    one, other = socket.socketpair()
    leader, follower = PeerLink(one, SECRET, leads=True), PeerLink(other, SECRET, leads=False)
    assert until(lambda: leader.known and follower.known, lambda: (leader.receive(), follower.receive()))
    return leader, follower


@pytest.mark.parametrize("attack", ["replayed", "changed", "turned around", "put in"])
def test_a_sealed_line_is_good_once_in_its_place_and_direction(attack: str) -> None:
    """Whoever is on the wire can end the connection; he can not make either end believe anything."""
    leader, follower = _met()
    real = follower.socket
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    follower.socket = ours
    follower.send(Message("other"))
    line = theirs.recv(4096)
    follower.socket = real
    victim = leader
    match attack:
        case "replayed":
            real.send(line + line)
            assert len(leader.receive()) <= 1
        case "changed":
            real.send(line.replace(b"other", b"third"))
            assert leader.receive() == []
        case "turned around":
            leader.socket.send(line)
            assert follower.receive() == []
            victim = follower
        case _:
            real.send(framed(b"0" * 32 + pack(Message(abort=True))))
            assert leader.receive() == []
    assert not victim.open
    for end in (ours, theirs, real, leader.socket):
        end.close()


def test_a_known_host_whose_message_makes_no_sense_loses_its_link_only(tmp_path: Path) -> None:
    """It is said in one line, the other host goes on, and the link is made anew without a false `host is down`."""
    notes: list[str] = []
    with pair(tmp_path, notes=notes) as (leader, follower):
        other = Follower("127.0.0.1", port_of(tmp_path), SECRET, "third", notes)

        def step() -> None:
            leader.step()
            follower.step(STATUS, [], lambda request: NOTHING)
            other.step(Status(processes(4, 5)), [], lambda request: NOTHING)

        assert until(lambda: sorted(link.processes[0].rank for link in leader.links if link.processes) == [2, 4], step)
        assert until(lambda: other.connected, step)
        assert other.link is not None
        other.link.send({"rows": [["x", None, 3]]})  # type: ignore[arg-type]
        assert until(lambda: bool(notes), step)
        assert "the link to host third is dropped" in notes[0]
        assert follower.connected
        assert until(lambda: all(link.open for link in leader.links) and len(leader.links) == 2, step)
        assert leader.lost == []
        other.close()


@pytest.mark.parametrize(
    ("master", "interface"), [("127.0.0.1", ""), ("localhost", ""), ("192.0.2.7", "lo"), ("192.0.2.7", "=lo")]
)
def test_the_leader_listens_on_the_jobs_interface(master: str, interface: str) -> None:
    """The one gloo is told to use, else that of the rendezvous; never on all."""
    found = job_addresses(master, {"GLOO_SOCKET_IFNAME": interface})
    assert found[0] in ("127.0.0.1", "::1")
    assert not {"0.0.0.0", "::", ""} & set(found)


def test_a_leader_without_an_address_of_the_job_says_so(tmp_path: Path) -> None:
    """It does not listen elsewhere instead."""
    with pytest.raises(OSError, match=r"none of the job's addresses is this host's \(192.0.2.1: "):
        Leader(tmp_path, ["192.0.2.1"], SECRET, "", lambda *data: None, [])


class Store:
    """What the job's store would hold."""

    host = "127.0.0.1"

    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self.held[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.held[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.held for key in keys)


def _introduced(tmp_path: Path, secrets: tuple[str, str]) -> tuple[Store, dict[str, Any], dict[str, Any]]:
    """What the store holds, and what the two monitors were told, after both hosts' ranks met in it."""
    store, ended = Store(), threading.Event()
    for name in ("lead", "follow"):
        (tmp_path / name).mkdir()
    where = {"address": "127.0.0.1", "port": 5, "salt": "00"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DISTSIM_SECRET", secrets[0])
        patch.setenv("MASTER_ADDR", "127.0.0.1")
        patch.setattr(real_hosts, "PATIENCE_S", 0.0)
        real_hosts._lead(tmp_path / "lead", store, ended)
        led = json.loads((tmp_path / "lead" / "lead.json").read_text())
        (tmp_path / "lead" / "monitor.json").write_text(json.dumps({**where, "salt": led["salt"]}))
        patch.setattr(real_hosts, "PATIENCE_S", 5.0)
        real_hosts._lead(tmp_path / "lead", store, ended)
        patch.setenv("DISTSIM_SECRET", secrets[1])
        real_hosts._follow(tmp_path / "follow", store, ended)
    return store, led, json.loads((tmp_path / "follow" / "follow.json").read_text())


@pytest.mark.parametrize("given", ["", "a secret that the user gives"])
def test_the_secret_is_not_in_the_store(tmp_path: Path, given: str) -> None:
    """Both ends come to the same one, given or derived, and the store holds an address and a salt."""
    store, led, followed = _introduced(tmp_path, (given, given))
    assert led["secret"] == followed["secret"]
    (told,) = store.held.values()
    assert sorted(json.loads(told)) == ["address", "port", "salt"]
    assert led["secret"].encode() not in told


def test_different_secrets_do_not_meet(tmp_path: Path) -> None:
    """A given secret counts, not the job's names."""
    _, led, followed = _introduced(tmp_path, ("one that is given", "another that is"))
    assert led["secret"] != followed["secret"]


@pytest.mark.parametrize("mode", [0o600, 0o644])
def test_a_secret_that_others_can_read_is_none(
    tmp_path: Path, mode: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file must be its user's alone; the guard goes on without meeting, and says so."""
    path = tmp_path / "secret"
    path.write_text("twenty letters, more")
    path.chmod(mode)
    monkeypatch.setenv("DISTSIM_SECRET_FILE", str(path))
    found = real_hosts._secret("salt")
    said = capsys.readouterr().err
    assert (found is None) == (mode == 0o644)
    assert ("expected a file that you own and that no other user may read" in said) == (mode == 0o644)


@pytest.mark.parametrize("told", [b"", b"[]", b"{", b'{"address": 1}', b'{"address": "x", "port": "y", "salt": ""}'])
def test_a_store_that_somebody_else_filled_is_not_believed(tmp_path: Path, told: bytes) -> None:
    """No traceback in the rank, and nothing for its monitor."""
    store = Store()
    store.held[real_hosts._key()] = told
    real_hosts._follow(tmp_path, store, threading.Event())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("said", ["", "{", "{}", '{"address": "x"}', "[]", "null", '{"secret": "x"}'])
def test_half_written_words_of_a_rank_are_waited_for(tmp_path: Path, said: str) -> None:
    """The monitor neither leads nor follows yet, and meets no fault."""
    for name in ("lead.json", "follow.json"):
        (tmp_path / name).write_text(said)
        together = PeerSession(tmp_path)
        together._choose(None)  # type: ignore[arg-type]
        assert (together.leader, together.follower) == (None, None)
        (tmp_path / name).unlink()


def test_evidence_survives_the_wire() -> None:
    """States, waits, calls and findings are the same on the other side."""
    group = Group("0", "default_pg", (0, 1))
    site = Site("train.py", 7, "step")
    call = CallRecord(
        rank=1,
        group=group,
        seq=4,
        op="all_to_all_single",
        input_shapes=((4, 2),),
        dtypes=("float32",),
        input_splits=(1, 3),
        site=site,
        stack=(site,),
        issued_s=1.5,
        state=State.ISSUED,
        index=9,
    )
    state = RankState(1, Phase.BLOCKED, (CallWait(call),), site, (site,), 1.5, host="h", pid=3, over=True)
    state.caught = (Caught("KeyError: 'x'", site, 3, 8),)
    finding = Finding(Kind.NAN, (1,), "text", group, call, site, "do this", 1.5)
    evidence = Evidence(2, {1: state}, {1: [call]}, findings=[finding], sources={"train.py": "x"})
    assert arrived(evidence) == HostEvidence({1: state}, {1: [call]}, [finding], {"train.py": "x"})


def arrived(evidence: Evidence) -> HostEvidence:
    """What another host has of it."""
    return received(unpack(pack(sent(evidence)), SentEvidence))


def test_equal_lines_in_other_circumstances_stay_apart() -> None:
    """Stacks are sent once each, and two of the same lines may have been walked in other circumstances."""
    group = Group("0", "default_pg", (0,))
    ways = ((), ("backward",), ("recomputation", "backward"))
    calls = [
        CallRecord(0, group, number, "all_reduce", stack=(Site("train.py", 7, "step", inside=way),), index=number)
        for number, way in enumerate(ways)
    ]
    there = arrived(Evidence(1, {0: RankState(0)}, {0: calls}))
    assert [call.stack[0].inside for call in there.records[0]] == [*ways]


def test_every_field_survives_the_wire() -> None:
    """Whatever a field holds (a root of rank 0, tag 0, splits of nothing, a warning), the other side has it."""
    groups = [Group("0", "default_pg", (0, 1)), Group("7", "dp", (1, 0))]
    sites = [Site("train.py", 7, "step", Site("lib.py", 1, "run")), Site("other.py", 1, "f")]
    call = CallRecord(0, groups[0], 3, "broadcast", root=0, peer=0, tag=0, input_splits=(), new_ranks=())
    calls = [replace(c, index=number) for number, c in enumerate([call, *_each_field(call, groups, sites)])]
    elsewhere = CallRecord(5, groups[1], 1, "barrier", site=sites[1], stack=(sites[0],), index=88)
    finding = Finding(Kind.NAN, (0,), "seen", call=calls[1])
    found = [finding, *_each_field(finding, groups, sites), replace(finding, call=elsewhere, group=None)]
    waits = (CallWait(calls[1]), CallWait(elsewhere), StoreWait(("a", "b"), "why"), HostWait("a lock", (0, 1)))
    state = RankState(0, Phase.BLOCKED, waits)
    states = dict(enumerate(replace(s, rank=n) for n, s in enumerate([state, *_each_field(state, groups, sites)])))
    evidence = Evidence(len(states), states, {0: calls}, findings=found, sources={"train.py": "x"})
    there = arrived(evidence)
    assert there == HostEvidence(states, {0: calls}, found, {"train.py": "x"})
    assert there.ranks[0].waits[0].record is there.records[0][1]  # type: ignore[union-attr]
    empty = Diagnosis(Kind.NAN, (0,))
    diagnoses = [empty, *_each_field(empty, groups, sites, but=("proof", "shown")), replace(empty, proof=Proof.NOT_YET)]
    assert diagnoses_from_json(json.loads(json.dumps(diagnoses_to_json(diagnoses)))) == diagnoses


def _each_field(plain: Any, groups: list[Group], sites: list[Site], but: tuple[str, ...] = ()) -> list[Any]:
    """*plain* with one field after the other changed; by its type, so that a new field is among them."""
    others: dict[str, Any] = {
        "rank": plain.rank if hasattr(plain, "rank") else None,
        "group": groups[1],
        "call": plain.call if isinstance(plain, Finding) else Call("all_reduce", 3),
        "waits": (StoreWait(("key",)),),
        "site": sites[1],
        "stack": tuple(sites),
        "sites": {1: sites[0]},
        "pace": {"excess_s": 0.5},
        "stuck": {1: Stuck("barrier", (0, 1), 3, "train.py", 7)},
        "phase": Phase.KILLED,
        "state": State.FAILED,
        "kind": Kind.STRAGGLER,
        "dtypes": ("float32", "int8"),
        "input_shapes": ((), (0,), (4, 2)),
        "output_shapes": ((),),
        "stores": {"n0:29500": True},
        "caught": (Caught("KeyError: 'x'", sites[0], 3, 8, "", (sites[0],)),),
        "causes": tuple(sites),
        "threads": (RankThread("loader", True, tuple(sites), "MainThread"),),
        "children": (RankThread("4711", True, tuple(sites)),),
        "cycle": (0, 1),
        "pair": (0, 1),
        "remote": Remote("step", "trainer", "server", 2, 1.5, (0, 3), (1, 2)),
    }
    by_type = {
        "bool": True,
        "int": 41,
        "float": 4.5,
        "str": "words",
        "Number": 4.5,
        **dict.fromkeys(("tuple[int, ...]", "tuple[Rank, ...]"), (1, 0)),
    }
    changed = []
    for field in fields(plain):
        if field.name not in but:
            kind = str(field.type).removesuffix(" | None")
            value = others[field.name] if field.name in others else by_type[kind]
            changed.append(replace(plain, **{field.name: value}))
    return changed
