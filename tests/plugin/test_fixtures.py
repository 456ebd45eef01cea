"""Fixtures and kinds of tests that pytest users bring along."""

from __future__ import annotations

from plugin.conftest import Run


def test_capsys_is_each_ranks_own(run: Run) -> None:
    """It holds what this rank printed; what nobody reads is shown under the failure as ever."""
    result = run(
        """
import sys

@pytest.mark.ranks(3)
def test_print(rank, capsys):
    print("hello", rank)
    print("careful", rank, file=sys.stderr)
    dist.barrier()
    assert capsys.readouterr() == (f"hello {rank}\\n", f"careful {rank}\\n")
    assert capsys.readouterr().out == ""

@pytest.mark.ranks(2)
def test_left(rank, capsys):
    print("left by", rank)
    with capsys.disabled():
        print("not kept by", rank)
    assert "not kept" not in capsys.readouterr().out
    print("last word of", rank)
    assert False
"""
    )
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*Captured stdout*", "[[]0] not kept by 0", "[[]0] last word of 0"])


def test_fixtures_that_mean_nothing_on_a_rank_are_refused_by_name(run: Run) -> None:
    """With what to use instead; in a test without ranks they are pytest's."""
    result = run(
        """
@pytest.mark.ranks(2)
def test_fd(capfd):
    pass

@pytest.mark.ranks(2)
def test_property(record_property):
    pass

def test_plain(capfd, record_property):
    print("x")
    assert capfd.readouterr().out == "x\\n"
"""
    )
    result.assert_outcomes(passed=1, failed=2)
    result.stdout.fnmatch_lines(
        ["fixture 'capfd'*capsys is each rank's own", "fixture 'record_property'*use it in a fixture"]
    )


def test_tmp_path_monkeypatch_and_the_users_own(run: Run) -> None:
    """One folder for all ranks, an environment for each, fixtures of a conftest file once for all."""
    result = run(
        """
import os

@pytest.fixture
def seven():
    return 7

@pytest.mark.ranks(2)
def test_one(rank, tmp_path, monkeypatch, caplog, seven, request):
    (tmp_path / str(rank)).write_text("x")
    monkeypatch.setenv("MINE", str(rank))
    dist.barrier()
    assert len(list(tmp_path.iterdir())) == 2 and seven == 7
    assert os.environ["MINE"] == str(rank)
    assert request.getfixturevalue("seven") == 7
    with pytest.raises(ValueError, match="x"):
        raise ValueError("x")

def test_after():
    assert "MINE" not in os.environ
"""
    )
    result.assert_outcomes(passed=2)


def test_a_failing_subtest_fails_its_rank(run: Run) -> None:
    """And says which it was, with unittest's subTest and with pytest's fixture."""
    result = run(
        """
class TestUnit(unittest.TestCase):
    @pytest.mark.ranks(2)
    def test_parts(self):
        for part in range(3):
            with self.subTest("step", part=part):
                self.assertTrue(part < 2 or dist.get_rank() == 0)

    def test_plain(self):
        with self.subTest(part=1):
            pass
"""
    )
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["rank 1: AssertionError: False is not true", "E*in the subtest [[]step[]] (part=2)"])


def test_async_bodies_run_in_virtual_time(run: Run) -> None:
    """An hour of `asyncio.sleep` takes none; what fails after it is told as of any body."""
    result = run(
        """
import asyncio, time

@pytest.mark.ranks(2)
async def test_async(rank):
    begun = time.monotonic()
    await asyncio.gather(asyncio.sleep(3600), asyncio.sleep(1800))
    assert 3600 <= time.monotonic() - begun < 3601
    dist.barrier()
    assert rank == 0
"""
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["rank 1: AssertionError: assert 1 == 0"])


