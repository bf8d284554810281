"""The page "Cheat sheet": the collectives and the strategies, each in one row (MyST source).

The bytes are written as formulas of n, and tests/test_pages.py computes them with the library's own.
"""

from typing import NamedTuple

import course
from course import escaped

# One colour per rank, as in every picture of the course (rankcell.draw.svg.RANK_COLOURS), and one for a sum
RANKS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7")
SUM = "#444444"
N = 4


class Collective(NamedTuple):
    """One row: `before` and `after` are, by rank, the origins of its four parts: a rank, "S" for a sum, or nothing."""

    name: str
    op: str  # as rankcell.costs calls it
    before: tuple[str, str, str, str]
    after: tuple[str, str, str, str]
    sent: str  # by each rank, mean over the ranks, in units of S
    backward: str
    call: str


OWN = ("0000", "1111", "2222", "3333")  # every rank has four parts of its own
PART = ("0...", ".1..", "..2.", "...3")  # rank r has the r-th part
ALL = ("0123",) * 4
FIRST = ("0000", "....", "....", "....")
COLLECTIVES = (
    Collective("all-reduce", "all_reduce", OWN, ("SSSS",) * 4, "2(n−1)/n", "all-reduce", "all_reduce(x)"),
    Collective(
        *("reduce-scatter", "reduce_scatter", OWN, ("S...", ".S..", "..S.", "...S")),
        *("(n−1)/n", "all-gather", "reduce_scatter_single(out, x)"),
    ),
    Collective(
        "all-gather", "all_gather", PART, ALL, "(n−1)/n", "reduce-scatter", "all_gather_single(out, x)"
    ),
    Collective("broadcast", "broadcast", FIRST, ("0000",) * 4, "(n−1)/n", "reduce", "broadcast(x, src=0)"),
    Collective(
        *("reduce", "reduce", OWN, ("SSSS", "....", "....", "....")),
        *("(n−1)/n", "broadcast", "reduce(x, dst=0)"),
    ),
    Collective(
        *("scatter", "scatter", FIRST, ("0...", ".0..", "..0.", "...0")),
        *("(n−1)/n²", "gather", "scatter(out, list, src=0)"),
    ),
    Collective(
        *("gather", "gather", PART, ("0123", "....", "....", "....")),
        *("(n−1)/n²", "scatter", "gather(x, list, dst=0)"),
    ),
    Collective("all-to-all", "all_to_all", OWN, ALL, "(n−1)/n", "all-to-all", "all_to_all_single(out, x)"),
)


class Strategy(NamedTuple):
    """One row. Ψ parameters, W ranks, S the length of the sequence."""

    name: str
    lesson: str
    sharded: str
    sent: str
    memory: str
    when: str


STRATEGIES = (
    Strategy(
        "data (DDP)",
        "09_ddp",
        "the batch",
        "all-reduce of the gradients, beside the backward: 2(W−1)/W · Ψ numbers",
        "16Ψ",
        "the model fits, and a step computes longer than the all-reduce takes",
    ),
    Strategy(
        "data, far apart (DiLoCo)",
        "26_far_apart",
        "the batch, for H steps",
        "every H steps an all-reduce of what has changed: 2(W−1)/W · Ψ numbers",
        "16Ψ, and 8Ψ on the host",
        "islands with slow links: H steps compute longer than the exchange takes",
    ),
    Strategy(
        "ZeRO 1",
        "10_zero",
        "+ optimizer states",
        "reduce-scatter of gradients, all-gather of parameters: as DDP",
        "4Ψ + 12Ψ/W",
        "always, where DDP would be used: the same bytes, less memory",
    ),
    Strategy("ZeRO 2", "10_zero", "+ gradients", "the same", "2Ψ + 14Ψ/W", "gradients are in the way"),
    Strategy(
        "ZeRO 3, FSDP",
        "10_zero",
        "+ parameters",
        "all-gather before forward and backward of each unit, reduce-scatter after: half more",
        "16Ψ/W",
        "the states do not fit, and tokens per GPU are many enough to hide the gathers",
    ),
    Strategy(
        "tensor",
        "13_tensor_parallel",
        "each matrix: columns, then rows",
        "four all-reduces of the activations per layer, and all wait for them",
        "16Ψ/W",
        "inside a node; a layer is too large or too slow for one GPU",
    ),
    Strategy(
        "sequence, with tensor",
        "13_tensor_parallel",
        "+ what lies between, by positions",
        "the same bytes, as reduce-scatter and all-gather",
        "activations/W, too",
        "with tensor parallelism, always",
    ),
    Strategy(
        "pipeline",
        "15_pipeline_parallel",
        "the layers, p stages",
        "per micro-batch and cut: activations on, gradients back",
        "16Ψ/p; activations of up to p micro-batches",
        "across nodes; idle (p−1)/(m+p−1), so m ≫ p micro-batches",
    ),
    Strategy(
        "context, ring",
        "17_context_parallel",
        "the sequence, zig-zag",
        "keys and values to the next rank, W−1 times; again backward, with their gradients",
        "16Ψ; activations/W",
        "long sequences; few heads of keys make it cheap",
    ),
    Strategy(
        "context, all-to-all",
        "17_context_parallel",
        "the sequence; inside attention the heads",
        "two all-to-alls forward, two backward",
        "16Ψ; activations/W",
        "long sequences, at most as many ranks as heads",
    ),
    Strategy(
        "experts",
        "18_experts",
        "the experts",
        "two all-to-alls forward, two backward: 4kT(W−1)/W rows per layer",
        "experts' Ψ/W",
        "many parameters for few operations; the fullest expert sets the pace",
    ),
)


