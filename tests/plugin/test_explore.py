"""Tests on ranks in every order of their operations."""

from __future__ import annotations

import pytest

from tests.plugin.conftest import Run

ORDERS = """
from torch.distributed.distributed_c10d import _get_default_store
"""
RACE = """
@pytest.mark.ranks(4, explore="all")
def test_race(rank):
    if rank == 0:
        came = []
        for _ in range(3):
            t = torch.zeros(1)
            dist.recv(t)
            came.append(int(t))
        assert came[-1] != 1
    else:
        dist.send(torch.ones(1) * rank, 0)
"""


def test_a_proof_is_a_line(run: Run) -> None:
    """What was proven stands in a section of its own: all classes, or that no order makes a difference."""
    result = run(
        """
@pytest.mark.ranks(4, explore="all")
def test_gather(rank):
    if rank == 0:
        for _ in range(3):
            dist.recv(torch.zeros(1))
    else:
        dist.send(torch.ones(1), 0)

@pytest.mark.ranks(4, explore="all")
def test_steps():
    for _ in range(5):
        dist.all_reduce(torch.ones(1))
"""
    )
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(
        [
            "*orders explored*",
            "test_gather: all 6 classes of orders: none fails  8 runs *",
            "test_steps: one class: no order of calls makes a difference  2 runs *",
        ]
    )


def test_a_failing_order_is_shown_in_words_and_repeats(run: Run) -> None:
    """The failure is that of one order; the string repeats it, a changed test refuses it."""
    result = run(RACE)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "rank 0: AssertionError: assert 1 != 1",
            "fails if",
            "  receive 3 of rank 0 (line 11) takes the message of rank 1 (usually rank 3)",
            "2 of 6 classes fail",
            "replay: pytest *::test_race' --distsim-replay 'x1:*",
        ]
    )
    replay = next(line for line in result.outlines if line.startswith("replay: ")).split("'")[-2]
    again = run("", "--distsim-replay", replay)
    again.assert_outcomes(failed=1)
    again.stdout.fnmatch_lines(["rank 0: AssertionError: assert 1 != 1"])
    usual = run("", "--distsim-replay", f"x1:-{replay.rpartition('-')[2]}")
    usual.assert_outcomes(passed=1)
    changed = run(RACE.replace("came[-1] != 1", "came[-1] != 1  # still"), "--distsim-replay", replay)
    changed.assert_outcomes(failed=1)
    changed.stdout.fnmatch_lines(["--distsim-replay: expected a string of this test (hash *"])
    hashed = replay.rpartition("-")[2]
    for wrong, line in (
        ("y1:", "expected a string that an exploration prints, such as *"),
        ("x9:", "expected version x1, got x9: explore again *"),
        (f"x1:0=7.0-{hashed}", "step 0: expected an operation that is possible there, got 7.0; possible: *"),
        (f"x1:999=1.0-{hashed}", "step 999: expected 1.0, but the run ended after *"),
    ):
        run(RACE, "--distsim-replay", wrong).stdout.fnmatch_lines([f"--distsim-replay: {line}"])
    without = run(RACE, "--distsim-replay", "x1:")
    without.stdout.fnmatch_lines(["--distsim-replay: expected the whole string that an exploration prints, with the*"])


def test_what_has_no_turn_is_no_proof(run: Run) -> None:
    """A lock that is tried, a job that is asked whether it is done, a limit in a loop that waits again."""
    result = run(
        """
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from torch.distributed.distributed_c10d import _get_default_store

@pytest.mark.ranks(1, explore="all")
def test_tried():
    lock = threading.Lock()
    thread = threading.Thread(target=lock.acquire, args=(False,))
    thread.start()
    thread.join()

@pytest.mark.ranks(2, explore="all")
def test_callback():
    work = dist.all_reduce(torch.ones(1), async_op=True)
    work.get_future().then(lambda future: future.value())
    work.wait()

@pytest.mark.ranks(2, explore="all")
def test_steps():
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()

@pytest.mark.ranks(1, explore="all")
def test_job():
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).done()

@pytest.mark.ranks(2, explore="all", faults_explored=("timeout",))
def test_again(rank):
    store = _get_default_store()
    while rank == 1:
        try:
            store.wait(["x"], timedelta(seconds=5))
            break
        except dist.DistStoreError:
            pass
    if rank == 0:
        store.set("x", "1")

@pytest.mark.ranks(1, explore="all")
def test_waited():
    event = threading.Event()
    thread = threading.Thread(target=event.set)
    thread.start()
    event.wait()
    thread.join()
"""
    )
    result.assert_outcomes(passed=6)
    text = " ".join(" ".join(result.outlines).split())
    for expected in (
        "test_tried: explored in part: one class of orders, none fails",
        "the program tries a lock",
        "test_callback: explored in part: one class of orders, none fails",
        "the program adds a callback to a future",
        "test_steps: one class: no order of calls makes a difference",
        "test_job: explored in part",
        "the program asks whether a job is done",
        "test_again: explored in part: 3 classes of orders, none fails",
        "which strikes 2 times",
        "test_waited: all 2 classes of orders: none fails",
    ):
        assert expected in text


