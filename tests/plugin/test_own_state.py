"""What each simulated rank has of its own, as a forked one has, and what is said of the rest."""

from __future__ import annotations

import pytest
from plugin.conftest import Run

BODIES = """
import logging, types

tool = types.SimpleNamespace(rank=None)
table = dict(rank=None)

class Base:
    rank = None

class Tool(Base):
    pass

class TestSelf:
    def setup_method(self):
        self.seen, self.number = [], 0
        self.layer = torch.nn.Linear(1, 1, bias=False)

    @pytest.mark.ranks(2, on=ARMS)
    def test_self(self, rank):
        self.number += rank
        self.seen.append(rank)
        with torch.no_grad():
            self.layer.weight.fill_(rank)
        dist.barrier()
        assert (self.number, self.seen, self.layer.weight.item()) == (rank, [rank], rank)

class TestUnit(unittest.TestCase):
    def setUp(self):
        self.seen = []

    @pytest.mark.ranks(2, on=ARMS)
    def test_unit(self):
        self.seen.append(dist.get_rank())
        dist.barrier()
        self.assertEqual(self.seen, [dist.get_rank()])

@pytest.mark.ranks(2, on=ARMS)
def test_patch(rank, monkeypatch):
    monkeypatch.setattr(tool, "rank", rank)
    monkeypatch.setattr(f"{__name__}.tool.more", rank, raising=False)
    monkeypatch.setattr(Tool, "rank", rank)
    monkeypatch.setattr(torch.nn.Linear, "rank", rank, raising=False)
    monkeypatch.setitem(table, "rank", rank)
    dist.barrier()
    assert (tool.rank, tool.more, Tool.rank, torch.nn.Linear.rank, table["rank"]) == (rank,) * 5
    with monkeypatch.context() as inner:
        inner.delattr(tool, "more")
        dist.barrier()
        assert not hasattr(tool, "more")
    dist.barrier()
    assert tool.more == rank

def test_after():
    assert (tool.rank, Tool.rank, table) == (None, None, {"rank": None})
    assert not hasattr(tool, "more") and not hasattr(torch.nn.Linear, "rank") and "rank" not in vars(Tool)

@pytest.mark.ranks(2, on=ARMS)
def test_log(rank, caplog):
    if rank:
        caplog.set_level(logging.INFO)
    logging.getLogger("some").info("info of %d", rank)
    dist.barrier()
    logging.warning("warning of %d", rank)
    dist.barrier()
    assert caplog.messages == (["info of 1"] if rank else []) + [f"warning of {rank}"]
    caplog.clear()
    assert not caplog.records
"""


def test_self_patches_and_logs_are_each_ranks_own(run: Run) -> None:
    """What a rank sets, another does not find, and the next test neither."""
    run(BODIES.replace("ARMS", "'sim'")).assert_outcomes(passed=5)


NEXT = """
import gc, sys, types, weakref

class Ring:
    def __init__(self):
        self.itself = self

def thing():
    return weakref.ref(Ring())

@pytest.mark.ranks(2)
def test_garbage(rank):
    gone = thing()
    dist.barrier()
    gc.collect()
    assert gone() is None

@pytest.mark.ranks(2)
@pytest.mark.parametrize("turn", range(3))
def test_state(rank, turn):
    assert not hasattr(torch, "kept") and not hasattr(torch.optim.SGD, "kept")
    assert "kept" not in sys.modules and torch.get_default_dtype() is torch.float32
    assert torch.rand(1).item() == torch.rand(1, generator=torch.Generator().manual_seed(torch.initial_seed())).item()
    torch.kept = torch.optim.SGD.kept = turn
    sys.modules["kept"] = types.ModuleType("kept")
    torch.set_default_dtype(torch.float64)
    dist.barrier()
    assert torch.kept == torch.optim.SGD.kept == turn

def test_plain():
    assert type(torch) is types.ModuleType and not hasattr(torch, "kept") and not hasattr(torch.optim.SGD, "kept")
    assert "kept" not in sys.modules and torch.get_default_dtype() is torch.float32
"""


def test_nothing_of_a_test_is_in_the_next(run: Run) -> None:
    """What all simulations of a process share is worked out once; what a rank has written is in none of it."""
    run(NEXT).assert_outcomes(passed=5)


@pytest.mark.soak
@pytest.mark.slow
def test_the_same_bodies_on_gloo(run: Run) -> None:
    """There it is so because each rank is a process."""
    run(BODIES.replace("ARMS", "'gloo'"), apart=True).assert_outcomes(passed=5)


def test_what_ranks_share_is_named_in_the_failure(run: Run) -> None:
    """A global or a fixture that on gloo would be each rank's own may be why a test fails on sim only."""
    result = run(
        """
seen = []

class Box:
    pass

@pytest.fixture
def box():
    return Box()

@pytest.mark.ranks(2)
def test_shared(rank, box, tmp_path):
    seen.append(rank)
    dist.barrier()
    assert seen == [rank]

@pytest.mark.ranks(2)
def test_alone(rank, tmp_path):
    assert rank == 0
"""
    )
    result.assert_outcomes(failed=2)
    text = " ".join(result.stdout.str().split())
    assert text.count("passes on gloo?") == 1
    assert "note: passes on gloo? There each rank has its own 'box' (a fixture) and 'seen' (a global);" in text


RETURNS = """
@pytest.fixture
def same(world):
    yield
    assert [value.item() for value in world.results] == [0.0, 10.0]

@pytest.fixture
def early(world):
    world.results

@pytest.mark.ranks(2, on="{on}")
def test_value(rank, same):
    return torch.tensor(10.0 * rank)

@pytest.mark.ranks(2)
def test_early(early):
    pass
"""


@pytest.mark.parametrize("on", ["sim", pytest.param("gloo", marks=[pytest.mark.soak, pytest.mark.slow])])
def test_a_fixture_finds_what_the_body_returned_on_each_rank(run: Run, on: str) -> None:
    """`world.results`, after the body; before it there is none."""
    result = run(RETURNS.format(on=on), apart=on == "gloo")
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*world.results: there is none before the body has run: ask after `yield`"])


@pytest.mark.slow
def test_a_test_that_is_over_keeps_no_world(run: Run, pytester: pytest.Pytester) -> None:
    """pytest holds its items to the end: what a test was simulated with must not hang on them."""
    pytester.makeconftest("""
        import gc
        from distsim.sim.world import World

        def worlds():
            return {id(one) for one in gc.get_objects() if type(one) is World}

        BEFORE = worlds()  # another test of this process may hold one

        def pytest_sessionfinish():
            gc.collect()
            print("\\nworlds:", len(worlds() - BEFORE))
    """)
    result = run(
        """
@pytest.mark.ranks(2)
@pytest.mark.parametrize("number", range(3))
def test_sum(number, rank):
    dist.barrier()
""",
        "-s",
        apart=True,  # other tests of this process may hold worlds of their own
    )
    result.assert_outcomes(passed=3)
    result.stdout.fnmatch_lines(["worlds: 0"])
