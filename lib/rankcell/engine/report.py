"""Inside a rank: what it tells the notebook of an exception and of a value, so that both can travel."""

import builtins
import contextlib
import difflib
import io
import linecache
import os
import re
import sys
import sysconfig
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from torch._subclasses.fake_tensor import FakeTensor

from ..errors import CLOSED, LATE, MismatchError, SpawnError
from ..results import Call, Frame, NotSent, RankFailure, name_some
from .channel import odd_part

MAX_VALUE_NBYTES = 16 << 20  # a larger value of the last expression stays on its rank; --pull has no limit
MAX_MESSAGE = 20_000  # characters of an exception's text
MAX_CAUSES, MAX_DEPTH = 8, 5  # exceptions behind an exception that are told, and how far behind
MAX_FRAMES = 40  # of a traceback; the recursion in between is counted
_ENGINE = str(Path(__file__).parent)
NOT_OURS = (f"{sysconfig.get_path('stdlib')}/", "/site-packages/", "/rankcell/")  # in paths of files

BDB_NOTE = (
    "A rank has no keyboard, so the debugger cannot ask. Print what you want to see, end the cell with it, or call the "
    "code in an ordinary cell."
)
_EXIT = "sys.exit() ended the cell on this rank. The rank itself lives on, with its names."
_ARGV = " If argparse called it: a rank has no command line, so write `parse_args(['--name', 'value'])`."
_ENVIRONMENT = (
    "The environment of a rank is what the notebook's was when the ranks began: set it in a rank cell, or in the "
    "notebook before `%ranks restart`."
)
_HIDDEN = "`{0}` is of type {1} here, which hides Python's `{0}`: `del {0}` in a rank cell, and take another name."
_SET = "A cell has set `{0}`: it is of type {1} now, no longer {2}. `del {0}` in a rank cell: the next has it again."
_GIVEN = {"torch": torch, "dist": torch.distributed, "device": torch.device}  # what rank cells find: the value, or type
_NO_DEVICE = re.compile(r"torch\.device|device string|device ordinal|with CUDA|No CUDA|no NVIDIA")
_ON_CPU = "This torch finds no GPU: write `.to(device)` for `.cuda()`, and no `set_device`. `device` is the rank's own."
_NOTES = {  # by a part of the exception: what to do
    "BdbQuit": BDB_NOTE,
    "is not part of group": "`src`, `dst` are ranks of the world, `group_src` and `group_dst` count within the group.",
    "context has already been set": "A rank is a process of multiprocessing, so its start method is set already: take "
    "`multiprocessing.get_context('fork')` for processes of your own.",
    "'__file__' is not defined": "A cell stands in no file: write `os.getcwd()` for the folder of the notebook.",
    "Cannot access accelerator device": _ON_CPU,
    "not compiled with CUDA enabled": _ON_CPU,
    "Found no NVIDIA driver": _ON_CPU,
    "has no attribute '_cuda_": _ON_CPU,
    "asyncio.run() cannot be called": "The cell has an `await`, so a loop runs already: write `await main()`.",
}


def failure(error: BaseException, *, at: float = 0.0, call: Call | None = None, depth: int = 0) -> RankFailure:
    """Why a rank did not finish: `error` as text, its frames and causes. Never raises, whatever the exception does."""
    unread = RankFailure("Exception", "(it could not be read: its own code raised)", at=at)
    return _safely(lambda: _failure(error, at=at, call=call, depth=depth), unread)


def _failure(error: BaseException, *, at: float, call: Call | None, depth: int) -> RankFailure:
    notes = [str(n) for n in _safely(lambda: list(getattr(error, "__notes__", ())), [])]
    message = _safely(lambda: str(error), "(its text could not be made: __str__ failed)")
    message = _GROUP_AT.sub(r"\1", message)
    if len(message) > MAX_MESSAGE:
        message = f"{message[:MAX_MESSAGE]}... ({len(message) - MAX_MESSAGE:,} more characters)"
    if isinstance(error, SystemExit):
        notes.append(_EXIT + _ARGV * (error.code == 2))
        message = "" if error.code is None else _safely(lambda: str(error.code), "")
    kind, frames = type(error).__name__, _frames(error)
    notes += [note for text, note in _NOTES.items() if text in f"{kind}: {message}"]
    notes += _safely(lambda: _of_names(error), []) + _safely(lambda: _given(error), [])
    if "_launcher(" in str(frames) and kind != "SpawnError":  # those of accelerate
        notes.append("This cell runs on several ranks already: call the function itself, without a launcher.")
    told = isinstance(error, SpawnError)  # what is behind it is a traceback of the other process
    causes = tuple(_causes(error, depth)) if depth < MAX_DEPTH and not told else ()
    found = RankFailure(kind, message, frames, at, causes=causes, notes=tuple(notes), call=call)
    return replace(found, mismatch=error.details) if isinstance(error, MismatchError) else found


