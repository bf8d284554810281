"""What ranks follow of the notebook's process: folder, torch's dtype and precision, printing, levels of logging."""

import contextlib
import logging
import sys
from collections.abc import Mapping
from typing import Any

from . import system

_PRINT = ("torch._tensor_str", "numpy")  # modules that tell how they print, and are told


def read() -> dict[tuple[str, str], Any]:
    """The settings of this process; none of a library that it has not imported."""
    found: dict[tuple[str, str], Any] = {("os", "chdir"): system.current_folder()}
    for log in (*logging.root.manager.loggerDict.copy().values(), logging.root):
        if isinstance(log, logging.Logger) and (log.level or log is logging.root):
            found["logging", log.name] = log.level
    if torch := sys.modules.get("torch"):
        found["torch", "set_default_dtype"] = torch.get_default_dtype()
        with contextlib.suppress(RuntimeError):  # torch tells none where a backend's own precision was set
            found["torch", "set_float32_matmul_precision"] = torch.get_float32_matmul_precision()
    for of in _PRINT:
        printing = sys.modules[of].get_printoptions() if of in sys.modules else {}
        # without numpy's functions, which need not travel
        found |= {(of, name): value for name, value in printing.items() if name not in ("formatter", "override_repr")}
    return found


def follow(now: Mapping[tuple[str, str], Any], before: Mapping[tuple[str, str], Any]) -> None:
    """Set here what is another `now` than it was `before`, in the notebook: what the rank has set itself stays."""
    changed = {key: value for key, value in now.items() if before.get(key) != value}
    for (of, name), value in changed.items():
        if of == "logging":
            logging.getLogger(name).setLevel(value)
            if name == "root" and logging.lastResort:  # a handler would keep `basicConfig` from its work
                logging.lastResort.setLevel(logging.NOTSET)
        elif of in _PRINT:
            sys.modules[of].set_printoptions(**(sys.modules[of].get_printoptions() | {name: value}))
        else:
            with contextlib.suppress(OSError):  # a folder that the rank's machine does not have
                getattr(sys.modules[of], name)(value)
