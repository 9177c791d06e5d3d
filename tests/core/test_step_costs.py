"""How many drafts pay under measured costs: D67, and what lies between the measurements."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.core.step_costs import CostCurve, CostTable
from serving.core.types import StepCost

SURVIVAL = [0.9, 0.9 * 0.8, 0.9 * 0.8 * 0.5, 0.9 * 0.8 * 0.5 * 0.1]


def _line(start, each, *, rows=1):
    """A step takes `start`, and `each` more for every draft."""
    return CostTable([StepCost(rows, 0, True, start), StepCost(rows, 10, True, start + 10 * each)])


@pytest.mark.parametrize(("each", "num_drafts", "rate"), [(1.0, 3, 2.98 / 13), (8.0, 1, 1.9 / 18), (100.0, 0, 1 / 10)])
def test_the_drafts_that_pay_are_those_of_the_published_example(each, num_drafts, rate):
    """D67: confidences 0.9, 0.8, 0.5, 0.1; a step costs 10 and 1 or 8 more a draft."""
    best = _line(10.0, each).curve(1, is_drafting=True).best(SURVIVAL, 1)
    assert best.num_drafts == num_drafts
    assert best.tokens_per_s == pytest.approx(rate)


_SECONDS = st.floats(0.01, 2.0)


@settings(max_examples=300, deadline=None)
@given(
    chances=st.lists(st.floats(0.0, 1.0), max_size=40),
    points=st.dictionaries(st.integers(0, 45), _SECONDS, min_size=1, max_size=6),
    num_rows=st.integers(1, 9),
)
def test_no_other_number_of_drafts_brings_more(chances, points, num_rows):
    chances.sort(reverse=True)
    table = CostTable([StepCost(4, count, True, seconds) for count, seconds in points.items()])
    curve = table.curve(num_rows, is_drafting=True)
    best = curve.best(chances, num_rows)
    rates = [(num_rows + sum(chances[:count])) / curve.seconds(count) for count in range(len(chances) + 1)]
    assert best.tokens_per_s == pytest.approx(max(rates))
    assert best.tokens_per_s == pytest.approx(rates[best.num_drafts])


@given(
    chances=st.lists(st.floats(0.0, 1.0), min_size=1, max_size=40),
    counts=st.sets(st.integers(1, 45), max_size=6),
    num_rows=st.integers(1, 9),
    bend=st.integers(1, 45),
    slopes=st.tuples(st.floats(0.001, 0.2), st.floats(0.001, 0.2)),
)
def test_points_on_a_straight_line_change_nothing(chances, counts, num_rows, bend, slopes):
    """A grid has the points of all numbers of rows; what was not measured for one lies on its lines."""

    def seconds(count: int) -> float:
        return 1.0 + slopes[0] * min(count, bend) + slopes[1] * max(0, count - bend)

    chances.sort(reverse=True)
    few = CostCurve([(count, seconds(count)) for count in sorted({0, bend, 46})])
    many = CostCurve([(count, seconds(count)) for count in sorted({0, bend, 46, *counts})])
    assert many.best(chances, num_rows).tokens_per_s == pytest.approx(few.best(chances, num_rows).tokens_per_s)
    rates = [(num_rows + sum(chances[:count])) / seconds(count) for count in range(len(chances) + 1)]
    assert many.best(chances, num_rows).tokens_per_s == pytest.approx(max(rates))


@given(
    costs=st.lists(
        st.builds(StepCost, st.integers(1, 9), st.integers(0, 20), st.booleans(), _SECONDS), min_size=1, max_size=12
    ),
    num_rows=st.integers(1, 12),
    is_drafting=st.booleans(),
)
def test_more_drafts_or_rows_never_cost_less_and_drafting_is_never_a_gain(costs, num_rows, is_drafting):
    table = CostTable(costs)
    curve, larger = (table.curve(rows, is_drafting=True) for rows in (num_rows, num_rows + 1))
    seconds = [curve.seconds(count) for count in range(30)]
    assert all(later >= earlier - 1e-12 for earlier, later in zip(seconds, seconds[1:], strict=False))
    # As far as was measured; steps that do not draft say only what the draft pass takes, if any do.
    drafting = [cost for cost in costs if cost.is_drafting] or costs
    highest = max(cost.num_drafts for cost in drafting)
    assert all(larger.seconds(count) >= seconds[count] - 1e-12 for count in range(min(30, highest + 1)))
    plain = table.curve(num_rows, is_drafting=False)
    assert all(0 < plain.seconds(count) <= seconds[count] + 1e-12 for count in range(30))


def test_costs_between_measurements_lie_on_straight_lines():
    table = CostTable([StepCost(r, n, True, 1 + r + 0.1 * n) for r in (2, 10) for n in (0, 20)])
    curve = table.curve(6, is_drafting=True)
    assert [curve.seconds(count) for count in (0, 5, 20, 40)] == pytest.approx([7.0, 7.5, 9.0, 11.0])
    assert table.curve(1, is_drafting=True).seconds(0) == table.curve(2, is_drafting=True).seconds(0)
    assert table.curve(99, is_drafting=True).seconds(0) == table.curve(10, is_drafting=True).seconds(0)


def test_a_step_that_does_not_draft_saves_the_draft_pass_at_every_number_of_drafts():
    """The server measures such a step without drafts to verify only."""
    table = CostTable([StepCost(4, 0, True, 1.2), StepCost(4, 8, True, 2.0), StepCost(4, 0, False, 1.0)])
    plain = table.curve(4, is_drafting=False)
    assert [plain.seconds(count) for count in (0, 4, 8)] == pytest.approx([1.0, 1.4, 1.8])


def test_a_table_measured_without_drafting_alone_takes_it_to_be_free():
    table = CostTable([StepCost(4, 0, False, 1.0)])
    assert table.curve(4, is_drafting=True).seconds(3) == table.curve(4, is_drafting=False).seconds(3) == 1.0


def test_a_cost_measured_twice_is_the_median():
    table = CostTable([StepCost(1, 0, True, seconds) for seconds in (1.0, 9.0, 2.0)])
    assert table.curve(1, is_drafting=True).seconds(0) == 2.0


@pytest.mark.parametrize(
    "cost",
    [
        StepCost(1, 0, True, 0.0),
        StepCost(1, 0, True, float("nan")),
        StepCost(0, 0, True, 1.0),
        StepCost(1, -1, True, 1.0),
    ],
)
def test_what_is_no_cost_is_refused(cost):
    with pytest.raises(ValueError, match="is no cost of a step"):
        CostTable([cost])


def test_without_costs_there_is_no_table():
    assert not CostTable([])
    assert CostCurve([]).between(3) == 0.0


def test_a_measurement_that_something_else_disturbed_does_not_raise_what_larger_steps_cost():
    """As measured on a busy GPU: 4 rows seemed to cost more than 16, and 7 drafts of one row much more than 2."""
    milliseconds = {
        (1, 0): 2.037,
        (1, 2): 1.727,
        (1, 7): 2.055,
        (4, 0): 2.685,
        (4, 7): 2.602,
        (4, 28): 2.512,
        (16, 0): 1.442,
        (16, 28): 2.686,
        (16, 112): 2.309,
    }
    plain = [StepCost(rows, 0, False, ms) for rows, ms in ((1, 1.136), (4, 1.032), (16, 0.976))]
    table = CostTable([*plain, *(StepCost(rows, count, True, ms) for (rows, count), ms in milliseconds.items())])
    curve = table.curve(16, is_drafting=True)
    assert [curve.seconds(count) for count in (0, 28, 112)] == [1.442, 2.309, 2.309]
    for rows, drafts in ((1, 7), (4, 28), (8, 56), (16, 112)):
        assert table.curve(rows, is_drafting=True).seconds(0) <= 1.442
        assert table.curve(rows, is_drafting=True).seconds(drafts) <= 2.309
        assert table.curve(rows, is_drafting=False).seconds(0) == pytest.approx(0.976)
