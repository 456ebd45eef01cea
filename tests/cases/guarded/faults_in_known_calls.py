"""Of each operation another shape, dtype, root, reduce op or operation in the fourth round is named before it goes out.

ranks: 2
kind: caught
guard: strict
prints: named all
"""

import inspect

from distsim.debug import CollectiveMismatch
from tests.cases.operations import *

FAULTS = {
    "shape_mismatch": {"n": 6},
    "dtype_mismatch": {"dtype": torch.int32},
    "root_mismatch": {"root": 1},
    "reduce_op_mismatch": {"op": dist.ReduceOp.MAX},
}
for call in ALL:
    takes = inspect.signature(call).parameters
    for kind, fault in FAULTS.items():
        if not set(fault) <= set(takes):
            continue
        for number in range(4):
            bad = number == 3
            try:
                call(**fault if bad and rank == 1 else {})
            except (CollectiveMismatch, RuntimeError) as error:
                assert bad and kind in str(error) and "operations.py:" in str(error), (call.__name__, error)
            else:
                assert not bad, (call.__name__, kind)
    for number in range(3):
        call()
    try:
        (all_reduce if call in (barrier, barrier_async) else barrier)() if rank == 1 else call()
    except (CollectiveMismatch, RuntimeError) as error:
        assert "op_mismatch" in str(error), (call.__name__, error)
    else:
        raise AssertionError(f"{call.__name__} went out")
print("named all")
dist.destroy_process_group()
