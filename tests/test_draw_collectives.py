"""Who sends what to whom: collectives, messages, waits, traffic, from hand-written events."""

import math
import re

import pytest

from rankcell import RankError
from rankcell.draw import messages
from rankcell.draw.collectives import steps
from rankcell.draw.matrices import matrices
from rankcell.draw.svg import RANK_COLOURS
from rankcell.draw.traffic import traffic
from rankcell.draw.waits import waits
from rankcell.results import Event, RankResult, Run, Standing, Values, Watched
from test_draw_charts import marks, words

NAN, ALL, MIB = math.nan, (0, 1, 2, 3), 2**20


def event(rank, op, inputs, before, after, *, peer=None, ranks=ALL, reduce_op=""):
    """One event with its values; in-place operations give the same tensors twice."""
    held = [tuple(tuple(float(x) for x in t) for t in side) for side in (inputs, before, after)]
    first = (held[0] or held[1] or ((),))[0]
    about = {"ranks": ranks, "seq": 1, "shape": (len(first),), "dtype": "float32", "peer": peer}
    return Event(rank, op, 0.0, 1.0, reduce_op=reduce_op, values=Values(*held), **about)


def call(op, inputs, before, after, **more):
    return [event(r, op, inputs[r], before[r], after[r], **more) for r in ALL]


def cut(rows, flat):
    """Each rank's eight numbers, as one tensor or as four."""
    return [[row] if flat else [row[k : k + 2] for k in range(0, 8, 2)] for row in rows]


def all_reduce(reduce_op="SUM", result=6.0):
    held = [[[r, r]] for r in ALL]
    return call("all_reduce", held, held, [[[result] * 2]] * 4, reduce_op=reduce_op)


def all_gather(flat=True):
    whole = [[x for pair in PAIRS for x in pair]] * 4
    return call("all_gather", OWN, cut([[NAN] * 8] * 4, flat), cut(whole, flat))


def reduce_scatter(flat=True):
    held, sums = [[10 * r + k for k in range(8)] for r in ALL], [[[60 + 8 * r, 64 + 8 * r]] for r in ALL]
    return call("reduce_scatter", cut(held, flat), EMPTY, sums, reduce_op="SUM")


def all_to_all():
    rows, columns = ([[[a * r + b * k for k in ALL]] for r in ALL] for a, b in ((10, 1), (1, 10)))
    return call("all_to_all", rows, [[[NAN] * 4]] * 4, columns)


PAIRS = [[10 * r, 10 * r + 1] for r in ALL]
OWN, EMPTY = [[pair] for pair in PAIRS], [[[NAN] * 2]] * 4
ROOTS = [[[1, 2, 3]] if r == 1 else [[NAN] * 3] for r in ALL]
COUNT = [[[r + 1] * 2] for r in ALL]
LEFT = [[[10, 10]], [[9, 9]], [[7, 7]], [[4, 4]]]  # rank 0 is the root; the rest is what gloo leaves behind
EVERY = {
    "broadcast": (call("broadcast", ROOTS, ROOTS, [[[1, 2, 3]]] * 4, peer=1), 4),
    "scatter": (call("scatter", [PAIRS, [], [], []], EMPTY, OWN, peer=0), 4),
    "gather": (call("gather", OWN, [[], [], [[NAN] * 2] * 4, []], [[], [], PAIRS, []], peer=2), 4),
    "reduce": (call("reduce", COUNT, COUNT, LEFT, peer=0, reduce_op="SUM"), 4),
    "all_reduce": (all_reduce(), 16),
    "all_gather": (all_gather(), 16),
    "reduce_scatter": (reduce_scatter(), 16),
    "all_to_all": (all_to_all(), 16),
}


@pytest.mark.parametrize("op", EVERY)
def test_every_collective_has_three_frames_and_its_arrows(op):
    events, count = EVERY[op]
    frames = steps(events)
    assert frames.labels == ("before", "who sends what to whom", "after") and frames.still == 2
    assert len({re.search(r'viewBox="([^"]+)"', f.svg)[1] for f in frames.figures}) == 1, "nothing jumps"
    before, middle, _ = (marks(f, "line") for f in frames.figures)
    assert not before and len(middle) == count
    own = [arrow for arrow in middle if arrow.get("stroke-dasharray")]
    assert len(own) == (1 if count == 4 else 4), "dashed: stays on its rank"


def test_each_rank_says_what_it_holds_and_sends():
    copied, dealt, came, left = (steps(EVERY[op][0]) for op in ("broadcast", "scatter", "gather", "reduce"))
    assert {arrow.get("stroke") for arrow in marks(copied.figures[1], "line")} == {RANK_COLOURS[1]}
    assert copied.figures[2].alt.endswith("After: ranks 0-3: 1 2 3. Every rank holds rank 1's tensor.")
    parts = "; ".join(f"rank {k}: {10 * k} {10 * k + 1}" for k in ALL)
    assert dealt.figures[2].alt.endswith(f"After: {parts}. Each rank holds its part.")
    assert (
        "After: ranks 0, 1, 3: nothing; rank 2: 0 1, then 10 11, then 20 21, then 30 31."
        in came.figures[2].alt
    )
    assert words(dealt.figures[0]).count("no input") == words(came.figures[2]).count("no output") == 3
    edges = [r.get("stroke") for r in marks(came.figures[2], "rect") if r.get("fill") != "none"]
    edges = [edge for edge in edges if edge in RANK_COLOURS]
    assert edges == [*RANK_COLOURS[:3], *RANK_COLOURS[:4], RANK_COLOURS[3]]  # row 2: input, four outputs
    assert left.figures[2].alt.endswith(": 1 + 2 + 3 + 4 = 10; only rank 0's tensor has a meaning.")
    assert "rank 1: 1, then 11, then 21, then 31;" in steps(all_to_all()).figures[2].alt


