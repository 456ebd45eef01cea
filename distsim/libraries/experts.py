"""Replacements for grouped_gemm, deep_ep and transformer_engine's permutation of tokens.

Experts are taken to have equally many rows, or tokens.

Source of names, arguments and their order: grouped_gemm 0.3.0, DeepEP at 04b06f7, transformer_engine/pytorch at 2.20.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distsim.libraries.fused import FusedKernel, fused, fused_outputs, launch, needs_values, note, refuse_values

# -- Products of the rows of each expert with its weight


def grouped_product(
    name: str,
    x: Tensor,
    weights: Sequence[Tensor],
    transposed: bool,
    sizes: Any,
    *,
    copies: Sequence[tuple[Tensor, Tensor]] = (),
    unused: Callable[[Tensor], Tensor | None] | None = None,
) -> Tensor:
    """Return the product of each expert's rows with its weight.

    Args:
        name: Kernel, `library::kernel`.
        x: Rows of all experts, in their order (tokens, inner).
        weights: One weight of three dimensions, or one of two for each expert: (inner, columns).
        transposed: Whether the weights are (columns, inner).
        sizes: How many rows each expert has.
        copies: The weights in fp8 and their transposes, for a product in fp8.
        unused: Where the gradients of weights are added to their main_grad, what autograd gets in place of each.
    """
    if not needs_values() and x.is_cuda:
        out: Tensor = _Grouped.apply(name, x, transposed, copies, unused, *weights)
        return out
    each = weights[0].unbind() if len(weights) == 1 and weights[0].dim() == 3 else weights
    counts = sizes.tolist() if isinstance(sizes, Tensor) else list(sizes)
    pairs = zip(x.split(counts), each, strict=True)
    return torch.cat([rows @ (weight.t() if transposed else weight) for rows, weight in pairs])


def _in_fp8(name: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return *x* in fp8 and its transpose, which one kernel writes."""
    rows, columns = (torch.empty_like(x, dtype=torch.float8_e4m3fn) for _ in range(2))
    launch(f"{name}_cast", [x], [rows, columns])
    return rows, columns


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str, x: Tensor, transposed: bool, copies: Any, unused: Any, *weights: Tensor) -> Tensor:
        experts = weights[0].shape[0] if weights[0].dim() == 3 else len(weights)
        columns = weights[0].shape[-2 if transposed else -1]
        out = torch.empty(x.shape[0], columns, dtype=x.dtype, device=x.device)
        ctx.shape = -(-x.shape[0] // experts), columns, x.shape[1], experts
        ctx.name, ctx.fp8, ctx.unused, ctx.weights = name, bool(copies), unused, weights
        read, kept, read_weights, kept_weights = x, x, weights, weights
        if copies:
            read, kept = _in_fp8(name, x)
            read_weights, kept_weights = zip(*copies, strict=True)
        launch(name, [read, *read_weights], [out], kind="gemm", shape=ctx.shape)
        ctx.save_for_backward(kept, *kept_weights)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, *kept_weights = ctx.saved_tensors
        rows, columns, inner, experts = ctx.shape
        given, of_weights = None, [None] * len(ctx.weights)
        of_rows, of_columns = _in_fp8(ctx.name, grad) if ctx.fp8 else (grad, grad)
        if ctx.needs_input_grad[1]:
            given = torch.empty_like(x, dtype=grad.dtype)
            shape = rows, inner, columns, experts
            launch(ctx.name, [of_rows, *kept_weights], [given], kind="gemm", shape=shape)
        if any(ctx.needs_input_grad[5:]):
            shape = columns, inner, rows, experts
            if ctx.unused is not None and all(hasattr(weight, "main_grad") for weight in ctx.weights):
                added = [weight.main_grad for weight in ctx.weights]
                launch(ctx.name, [of_columns, x, *added], added, kind="gemm", shape=shape)
                of_weights = [ctx.unused(weight) for weight in ctx.weights]
            else:
                of_weights = [torch.empty_like(weight) for weight in ctx.weights]
                launch(ctx.name, [of_columns, x], of_weights, kind="gemm", shape=shape)
        return None, given, None, None, None, *of_weights


def gmm(a: Tensor, b: Tensor, batch_sizes: Tensor, trans_b: bool = False) -> Tensor:
    """grouped_gemm.ops.gmm: a (tokens, inner), b (experts, inner, columns)."""
    return grouped_product("grouped_gemm::gmm", a, [b], trans_b, batch_sizes)


# -- transformer_engine.pytorch.permutation: Triton's kernels that bring the tokens of each expert together, and back.

_TE = "transformer_engine"


def _row_map(routing_map: Tensor) -> Tensor:
    """Return where each token is after the permutation, for each of its experts."""
    refuse_values("transformer_engine.pytorch.permutation", "its values are not computed")
    rows = routing_map.new_empty((routing_map.shape[0], 2 * routing_map.shape[1] + 1), dtype=torch.int32)
    launch(f"{_TE}::row_id_map", [routing_map], [rows], kernels=3, triton=True)
    return rows


def moe_permute_with_probs(
    inp: Tensor, probs: Tensor | None, routing_map: Tensor, num_out_tokens: int = -1
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the rows of *inp* (tokens, hidden) for each expert, the probabilities of these rows, and the map of rows.

    Args:
        inp: Tokens.
        probs: Probabilities of experts (tokens, experts); None: none are wanted.
        routing_map: Whether a token goes to an expert, of the same shape.
        num_out_tokens: Number of rows; -1: one of each token.
    """
    rows, row_map = num_out_tokens if num_out_tokens > 0 else inp.shape[0], _row_map(routing_map)
    looks = [((rows, inp.shape[1]), inp.dtype), *([] if probs is None else [((rows,), probs.dtype)])]
    kernel = FusedKernel(f"{_TE}::permute", refuse_values, triton=True, outputs=tuple(looks), saves=(2,))
    permuted, *rest = fused_outputs(kernel, inp, probs, row_map)
    return permuted, rest[0] if rest else None, row_map


def moe_permute(
    inp: Tensor, routing_map: Tensor, num_out_tokens: int = -1, max_token_num: int = -1, map_type: str = "mask"
) -> tuple[Tensor, Tensor]:
    """Return the rows of *inp* for each expert, as `moe_permute_with_probs` does, and the map of rows."""
    permuted, _, row_map = moe_permute_with_probs(inp, None, routing_map, num_out_tokens)
    return permuted, row_map


def moe_unpermute(
    inp: Tensor, row_id_map: Tensor, merging_probs: Tensor | None = None, restore_shape: Any = None,
    map_type: str = "mask", probs: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the sum of each token's rows, which *merging_probs* weight."""
    weights = merging_probs if merging_probs is not None else probs
    looks = ((tuple(restore_shape or inp.shape), inp.dtype),)
    saves = (1,) if weights is None else (0, 1, 2)
    kernel = FusedKernel(f"{_TE}::unpermute", refuse_values, triton=True, outputs=looks, saves=saves)
    return fused(kernel, inp, row_id_map, weights)


def moe_sort_chunks_by_index_with_probs(
    inp: Tensor, probs: Tensor | None, split_sizes: Tensor, sorted_index: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Return the chunks of *inp* (tokens, hidden), and of *probs* (tokens,), in another order."""
    refuse_values("transformer_engine.pytorch.permutation", "its values are not computed")
    row_map = inp.new_empty(inp.shape[0], dtype=torch.int32)
    launch(f"{_TE}::chunk_map", [split_sizes, sorted_index], [row_map], triton=True)
    looks = [(tuple(t.shape), t.dtype) for t in (inp, probs) if t is not None]
    kernel = FusedKernel(f"{_TE}::sort_chunks", refuse_values, triton=True, outputs=tuple(looks), saves=(2,))
    moved, *rest = fused_outputs(kernel, inp, probs, row_map)
    return moved, rest[0] if rest else None


def moe_sort_chunks_by_index(inp: Tensor, split_sizes: Tensor, sorted_index: Tensor) -> Tensor:
    """Return the chunks of *inp* in another order."""
    return moe_sort_chunks_by_index_with_probs(inp, None, split_sizes, sorted_index)[0]


class Fp8Padding(torch.nn.Module):
    """transformer_engine.pytorch.Fp8Padding: fills the rows of each expert up to a multiple that fp8 products take."""

    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        self.num_gemms, self.align_size = num_gemms, align_size or 32  # 16 but for MXFP8, which differs little

    def padded(self, m_splits: Sequence[int]) -> list[int]:
        return [-(-rows // self.align_size) * self.align_size for rows in m_splits]

    def forward(self, inp: Tensor, m_splits: Sequence[int]) -> tuple[Tensor, list[int]]:
        splits = self.padded(m_splits)
        return _resized(inp, list(m_splits), splits), splits


class Fp8Unpadding(Fp8Padding):
    """transformer_engine.pytorch.Fp8Unpadding: the rows of each expert without those that were filled in."""

    def forward(self, inp: Tensor, m_splits: Sequence[int]) -> Tensor:
        return _resized(inp, self.padded(m_splits), list(m_splits))


def _resized(x: Tensor, rows: list[int], wanted: list[int]) -> Tensor:
    """Return *x* (tokens, columns) with *wanted* rows in place of *rows* of each expert, in one copy."""
    if rows == wanted:
        return x
    looks = (((sum(wanted), x.shape[1]), x.dtype),)

    def by_torch(x: Tensor) -> Tensor:
        pairs = zip(x.split(rows), wanted, strict=True)
        return torch.cat([torch.nn.functional.pad(part, (0, 0, 0, count - len(part))) for part, count in pairs])

    return fused(FusedKernel(f"{_TE}::multi_padding", by_torch, outputs=looks, saves=()), x)


PERMUTATION: dict[str, Any] = {
    function.__name__: function
    for function in (
        moe_permute,
        moe_permute_with_probs,
        moe_unpermute,
        moe_sort_chunks_by_index,
        moe_sort_chunks_by_index_with_probs,
    )
}

# -- deep_ep: dispatch and combine as an all_to_all of the same bytes


class EventOverlap:
    """Stand-in for deep_ep.EventOverlap: the work that a call with async_finish launched."""

    def __init__(self, event: Any = None, extra_tensors: Any = None) -> None:
        self.event = event

    def current_stream_wait(self) -> None:
        """Make the current stream wait for the work."""
        if self.event is not None:
            self.event.wait()


class Config:
    """Stand-in for deep_ep.Config, whose kernel tuning has no effect."""

    def __init__(self, *args: int) -> None:
        """Ignore the settings of kernels."""

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 1 << 28

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 1 << 28 if num_ranks > 8 else 0


class Buffer:
    """Stand-in for deep_ep.Buffer."""

    def __init__(self, group: Any, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0, *args: Any, **options: Any) -> None:
        self.group, self.group_size = group, dist.get_world_size(group)
        self._memory = torch.empty(num_nvl_bytes + num_rdma_bytes, dtype=torch.uint8, device="cuda")
        dist.barrier(group, device_ids=[torch.cuda.current_device()])

    set_num_sms = staticmethod(lambda new_num_sms: None)
    capture = staticmethod(EventOverlap)
    get_dispatch_config = get_combine_config = staticmethod(Config)

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int, *args: Any, **options: Any) -> Any:
        refuse_values("deep_ep.Buffer", "tokens are taken to choose their experts evenly")
        make = functools.partial(torch.empty, dtype=torch.int32, device=topk_idx.device)
        per_rank, per_expert = make(self.group_size), make(num_experts)
        in_rank = torch.empty(topk_idx.shape[0], self.group_size, dtype=torch.bool, device=topk_idx.device)
        launch("deep_ep::get_dispatch_layout", [topk_idx], [per_rank, per_expert, in_rank])
        per_node = make(self.group_size // 8) if self.group_size > 8 else None
        return per_rank, per_node, per_expert, in_rank, EventOverlap()

    def dispatch(
        self, x: Any, handle: Any = None, *, num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None, topk_weights: Tensor | None = None, expert_alignment: int = 1,
        async_finish: bool = False, **options: Any,
    ) -> Any:  # fmt: skip
        refuse_values("deep_ep.Buffer", "tokens are taken to choose their experts evenly")
        note("deep_ep: each rank and expert is taken to get equally many tokens; times are those of an all_to_all")
        both, known = x if isinstance(x, tuple) else (x,), handle is not None
        tokens, choices = both[0].shape[0], 1 if topk_idx is None else topk_idx.shape[1]
        if handle is None:
            reached = 1 - (1 - 1 / self.group_size) ** choices
            handle = tokens, math.ceil(tokens * reached)
        parts = [*both, *([] if known or topk_weights is None else [topk_weights])]
        work, received = None, []
        for part in parts:
            arrived, work = self._exchange(part, handle[1], async_finish)
            received.append(arrived)
        event, out = EventOverlap(work), tuple(received[:2]) if len(both) == 2 else received[0]
        if known:
            return out, None, None, None, None, event
        experts = 1 if num_tokens_per_expert is None else max(1, num_tokens_per_expert.shape[0] // self.group_size)
        share = -(-tokens * choices // experts)
        counts = [-(-share // expert_alignment) * expert_alignment] * experts
        indices = None if topk_idx is None else topk_idx.new_empty(received[0].shape[0], choices)
        return out, indices, None if topk_weights is None else received[-1], counts, handle, event

    def combine(
        self, x: Tensor, handle: Any, topk_weights: Tensor | None = None, *args: Any, async_finish: bool = False,
        **options: Any,
    ) -> Any:  # fmt: skip
        back, work = self._exchange(x, -(-x.shape[0] // self.group_size), async_finish)
        out = torch.empty(handle[0], *x.shape[1:], dtype=x.dtype, device=x.device)
        launch("deep_ep::combine", [back], [out])
        weights = None if topk_weights is None else topk_weights.new_empty(handle[0], topk_weights.shape[1])
        return out, weights, EventOverlap(work)

    def _exchange(self, x: Tensor, rows: int, asynchronous: bool) -> tuple[Tensor, Any]:
        """Send *rows* rows of the width of *x* to each rank, and receive as many from each."""
        sent = x.new_empty(rows * self.group_size, *x.shape[1:])
        out = torch.empty_like(sent)
        raw = [t.view(torch.uint8) if t.element_size() == 1 else t for t in (out, sent)]
        return out, dist.all_to_all_single(*raw, group=self.group, async_op=asynchronous)


MODULES: dict[str, dict[str, Any]] = {
    "grouped_gemm": {"gmm": gmm},
    "grouped_gemm.ops": {"gmm": gmm},
    "deep_ep": {"Buffer": Buffer, "Config": Config, "EventOverlap": EventOverlap},
    "deep_ep.utils": {"EventOverlap": EventOverlap, "EventHandle": EventOverlap},
}
