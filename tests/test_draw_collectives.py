"""Hand-written events in, exact rows, blocks, colours and arrows out."""

import math
import re
import xml.etree.ElementTree as ET

import pytest

from rankcell.draw.collectives import matrices, steps
from rankcell.draw.svg import RANK_COLOURS
from rankcell.results import Event, RankResult, Run, Values

NAN = math.nan
ALL = (0, 1, 2, 3)
SVG = "{http://www.w3.org/2000/svg}"


def event(rank, op, inputs, before, after, *, peer=None, ranks=ALL, reduce_op="", seq=1):
    """One event with its values; in-place operations give the same tensors twice."""
    tensors = [tuple(tuple(float(x) for x in t) for t in side) for side in (inputs, before, after)]
    first = (tensors[0] or tensors[1] or ((),))[0]
    return Event(
        rank, op, 0.0, 1.0, ranks=ranks, seq=seq, shape=(len(first),), dtype="float32", peer=peer,
        reduce_op=reduce_op, values=Values(*tensors),
    )  # fmt: skip


def broadcast(root=1):
    def held(r):
        return [[1, 2, 3]] if r == root else [[NAN] * 3]

    return [event(r, "broadcast", held(r), held(r), [[1, 2, 3]], peer=root) for r in ALL]


def scatter():
    parts = [[10 * k, 10 * k + 1] for k in ALL]
    return [event(r, "scatter", parts if r == 0 else [], [[NAN] * 2], [parts[r]], peer=0) for r in ALL]


def gather():
    tensors = [[10 * k, 10 * k + 1] for k in ALL]
    return [
        event(r, "gather", [tensors[r]], [[NAN] * 2] * 4 if r == 2 else [], tensors if r == 2 else [], peer=2)
        for r in ALL
    ]


def reduce():
    left = [[10, 10], [9, 9], [7, 7], [4, 4]]  # rank 0 is the root; the rest is what gloo leaves behind
    return [event(r, "reduce", [[r + 1] * 2], [[r + 1] * 2], [left[r]], peer=0, reduce_op="SUM") for r in ALL]


def all_reduce(reduce_op="SUM", result=6.0):
    return [event(r, "all_reduce", [[r, r]], [[r, r]], [[result] * 2], reduce_op=reduce_op) for r in ALL]


def all_gather(flat=True):
    out = [[10 * k, 10 * k + 1] for k in ALL]
    whole = [[x for part in out for x in part]] if flat else out
    return [event(r, "all_gather", [out[r]], [[NAN] * 8] if flat else [[NAN] * 2] * 4, whole) for r in ALL]


def reduce_scatter(flat=True):
    def held(r):
        parts = [[10 * r + 2 * k, 10 * r + 2 * k + 1] for k in ALL]
        return [[x for part in parts for x in part]] if flat else parts

    return [
        event(r, "reduce_scatter", held(r), [[NAN] * 2], [[60 + 8 * r, 64 + 8 * r]], reduce_op="SUM")
        for r in ALL
    ]


def all_to_all():
    return [
        event(r, "all_to_all", [[10 * r + k for k in ALL]], [[NAN] * 4], [[10 * k + r for k in ALL]])
        for r in ALL
    ]


def two_groups():
    return [
        event(
            r,
            "all_reduce",
            [[r]],
            [[r]],
            [[2 if r % 2 == 0 else 4]],
            ranks=(r % 2, r % 2 + 2),
            reduce_op="SUM",
        )
        for r in ALL
    ]


EVERY = {
    "broadcast": broadcast, "scatter": scatter, "gather": gather, "reduce": reduce, "all_reduce": all_reduce,
    "all_gather": all_gather, "reduce_scatter": reduce_scatter, "all_to_all": all_to_all,
}  # fmt: skip


def marks(figure):
    """Arrows as (colour, dashed), filled blocks as (fill, edge), and numbers, in drawing order."""
    root = ET.fromstring(figure.svg)
    arrows = [(x.get("stroke"), x.get("stroke-dasharray") is not None) for x in root.iter(f"{SVG}line")]
    blocks = [
        (x.get("fill"), x.get("stroke"))
        for x in root.iter(f"{SVG}rect")
        if x.get("stroke") not in (None, "none")
    ]
    numbers = [x.text for g in root.iter(f"{SVG}g") if g.get("text-anchor") for x in g.iter(f"{SVG}text")]
    return arrows, blocks, numbers


