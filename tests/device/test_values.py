"""What is known of the values on simulated GPUs: all with `data="real"`, else placeholders that are counted."""

from __future__ import annotations

import io
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from torch import nn

import distsim
from distsim.errors import UsageError
from distsim.report import Summary, report_document
from distsim.sim import Outcome, simulate


def on_gpu(fn: Any, *args: Any, num_ranks: int = 1, **request: Any) -> Outcome:
    return simulate(fn, "dgx-h100:1", args, nproc_per_node=num_ranks, **request)


class Attending(nn.Module):
    """An embedding, attention, norms, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 32)
        self.qkv = nn.Linear(32, 96)
        self.norms = nn.ModuleList([nn.LayerNorm(32), nn.RMSNorm(32)])
        self.head = nn.Linear(32, 50)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.norms[0](self.words(words))
        q, k, v = (t.unflatten(-1, (2, 16)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: torch.Tensor = self.head(self.norms[1](x + attended.transpose(1, 2).flatten(2)))
        return out


def losses(device: str) -> list[float]:
    """Of three steps of DDP, each rank on words of its own."""
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    rank = dist.get_rank()
    if device == "cuda":
        torch.cuda.set_device(rank)
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(Attending().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    draw = torch.Generator().manual_seed(rank)
    words = torch.randint(0, 50, (2, 9), generator=draw).to(device)
    found = []
    for _ in range(3):
        loss = F.cross_entropy(model(words)[:, :-1].flatten(0, 1), words[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        dist.all_reduce(loss)
        found.append(loss.item())
    return found


def test_real_data_give_the_losses_of_a_cpu_run() -> None:
    """The same script on CUDA and on the CPU prints the same losses to 1e-6, and they fall."""
    there = on_gpu(losses, "cuda", num_ranks=2, data="real")
    here = simulate(losses, "ethernet-cpu:1", ("cpu",), nproc_per_node=2)
    for one, other in zip(there.results, here.results, strict=True):
        assert one == pytest.approx(other, rel=1e-6)
        assert one[2] < one[0]
    assert report_document(there)["training"]["unknown_reads"] == []


def attended(mask: bool, width: int, heads: int, device: str) -> list[torch.Tensor]:
    """The output of an attention, and its gradients."""
    draw = torch.Generator().manual_seed(0)
    shapes = [(2, 4, 5, 16), (2, heads, 7, 16), (2, heads, 7, width)]
    parts = [torch.randn(shape, generator=draw).to(device).requires_grad_() for shape in shapes]
    keep = torch.rand(5, 7, generator=draw).to(device) < 0.7 if mask else None
    out = F.scaled_dot_product_attention(*parts, attn_mask=keep, enable_gqa=heads != 4)
    out.square().sum().backward()
    return [out.detach().cpu(), *(p.grad.cpu() for p in parts if p.grad is not None)]


@pytest.mark.parametrize(("mask", "width", "heads"), [(False, 16, 4), (True, 16, 4), (False, 24, 4), (False, 16, 2)])
def test_attention_has_the_cpus_values(mask: bool, width: int, heads: int) -> None:
    """Masks, values wider than keys, grouped heads: what a GPU's kernel would make, computed by the CPU's."""
    (there,) = on_gpu(attended, mask, width, heads, "cuda", data="real").results
    assert len(there) == 4
    for one, other in zip(there, attended(mask, width, heads, "cpu"), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def recurrent(kind: str, amp: bool, device: str) -> list[torch.Tensor]:
    """The output of a recurrent module or cell, its state and its gradients."""
    torch.manual_seed(0)
    makes = {
        "lstm": lambda: nn.LSTM(6, 5, 2, batch_first=True, bidirectional=True),
        "gru": lambda: nn.GRU(6, 5, 2, bias=False),
        "cells": lambda: nn.ModuleList([nn.LSTMCell(6, 5), nn.GRUCell(6, 5), nn.RNNCell(6, 5)]),
    }
    module: Any = makes[kind]().to(device)
    if kind == "cells":
        x = torch.randn(3, 6).to(device).requires_grad_()
        out = torch.cat([module[0](x)[1], module[1](x), module[2](x)], 1)
    else:
        x = torch.randn(3, 4, 6).to(device).requires_grad_()
        with torch.autocast(device, torch.bfloat16, enabled=amp):
            out = module(x)[0]
    out.float().square().sum().backward()
    assert x.grad is not None
    return [out.detach().cpu(), x.grad.cpu(), *(p.grad.cpu() for p in module.parameters())]


@pytest.mark.parametrize("kind", ["lstm", "gru", "cells"])
def test_recurrent_modules_have_the_cpus_values(kind: str) -> None:
    """What a GPU's fused cells make of real data, forward and backward, is what the CPU's plain ones make."""
    (there,) = on_gpu(recurrent, kind, False, "cuda", data="real").results
    for one, other in zip(there, recurrent(kind, False, "cpu"), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def normed(module: Any, x: torch.Tensor, device: str) -> list[torch.Tensor]:
    x = x.to(device).requires_grad_()
    for _ in range(2):
        out = module(x)
    (out * out * x).sum().backward()
    assert x.grad is not None
    return [out.detach().cpu(), x.grad.cpu(), module.running_mean.cpu(), module.running_var.cpu()]


def synchronized() -> list[torch.Tensor]:
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    torch.manual_seed(0)
    x = torch.randn(6, 4, 3, 2)[[slice(0, 2), slice(2, 6)][rank]]  # batches of two sizes
    return normed(nn.SyncBatchNorm(4).cuda(), x, "cuda")


def test_a_synchronized_norm_has_the_values_of_the_whole_batch() -> None:
    """SyncBatchNorm of real data on two ranks is BatchNorm of both ranks' rows on one CPU."""
    parts = on_gpu(synchronized, num_ranks=2, data="real").results
    torch.manual_seed(0)
    out, gradient, mean, variance = normed(nn.BatchNorm2d(4), torch.randn(6, 4, 3, 2), "cpu")
    for part, rows in zip(parts, (slice(0, 2), slice(2, 6)), strict=True):
        for one, other in zip(part, (out[rows], gradient[rows], mean, variance), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_fused_optimizers_have_the_cpus_values() -> None:
    """SGD and Adagrad with fused=True, of which torch knows no meta kernel: real data, and no data."""

    def stepped(kind: Any, device: str, **given: Any) -> torch.Tensor:
        torch.manual_seed(0)
        module = nn.Linear(8, 8).to(device)
        optimizer = kind(module.parameters(), lr=0.1, fused=True, **given)
        for _ in range(3):
            module(torch.randn(4, 8).to(device)).square().sum().backward()
            optimizer.step()
        return module.weight.detach().cpu()

    for kind, given in ((torch.optim.SGD, {"momentum": 0.9}), (torch.optim.Adagrad, {})):
        for data in ("real", "shapes"):
            (there,) = on_gpu(stepped, kind, "cuda", data=data).results
            assert there.shape == (8, 8)
        (there,) = simulate(stepped, "dgx-h100:1", (kind, "cuda"), given, nproc_per_node=1, data="real").results
        torch.testing.assert_close(there, stepped(kind, "cpu", **given), rtol=1e-5, atol=1e-6)


def test_what_the_cpu_cannot_compute_is_refused_by_name() -> None:
    """An operator that only a GPU has: with real data that is said, never a wrong number."""

    def own() -> None:
        @torch.library.custom_op("distsim_tests::only_there", mutates_args=(), device_types="cuda")
        def only_there(x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        only_there.register_fake(torch.empty_like)
        distsim.kernel_cost("distsim_tests::only_there", flops=0, bytes=0)
        only_there(torch.ones(2, 4, device="cuda"))

    outcome = on_gpu(own, data="real", check=False)
    assert outcome.failures[0].type == "NotSimulated"
    assert "distsim_tests.only_there.default under --data real" in outcome.failures[0].message


def test_an_operator_written_in_python_costs_what_its_function_does() -> None:
    """torch.library.custom_op around torch's operators (modded-nanogpt's fp8 product) needs no kernel_cost."""

    def own() -> float:
        @torch.library.custom_op("distsim_tests::product", mutates_args=())
        def product(x: torch.Tensor) -> torch.Tensor:
            return x @ x

        product.register_fake(torch.empty_like)
        x = torch.ones(4096, 4096, device="cuda", dtype=torch.bfloat16)
        seconds = []
        for call in (lambda: x @ x, lambda: product(x)):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            call()
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begin)
        return seconds[1] / seconds[0]

    assert 0.99 < on_gpu(own).results[0] < 1.1


def test_an_operator_written_in_python_with_a_price_of_its_own_is_one_kernel() -> None:
    """Megatron-LM's causal softmax is a kernel that `kernels` knows, whatever a program says that it computes."""

    def own() -> tuple[int, int]:
        @torch.library.custom_op("megatron::scaled_upper_triang_masked_softmax", mutates_args=())
        def causal_softmax(scores: torch.Tensor) -> torch.Tensor:
            future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(1)
            return scores.masked_fill(future, float("-inf")).softmax(-1)

        causal_softmax.register_fake(torch.empty_like)
        scores = torch.ones(16, 1024, 1024, device="cuda", dtype=torch.float16)
        torch.cuda.reset_peak_memory_stats()
        causal_softmax(scores)
        return torch.cuda.max_memory_allocated(), 2 * scores.nbytes

    peak, expected = on_gpu(own).results[0]
    assert peak == expected


def unknown() -> torch.Tensor:
    x = torch.randn(1 << 10, 1 << 10, device="cuda")
    return (x @ x).mean()


def reads() -> list[float]:
    loss = unknown()
    seen = [loss.item() for _ in range(3)]
    if loss < 0.5:
        seen.append(-1.0)
    while loss > 9 and seen:
        pass
    return seen


@pytest.mark.parametrize("placeholder", [1.0, 0.25])
def test_placeholders_are_told_by_expression_and_condition(placeholder: float) -> None:
    """What reads an unknown number gets the placeholder; the report says by which expression and condition."""
    outcome = on_gpu(reads, placeholder=placeholder)
    assert outcome.results == [[placeholder] * 3 + [-1.0] * (placeholder < 0.5)]
    section = report_document(outcome)["training"]
    told = [(read["expression"], read["condition"], read["count"]) for read in section["unknown_reads"]]
    assert told == [("loss < 0.5", "if", 1), ("loss > 9", "while", 1), ("loss.item()", "", 3)]
    shown = io.StringIO()
    Console(file=shown, width=200).print(Summary(outcome))
    here = os.path.relpath(__file__)
    assert f"loss.item() at {here}:" in shown.getvalue()
    assert f": placeholder {placeholder:g}, 3 times" in shown.getvalue()
    assert "the placeholder decided the if there" in shown.getvalue()


def test_a_loop_that_only_an_unknown_value_ends_is_refused() -> None:
    """`while loss > 0.5` would turn for ever: the line, the expression and the remedy are said."""

    def train() -> None:
        loss = unknown()
        while loss.item() > 0.5:
            loss = unknown()

    (failure,) = on_gpu(train, check=False).failures
    assert failure.type == "NotSimulated"
    assert "a `while` that only loss.item() ends, at " in failure.message
    assert "--placeholder" in failure.message
    assert on_gpu(train, placeholder=0.25).failures == []


def test_a_loop_that_can_be_left_or_is_not_entered_goes_on() -> None:
    """A break ends it as well; and one that stands in another loop is come to again and again."""

    def train() -> tuple[int, int]:
        left = entered = 0
        while unknown().item() > 0.5:
            left += 1
            if left == 150:
                break
        for _ in range(150):
            while unknown().item() > 1e9:
                entered += 1
        return left, entered

    assert on_gpu(train).results == [(150, 0)]


def test_object_collectives_of_objects_of_different_sizes() -> None:
    """torch makes the smaller pickles larger (`resize_`); what they hold stays."""

    def body() -> Any:
        dist.init_process_group("nccl")
        rank = dist.get_rank()
        torch.cuda.set_device(rank)
        every: list[Any] = [None, None]
        dist.all_gather_object(every, "x" * (50 * rank + 1))
        there: list[Any] | None = [None, None] if rank == 0 else None
        dist.gather_object("y" * 300 * rank, there)
        grown = torch.arange(4, device="cuda").resize_(64)
        return [len(one) for one in every], there and [len(one) for one in there], grown[:4].tolist()

    outcome = simulate(body, "dgx-h100:1", nproc_per_node=2)
    assert outcome.results == [([1, 51], [0, 300], [0, 1, 2, 3]), ([1, 51], None, [0, 1, 2, 3])]


def test_a_loop_that_counts_as_well_goes_on() -> None:
    """A condition that something else can end is the program's own affair."""

    def train() -> int:
        steps, loss = 0, unknown()
        while steps < 150 and loss.item() > 0.5:
            steps += 1
        return steps

    assert on_gpu(train).results == [150]


def test_another_word_for_data_is_refused() -> None:
    """One line says what there is."""
    with pytest.raises(UsageError, match="data: expected shapes or real, got 'true'"):
        on_gpu(reads, data="true")


def resized() -> list[float]:
    kept = torch.arange(4.0, device="cuda")
    storage = kept.untyped_storage()
    storage.resize_(64)
    storage.resize_(8)
    first: list[float] = torch.empty(0, device="cuda").set_(storage, 0, (2,), (1,)).tolist()
    storage.resize_(0)
    storage.resize_(16)
    return first


def test_a_storage_that_is_resized_keeps_what_fits() -> None:
    """As on a GPU, where its bytes are copied to the new memory."""
    assert on_gpu(resized, data="real").results == [[0.0, 1.0]]


def packed(device: str) -> tuple[list[float], list[int]]:
    """A packed LSTM's gradient of its input, and the lengths that come back."""
    torch.manual_seed(0)
    layer, x = nn.LSTM(4, 8, batch_first=True).to(device), torch.randn(3, 5, 4).to(device).requires_grad_()
    rows = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([3, 5, 2]), batch_first=True, enforce_sorted=False)
    assert not rows.batch_sizes.is_cuda
    out, lengths = nn.utils.rnn.pad_packed_sequence(layer(rows)[0], batch_first=True)
    out.sum().backward()
    assert x.grad is not None
    return x.grad.flatten().tolist(), lengths.tolist()