def test_sums_are_striped_in_their_ranks_colours():
    groups = [{"ranks": (r % 2, r % 2 + 2), "reduce_op": "SUM"} for r in ALL]
    frames = steps([event(r, "all_reduce", [[r]], [[r]], [[2 + 2 * (r % 2)]], **groups[r]) for r in ALL])
    assert re.findall(r"fill=.url\(#(s[^)]+)", frames.figures[2].svg) == ["s0-2", "s1-3", "s0-2", "s1-3"]
    assert "fill='url(#s" not in frames.figures[1].svg.replace('"', "'"), "no sum is there while it is sent"
    assert frames.figures[1].alt.startswith("all_reduce on ranks 0, 2 and ranks 1, 3. Arrows: ")


def test_the_arithmetic_follows_the_chosen_call():
    said = {
        ("SUM", 6): "0 + 1 + 2 + 3 = 6",
        ("SUM", 8): "0 + 1 + 2 + 3 gave 8, not 6",
    }
    for call, sentence in said.items():
        assert steps(all_reduce(*call)).figures[2].alt.endswith(f"irst number of rank 0: {sentence}.")


def test_one_tensor_or_a_list_of_them_is_one_picture():
    for build in (all_gather, reduce_scatter):  # as one tensor, and as a list of tensors
        assert steps(build(flat=True)).figures[2].svg == steps(build(flat=False)).figures[2].svg
    events = [e for r in ALL for e in (all_reduce("MAX", 3)[r], all_to_all()[r], all_reduce()[r])]
    run = Run("x", tuple(RankResult(r, events=tuple(e for e in events if e.rank == r)) for r in ALL))
    assert steps(run, "all_reduce").figures[0].alt.startswith("all_reduce, MAX on ranks 0-3. Before: ")


def test_matrices_colour_what_a_rank_reads():
    def squares(named, **options):
        found = marks(matrices(named, "", **options), "rect")
        return [RANK_COLOURS.index(r.get("fill")) for r in found if r.get("width") == "11.00"]

    named = {"A": [[1, 0, 0, 0], [1, 0, 0, 0]], "B": [[1, 1, 0, 0]]}
    assert squares(named) == [0, 0, 0, 1]
    figure = matrices(named, "B is the transpose of A.")
    assert figure.alt.endswith("Matrices of zeros and ones, rows x columns: A 2 x 4, B 1 x 4.")
    by_row = {"by_row": True, "row": "a query", "column": "a key"}
    assert squares({"A": [[1, 1], [1, 0], [0, 0], [0, 1]]}, **by_row) == [0, 0, 1, 3]
    said = words(matrices(named, "", **by_row))
    assert {"row: a query, in its rank's colour", "column: a key"} <= set(said)


def message(source, target, at, before, after, part, into):
    """A send and its receive: `before` and `after` are the arrays of the two at the call and after it."""
    common = {"group": "0", "ranks": (0, 1), "seq": int(at) + 1, "shape": (part[1] - part[0],)}
    sent = Watched(before[source], after[source], part)
    came = Watched(before[target], after[target], into)
    both = (source, "send", target, sent), (target, "recv", source, came)
    return [Event(r, op, at, at + 0.5, peer=peer, watched=seen, **common) for r, op, peer, seen in both]


START = {0: (1.0, 2.0), 1: (10.0, 20.0)}
SUMMED = {0: (11.0, 22.0), 1: (10.0, 20.0)}
DONE = {0: (11.0, 22.0), 1: (11.0, 22.0)}
TREE = message(1, 0, 0.0, START, SUMMED, (0, 2), None) + message(0, 1, 1.0, SUMMED, DONE, (0, 2), (0, 2))


def test_a_picture_for_each_step_of_messages():
    frames = messages.steps(TREE)
    assert frames.labels == ("before", "1 of 2", "2 of 2") and frames.still == 1
    copied = frames.figures[2].svg.count('fill="url(#s0-1)"')
    assert copied == 6  # a sum's copies too have its stripes: rank 0 before, both after
    both = message(0, 1, 0.0, START, START, (0, 1), (0, 1)) + message(1, 0, 0.1, START, START, (1, 2), (1, 2))
    assert messages.steps(both).labels == ("before", "1 of 1"), "they could travel together"


