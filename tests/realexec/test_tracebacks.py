"""What a rank that raises prints: the user's frames and torch's, not the guard's."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import pytest

from distsim.realexec.process import session
from distsim.realexec.process.session import hide_own_frames

GUARD = session.__file__.replace("session.py", "handle.py")


def guarded(inner: Callable[[], Any], wrap: bool = False) -> BaseException:
    """What comes out of a call of *inner* through a frame of the guard's."""
    space: dict[str, Any] = {}
    tried = "try: return inner()\n  except Exception as error: raise ValueError('wrapped') from error"
    exec(compile(f"def wait(inner):\n  {tried if wrap else 'return inner()'}", GUARD, "exec"), space)
    with pytest.raises(Exception) as caught:
        space["wait"](inner)
    return caught.value


def fails() -> None:
    raise RuntimeError("Connection closed by peer")


def test_the_guards_frames_are_left_out() -> None:
    """Between the user's line and the one that raised, and in what an exception came from."""
    for error in (guarded(fails), guarded(fails, wrap=True)):
        assert "handle.py" in "".join(traceback.format_exception(error))
        hide_own_frames(error)
        text = "".join(traceback.format_exception(error))
        assert "handle.py" not in text
        assert ", in fails" in text
        assert ", in guarded" in text


def test_a_fault_of_the_guards_own_keeps_them() -> None:
    """A TypeError from the guard's own line is ours to mend: nothing of it is hidden."""
    error = guarded(None)  # type: ignore[arg-type]
    hide_own_frames(error)
    assert "handle.py" in "".join(traceback.format_exception(error))
