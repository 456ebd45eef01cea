"""`conform(body)`: the same body on real gloo and in the simulator, with the same answers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conformance.arms import Conform, gloo, sim
from conformance.plain import differences

HERE = Path(__file__).parent

SLOW_ON_GLOO = {
    "FileStore of one",
    "PrefixStore over FileStore of one",
    "TCPStore",
    "TCPStore without libuv",
    "PrefixStore over TCPStore",
    "PrefixStore twice",
    "nobody_comes",
    "refusals",
    "timeout_given",
    "zero_redundancy",
    "fsdp",
    "checkpoint",
}
"""Bodies that take over a second in real processes: waits for timeouts, and large imports."""


ONE_MORE = {"PrefixStore twice", "PrefixStore over FileStore of one", "one_tensor"}
"""Bodies that take seconds and are one more of their kind: a store in which gloo waits, memory that is shared as
`listed_twice` shares it."""


@pytest.hookimpl(tryfirst=True)  # before xdist looks at the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark both arms alike: sim asks gloo for the answer when nobody has yet, so they run in one process."""
    for item in items:
        if not item.path.is_relative_to(HERE):
            continue
        arm, _, body = item.name.partition("[")[2].removesuffix("]").partition("-")
        if arm not in ("gloo", "sim"):
            continue
        if body in SLOW_ON_GLOO:
            item.add_marker(pytest.mark.slow)
        name = item.name.partition("[")[0]
        if body in ONE_MORE and name in ("test_store_alone", "test_shared_memory"):
            item.add_marker(pytest.mark.soak)
        item.add_marker(pytest.mark.xdist_group(f"{item.path.stem} {name} {body}"))


@pytest.fixture(scope="session")
def gloo_answers() -> dict[tuple[Any, ...], list[Any]]:
    """What gloo answered in this session, so that the sim arm need not ask again."""
    return {}


@pytest.fixture(params=["gloo", "sim"])
def conform(request: pytest.FixtureRequest, gloo_answers: dict[tuple[Any, ...], list[Any]]) -> Conform:
    """On the arm "gloo" the body must end by itself; on "sim" it must answer what gloo answers."""

    def check(body: Callable[..., Any], *args: Any) -> None:
        key = (body, *args)
        if key not in gloo_answers:
            gloo_answers[key] = gloo(body, *args)
        expected = gloo_answers[key]
        assert len(expected) == 4
        assert any(answer for answer in expected), f"{body.__name__} answers nothing: it checks nothing"
        if request.param == "gloo":
            return
        got = sim(body, *args)
        lines = [
            f"rank {rank}: {line}"
            for rank, (one, other) in enumerate(zip(expected, got, strict=True))
            for line in differences(one, other)
        ]
        if lines:
            pytest.fail(f"{body.__name__} on sim is not what gloo answers:\n" + "\n".join(lines[:40]), pytrace=False)

    return check