def picture(rows: tuple[str, ...], x: float) -> str:
    """What four ranks hold, side by side from `x`: a column per rank, a cell per part."""
    marks = []
    for rank, parts in enumerate(rows):
        left = x + rank * 13
        marks.append(f'<rect x="{left}" y="1" width="11" height="34" class="rank"/>')
        for part, origin in enumerate(parts):
            if origin != ".":
                fill = SUM if origin == "S" else RANKS[int(origin)]
                marks.append(f'<rect x="{left + 1}" y="{2 + part * 8}" width="9" height="7" fill="{fill}"/>')
    return "".join(marks)


def drawn(collective: Collective) -> str:
    """Before, an arrow, after: four ranks, from left to right."""
    return (
        f'<svg viewBox="0 0 128 36" width="128" height="36" role="img" '
        f'aria-label="{escaped(alt(collective))}">{picture(collective.before, 1)}'
        f'<path d="M57 18h12m-5-4 5 4-5 4" class="arrow"/>{picture(collective.after, 74)}</svg>'
    )


def alt(collective: Collective) -> str:
    """The picture in words."""
    return f"{collective.name}: before, {_held(collective.before)}; after, {_held(collective.after)}"


def _held(rows: tuple[str, ...]) -> str:
    def parts(origins: str) -> str:
        known = [o for o in origins if o != "."]
        if not known:
            return "nothing"
        what = "sums" if known[0] == "S" else f"parts of rank {known[0]}"
        if len(set(known)) > 1:
            what = "a part of each rank"
        return f"{len(known)} {what}" if len(set(known)) == 1 else what

    texts = [parts(row) for row in rows]
    if len(set(texts)) == 1:
        return f"every rank has {texts[0]}"
    return ", ".join(f"rank {rank} has {text}" for rank, text in enumerate(texts))


def page() -> str:
    """The whole sheet."""
    rows = "".join(
        f"<tr><th scope='row'>{c.name}</th><td>{drawn(c)}</td><td>{c.sent} · S</td><td>{c.backward}</td>"
        f"<td><code>dist.{escaped(c.call)}</code></td></tr>"
        for c in COLLECTIVES
    )
    collectives = (
        "<div class='table-wrapper'><table class='docutils sheet'><thead><tr><th>collective</th>"
        "<th>before and after, on four ranks</th><th>each rank sends</th><th>backward</th><th>torch</th></tr></thead>"
        f"<tbody>{rows}</tbody></table></div>"
    )
    lines = "".join(
        f"<tr><th scope='row'><a href='notebooks/{s.lesson}.html'>{escaped(s.name)}</a></th>"
        f"<td>{escaped(s.sharded)}</td><td>{escaped(s.sent)}</td><td>{escaped(s.memory)}</td><td>{escaped(s.when)}</td></tr>"
        for s in STRATEGIES
    )
    strategies = (
        "<div class='table-wrapper'><table class='docutils sheet'><thead><tr><th>parallelism</th><th>sharded</th>"
        "<th>sent per step</th><th>bytes of states per rank</th><th>when</th></tr></thead>"
        f"<tbody>{lines}</tbody></table></div>"
    )
    text = (course.HERE / "cheatsheet.md").read_text("utf-8")
    return text.replace("<!-- collectives -->", course.raw(collectives)).replace(
        "<!-- strategies -->", course.raw(strategies)
    )
