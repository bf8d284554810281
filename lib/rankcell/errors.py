"""Every error a learner can meet, with its wording: what happened, the numbers, and what to do.

No port, pid or backend text stands in a message: it would change from run to run and teach nothing.
"""

import difflib
import linecache
import re
import sys
import textwrap
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from .results import Call, Mismatch, RankFailure, RankResult, Run, grouped, name_ranks, placed


class UserFacingError:
    """An error whose message says it all: IPython shows it without a traceback through our own code."""

    shown_as = ""  # the name in front of the message; by default that of the class

    def _render_traceback_(self) -> list[str]:
        return [_wrapped(f"{self.shown_as or type(self).__name__}: {self}")]


def _wrapped(text: str, width: int = 88) -> str:
    """`text` in lines that JupyterLab shows without breaking words; a line goes on below its own beginning."""
    how: Any = {"break_long_words": False, "break_on_hyphens": False, "replace_whitespace": False}
    lines = []
    for line in text.split("\n"):
        # below a row about some ranks, "  ranks 0, 1  wait in ...", what they do stands apart
        begin = re.match(r" +ranks? [0-9, -]+  +", line) or re.match(r"\s*", line)
        lines += textwrap.wrap(line, width, subsequent_indent=" " * len(begin[0]) if begin else "", **how) or [""]
    return "\n".join(lines)


class _WithRun(UserFacingError, BaseException):
    """An error of a cell: `run` holds what each rank did and printed until then."""

    run: Run

    def __init__(self, message: str, run: Run | None = None) -> None:
        super().__init__(message)
        if run is not None:
            self.run = run

    def add(self, sentence: str) -> None:
        """Say one thing more."""
        self.args = (f"{self}\n{sentence}",)


class RankError(_WithRun, RuntimeError):
    """A rank cell did not finish on every rank. `run` holds what each rank did and printed until then."""


class Deadlock(RankError):
    """The ranks wait for each other, or for a rank that will never answer: proved from what each of them waits for."""


class RankTimeout(RankError):
    """The ranks did not all finish within the time that the cell was given."""


class RankLost(RankError):
    """The process of a rank ended in the middle of a cell. A new one has taken its place."""


class RanksInterrupted(_WithRun, KeyboardInterrupt):
    """The learner interrupted a rank cell. `run` holds what each rank did and printed until then."""

    shown_as = "KeyboardInterrupt"


class RankMismatch(RankError):
    """The ranks called things that do not fit together. Nothing was sent."""


class MismatchError(RuntimeError):
    """On a rank: this call does not match the call of another rank. Nothing was sent."""

    def __init__(self, details: Mismatch, *, again: bool = False) -> None:
        self.details = details
        calls = ", ".join(f"rank {r} calls {c.text}{placed(c.line, c.file)}" for r, c in sorted(details.calls.items()))
        lines = {(c.file, c.line) for c in details.calls.values() if c.op not in (*PAIRED, "new_group")}
        advice = _ADVICE.get(details.problem, _SPLITS)
        if len(lines) > 1 and details.problem != "different operations":
            advice = f"{_APART}{advice[0].lower()}{advice[1:]}"
        super().__init__(
            f"an earlier call of this group did not match its peers' ({details.problem}: {calls}), so that the "
            f"ranks are out of step: until the cell ends, this group sends nothing more."
            if again
            else f"{details.problem}: {calls}. This call was stopped before it sent anything. {advice}"
        )


_APART = "They stand in different lines: has a rank left out a call before, or made one more? Otherwise: "
_SPLITS = "What one rank sends to another must be as long as what that rank expects."
_ADVICE = {
    "different operations": "Every rank of a group must call the same operations in the same order: what decides "
    "about them (a loss, a clock, a flag, the number of batches) must be the same on all.",
    "different dtypes": "Give the tensors the same dtype on every rank.",
    "different shapes": "If these calls belong together, give the tensors the same shape on every rank, or pad them to "
    "the largest. Of several tensors all ranks must take the same one first.",
    "different sizes": "The messages of two ranks meet in the order of the calls: is this the one that the receive is "
    "for? If so, the receiving tensor must have as many elements as the one sent.",
    "different numbers of tensors": "Pass as many tensors on every rank.",
    "different lists of ranks": "Every rank of the world must call new_group for every group, in the same order and "
    "with the same list, also the ranks outside it: for i in (0, 2): new_group([i, i + 1]), and each keeps its own. Or "
    "let only the members call it, with use_local_synchronization=True.",
    "different numbers of groups before": "With use_local_synchronization=True torch names a group after its ranks and "
    "the number of groups that a rank is in: all members must be in equally many. Make this group first, or let every "
    "rank call new_group for every group, without use_local_synchronization.",
    "different roots": "src or dst must name the same rank on every rank.",
    "different roots and different shapes": "src or dst must be the same rank on every rank, and the shapes alike.",
    "different reduce operations": "Pass the same `op=` on every rank.",
}


