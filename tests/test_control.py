"""The control thread of a rank: what it looks at stays the learner's."""

import gc
import threading
import weakref
from types import SimpleNamespace

from rankcell.engine.control import Control


class Thing:
    """Something that a learner's function holds."""


def test_asking_where_a_rank_stands_keeps_nothing_alive():
    rank = SimpleNamespace(
        recorder=SimpleNamespace(cell="1", open={}, counts={}, total=0),
        stdio=SimpleNamespace(flush_from_another_thread=lambda: None),
        phase="running",
        main_thread=threading.get_ident(),
        birth=SimpleNamespace(rank=2),
    )
    control = Control(rank, channel=None)
    told = []

    def hold():
        thing = Thing()
        asked = threading.Thread(target=lambda: told.append(control.status()))
        asked.start()
        asked.join()
        return weakref.ref(thing)

    gc.disable()  # what stands in a circle of references lives until Python looks for circles
    try:
        assert hold()() is None
    finally:
        gc.enable()
    assert told[0].rank == 2 and told[0].phase == "running"
