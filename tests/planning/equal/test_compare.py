"""Two recorded runs: what is compared, what decides, and where a difference begins."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from distsim.errors import UsageError
from distsim.planning.equal.compare import How, compare, starts, teams
from distsim.planning.equal.record import RecordedRun, RecordedTensor, TensorKey
from distsim.planning.equal.report import lines, to_json

DRAW = np.random.default_rng(3)
INPUT, WEIGHT, GRADIENT = (DRAW.standard_normal((4, 6)) for _ in range(3))
Tensors = list[tuple[str, str, NDArray[Any]]]


def _entries(tensors: Tensors, step: int = 0) -> dict[TensorKey, RecordedTensor]:
    return {
        TensorKey(0 if kind == "start" else step, kind, 0, name, 0, 0): RecordedTensor(
            "train.py:7", lambda values=values: values
        )  # type: ignore[misc]
        for kind, name, values in tensors
    }


def _run(*ranks: Tensors) -> RecordedRun:
    return RecordedRun({rank: _entries(tensors) for rank, tensors in enumerate(ranks)})


def _model(
    weight: NDArray[Any] = WEIGHT, gradient: NDArray[Any] = GRADIENT, output: NDArray[Any] = INPUT, name: str = "w"
) -> Tensors:
    return [
        ("start", name, weight),
        ("input", "", INPUT),
        ("output", "block", output),
        ("gradient", name, gradient),
        ("parameter", name, weight - gradient),
    ]


WHOLE = _run(_model())


def test_layouts_that_make_the_same_are_equal() -> None:
    """A weight cut in two, with its gradient."""
    sharded = _run(*(_model(w, g) for w, g in zip(np.split(WEIGHT, 2), np.split(GRADIENT, 2), strict=True)))
    found = compare(sharded, WHOLE, WHOLE)
    assert not found.differs
    assert found.compared == {"output": 1, "gradient": 1, "parameter": 1}
    assert next(line.text for line in lines(found)).startswith("EQUAL  1 step ")
    assert to_json(found)["equal"]


def test_a_gradient_in_parts_is_named() -> None:
    """Each rank has a part, the sum is the other layout's."""
    part = DRAW.standard_normal((4, 6))
    found = compare(_run(_model(gradient=part), _model(gradient=GRADIENT - part)), WHOLE, WHOLE)
    assert found.first is not None
    assert (found.first.key.kind, found.first.relation.how, found.first.ranks) == ("gradient", How.SUM, (0, 1))
    said = "\n".join(line.text for line in lines(found))
    assert "the parts were not added up" in said
    assert "all_reduce the gradient over ranks 0,1 before the step" in said


def test_parts_on_a_residual_are_found() -> None:
    """x + part on each rank where x + sum of the parts is right: the block is named, not the parameters behind it."""
    part = DRAW.standard_normal((4, 6))
    whole = _run(_model(output=INPUT + 3 * part))
    sharded = _run(_model(output=INPUT + part, gradient=WEIGHT), _model(output=INPUT + 2 * part, gradient=WEIGHT))
    found = compare(sharded, whole, whole)
    assert found.first is not None
    assert found.first.on_residual
    assert found.first.key.name == "block"


def test_a_gradient_of_an_output_that_is_scaled_is_no_beginning() -> None:
    """A layout may scale it and scale the parameters' gradients back; the parameter's gradient is named."""
    scaled = ("output_gradient", "block", 2 * INPUT)
    whole = _run([*_model(), ("output_gradient", "block", INPUT)])
    found = compare(_run([*_model(gradient=WEIGHT), scaled], [*_model(gradient=WEIGHT), scaled]), whole, whole)
    assert found.first is not None
    assert found.first.key.kind == "gradient"


def test_outputs_alone_decide_nothing() -> None:
    """A module may put out anything, as long as the parameters are trained alike."""
    sharded = _run(_model(output=DRAW.standard_normal((2, 2))), _model(output=DRAW.standard_normal((2, 2))))
    assert not compare(sharded, WHOLE, WHOLE).differs


def test_what_a_rounding_moves_is_no_difference() -> None:
    """The threshold of a tensor is 30 times what the perturbed run moves it by."""
    sharded = _run(_model(gradient=GRADIENT * (1 + 1e-3)))
    assert compare(sharded, WHOLE, WHOLE).differs
    assert not compare(sharded, WHOLE, _run(_model(gradient=GRADIENT * (1 + 1e-4)))).differs


def test_parameters_that_do_not_match_before_the_first_step_are_left_out() -> None:
    """Experts under one name on each rank; and what begins constant beside them."""
    other = _model(DRAW.standard_normal((4, 6)), DRAW.standard_normal((4, 6)), name="expert.w")
    zeros = np.zeros(6)

    def bias(moved: float) -> Tensors:
        return [("start", "expert.b", zeros), ("gradient", "expert.b", zeros + moved), ("parameter", "expert.b", zeros)]

    whole = _run([*_model(name="expert.w"), *bias(1.0), *_model()])
    found = compare(
        _run([*_model(), *_model(name="expert.w"), *bias(1.0)], [*_model(), *other, *bias(2.0)]), whole, whole
    )
    assert not found.differs
    assert sorted(found.left_out) == ["expert.b", "expert.w"]


def test_replicas_and_stages_under_one_name_are_refused() -> None:
    """A rank whose model begins with another input and has the first one's names; with its own it is a stage."""
    other = [("start", "w", WEIGHT), ("input", "", -INPUT), ("gradient", "w", -GRADIENT)]
    with pytest.raises(UsageError, match=r"rank 1 begins with another input .*--and-nproc-per-node N.*--map"):
        compare(_run(_model(), other), WHOLE, WHOLE)
    stage = [("start", "v", WEIGHT), ("input", "", -INPUT), ("gradient", "v", GRADIENT)]
    whole = _run([*_model(), ("start", "v", WEIGHT), ("gradient", "v", GRADIENT)])
    assert compare(_run(_model(), stage), whole, whole).compared["gradient"] == 2


def test_ranks_that_read_other_input_are_refused() -> None:
    """Nothing can be said of them."""
    other = [("start", "w", WEIGHT), ("input", "", -INPUT)]
    with pytest.raises(UsageError, match="do not read the same input"):
        compare(_run(other, other), WHOLE, WHOLE)
    with pytest.raises(UsageError, match="rank 1 of the first layout reads inputs that no rank"):
        teams(_run(_model(), other), _run(_model(), [("input", "", 2 * INPUT)]))


def test_who_shares_the_work_of_a_replica() -> None:
    """Those that read its input; in order where all replicas read the same."""
    other = [("input", "", 2 * INPUT)]
    assert teams(_run(_model(), other, _model(), other), _run(_model(), other)) == {0: [0, 2], 1: [1, 3]}
    assert teams(_run(*[_model()] * 4), _run(*[_model()] * 2)) == {0: [0, 1], 1: [2, 3]}


def test_the_second_layout_is_given_what_the_first_has_drawn() -> None:
    """Whole, or joined where one dimension fits; nothing where both began alike."""
    halves = [_model(w, w) for w in np.split(WEIGHT, 2)]
    assert starts(_run(*halves), WHOLE, {0: [0, 1]}) == {0: {}}
    drawn = _run(_model(-WEIGHT))
    given = starts(_run(*halves), drawn, {0: [0, 1]})
    assert np.array_equal(given[0]["w"], WEIGHT)
    assert np.array_equal(starts(_run(_model(), _model()), drawn, {0: [0, 1]})[0]["w"], WEIGHT)
    assert starts(_run(_model(), _model(2 * WEIGHT)), drawn, {0: [0, 1]}) == {0: {}}
