"""In which order a device comes to what a rank has put into its queues."""

import pytest

from rankcell.engine.operation import Operation, queued


def operation(start, *, group="0", awaited=None, via="all_reduce", is_async=False):
    """A call at `start` that only enqueued; the rank waits for it since `awaited`."""
    o = Operation("all_reduce" if via == "all_reduce" else "send")
    o.start, o.issued, o.group, o.via, o.is_async, o.line = start, start + 0.1, group, via, is_async, 7
    o.wait_start = awaited
    o.passed = lambda: False
    return o


CASES = {
    "calls without async_op wait for each other, whatever their groups": (
        [operation(1), operation(2), operation(3, group="1")],
        [False, True, True],
    ),
    "those of two groups that nobody waits for run side by side": (
        [operation(1, is_async=True), operation(2, group="1", is_async=True)],
        [False, False],
    ),
    "those of one group do not": ([operation(1, is_async=True), operation(2, is_async=True)], [False, True]),
    "what was called before the wait does not wait": (
        [
            operation(1, is_async=True, awaited=5),
            operation(2, group="1", is_async=True),
            operation(6, group="2"),
        ],
        [False, False, True],
    ),
    "a batch is one launch": (
        [
            operation(1, via="batch_isend_irecv", is_async=True),
            operation(2, via="batch_isend_irecv", is_async=True),
            operation(3, via="isend", is_async=True),
        ],
        [False, False, True],
    ),
    "what C++ issues is waited for": (
        [operation(1, via="backward", is_async=True), operation(2, group="1", is_async=True)],
        [False, True],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_which_stand_behind_another(name):
    pending, expected = CASES[name]
    assert [behind for _, behind in queued(pending)] == expected


def test_a_rank_waits_for_what_its_device_has_not_done():
    done = operation(1)
    done.passed = lambda: True
    assert operation(1).waiting and not done.waiting and done.finished
    assert not operation(1, is_async=True).waiting and operation(1, is_async=True, awaited=2).waiting