def test_sequences_are_packed_by_lengths_of_the_host() -> None:
    """torch wants lengths on the CPU beside rows on a GPU; the gradient of an LSTM over them is that of a CPU."""
    (found,) = on_gpu(packed, "cuda", data="real").results
    wanted = packed("cpu")
    assert found[0] == pytest.approx(wanted[0], abs=1e-6)
    assert found[1] == wanted[1] == [3, 5, 2]
    assert on_gpu(packed, "cuda").results[0][1] == [3, 5, 2]


def saved(path: str, through_host: bool) -> None:
    unknown = torch.randn(1 << 16, device="cuda") * 2
    torch.save(unknown.cpu() if through_host else unknown, path)


@pytest.mark.parametrize("through_host", [False, True])
def test_a_file_without_holes_is_said_to_have_none(through_host: bool, tmp_path: Path) -> None:
    """A GPU's tensor leaves a hole; a copy on the host has placeholders that take room, and the report says so."""
    path = tmp_path / "saved"
    outcome = on_gpu(saved, str(path), through_host)
    assert (path.stat().st_blocks * 512 >= 1 << 18) == through_host
    assert any("are written whole" in note for note in outcome.notes) == through_host


def counted() -> None:
    chosen = torch.randn(6000, 4, device="cuda").topk(2).indices.flatten()  # more than the values that are kept
    for _ in range(3):
        tokens = torch.bincount(chosen, minlength=5)
        assert tokens.tolist() == [3000] * 4 + [0]
    assert torch.bincount(chosen, torch.ones(12000, device="cuda"), minlength=4).tolist() == [3000.0] * 4
    assert torch.bincount(chosen).tolist() == [3000] * 4
    assert torch.bincount(torch.tensor([0, 2, 2], device="cuda"), minlength=4).tolist() == [1, 0, 2, 0]


