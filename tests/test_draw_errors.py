"""Signed errors: where the points and the medians stand, and what is said of them."""

import re

import pytest

from rankcell.draw.errors import signed_errors
from rankcell.draw.explorer import Column


def xs(figure):
    return [float(x) for x in re.findall(r'<circle cx="([\d.]+)"', figure.svg)]


def test_points_stand_on_a_linear_axis_and_far_ones_at_its_edge():
    figure = signed_errors({"one": [-0.5, 0.0, 0.25, 0.5, 3.0]}, unit="error")
    low, middle, quarter, high, far = xs(figure)
    assert middle == pytest.approx((low + high) / 2) and quarter == pytest.approx((middle + high) / 2)
    assert far == high and figure.svg.count("#d55e00") == 1


def test_medians_are_said():
    figure = signed_errors({"mine": [0.1, -0.02, 0.04], "theirs": [-0.2]}, unit="error")
    assert "mine, 3" in figure.svg and "+4%" in figure.svg and "-20%" in figure.svg
    assert "theirs is furthest from 0, -20%" in figure.alt
    assert "mine: 3, median +4.0%, from -2.0% to +10.0%" in repr(figure)


@pytest.mark.parametrize("groups", [{}, {"none": []}])
def test_nothing_to_draw_is_said(groups):
    with pytest.raises(ValueError, match="at least one error"):
        signed_errors(groups, unit="error")


def test_a_column_shows_its_parts_under_one_another():
    first, second = (signed_errors({name: [0.1]}, unit=name) for name in "ab")
    column = Column((first, second))
    assert column._repr_html_().count("<figure") == 2
    assert repr(column) == f"{first!r}\n\n{second!r}"
