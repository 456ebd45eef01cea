"""Checks of numbers that nobody knows pass, and are counted; what selects rows is not led by them."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import distsim
from distsim.sim.device.operators import reading


def unknown(numel: int) -> Tensor:
    """So many numbers on the GPU that nobody knows."""
    return torch.randn(100_000, device="cuda")[:numel].clone()


def plain(x: Tensor) -> list[Any]:
    flags = torch.isfinite(x)
    flags &= x > 0
    flags.logical_and_(~x.isnan())
    return [
        bool(torch.isfinite(x).all()), bool((~torch.isfinite(x)).any()), bool(x.isnan().any()), bool(x.isinf().any()),
        bool((x > 0).all()), bool((x <= 1).all()), bool((x < 0).any()), bool((x == float("inf")).any()),
        bool(flags.all()), torch.allclose(x, x + 1), torch.equal(x, x * 2), bool((x < x + 1).all()),
        bool((x < x + 1).any()), bool(torch.isfinite(x).cpu().all()), bool((x.abs() > 0).view(-1).all(0)),
    ]  # fmt: skip


PLAIN = [True, False, False, False, True, True, False, False, True, True, True, True, False, True, True]
"""Of several; of one number that is compared with another the placeholder says more."""


@pytest.mark.parametrize("numel", [4, 80_000])
def test_checks_pass(numel: int) -> None:
    """What a program asks before it raises, of few and of many."""
    outcome = distsim.simulate(lambda: plain(unknown(numel)), "dgx-h100:1", nproc_per_node=1)
    assert outcome.results == [PLAIN]
    assert outcome.training is not None


@pytest.mark.parametrize("numel", [4, 80_000, 2_000_000])
def test_a_write_ends_the_guess(numel: int) -> None:
    """What is written to a part of the truths is no longer what was guessed of all, and what a program filled itself is
    no check."""

    def written() -> list[bool]:
        first, second = torch.isfinite(unknown(4)), torch.isfinite(unknown(4))
        first[1:] = False
        second.zero_()
        third = torch.isfinite(torch.randn(numel, device="cuda"))
        third.fill_(False)
        zeros, floats = torch.zeros(numel, dtype=torch.bool, device="cuda"), torch.zeros(numel, device="cuda")
        return [bool(first.any()), bool(second.any()), bool(third.all()), bool(zeros.all()), bool(floats.any())]

    assert distsim.simulate(written, "dgx-h100:1", nproc_per_node=1).results == [[False] * 5]


@pytest.mark.parametrize("numel", [4, 80_000])
def test_truths_written_in_place(numel: int) -> None:
    """As out of place: `logical_not_`, `&=`, `|=`."""

    def asked() -> list[bool]:
        x = unknown(numel)
        inverse, both, one = x > 0, x > 0, x < 0
        inverse.logical_not_()
        both &= x < 0
        one |= x > 0
        return [bool(inverse.all()), bool(both.all()), bool(one.all())]

    assert distsim.simulate(asked, "dgx-h100:1", nproc_per_node=1).results == [[False, False, True]]


def test_a_generation_goes_on_to_its_cap() -> None:
    """`done |= token == end` is never true of tokens that nobody knows."""

    def generate() -> int:
        x = unknown(8 * 1000).view(8, 1000)
        done = torch.zeros(8, dtype=torch.bool, device="cuda")
        for number in range(50):
            done |= x.argmax(-1) == 2
            if done.all():
                return number
        return 50

    assert distsim.simulate(generate, "dgx-h100:1", nproc_per_node=1).results == [50]


def test_a_loop_that_only_a_failed_check_ends() -> None:
    """It is refused, not gone through for ever."""

    def until_it_overflows() -> None:
        x = unknown(4)
        while True:
            if not torch.isfinite(x).all():
                break
            x = x * 2

    with pytest.raises(distsim.errors.RankFailure, match="ends, at"):
        distsim.simulate(until_it_overflows, "dgx-h100:1", nproc_per_node=1)


@pytest.mark.parametrize(("low", "high"), [(-0.03, 0.03), (-2.0, 2.0), (0.01, 0.02)])
def test_a_sampler_that_rejects_ends(low: float, high: float) -> None:
    """`trunc_normal_` draws again what lies out of its bounds: a draw of unknown numbers lies within them."""

    def initialise() -> int:
        return torch.nn.init.trunc_normal_(torch.empty(512, 512, device="cuda"), std=0.01, a=low, b=high).numel()

    assert distsim.simulate(initialise, "dgx-h100:1", nproc_per_node=1).results == [512 * 512]


def test_what_is_written_over_a_draw_is_no_draw() -> None:
    """A check of a tensor that was drawn and then computed with, or written to, reads the placeholder."""

    def checks() -> list[bool]:
        x = torch.empty(100_000, device="cuda").normal_()
        before = bool((x > 0.5).any())
        x.mul_(2)
        y = torch.empty(100_000, device="cuda").uniform_(-3, 1)
        y[0] = 7
        return [before, bool((x > 0.5).any()), bool((y > 0.5).any())]

    assert distsim.simulate(checks, "dgx-h100:1", nproc_per_node=1).results == [[False, True, True]]


LIBRARY = """
def until_it_is_small(x):
    while True:
        mask = x > 0.5
        if not mask.any():
            break
        x = x * 2
