"""On the notebook's side: what becomes of a cell that is over, a `Run` or the error that says what went wrong first."""

from collections.abc import Sequence
from typing import Any

from .. import errors
from ..results import NotSent, Run, name_ranks
from .cell import Ending


def conclude(ending: Ending, pull: Sequence[str], *, trouble: str, alive: bool) -> Run:
    """The run of a cell, or the error that says what went wrong first.

    Args:
        pull: names that the notebook wants.
        trouble: what kept the ranks from being set up for the next cell, in a sentence; "" if nothing did.
        alive: whether lost ranks were replaced.
    """
    run, cause = ending.run, ending.cause
    lost = [r for r in run.ran if r.state == "lost" and not (r.error and r.error.caused_by_abort)]
    raised = [r for r in run.failed if r.error and not r.error.caused_by_abort and r.state == "error"]
    error: errors.RankError | errors.RanksInterrupted | None = None
    if isinstance(cause, (errors.RanksInterrupted, errors.RankTimeout)):
        error = cause
    elif lost:
        error = errors.lost_error(run, lost, replaced=alive)
    elif any(r.mismatch for r in run.ran) and (cause is not None or raised):
        error = errors.mismatch_error(run)
    elif raised:
        error = errors.rank_error(run)
    elif cause is not None:
        error = cause
    elif ending.unmatched:
        error = errors.Deadlock(ending.unmatched)
    elif run.failed:
        error = errors.rank_error(run)
    if error is not None:
        error.run = run
        ended = [r.rank for r in run.ran if r.state == "lost" and r.error and r.error.caused_by_abort]
        if ended:
            were = "was" if len(ended) == 1 else "were"
            error.add(f"{name_ranks(ended)} did not react and {were} replaced: names defined there are gone.")
        if trouble:
            error.add(trouble)
        raise error
    problems = [
        f"{name} on {name_ranks(ranks)}: {why}"
        for name in pull
        for why, ranks in _by_reason([r.rank for r in run.ran], run.pulled[name])
    ]
    if problems:
        raise errors.PullError(
            "the cell ran, but not every name could be pulled. " + "; ".join(problems) + ".", run
        )
    return run


def _by_reason(ranks: Sequence[int], values: Sequence[Any]) -> list[tuple[str, list[int]]]:
    reasons: dict[str, list[int]] = {}
    for rank, value in zip(ranks, values, strict=False):
        if isinstance(value, NotSent):
            reasons.setdefault("no such name" if value.reason == "missing" else value.reason, []).append(rank)
    return list(reasons.items())