GONE = CLOSED, LATE  # how the message of a call ends for which others never came
_CLOSED = re.compile(r"Connection (closed|reset) by peer|Socket closed|gloo/transport", re.IGNORECASE)
_GAVE_UP = re.compile(r"Timed out waiting (\d+)ms for \w+ operation to complete")
_STALE = re.compile(
    r"not initialized in the world group map|Could not resolve the process group|Invalid process group"
    r"|Group <.*> is not registered"
)
_GROUP_AT = re.compile(r"(<torch\.distributed[\w.]+ object) at 0x[0-9a-f]+")  # "is not part of group <...>"
_ADDRESS = re.compile(r" <[\w.]+ object at 0x[0-9a-f]+>")  # differs from rank to rank, and tells nobody anything


def without_addresses(found: RankFailure, *, renewed: bool) -> RankFailure:
    """What torch says of closed connections and groups in a learner's words; those of earlier cells if `renewed`."""
    # what torch handled meanwhile is the same once more, in the words of its backend
    causes = tuple((h, c) for h, c in found.causes if not (_CLOSED.search(c.message) or _STALE.search(c.message)))
    if found.type == "KeyboardInterrupt":  # it came when the connection was closed already
        return replace(found, causes=causes)
    if gave_up := _GAVE_UP.search(found.message):
        note = "A rank that computes is late, not lost: give the group a longer timeout=, or do that work elsewhere."
        message = f"{found.call.text if found.call else 'an operation'} waited {int(gave_up[1]) / 1000:g} s, {LATE}"
        return replace(found, message=message, notes=(*found.notes, note), causes=causes)
    closed = found.type in ("RuntimeError", "DistBackendError") and _CLOSED.search(found.message)
    if not closed and not _STALE.search(found.message):
        return found
    message = CLOSED if closed else _ADDRESS.sub("", found.message)
    note = (
        "The process groups of earlier cells were closed when a cell failed. What holds one (a group, a model in "
        "DDP or FSDP, a device mesh) must be made anew: run the cells that make them again."
        if renewed
        else "Another rank has left: it destroyed its process group, gave up an operation, or failed."
    )
    return replace(found, message=message, notes=(*found.notes, note), causes=causes)


def _of_names(error: BaseException) -> list[str]:
    """What to do where a name is not what it is in the notebook: of the environment, or one of Python's own."""
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    if isinstance(error, KeyError) and frame.f_code is type(os.environ).__getitem__.__code__:
        return [_ENVIRONMENT]
    if "Expected to have finished reduction" in str(error):
        return _without_gradient(error)
    here = frame.f_globals | frame.f_locals
    if isinstance(error, (AttributeError, NameError)):  # Python tells this in a traceback only
        if str(error.name).startswith("_"):
            return []
        known = dir(error.obj) if isinstance(error, AttributeError) else [*here, *dir(builtins)]
        return [f"Did you mean `{near}`?" for near in difflib.get_close_matches(str(error.name), known, 1, 0.75)]
    called = re.findall(r"\b([a-z]\w*)\(", linecache.getline(frame.f_code.co_filename, line))
    hidden = {name for name in called if hasattr(builtins, name) and not callable(here.get(name, int))}
    return [_HIDDEN.format(name, type(here[name]).__name__) for name in hidden if "not callable" in str(error)]


def _given(error: BaseException) -> list[str]:
    """What to do where a line of a cell failed for a name that every rank cell finds and that has another value now."""
    names = vars(sys.modules["__main__"])
    frame, line = [e for e in traceback.walk_tb(error.__traceback__) if e[0].f_globals is names][-1]
    used = re.findall(r"\w+", linecache.getline(frame.f_code.co_filename, line))
    for name, ours in _GIVEN.items():
        value = (names | frame.f_locals).get(name, ours)
        changed = name in used and value is names.get(name) and value is not ours and type(value) is not ours
        if changed and (getattr(error, "obj", error) is value or (name == "device" and _NO_DEVICE.search(str(error)))):
            return [_SET.format(name, type(value).__name__, repr(ours).split("'")[1])]
    return []


