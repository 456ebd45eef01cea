"""Libraries that a program does without: by which handlers, and what the report says of them."""

from __future__ import annotations

from typing import Any

import distsim


def simulated(fn: Any, **how: Any) -> Any:
    return distsim.simulate(fn, on="dgx-h100:1", nproc_per_node=1, **how)


def test_a_handler_around_the_whole_program_makes_no_import_optional() -> None:
    """A program that logs any exception of its `main` (InternEvo) has the library that main needs."""

    def main() -> None:
        import flash_attn  # noqa: F401

    def body() -> bool:
        try:
            main()
        except Exception:
            return False
        return True

    def imports_itself() -> bool:
        try:
            import flash_attn  # noqa: F401
        except Exception:
            return False
        return True

    assert simulated(body).results == [True]
    assert simulated(imports_itself).results == [False]


def test_a_failure_for_want_of_an_installation_names_the_flag() -> None:
    """A program that names a module of the library that it asks to install (Transformer-SSL's "amp not installed!")."""

    def requires(why: str) -> None:
        try:
            from apex import amp
        except ImportError:
            amp = None
        assert amp is not None, why

    flag = "--gpu-libraries apex gives the simulated machine"
    assert any(flag in note for note in simulated(lambda: requires("amp not installed!"), check=False).notes)
    assert not any(flag in note for note in simulated(lambda: requires("the loss is too large"), check=False).notes)
