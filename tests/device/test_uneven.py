"""Unknown choices of experts and lengths of sequences are drawn by --routing and --lengths."""

from __future__ import annotations

import inspect
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from distsim.debug.report.console import Console
from distsim.errors import UsageError
from distsim.report.summary import Summary
from distsim.sim import Outcome, RunRequest, run_program, simulate
from distsim.text.distributions import lengths_of, routing_of

EXPERTS, TOP_K, TOKENS = 8, 2, 64


@pytest.mark.parametrize(
    ("text", "rows", "bins", "top_k", "counts"),
    [
        ("uniform", 64, 8, 2, [16] * 8),
        ("uniform", 3, 4, 2, [2, 2, 1, 1]),
        ("worst", 64, 4, 2, [64, 64, 0, 0]),
        ("zipf:1", 22, 3, 1, [12, 6, 4]),
        ("zipf:5", 10, 3, 2, [10, 9, 1]),  # nothing is chosen twice by one row
        ("measured:8,4,2,2", 16, 4, 1, [8, 4, 2, 2]),
        ("measured:1,0,0,0", 16, 4, 2, [16, 6, 5, 5]),
        ("measured:1,2", 12, 3, 1, [4, 4, 4]),
    ],
)  # fmt: skip
def test_rows_are_spread_by_the_distribution(
    text: str, rows: int, bins: int, top_k: int, counts: list[int], tmp_path: Path
) -> None:
    """The sum is right, no expert gets more than all rows, and the shares are those of the distribution."""
    if text.startswith("measured:"):
        file = tmp_path / "counts.csv"
        file.write_text(text.removeprefix("measured:"))
        text = f"measured:{file}"
    drawn = routing_of(text).counts(rows, bins, top_k)
    assert sorted(drawn, reverse=True) == counts or drawn == counts
    assert sum(drawn) == rows * top_k


def test_lengths_have_the_mean_that_was_asked_for(tmp_path: Path) -> None:
    """Lengths are within the batch, and their mean is that of the distribution where nothing is cut off."""
    drawn = lengths_of("lognormal:700:0.5").draw(20_000, 1 << 20, 0)
    assert sum(drawn) / len(drawn) == pytest.approx(700, rel=0.02)
    assert max(lengths_of("lognormal:700:0.5").draw(1000, 512, 0)) == 512
    (tmp_path / "lengths").write_text("[3, 5, 5]")
    assert set(lengths_of(str(tmp_path / "lengths")).draw(100, 8, 0)) == {3, 5}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"routing": "zipf"}, "--routing: expected uniform, zipf:1.2, measured:FILE or worst, got 'zipf'"),
        ({"routing": "zipf:-1"}, "got 'zipf:-1'"),
        (
            {"routing": "measured:nofile"},
            "expected a file of numbers (the rows of an expert), got nofile: No such",
        ),
        ({"routing": f"measured:{__file__}"}, "expected numbers, the rows of an expert, got "),
        ({"lengths": "lognormal:700"}, "--lengths: expected lognormal:MEAN:SIGMA such as lognormal:700:0.8, or a file"),
        ({"lengths": "nofile"}, "expected a file of numbers (the tokens of a sequence), got nofile: No such file"),
    ],
)
def test_a_wrong_distribution_is_refused_in_one_line(flags: dict[str, str], words: str) -> None:
    """What was expected, and what came."""
    with pytest.raises(UsageError) as error:
        RunRequest("train.py", **flags)  # type: ignore[arg-type]
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def _scores() -> Tensor:
    return torch.randn(TOKENS * 128, EXPERTS, device="cuda")  # more values than are known


def _by_loop(scores: Tensor) -> Tensor:
    """Count as Mixtral in transformers does: by the rows of each expert."""
    mask = F.one_hot(scores.topk(TOP_K).indices, EXPERTS).permute(2, 1, 0)
    return torch.tensor([torch.where(mask[expert])[1].numel() for expert in range(EXPERTS)])