def test_a_model_from_a_fixture_is_each_ranks_own(run: Run) -> None:
    """And its optimizer is that model's; the fixture's own object stays as it was made. Other objects are shared."""
    result = run(
        """
@pytest.fixture
def model():
    torch.manual_seed(0)
    return torch.nn.Linear(2, 1)

@pytest.fixture
def parts(model):
    return {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "data": [torch.ones(1, 2)]}

seen = []

@pytest.mark.ranks(2)
def test_train(rank, model, parts):
    seen.append(model)
    before = model.weight.clone()
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    parts["data"][0] *= rank + 1
    wrapped(parts["data"][0]).sum().backward()
    parts["optimizer"].step()
    assert torch.allclose(model.weight, before - 0.15)
    dist.barrier()
    assert seen[0] is not seen[1]
"""
    )
    result.assert_outcomes(passed=1)


def test_a_scheduler_steps_its_ranks_optimizer(run: Run) -> None:
    """Each rank sees the rate of its own steps, without torch's warning; a gradient from the fixture is there, too."""
    result = run(
        """
@pytest.fixture
def model():
    model = torch.nn.Linear(2, 1, bias=False)
    model(torch.ones(1, 2)).sum().backward()
    return model

@pytest.fixture
def opt(model):
    return torch.optim.SGD(model.parameters(), lr=1.0)

@pytest.fixture
def sched(opt):
    return torch.optim.lr_scheduler.StepLR(opt, 1, gamma=0.5)

@pytest.mark.ranks(2)
def test_rate(rank, model, opt, sched):
    before = model.weight.detach().clone()
    opt.step()
    assert torch.allclose(model.weight, before - 1.0)
    for _ in range(rank + 1):
        sched.step()
    dist.barrier()
    assert opt.param_groups[0]["lr"] == 0.5 ** (rank + 1)
""",
        "-Werror:Seems like",
    )
    result.assert_outcomes(passed=1)


def test_a_fixture_that_cannot_be_copied_is_refused_by_name(run: Run) -> None:
    """Simulated ranks never share a model in silence because of what lies beside it."""
    result = run(
        """
import threading

@pytest.fixture
def model():
    return torch.nn.Linear(2, 1)

@pytest.fixture
def doubled(model):
    return model.weight * 2

@pytest.fixture
def parts(model):
    return [model, threading.Lock()]

@pytest.mark.ranks(2)
def test_computed(model, doubled): pass

@pytest.mark.ranks(2)
def test_locked(model, parts): pass
"""
    )
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(
        [
            "fixture 'doubled': expected a Tensor that can be copied for each simulated rank, got a result of tensors"
            " that require grad: compute it in the body, or detach() it in the fixture",
            "fixture 'parts': expected a list that can be copied *, got TypeError: *lock*; make it in the body",
        ]
    )


def test_xfail_knows_what_a_rank_raised(run: Run) -> None:
    """`raises=` is held against the exception of every rank; a hang is none."""
    result = run(
        """
@pytest.mark.xfail(raises=LookupError)
@pytest.mark.ranks(2)
def test_known(rank):
    if rank:
        raise KeyError("known")

@pytest.mark.xfail(raises=OSError)
@pytest.mark.ranks(2)
def test_other(rank):
    raise KeyError("other")

@pytest.mark.xfail(raises=KeyError)
@pytest.mark.ranks(2)
def test_one_of_two(rank):
    raise ValueError("new") if rank else KeyError("known")

@pytest.mark.xfail(raises=KeyError)
@pytest.mark.ranks(2)
def test_hang(rank):
    if rank:
        dist.barrier()
"""
    )
    result.assert_outcomes(xfailed=1, failed=3)


def test_a_debugger_stops_the_clock(run: Run) -> None:
    """Whoever thinks at a prompt in a rank is not a rank that is stuck."""
    result = run(
        """
import time

@pytest.fixture
def real_clock(real=time.perf_counter):
    return real

@pytest.mark.ranks(2, host_timeout_s=0.3, timeout_s=0.4)
def test_prompt(rank, real_clock, request):
    request.config.hook.pytest_enter_pdb(config=request.config, pdb=None)
    until = real_clock() + 0.8
    while real_clock() < until:
        pass
    dist.barrier()
"""
    )
    result.assert_outcomes(passed=1)