class RankInputError(EOFError):
    """A rank asked for keyboard input, which only the notebook has."""

    def __init__(self, message: str = "") -> None:
        keyboard = "input() does not work on a rank: the ranks have no keyboard. Ask in an ordinary cell and push the "
        super().__init__(message or f"{keyboard}answer with `--push NAME`.")


class SpawnError(RuntimeError):
    """A rank has started processes that need a function or class which only a cell has."""


def of_cell_elsewhere(name: str, *, named: bool = True) -> SpawnError:
    """The error for what a cell defined as `name`, where another process needs it; or it has no such name now."""
    if not named:
        why = "it was defined again, and the name stands for the new one: make anew what was made with the old one"
        if "<" in name:
            nameless = "a lambda, or a function in a function, has no name by which another process finds it"
            why = f"{nameless}: use `def` at the left margin of a cell"
        return SpawnError(f"`{name}` cannot be sent to another process: {why}.")
    return SpawnError(
        f"`{name}` was defined in a cell: a process that was started by spawn or forkserver, or before the cell ran, "
        f"cannot find it. Start the processes after the cell and by fork, which is the default of a rank, or put "
        f"`{name}` into a file that they can import: `%%writefile mine.py`, `from mine import {name}`."
    )


def find_of_cell(name: str, is_class: bool) -> Any:
    """What a cell defined under `name`, in a process that a rank has started; if it has none, a stand-in that says so
    when it is used: an error while a task is read would end the process, and a Pool starts the next one for ever.
    """
    if (found := getattr(sys.modules["__main__"], name, None)) is not None:
        return found

    def stand_in(*_: Any, **__: Any) -> Any:
        raise of_cell_elsewhere(name)

    def attribute(_: Any, asked: str) -> Any:
        raise AttributeError(asked) if asked.startswith("__") else of_cell_elsewhere(name)

    special = dict.fromkeys(("__call__", "__getitem__", "__iter__", "__len__"), stand_in)
    return type(name, (), {**special, "__getattr__": attribute}) if is_class else stand_in


class GroupError(UserFacingError, RuntimeError):
    """On a rank: a process group cannot be set up as asked."""


class StartError(UserFacingError, RuntimeError):
    """Ranks could not be started. Nothing has run."""


class EngineError(UserFacingError, RuntimeError):
    """Something unforeseen happened on the notebook's side. The ranks were started anew: their names are gone."""


class WorldSizeError(UserFacingError, ValueError):
    """The machine cannot hold that many ranks."""


class AllocationError(UserFacingError, RuntimeError):
    """Slurm has given no nodes, or not enough of them, or could not start the ranks. Nothing has run."""


class PushError(UserFacingError, TypeError):
    """A name could not be sent to the ranks. No rank has run."""


class PullError(_WithRun, NameError):
    """A name could not be fetched from the ranks. The cell itself ran: `run` holds its result."""


class OptionError(UserFacingError, ValueError):
    """A magic's line has an option or a word that does not exist."""


class CellSyntaxError(UserFacingError, ValueError):
    """The cell is no Python. No rank has run."""

    shown_as = "SyntaxError"

    def __init__(self, error: SyntaxError) -> None:
        said = f"{error.msg}, line {error.lineno}"
        if error.text:
            said += f"\n    {error.text.strip()}"
            if error.offset:
                left_out = len(error.text) - len(error.text.lstrip())
                said += "\n    " + " " * max(error.offset - 1 - left_out, 0) + "^"
        super().__init__(f"{said}\nNo rank has run.")


def unknown_option(word: str, known: Sequence[str], magic: str) -> str:
    """The sentence for a misspelt option: the nearest one first, then all of them."""
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    guess = f" Did you mean {near[0]}?" if near else ""
    return f"{magic} has no option {word}.{guess} Its options are: {', '.join(known)}. `{magic}?` explains them."


def describe_frames(failure: RankFailure) -> str:
    """The learner's part of a traceback: where in the cell it happened, with the lines themselves."""
    parts = []
    for frame, times in ((frame, len([*same])) for frame, same in groupby(failure.frames)):
        where = f"{_where(frame.filename, frame.lineno)}, in {frame.name}" if frame.filename else frame.name
        source = frame.source or linecache.getline(frame.filename, frame.lineno).strip()
        where += f", {times} times" if times > 1 else ""
        parts.append(f"  {where}\n    {source}" if source and frame.filename else f"  {where}")
    return "\n".join(parts)