def refusal(*args, **kwargs) -> str:
    with pytest.raises(ValueError) as caught:
        steps(*args, **kwargs)
    return str(caught.value)


def text(frames, step):
    return repr(frames.figures[step]).split("\n")


@pytest.mark.parametrize("op", EVERY)
def test_every_collective_has_three_frames_that_are_small_and_wide_enough(op):
    frames = steps(EVERY[op]())
    assert frames.labels == ("before", "who sends what to whom", "after")
    assert len(frames._repr_html_()) < 100_000
    sizes = {re.search(r'width="(\d+)" height="(\d+)"', f.svg).groups() for f in frames.figures}
    assert len(sizes) == 1  # nothing jumps when the slider moves
    assert int(sizes.pop()[0]) <= 660
    for figure in frames.figures:
        assert min(float(s) for s in re.findall(r'font-size="(\d+)"', figure.svg)) >= 21
        assert figure.alt and not figure.alt.startswith("data")


@pytest.mark.parametrize(
    ("op", "count"),
    [
        ("broadcast", 4), ("scatter", 4), ("gather", 4), ("reduce", 4), ("all_reduce", 16),
        ("all_gather", 16), ("reduce_scatter", 16), ("all_to_all", 16),
    ],
)  # fmt: skip
def test_arrows_say_who_sends_and_dashed_ones_stay_on_their_rank(op, count):
    before, middle, _ = steps(EVERY[op]()).figures
    assert marks(before)[0] == []
    arrows = marks(middle)[0]
    assert len(arrows) == count
    assert sum(dashed for _, dashed in arrows) == (1 if count == 4 else 4)


def test_broadcast_takes_the_roots_colour_and_ignores_what_the_others_held():
    frames = steps(broadcast())
    assert {colour for colour, _ in marks(frames.figures[1])[0]} == {RANK_COLOURS[1]}
    _, blocks, numbers = marks(frames.figures[2])
    assert [edge for fill, edge in blocks if fill != "none"] == [
        RANK_COLOURS[1]
    ] * 5  # one input, four outputs
    assert numbers.count("nan") == 3
    assert text(frames, 2)[1] == "rank 0   nan nan nan   =>   1 2 3"
    assert text(frames, 1)[1] == "rank 1: 1 2 3  ->  ranks 0-3"
    assert frames.figures[2].alt == (
        "broadcast on ranks 0-3. After: ranks 0-3: 1 2 3. Every rank holds rank 1's tensor."
    )


def test_in_place_operations_show_no_output_before():
    frames = steps(all_reduce())
    assert [n for n in marks(frames.figures[0])[2] if n] == ["0", "0", "1", "1", "2", "2", "3", "3"]
    assert "nan" not in frames.figures[0].svg
    assert text(frames, 0)[1] == "rank 0   0 0"


def test_scatter_sends_part_i_to_rank_i():
    frames = steps(scatter())
    assert text(frames, 1)[1:5] == [
        "rank 0: 0 1  ->  rank 0",
        "rank 0: 10 11  ->  rank 1",
        "rank 0: 20 21  ->  rank 2",
        "rank 0: 30 31  ->  rank 3",
    ]
    assert text(frames, 2)[2] == "rank 1   -                             =>   10 11"
    assert frames.figures[0].svg.count(">no input<") == 3


def test_gather_leaves_the_others_without_output():
    frames = steps(gather())
    assert text(frames, 0)[3] == "rank 2   20 21   =>   nan nan | nan nan | nan nan | nan nan"
    assert text(frames, 2)[3] == "rank 2   20 21   =>   0 1 | 10 11 | 20 21 | 30 31"
    assert frames.figures[2].svg.count(">no output<") == 3
    edges = [edge for fill, edge in marks(frames.figures[2])[1] if fill != "none"]
    assert edges == [
        *RANK_COLOURS[:3],
        *RANK_COLOURS[:4],
        RANK_COLOURS[3],
    ]  # row 2 holds input and four outputs