def test_tokens_of_unknown_choice_are_counted_evenly() -> None:
    """A router's choice is unknown: its experts get as many each, and the report says where it was asked for."""
    ran = on_gpu(counted)
    assert ran.exit_code == 0, ran.diagnosis
    shown = io.StringIO()
    Console(file=shown, width=200).print(Summary(ran))
    here = os.path.relpath(__file__)
    (line,) = [line for line in shown.getvalue().splitlines() if "torch.bincount(chosen, minlength=5)" in line]
    assert re.fullmatch(rf"torch.bincount\(chosen, minlength=5\) at {here}:\d+: routed evenly \(no values\) *", line)
    section = report_document(ran)["training"]
    told = [(read["expression"], read["what"]) for read in section["unknown_reads"]]
    assert told.count(("torch.bincount(chosen, minlength=5)", "routed evenly (no values)")) == 1


def test_unwritten_memory_is_zeros_in_each_run() -> None:
    """The host's memory under it holds what another tensor has left there, NaN for instance."""

    def body() -> list[float]:
        left = [torch.full((64,), float("nan")) for _ in range(64)]
        del left
        like = torch.ones(64, device="cuda")
        made = [
            torch.empty(64, device="cuda"),
            torch.empty_like(like),
            like.new_empty(64),
            torch.empty_strided((8, 8), (1, 8), device="cuda"),
            torch.empty_strided((8, 8), (0, 1), device="cuda"),
            torch.nn.Linear(8, 8, device="meta").to_empty(device="cuda").weight.detach(),
        ]
        return [float(each.abs().sum()) for each in made]

    assert on_gpu(body).results[0] == [0.0] * 6


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("last", [False, True])
def test_an_embedding_bag_has_a_gpus_values_and_gradient(mode: str, last: bool) -> None:
    """The host leaves out the bag of each index, which the backward of a GPU needs."""

    def body(device: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        torch.manual_seed(0)
        weight = torch.randn(10, 4).to(device).requires_grad_()
        indices, offsets = (
            torch.randint(10, (6,)).to(device),
            torch.tensor([0, 2, 2, 3, 6][: 5 if last else 4]).to(device),
        )
        bags = F.embedding_bag(indices, weight, offsets, mode=mode, include_last_offset=last)
        (bags * bags).sum().backward()
        return bags.detach().cpu(), None if weight.grad is None else weight.grad.cpu()

    for of_gpu, of_host in zip(on_gpu(lambda: body("cuda"), data="real").results[0], body("cpu"), strict=True):
        assert torch.equal(of_gpu, of_host)


def test_an_embedding_bag_of_few_rows_of_equal_length_runs_without_values() -> None:
    """A result that the host makes in another shape than a GPU is no value of the tensor."""
    bag = nn.EmbeddingBag(10, 4, mode="sum")
    assert on_gpu(lambda: tuple(bag.cuda()(torch.randint(10, (8, 3), device="cuda")).shape)).results[0] == (8, 4)


def test_the_error_of_an_empty_selection_names_the_unknown_mask() -> None:
    """The remedy is part of torch's message, whose type stays."""

    def position_of_the_largest() -> None:
        x = torch.randn(4096, 4096, device="cuda") @ torch.ones(4096, 4096, device="cuda")
        x[x > 2].argmax()

    outcome = on_gpu(position_of_the_largest, check=False)
    text = outcome.failures[0].message
    assert "Expected reduction dim" in text
    assert "x[x > 2] at " in text
    assert "selects nothing, because nobody knows its values" in text
    assert "--data real" in text


def test_an_error_names_the_placeholder_that_was_read_last() -> None:
    """A length that the model predicts (VITS) is 0 or 1 here; what was read in every step is not named."""

    def predicts(fails: bool) -> None:
        loss = unknown()
        for _ in range(3):
            loss.item()
        if fails:
            frames = torch.ones(1, 1, max(1, int((loss * 40).long())), device="cuda")
            torch.nn.functional.pad(frames, (384, 384), mode="reflect")
        raise ValueError("an error of its own")

    def notes(fails: bool) -> list[str]:
        outcome = on_gpu(lambda: predicts(fails), check=False)
        return [note for note in outcome.notes if "whose value is unknown" in note]

    (note,) = notes(True)
    assert re.match(r"rank 0 had read int\(\(loss \* 40\)\.long\(\)\) at \S+:\d+, whose value", note)
    assert notes(False) == []


def test_masks_and_storages_do_not_read_as_the_placeholder(tmp_path: Path) -> None:
    """An unknown mask selects nothing, an integer is 0; a file gets zeros, which decide nothing and come last."""

    def body() -> None:
        x = unknown().expand(8).contiguous()
        x[x > 2].sum().item()
        seen = int(x.long().argmax()), int((x > 2).sum(0, keepdim=True).expand(4).contiguous()[1])
        assert seen == (0, 0)
        for _ in range(3):
            torch.save({"x": x}, tmp_path / "x.pt")

    shown = io.StringIO()
    Console(file=shown, width=200).print(Summary(on_gpu(body)))
    section = shown.getvalue().split("unknown values that the program read")[1].split("\n\n")[0]
    lines = [line.rstrip() for line in section.strip().splitlines()]
    (mask,) = [line for line in lines if line.startswith("x[x > 2] at ")]
    assert mask.endswith(": selects nothing, 1 time")
    assert [line.rpartition(": ")[2] for line in lines if line.startswith("int(")] == ["placeholder 0, 1 time"] * 2
    assert [line.rpartition(": ")[2] for line in lines if line.startswith("x[x > 2].sum().item()")] == [
        "placeholder 1, 1 time"
    ]
    assert lines[-1].endswith(": zeros, 3 times")