def _where(filename: str, lineno: int) -> str:
    if filename.startswith("<cell"):
        return f'File "{filename}", line {lineno}'
    if "ipykernel_" in filename:  # the kernel's name for a notebook cell holds its pid
        return f"An earlier cell of the notebook, line {lineno}"
    for mark in ("/site-packages/", "/lib/"):  # a path of this machine says nothing to a learner
        if mark in filename and "python3" in filename:
            filename = filename.rsplit(mark, 1)[1]
    return f'File "{filename}", line {lineno}'


def rank_error(run: Run) -> RankError:
    """The error for a cell in which at least one rank raised, the earliest failure first."""
    first = run.failed[0]
    assert first.error is not None
    same = [r for r in run.failed if str(r.error) == str(first.error)]
    alike = " alike" if len(same) > 1 else " first" if len(run.failed) > 1 else ""
    lines = [f"{name_ranks([r.rank for r in same])} of {run.world_size} failed{alike}: {first.error}"]
    victims = [r for r in run.failed if r.error and r.error.caused_by_abort and r not in same]
    lines += _waited(run, victims)
    others = [r for r in run.failed if r not in same and r not in victims]
    lines += [f"  rank {r.rank} failed too: {r.error}" for r in others]
    if frames := describe_frames(first.error):
        lines += ["", frames]
    lines += _causes(first.error)
    lines += [f"\n{note}" for note in first.error.notes]
    kind = first.error.type
    some = [r.rank for r in run.ran if r.error and r.error.type == kind]
    if kind.startswith(("FileExists", "FileNotFound")) and some != [0] and len(some) < len(run.ran):
        shared = "The ranks share their files: another rank may have made or removed this just before."
        lines.append(f"\n{shared} Let rank 0 do it (`if rank == 0:`), and the others wait in dist.barrier().")
    return RankError("\n".join(lines), run)


def _waited(run: Run, victims: Iterable[RankResult]) -> list[str]:
    """A line for each place in which ranks waited for one that failed."""
    calls = [(v.rank, v.error.call if v.error else None) for v in victims]
    stood = {s.rank: placed(s.line, s.file) for s in run.standstill}
    at = {rank: f" in {c.op}{placed(c.line, c.file, ' (')}{')' * bool(c.line)}" if c else "" for rank, c in calls}
    places = grouped((at[rank] or stood.get(rank, ""), rank) for rank, _ in calls)
    were = {there: "was" if len(ranks) == 1 else "were" for there, ranks in places.items()}
    freed = "freed (`error.run.ranks[r].error`)"
    return [f"  {name_ranks(ranks)} waited for it{there} and {were[there]} {freed}" for there, ranks in places.items()]


_MISSING = re.compile(
    r"NameError: name '(\w+)' is not|(?:PicklingError|AttributeError): .*attribute (?:lookup )?'?(\w+)'? on .*__main__"
)


def missing_names(run: Run) -> dict[str, list[int]]:
    """Names for want of which ranks failed, and those ranks."""
    names = ((_MISSING.match(f"{r.error.type}: {r.error.message}"), r.rank) for r in run.failed if r.error)
    return grouped((name[1] or name[2], rank) for name, rank in names if name)


def _causes(failure: RankFailure, indent: str = "") -> list[str]:
    """What stands behind an exception: a line each, with where it was raised."""
    lines = []
    for how, cause in failure.causes:
        lines.append(f"{indent}  {how}: {cause}{f' (line {cause.line})' if cause.line else ''}")
        lines += _causes(cause, indent + "  ")
    return lines


CAME = "They came there on different ways: "
PAIRED = ("send", "recv")
OF_WORLD = ("0", "new_group", "init_process_group")  # groups of all ranks
CLOSED = "a connection to another rank is closed"
LATE = "its timeout, for another rank"  # of a call that has waited so long