def test_reduce_shows_what_the_others_hold_without_colour():
    frames = steps(reduce())
    _, blocks, numbers = marks(frames.figures[2])
    assert [fill for fill, _ in blocks].count("none") == 3
    assert numbers[-2:] == ["4", "4"]
    assert (
        text(frames, 2)[-1]
        == "first number of rank 0: 1 + 2 + 3 + 4 = 10; only rank 0's tensor has a meaning"
    )


def test_sums_are_striped_with_the_colours_of_the_group():
    frames = steps(two_groups())
    fills = [fill for fill, _ in marks(frames.figures[2])[1] if fill.startswith("url")]
    assert fills == ["url(#s0-2)", "url(#s1-3)", "url(#s0-2)", "url(#s1-3)"]
    assert frames.figures[2].svg.count("<pattern") == 2
    assert text(frames, 0)[0] == "all_reduce on ranks 0, 2 and ranks 1, 3"
    assert text(frames, 1)[1:3] == ["rank 0: 0  ->  ranks 0, 2", "rank 1: 1  ->  ranks 1, 3"]
    assert text(frames, 1)[-1] == "the tensor of every rank of a group goes to all of them"


@pytest.mark.parametrize(
    ("reduce_op", "result", "sentence"),
    [
        ("SUM", 6, "0 + 1 + 2 + 3 = 6"),
        ("PRODUCT", 0, "0 * 1 * 2 * 3 = 0"),
        ("AVG", 1.5, "(0 + 1 + 2 + 3) / 4 = 1.5"),
        ("MAX", 3, "max(0, 1, 2, 3) = 3"),
    ],
)
def test_the_arithmetic_follows_the_reduce_op(reduce_op, result, sentence):
    assert text(steps(all_reduce(reduce_op, result)), 2)[-1] == f"first number of rank 0: {sentence}"


def test_a_sum_that_lost_numbers_says_what_it_should_be():
    foot = text(steps(all_reduce("SUM", 8)), 2)[-1]
    assert foot == "first number of rank 0: 0 + 1 + 2 + 3 gave 8, not 6"


@pytest.mark.parametrize("build", [all_gather, reduce_scatter])
def test_one_tensor_and_a_list_of_tensors_give_the_same_picture(build):
    assert steps(build(flat=True)).figures[2].svg == steps(build(flat=False)).figures[2].svg


def test_all_to_all_is_a_transpose():
    frames = steps(all_to_all())
    assert text(frames, 2)[2] == "rank 1   10 | 11 | 12 | 13   =>   1 | 11 | 21 | 31"


def test_long_blocks_are_cut_and_say_so():
    long = [event(r, "all_reduce", [[100] * 12], [[100] * 12], [[400] * 12], reduce_op="SUM") for r in ALL]
    assert "…" in steps(long).figures[2].svg


def test_the_call_and_the_operation_can_be_chosen():
    events = [e for r in ALL for e in (all_reduce()[r], all_to_all()[r], all_reduce("MAX", 3)[r])]
    run = Run("x", tuple(RankResult(r, events=tuple(e for e in events if e.rank == r)) for r in ALL))
    assert text(steps(run, "all_reduce", call=2), 0)[0] == "all_reduce, MAX on ranks 0-3"
    assert refusal(run) == (
        "Which collective? This run holds: all_reduce (2x), all_to_all (1x). "
        "Name one: steps(run, 'all_reduce')."
    )
    assert refusal(run, "gather") == (
        "This run holds no gather number 1. Its collectives: all_reduce (2x), all_to_all (1x)."
    )
    assert refusal(run, "all_reduce", call=3).startswith("This run holds no all_reduce number 3.")
    assert refusal(run, "barrier").startswith(
        "No picture for 'barrier'. There is one for: all_gather, all_reduce, "
    )


def test_a_run_without_values_says_how_to_record_them():
    bare = [Event(r, "all_reduce", 0, 1, ranks=ALL, shape=(2,)) for r in ALL]
    assert refusal(bare) == (
        "The numbers of this all_reduce were not recorded. "
        "Run its cell with `--values`: `%%ranks 4 --values`."
    )


def test_a_run_without_collectives_says_so():
    assert refusal([], "all_reduce").startswith(
        "This run holds no all_reduce number 1. Its collectives: none."
    )
    assert refusal([]).startswith("Which collective? This run holds: none.")


def test_a_call_of_part_of_the_group_is_not_drawn():
    assert refusal(all_reduce()[:3]) == (
        "all_reduce number 1 of rank 0 is one of ranks 0-3, but this run has none of rank 3. "
        "Draw a call that the whole group made."
    )


