"""Advice that follows the evidence: hand-made records and a program's text in, the suggestion out."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from distsim.debug.diagnosis.diagnose import diagnose
from distsim.debug.records import Evidence
from distsim.debug.records.diagnosis import Diagnosis
from distsim.debug.records.kinds import Kind
from tests.debug.builders import FILE, Step, all_reduce, barrier, coll, group, play, recv, send


@dataclass(frozen=True)
class Program:
    """A program's text, in which `@name` marks a line, and the marked lines."""

    text: str
    lines: dict[str, int] = field(default_factory=dict)

    def __getattr__(self, name: str) -> int:
        return self.lines[name]


def program(text: str) -> Program:
    lines = text.strip("\n").splitlines()
    marks = {}
    for number, line in enumerate(lines, start=1):
        code, _, mark = line.partition("  #@")
        if mark:
            marks[mark.strip()] = number
        lines[number - 1] = code
    return Program("\n".join(lines), marks)


def only(evidence: Evidence) -> Diagnosis:
    (d,) = diagnose(evidence)
    return d


def uneven(p: Program, short: int = 2, **kw: Any) -> Diagnosis:
    """Three ranks go round a loop four times, and rank 1 *short* times; all end in a barrier."""

    def steps(rank: int) -> list[Step]:
        return [all_reduce(p.call) for _ in range(short if rank == 1 else 4)] + [barrier(p.end)]

    return only(play(3, steps, sources={FILE: p.text}, **kw))


LOOPS = {
    "signal flag": (
        """
stop = False
def on_term(number, frame):
    global stop
    stop = True
signal.signal(signal.SIGTERM, on_term)  #@ why
for step in range(9):
    dist.all_reduce(x)  #@ call
    if stop:  #@ cause
        break
dist.barrier()  #@ end
""",
        "Agree on `stop` every step: all_reduce (MAX)",
    ),
    "flag of a class": (
        """
class Killer:
    def __init__(self):
        self.kill_now = False
        signal.signal(signal.SIGTERM, self.leave)  #@ why
    def leave(self, *args):
        self.kill_now = True
killer = Killer()
while not killer.kill_now:  #@ cause
    dist.all_reduce(x)  #@ call
dist.barrier()  #@ end
""",
        "Agree on `kill_now` every step: all_reduce (MAX)",
    ),
    "event behind a function": (
        """
stop = threading.Event()
signal.signal(signal.SIGUSR1, lambda *a: stop.set())  #@ why
def must_stop():
    return stop.is_set()
for batch in loader:
    dist.all_reduce(x)  #@ call
    if must_stop():  #@ cause
        break
dist.barrier()  #@ end
""",
        "Agree on `stop` every step: all_reduce (MAX)",
    ),
    "clock": (
        """
begin = time.monotonic()
for step in range(9):
    dist.all_reduce(x)  #@ call
    passed = time.monotonic() - begin
    if passed > 3600:  #@ cause
        break
dist.barrier()  #@ end
""",
        "Let rank 0 decide on the time limit and broadcast it",
    ),
    "file": (
        """
for step in range(9):
    dist.all_reduce(x)  #@ call
    if os.path.exists("STOP"):  #@ cause
        break
dist.barrier()  #@ end
""",
        "Let rank 0 look for the file and broadcast the answer",
    ),
    "early stop": (
        """
bad = 0
for epoch in range(9):
    dist.all_reduce(x)  #@ call
    if loss > best:
        bad += 1
    if bad >= 3:  #@ cause
        break
dist.barrier()  #@ end
""",
        "Agree on `bad >= 3` before any rank leaves the loop",
    ),
    "skipped round": (
        """
for step in range(9):
    loss = forward()
    if torch.isnan(loss):  #@ cause
        continue
    dist.all_reduce(x)  #@ call
dist.barrier()  #@ end
""",
        "Skip the round on all ranks or on none: all_reduce whether",
    ),
    "loader": (
        """
for step, batch in enumerate(loader):  #@ cause
    dist.all_reduce(x)  #@ call
    if step == 100:
        break
dist.barrier()  #@ end
""",
        "Give every rank the same number of batches in `enumerate(loader)` (drop_last=True",
    ),
    "bound": (
        """
for step in range(rounds):  #@ cause
    dist.all_reduce(x)  #@ call
dist.barrier()  #@ end
""",
        f"Give `range(rounds)` at {FILE}:1 the same bound on every rank",
    ),
    "keys": (
        """
for name, value in metrics.items():  #@ cause
    dist.all_reduce(value)  #@ call
dist.barrier()  #@ end
""",
        "Make the keys of `metrics` the same on every rank (gather them first",
    ),
    "keys by a subscript": (
        """
for step in range(steps):
    m = make()
    for k in m:  #@ cause
        dist.all_reduce(m[k])  #@ call
    dist.barrier()  #@ end
""",
        "Make the keys of `m` the same on every rank (gather them first, or fill the missing with a neutral value): "
        f"rank 1 goes less often through the loop at {FILE}:3 than the others.",
    ),
    "keys through a function": (
        """
def reduce_all(values):
    for name in sorted(values):  #@ cause
        dist.all_reduce(tensor_of(name))  #@ call
out = {"loss": 1.0}
reduce_all(out)
dist.barrier()  #@ end
""",
        "Make the keys of `values` the same on every rank",
    ),
    "list": (
        """
pending = [x for x in parts if x is not None]
for x in pending:  #@ cause
    dist.all_reduce(x)  #@ call
dist.barrier()  #@ end
""",
        "Make the items of `pending` the same on every rank",
    ),
    "list of batches": (
        """
batches = [b for b in make()]
for batch in batches:  #@ cause
    dist.all_reduce(batch)  #@ call
dist.barrier()  #@ end
""",
        "Give every rank the same number of batches in `batches` (drop_last=True",
    ),
    "start of a resumed loop": (
        """
start = load(path)["step"]
for step in range(start, 100):  #@ cause
    dist.all_reduce(x)  #@ call
dist.barrier()  #@ end
""",
        "Begin at the same step on every rank: load the same checkpoint everywhere, or broadcast `start` from rank 0",
    ),
    "counter of a resumed loop": (
        """
done = state["done"]
while done < 100:  #@ cause
    dist.all_reduce(x)  #@ call
    done += 1
dist.barrier()  #@ end
""",
        "Begin at the same step on every rank: load the same checkpoint everywhere, or broadcast `done` from rank 0",
    ),
    "generation": (
        """
def generate(ids):
    for n in range(limit):
        ids = model(ids)  #@ call
        if ids[-1] == eos:  #@ cause
            return ids
ids = generate(prompt)
dist.barrier()  #@ end
""",
        "Keep all ranks in the generation loop until the last is done: synced_gpus=True",
    ),
    "no_sync": (
        """
tokens = 0
for micro in range(24):
    tokens += n
    boundary = tokens >= 16  #@ cause
    with contextlib.nullcontext() if boundary else model.no_sync():  #@ why
        model(x).sum().backward()  #@ call
    if boundary:
        tokens = 0
dist.barrier()  #@ end
""",
        "Leave no_sync() in the same micro-batch on every rank",
    ),
    "no_sync of FSDP": (
        """
for micro in range(24):
    seen += len(batch)  #@ cause
    model.set_requires_gradient_sync(seen > 100)  #@ why
    model(x).sum().backward()  #@ call
dist.barrier()  #@ end
""",
        "Leave no_sync() in the same micro-batch on every rank",
    ),
}


