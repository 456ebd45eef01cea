"""Whose a frame is, which line a report names, and in which form."""

from __future__ import annotations

import sys
import sysconfig
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from distsim.debug.evidence.processes import parse_faulthandler, user_part
from distsim.debug.messages import site_text
from distsim.debug.records import Site, frames
from distsim.debug.records.frames import (
    Owner,
    owner,
    program_frames,
    raised_at,
    shown,
    shown_from,
    steps,
    torchs_thread,
)
from distsim.debug.report.stack_tree import merge_stacks
from distsim.debug.rings import callsite
from distsim.debug.rings.callsite import CallSites
from distsim.debug.rings.reader import RingReader
from distsim.debug.rings.writer import RingWriter
from distsim.text.codec import decode, encode

PATHS = sysconfig.get_paths()
LIBRARY = f"{PATHS['purelib']}/accelerate/accelerator.py"
TORCH = f"{PATHS['purelib']}/torch/distributed/distributed_c10d.py"
DISTSIM = str(Path(frames.__file__).with_name("callsite.py"))


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A working folder; the one before is put back."""
    with shown_from(str(tmp_path)):
        yield tmp_path


@pytest.mark.parametrize(
    ("file", "whose"),
    [
        ("/home/me/train.py", Owner.USER),
        ("train.py", Owner.USER),
        ("/home/me/editable/src/package/module.py", Owner.USER),
        ("<stdin>", Owner.USER),
        ("<string>", Owner.USER),
        ("<ipython-input-3-abc>", Owner.USER),
        ("/tmp/ipykernel_12/345.py", Owner.USER),
        ("/home/me/venv/lib/python3.10/site-packages/lightning/trainer.py", Owner.LIBRARY),
        ("/usr/lib/python3/dist-packages/yaml/reader.py", Owner.LIBRARY),
        (".venv/lib/python3.12/site-packages/lightning/trainer.py", Owner.LIBRARY),
        (LIBRARY, Owner.LIBRARY),
        (TORCH, Owner.MACHINERY),
        (f"{PATHS['purelib']}/torch/testing/_internal/distributed/distributed_test.py", Owner.LIBRARY),
        (DISTSIM, Owner.MACHINERY),
        (str(Path(DISTSIM).resolve()), Owner.MACHINERY),
        (f"{PATHS['scripts']}/torchrun", Owner.MACHINERY),
        (f"{PATHS['stdlib']}/threading.py", Owner.MACHINERY),
        ("<frozen runpy>", Owner.MACHINERY),
        ("<eval_with_key>.3", Owner.MACHINERY),
        ("<attrs generated init a.B>", Owner.MACHINERY),
    ],
)
def test_whose_a_file_is(file: str, whose: Owner) -> None:
    """Installed code is a library's, torch, distsim and the standard library are machinery, all else is the user's."""
    assert owner(file) is whose


@pytest.mark.parametrize(
    "file", ["/opt/pytorch/torch/nn/parallel/distributed.py", "/opt/conda/lib/python3.9/threading.py"]
)
def test_torch_and_python_lie_elsewhere_on_other_machines(file: str) -> None:
    """In a stranger's dump torch and the standard library are known by the shape of their paths."""
    assert owner(file, abroad=True) is Owner.MACHINERY
    assert owner("/home/me/torch/train.py", abroad=True) is Owner.USER


def test_the_users_line_comes_first_and_the_librarys_beside_it() -> None:
    """Below any number of library frames the innermost user frame is named, with the library's innermost line."""
    stack = [
        (TORCH, 1, "all_reduce"),
        (LIBRARY, 2345, "Accelerator.gather"),
        *[(LIBRARY, n, f"level{n}") for n in range(60)],
        ("/home/me/train.py", 88, "main"),
        (LIBRARY, 7, "notebook_launcher"),
        ("/home/me/train.py", 99, "<module>"),
    ]
    first, second = program_frames(stack)
    assert (first.file, first.line, second.line) == ("/home/me/train.py", 88, 99)
    assert first.through is not None
    assert first.through.line == 2345
    assert second.through is None
    assert site_text(first) == "me/train.py:88 (through accelerate/accelerator.py:2345)"
    assert decode(encode(first), Site) == first


def test_without_a_line_of_the_users_a_library_stands_in() -> None:
    """Of an installed program the outermost frame that did not start it is named, and its innermost beside it."""
    stack = [
        (TORCH, 1, "all_reduce"),
        (f"{PATHS['purelib']}/torchtitan/train.py", 30, "step"),
        (f"{PATHS['purelib']}/torchtitan/train.py", 20, "main"),
        (f"{PATHS['scripts']}/torchtitan", 8, "<module>"),
        ("<frozen runpy>", 88, "_run_code"),
    ]
    (only,) = program_frames(stack)
    assert only.line == 20
    assert only.through is not None
    assert only.through.line == 30
    assert program_frames([(TORCH, 1, "f"), ("<frozen runpy>", 2, "g")]) == ()