def test_state_of_the_module_and_of_fixtures_is_put_back(run: Run) -> None:
    """A list that ranks append to, a fixture's dict and files of tmp_path begin anew in each run."""
    result = run(
        ORDERS
        + """
SEEN = []

@pytest.fixture
def box():
    return {}

class Held:
    ranks = []

@pytest.mark.ranks(3, explore="all")
def test_state(rank, box, tmp_path):
    SEEN.append(rank)
    Held.ranks.append(rank)
    assert len(Held.ranks) <= 3
    box[rank] = 1
    file = tmp_path / f"{rank}"
    assert not file.exists()
    file.write_text("1")
    assert len(SEEN) <= 3 and len(box) <= 3
    _get_default_store().add("n", 1)
"""
    )
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["test_state: all 6 classes of orders: none fails *"])


def test_a_test_that_does_not_repeat_is_no_proof(run: Run) -> None:
    """What outlives a run, and cannot be put back, is noticed by the second run."""
    result = run(
        ORDERS
        + """
import itertools
NUMBERS = itertools.count()

@pytest.mark.ranks(2, explore="all")
def test_numbers(rank):
    _get_default_store().set(f"{next(NUMBERS)}", "1")
"""
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            'not repeatable: step 1 of run 2 did not repeat: rank 0 did `set "2"`, where rank',
            '0 did `set "0"` before: test_a_test_that_does_not_repeat_is_no_proof.py\'s',
            "NUMBERS outlives a run",
            "Make what the ranks change in the test itself.",
        ]
    )


def test_a_space_that_is_too_large_says_how_large_it_is(run: Run) -> None:
    """With a budget as much as fits; all of it is refused after one run."""
    result = run(
        """
def exchange(rank):
    for _ in range(9):
        if rank == 0:
            for _ in range(5):
                dist.recv(torch.zeros(1))
        else:
            dist.send(torch.ones(1), 0)
        dist.barrier()

@pytest.mark.ranks(6, explore=20)
def test_some(rank):
    exchange(rank)

@pytest.mark.ranks(6, explore="all")
def test_all(rank):
    exchange(rank)
"""
    )
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        [
            "explore='all': at least 5,159,780,352,000,000,000 classes, which take longer than 1 hour: expected*",
            "test_some: not exhausted: 20 runs, * classes, none fails; at least*",
            "  PCT, 5 actors, 45 steps, 10 runs: a bug of 3 orderings is found with at least",
        ]
    )


def test_what_a_test_expects_of_its_orders(run: Run) -> None:
    """`always` holds in each of them, `sometimes` in one."""
    result = run(
        """
from distsim.test import always, ranks, sometimes

@ranks(3, explore="all")
def test_numbers(rank):
    number = dist.distributed_c10d._get_default_store().add("n", 1)
    sometimes(rank == 0 and number == 3, "rank 0 is last")
    sometimes(number == 4, "a fourth")

@ranks(2, explore="all")
def test_order(rank):
    number = dist.distributed_c10d._get_default_store().add("n", 1)
    always(number == rank + 1, "in the order of ranks")
"""
    )
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        [
            "*AssertionError: not always: in the order of ranks*",
            "1 of 2 classes fails",
            "  never true: sometimes(..., 'a fourth')",
        ]
    )


def test_a_death_at_each_call(run: Run) -> None:
    """Ranks that wait with a limit may fail; ranks that wait for ever may not."""
    result = run(
        ORDERS
        + """
from datetime import timedelta

@pytest.mark.ranks(2, explore="all", faults_explored=("kill",))
def test_limit(rank):
    store = _get_default_store()
    store.set(f"{rank}", "1")
    store.wait([f"{1 - rank}"], timedelta(seconds=1))

@pytest.mark.ranks(2, explore="all", faults_explored=("kill",))
def test_poll(rank):
    store = _get_default_store()
    store.set(f"{rank}", "1")
    while not store.check([f"{1 - rank}"]):
        pass
"""
    )
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["  rank 0 dies before its call number 1", "*a fault struck at each of 4 places*"])


def test_two_deaths_and_a_lost_store(run: Run) -> None:
    """Pairs of a few places are tried as well; a store is lost at each call of rank 0, in each order of the others."""
    result = run(
        ORDERS
        + """
from datetime import timedelta

@pytest.mark.ranks(3, explore="all", faults_explored=("kill",))
def test_one_may_die(rank):
    store = _get_default_store()
    store.set(f"{rank}", "1")
    others = 0
    for other in {0, 1, 2} - {rank}:
        try:
            store.wait([f"{other}"], timedelta(seconds=1))
            others += 1
        except dist.DistStoreError:
            pass
    assert others

@pytest.mark.ranks(2, explore="all", faults_explored=("store-loss",))
def test_needs_its_store(rank):
    store = _get_default_store()
    store.set(f"{rank}", "1")
    try:
        store.get(f"{rank}")
    except Exception:
        raise AssertionError("lost")
"""
    )
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(["  rank ? dies before its call number 1", "  rank ? dies before its call number 1"])
    result.stdout.fnmatch_lines(["  the stores are lost before call number 1 of rank 0"])