def mismatch_error(run: Run, parted: str = "") -> RankMismatch:
    """The error for calls that do not match, and where the ranks `parted`; who noticed first is chance, so not told."""
    first = next(r.mismatch for r in run.ran if r.mismatch)
    calls: dict[int, Call] = {}
    wrong = next(iter(first.calls.values()))
    for result in run.ran:
        failure = result.error
        if result.mismatch and result.mismatch.problem == first.problem:
            calls |= result.mismatch.calls
        elif failure is not None and failure.call is not None and failure.caused_by_abort:
            call = failure.call  # not all that were freed stood in the same call
            if wrong.op not in PAIRED and (call.group, call.nth) == (wrong.group, wrong.nth):
                calls[result.rank] = call
    # a rank whose part was over, such as a leaf of a broadcast, went on unharmed
    for event in run.events if wrong.op not in PAIRED else ():
        # a send and its receive know each other, and have numbers of their own
        if event.op not in PAIRED and (event.group, event.seq) == (wrong.group, wrong.nth):
            calls.setdefault(event.rank, Call(event.text, event.line, event.seq, event.group, file=event.file))
    in_order = sorted(calls.items())
    texts = grouped((call.text, rank) for rank, call in in_order)
    in_world = OF_WORLD if wrong.op not in PAIRED else ()  # these count by pair
    of = {rank: " of the world" * (call.group in in_world) for rank, call in in_order}
    rows = grouped((f"{c.text}{placed(c.line, c.file)} (call {c.nth}{of[rank]})", rank) for rank, c in in_order)
    parties = sorted(texts.items(), key=lambda item: (len(item[1]), item[1][0]))  # the minority first
    said = [f"{name_ranks(ranks)} call{'s' * (len(ranks) == 1)} {text}" for text, ranks in parties]
    if len(said) > 1 and first.problem in _ADVICE:
        head = f"{', '.join(said[:-1][:2])} where {said[-1]}: {first.problem}."
    else:  # alike in words, or lawfully not: the pieces differ
        head = f"the calls of {name_ranks(list(calls))} do not fit together: {first.problem}."
    width = max(len(name_ranks(ranks)) for ranks in rows.values())
    lines = [f"  {name_ranks(ranks):<{width}}  {row}" for row, ranks in rows.items()]
    advice = _ADVICE.get(first.problem, _SPLITS)
    # who sends and who receives a broadcast may call it in two lines, alike in each party
    ways = {frozenset((calls[r].file, calls[r].line) for r in ranks) for ranks in texts.values()}
    elsewhere = len(ways) > 1 or (len(said) == 1 and len(rows) > 1)
    sizes = {tuple(re.findall(r"\[.*?\]", text)) for text in texts}
    if first.problem == "different dtypes" and len(sizes) > 1:
        advice = "Of several tensors all ranks must take the same one first. If these are one, give it the same dtype."
    if parted.startswith(CAME):  # so these calls do not belong together
        advice = _ADVICE["different operations"]
    if elsewhere and wrong.op not in PAIRED and first.problem != "different numbers of groups before":
        ask = "has a rank made one call more, or fewer, before, or do the ranks take the same things in another order?"
        advice = f"The calls stand in different lines: {ask} {_ADVICE['different operations']}"
    if any("in another thread" in text for text in texts):
        advice += " Threads of a rank call in an order that is chance: give each a group of its own."
    stopped = f"The call that does not match was stopped before it sent anything. {advice}"
    return RankMismatch("\n".join(filter(None, [head, *lines, stopped, parted])), run)


# What CUDA's kernels print where an index is out of bounds and the like
_DEVICE_ASSERT = re.compile(r"block: \[\d+,\d+,\d+\], thread: \[\d+,\d+,\d+\] Assertion `(.*?)` failed")


def lost_error(run: Run, lost: Iterable[RankResult], *, replaced: bool) -> RankLost:
    """The error for a cell in which the process of a rank ended, and was `replaced` or ended the world."""
    lost = list(lost)
    ends: dict[tuple[str, str], list[int]] = {}
    for result in lost:
        assert result.error is not None
        message = result.error.message
        if asserted := _DEVICE_ASSERT.search(result.stderr):
            message = message.replace(" (a crash in C code)", f" after a device-side assert: {asserted[1]}")
        ends.setdefault((message, describe_frames(result.error)), []).append(result.rank)
    lines = []
    for (end, frames), ranks in ends.items():
        said = re.sub("^was ", "were ", end) if len(ranks) > 1 else end
        lines += [f"{name_ranks(ranks)} of {run.world_size} {said}", *([f"\n{frames}\n"] if frames else [])]
    if not replaced:
        how = "The next cell starts new ones, as far as the allocation still has the nodes: `!sinfo -N` shows them."
        lines.append(f"All ranks of this world were ended, and their names are gone. {how}")
        return RankLost("\n".join(lines), run)
    failed = [r for r in run.failed if r not in lost and r.error]
    lines += _waited(run, [r for r in failed if r.error and (r.error.caused_by_abort or r.error.message == CLOSED)])
    others = [r.rank for r in run.ran if r not in lost]
    gone = f"{name_ranks([r.rank for r in lost])}: names defined there are gone"
    how = "Run the cells that define them again, or `%ranks restart` for fresh ranks."
    lines.append(f"A new process has taken the place of {gone}. {how}")
    if others:
        kept = f"{name_ranks(others)} kept {'its' if len(others) == 1 else 'their'} names"
        lines.append(kept + ", but process groups made with new_group were closed.")
    return RankLost("\n".join(lines), run)