def _by_map(scores: Tensor) -> Tensor:
    """Count as Megatron-LM does: by a map of tokens to experts."""
    return torch.zeros_like(scores).int().scatter(1, scores.topk(TOP_K).indices, 1).bool().sum(0)


def _by_large_map(scores: Tensor) -> Tensor:
    """Count with a map that has more numbers than are known."""
    return F.one_hot(scores.repeat(64, 1).topk(TOP_K).indices.view(-1), EXPERTS).sum(0) // 64


def _by_selection(scores: Tensor) -> Tensor:
    """Count what Megatron-LM's permutation without fused kernels selects by the map, expert after expert."""
    mask = torch.zeros_like(scores).int().scatter(1, scores.topk(TOP_K).indices, 1).bool().T.contiguous()
    experts = torch.arange(EXPERTS, device="cuda").unsqueeze(1).expand(-1, len(scores))
    assert experts.masked_select(mask).numel() == mask.nonzero().shape[0] == len(scores) * TOP_K
    return torch.tensor([mask[expert].nonzero().numel() for expert in range(EXPERTS)])


def _by_column(scores: Tensor) -> Tensor:
    """Count the rows of each expert by its column of the map."""
    mask = torch.zeros_like(scores).int().scatter(1, scores.topk(TOP_K).indices, 1).bool()
    return torch.tensor([len(scores[mask[:, expert]]) for expert in range(EXPERTS)])