def test_what_is_right_after_a_fault(run: Run) -> None:
    """An error of a rank that goes on, or what a function says of the outcome."""
    result = run(
        ORDERS
        + """
def right(outcome):
    return len(outcome.failures) == 0

KILL = dict(explore="all", faults_explored=("kill",))

def body(rank):
    _get_default_store().set(f"{rank}", "1")

@pytest.mark.ranks(2, **KILL)
def test_free(rank):
    body(rank)

@pytest.mark.ranks(2, expect_fault="error", **KILL)
def test_error(rank):
    body(rank)

@pytest.mark.ranks(2, expect_fault="error", **KILL)
def test_waits(rank):
    body(rank)
    dist.barrier()

@pytest.mark.ranks(2, expect_fault=right, **KILL)
def test_function(rank):
    body(rank)

@pytest.mark.ranks(2, expect_fault=lambda outcome: False, **KILL)
def test_never(rank):
    body(rank)
"""
    )
    result.assert_outcomes(passed=3, failed=2)
    text = "\n".join(result.outlines)
    assert "expect_fault: expected an error of a rank that goes on" in text
    assert "expect_fault: the function returned False" in text


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ('2, explore="some"', "ranks: explore: expected 'all', a number of runs (200) or a time ('60s'), got 'some'"),
        ('2, explore="all", on="gloo"', "ranks: explore: expected on='sim' or on=[[]'sim', 'gloo'], got on='gloo'*"),
        ('2, explore="all", faults_explored="rain"', "ranks: explore: expected some of kill, store-loss, timeout*"),
        ('2, faults_explored=("kill",)', "ranks: faults_explored: expected explore='all' beside it"),
        ('2, explore="all", expect_fault="error"', "ranks: expect_fault: expected 'error' or a function of the*"),
    ],
)
def test_bad_arguments(run: Run, arguments: str, told: str) -> None:
    """One line, before anything runs."""
    result = run(f"@pytest.mark.ranks({arguments})\ndef test_it(): pass\n")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([told])


def test_a_whole_run_may_be_explored(run: Run) -> None:
    """The flag is for tests without a budget of their own."""
    text = RACE.replace(', explore="all"', "")
    run(text).assert_outcomes(passed=1)
    explored = run(text, "--distsim-explore", "10")
    explored.assert_outcomes(failed=1)
    explored.stdout.fnmatch_lines(["2 of 6 classes fail"])


def test_hypothesis_draws_the_order_with_the_data(run: Run) -> None:
    """The smallest data and the fewest unusual choices, in one shrink."""
    result = run(
        """
from hypothesis import given, settings, strategies as st

@pytest.mark.ranks(3, explore=100)
@settings(max_examples=100, database=None, derandomize=True)
@given(number=st.integers(0, 20))
def test_draw(rank, number):
    if rank == 0:
        came = []
        for _ in range(2):
            t = torch.zeros(1)
            dist.recv(t)
            came.append(int(t))
        assert came == [1, 2] or number < 7
    else:
        dist.send(torch.ones(1) * rank, 0)
"""
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["*number=7,", "  receive 1 of rank 0 (line 15) takes the message of rank 2 (usually rank 1)"]
    )


def test_each_example_of_hypothesis_is_explored(run: Run) -> None:
    """With "all", one line counts the examples; a failing one is shown with its order."""
    text = """
from hypothesis import given, settings, strategies as st

@pytest.mark.ranks(3, explore="all")
@settings(max_examples=6, database=None, derandomize=True)
@given(number=st.integers(0, 9))
def test_draw(rank, number):
    if rank == 0:
        came = []
        for _ in range(2):
            t = torch.zeros(1)
            dist.recv(t)
            came.append(int(t))
        assert came == [1, 2] or number < LEAST
    else:
        dist.send(torch.ones(1) * rank, 0)
"""
    passed = run(text.replace("LEAST", "10"))
    passed.assert_outcomes(passed=1)
    passed.stdout.fnmatch_lines(["test_draw: 6 examples of up to 2 classes of orders: 6 proven, none fails"])
    failed = run(text.replace("LEAST", "3"))
    failed.assert_outcomes(failed=1)
    failed.stdout.fnmatch_lines(
        ["    number=3,", "fails if", "  receive 1 of rank 0 (line 15) takes *", "1 of 2 classes*"]
    )


def test_a_deadlock_of_threads_names_both_locks(run: Run) -> None:
    """The lock that a thread never got counts as if it came last."""
    result = run(
        """
import threading

@pytest.mark.ranks(1, explore="all")
def test_locks():
    first, second = threading.Lock(), threading.Lock()

    def take(one, other):
        with one:
            with other:
                pass

    threads = [threading.Thread(target=take, args=pair) for pair in ((first, second), (second, first))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["  rank 0, thread 2: lock (line 12)  before  rank 0, thread 1: lock (line 13)", "1 of 3 classes fails"]
    )