def _without_gradient(error: BaseException) -> list[str]:
    """Which parameters of a model in DDP got no gradient: torch says their numbers only."""
    told = re.search(r"Parameter indices which did not receive grad for rank \d+: ([\d ]+)", str(error))
    numbers = [int(n) for n in told[1].split()] if told else []
    for frame, _ in traceback.walk_tb(error.__traceback__):
        ddp = frame.f_locals.get("self")
        if numbers and isinstance(ddp, torch.nn.parallel.DistributedDataParallel):
            named = [*ddp.module.named_parameters()]
            if ddp._get_ddp_logging_data()["num_parameter_tensors"] < len(named):  # of those DDP knows nothing
                named = [(name, p) for name, p in named if p.requires_grad]
            why = "has the loss used them?"
            if not any(named[n][1].requires_grad for n in numbers):
                why = "they were frozen after DDP was made: freeze first, then wrap."
            return [f"No gradient came to {name_some((named[n][0] for n in numbers), 6)}: {why}"]
    return []


def _causes(error: BaseException, depth: int) -> list[tuple[str, RankFailure]]:
    found: list[tuple[str, BaseException]] = []
    if isinstance(error, BaseExceptionGroup):
        members = error.exceptions
        found += [(f"{i} of {len(members)}", e) for i, e in enumerate(members[:MAX_CAUSES], 1)]
    if error.__cause__ is not None:
        found.append(("caused by", error.__cause__))
    elif error.__context__ is not None and not error.__suppress_context__:
        found.append(("while handling", error.__context__))
    return [(how, failure(cause, depth=depth + 1)) for how, cause in found]


def _frames(error: BaseException) -> tuple[Frame, ...]:
    # a recursion has a thousand frames: reading the source of each takes longer than the cell
    entries = _safely(lambda: list(traceback.walk_tb(error.__traceback__)), [])
    entries = [e for e in entries if not e[0].f_code.co_filename.startswith(_ENGINE)]
    left_out = len(entries) - MAX_FRAMES
    if left_out > 0:
        entries = entries[: MAX_FRAMES // 2] + entries[-MAX_FRAMES // 2 :]
    stack = _safely(lambda: traceback.StackSummary.extract(iter(entries), lookup_lines=True), [])
    frames = [Frame(f.filename, f.lineno or 0, f.name, (f.line or "").strip()) for f in stack]
    # the learner's own frames; those of torch and Python below them say little and change with the version
    own = [f for f in frames if not any(part in f.filename for part in NOT_OURS)]
    if left_out > 0 and len(own) > 1:
        own.insert(len(own) // 2, Frame("", 0, f"... {left_out:,} more calls ..."))
    return tuple(own or frames[-1:])


def _safely(make: Any, otherwise: Any) -> Any:
    try:
        return make()
    except BaseException:  # noqa: BLE001 - a __str__ of the learner may raise anything, and this is a report
        return otherwise


class _TooLarge(Exception):
    pass


class _Limited(io.BytesIO):
    limit: int | None = None  # bytes

    def write(self, data: Any) -> int:
        if self.limit is not None and self.tell() + memoryview(data).nbytes > self.limit:
            raise _TooLarge
        return super().write(data)


class _ValuePickler(cloudpickle.Pickler):
    """Sends a tensor as plain numbers on the CPU: its value, not its graph and not its GPU."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided:
            value = value.detach().cpu()
            if value.untyped_storage().nbytes() != value.numel() * value.element_size():
                value = value.clone()  # a slice must not carry the whole tensor along
            return value.__reduce_ex__(4)
        if type(value).__module__ == "matplotlib.figure":  # it has been shown: the notebook is not to show it once more
            made = value.__reduce_ex__(4)
            return (*made[:2], {k: v for k, v in made[2].items() if k != "_restore_to_pylab"})
        return super().reducer_override(value)


def pack(value: Any, text: str, limit: int | None = MAX_VALUE_NBYTES, name: str = "it") -> bytes | NotSent:
    """`value` as a pickle of at most `limit` bytes, or why there is none; `text` and `name` stand for it then."""
    if isinstance(value, FakeTensor):
        return NotSent(text or repr(value), "a fake tensor has a shape and no numbers to send")
    try:
        return _pickled(value, limit)
    except _TooLarge:
        return NotSent(text, f"larger than {MAX_VALUE_NBYTES >> 20} MiB: fetch it with --pull")
    except Exception as error:  # noqa: BLE001 - reported
        why = failure(error)
        part = _safely(lambda: odd_part(name, value, _probe), name)
        because = f", because of {part}" if part != name else ""
        return NotSent(text or _safely(lambda: repr(value), ""), f"cannot be sent{because}: {why.type}: {why.message}")


def _pickled(value: Any, limit: int | None) -> bytes:
    buffer = _Limited()
    buffer.limit = limit
    _ValuePickler(buffer).dump(value)
    return buffer.getvalue()


def _probe(value: Any) -> None:
    with contextlib.suppress(_TooLarge):
        _pickled(value, MAX_VALUE_NBYTES)
