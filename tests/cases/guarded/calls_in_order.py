"""In a loop each call soon is known by being the one that came after the one before the last time.

ranks: 2
kind: healthy
guard: check
"""

from distsim.realexec.guard import fast_path
from tests.cases.operations import *
from tests.cases.releases import SHORT_WAY

find, searched = fast_path.find, []
fast_path.find = lambda *args: searched.append(args[1]) or find(*args)
for number in range(20):  # the interpreter, too, has another way of its own from the eighth time on
    before = len(searched)
    for call in ALL + MESSAGES:
        call()
    assert number < 14 or not (SHORT_WAY and searched[before:]), (number, searched[before:])
for call in (all_reduce, all_reduce, barrier, all_reduce, barrier, barrier, messages, all_reduce):
    call()  # in another order all is found as well
for count in (3, 3, 3, 3, 2, 4, 3):
    many = [ones() for _ in range(count)]
    with dist.distributed_c10d._coalescing_manager():
        for tensor in many:
            dist.all_reduce(tensor)
    assert all(tensor.tolist() == [2, 2] for tensor in many), (count, many)
dist.destroy_process_group()