COUNTS: dict[str, Callable[[Tensor], Tensor]] = {
    "bincount": lambda s: torch.bincount(s.topk(TOP_K).indices.view(-1), minlength=EXPERTS),
    "histc": lambda s: torch.histc(s.topk(TOP_K).indices.view(-1), bins=EXPERTS, min=0, max=EXPERTS),
    "one_hot": lambda s: F.one_hot(s.topk(TOP_K).indices, EXPERTS).sum((0, 1)),
    "map": _by_map,
    "selection": _by_selection,
    "column": _by_column,
    "large map": _by_large_map,
    "loop": _by_loop,
    "sort": lambda s: s.topk(TOP_K).indices.view(-1).sort().values.unique_consecutive(return_counts=True)[1],
    "argmax": lambda s: torch.bincount(s.argmax(-1), minlength=EXPERTS) * TOP_K,
    "max": lambda s: torch.bincount(s.max(-1).indices, minlength=EXPERTS) * TOP_K,
}


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("routing", ["uniform", "zipf:0.5"])
def test_every_way_to_count_has_the_drawn_counts(count: str, routing: str) -> None:
    """What a program counts by topk, argmax or max is what the distribution says, however it counts."""

    def body() -> list[int]:
        counts: list[int] = COUNTS[count](_scores()).tolist()
        return counts

    rows = TOKENS * 128
    top_k = TOP_K if count not in ("argmax", "max") else 1
    expected = [n * TOP_K // top_k for n in routing_of(routing).counts(rows, EXPERTS, top_k)]
    outcome = simulate(body, "dgx-h100:1", nproc_per_node=1, routing=routing)
    assert outcome.results[0] == pytest.approx(expected, abs=1)


def test_a_mask_as_large_as_a_routers_selects_nothing() -> None:
    """A filter of tokens has as many elements as the router of some of these rows; nobody knows what it selects."""

    def body() -> list[int]:
        torch.randn(256, EXPERTS, device="cuda").topk(TOP_K)
        tokens = torch.randn(8, 32 * EXPERTS, 16, device="cuda")
        chosen = tokens.pow(2).mean(-1) > 0.9
        return [len(tokens[chosen]), len(tokens.flatten(0, 1)[chosen.flatten()]), int(chosen[0].nonzero().numel())]

    assert simulate(body, "dgx-h100:1", nproc_per_node=1).results[0] == [0, 0, 0]


def test_a_choice_among_a_vocabulary_stays_unknown() -> None:
    """A sampled token is no choice of an expert, and neither are the smallest scores."""

    def body() -> tuple[list[int], list[int]]:
        tokens: list[int] = torch.randn(8, 50_000, device="cuda").argmax(-1).tolist()
        smallest: list[int] = torch.randn(4096, 4, device="cuda").topk(1, largest=False).indices.view(-1).tolist()
        return tokens, smallest

    tokens, smallest = simulate(body, "dgx-h100:1", nproc_per_node=1, routing="zipf:1").results[0]
    assert (set(tokens), set(smallest)) == ({0}, {0})


def _layer(x: Tensor, router: Tensor, up: Tensor, capacity: float) -> Tensor:
    """Send tokens to the ranks of their experts, multiply, and send them back."""
    size = dist.get_world_size()
    chosen = (x @ router).softmax(-1).topk(TOP_K).indices.view(-1)
    order, counts = chosen.argsort(stable=True), torch.bincount(chosen, minlength=EXPERTS)
    if capacity:
        most = int(capacity * chosen.numel() / EXPERTS)
        hot = F.one_hot(chosen, EXPERTS)
        order = order[((hot.cumsum(0) * hot).sum(1) <= most)[order]]
        counts = counts.clamp(max=most)
    coming = torch.empty_like(counts)
    dist.all_to_all_single(coming, counts)
    sent, received = counts.view(size, -1).sum(1).tolist(), coming.view(size, -1).sum(1).tolist()
    rows = _Exchange.apply(x.index_select(0, order // TOP_K), received, sent) @ up
    rows = _Exchange.apply(rows, sent, received)
    return torch.zeros_like(x).index_add(0, order // TOP_K, rows)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, received: list[int], sent: list[int]) -> Tensor:
        ctx.splits = received, sent
        out = x.new_empty(sum(received), x.shape[1])
        dist.all_to_all_single(out, x.contiguous(), received, sent)
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        received, sent = ctx.splits
        out = dy.new_empty(sum(sent), dy.shape[1])
        dist.all_to_all_single(out, dy.contiguous(), sent, received)
        return out, None, None


def mixture(capacity: float = 0.0, recomputes: bool = False) -> None:
    """Train a mixture of experts for three steps on every rank."""
    dist.init_process_group("nccl")
    torch.cuda.set_device(dist.get_rank() % 8)
    router = torch.nn.Parameter(torch.empty(1024, EXPERTS, device="cuda"))
    up = torch.nn.Parameter(torch.empty(1024, 1024, device="cuda", dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([router, up])
    for _ in range(3):
        x = torch.randn(TOKENS * 256, 1024, device="cuda", requires_grad=True)
        args = x, router, up.float(), capacity
        out = checkpoint(_layer, *args, use_reentrant=False) if recomputes else _layer(*args)
        out.sum().backward()
        optimizer.step()


def trained(routing: str, **kwargs: Any) -> Outcome:
    return simulate(mixture, "dgx-h100:1", kwargs=kwargs, routing=routing)


@pytest.mark.slow
def test_the_fullest_rank_holds_the_step() -> None:
    """What unevenness costs is reported, and agrees with a run without it; a capacity and recomputation act."""
    even, uneven, capped = trained("uniform"), trained("zipf:1.2"), trained("zipf:1.2", capacity=1.0)
    recomputed = trained("zipf:1.2", recomputes=True)
    times = [run.training.step_time_s for run in (even, uneven, capped, recomputed) if run.training is not None]
    even_s, uneven_s, capped_s, recomputed_s = (time or 0.0 for time in times)
    assert capped_s < even_s < uneven_s < recomputed_s
    assert uneven.training is not None
    assert uneven_s - uneven.training.routing_s == pytest.approx(even_s, rel=0.1)
    assert "above even routing" in _printed(uneven)
    assert "routing  even: the scores of the experts have no values" in _printed(even)


def _printed(outcome: Outcome) -> str:
    shown = io.StringIO()
    Console(file=shown, width=160).print(Summary(outcome))
    return shown.getvalue()


HEAD = """
from typing import Any
import torch
import torch.distributed as dist
from torch import Tensor
EXPERTS, TOP_K, TOKENS = 8, 2, 64
"""


@pytest.mark.slow
@pytest.mark.parametrize(("routing", "traced"), [("uniform", 3), ("zipf:1.2", 8)])
def test_a_sample_has_every_rank_that_gets_another_number_of_rows(routing: str, traced: int, tmp_path: Path) -> None:
    """Ranks with equal shares stand for each other; with unequal ones each runs itself."""
    script = tmp_path / "train.py"
    script.write_text("\n".join([HEAD, *map(inspect.getsource, (_layer, _Exchange, mixture)), "mixture()"]))
    request = RunRequest(str(script), on="dgx-h100:1", routing=routing, budget_s=0.0, sample_is_enough=True)
    outcome = run_program(request)
    assert outcome.exit_code == 0
    assert outcome.world_size - len(outcome.not_traced) == traced


def padded(seed: int) -> list[list[int]]:
    """Return the lengths of two batches of unknown tokens, each asked for twice."""
    torch.manual_seed(seed)
    batches = [torch.randn(4, 64, 8192, device="cuda").sum(-1).long() for _ in range(2)]
    lengths = [(tokens != 0).sum(1).tolist() for tokens in batches]
    assert [(64 - (tokens == 0).sum(1)).tolist() for tokens in batches] == lengths
    assert [(tokens != 0).nonzero().shape[0] for tokens in batches] == [sum(each) for each in lengths]
    return lengths


def test_lengths_of_unknown_batches_are_drawn() -> None:
    """Ranks that seed alike have the same batch, others another; each batch keeps its lengths."""

    def body() -> list[list[int]]:
        return padded(int(torch.cuda.current_device() >= 0) * (torch.distributed.get_rank() // 2))

    def ranks() -> list[list[int]]:
        dist.init_process_group("nccl")
        torch.cuda.set_device(dist.get_rank())
        return body()

    outcome = simulate(ranks, "dgx-h100:1", nproc_per_node=4, lengths="lognormal:30:0.5")
    first, second, third, _ = (outcome.results[rank] for rank in range(4))
    assert first == second != third
    assert first[0] != first[1]
    assert all(0 < length <= 64 for batch in first for length in batch)


@pytest.mark.parametrize(
    ("flags", "note"),
    [
        ({"routing": "zipf:1"}, "--routing zipf:1 has no effect"),
        ({"lengths": "lognormal:30:1"}, "--lengths lognormal:30:1 has no effect"),
    ],
)
def test_a_flag_without_effect_is_reported(flags: dict[str, str], note: str) -> None:
    """A program that asks for nothing unknown is not changed, and the report says so."""
    outcome = simulate(lambda: torch.ones(8, device="cuda").sum(), "dgx-h100:1", nproc_per_node=1, **flags)  # type: ignore[arg-type]
    assert [text for text in outcome.notes if text.startswith(note)]


def test_the_accuracy_of_a_classifier_is_not_routing() -> None:
    """A class that is chosen among few and compared with labels is no expert."""

    def body() -> None:
        model = torch.nn.Sequential(torch.nn.Linear(4096, 4096), torch.nn.Linear(4096, 10)).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            labels = torch.randint(0, 10, (512,)).cuda()
            scores = model(torch.randn(512, 4096, device="cuda"))
            torch.nn.functional.cross_entropy(scores, labels).backward()
            optimizer.step()
            best = scores.topk(5, 1).indices.t()
            best.eq(labels.view(1, -1).expand_as(best)).sum().item()
            scores.max(1).indices.eq(labels).float().mean().item()

    outcome = simulate(body, "dgx-h100:1", nproc_per_node=1)
    assert "routing  even" not in _printed(outcome)