def test_the_line_that_spawns_is_nobodys() -> None:
    """`python -c "from multiprocessing.spawn ..."` is how a spawned rank begins, not a line of its program."""
    stack = [("/home/me/train.py", 5, "work"), (f"{PATHS['stdlib']}/multiprocessing/spawn.py", 122, "spawn_main")]
    assert len(program_frames([*stack, ("<string>", 1, "<module>")])) == 1
    assert len(program_frames([stack[0], ("<string>", 1, "<module>")])) == 2
    worker = ("/site-packages/execnet/gateway_base.py", 1291, "executetask")  # pytest-xdist
    assert program_frames([worker, ("<string>", 8, "<module>"), ("<string>", 1, "<module>")])[0].line == 1291


def test_code_that_a_class_was_given_is_nobodys() -> None:
    """Dataclasses and named tuples are made of `<string>` code, which is no line of the program that imports them."""
    made = ("<string>", 117, "__create_fn__.<locals>.__init__")
    (only,) = program_frames([(LIBRARY, 285, "__init__"), made, ("/home/me/train.py", 39, "<module>")])
    assert (only.file, only.line) == ("/home/me/train.py", 39)


def test_one_form_of_a_path(home: Path) -> None:
    """Below the working folder a file is named relative to it, however it was given."""
    assert shown(str(home / "package" / "train.py")) == "package/train.py"
    assert shown("./package/../train.py") == "train.py"
    assert shown("/elsewhere/train.py") == "/elsewhere/train.py"
    assert shown("<stdin>") == "<stdin>"


def test_a_dumped_stack_gives_the_same_line(home: Path) -> None:
    """faulthandler's text gives the frames that a walk gives: one rule, one form of paths."""
    text = "\n".join(
        [
            "Current thread 0x00000000000000ff (most recent call first):",
            f'  File "{TORCH}", line 10 in all_reduce',
            f'  File "{LIBRARY}", line 412 in wait',
            '  File "train.py", line 88 in main',
            f'  File "{home}/train.py", line 99 in <module>',
        ]
    )
    found = user_part(parse_faulthandler(text, 0xFF))
    assert [str(site) for site in found] == ["train.py:88", "train.py:99"]
    assert found[0].through is not None
    assert found[0].through.line == 412


def test_the_librarys_line_is_a_frame_of_its_own_in_a_merged_stack() -> None:
    """Ranks that left one line of the user's through different lines of a library part below it."""
    main = Site("train.py", 88, "main")
    one, other = (Site("train.py", 88, "main", Site("lib.py", line, "gather")) for line in (1, 2))
    root = merge_stacks({0: [one], 1: [other]})
    (node,) = root.children.values()
    assert (node.site, node.ranks, len(node.children)) == (main, [0, 1], 2)


def module(path: Path, text: str) -> dict[str, Any]:
    """The names of a module at *path*."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    names: dict[str, Any] = {"__name__": path.stem}
    exec(compile(text, str(path), "exec"), names)
    return names


def test_a_helper_reached_another_way_has_another_stack(tmp_path: Path, home: Path) -> None:
    """The whole stack of each call is its own, also where only frames far above the call differ."""
    ring = RingWriter(tmp_path / "0.ring", rank=0, world_size=1, local_rank=0, job="job", attempt=0)
    sites = CallSites(ring)
    user = module(
        home / "train.py",
        "def low(): return here()\ndef mid(): return low()\ndef step(): return mid()\ndef evaluate(): return mid()\n",
    )
    user["here"] = lambda: sites.here(2)
    reader = RingReader(ring.path)
    found = [[site.function for site in reader.site(user[name]()[0])][:3] for name in ("step", "evaluate", "step")]
    assert found == [["low", "mid", "step"], ["low", "mid", "evaluate"], ["low", "mid", "step"]]


def test_a_library_in_between_is_named_beside_the_users_line(tmp_path: Path, home: Path) -> None:
    """A call that an installed library makes is at the line that called the library; each line there is its own."""
    ring = RingWriter(tmp_path / "0.ring", rank=0, world_size=1, local_rank=0, job="job", attempt=0)
    sites = CallSites(ring)
    library = module(home / "lib/site-packages/metrics.py", "def a(): return here()\ndef b():\n    return here()\n")
    library["here"] = lambda: sites.here(2)
    user = module(home / "train.py", "def main(which): return which()\n")
    reader = RingReader(ring.path)
    places = [user["main"](library[name]) for name in ("a", "b")]
    stacks = [reader.site(offset) for offset, _, _ in places]
    assert [str(stack[0]) for stack in stacks] == ["train.py:1", "train.py:1"]
    assert [stack[0].through and stack[0].through.line for stack in stacks] == [1, 3]
    assert places[0][1] != places[1][1]


def test_a_call_in_a_thread_of_torchs_own_is_not_at_the_line_where_the_main_thread_stands(tmp_path: Path) -> None:
    """An asynchronous checkpoint's calls name torch's own code: the user's line of that moment has no part in them."""
    ring = RingWriter(tmp_path / "0.ring", rank=0, world_size=1, local_rank=0, job="job", attempt=0)
    file = f"{PATHS['purelib']}/torch/distributed/checkpoint/made_up.py"
    names: dict[str, Any] = {"__name__": "made_up", "here": CallSites(ring).here, "found": []}
    exec(compile("def save():\n    found.append(here(1))\ndef run():\n    save()\n", file, "exec"), names)
    thread = threading.Thread(target=names["run"])
    thread.start()
    thread.join()
    ((offset, _, _),) = names["found"]
    assert [(site.file, site.line) for site in RingReader(ring.path).site(offset)] == [(shown(file), 4)]


