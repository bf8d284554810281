"""What tells one wrong tensor from another: at which positions it is wrong, whether its rows are multiples of those of
one process, what is in it besides, whose weights these are, what its module was given. Whom to blame says `blame`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..results import grouped, name_ranks, name_some
from . import blame, layouts
from .beside import of_gradient
from .blame import CLOSE, before
from .comparison import Row
from .layouts import SeenPlaces
from .reference import Fit, Map, Piece, Reference, Tried, matrix_of, matrix_of_calls, typical
from .wording import ALIKE, BEFORE, GIVEN, LEFT_OUT, REORDERED, times_words

ROUNDED = 0.1  # what a cast to 8 bits may take from a row, and less than its multiples must differ by
LONG = 400  # letters of a list that is too long to read


@dataclass(frozen=True)
class Held:
    """A piece, and where it lies in the reference, or should. `factor` is 0 where it fits nowhere."""

    piece: Piece
    reference: Reference
    rows: Map
    columns: Map
    factor: float = 0.0

    def part(self, matrix: np.ndarray) -> np.ndarray:
        """The part of a matrix like the reference, or of one row, that is at these rows and columns."""
        return matrix[np.ix_(self.rows if len(matrix) > 1 else np.zeros_like(self.rows), self.columns)]

    def multiples(self, bias: np.ndarray | None = None, share: float = 0.0) -> np.ndarray:
        """How many times that of the reference each row is, `(n,)`: infinity if no multiple, NaN if too small to tell.

        `bias` is what a layer has added; `share` of its size a row may be off by.
        """
        part, matrix = self.part(self.reference.matrix), self.piece.matrix
        limits = self.reference.limits(part)
        if bias is not None:
            part, matrix = part - self.part(bias), matrix - self.part(bias)
        size = np.linalg.norm(matrix, axis=1)
        power = np.maximum(np.einsum("ij,ij->i", part, part), 1e-300)
        k = np.einsum("ij,ij->i", matrix, part) / power
        fits = np.linalg.norm(matrix - k[:, None] * part, axis=1) <= limits * np.maximum(1, np.abs(k)) + share * size
        small = np.maximum(power**0.5, size / 2) <= limits / CLOSE
        return np.where(small, np.nan, np.where(fits, k, np.inf))


def explained(judge: Any, rows: Sequence[Row], row: Row, used_as_whole: bool) -> tuple[Row, bool]:
    """The row to blame with what is told of it; where it is a sum that may be used as whole, the first wrong one behind
    it, if that is the whole sum and something else.
    """
    if says := blame.of_stages(row, rows):
        return replace(row, says=says), used_as_whole
    if row.kind == "grad" and row.status == "scaled":
        sizes = judge.world_size, *(judge.mesh or {}).values()
        backs = [pairs for key, pairs in judge.ranks.items() if key[0] == "grad_output" and key[2] == row.step]
        calls = 1 + min((max(e.call for _, e in pairs) for pairs in backs), default=0)
        return replace(row, clue=blame.where_scaled(row, rows, sizes, calls) or row.clue), used_as_whole
    at = next(i for i, r in enumerate(rows) if r.key == row.key)
    behind = (r for r in rows[at:] if r.kind == row.kind == "output" and r.status == "none")
    wrong = next(behind, row) if used_as_whole else row
    if wrong.status != "none" or wrong.says:
        return row, used_as_whole
    says, clue = _told(judge, wrong, before(wrong, rows))
    if used_as_whole:
        return (replace(wrong, says=says), False) if says else (row, True)
    clue = clue or row.clue or _exchanged(judge, row, rows) or blame.between(row, rows) or blame.given(row, rows)
    clue = blame.lacks_rows(row, rows) or _passed_over(judge, row) or clue or blame.comes_back(row, rows)
    clue = clue or (blame.cut_in_pieces(row, rows) if row.kind == "output" else "")
    if old := [r.title for r in rows if (r.kind, r.step, r.layout) == (row.kind, row.step, BEFORE)]:
        hold = "holds" if len(old) == 1 else "hold"
        clue = f"{name_some(old)} {hold} {BEFORE}: is what it made put back where it was?"
    if (row.kind, row.step) == ("parameter", 0) and any(
        (r.name, r.step, r.layout) == (row.name, 1, BEFORE) for r in rows
    ):
        clue = "nor does the traced step change them, and in one process it does: does anything write them?"
    clue = clue or of_gradient(judge, row, rows) or blame.added_up(row, rows)
    if row.kind == "output" and not says and (of_given := _of_given(judge, row)):
        if not of_given.startswith(f"{GIVEN} is right"):
            of_given += _strewn(judge, before(row, rows))
        clue = f"{of_given}{'' if of_given[-1] == '?' or not clue else '.'} {clue[:1].upper()}{clue[1:]}".strip()
    return replace(row, says=says, clue=clue), False


def _passed_over(judge: Any, row: Row) -> str:
    """Which modules one process calls before a wrong output and no rank has, beside others of their kind."""
    called = {name for kind, name, step, _ in judge.ranks if (kind, step) == ("output", row.step)}
    order = {n: es[0].order for (k, n, s, _), es in judge.dense.items() if (k, s) == ("output", row.step)}
    lost = {n for kind, n, *_ in judge.dense if kind == "parameter" and n not in judge.holders}
    early = [n for n in order if row.kind == "output" and n not in called and order[n] < order.get(row.name, 0)]
    around = {name.rpartition(".")[0] for name in called}
    found = [n for n in early if n.rpartition(".")[0] in around and any(p.startswith(f"{n}.") for p in lost)]
    return f"one process calls {name_some([f'`{n}`' for n in found])} before it, and no rank does" if found else ""


def _exchanged(judge: Any, row: Row, rows: Sequence[Row]) -> str:
    """The other gradient that ranks have exchanged with this one: neither is right, and their sum is."""
    others = (r for r in rows if (r.kind, r.step, r.status) == ("grad", row.step, "none") and r.name != row.name)
    for other in others if row.kind == "grad" else ():
        keys = [("grad", name, row.step, 0) for name in (row.name, other.name)]
        (mine, *_), (theirs, *_) = (judge.dense[key] for key in keys)
        pairs = [*zip(*(judge.ranks[key] for key in keys), strict=False)]
        if mine.shape == theirs.shape and all(a.shape == b.shape for (_, a), (_, b) in pairs):
            whole = Reference(matrix_of(mine) + matrix_of(theirs), judge.tolerance)
            if all(whole.factor(matrix_of(a) + matrix_of(b), None, None) == 1.0 for (_, a), (_, b) in pairs):
                return f"its sum with `{other.title}` is right: do the ranks take the two in another order?"
    return ""


def _told(judge: Any, row: Row, past: Sequence[Row]) -> tuple[str, str]:
    """What says all, and what says more, of a tensor that fits nowhere on some ranks; `past` comes before it."""
    is_update = row.kind == "grad" or (row.kind == "parameter" and row.step)
    if is_update or (lost := judge.lost(row)) is None:
        return "", ""
    reference, tried = lost
    uneven = _uneven(tried, reference)
    if row.clue:  # a buffer of its own is wrong, too
        return "", ". ".join(filter(None, (row.clue, uneven)))
    dense = {n: es for (k, n, s, _), es in judge.dense.items() if (k, s) == (row.kind, row.step) and n != row.name}
    if row.kind == "parameter":
        weights = {n: matrix_of(es[0]) for n, es in dense.items()}
        lost = [p for p, fit in tried if fit is None]
        return "", _loaded(tried, reference) or _of_weights(lost, reference, weights)
    of_weight = judge.holders.get(f"{row.name}.weight", {})
    outputs = {rank: fit.rows for rank, fit in of_weight.items() if fit and fit.sure}
    held = _where_held(tried, reference, judge.seen, outputs)
    if row.kind == "grad_output":
        experts = f"{row.name.rpartition('.')[0]}.experts".removeprefix(".")
        if any(n.startswith(experts) for n in dense) and not row.name.startswith(experts):
            return "", "do the experts' parts, or a loss of the router's own (balance), count as in one process?"
        says = _of_targets(held)
        rest = "" if past else _of_others(held, judge.world_size)
        says += f"{'' if says[-1] == '?' else '.'} {rest}" if says and rest else rest
        if says and LEFT_OUT not in row.layout:
            return f"the forward is right, and {says}", ""
        alike = "all ranks have the same: does a way back to it count twice, or not at all?"
        other = _of_another_call(held) or (alike if row.layout.endswith(ALIKE) else "")
        return "", says or other or _of_rows(row.kind, held, None) or uneven
    biases = judge.dense.get(("parameter", f"{row.name}.bias", row.step, 0))
    bias = matrix_of(biases[0]).T if biases else None
    bias = bias if bias is not None and bias.shape[1] == reference.f else None  # a convolution's is one for each row
    others = {n: m for n, es in dense.items() if (m := matrix_of_calls(es)).shape == reference.matrix.shape}
    says = _besides(held, bias, others)
    return says, "" if says else _of_rows(row.kind, held, bias) or uneven or _off_by_a_little(held)


def _of_given(judge: Any, row: Row) -> str:
    """Whether a module with a wrong output is given the right tensors; "" where this cannot be told."""
    keys = [key for key in judge.ranks if key[:3] == ("given", row.name, row.step) and key[1:] in judge.given]
    for key in keys:
        what = f"{GIVEN} as input {key[3] + 1}" if len(keys) > 1 else GIVEN
        ones = judge.given[key[1:]]
        reference = Reference(matrix_of_calls(ones), judge.tolerance, shape=ones[0].shape if len(ones) == 1 else ())
        tried: list[tuple[Piece, Fit | None]] = []
        for piece in (Piece(rank, e.call, e.shape, matrix_of(e)) for rank, e in judge.ranks[key] if rank in row.ranks):
            places = [*judge.seen.both(piece, reference)] or _cuts(piece, reference)
            right = [where for where in places if reference.factor(piece.matrix, *where) == 1.0]
            found = Fit(*right[0]) if right else layouts.place(piece, reference, layouts.SeenPlaces())
            if not right and found is not None and found.rows is not None and found.factor == 1.0:
                rows, order = _named("row", map(int, found.rows)), REORDERED * bool((np.diff(found.rows) < 0).any())
                holds = f"holds {rows if len(rows) < LONG else 'other rows'} of {reference.n}{order}"
                return f"{what} {holds} on rank {piece.rank}: are these the right ones?" if found.sure else ""
            if not right and not places:
                return ""
            tried.append((piece, Fit(*right[0]) if right else None))
        if lost := [p for p, fit in tried if fit is None]:
            where = _of_rows("output", _where_held(tried, reference, judge.seen, {}), None)
            off = f"({where})" if where else "(other numbers)"
            return f"{what} is wrong already on {name_ranks(sorted({p.rank for p in lost}))} {off}"
    return f"{GIVEN} is right" if keys else ""


def _strewn(judge: Any, past: Sequence[Row]) -> str:
    """Which rows each rank has of the output before, if they are not neighbours."""
    rows = {rank: m for rank, m in judge.rows_of.get(past[-1].key, {}).items() if m is not None} if past else {}
    if not any((np.diff(m) != 1).any() for m in rows.values()) or sum(map(len, rows.values())) > LONG // 8:
        return ""
    each = (f"{_named('row', map(int, m))} on rank {rank}" for rank, m in sorted(rows.items()))
    return f" (of `{past[-1].title}` there are {', '.join(each)})"


def _off_by_a_little(held: Sequence[Held]) -> str:
    """By how much a part of an output is off, where its layer's weights, which are right, tell which part it is."""
    pairs = [(h.piece.matrix, h.part(h.reference.matrix)) for h in held if not h.factor and h.piece.f < h.reference.f]
    share = max((typical(ours - part) / max(typical(part), 1e-30) for ours, part in pairs), default=1.0)
    said = f"the part that its weights give is off by {share:.1%}, and they are right: what is made of them?"
    return said if share <= 0.3 else ""


