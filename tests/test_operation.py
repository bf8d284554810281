"""In which order a device comes to what a rank has put into its queues, and whose line a call belongs to."""

import ctypes
import sys

import pytest

from rankcell.engine import match
from rankcell.engine.operation import HELD_UP, Operation, caller, clock, queued


def operation(start, *, group="0", awaited=None, via="all_reduce", is_async=False, enqueued=True):
    """A call at `start` that only enqueued; the rank waits for it since `awaited`."""
    o = Operation("all_reduce" if via == "all_reduce" else "send")
    o.start, o.issued, o.group, o.via, o.is_async, o.line = start, start + 0.1, group, via, is_async, 7
    o.wait_start, o.enqueued = awaited, enqueued
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
    "what the host does beside the device stands behind nothing": (
        [operation(1), operation(2, enqueued=False), operation(3)],
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


def test_a_call_from_a_thread_of_c_belongs_to_the_line_where_the_main_thread_stands():
    """On a GPU, DDP's reducer calls from the threads of autograd, which have no frame of Python's below them."""
    found, libc = [], ctypes.CDLL(None)
    run = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(lambda _: found.append(caller(1)))
    thread = ctypes.c_ulong()
    libc.pthread_create(ctypes.byref(thread), None, run, None)
    libc.pthread_join(thread, None)
    here = sys._getframe().f_lineno - 1
    # the thread may begin before the call that starts it has returned
    assert found in [[(line, "", __file__)] for line in (here - 1, here)]


def test_a_tensor_on_the_cpu_and_one_on_a_gpu_do_not_match():
    on_gpu = match.Signature("all_reduce(float32[4])", "all_reduce", (("float32", 4),))
    on_cpu = match.Signature(
        "all_reduce(float32[4]) on the CPU", "all_reduce", (("float32", 4),), device="cpu"
    )
    said, mine, theirs = match.difference(on_gpu.packed(), on_cpu.packed(), (0, 1), 0, 1)
    assert said == "a tensor on the CPU and one on a GPU"
    assert (mine, theirs) == ("all_reduce(float32[4])", "all_reduce(float32[4]) on the CPU")
    assert match.difference(on_cpu.packed(), on_cpu.packed(), (0, 1), 0, 1)[0] == ""


def test_a_call_that_only_begins_something_is_no_wait():
    """Other programs may have the core in the middle of `irecv`: that its message is missing proves nothing."""
    posted = Operation("recv")
    assert not posted.waiting  # not even begun
    posted.start = clock()
    assert not posted.waiting
    posted.start = clock() - HELD_UP - 0.1  # no call takes so long that does not wait
    assert posted.waiting
    posted.issued = clock()
    assert not posted.waiting
    posted.wait_start = clock()
    assert posted.waiting
    group = Operation("new_group")
    group.start, group.blocks = clock(), True
    assert group.waiting


@pytest.mark.parametrize(("done", "end"), [(None, 5.0), (3.0, 5.0), (6.0, 6.0)])
def test_an_operation_that_is_waited_for_is_over_with_the_wait_or_later(done, end):
    """However early the device was done: the program went on when its wait was over."""
    o = operation(1.0, is_async=True, awaited=4.0)
    o.wait_end, o.done = 5.0, done
    assert o.end == end