def test_unequal_parts_are_refused_instead_of_coloured_wrongly():
    uneven = [event(r, "all_gather", [[r]], [[NAN] * 3], [[0, 1, 2]]) for r in ALL]
    assert refusal(uneven).startswith(
        "all_gather on 4 ranks is drawn from 4 tensors or one tensor in 4 equal"
    )
    shuffled = all_to_all()
    shuffled[0] = event(0, "all_to_all", [[0, 1, 2, 3]], [[NAN] * 4], [[0, 20, 10, 30]])
    assert refusal(shuffled).startswith("Part 1 of rank 0's output is not part 0 of rank 1's input: ")


def test_unequal_parts_of_an_all_to_all_are_told_from_numbers_that_differ():
    goes = {0: [0, 2], 1: [2, 2], 2: [1, 2], 3: [0, 3]}  # sorted by target, as `all_to_all_single` sends them
    came = {t: [10 * s + i for s in goes for i, to in enumerate(goes[s]) if to == t] for t in ALL}
    run = [event(r, "all_to_all", [[10 * r, 10 * r + 1]], [[NAN] * len(came[r])], [came[r]]) for r in ALL]
    _, send, after = steps(run).figures
    assert repr(send).splitlines()[1:] == [
        "rank 0: 0  ->  rank 0",
        "rank 0: 1  ->  rank 2",
        "rank 1: 10 11  ->  rank 2",
        "rank 2: 20  ->  rank 1",
        "rank 2: 21  ->  rank 2",
        "rank 3: 30  ->  rank 0",
        "rank 3: 31  ->  rank 3",
        "each number goes to the rank that it is for",
    ]
    assert "rank 2   20 | 21   =>   1 | 10 11 | 21" in repr(after)
    blocks = [
        r.get("fill") for r in ET.fromstring(after.svg).iter(f"{SVG}rect") if r.get("height") == "40.00"
    ]
    assert len(blocks) == 14  # seven parts of eight numbers, before and after


def test_a_tensor_larger_than_the_record_is_refused():
    kept = Values(((1.0,) * 64,), ((1.0,) * 64,), ((4.0,) * 64,))
    cut = [Event(r, "all_reduce", 0, 1, ranks=ALL, shape=(100,), values=kept) for r in ALL]
    assert refusal(cut).startswith("Only the first 64 of 100 numbers were recorded. ")


def test_matrices_colour_a_column_by_the_rank_it_reads():
    figure = matrices(
        {"A": [[1, 0], [1, 0]], "B": [[1, 1], [0, 0]]}, "B is the transpose of A.", world_size=2
    )
    squares = [
        x.get("fill") for x in ET.fromstring(figure.svg).iter(f"{SVG}rect") if x.get("width") == "11.00"
    ]
    assert squares == [RANK_COLOURS[0], RANK_COLOURS[0], RANK_COLOURS[0], RANK_COLOURS[1]]
    assert repr(figure) == "A\n1 .\n1 .\n\nB\n1 1\n. ."
    texts = [t.text for t in ET.fromstring(figure.svg).iter(f"{SVG}text")]
    assert "column: a number of the input, in its rank's colour" in texts
    alone = matrices({"A": [[1, 0], [0, 1]]}, "", world_size=2, owners={"A": [1, 1]})
    assert alone.svg.count(f'height="11.00" rx="2" fill="{RANK_COLOURS[1]}"') == 2
    assert figure.alt == (
        "B is the transpose of A. Matrices of zeros and ones, rows x columns: A 2 x 2, B 2 x 2."
    )


def test_matrices_can_colour_rows_instead():
    figure = matrices({"A": [[1, 1], [1, 0]]}, "", world_size=2, by_row=True, row="a query", column="a key")
    squares = [
        x.get("fill") for x in ET.fromstring(figure.svg).iter(f"{SVG}rect") if x.get("width") == "11.00"
    ]
    assert squares == [RANK_COLOURS[0], RANK_COLOURS[0], RANK_COLOURS[1]]
    texts = [t.text for t in ET.fromstring(figure.svg).iter(f"{SVG}text")]
    assert "row: a query, in its rank's colour" in texts and "column: a key" in texts