def _uneven(tried: Tried, reference: Reference) -> str:
    """How many samples of the batch each rank has, if not all have as many; "" if they do, or have parts of samples."""
    counts = [p.shape[0] for p, _ in tried]
    if len({*counts}) == 1 or sum(p.n for p, _ in tried) != reference.n or any(p.f != reference.f for p, _ in tried):
        return ""
    return f"The ranks hold {', '.join(map(str, counts))} samples: is each weighed by its number?"


def _where_held(tried: Tried, reference: Reference, seen: SeenPlaces, outputs: Mapping[int, Map | None]) -> list[Held]:
    """Each piece with its place, none if one has none; `outputs` are a layer's columns by rank, as its weights tell."""
    found: list[Held] = []
    covered = [fit.rows for _, fit in tried if fit and fit.rows is not None]
    left = np.setdiff1d(np.arange(reference.n), np.concatenate([*covered, []]))
    for piece, fit in tried:
        own, maps = outputs.get(piece.rank), [(fit.rows, fit.columns)] if fit else [*seen.both(piece, reference)]
        if fit is None and own is not None and len(own) == piece.f:
            maps = [(rows, own) for rows in seen.rows(piece, reference)]
        whole = np.arange(reference.n), np.arange(reference.f)
        if not maps and covered and (piece.n, piece.f) == (len(left), reference.f):
            maps = [(left, None)]  # what is on no other rank
        if not (maps := maps or _cuts(piece, reference)):
            return []
        places = ((whole[0] if r is None else r, whole[1] if c is None else c) for r, c in maps)
        held = (Held(piece, reference, r, c, fit.factor if fit else 0.0) for r, c in places)
        found.append(max(held, key=lambda h: np.isfinite(h.multiples()).sum()))
    return found


