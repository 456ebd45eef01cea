"""Subclasses see their calls, negated views have their values, another dtype and shape is another call.

ranks: 2
kind: healthy
guard: check
"""

from tests.cases.begin import dist, torch

group, seen = dist.group.WORLD, []


class Own(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        seen.append(str(func))
        with torch._C._DisableTorchDispatch():
            return func(*args, **(kwargs or {}))


def own():
    return torch.ones(2).as_subclass(Own)


def reduced(*tensors):
    opts = dist.AllreduceOptions()
    for tensor in tensors:
        work = group.allreduce([tensor], opts)
        work.wait()
        yield tensor


plain = lambda: torch.ones(2)
assert [t.tolist() for t in reduced(plain(), plain(), plain(), plain())] == [[2, 2]] * 4
others = list(reduced(plain(), plain(), torch.ones(2, dtype=torch.int32), torch.ones(3)))[2:]
assert [t.tolist() for t in others] == [[2, 2], [2, 2, 2]]
before = len(seen)
for _ in reduced(plain(), plain(), own(), plain()):
    pass
assert any("allreduce" in name for name in seen[before:]), seen
negated = lambda: torch.tensor([1j, 1j]).conj().imag
assert negated().is_neg()
(alone,) = reduced(negated())
assert list(reduced(plain(), plain(), negated()))[2].tolist() == alone.tolist()
dist.destroy_process_group()
