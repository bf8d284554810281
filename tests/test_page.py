"""What stands under a cell: a Run as text and as HTML, from hand-written results."""

from rankcell.draw import page
from rankcell.results import Display, NotSent, RankFailure, RankResult, Run


def text_of(*results):
    return page.as_text(Run("source", results))


def html_of(**what):
    return page.as_html(Run("source", (RankResult(0, **what),)))


def test_ranks_that_said_the_same_are_shown_once():
    same = [RankResult(r, stdout="hi\n", data={"text/plain": "7"}) for r in range(3)]
    assert text_of(*same, RankResult(3, stdout="ho\n")) == "ranks 0-2\n  hi\n  7\nrank 3\n  ho"
    assert text_of(RankResult(0), RankResult(1)) == "ranks 0, 1: done"
    assert text_of(RankResult(0, state="skipped"), RankResult(1, stdout="x")) == "rank 1\n  x"
    nodes = [RankResult(r, node=f"node{r // 2}", stdout="hi\n" if r < 3 else "") for r in range(4)]
    assert text_of(*nodes) == "ranks 0-2 on node0, node1\n  hi\nrank 3 on node1: done"
    sent = RankResult(0, stdout="a\n", value=NotSent("<a generator>", "no"))
    assert text_of(sent) == "rank 0\n  a\n  <a generator>"
    other = RankResult(1, stdout="a\n", value=NotSent("<another>", "no"))
    assert text_of(sent, other) == "rank 0\n  a\n  <a generator>\nrank 1\n  a\n  <another>"


def test_failed_ranks_and_long_runs_say_so():
    failed = RankResult(0, state="error", error=RankFailure("ZeroDivisionError", "division by zero"))
    assert text_of(failed) == "rank 0: ZeroDivisionError: division by zero"
    long = RankResult(0, dropped=2000)
    assert text_of(long).endswith("a long run; its 2,000 oldest events are not kept")


def test_displays_stand_where_they_were_made():
    shown = Display({"text/plain": "<figure>", "text/html": "<b>x</b>"}, stdout_offset=2)
    assert text_of(RankResult(0, stdout="a\nb\n", displays=(shown,))) == "rank 0\n  a\n  <figure>\n  b"
    text = html_of(stdout="a\nb\n", displays=(shown,))
    assert text.index(">a<") < text.index("<b>x</b>") < text.index(">b<")


def test_long_output_shows_head_and_tail():
    lines = page.shorten("".join(f"{i}\n" for i in range(1000))).split("\n")
    assert lines[0] == "0" and lines[-1] == "999" and len(lines) == page.HEAD + page.TAIL + 1
    assert lines[page.HEAD] == "... 945 more lines: run.ranks[r].stdout has all of them ..."
    flood = "a\n" * 100 + "\n[... 1.1 MB of output were not kept ...]\n" + "b\n" * 100
    more = "... 147 more lines: run.ranks[r].stdout has them, and 1.1 MB of output were not kept ..."
    assert page.shorten(flood).split("\n")[page.HEAD] == more
    assert page.shorten("x" * 2100).endswith("x... (100 more characters)")
    assert page.apply_carriage_returns("  0%|\r 50%|\r100%|\ndone\n") == "100%|\ndone\n", (
        "a progress bar's last state"
    )
    bar = "\n\n\r{}\x1b[A\x1b[A"  # as tqdm(position=2) writes it
    assert (
        page.apply_carriage_returns(bar.format("rank 2:   0%") + bar.format("rank 2: 100%")) == "rank 2: 100%"
    )


def test_html_shows_text_as_text_and_pictures():
    assert "&lt;script&gt;" in html_of(stdout="<script>")
    assert html_of(stdout="x").startswith("<!-- output of ranks -->\n"), (
        "JupyterLab shows this line of a folded output"
    )
    assert "\x1b" not in html_of(stdout="\x1b[31mred\x1b[0m"), "colours of a terminal"
    assert "color" not in html_of(stderr="100%"), "a progress bar is no alarm"
    html = html_of(data={"image/png": "aG\nk=", "text/plain": "<Figure>"})
    assert '<img alt="&lt;Figure&gt;" src="data:image/png;base64,aGk="' in html