def _cuts(piece: Piece, reference: Reference) -> list[tuple[Map | None, Map | None]]:
    """Where a piece may lie that is cut on one dim before the last."""
    shape, mine = reference.shape, piece.shape
    dims = [d for d, (a, b) in enumerate(zip(shape, mine, strict=False)) if a != b]
    if len(shape) != len(mine) or len(dims) != 1 or dims[0] == len(shape) - 1 or np.prod(shape[:-1]) != reference.n:
        return []
    rows, d = np.arange(reference.n).reshape(shape[:-1]), dims[0]
    starts = range(0, shape[d] - mine[d] + 1, mine[d])
    return [(rows.take(range(n, n + mine[d]), d).ravel(), None) for n in starts]


def _of_rows(kind: str, held: Sequence[Held], bias: np.ndarray | None) -> str:
    """Where an output or its gradient is wrong, or how; "" if nothing can be told."""
    lost = [h for h in held if not h.factor]
    each = [np.full(h.piece.n, h.factor) if h.factor else h.multiples() for h in held]
    told = np.sort(np.concatenate([*each, np.ones(1)]))
    told = told[np.isfinite(told)]
    near = np.searchsorted(told, told + CLOSE * np.abs(told)) - np.searchsorted(told, told - CLOSE * np.abs(told))
    usual = float(told[near.argmax()]) if kind == "grad_output" and told[near.argmax()] else 1.0
    for share, nearly in ((0.0, ""), (ROUNDED, "nearly ")) if lost else ():
        k = np.concatenate([h.multiples(bias, share) for h in lost]) / usual
        k = k[~np.isnan(k)]
        wrong = k[np.abs(k - 1) > CLOSE]
        if len(wrong) and np.isfinite(k).all() and np.abs(wrong).max() > CLOSE and np.ptp([*k, 1]) > share:
            question = "a scale, a mean or a norm of its own?" if kind == "output" else "do all of them count alike?"
            low, high = times_words(float(k.min())), times_words(float(k.max()))
            many = f"{nearly}{low}" if low == high else f"{nearly}multiples, {low} to {high}, of"
            return f"its rows are {many} those of one process: {question}"
    right = [
        np.isnan(k) | (np.abs(k - usual) <= CLOSE * abs(usual)) | bool(h.factor)
        for h, k in zip(held, each, strict=True)
    ]
    return "; ".join(filter(None, (_of_columns(lost), _where(kind, held, right))))