@pytest.mark.parametrize("name", LOOPS)
def test_what_ends_a_loop_on_some_ranks_is_the_advice(name: str) -> None:
    """The suggestion begins with the cure of this cause, and the line that caused it is shown."""
    text, cure = LOOPS[name]
    p = program(text)
    d = uneven(p)
    assert d.kind is Kind.UNEVEN_ITERATIONS
    assert d.suggestion.startswith(cure), d.suggestion
    shown = {site.line for site in d.causes}
    assert {p.lines[m] for m in ("cause", "why") if m in p.lines and (m == "why" or name != "no_sync of FSDP")} <= shown


def test_a_loop_of_a_fixed_length_does_not_generate() -> None:
    """A function may be named `sample`, and still go round three times on every rank: no answer ends early there."""
    p = program("""
def sample():
    for _ in range(3):
        model(x)  #@ call
sample()
dist.barrier()  #@ end
""")
    assert "synced_gpus" not in uneven(p).suggestion


def test_a_clock_behind_two_names() -> None:
    """The condition reads a flag, which reads a number, which reads the clock."""
    p = program("""
while not stop:  #@ cause
    dist.all_reduce(x)  #@ call
    spent = time.monotonic() - began
    stop = spent > limit
dist.barrier()  #@ end
""")
    d = uneven(p)
    assert d.suggestion.startswith("Let rank 0 decide on the time limit and broadcast it")
    assert [site.line for site in d.causes] == [p.cause]


def test_a_collective_under_an_if_that_was_not_made_agrees_on_nothing() -> None:
    """The records show no call at the line of the all_reduce: the flag stays each rank's own."""
    p = program("""
for batch in loader:
    dist.all_reduce(x)  #@ call
    if args.sync:
        dist.all_reduce(bad)
    if bad.item() > 0:  #@ cause
        break
dist.barrier()  #@ end
""")
    d = uneven(p)
    assert d.suggestion.startswith("Agree on `bad.item() > 0` before any rank leaves the loop")
    assert p.cause in [site.line for site in d.causes]


