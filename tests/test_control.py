"""The control thread of a rank: what it looks at stays the learner's."""

import gc
import sys
import threading
import time
import weakref
from types import SimpleNamespace

import pytest

from rankcell.engine import system
from rankcell.engine.control import Control


class Thing:
    """Something that a learner's function holds."""


def test_asking_where_a_rank_stands_keeps_nothing_alive():
    rank = SimpleNamespace(
        recorder=SimpleNamespace(cell="1", open={}, total=0, enqueues=frozenset(), status=lambda: ((), {})),
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


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel is asked")
def test_a_thread_that_waits_for_a_core_is_seen():
    """So that a rank which stands still only because others have the cores is not taken for one that waits."""
    end = threading.Event()

    def spin():
        while not end.is_set():
            sum(range(10_000))

    def seen(wanted):
        until = time.monotonic() + 30
        while system.wants_a_core() != wanted and time.monotonic() < until:
            time.sleep(0.01)
        return system.wants_a_core() == wanted

    thread = threading.Thread(target=spin)
    thread.start()
    try:
        assert seen(True)
    finally:
        end.set()
        thread.join()
    assert seen(False)
