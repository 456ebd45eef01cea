"""Teaches: an all-reduce written by hand, as a ring of sends, compared with the library's own.

The tensor is cut into one chunk for each rank. In the first round of n - 1 steps every chunk travels
once around and collects its sum; in the second the finished chunks travel around again. Each step
sends to the right without blocking and receives from the left: if all ranks used a blocking send
first, they would all wait (see scenarios/hangs/crossed_sends.py).
"""

import torch
import torch.distributed as dist


def ring_all_reduce(tensor: torch.Tensor) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % size, (rank - 1) % size
    chunks = list(tensor.chunk(size))
    assert len(chunks) == size, f"expected at least {size} elements, got {tensor.numel()}"

    def step(outgoing: int, incoming: int, *, add: bool) -> None:
        received = torch.empty_like(chunks[incoming])
        sending = dist.isend(chunks[outgoing].contiguous(), right)
        dist.recv(received, left)
        sending.wait()
        chunks[incoming].copy_(chunks[incoming] + received if add else received)

    for i in range(size - 1):  # reduce-scatter: rank r ends with the sum of chunk r + 1
        step((rank - i) % size, (rank - i - 1) % size, add=True)
    for i in range(size - 1):  # all-gather
        step((rank - i + 1) % size, (rank - i) % size, add=False)


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mine = torch.arange(13.0) + 100 * rank
    expected = mine.clone()
    dist.all_reduce(expected)
    ring_all_reduce(mine)
    assert torch.equal(mine, expected), f"rank {rank}: expected {expected.tolist()}, got {mine.tolist()}"
    print(f"rank {rank}: the ring and all_reduce agree, {mine[0].item():.0f} ... {mine[-1].item():.0f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
