"""One step through a pipeline: 1F1B, or interleaved where a rank has several chunks (arXiv:2104.04473)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from log import tokens
from stages import Tensor, gathered


class Pipeline:
    """The chunks of this rank. *build(number, stages)* makes one; chunk c of rank r is stage c * pp + r."""

    def __init__(
        self, args: Any, group: Any, tp: Tensor, device: torch.device, build: Callable[..., nn.Module]
    ) -> None:
        self.args, self.group, self.tp, self.device = args, group, tp, device
        self.size, self.rank = args.pp, dist.get_rank(group)
        self.first, self.last = self.rank == 0, self.rank == self.size - 1
        stages = args.pp * args.vpp
        self.chunks = [build(chunk * args.pp + self.rank, stages) for chunk in range(args.vpp)]
        ranks = dist.get_process_group_ranks(group)
        self.before, self.behind = ranks[self.rank - 1], ranks[(self.rank + 1) % self.size]
        self.ends = ranks[0], ranks[-1]
        self.blocking = args.arch == "llama" and args.vpp == 1 and args.framework == "nanotron"
        # As Megatron-LM: of an activation that is whole on each rank of tp, each sends its part.
        self.scatter = tp.size > 1 and not tp.sequence and not self.blocking
        parts = tp.size if self.scatter or tp.sequence else 1
        self.shape = (args.seq // args.cp // parts, args.mbs, args.hidden)
        self.looks = [torch.zeros(numbers, dtype=torch.long, device=device) for numbers in (7, 6)]

    def parameters(self) -> list[nn.Parameter]:
        return [p for chunk in self.chunks for p in chunk.parameters()]

    def step(self, optimizer: Any) -> torch.Tensor | None:
        """All micro-batches forward and backward: gradients are in, the mean loss comes back where it is known."""
        self.optimizer = optimizer
        self.inputs = [deque() for _ in self.chunks]
        self.outputs = [deque() for _ in self.chunks]
        self.arrived = [deque() for _ in self.chunks]
        self.gradients = [deque() for _ in self.chunks]
        self.losses: list[torch.Tensor] = []
        self.to_come = self.args.accum * len(self.chunks)
        if self.size == 1:
            for _ in range(self.args.accum):
                self.forward(0)
                self.backward(0)
        elif len(self.chunks) == 1:
            self.one_forward_one_backward()
        else:
            self.interleaved()
        self.sum_tied_embeddings()
        return torch.stack(self.losses).sum() if self.losses else None

    # One micro-batch.

    def forward(self, chunk: int) -> torch.Tensor:
        stage, args = self.chunks[chunk], self.args
        text = self.text() if stage.first or stage.last else (None, None)
        x = text[0] if stage.first else self.arrived[chunk].popleft()
        y = stage(x, text[1])
        if stage.last:
            y = y / args.accum
            self.losses.append(y.detach())
        self.inputs[chunk].append(None if stage.first else x)
        self.outputs[chunk].append(y)
        return y

    def text(self) -> tuple[torch.Tensor, ...]:
        """Tokens and targets [batch, seq] of a micro-batch, this rank's part of the sequence."""
        text, ring = tokens(self.args.vocab, self.args.seq, self.args.mbs, self.device), self.args.ring
        return text if ring is None else tuple(ring.part(each.t()).t() for each in text)

    def backward(self, chunk: int) -> torch.Tensor | None:
        stage = self.chunks[chunk]
        self.to_come -= 1
        if not self.to_come:
            self.optimizer.expect_last()
        x, y = self.inputs[chunk].popleft(), self.outputs[chunk].popleft()
        if stage.last:
            # Means over data parallel ranks come out as sums; fp16 needs its scale.
            (y * (self.optimizer.scale / (self.args.dp * self.args.cp))).backward()
        else:
            torch.autograd.backward(y, self.gradients[chunk].popleft())
        self.optimizer.after_backward()
        return None if x is None else x.grad

    # Schedules.

    def one_forward_one_backward(self) -> None:
        accum = self.args.accum
        warmup = min(self.size - 1 - self.rank, accum)
        for _ in range(warmup):
            self.exchange(recv_before=not self.first)
            self.exchange(to_behind=self.forward(0))
        steady = accum - warmup
        if steady:
            self.exchange(recv_before=not self.first)
        for n in range(steady):
            y = self.forward(0)
            if not self.last:
                self.exchange(to_behind=y, recv_behind=True)
            dx = self.backward(0)
            if not self.first:
                self.exchange(to_before=dx, recv_before=n < steady - 1)
        for _ in range(warmup):
            self.exchange(recv_behind=True)
            dx = self.backward(0)
            if not self.first:
                self.exchange(to_before=dx)

    def interleaved(self) -> None:
        size, chunks = self.size, len(self.chunks)
        total = self.args.accum * chunks
        warmup = total if self.args.accum == size else min((size - self.rank - 1) * 2 + (chunks - 1) * size, total)
        steady = total - warmup

        def fore(k: int) -> int:
            return k % (size * chunks) // size

        def back(k: int) -> int:
            return chunks - 1 - fore(k)

        def onward(chunk: int, y: torch.Tensor) -> torch.Tensor | None:
            return None if self.chunks[chunk].last else y

        self.exchange(recv_before=not self.first)
        for k in range(warmup):
            y = self.forward(fore(k))
            wanted = k < total - 1 and not (self.first and fore(k + 1) == 0)
            gradient = k == warmup - 1 and steady > 0 and not self.last
            self.exchange(
                to_behind=onward(fore(k), y),
                recv_before=wanted,
                recv_behind=gradient,
                chunk_before=fore(k + 1),
                chunk_behind=chunks - 1,
            )
        for k in range(steady):
            at = k + warmup
            y, dx = self.forward(fore(at)), self.backward(back(k))
            next_fore, next_back = fore(at + 1), back(k + 1)
            wanted, gradient = k < steady - 1, True
            if self.first:  # from the last rank, size - 1 micro-batches behind, its next chunk
                next_fore = fore(at - size + 1) + 1
                wanted = wanted and next_fore < chunks
            if self.last:
                next_back = back(k - size + 1) - 1
                gradient = next_back >= 0
            self.exchange(
                to_behind=onward(fore(at), y),
                to_before=dx,
                recv_before=wanted,
                recv_behind=gradient,
                chunk_before=next_fore,
                chunk_behind=next_back,
            )
        if not steady:
            self.exchange(recv_behind=not self.last, chunk_behind=chunks - 1)
        for k in range(steady, total):
            dx = self.backward(back(k))
            gradient = k < total - 1 and not (self.last and back(k + 1) == chunks - 1)
            self.exchange(to_before=dx, recv_behind=gradient, chunk_behind=back(min(k + 1, total - 1)))

    # Between the ranks.

    def exchange(
        self,
        *,
        to_before: torch.Tensor | None = None,
        to_behind: torch.Tensor | None = None,
        recv_before: bool = False,
        recv_behind: bool = False,
        chunk_before: int = 0,
        chunk_behind: int = 0,
    ) -> None:
        """Send and receive in one batch. Of two ranks each is before and behind the other, hence the order."""
        if self.blocking:
            return self.one_by_one(to_before, to_behind, recv_before, recv_behind)
        ops, activation, gradient = [], None, None
        if to_before is not None:
            ops.append(dist.P2POp(dist.isend, self._part(to_before), self.before, self.group))
        if to_behind is not None:
            ops.append(dist.P2POp(dist.isend, self._part(to_behind.detach()), self.behind, self.group))
        if recv_behind:
            gradient = torch.empty(self.shape, dtype=self.args.torch_dtype, device=self.device)
            ops.append(dist.P2POp(dist.irecv, gradient, self.behind, self.group))
        if recv_before:
            activation = torch.empty(self.shape, dtype=self.args.torch_dtype, device=self.device)
            ops.append(dist.P2POp(dist.irecv, activation, self.before, self.group))
        if not ops:
            return
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        if activation is not None:
            self.arrived[chunk_before].append(self._whole(activation).requires_grad_())
        if gradient is not None:
            self.gradients[chunk_behind].append(self._whole(gradient))

    def one_by_one(
        self, to_before: torch.Tensor | None, to_behind: torch.Tensor | None, recv_before: bool, recv_behind: bool
    ) -> None:
        """Exchange messages one after another, in nanotron's order (pipeline_parallel/state.py, run_communication).

        A mask of the tokens follows each activation.
        """
        if to_behind is not None:
            self.send(to_behind.detach(), self.behind)
            self.send(torch.ones(self.args.mbs, self.args.seq, dtype=torch.bool, device=self.device), self.behind)
        if recv_before:
            self.arrived[0].append(self.receive(self.shape, self.args.torch_dtype, self.before).requires_grad_())
            self.receive((self.args.mbs, self.args.seq), torch.bool, self.before)
        if to_before is not None:
            self.send(to_before, self.before)
        if recv_behind:
            self.gradients[0].append(self.receive(self.shape, self.args.torch_dtype, self.behind))

    def send(self, x: torch.Tensor, to: int) -> None:
        """Send two messages of metadata, which the host reads back, and then x (nanotron: pipeline_parallel/p2p.py)."""
        x = x.contiguous()
        numbers = [x.dim(), x.dim(), 1, x.nbytes, 0, 0, 0], [*x.shape, *x.stride()]
        for look, values in zip(self.looks, numbers, strict=True):
            look[: len(values)].copy_(torch.tensor(values))
            dist.send(look[: len(values)], to, group=self.group)
            look[0].item()
        dist.send(x, to, group=self.group)

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, source: int) -> torch.Tensor:
        """Receive what `send` sends: the metadata, which the host reads, and then the tensor."""
        for look, count in zip(self.looks, (7, 2 * len(shape)), strict=True):
            dist.recv(look[:count], source, group=self.group)
            look[:count].tolist()
        x = torch.empty(shape, dtype=dtype, device=self.device)
        dist.recv(x, source, group=self.group)
        return x

    def _part(self, x: torch.Tensor) -> torch.Tensor:
        return (x.chunk(self.tp.size)[self.tp.rank] if self.scatter else x).contiguous()

    def _whole(self, x: torch.Tensor) -> torch.Tensor:
        return gathered(x, self.tp)[0] if self.scatter else x

    @torch.no_grad()
    def sum_tied_embeddings(self) -> None:
        """The first and the last stage have one weight between them, and each has a part of its gradient."""
        if self.size == 1 or not self.chunks[0].tied or not (self.first or self.last):
            return
        weight = self.chunks[0].embedding.weight if self.first else self.chunks[-1].output.weight
        other = torch.empty_like(weight.main_grad)
        peer = self.ends[1] if self.first else self.ends[0]
        send = dist.P2POp(dist.isend, weight.main_grad, peer, self.group)
        recv = dist.P2POp(dist.irecv, other, peer, self.group)
        for work in dist.batch_isend_irecv([send, recv]):
            work.wait()
        weight.main_grad.add_(other)
