"""Expert layers: grouped_gemm, megablocks, deep_ep.

Source of names, arguments and their order: grouped_gemm 0.3.0, megablocks 0.10.0, DeepEP at 04b06f7.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from distsim.sim.stand_ins.fused import FusedKernel, fused, launch, needs_values, note, per_process, refuse_values

__all__ = ["MODULES", "grouped_product"]

# -- Products of the rows of each expert with its weight. Experts are taken to have equally many rows.


def grouped_product(
    name: str, x: Tensor, weights: Sequence[Tensor], transposed: bool, sizes: Any, *, fp8: bool = False
) -> Tensor:
    """Return the product of each expert's rows with its weight.

    Args:
        name: Kernel, `library::kernel`.
        x: Rows of all experts, in their order (tokens, inner).
        weights: One weight of three dimensions, or one of two for each expert: (inner, columns).
        transposed: Whether the weights are (columns, inner).
        sizes: How many rows each expert has.
        fp8: Whether the operands are cast to one byte first.
    """
    if not needs_values() and x.is_cuda:
        out: Tensor = _Grouped.apply(name, x, transposed, fp8, *weights)
        return out
    each = weights[0].unbind() if len(weights) == 1 and weights[0].dim() == 3 else weights
    counts = sizes.tolist() if isinstance(sizes, Tensor) else list(sizes)
    pairs = zip(x.split(counts), each, strict=True)
    return torch.cat([rows @ (weight.t() if transposed else weight) for rows, weight in pairs])


def _grouped_gemm(
    name: str, operands: Sequence[Tensor], out: Sequence[Tensor], shape: tuple[int, ...], fp8: bool
) -> None:
    """Launch one kernel for all experts, after the cast of its operands."""
    if fp8:
        casts = [torch.empty(t.shape, dtype=torch.float8_e4m3fn, device=t.device) for t in operands]
        launch(f"{name}_cast", operands, casts)
        operands = casts
    launch(name, operands, out, kind="gemm", gemm=shape)


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str, x: Tensor, transposed: bool, fp8: bool, *weights: Tensor) -> Tensor:
        experts = weights[0].shape[0] if weights[0].dim() == 3 else len(weights)
        columns = weights[0].shape[-2 if transposed else -1]
        out = torch.empty(x.shape[0], columns, dtype=x.dtype, device=x.device)
        ctx.shape = -(-x.shape[0] // experts), columns, x.shape[1], experts
        ctx.name, ctx.fp8 = name, fp8
        _grouped_gemm(name, [x, *weights], [out], ctx.shape, fp8)
        ctx.save_for_backward(x, *weights)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, *weights = ctx.saved_tensors
        rows, columns, inner, experts = ctx.shape
        given, of_weights = None, [None] * len(weights)
        if ctx.needs_input_grad[1]:
            given = torch.empty_like(x)
            _grouped_gemm(ctx.name, [grad, *weights], [given], (rows, inner, columns, experts), ctx.fp8)
        if any(ctx.needs_input_grad[4:]):
            of_weights = [torch.empty_like(weight) for weight in weights]
            _grouped_gemm(ctx.name, [grad, x], of_weights, (columns, inner, rows, experts), ctx.fp8)
        return None, given, None, None, *of_weights


def gmm(a: Tensor, b: Tensor, batch_sizes: Tensor, trans_b: bool = False) -> Tensor:
    """grouped_gemm.ops.gmm: a (tokens, inner), b (experts, inner, columns)."""
    return grouped_product("grouped_gemm::gmm", a, [b], trans_b, batch_sizes)


# -- megablocks: its mixture of experts without dropped tokens.


_GELU = functools.partial(F.gelu, approximate="tanh")
_NORMAL = functools.partial(nn.init.normal_, mean=0.0, std=0.02)


@dataclasses.dataclass
class Arguments:
    """Stand-in for megablocks.layers.arguments.Arguments."""

    hidden_size: int = 1024
    ffn_hidden_size: int = 4096
    num_layers: int = 1
    bias: bool = True
    return_bias: bool = True
    activation_fn: Any = _GELU
    moe_num_experts: int = 1
    moe_top_k: int = 1
    moe_capacity_factor: int = 1
    moe_normalize_expert_weights: int | float | None = None
    moe_loss_weight: float = 0.1
    moe_jitter_eps: float | None = None
    moe_lbl_in_fp32: bool = False
    moe_expert_model_parallelism: bool = False
    expert_parallel_group: Any = None
    pipeline_model_parallel_size: int = 1
    num_layers_per_virtual_pipeline_stage: int | None = None
    memory_optimized_mlp: bool = False
    mlp_type: str = "mlp"
    mlp_impl: str = "sparse"
    fp16: bool = True
    bf16: bool = False
    device: Any = dataclasses.field(default_factory=lambda: torch.cuda.current_device())
    init_method: Any = _NORMAL
    output_layer_init_method: Any = _NORMAL
    uniform_expert_assignment: bool = False
    shared_expert: bool = False
    fc_cls: Any = nn.Linear
    fc_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    remat_act_fn: bool = True
    shared_expert_hidden_size: int | None = None
    shared_expert_weighted_sum: bool = False
    moe_zloss_weight: float = 0
    moe_zloss_in_fp32: bool = False


def gather(x: Tensor, indices: Tensor, bin_ids: Tensor, bins: Tensor, top_k: int) -> Tensor:
    """megablocks.ops.gather: rows of *x* (tokens, hidden) in the order of their experts."""
    rows = (indices.shape[0], x.shape[1])
    kernel = FusedKernel("megablocks::gather", lambda x, i: x[i // top_k], outputs=((rows, x.dtype),), saves=(1,))
    out: Tensor = fused(kernel, x, indices)
    return out


def scatter(x: Tensor, indices: Tensor, bin_ids: Tensor, weights: Tensor | None, bins: Tensor, top_k: int) -> Tensor:
    """megablocks.ops.scatter: the weighted sum of each token's *top_k* rows."""

    def by_torch(x: Tensor, indices: Tensor, weights: Tensor | None = None) -> Tensor:
        scaled = x if weights is None else x * weights.flatten()[indices, None].to(x.dtype)
        return torch.zeros(rows, dtype=x.dtype, device=x.device).index_add(0, indices // top_k, scaled)

    rows = (x.shape[0] // top_k, x.shape[1])
    saves = (1,) if weights is None else None
    out: Tensor = fused(
        FusedKernel("megablocks::scatter", by_torch, outputs=((rows, x.dtype),), saves=saves), x, indices, weights
    )
    return out


def sort(x: Tensor, end_bit: int | None = None) -> tuple[Tensor, Tensor]:
    """megablocks.ops.sort: values and indices."""
    values, indices = torch.sort(x, stable=True)
    return values, indices


def histogram(x: Tensor, max_val: int) -> Tensor:
    """megablocks.ops.histogram: how often each of *max_val* numbers occurs."""
    return torch.histc(x.float(), bins=int(max_val), min=0, max=int(max_val) - 1).to(torch.int32)


class LearnedRouter(nn.Module):
    """Stand-in for megablocks.layers.router.LearnedRouter."""

    def __init__(self, args: Arguments) -> None:
        super().__init__()
        self.args = args
        self.layer = nn.Linear(args.hidden_size, args.moe_num_experts, bias=False, device=args.device,
                               dtype=_dtype(args))  # fmt: skip
        args.init_method(self.layer.weight)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scores = self.layer(x.view(-1, x.shape[-1])).softmax(dim=-1)
        weights, experts = torch.topk(scores, self.args.moe_top_k, dim=-1)
        order = self.args.moe_normalize_expert_weights
        if order:
            weights = weights / torch.norm(weights, p=order, dim=-1, keepdim=True)
        return scores, weights, experts


def _dtype(args: Arguments) -> torch.dtype:
    return torch.float16 if args.fp16 else torch.bfloat16 if args.bf16 else torch.float32


_losses = per_process(list)
"""Values that the layers of a process store for the loss: rows of each expert, and mean scores."""


class dMoE(nn.Module):
    """megablocks.layers.dmoe.dMoE, and MoE: each expert is taken to get equally many tokens."""

    def __init__(self, args: Arguments) -> None:
        super().__init__()
        self.args, self.router = args, LearnedRouter(args)
        self.group = args.expert_parallel_group if args.moe_expert_model_parallelism else None
        self.size = dist.get_world_size(self.group) if args.moe_expert_model_parallelism else 1
        self.experts = nn.Module()
        local = max(1, args.moe_num_experts // self.size)
        for name in ("w1", "v1", "w2") if args.mlp_type == "glu" else ("w1", "w2"):
            shape = (local * args.ffn_hidden_size, args.hidden_size)
            weight = nn.Parameter(torch.empty(shape, device=args.device, dtype=_dtype(args)))
            (args.output_layer_init_method if name == "w2" else args.init_method)(weight)
            weight.expert_model_parallel = args.moe_expert_model_parallelism
            self.experts.register_parameter(name, weight)
        self.bias = (
            nn.Parameter(torch.zeros(args.hidden_size, device=args.device, dtype=_dtype(args))) if args.bias else None
        )

    def forward(self, x: Tensor) -> Any:
        args = self.args
        scores, weights, experts = self.router(x)
        tokens, top_k = x.view(-1, x.shape[-1]), args.moe_top_k
        if args.moe_loss_weight and self.training:
            _save_loss(args, scores, experts)
        bin_ids, indices = sort(experts.flatten().int())
        counts = histogram(experts.flatten(), args.moe_num_experts)
        bins = counts.cumsum(0)
        rows = gather(tokens, indices, bin_ids, bins, top_k)
        if self.size > 1:
            refuse_values("megablocks with expert parallelism", "experts are taken to have equally many tokens")
            rows = _AllToAll.apply(rows, self.group)
        local = max(1, args.moe_num_experts // self.size)
        weight = {name: each.view(local, -1, args.hidden_size) for name, each in self.experts.named_parameters()}
        sizes = counts if needs_values() else None
        product = functools.partial(grouped_product, "megablocks::gmm", sizes=sizes)
        wide = args.activation_fn(product(rows, [weight["w1"]], True))
        wide = wide * product(rows, [weight["v1"]], True) if "v1" in weight else wide
        rows = product(wide, [weight["w2"]], False)
        rows = _AllToAll.apply(rows, self.group) if self.size > 1 else rows
        out = scatter(rows, indices, bin_ids, weights, bins, top_k).view(x.shape)
        if args.return_bias:
            return out, self.bias
        return out if self.bias is None else out + self.bias


class _AllToAll(torch.autograd.Function):
    """Exchange an equal number of rows with each rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group, out = group, torch.empty_like(x)
        dist.all_to_all_single(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        out = torch.empty_like(grad)
        dist.all_to_all_single(out, grad.contiguous(), group=ctx.group)
        return out, None


def _save_loss(args: Arguments, scores: Tensor, experts: Tensor) -> None:
    counts = histogram(experts.flatten(), args.moe_num_experts).to(scores.dtype)
    _losses().append((counts, scores.mean(dim=0)))


def batched_load_balancing_loss(args: Arguments) -> Any:
    """Stand-in for megablocks.layers.moe.batched_load_balancing_loss."""
    total = sum((counts * means).sum() / counts.sum() for counts, means in _losses())
    return args.moe_loss_weight * args.moe_num_experts * total


# -- deep_ep: dispatch and combine as an all_to_all of the same bytes. Tokens choose their experts evenly.


class EventOverlap:
    """Stand-in for deep_ep.EventOverlap: the work that a call with async_finish launched."""

    def __init__(self, event: Any = None, extra_tensors: Any = None) -> None:
        self.event = event

    def current_stream_wait(self) -> None:
        """Make the current stream wait for the work."""
        if self.event is not None:
            self.event.wait()

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(self, *error: Any) -> None:
        self.current_stream_wait()


class Config:
    """Stand-in for deep_ep.Config, whose kernel tuning has no effect."""

    def __init__(self, *args: int) -> None:
        self.num_sms = args[0] if args else 20

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 1 << 28

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 1 << 28 if num_ranks > 8 else 0


class Buffer:
    """Stand-in for deep_ep.Buffer."""

    num_sms = 20

    def __init__(self, group: Any, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0, low_latency_mode: bool = False,
                 num_qps_per_rank: int = 12, **options: Any) -> None:  # fmt: skip
        self.group, self.rank, self.group_size = group, dist.get_rank(group), dist.get_world_size(group)
        self.num_nvl_bytes, self.num_rdma_bytes, self.low_latency_mode = num_nvl_bytes, num_rdma_bytes, low_latency_mode
        self._memory = torch.empty(num_nvl_bytes + num_rdma_bytes, dtype=torch.uint8, device="cuda")
        dist.barrier(group, device_ids=[torch.cuda.current_device()])

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        Buffer.num_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        return EventOverlap()

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        return Config(Buffer.num_sms)

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int, previous_event: Any = None,
                            async_finish: bool = False, allocate_on_comm_stream: bool = False) -> Any:  # fmt: skip
        refuse_values("deep_ep.Buffer", "tokens are taken to choose their experts evenly")
        make = functools.partial(torch.empty, dtype=torch.int32, device=topk_idx.device)
        per_rank, per_expert = make(self.group_size), make(num_experts)
        in_rank = torch.empty(topk_idx.shape[0], self.group_size, dtype=torch.bool, device=topk_idx.device)
        launch("deep_ep::get_dispatch_layout", [topk_idx], [per_rank, per_expert, in_rank])
        return (
            per_rank,
            make(max(1, self.group_size // 8)) if self.group_size > 8 else None,
            per_expert,
            in_rank,
            EventOverlap(),
        )

    def dispatch(self, x: Any, handle: Any = None, num_tokens_per_rank: Any = None,
                 num_tokens_per_rdma_rank: Any = None,
                 is_token_in_rank: Any = None, num_tokens_per_expert: Tensor | None = None,
                 topk_idx: Tensor | None = None,
                 topk_weights: Tensor | None = None, expert_alignment: int = 1, config: Any = None,
                 previous_event: Any = None, async_finish: bool = False,
                 allocate_on_comm_stream: bool = False, **options: Any) -> Any:  # fmt: skip
        refuse_values("deep_ep.Buffer", "tokens are taken to choose their experts evenly")
        note("deep_ep: each rank and expert is taken to get equally many tokens; times are those of an all_to_all")
        both = x if isinstance(x, tuple) else (x,)
        tokens = both[0].shape[0]
        if handle is None:
            choices = 1 if topk_idx is None else topk_idx.shape[1]
            reached = 1 - (1 - 1 / self.group_size) ** choices
            handle = tokens, math.ceil(tokens * reached), topk_idx, topk_weights
            known = False
        else:
            known = True
        parts = [each for each in (*both, None if known else topk_weights) if each is not None]
        work, received = None, []
        for part in parts:
            arrived, work = self._exchange(part, handle[1], async_finish)
            received.append(arrived)
        event = EventOverlap(work)
        out = tuple(received[:2]) if len(both) == 2 else received[0]
        if known:
            return out, None, None, None, None, event
        experts = 1 if num_tokens_per_expert is None else max(1, num_tokens_per_expert.shape[0] // self.group_size)
        choices = 1 if topk_idx is None else topk_idx.shape[1]
        share = -(-tokens * choices // experts)
        counts = [-(-share // expert_alignment) * expert_alignment] * experts
        rows = received[0].shape[0]
        indices = None if topk_idx is None else topk_idx.new_empty(rows, choices)
        return out, indices, None if topk_weights is None else received[-1], counts, handle, event

    def combine(self, x: Tensor, handle: Any, topk_weights: Tensor | None = None, bias: Any = None, config: Any = None,
                previous_event: Any = None, async_finish: bool = False,
                allocate_on_comm_stream: bool = False) -> Any:  # fmt: skip
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


_GMM = {"gmm": gmm}
_MEGABLOCKS = {"MoE": dMoE, "dMoE": dMoE, "Arguments": Arguments}
_LOSSES = {
    "batched_load_balancing_loss": batched_load_balancing_loss, "clear_load_balancing_loss": lambda: _losses().clear(),
    "get_load_balancing_loss": lambda: list(_losses()),
}  # fmt: skip
_OPS: dict[str, Callable[..., Any]] = {"gather": gather, "scatter": scatter, "sort": sort, "histogram": histogram}
_OPS["inclusive_cumsum"] = torch.cumsum
_EVENTS = {"EventOverlap": EventOverlap, "EventHandle": EventOverlap}
MODULES: dict[str, dict[str, Any]] = {
    "grouped_gemm": _GMM,
    "grouped_gemm.ops": _GMM,
    "megablocks": _MEGABLOCKS,
    "megablocks.layers.arguments": {"Arguments": Arguments},
    "megablocks.layers.dmoe": {"dMoE": dMoE},
    "megablocks.layers.moe": {"MoE": dMoE, **_LOSSES},
    "megablocks.layers.router": {"LearnedRouter": LearnedRouter},
    "megablocks.ops": _OPS,
    "deep_ep": {"Buffer": Buffer, "Config": Config, **_EVENTS},
    "deep_ep.utils": _EVENTS,
}
