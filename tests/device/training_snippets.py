"""Small CUDA programs, as people write them: functions that a rank calls, and that return what a test looks at."""

from __future__ import annotations

import io
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from device.collected import raised, small_model, snippet
from torch import nn


def _scaled(scaler: Any, steps: int, gradient: float | None) -> list[float]:
    weight = nn.Parameter(torch.ones(4, device="cuda"))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for _ in range(steps):
        if gradient is None:
            weight.grad = torch.empty(1 << 14, device="cuda").normal_().add_(1)[:4]
        else:
            weight.grad = torch.full((4,), gradient, device="cuda")
        scaler.scale(torch.ones((), device="cuda"))
        scaler.step(optimizer)
        scaler.update()
    return scaler.get_scale()


@snippet
def backward() -> Any:
    x = torch.randn(8, 16, device="cuda", requires_grad=True)
    (x @ x.t()).sum().backward()
    assert x.grad is not None
    return str(x.grad.device), tuple(x.grad.shape), x.is_cuda, x.type()


@snippet
def values() -> Any:
    x = torch.arange(6, device="cuda").view(2, 3)
    return x.sum().item(), x.cpu().tolist(), x.tolist(), bool((x > 4).any()), x[1, 2].item()


@snippet
def numpy_is_refused() -> Any:
    return raised(lambda: torch.zeros(2, device="cuda").numpy())


@snippet
def printing() -> Any:
    torch.cuda.set_device(0)
    known = repr(torch.tensor([1.0, 2.0], device="cuda"))
    return (
        known,
        str(torch.randn(4096, 8, device="cuda") @ torch.randn(8, 4096, device="cuda")),
        f"{torch.ones((), device='cuda'):.1f}",
    )


@snippet
def masked_assignment() -> Any:
    """A number of the host fills and nobody waits; a tensor is put where the mask says, and the host waits for how
    many there are."""
    x = torch.zeros(2, 3, 2, device="cuda")
    rows, inner = torch.tensor([True, False], device="cuda"), torch.tensor([True, False, True], device="cuda")
    busy = torch.empty(1 << 14, 1 << 14, device="cuda")
    last = torch.cuda.Event()
    _ = busy @ busy
    last.record()
    x[rows] = 1
    x[:, inner] = 2
    waited = [last.query()]
    x[rows] = torch.full((3, 2), 3.0, device="cuda")
    waited.append(last.query())
    return waited, x.sum(-1).tolist()


@snippet
def set_default_device() -> Any:
    torch.set_default_device("cuda")
    try:
        made = torch.zeros(3)
        other = torch.empty(2)
    finally:
        torch.set_default_device(None)
    with torch.device("cuda:1"):
        third = nn.Linear(2, 2)
    return str(made.device), str(other.device), str(third.weight.device)


@snippet
def meta_then_to_empty() -> Any:
    with torch.device("meta"):
        model = nn.Linear(8, 8)
    model = model.to_empty(device="cuda")
    with torch.no_grad():
        nn.init.zeros_(model.bias)
    return str(model.weight.device), model.bias.sum().item()


@snippet
def training_step() -> Any:
    found = []
    for make in (
        lambda p: torch.optim.AdamW(p, fused=True),
        lambda p: torch.optim.AdamW(p, foreach=True),
        lambda p: torch.optim.AdamW(p),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.Adam(p, lr=0.1),
    ):
        model = small_model()
        optimizer = make(model.parameters())
        loss = F.mse_loss(model(torch.randn(4, 16, device="cuda")), torch.zeros(4, 4, device="cuda"))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found.append(next(model.parameters()).grad is not None)
    return found


@snippet
def autocast() -> Any:
    model = small_model()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        one = model(torch.randn(4, 16, device="cuda"))
        loss = F.mse_loss(one, torch.zeros(4, 4, device="cuda"))
    with torch.autocast("cuda"):
        other = model(torch.randn(4, 16, device="cuda"))
    with torch.cuda.amp.autocast():
        third = model(torch.randn(4, 16, device="cuda"))
    return str(one.dtype), str(loss.dtype), str(other.dtype), str(third.dtype)


@snippet
def grad_scaler() -> Any:
    grows = _scaled(torch.amp.GradScaler("cuda", growth_interval=3), 3, None)
    shrinks = _scaled(torch.cuda.amp.GradScaler(), 1, float("inf"))
    stays = _scaled(torch.amp.GradScaler("cuda"), 2, None)
    return grows, shrinks, stays


@snippet
def grad_scaler_training() -> Any:
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cuda", growth_interval=2)
    for _ in range(3):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(torch.randn(4, 16, device="cuda")).float().pow(2).mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return scaler.get_scale()


@snippet
def attention() -> Any:
    def run(dtype: torch.dtype, **given: Any) -> Any:
        q, k, v = (torch.randn(2, 4, 128, 64, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3))
        out = F.scaled_dot_product_attention(q, k, v, **given)
        out.sum().backward()
        return type(out.grad_fn).__name__, tuple(q.grad.shape), tuple(out.shape)

    mask = torch.ones(128, 128, device="cuda", dtype=torch.bool).tril()
    found = [run(torch.bfloat16, is_causal=True), run(torch.float32), run(torch.bfloat16, attn_mask=mask)]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        found.append(run(torch.bfloat16, is_causal=True))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION):
        found.append(run(torch.bfloat16))
    return found


@snippet
def latent_attention() -> Any:
    """DeepSeek's heads: 192 of queries and keys, 128 of values."""
    q, v = (torch.randn(2, 4, 128, d, device="cuda", dtype=torch.bfloat16, requires_grad=True) for d in (192, 128))
    out = F.scaled_dot_product_attention(q, q, v, is_causal=True)
    return type(out.grad_fn).__name__, tuple(out.shape)


