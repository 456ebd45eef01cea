"""Calls that a public function of torch.distributed refused before they reached a process group.

torch checks most arguments itself (`Invalid function argument`), pickles objects, and looks the group up. An
exception there leaves no trace in any group. Each public function reports its exceptions to torch's exception log,
where the real and the simulated mode listen. A successful call costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType

__all__ = ["FIRST_CALLS", "came_out"]

FIRST_CALLS: dict[str, str] = {
    "all_gather": "all_gather",
    "all_gather_object": "all_gather",
    "all_gather_single": "all_gather_into_tensor",
    "all_reduce": "all_reduce",
    "all_to_all": "all_to_all",
    "all_to_all_single": "all_to_all_single",
    "barrier": "barrier",
    "broadcast": "broadcast",
    "broadcast_object_list": "broadcast",
    "gather": "gather",
    "gather_object": "all_gather",
    "recv": "recv",
    "recv_object_list": "recv",
    "reduce": "reduce",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter_tensor",
    "scatter": "scatter",
    "scatter_object_list": "broadcast",
    "send": "send",
    "send_object_list": "send",
}
"""First operation of each public function of torch.distributed that logs its exceptions. (`isend`, `irecv`,
`batch_isend_irecv` and `monitored_barrier` do not log.)
"""

_LOGGER = "c10d_logger.py"
_AFTERWARDS = "_tensor_to_object"
"""Function in which torch unpickles received data, after the calls have ended."""


def came_out(error: BaseException, made_record: Callable[[CodeType, bool], bool]) -> bool:
    """Return whether a call was recorded, or another public function reported it, before *error* was raised.

    *made_record(code, innermost)* says whether a frame of this code has made a record; the outermost frame of the
    traceback is that of the logging decorator.
    """
    step = error.__traceback__
    step = None if step is None else step.tb_next
    while step is not None:
        code = step.tb_frame.f_code
        if code.co_name == _AFTERWARDS or code.co_filename.endswith(_LOGGER) or made_record(code, step.tb_next is None):
            return True
        step = step.tb_next
    return False
