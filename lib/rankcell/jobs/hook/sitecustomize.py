"""In every Python process of a job under `rankcell run`: waits for torch.distributed, to say that there is a rank.

Python imports this by itself, because the folder stands first on PYTHONPATH; a sitecustomize that stands behind it is
run, too. Nothing of rankcell is imported before it is needed, so that a program without torch costs nothing.
"""

import functools
import importlib.machinery
import importlib.util
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - importing pathlib would cost every process


def _inside():
    """rankcell's part in the process of a rank, from the rankcell that started the job; None if it cannot be had."""
    sys.path.append(os.environ["RANKCELL_LIB"])
    try:
        from rankcell.jobs import inside
    except ImportError as error:
        print(f"rankcell run: this process is not recorded: {error}", file=sys.stderr)
        return None
    finally:
        sys.path.remove(os.environ["RANKCELL_LIB"])
    return inside


class _ReplacesOnImport:
    """A finder that finds nothing of its own: torch.distributed is loaded as ever, and then we hear of a rank."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch.distributed.distributed_c10d":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module):
                load(module)
                _replace_init(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _replace_init(module):
    """Have the program's `init_process_group` come to us first; a process that was started as a rank says so now."""
    original = module.init_process_group

    @functools.wraps(original)
    def init_process_group(*args, **kwargs):
        inside = _inside()
        return inside.init_process_group(original, args, kwargs) if inside else original(*args, **kwargs)

    module.init_process_group = init_process_group
    # no process that has started this one is the rank that its environment names
    is_rank = "RANK" in os.environ and os.environ.get("RANKCELL_CLAIMED") != os.environ["RANK"]
    if is_rank and os.environ.get("WORLD_SIZE", "1") != "1" and (inside := _inside()) is not None:
        inside.arrive(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))


def _run_the_next():
    """The sitecustomize that would have been run without us."""
    sys.path[:] = [p for p in sys.path if os.path.abspath(p or ".") != _HERE]  # noqa: PTH100
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if "RANKCELL_JOB" in os.environ:
    sys.meta_path.insert(0, _ReplacesOnImport())
_run_the_next()
