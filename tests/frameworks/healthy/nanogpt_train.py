"""In the manner of nanoGPT: one file, settings as globals, DDP, gradient accumulation, a cosine schedule."""

import math
import os
import sys
import time
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP

max_iters, batch_size, block_size, n_embd, n_head, n_layer = 4, 4, 16, 32, 4, 2
gradient_accumulation_steps, learning_rate, eval_interval, vocab = 4, 1e-2, 2, 65
config_keys = [k for k, v in globals().items() if not k.startswith("_") and isinstance(v, int | float | bool | str)]
for argument in sys.argv[1:]:  # configurator.py's way
    key, value = argument.removeprefix("--").split("=")
    globals()[key] = type(globals()[key])(value)
config = {k: globals()[k] for k in config_keys}

ddp = int(os.environ.get("RANK", -1)) != -1
if ddp:
    init_process_group(backend="gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    assert gradient_accumulation_steps % world == 0
    gradient_accumulation_steps //= world
else:
    rank, world = 0, 1
torch.manual_seed(1337 + rank)
ctx = nullcontext() if os.environ.get("NO_AUTOCAST") else torch.amp.autocast("cpu", dtype=torch.bfloat16)
data = torch.randint(0, vocab, (2000,), generator=torch.Generator().manual_seed(0))


def get_batch():
    ix = torch.randint(len(data) - block_size, (batch_size,))
    return torch.stack([data[i : i + block_size] for i in ix]), torch.stack(
        [data[i + 1 : i + 1 + block_size] for i in ix]
    )


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.qkv, self.proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd))

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (y.view(b, t, n_head, -1).transpose(1, 2) for y in self.qkv(self.ln1(x)).split(n_embd, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c)
        x = x + self.proj(y)
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, n_embd), nn.Embedding(block_size, n_embd)
        self.h = nn.Sequential(*(Block() for _ in range(n_layer)))
        self.lm_head = nn.Linear(n_embd, vocab, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        logits = self.lm_head(self.h(x))
        return logits, F.cross_entropy(logits.float().view(-1, vocab), targets.reshape(-1))


torch.manual_seed(0)
model = GPT()
torch.manual_seed(1337 + rank)
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95))
if ddp:
    model = DDP(model)
raw_model = model.module if ddp else model


@torch.no_grad()
def estimate_loss():
    model.eval()
    losses = torch.stack([raw_model(*get_batch())[1] for _ in range(3)])
    model.train()
    return losses.mean()


t0 = time.time()
for step in range(max_iters):
    lr = learning_rate * 0.5 * (1 + math.cos(math.pi * step / max_iters))
    for group in optimizer.param_groups:
        group["lr"] = lr
    if step % eval_interval == 0 and rank == 0:
        print(f"step {step}: val loss {estimate_loss():.3f}")
    for micro in range(gradient_accumulation_steps):
        if ddp:
            model.require_backward_grad_sync = micro == gradient_accumulation_steps - 1
        with ctx:
            _, loss = model(*get_batch())
            loss = loss / gradient_accumulation_steps
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if rank == 0:
        print(f"iter {step}: loss {loss.item() * gradient_accumulation_steps:.3f}, lr {lr:.2e}")
assert time.time() >= t0
weights = sum(p.double().abs().sum().item() for p in model.parameters())
print(f"rank {rank} of {world}: {weights:.2f} {config['max_iters']}")
if ddp:
    destroy_process_group()