@snippet
def rms_norm() -> Any:
    """One operator each way, and nothing kept but the input and a number a row."""
    x = torch.randn(16, 1 << 10, device="cuda", requires_grad=True)
    before = torch.cuda.memory_allocated()
    out = F.rms_norm(x, (1 << 10,), torch.ones(1 << 10, device="cuda", requires_grad=True))
    kept = torch.cuda.memory_allocated() - before
    out.sum().backward()
    return type(out.grad_fn).__name__, kept, tuple(x.grad.shape)


@snippet
def grouped_attention() -> Any:
    q = torch.randn(2, 8, 64, 64, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(2, 2, 64, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return tuple(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).shape)


@snippet
def encoder_layer() -> Any:
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).cuda()
    x = torch.randn(2, 16, 64, device="cuda")
    layer(x).sum().backward()
    layer.eval()
    with torch.no_grad():
        return tuple(layer(x).shape)


@snippet
def convolution() -> Any:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    ).cuda()
    out = model(torch.randn(2, 3, 16, 16, device="cuda"))
    out.sum().backward()
    return tuple(out.shape)


@snippet
def recurrent() -> Any:
    model = nn.LSTM(8, 16, 2, batch_first=True).cuda()
    out, (h, c) = model(torch.randn(2, 5, 8, device="cuda"))
    out.sum().backward()
    return tuple(out.shape), tuple(h.shape), tuple(c.shape)


@snippet
def embedding_and_loss() -> Any:
    table = nn.Embedding(100, 16).cuda()
    head = nn.Linear(16, 100).cuda()
    ids = torch.randint(0, 100, (2, 8), device="cuda")
    loss = F.cross_entropy(head(table(ids)).view(-1, 100), ids.view(-1))
    loss.backward()
    return loss.item() == loss.item(), table.weight.grad is not None


@snippet
def checkpointing() -> Any:
    from torch.utils.checkpoint import checkpoint

    model = small_model()
    found = []
    for reentrant in (True, False):
        x = torch.randn(4, 16, device="cuda", requires_grad=True)
        checkpoint(model, x, use_reentrant=reentrant).sum().backward()
        found.append(x.grad is not None)
    return found


@snippet
def loader() -> Any:
    from torch.utils.data import DataLoader, TensorDataset

    data = TensorDataset(torch.arange(8.0).view(8, 1), torch.arange(8))
    found = []
    for x, y in DataLoader(data, batch_size=4, pin_memory=True):
        found += [x.is_pinned(), x.cuda(non_blocking=True).sum().item(), str(y.to("cuda", non_blocking=True).device)]
    return found


@snippet
def save_and_load() -> Any:
    model = small_model()
    model[0].weight.data = torch.arange(512.0, device="cuda").view(32, 16)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "step": 3, "big": torch.randn(512, 512, device="cuda")}, file)
    found = []
    for where in ("cuda:0", "cpu", None, {"cuda:0": "cuda:1"}, torch.device("cuda")):
        file.seek(0)
        loaded = torch.load(file, map_location=where, weights_only=True)
        weight = loaded["model"]["0.weight"]
        found.append((str(weight.device), weight.sum().item(), tuple(loaded["big"].shape)))
    model.load_state_dict(loaded["model"])
    return found


@snippet
def masks() -> Any:
    x = torch.arange(6.0, device="cuda")
    picked = x[x > 2]
    x[x > 4] = 0
    return picked.tolist(), x.sum().item(), bool(torch.isfinite(x).all()), torch.where(x > 1)[0].tolist()


@snippet
def vmapped() -> Any:
    x = torch.arange(6.0, device="cuda").view(2, 3)
    grad = torch.func.grad(lambda y: (y * y).sum())(x)
    return torch.vmap(lambda row: row.sum())(x).tolist(), grad.tolist()


@snippet
def deep_copies() -> Any:
    import copy

    model = small_model()
    twin = copy.deepcopy(model)
    x = torch.arange(3.0, device="cuda")
    y = x.clone()
    y += 1
    return str(twin[0].weight.device), x.tolist(), y.tolist(), x.to("cuda") is x, x.new_zeros(2).tolist()


@snippet
def moves() -> Any:
    model = nn.Linear(4, 4)
    there = model.to("cuda", dtype=torch.bfloat16)
    back = there.cpu()
    x = torch.ones(3).to("cuda:1").to("cuda:0").cpu()
    return str(there.weight.dtype), str(back.weight.device), x.tolist(), torch.ones(2).cuda().half().type()


@snippet
def quiet() -> Any:
    """No warning that a CUDA build would not give."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.amp.GradScaler("cuda")
        with torch.autocast("cuda"):
            pass
        next(iter(torch.utils.data.DataLoader([torch.ones(1)], pin_memory=True)))
        torch.cuda.empty_cache()
    return [str(one.message) for one in caught]


@snippet
def arguments_in_place() -> Any:
    x = torch.zeros(4, device="cuda")
    torch.add(x, 1, out=x)
    x.clamp_(max=0.5).mul_(2)
    x.copy_(torch.arange(4.0), non_blocking=True)
    host = torch.empty(4)
    host.copy_(x)
    return x.tolist(), host.tolist()


@snippet
def lstm_and_other_modules() -> Any:
    x = torch.randn(2, 8, 16, device="cuda")
    made = [nn.GRU(16, 16).cuda()(x)[0], nn.MultiheadAttention(16, 4, batch_first=True).cuda()(x, x, x)[0]]
    made += [nn.LayerNorm(16).cuda()(x), nn.GroupNorm(2, 8).cuda()(x), nn.Dropout(0.5)(x), nn.RMSNorm(16).cuda()(x)]
    return [tuple(one.shape) for one in made]
