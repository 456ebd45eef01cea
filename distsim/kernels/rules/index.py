"""Embeddings, indexing, sorting, random numbers."""

from __future__ import annotations

from distsim.kernels.call import Call, nbytes
from distsim.kernels.cost import NOTHING, Cost
from distsim.kernels.pricing import Pricing
from distsim.kernels.rules.registry import rule

__all__: list[str] = []


@rule("embedding", "index_select", "gather", "index", "take", "take_along_dim", "_unsafe_index", "_embedding_bag")
def _gather(pricing: Pricing, call: Call) -> Cost:
    """As much is read as is written, whatever the size of what it is taken from."""
    table = call["weight"] if call["weight"] is not None else call["self"]
    indices = max(0, call.read - nbytes(table))
    kind = "embedding" if "embedding" in call.name else "index"
    return pricing.bytes(2 * call.write + indices, pricing.spec.memory.gather, kind)


@rule("embedding_dense_backward", "embedding_backward")
def _embedding_backward(pricing: Pricing, call: Call) -> Cost:
    """Zeros for the whole table; indices sorted; rows of the gradient added up."""
    gradient, indices = call["grad_output"], call["indices"]
    zeros = pricing.bytes(call.write, pricing.spec.memory.elementwise, "elementwise")
    order = pricing.bytes(8 * nbytes(indices), pricing.spec.memory.scatter, "sort", kernels=4)
    rows = pricing.bytes(2 * nbytes(gradient), pricing.spec.memory.scatter, "embedding")
    total = zeros.plus(order).plus(rows)
    return Cost(total.seconds, total.kernels, 0, total.nbytes, "embedding", True)


@rule(
    "index_put",
    "index_put_",
    "_index_put_impl_",
    "_unsafe_index_put",
    "scatter",
    "scatter_",
    "scatter_add",
    "scatter_add_",
    "scatter_reduce",
    "scatter_reduce_",
    "index_add",
    "index_add_",
    "index_copy",
    "index_copy_",
    "index_fill",
    "index_fill_",
    "masked_scatter",
    "masked_scatter_",
    "put_",
)
def _scatter(pricing: Pricing, call: Call) -> Cost:
    """What is put is read, and read and written where it goes; what is not in place is copied first."""
    given = nbytes(call["self"])
    put = max(0, call.read - given)
    memory = pricing.spec.memory
    cost = pricing.bytes(3 * put, memory.scatter, "index")
    if call.name.endswith("_"):
        return cost
    return pricing.bytes(2 * given, memory.elementwise, "copy").plus(cost)


@rule("sort", "argsort", "msort", "unique_consecutive", "_unique", "_unique2", "unique_dim")
def _sort(pricing: Pricing, call: Call) -> Cost:
    """Radix sort: values and their places go through memory once for each byte of a value."""
    given = call["self"]
    if isinstance(given, list) or given is None:  # of a list, in TorchScript
        return NOTHING
    passes = given.element_size()
    moved = passes * 2 * given.numel() * (given.element_size() + 8)
    return pricing.bytes(moved, pricing.spec.memory.reduction, "sort", kernels=2 + passes)


@rule("topk", "kthvalue", "median", "nanmedian", "mode")
def _topk(pricing: Pricing, call: Call) -> Cost:
    """Radix select: the input is read once for each byte of a value."""
    given = call["self"]
    moved = given.element_size() * nbytes(given) + call.write
    return pricing.bytes(moved, pricing.spec.memory.reduction, "sort", kernels=2)


@rule(
    "cumsum", "cumsum_", "cumprod", "cummax", "cummin", "logcumsumexp", "nonzero", "masked_select", "bincount", "histc"
)
def _scan(pricing: Pricing, call: Call) -> Cost:
    """Read twice: for the sums of blocks, and for the values."""
    moved = 2 * call.read + call.write
    return pricing.bytes(moved, pricing.spec.memory.reduction, "reduction", kernels=2)


@rule("native_dropout", "bernoulli", "bernoulli_", "dropout", "multinomial", "rand_like", "randn_like", "randint_like")
def _dropout(pricing: Pricing, call: Call) -> Cost:
    return pricing.bytes(call.read + call.write, pricing.spec.memory.random, "random")


@rule(
    "normal_", "uniform_", "random_", "exponential_", "log_normal_", "cauchy_", "geometric_", "rand", "randn", "randint"
)
@rule("normal", "randperm", "normal_functional")
def _random(pricing: Pricing, call: Call) -> Cost:
    """Written only."""
    return pricing.bytes(call.write, pricing.spec.memory.random, "random") if call.write else NOTHING
