"""What stands under a cell: a Run as text and as HTML, from hand-written results."""

from rankcell.draw import page
from rankcell.results import Display, RankFailure, RankResult, Run


def run_of(*results):
    return Run("source", results)


def test_ranks_that_said_the_same_are_shown_once():
    same = [RankResult(r, stdout="hi\n", data={"text/plain": "7"}) for r in range(3)]
    other = RankResult(3, stdout="ho\n")
    assert page.as_text(run_of(*same, other)) == "ranks 0-2\n  hi\n  7\nrank 3\n  ho"


def test_ranks_with_nothing_to_say_are_done():
    assert page.as_text(run_of(RankResult(0), RankResult(1))) == "ranks 0, 1: done"


def test_ranks_that_skipped_the_cell_are_not_shown():
    assert page.as_text(run_of(RankResult(0, state="skipped"), RankResult(1, stdout="x"))) == "rank 1\n  x"


def test_a_failed_rank_with_no_output_says_why():
    failed = RankResult(0, state="error", error=RankFailure("ZeroDivisionError", "division by zero"))
    assert page.as_text(run_of(failed)) == "rank 0: ZeroDivisionError: division by zero"


def test_displays_stand_where_they_were_made():
    shown = Display({"text/plain": "<figure>", "text/html": "<b>x</b>"}, stdout_offset=2)
    run = run_of(RankResult(0, stdout="a\nb\n", displays=(shown,)))
    assert page.as_text(run) == "rank 0\n  a\n  <figure>\n  b"
    text = page.as_html(run)
    assert text.index(">a<") < text.index("<b>x</b>") < text.index(">b<")


def test_html_escapes_what_ranks_print():
    assert "&lt;script&gt;" in page.as_html(run_of(RankResult(0, stdout="<script>")))


def test_long_output_shows_head_and_tail():
    text = page.shorten("".join(f"{i}\n" for i in range(1000)))
    lines = text.split("\n")
    assert lines[0] == "0" and lines[-1] == "999" and len(lines) == page.HEAD + page.TAIL + 1
    assert lines[page.HEAD] == "... 945 more lines: run.ranks[r].stdout has all of them ..."


def test_a_progress_bar_shows_its_last_state():
    assert page.settle("  0%|\r 50%|\r100%|\ndone\n") == "100%|\ndone\n"


def test_a_png_becomes_an_image_with_a_text():
    html = page.as_html(run_of(RankResult(0, data={"image/png": "aGk=", "text/plain": "<Figure>"})))
    assert '<img alt="&lt;Figure&gt;" src="data:image/png;base64,aGk="' in html


def test_colours_of_a_terminal_do_not_reach_the_page():
    assert "\x1b" not in page.as_html(run_of(RankResult(0, stdout="\x1b[31mred\x1b[0m")))


def test_ranks_of_nodes_are_named_with_them():
    results = [RankResult(r, node=f"node{r // 2}", stdout="hi\n" if r < 3 else "") for r in range(4)]
    assert page.as_text(run_of(*results)) == "ranks 0-2 on node0, node1\n  hi\nrank 3 on node1: done"