@pytest.mark.parametrize("file", ["distributed/distributed_c10d.py", "futures/__init__.py", "nn/powerSGD_hook.py"])
def test_what_anybody_hands_to_a_thread_is_no_place(file: str) -> None:
    """A callback runs now in this thread, now in that one: were torch's line its place, ranks would seem to differ."""
    thread = (f"{PATHS['stdlib']}/threading.py", 1002, "Thread._bootstrap")
    assert torchs_thread([(f"{PATHS['purelib']}/torch/{file}", 251, "then"), thread]) == ()


def test_code_that_is_made_anew_does_not_fill_the_memory(tmp_path: Path, home: Path, monkeypatch: Any) -> None:
    """Routes to a call are remembered up to a limit."""
    monkeypatch.setattr(callsite, "MOST", 8)
    ring = RingWriter(tmp_path / "0.ring", rank=0, world_size=1, local_rank=0, job="job", attempt=0)
    sites = CallSites(ring)
    for _ in range(50):
        names = {"here": lambda: sites.here(2)}
        exec(compile("here()", str(home / "made.py"), "exec"), names)
    assert len(sites._known) <= 8
    assert len(sites._kept) <= 8


def test_a_traceback_gives_the_users_frames(home: Path) -> None:
    """Where an exception was raised is told by the same rule."""
    library = module(home / "lib/site-packages/thrower.py", "def throw(): raise ValueError('x')\n")
    user = module(home / "train.py", "def main(f):\n    f()\n")
    try:
        user["main"](library["throw"])
    except ValueError as error:
        first, *_ = raised_at(error.__traceback__)
    assert str(first) == "train.py:2"
    assert first.through is not None
    assert first.through.file.endswith("thrower.py")


def test_a_live_stack_is_walked_from_within() -> None:
    """`steps` begins at the frame it is given."""
    frame = sys._getframe()
    assert isinstance(frame, types.FrameType)
    assert next(iter(steps(frame)))[2] == "test_a_live_stack_is_walked_from_within"


def far(depth: int, ask: Any) -> Any:
    """*ask*, so many calls further in."""
    return ask() if depth == 0 else far(depth - 1, ask)


def test_a_deep_stack_is_told_from_one_that_differs_at_its_end() -> None:
    """However often a way was walked before: each position counts, the nearest and the farthest."""
    ways: dict[str, set[Any]] = {}

    def here() -> Any:
        return callsite.way_to(sys._getframe())

    def again(name: str) -> None:
        for _ in range(6):
            ways.setdefault(name, set()).add(here())

    for _ in range(12):
        before = {name: set(found) for name, found in ways.items()}
        far(12, lambda: again("near"))
        far(20, lambda: again("far"))
    assert ways == before, "it is another way each time"
    far(20, lambda: again("elsewhere"))
    assert not ways["near"] & ways["far"]
    assert not ways["near"] & ways["elsewhere"]
    assert not ways["far"] & ways["elsewhere"]


def test_a_generator_is_told_by_who_resumes_it() -> None:
    """It is the same frame each time, but those who called it are others."""

    def ask() -> Any:
        return {callsite.way_to(sys._getframe()) for _ in range(4)}

    def asks() -> Any:
        while True:
            yield far(12, ask)

    steps_of_it = asks()

    def train() -> Any:
        return next(steps_of_it)

    def evaluate() -> Any:
        return next(steps_of_it)

    first, second, third = far(9, train), far(9, evaluate), far(9, train)
    assert not first & second
    assert not second & third


def test_whoever_traces_afterwards_is_not_disturbed() -> None:
    """A tracer that is set while frames that were walked before are on the stack gets its events."""
    seen = []

    def tracer(frame: types.FrameType, event: str, _: Any) -> Any:
        seen.append((frame.f_code.co_name, event))
        return tracer

    def traced() -> int:
        for _ in range(4):
            callsite.way_to(sys._getframe())
        before = sys.gettrace()
        sys.settrace(tracer)
        try:
            return far(1, lambda: 5)
        finally:
            sys.settrace(before)

    assert far(12, traced) == 5
    assert ("far", "line") in seen
