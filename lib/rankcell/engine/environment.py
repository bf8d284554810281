"""Inside a rank: what its process finds around it, and what of that is put back after each cell."""

import builtins
import contextlib
import functools
import os
import resource
import signal
import sys
import types
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, NoReturn

import IPython
import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.launcher.api as launcher
import torch.multiprocessing as mp

from .. import source
from ..errors import RankInputError, SpawnError, find_of_cell, of_cell_elsewhere
from . import report
from .messages import StartRank

_BALLAST = 4 << 20  # bytes given back when memory runs out, so that the report of it can be made


def enter(config: StartRank) -> None:
    """Give the process the environment, the folder and the import path of a rank, and what stands in for a terminal."""
    os.environ.clear()
    os.environ.update(config.environment)
    address = "127.0.0.1" if config.store.startswith("/") else config.store.rpartition(":")[0]
    for name in ("rank", "world_size", "local_rank", "local_world_size"):
        os.environ[name.upper()] = str(getattr(config, name))
    os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(config.port))
    if config.device == "cpu":
        # where no device is named torch takes a GPU that it sees: in fully_shard, in a mesh
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if os.path.isdir(config.folder):  # noqa: PTH112
        os.chdir(config.folder)
    sys.path[:] = list(config.path)
    sys.argv = [""]
    torch.set_num_threads(1)
    torch.default_generator.seed()  # forks draw the same, processes that a launcher starts do not
    np.random.seed()
    _print_bars()
    builtins.input = functools.partial(_no_keyboard, "")
    sys.breakpointhook = IPython.embed = functools.partial(_no_keyboard, report.BDB_NOTE)
    spawn = mp.spawn

    def spawn_or_explain(fn: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(fn, "__module__", None) == "__main__":
            raise _runs_already("mp.spawn", fn, "rank, ...")
        return spawn(fn, *args, **kwargs)

    def launch(self: Any, *_: Any) -> NoReturn:
        raise _runs_already("notebook_launcher", getattr(self._entrypoint, "launcher", self._entrypoint))

    mp.spawn, launcher.elastic_launch.__call__ = spawn_or_explain, launch  # type: ignore[method-assign]
    ForkingPickler.reducer_override = _name_of_a_cell  # type: ignore[method-assign]
    # a worker of a DataLoader is a fork of the rank: it has the names that the cells have defined
    mp.set_start_method("fork", force=True)


def _runs_already(what: str, function: Any, args: str = "...") -> SpawnError:
    name = getattr(function, "__qualname__", "main")
    own = "starts processes of its own, with ranks of their own. This cell runs on several ranks already"
    return SpawnError(f"{what} {own}: call `{name}({args})` directly, without {what}.")


def _name_of_a_cell(_: Any, value: Any) -> Any:
    """How a function or class of a cell is pickled for a process that the rank has started: by its name. SpawnError:
    the process is no fork, and has no such name; or nothing of a cell has this name now.
    """
    if not isinstance(value, (type, types.FunctionType)) or value.__module__ != "__main__":
        return NotImplemented
    name = value.__qualname__
    if sys.modules["__main__"].__dict__.get(name) is not value:
        if "<" in name or name in sys.modules["__main__"].__dict__:
            raise of_cell_elsewhere(name, named=False)
        return NotImplemented
    if get_spawning_popen() is not None:  # a fork never pickles what it is given
        raise of_cell_elsewhere(name)
    return find_of_cell, (name, isinstance(value, type))


def _print_bars() -> None:
    """Let `tqdm.notebook` be the bars that are printed: a widget of a rank has nobody who draws it."""
    with contextlib.suppress(ImportError):
        import tqdm

        bars: Any = types.ModuleType("tqdm.notebook")
        bars.tqdm = bars.tqdm_notebook = tqdm.tqdm
        bars.trange = bars.tnrange = tqdm.trange
        sys.modules["tqdm.notebook"] = tqdm.notebook = bars
        made: Any = tqdm.tqdm.__init__

        def begin(bar: Any, *args: Any, position: Any = None, **how: Any) -> None:
            made(bar, *args, **how)  # the position is often the rank, but each rank's bars are shown apart

        tqdm.tqdm.__init__ = begin


def _no_keyboard(said: str, *_: Any, **__: Any) -> NoReturn:
    raise RankInputError(said)


def device_of(config: StartRank) -> torch.device:
    """The rank's device, which it has taken."""
    if config.device != "cuda":
        return torch.device("cpu")
    torch.cuda.set_device(config.local_rank % torch.cuda.device_count())
    if config.memory_fraction is not None:
        torch.cuda.set_per_process_memory_fraction(config.memory_fraction)
    return torch.device("cuda", torch.cuda.current_device())


class Names:
    """The names that the cells of a rank define, `values`, and those that they find, which stay as they are."""

    def __init__(self, config: StartRank, shell: Any) -> None:
        from IPython.display import display

        sys.modules["__main__"] = module = types.ModuleType("__main__")
        self.values: dict[str, Any] = module.__dict__
        self._fixed: dict[str, Any] = {"rank": config.rank, "world_size": config.world_size}
        lent = {"device": device_of(config), "torch": torch, "dist": dist, "__builtins__": builtins}
        self._lent = self._fixed | lent | {"display": display, "get_ipython": shell.get_ipython, "_dh": ["."]}
        self.values.update(self._lent)
        shell.user_module, shell.user_ns = module, self.values
        self._known = {*sys.modules}
        # by a function of the notebook: its own value of a name, and the rank's when it came
        self._brought: dict[str, dict[str, tuple[Any, Any]]] = {}
        self._imported: dict[str, tuple[Any, bytes]] = {}  # modules of the learner's: how they were loaded, their text

    def lend(self, value: Any) -> None:
        """Let a function from the notebook use `rank`, `device`, `dist` and the like, as a cell does."""
        scope = getattr(value, "__globals__", None)
        module = sys.modules.get(getattr(value, "__module__", None) or "")
        if isinstance(scope, dict) and scope is not getattr(module, "__dict__", None):
            for name in source.LENT:
                scope.setdefault(name, self.values[name])
            used = {*value.__code__.co_names} if isinstance(value, types.FunctionType) else set()
            known = {name: (scope[name], self.values.get(name)) for name in used & scope.keys() - {*source.LENT}}
            self._brought[getattr(value, "__name__", "")] = known

    def restore(self) -> list[str]:
        """Put back what a cell has deleted or changed; what the learner should know of that."""
        for name, ours in self._lent.items():
            self.values.setdefault(name, ours)  # `del rank`, or `%reset`
        changed = []
        for name, ours in self._fixed.items():
            if type(self.values[name]) is not int or self.values[name] != ours:
                self.values[name] = ours
                kept = "the next cell finds it as it was. Take another name for yours."
                changed.append(f"the cell gave `{name}` another value; {kept}")
        for function, names in self._brought.items():
            for name, known in names.items():
                now = self.values.get(name, known[0])
                if not any(now is v or (isinstance(now, (int, float, str)) and now == v) for v in known):
                    theirs = f"`{function}` reads the `{name}` of the notebook, which came with it"
                    changed.append(f"{theirs}, and not the one that this cell sets: give it as an argument.")
        self._brought.clear()
        return [*changed, *self._edited()]

    def _edited(self) -> list[str]:
        """What to do about modules whose file has changed since they were loaded; told once for each change."""
        found = []
        for name in sys.modules.keys() - self._known if len(sys.modules) > len(self._known) else ():
            about = vars(module) if isinstance(module := sys.modules.get(name), types.ModuleType) else {}
            path = str(about.get("__file__"))
            if any(part in path for part in report.NOT_OURS) or not (file := Path(path)).is_file():
                self._known.add(name)  # none of the learner's
                continue
            try:
                now = about.get("__spec__"), file.read_bytes()
            except OSError:  # somebody takes it away, or it may not be read
                continue
            before, self._imported[name] = self._imported.get(name, now), now
            if now[0] is before[0] and now[1] != before[1]:
                how = f"`importlib.reload({name})` in a rank cell, or `%ranks restart`."
                found.append(f"{file.name} has changed since this rank loaded it: {how}")
        return found

    def pull(self, name: str) -> bytes | str:
        """The pickled value of `name`, or a sentence that says why there is none."""
        if name not in self.values:
            return "no such name"
        packed = report.pack(self.values[name], "", None, name)
        return packed if isinstance(packed, bytes) else packed.reason


class Process:
    """Signals, alarms and limits of a rank's process."""

    def __init__(self) -> None:
        self._ballast: bytearray | None = bytearray(_BALLAST)
        # of address space and data, by kind: soft and hard
        self._limits = {kind: resource.getrlimit(kind) for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA)}
        self._on_end: Any = signal.SIG_DFL  # what the learner's cells do at SIGTERM; between cells it ends the rank

    def resume(self) -> None:
        """A cell begins: the learner's own handler of SIGTERM is there again."""
        signal.signal(signal.SIGTERM, self._on_end)

    def restore(self, on_interrupt: Any) -> None:
        """Signals (an interrupt calls `on_interrupt`), alarms and limits of memory as they were before the cell."""
        signal.signal(signal.SIGINT, on_interrupt)
        self._on_end = signal.signal(signal.SIGTERM, signal.SIG_DFL) or signal.SIG_DFL  # None: none of Python's
        for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):
            signal.setitimer(timer, 0)  # an alarm belongs to the cell that has set it
        self._restore_limits()
        self._ballast = self._ballast or bytearray(_BALLAST)

    def make_room(self) -> None:
        """Memory has run out: give some back, so that this can be reported."""
        self._ballast = None
        self._restore_limits()

    def _restore_limits(self) -> None:
        for kind, (soft, _) in self._limits.items():
            _, hard = resource.getrlimit(kind)  # a soft limit goes back as far as this one allows
            infinite = soft == resource.RLIM_INFINITY
            wanted = soft if hard == resource.RLIM_INFINITY else hard if infinite else min(soft, hard)
            with contextlib.suppress(ValueError, OSError):
                resource.setrlimit(kind, (wanted, hard))