def _of_columns(lost: Sequence[Held]) -> str:
    """On which ranks some columns are right and others wrong: the fewer of them."""
    right: dict[int, set[int]] = {}
    wrong: dict[int, set[int]] = {}
    for h in lost:
        part = h.part(h.reference.matrix).T
        limits = h.reference.limits(part)
        fits = np.linalg.norm(h.piece.matrix.T - part, axis=1) <= limits
        wrong.setdefault(h.piece.rank, set()).update(map(int, h.columns[~fits]))
        fits &= np.linalg.norm(part, axis=1) > 10 * limits
        right.setdefault(h.piece.rank, set()).update(map(int, h.columns[fits]))
    right = {r: columns - wrong[r] for r, columns in right.items() if columns - wrong[r]}
    few, word = (right, "right") if sum(map(len, right.values())) < sum(map(len, wrong.values())) else (wrong, "wrong")
    ranks = grouped((tuple(sorted(columns)), rank) for rank, columns in few.items())
    each = [f"{_named('column', columns)} on {name_ranks(who)}" for columns, who in ranks.items()]
    if not right or not any(wrong.values()) or not 0 < len(each) < 5:
        return ""
    bad = sorted(set().union(*wrong.values()))
    whole = lost[0].part(lost[0].reference.matrix)
    if (
        len(wrong) == len(lost) > 1
        and all(h.piece.matrix.shape == whole.shape for h in lost)
        and len(whole.T) > bad[-1]
    ):
        total = sum(h.piece.matrix for h in lost)
        if np.abs(total - whole)[:, bad].max() <= lost[0].reference.limits(whole).max():
            return f"{word} only in {', '.join(each)}, where they add up to it: is an all-reduce missing there?"
    return f"{word} only in {', '.join(each)}"


