"""Inside a rank: IPython's shell without a user in front of it, for `display`, magics and rich values."""

import warnings
from collections.abc import Callable
from typing import Any

from IPython.core.displaypub import DisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

WIDGET = "application/vnd.jupyter.widget-view+json"
# data, display id, whether it replaces the earlier one of this id
Show = Callable[[dict[str, Any], str | None, bool], None]


class RankShell(InteractiveShell):
    """The shell that `get_ipython()` returns on a rank."""

    recorder: Any = None  # of the rank
    system = InteractiveShell.system_raw  # stdout is a pipe that is read as it is, no terminal

    def init_sys_modules(self) -> None:
        """Leave `__main__` alone: the rank sets its own."""

    def init_io(self) -> None:
        """Leave stdout and stderr alone: they are pipes to the notebook."""

    def enable_gui(self, gui: Any = None) -> None:
        """A rank has no window."""


class Publisher(DisplayPublisher):
    """Sends what `display(...)` is given to the notebook."""

    show: Show | None = None

    def publish(self, data: Any, metadata: Any = None, *_: Any, transient: Any = None, **how: Any) -> None:
        """Called by IPython with the display as MIME types; of a widget nobody would hear: its text is shown."""
        if Publisher.show is not None:
            data = {kind: value for kind, value in data.items() if kind != WIDGET}
            Publisher.show(data, (transient or {}).get("display_id"), how.get("update", False))

    def clear_output(self, wait: bool = False) -> None:
        """Nothing to clear: the notebook shows a rank's output anew each time."""


def make() -> RankShell:
    """The shell; made once, before ranks are forked, so that they share its memory."""
    off = {"enabled": False}  # no database, no thread
    config = Config(HistoryManager=off, HistoryAccessor=off, InteractiveShell={"colors": "nocolor"})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return RankShell.instance(config=config, display_pub_class=Publisher)
