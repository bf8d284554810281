"""The stepper: pictures of a rank cell, step by step, from hand-written steps and from a real run."""

import re

import pytest

from rankcell.draw.stepper import fold, stepper
from rankcell.results import Event, RankResult, Run, Step

SOURCE = "\nx = rank\ndist.all_reduce(x)\ny = x"


def two_ranks():
    """Rank 0 waits from 2 to 5 for rank 1, which begins at 4."""
    steps = [
        (
            Step(0, 0.0, 2),
            Step(0, 2.0, 3, {"x": "0"}),
            Step(0, 5.1, 4, {"x": "1"}),
            Step(0, 6.0, 0, {"x": "1"}),
        ),
        (
            Step(1, 0.1, 2),
            Step(1, 4.0, 3, {"x": "1"}),
            Step(1, 5.2, 4, {"x": "1"}),
            Step(1, 6.1, 0, {"x": "1"}),
        ),
    ]
    events = [Event(r, "all_reduce", s, 5.0, shape=(1,), dtype="float32") for r, s in ((0, 2.0), (1, 4.0))]
    return Run(SOURCE, tuple(RankResult(r, steps=steps[r], events=(events[r],)) for r in range(2)))


def test_every_picture_moves_ranks_on_in_order_of_time():
    frames = stepper(two_ranks())
    assert [f.text.split("\n") for f in frames.figures] == [
        ["rank 0 at line 2", "rank 1 at line 2"],
        ["rank 0 waits in all_reduce(float32[1]): x = 0", "rank 1 waits in all_reduce(float32[1]): x = 1"],
        ["rank 0 at line 4: x = 1", "rank 1 at line 4: x = 1"],
        ["rank 0 is done: x = 1", "rank 1 is done: x = 1"],
    ]
    assert frames.labels == ("1 of 4", "2 of 4", "3 of 4", "4 of 4")


def test_a_marker_stands_at_each_ranks_line():
    figure = stepper(two_ranks()).figures[0]
    assert figure.svg.count("<rect") >= 6 and "x = rank" in figure.svg and "rank 0 at line 2" in figure.alt


def test_the_lines_have_the_numbers_of_the_cell_and_those_with_ranks_are_dark():
    number = r'text-anchor="end"[^>]*>(\d)</text><text[^>]*fill="(#\w+)"[^>]*>([^<]+)<'
    written = re.findall(number, stepper(two_ranks()).figures[1].svg)
    pale, dark = "#5a5a5a", "#1a1a1a"
    assert written == [("2", pale, "x = rank"), ("3", dark, "dist.all_reduce(x)"), ("4", pale, "y = x")]


def test_a_line_passed_often_is_shown_at_first_and_at_last():
    steps = [Step(0, float(i), 2 + i % 2) for i in range(100)]
    assert [s.at for s in fold(steps)] == [0.0, 1.0, 2.0, 3.0, 98.0, 99.0]


def test_a_run_without_steps_says_how_to_get_them():
    with pytest.raises(ValueError, match=r"Record them with `%%ranks 4 --step NAMES`"):
        stepper(Run("x", (RankResult(0),)))


def test_a_real_run(four):
    source = "\nx = torch.ones(2) * rank\nfor i in range(50):\n    dist.all_reduce(x)\n    x = x / 4\n"
    run = four.run(source, step=["x", "i"])
    assert all(len(r.steps) > 100 for r in run.ranks)
    final = run.ranks[2].steps[-1]
    assert final.line == 0 and final.values["i"] == "49" and final.values["x"] == "[1.5, 1.5]"
    frames = stepper(run)
    assert len(frames.figures) <= 40 and len(frames._repr_html_()) < 100_000
    assert "is done" in frames.figures[-1].text
    # nobody leaves an all-reduce before all have come to it: in no picture is a rank two rounds ahead
    for figure in frames.figures:
        rounds = [int(i) for i in re.findall(r"i = (\d+)", figure.text)]
        assert not rounds or max(rounds) - min(rounds) <= 48


def test_a_cell_without_step_is_not_traced(four):
    assert four.run("import sys; sys.gettrace() is None").values == [True] * 4
    assert four.run("1").ranks[0].steps == ()