def _of_another_call(held: Sequence[Held]) -> str:
    """Where what comes back for one call of a module belongs to another, which has been found."""
    for h in held:
        for other in held if not h.factor else ():
            mine, theirs = h.piece, other.piece
            if other.factor and np.array_equal(h.rows, other.rows) and np.array_equal(mine.matrix, theirs.matrix):
                who = f"on rank {mine.rank} what comes back in call {mine.call + 1} belongs to call {theirs.call + 1}"
                return f"{who}{f' of rank {theirs.rank}' if theirs.rank != mine.rank else ''}: who keeps, or sends, it?"
    return ""


def _of_targets(held: Sequence[Held]) -> str:
    """Whose targets a cross-entropy was given, if not those of one process; "" if this cannot be told."""
    lost = [h for h in held if not h.factor]
    if not lost or lost[0].reference.f < 4 or any(h.piece.f != h.reference.f for h in held):
        return ""
    of_one, each = _targets(lost[0].reference.matrix), [_targets(h.piece.matrix) for h in lost]
    rows, given, length = np.concatenate([h.rows for h in lost]), np.concatenate(each), _length(lost[0].reference)
    wrong = given != of_one[rows]
    if min(given.min(), of_one.min()) < -1 or not wrong.any():
        return ""
    who = name_ranks([*{h.piece.rank for h in lost}])
    says = f"in {wrong.sum()} of {len(rows)} rows on {who} the loss has not the target of one process"
    for n, word, ask in ((1, "next", "once more"), (-1, "previous", "at all")):
        beside = np.where((rows % length + n) // length == 0, of_one[(rows + n) % len(of_one)], -1)
        if _are(given, beside):
            return f"{says}, that of the {word} position: are they shifted {ask}?"
    last = [n % h.piece.shape[-2:][0] == 0 for h in lost for n in range(1, len(h.rows) + 1)] if length > 1 else [False]
    if np.all(last | ~wrong):
        return f"{says}, the last of each part: are they shifted before the sequence is cut?"
    for h, own in zip(lost, each, strict=True):
        for other in held:
            if not _are(own, of_one[h.rows]) and len(own) == len(other.rows) and _are(own, of_one[other.rows]):
                mine, theirs = (f"rank {p.rank} in call {p.call + 1}" for p in (h.piece, other.piece))
                return f"{says}: {mine} has those of {theirs}"
    return says if (given >= 0)[wrong].all() else ""


def _of_others(held: Sequence[Held], world_size: float) -> str:
    """Whether the rows that the loss keeps are as many times too large as it keeps fewer; "" if it keeps all."""
    k = np.concatenate([k[~np.isnan(k)] for k in (h.multiples() for h in held)])
    kept = k[k != 0.0]
    if len(kept) in (0, len(k)) or not np.isfinite(kept).all() or np.ptp(kept) > CLOSE * kept.max():
        return ""
    times = kept[0] * len(kept) / len(k)  # 1, or the ranks where gradients are averaged
    says = f"The other rows are {times_words(len(k) / len(kept))} what they should be: it counts fewer"
    return says if min(abs(times - 1), abs(times / world_size - 1)) <= CLOSE else ""


def _targets(matrix: np.ndarray) -> np.ndarray:
    """The target of each row of a cross-entropy's gradient, alone below zero: -1 of a zero row, -2 of another loss."""
    size = np.abs(matrix)
    is_one = np.abs(2 * size.max(1) - size.sum(1)) + np.abs(matrix.sum(1)) <= 1e-3 * size.sum(1)
    return np.where(size.any(1), np.where(is_one, size.argmax(1), -2), -1)


def _are(targets: np.ndarray, others: np.ndarray) -> bool:
    known = (targets >= 0) & (others >= 0)
    return bool(known.sum() > 3 and (targets == others)[known].all())


def _length(reference: Reference) -> int:
    """Positions of a sample, 1 if it has none."""
    shape = reference.shape
    return shape[-2] if len(shape) > 2 and np.prod(shape[:-1]) == reference.n else 1


def _where(kind: str, held: Sequence[Held], right: Sequence[np.ndarray]) -> str:
    """At which positions, or in which samples, rows are right and wrong."""
    pairs = [*zip(held, right, strict=True)]
    good, bad = ({int(r) for h, ok in pairs for r in h.rows[ok == sign]} for sign in (True, False))
    if not good or not bad:
        return ""
    shape = held[0].reference.shape[:-1]
    shape = shape if np.prod(shape) == held[0].reference.n else (held[0].reference.n,)
    places = [[*zip(*(np.unravel_index(r, shape) for r in rows), strict=True)] for rows in (good, bad)]
    for d in (*range(len(shape) - 1, 0, -1), 0) if len(shape) > 1 else ():
        well, badly = ({int(n) for n in of[d]} for of in places)
        if not well & badly:
            word = "sample" if d == 0 else "position" if len(shape) == 2 else f"index {d}"
            words = f"right at {_named(word, well)}, wrong at {_named(word, badly)}"
            if word != "position":
                return words.replace(" at ", " in ") if d == 0 else f"on dim {d} it is {words.replace(word, 'place')}"
            if kind == "output" and max(well) < min(badly):
                asks = "is what comes from earlier positions right (their places, a mask, how blocks are merged)?"
                return f"{words}: {asks}"
            back = kind == "grad_output" and min(well) > max(badly)
            return f"{words}: does what later positions send back arrive?" if back else words
    some, lost = len(good - bad), bad - good
    few = f", and {_named('row', lost)} {'is' if len(lost) == 1 else 'are'} not" if lost else ""
    few = few if len(lost) <= 8 or len(few) < 50 else ""
    return f"{some} of {len(good | bad)} rows are right{few}" if 8 * some >= len(good | bad) else ""


def _named(word: str, numbers: Iterable[int]) -> str:
    return name_ranks([*numbers]).replace("rank", word)


def _besides(held: Sequence[Held], bias: np.ndarray | None, others: Mapping[str, np.ndarray]) -> str:
    """What is in these pieces too often, or is missing: the bias, or one of the other outputs."""
    lost = [h for h in held if not h.factor]
    for name, other in [("", bias), *others.items()] if lost else ():
        of_pieces = {_times_of(other, h) for h in lost} if other is not None else {0.0}
        times = of_pieces.pop()
        if of_pieces or not times:
            continue
        if not name and times == round(times) > 0:
            says = f"its bias is in it {1 + times:.0f} times"
            return f"{says}: ranks whose parts are summed must not all add it. Add it after the sum"
        if not name:
            return "its bias is not in it" if times == -1 else ""
        much = "too much in it is" if times > 0 else "missing in it is"
        how = "what" if abs(times) == 1 else f"{times_words(abs(times))} what"
        return f"what is {much} {how} `{name}` gives: does every rank add it, or is it scaled by another number?"
    return ""


def _times_of(other: np.ndarray, held: Held) -> float:
    """How many times the other tensor is in a piece besides what should be; 0 if that does not explain the piece."""
    off, more = held.piece.matrix - held.part(held.reference.matrix), held.part(other)
    times = round(float((off * more).sum()) / max(float((more**2).sum()), 1e-300) * 60) / 60
    limits = 4 * held.reference.limits(held.piece.matrix)
    return times if (np.linalg.norm(off - times * more, axis=1) <= limits).all() else 0.0


def _of_weights(lost: Sequence[Piece], reference: Reference, weights: Mapping[str, np.ndarray]) -> str:
    """Whose weights these are instead, of the others, or what happened to them; "" if nothing can be told."""
    first = lost[0].matrix
    alike = all(np.array_equal(p.matrix, first) for p in lost)
    if alike and len(lost) > 1 and first.size < reference.matrix.size:
        return "they hold the same numbers, where each should have its own part: were they drawn from one seed?"
    theirs = [n for n, w in weights.items() if np.array_equal(w, first)]
    if alike and theirs and first.std() > 0:
        return f"these are the weights of {name_some(theirs)}"
    if first.std() > 0 and all(np.isin(p.matrix, reference.matrix).all() for p in lost):
        return "the same numbers in other places: transposed, interleaved or cut otherwise?"
    return ""


def _loaded(tried: Tried, reference: Reference) -> str:
    """Which rows, or columns, of one process are in parts of a weight that hold others, too; "" if none are."""
    shape, mine = reference.shape, tried[0][0].shape
    if not shape or len(mine) != len(shape) or any(p.shape != mine for p, _ in tried):
        return ""
    dim = next((d for d, (a, b) in enumerate(zip(shape, mine, strict=True)) if a != b), 0)
    places = {row.tobytes(): i for i, row in enumerate(np.moveaxis(reference.matrix.reshape(shape), dim, 0))}
    of_ranks = [np.moveaxis(p.matrix.reshape(mine), dim, 0) for p, _ in tried]
    found = [tuple(places.get(row.tobytes(), -1) for row in part) for part in of_ranks]
    parts, words = [*dict.fromkeys(found)], []  # in the order of the ranks
    for n, rows in enumerate(parts):
        who = [p.rank for (p, fit), own in zip(tried, found, strict=True) if own == rows and fit is None]
        held = [i for i in rows if i >= 0]
        if who and len(held) > 1:
            is_due = f" where {n * len(rows)}-{(n + 1) * len(rows) - 1} belong"
            has = f"{name_ranks(who)} {'has' if len(who) == 1 else 'have'} {_named('', held).lstrip('s ')}"
            words.append(has + (is_due if len(parts) * len(rows) == len(places) else ""))
    said = ", ".join([*words[:4], "..."][: len(words)])
    if not words or len(places) < shape[dim] or len(said) > LONG:
        return ""
    word = "rows" if dim == 0 else "columns" if len(shape) == 2 else f"places on dim {dim}"
    return f"of the {word} of one process {said}; the rest is none of them: was it loaded?"