"""


def test_a_librarys_loop_that_only_a_failed_check_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused with the user's line; that the same loop is come to as often as that is not."""
    monkeypatch.setattr(reading, "IN_LIBRARY", 100)
    file = tmp_path / "site-packages" / "library.py"
    file.parent.mkdir()
    file.write_text(LIBRARY)
    space: dict[str, Any] = {}
    exec(compile(LIBRARY, str(file), "exec"), space)
    until_it_is_small = space["until_it_is_small"]

    with pytest.raises(distsim.errors.RankFailure, match=r"`while` that only .*mask.any\(\) in until_it_is_small ends"):
        distsim.simulate(lambda: until_it_is_small(unknown(4)), "dgx-h100:1", nproc_per_node=1)

    def often() -> None:
        small = torch.empty(100_000, device="cuda").uniform_(0, 0.1)
        for _ in range(150):
            until_it_is_small(small)
            small.isfinite().all().item()

    distsim.simulate(often, "dgx-h100:1", nproc_per_node=1)


def test_masks_select_nothing() -> None:
    """A mask of unknown numbers selects no rows, whatever a check of it says."""

    def selected() -> list[Any]:
        x = unknown(4)
        return [x[x > 0].shape[0], (x > 0).nonzero().shape[0], x.masked_select(x > 0).shape[0]]

    assert distsim.simulate(selected, "dgx-h100:1", nproc_per_node=1).results == [[0, 0, 0]]


@pytest.mark.parametrize("numel", [4, 80_000])
def test_masks_of_finite_numbers_select_all(numel: int) -> None:
    """Statistics leave out what is infinite or NaN: unknown numbers are neither, whatever their sign."""

    def selected() -> list[Any]:
        x = unknown(numel)
        masks = [x.abs() < math.inf, x > -math.inf, torch.isfinite(x), ~x.isnan(), ~(x.isnan() | x.isinf()), x == x]
        none = [x.isnan(), x == math.inf, torch.isfinite(x) & (x > 0)]
        rows = x.view(2, -1)[torch.isfinite(x.view(2, -1))].quantile(0.5).shape
        return [x[m].shape[0] for m in (*masks, *none)] + [x.masked_select(masks[0]).shape[0], rows]

    (counts,) = distsim.simulate(selected, "dgx-h100:1", nproc_per_node=1).results
    assert counts == [numel] * 6 + [0] * 3 + [numel, ()]


D = torch.distributions
MADE: dict[str, Callable[[Tensor], Any]] = {
    "normal": lambda x: D.Normal(x, x.exp()).rsample(),
    "categorical": lambda x: D.Categorical(probs=x.softmax(-1)).sample(),
    "sampled": lambda x: D.Categorical(logits=x).log_prob(D.Categorical(logits=x).sample()),
    "bernoulli": lambda x: D.Bernoulli(probs=x.sigmoid()).log_prob((x > 0).float()),
    "uniform": lambda x: D.Uniform(x, x + 1).sample(),
    "beta": lambda x: D.Beta(x.exp(), x.exp()).rsample(),
    "dirichlet": lambda x: D.Dirichlet(x.exp()).log_prob(x.softmax(-1)),
    "several": lambda x: D.MultivariateNormal(x, scale_tril=torch.diag_embed(x.exp())).rsample(),
    "mixture": lambda x: D.MixtureSameFamily(D.Categorical(logits=x), D.Normal(x, x.exp())).log_prob(x[:, 0]),
    "squashed": lambda x: D.TransformedDistribution(D.Normal(x, x.exp()), [D.transforms.TanhTransform()]).rsample(),
    "divergence": lambda x: D.kl_divergence(D.Normal(x, x.exp()), D.Normal(x, x.exp())),
}


@pytest.mark.parametrize("rows", [1, 20_000])
def test_distributions_take_unknown_parameters(rows: int) -> None:
    """torch.distributions asks of each parameter whether it is one: a policy's are unknown, and right."""

    def shapes() -> list[Any]:
        return [made(unknown(rows * 4).view(rows, 4)).shape[0] for made in MADE.values()]

    (found,) = distsim.simulate(shapes, "dgx-h100:1", nproc_per_node=1).results
    assert found == [rows] * len(MADE)


def test_a_wrong_known_parameter_is_refused() -> None:
    """As on the cluster: it is the unknown ones that are taken for right."""

    def wrong() -> None:
        D.Normal(torch.zeros(2, device="cuda"), torch.tensor([1.0, -1.0], device="cuda"))

    with pytest.raises(distsim.errors.RankFailure, match="Expected parameter scale"):
        distsim.simulate(wrong, "dgx-h100:1", nproc_per_node=1)