AGREED = {
    "tensor": """
for batch in loader:  #@ cause
    dist.all_reduce(x)  #@ call
    dist.all_reduce(bad)
    if bad.item() > 0:
        break
dist.barrier()  #@ end
""",
    "flag through a name": """
for batch in loader:  #@ cause
    dist.all_reduce(x)  #@ call
    dist.broadcast(flag, src=0)
    stop = flag.item()
    if stop:
        break
dist.barrier()  #@ end
""",
    "function": """
def any_rank(value):
    flag = torch.tensor(value)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag)
for batch in loader:  #@ cause
    dist.all_reduce(x)  #@ call
    if any_rank(loss > 3):
        break
dist.barrier()  #@ end
""",
    "number of the step": """
for step, batch in enumerate(loader):  #@ cause
    dist.all_reduce(x)  #@ call
    if step >= most:
        break
dist.barrier()  #@ end
""",
}


@pytest.mark.parametrize("name", AGREED)
def test_an_exit_that_all_ranks_agree_on_is_not_blamed(name: str) -> None:
    """A loop is left by a collective's answer or by its count: what remains is the loader."""
    p = program(AGREED[name])
    d = uneven(p)
    assert d.suggestion.startswith("Give every rank the same number of batches in"), d.suggestion
    assert [site.line for site in d.causes] == [p.cause]


def test_a_condition_that_a_collective_has_not_decided_is_not_agreed() -> None:
    """Half of the condition is the rank's own, and a reduced gradient makes no loss alike."""
    p = program("""
for step in range(9):
    dist.all_reduce(torch.ones(4))  #@ call
    dist.all_reduce(bad)
    if bad.item() or torch.isnan(loss):  #@ cause
        break
dist.barrier()  #@ end
""")
    assert uneven(p).suggestion.startswith("Agree on `bad.item() or torch.isnan(loss)` before any rank leaves")


def test_an_exit_and_a_loader_are_both_possible() -> None:
    """Where the text does not show which of two ends the loop, neither is stated as a fact."""
    p = program("""
for batch in loader:  #@ loader
    dist.all_reduce(x)  #@ call
    if spiked(loss):  #@ exit
        break
dist.barrier()  #@ end
""")
    d = uneven(p)
    assert f"Each rank may decide it for itself at {FILE}:3. If it is not: give every rank" in d.suggestion
    assert [site.line for site in d.causes] == [p.exit, p.loader]


@pytest.mark.parametrize("start", ["start", "0 if fresh else loaded", "state['step'] + 1"])
def test_a_rank_that_counts_from_another_step(start: str) -> None:
    """Every third step evaluates, and rank 1 is at another step: the checkpoint is the cause."""
    p = program(f"""
start = load(path)
for step in range({start}, 12):  #@ loop
    dist.all_reduce(x)  #@ call
    if step % 3 == 2:  #@ every
        dist.all_gather(scores, y)  #@ evaluate
dist.barrier()
""")

    def steps(rank: int) -> list[Step]:
        first = 6 if rank == 1 else 4
        rounds = [
            [all_reduce(p.call), *([coll("all_gather", p.evaluate)] if s % 3 == 2 else [])] for s in range(first, 12)
        ]
        return [call for calls in rounds for call in calls]

    d = only(play(3, steps, sources={FILE: p.text}))
    assert d.culprits == (1,)
    assert d.suggestion.startswith("Begin at the same step on every rank: load the same checkpoint everywhere")
    assert [site.line for site in d.causes] == [p.every, p.loop]


def test_a_loop_that_begins_at_a_number_was_not_resumed() -> None:
    """All ranks begin at 0: no checkpoint is blamed."""
    p = program("""
for step in range(12):
    dist.all_reduce(x)  #@ call
    if step % 3 == 2:
        dist.all_gather(scores, y)  #@ evaluate
""")
    odd = [all_reduce(p.call)] * 4
    even = [all_reduce(p.call)] * 3 + [coll("all_gather", p.evaluate)]
    assert "checkpoint" not in only(play(3, lambda r: odd if r == 1 else even, sources={FILE: p.text})).suggestion


def test_a_counted_no_sync_is_not_blamed() -> None:
    """Where the micro-batches are counted alike on all ranks, no_sync() is not the cause."""
    p = program("""
for micro in range(rounds):
    last = (micro + 1) % 4 == 0
    with contextlib.nullcontext() if last else model.no_sync():
        model(x).sum().backward()  #@ call
dist.barrier()  #@ end
""")
    assert "no_sync" not in uneven(p).suggestion


def test_without_the_program_the_advice_is_that_of_the_kind() -> None:
    """Records alone do not say what ended the loop."""
    p = program("for i in x:\n    dist.all_reduce(x)  #@ call\ndist.barrier()  #@ end")
    assert uneven(replace(p, text="")).suggestion.startswith("Give every rank the same number of iterations")