def test_a_run_is_drawn_from_its_own_messages(four):
    run = four.run("""
from rankcell import watch
x = torch.full((4,), 10.0**rank)
with watch(x):
    if rank == 0: dist.send(x[2:], 3)
    if rank == 3:
        came = torch.empty(2)
        dist.recv(came, 0)
        x[2:] += came
""")
    assert run.ranks[3].events[0].watched == Watched((1000.0,) * 4, (1000.0, 1000.0, 1001.0, 1001.0))
    assert run.ranks[0].events[0].watched.part == (2, 4)
    assert "rank 3: 1000 1000 1001 1001" in messages.steps(run).figures[1].alt
    with pytest.raises(RankError, match="an array of 65 numbers is too long to watch: 64 at most"):
        four.run("from rankcell import watch\nwith watch(torch.zeros(65)): pass")


def waiting(rank, op, line, *peers):
    text = f"{op}(float32[4])"
    return Standing(rank, "running", f"waits in {text} (call 1 of the world)", op, text, line, peers)


def finished(rank):
    return Standing(rank, "finished", "finished the cell after 0 calls")


def picture(*standings):
    return waits(Run("", (), standstill=standings))


FAILED = Standing(1, "error", "failed: ZeroDivisionError: division by zero")
LOST = Standing(1, "lost", "was killed (SIGKILL)")
ABSENT = [Standing(r, "absent", "does not run this cell") for r in (1, 2)]
CHAIN = [waiting(0, "recv", 5, 1), waiting(1, "recv", 8, 2), waiting(2, "recv", 8, 3), finished(3)]
TWO = [waiting(r, "recv", 3, r ^ 1) for r in ALL]
BEHIND = [waiting(0, "recv", 5, 1), waiting(1, "barrier", 8, 0), waiting(2, "barrier", 8, 0)]
CASES = {
    "ranks 0-3 wait in a circle: 0 → 1 → 2 → 3 → 0": [waiting(r, "send", 2, (r + 1) % 4) for r in ALL],
    "ranks 0 and 1 wait for each other; ranks 2 and 3 wait for each other": TWO,
    "ranks 0 and 1 wait for each other; rank 2 waits behind them": BEHIND,
    "rank 2 waits for rank 3, which has finished; ranks 0 and 1 wait behind them": CHAIN,
    "rank 0 waits for rank 1, which has failed": [waiting(0, "barrier", 2, 1), FAILED],
    "rank 0 waits for rank 1, which was lost": [waiting(0, "monitored_barrier", 2, 1), LOST],
    "rank 0 waits for ranks 1 and 2, which do not run this cell": [waiting(0, "barrier", 2, 1, 2), *ABSENT],
    "rank 0 waits for rank 1, which has finished; rank 0 waits for rank 2, which computes": [
        waiting(0, "barrier", 3, 1, 2), finished(1), Standing(2, "running", "computes at line 2", line=2),
    ],
    "rank 0 waits for ranks 1-3, which have finished": [waiting(0, "recv", 3, 1, 2, 3), *map(finished, (1, 2, 3))],
    "rank 0 computes; nobody waits": [Standing(0, "running", "computes at line 2", line=2)],
    "ranks 0-15 wait in a circle": [waiting(r, "send", 3, (r + 1) % 16) for r in range(16)],
}  # fmt: skip


@pytest.mark.parametrize("finding", CASES)
def test_who_waits_for_whom_is_said_and_drawn(finding):
    standings = CASES[finding]
    figure = picture(*standings)
    assert figure.alt.startswith(f"Who waits for whom: {finding}") and figure.alt.endswith(".")
    assert finding.lower() in " ".join(words(figure)).lower()
    assert len(marks(figure, "polygon")) == sum(len(s.waits_for) for s in standings)  # heads of arrows
    assert picture(*reversed(standings)) == figure


def test_waits_for_any_of_several_and_of_many():
    anyone = picture(*CASES["rank 0 waits for ranks 1-3, which have finished"])
    assert {m.get("stroke-dasharray") for m in marks(anyone, "line")} == {"7 5"}
    large = words(picture(*CASES["ranks 0-15 wait in a circle"]))
    assert large[16:] == ["Ranks 0-15 wait in a circle."]


def ring(n, nbytes):
    return [[nbytes if j == (i + 1) % n else 0 for j in range(n)] for i in range(n)]


def test_traffic_says_its_finding():
    nearly = ring(4, MIB)
    nearly[0][2] = 100
    told = {
        "between 2 ranks, 16 B in all: each sends 8 B, over 2 of 2 directed pairs.": ring(2, 8),
        "between 4 ranks, 6 MiB in all: each sends 1.5 MiB, all of it to the next rank: a ring.": ring(4, 1.5 * MIB),
        "between 3 ranks, 1.5 KiB in all: rank 0 sends most, 1 KiB, over 3 of 6 directed pairs.": [
            [0, 512, 512], [0, 0, 512], [0, 0, 0],
        ],
        "between 2 ranks: no rank sends anything.": [[0, 0], [0, 0]],
    }  # fmt: skip
    for said, matrix in told.items():
        assert traffic(matrix, title="Sum").alt == f"Sum. Traffic {said}"
    assert "a ring" in traffic(nearly).alt
