"""What a training costs, from figures made by hand, and where the figures come from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import distsim
from distsim.cli.dispatch import main
from distsim.cluster import load_cluster
from distsim.errors import UsageError
from distsim.report.training.section import cost_of, cost_text, saving_share
from distsim.sim.observe.metrics import Saved, Training
from distsim.text.units import count_of, format_count


def training(**facts: Any) -> Training:
    """8 GPUs, a step of 1 s with 100,000 tokens."""
    found = Training("h100", 8, 80 << 30, 0, steps=4, step_time_s=1.0, tokens_per_step=1e5)
    for name, value in facts.items():
        setattr(found, name, value)
    return found


def test_tokens_have_their_time_money_and_energy() -> None:
    """A trillion at 100,000 tokens/s; the energy is a limit where the maker's figure stands for the cluster's own."""
    planned = training(planned_tokens=1e12, price=2.5, power_w=700.0, power_is_limit=True)
    cost = cost_of(planned)
    assert cost is not None
    assert cost.seconds == 1e7
    assert cost.gpu_hours == pytest.approx(1e7 / 3600 * 8)
    assert cost.amount == pytest.approx(cost.gpu_hours * 2.5)
    assert cost.energy_kwh == pytest.approx(cost.gpu_hours * 0.7)
    assert cost_text(cost, planned) == (
        "1T tokens: 115.7 days, 22.2k GPU hours, 55.6k at 2.5 a GPU hour, at most 15.6 MWh at 700 W a GPU"
    )


def test_a_price_alone_is_told_for_a_billion_tokens() -> None:
    """Without a price and a number of tokens, or without tokens/s, there is nothing to tell."""
    cost = cost_of(training(price=2.0))
    assert cost is not None
    assert (cost.tokens, cost.energy_kwh) == (1e9, None)
    assert cost_of(training()) is None
    assert cost_of(training(price=2.0, tokens_per_step=None)) is None


def test_checkpoints_take_their_share() -> None:
    """One every 9 steps that takes a second is a tenth of the time, also of the tokens'; one alone says nothing."""
    saving = training(planned_tokens=9e5, saved=Saved(by_step={3: 1.0, 12: 1.5, 21: 0.5}))
    assert saving_share(saving) == pytest.approx(0.1)
    cost = cost_of(saving)
    assert cost is not None
    assert cost.seconds == pytest.approx(10.0)
    assert saving_share(training(saved=Saved(by_step={3: 1.0}))) is None


@pytest.mark.parametrize(
    ("text", "count"),
    [("1T", 1e12), ("300B", 3e11), ("2.5m", 2.5e6), ("1e9", 1e9), ("0", None), ("x", None), ("", None)],
)
def test_a_number_of_tokens(text: str, count: float | None) -> None:
    """With a letter or as Python writes it, above zero."""
    if count is not None:
        assert count_of(text, "--tokens", "1T") == count
        return
    with pytest.raises(UsageError, match=f"--tokens: expected a number such as 1T, got {text or 'none'}"):
        count_of(text, "--tokens", "1T")


def test_counts_are_short() -> None:
    """Three digits and a letter."""
    assert [format_count(n) for n in (1e12, 2.5e6, 999.9, 312)] == ["1T", "2.5M", "1k", "312"]


def test_a_cluster_file_says_price_and_power(tmp_path: Path) -> None:
    """They go before the GPU's own limit, and --price before them; a run tells them."""
    path = tmp_path / "mine.toml"
    path.write_text('base = "dgx-h100"\nname = "mine"\n[node.gpu]\nprice = 3\npower = 1000\n')

    def body() -> None:
        import torch

        weight = torch.nn.Parameter(torch.ones(8, device="cuda"))
        weight.sum().backward()
        torch.optim.SGD([weight]).step()

    mine = distsim.simulate(body, on=str(path), nproc_per_node=1).training
    assert mine is not None
    assert (mine.price, mine.power_w, mine.power_is_limit) == (3.0, 1000.0, False)
    theirs = distsim.simulate(body, nproc_per_node=1).training
    assert theirs is not None
    assert theirs.price_basis.startswith("list price of 2026 in USD, on demand: OCI")
    assert (mine.price_basis, theirs.power_w, theirs.power_is_limit) == ("", 700.0, True)
    listed = replace(theirs, tokens_per_step=1e5, step_time_s=1.0)
    assert cost_of(listed) is None, "a list price alone asks for nothing"
    asked = replace(listed, planned_tokens=1e9)
    cost = cost_of(asked)
    assert cost is not None
    assert "at 10 a GPU hour (list price)" in cost_text(cost, asked)


@pytest.mark.parametrize(
    ("flag", "line"),
    [
        ("--price=cheap", "--price: expected an amount of money for a GPU's hour, such as 2.5, got cheap"),
        ("--tokens=many", "--tokens: expected a number such as 1T, 300B or 1e12, got many"),
    ],
)
def test_a_mistake_is_one_line(flag: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With what was expected and what came."""
    script = tmp_path / "train.py"
    script.write_text("")
    assert main(["run", "--on", "dgx-h100:1", flag, str(script)]) == 2
    assert capsys.readouterr().err.strip() == f"distsim: error: {line}"


@pytest.mark.parametrize(
    ("fabric", "nodes", "warns"),
    [
        ("oversubscription = 4", 8, True),
        ("oversubscription = 4", 64, False),
        ("oversubscription = 4\nnodes_per_leaf = 8", 8, False),
        ("spines = 2", 8, False),
    ],
)
def test_an_oversubscription_without_effect_is_told(fabric: str, nodes: int, warns: bool, tmp_path: Path) -> None:
    """Where all hosts are under one leaf, whose size the file does not say."""
    path = tmp_path / "mine.toml"
    path.write_text(f'base = "dgx-h100"\nname = "mine"\n[fabric]\nkind = "leaf-spine"\n{fabric}\n')
    warnings = load_cluster(f"{path}:{nodes}").warnings
    assert len(warnings) == warns
    assert not warns or "fabric.oversubscription 4 has no effect: all 8 hosts are under one leaf" in warnings[0]