ORDERS = {
    "set that some sort": (
        "plan = list(set(tables) & allowed)  #@ cause\nif fixed: plan = sorted(plan)",
        "plan",
        "hash randomisation",
    ),
    "set of a function": (
        "def make():\n    return {t.name for t in tables}  #@ cause\nplan = make()",
        "plan",
        "hash randomisation",
    ),
    "set": ("plan = list(set(tables) & allowed)  #@ cause", "plan", "hash randomisation"),
    "set of keys": ("plan = tables.keys() - done.keys()  #@ cause", "plan", "hash randomisation"),
    "listing": ("plan = [f for f in os.listdir(folder) if f.endswith('.pt')]  #@ cause", "plan", "on each host"),
}


@pytest.mark.parametrize("name", ORDERS)
def test_operands_out_of_a_set_are_to_be_sorted(name: str) -> None:
    """The line at which the order arises is shown, and sorted() is the cure."""
    line, shown, why = ORDERS[name]
    p = program(f"{line}\nfor name in plan:\n    dist.all_reduce(x[name])  #@ call")
    d = only(play(4, lambda r: [all_reduce(p.call, shape=(8 if r < 2 else 16,))], sources={FILE: p.text}))
    assert d.kind is Kind.SHAPE_MISMATCH
    assert d.suggestion.startswith(f"Sort what the loop runs over: `sorted({shown})`")
    assert why in d.suggestion
    assert p.cause in {site.line for site in d.causes}


def test_operands_that_agree_up_to_order_are_said_to() -> None:
    """The calls on record are the same on all ranks, but for their order."""
    p = program("plan = make(set(tables))\nfor name in set(plan):\n    dist.all_reduce(x[name])  #@ call")
    sizes = {0: (8, 16, 32), 1: (16, 32, 8)}
    evidence = play(
        2, lambda r: [all_reduce(p.call, shape=(n,), is_async=True) for n in sizes[r]], sources={FILE: p.text}
    )
    found = diagnose(evidence)
    assert "The ranks make the same calls in different orders." in found[0].explanation


def test_sorted_operands_are_not_blamed() -> None:
    """A plan that was sorted has one order."""
    p = program("plan = sorted(set(tables))\nfor name in plan:\n    dist.all_reduce(x[name])  #@ call")
    d = only(play(4, lambda r: [all_reduce(p.call, shape=(8 if r < 3 else 16,))], sources={FILE: p.text}))
    assert "sorted" not in d.suggestion


def test_a_call_in_a_join_block_is_to_be_moved_out() -> None:
    """DDP's join() shadows the model's own calls only: the metric's line is shown."""
    p = program("""
with model.join():  #@ joined
    for batch in loader:
        loss = model(batch)  #@ call
        dist.all_reduce(loss)  #@ metric
dist.barrier()  #@ end
""")

    def steps(rank: int) -> list[Step]:
        rounds = [all_reduce(p.call, shape=(18,)), all_reduce(p.metric, shape=(1,))]
        return rounds * 2 if rank == 1 else [*rounds, *[all_reduce(p.joined, shape=(18,), inside=("join",))] * 2]

    d = only(play(3, steps, sources={FILE: p.text}))
    assert d.suggestion.startswith(f"Move the call at {FILE}:4 out of join()")
    assert [site.line for site in d.causes] == [p.metric]


def test_crossed_messages_on_nccl_need_one_batch() -> None:
    """isend does not help on NCCL; on gloo it does."""
    cycles = {
        device: only(play(2, lambda r, d=device: [send(1 - r, 3, device=d), recv(1 - r, 4, device=d)]))  # type: ignore[misc]
        for device in ("cuda", "cpu")
    }
    assert cycles["cuda"].suggestion.startswith("Start both with batch_isend_irecv(")
    assert "isend / irecv or batch" in cycles["cpu"].suggestion


def test_both_lists_of_two_new_group_calls_are_told() -> None:
    """Each half makes its own group: the advice is to make both, on every rank."""
    halves = {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}
    d = only(play(4, lambda r: [coll("new_group", 3, new_ranks=halves[r])]))
    assert d.kind is Kind.GROUP_CREATION_ORDER
    assert d.suggestion.startswith("Call new_group([0, 1]), then new_group([2, 3]) on every rank of the world")


def test_a_root_that_differs_is_a_global_rank() -> None:
    """In a subgroup, src is a rank of the world; group_src is one of the group."""
    half = group(2, 3)
    d = only(play(4, lambda r: [coll("broadcast", 3, half, root=r)] if r > 1 else []))
    assert d.kind is Kind.ROOT_MISMATCH
    assert "global ranks, also in a subgroup (group_src=0" in d.suggestion
