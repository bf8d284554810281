"""The verdict for jobs that no notebook started, from hand-written records.

`test_run.py` has the jobs that are really run.
"""

import os
import pickle
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest

from rankcell import command, errors
from rankcell.engine import channel, report, stacks
from rankcell.engine.messages import Answer, Question, Wait
from rankcell.jobs import inside, recording, records, run, verdict, watch
from rankcell.jobs.records import RankArrived, RankRecord
from rankcell.results import Call, Event, Frame, Mismatch, RankFailure

WORLD = (0, 1, 2)
TRAIN = "/home/me/train.py"


def waiting(rank, *, op="all_reduce", seq=4, line=12, ranks=WORLD, group="0", **more):
    """`rank` stands in its call `seq` of a group."""
    wait = Wait(op, f"{op}(float32[8])", group, ranks, (group, ranks), seq, seq, line=line, file=TRAIN)
    return RankRecord(rank, len(WORLD), waits=(wait,), counts={(group, ranks): seq}, calls=seq, **more)


def event(rank, op="all_reduce", *, seq=1, shape=(8,), dtype="float32", line=12, start=0.0, **more):
    return Event(
        rank, op, start, start + 1, "comm", "0", WORLD, seq, shape, dtype, line=line, file=TRAIN, **more
    )


# --- verdicts


def test_who_finished_is_missed():
    gone = RankRecord(1, 3, "finished", counts={("0", WORLD): 3}, calls=3)
    found = verdict.judge([waiting(0), gone, waiting(2)])
    assert found.kind == "hang" and found.culprits == (1,) and found.places == ((TRAIN, 12),)
    assert found.headline == "rank 1 finished the script without the all_reduce that ranks 0, 2 wait in."
    assert found.rows[0] == "rank 1      finished the script after 3 calls"
    assert found.rows[1].endswith("(call 4 of the world, line 12 of train.py)")


def test_of_a_job_that_ended_well_it_says_what_each_rank_did():
    done = [RankRecord(rank, 2, "finished", counts={("0", (0, 1)): 3}, calls=3) for rank in range(2)]
    found = verdict.finished(done)
    assert found.headline == "all 2 ranks have finished."
    assert found.rows == ("ranks 0, 1  finished the script after 3 calls",)
    assert verdict.finished([done[0], waiting(1)]).headline.startswith("1 of 2 ranks have finished")


def test_a_report_holds_the_last_operations():
    """Where it went wrong, and not how it began."""
    operations = [
        SimpleNamespace(start=0.0, seq=n, event=lambda rank, _, n=n: event(rank, seq=n))
        for n in range(recording.LAST + 5)
    ]
    ranks = SimpleNamespace(recorder=SimpleNamespace(operations=operations), rank=0, _epoch=0.0)
    assert [e.seq for e in recording.Recording.events(ranks)] == list(range(5, recording.LAST + 5))


def test_a_rank_that_is_asked_all_the_time_still_says_what_it_does():
    """Else it is taken to compute, and ranks that stand still are never reported."""
    runner, theirs = channel.pair()
    rank = SimpleNamespace(
        _channel=channel.Channel(theirs), _answer=lambda _: 0, record=lambda: RankRecord(7),
        _released=threading.Event(), _near_known=threading.Event(),
    )  # fmt: skip
    thread = threading.Thread(target=inside.Inside._serve, args=(rank,))
    thread.start()
    said = 0
    for number in range(300_000):
        runner.send(Question(number, "report"))
        while not isinstance(runner.receive(), Answer):
            said += 1
        if said == 2:
            break
    runner.close()
    thread.join()
    theirs.close()
    assert said == 2


def test_a_rank_says_which_exception_it_handles():
    """Asked by another thread while it waits, and when it fails."""

    class Unreadable(Exception):
        def __str__(self):
            raise ValueError

    def asked():
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(inside.Inside.report, rank).result().handles

    calls = SimpleNamespace(events=tuple, without_gradient=tuple, recorder=None)
    rank = SimpleNamespace(
        record=lambda: RankRecord(0), recording=calls, phase="running", _stack=tuple,
        _main=threading.main_thread().ident,
    )  # fmt: skip
    assert asked() == ""
    for error, said in ((ValueError("label 7"), "ValueError: label 7"), (Unreadable(), "Unreadable: ")):
        try:
            try:
                raise error
            finally:
                assert asked().startswith(said)
                raise errors.MismatchError(Mismatch("different operations", {}))
        except errors.MismatchError as failed:
            assert inside.Inside._failed(rank, RankRecord(0), failed).handles.startswith(said)


def test_a_stack_is_no_newer_than_the_wait_beside_it():
    """A wait that fails while it is looked at leaves no stack of what came after it."""
    stack = [Frame(TRAIN, 7, "<module>", "dist.all_reduce(x)")]

    def record():
        stack.clear()
        return waiting(0)

    rank = SimpleNamespace(record=record, recording=None, _stack=lambda: tuple(stack))
    assert [frame.lineno for frame in inside.Inside.report(rank).stack] == [7]


def test_what_polls_stands_still_and_what_waits_for_a_core_does_not():
    """Each gloo group of a process polls: it runs for a moment, now and then at several looks in a row."""
    known = watch.WatchedRank(None, None, RankRecord(0), moved=0.0)
    for _ in range(watch.CHANCE):
        known.take(RankRecord(0, runs=True))
    assert known.moved == 0.0
    known.take(RankRecord(0, runs=True, moved=1 << 30))
    assert known.moved > 0.0


def test_what_a_rank_reads_to_answer_is_no_progress():
    job, known = SimpleNamespace(_news=threading.Condition()), watch.WatchedRank(None, None, RankRecord(0))
    known.used, known.moved = (time.monotonic() - 1.5, 0.0, 0), 0.0
    with job._news:
        watch.WatchedJob._take(job, known, Answer(1, RankRecord(0, moved=1 << 30)))
    known.take(RankRecord(0, moved=1 << 30))
    assert known.moved == 0.0


def test_who_computes_is_told_once_with_who_waits(capsys):
    runner = run.Runner(["torchrun"], limit=20.0, report="")
    for _ in range(2):
        runner._note_slow([1], [waiting(0), RankRecord(1, 3, line=5, file=TRAIN), waiting(2)])
    runner._job.close()
    head, *rows = capsys.readouterr().err.splitlines()
    assert head.endswith("Rank 1 may be slow, or in an endless loop: the job goes on.")
    assert rows[0] == "  rank 1      computes at line 5 of train.py" and len(rows) == 2
    assert "ranks 0, 2  wait in all_reduce(float32[8]) (call 4 of the world, line 12 of train.py)" in rows[1]


def test_a_rank_that_polls_where_others_stand_still_is_not_called_slow(capsys):
    runner = run.Runner(["torchrun"], limit=20.0, report="")
    runner._job.close()
    for rank in (0, 1):  # both wait for a file, and rank 1 has just looked for it
        arrival = RankArrived(rank, 2, 1, "here", "")
        known = watch.WatchedRank(arrival, None, RankRecord(rank, 2, line=35, file=TRAIN))
        known.called, known.moved = known.called - 60, known.moved - 60 * (rank == 0)
        runner._job.ranks[rank] = known
    now = runner._job.ranks[1].moved
    assert runner._stalled([], now) is None and capsys.readouterr().err == ""
    runner._job.ranks[1].record = RankRecord(1, 2, line=50, file=TRAIN)
    assert runner._stalled([], now) is None and "Rank 1 may be slow" in capsys.readouterr().err


@pytest.mark.parametrize(("line", "asks"), [(5, False), (9, True)])
def test_calls_in_two_lines_are_asked_for_one_left_out(line, asks):
    calls = {
        0: Call("all_reduce(float32[8])", 5, file=TRAIN),
        1: Call("all_reduce(int64[8])", line, file=TRAIN),
    }
    said = str(errors.MismatchError(Mismatch("different dtypes", calls)))
    assert ("has a rank left out a call before" in said) == asks
    assert said.lower().endswith("give the tensors the same dtype on every rank.")


def test_nobody_is_blamed_while_somebody_may_still_come():
    computing = RankRecord(1, 3, counts={("0", WORLD): 3}, line=5, file=TRAIN)
    assert verdict.judge([waiting(0), computing, waiting(2)]) is None


def test_a_closed_connection_is_a_consequence():
    """The rank that finished has closed its connections: who waits for it raises, and is not to blame."""
    gone = RankRecord(1, 3, "finished", counts={("0", WORLD): 3}, calls=3, at=1.0)
    lost = RankFailure("RuntimeError", "[.../pair.cc:553] Connection closed by peer [127.0.0.1]:4545")
    victim = replace(waiting(0), phase="error", waits=(), failure=lost, failed_in=waiting(0).waits[0], at=2.0)
    victim = replace(victim, counts={("0", WORLD): 3})
    found = verdict.judge([victim, gone, waiting(2)])
    assert found.kind == "hang" and found.culprits == (1,)
    own = replace(victim, failure=RankFailure("RuntimeError", "shape '[3]' is invalid"))
    assert verdict.judge([own, gone, waiting(2)]).culprits == (0,)


def test_a_rank_that_ended_with_the_store_is_named():
    gone = RankFailure("DistNetworkError", "Broken pipe")
    victims = [RankRecord(r, 3, "error", failure=gone) for r in (1, 2)]
    found = verdict.judge([RankRecord(0, 3, "finished"), *victims])
    assert found.culprits == (0,) and "meet in a barrier at the end" in found.advice
    assert found.headline.startswith(
        "rank 0 finished, and with it went the store that it served: ranks 1, 2 of 3"
    )
    assert verdict.judge([RankRecord(0, 3), *victims]).culprits == (1, 2)


def test_who_ended_before_its_message_had_come_is_named():
    """It has sent, and nobody waited for that Work: its end closed the connection."""
    key = ("0", "p2p", 1, 0, 0)
    wait = Wait(
        "recv", "recv(float32[8] from rank 1)", "0", WORLD, (*key, "recv"), 1, 1, 1, line=24, file=TRAIN
    )
    closed = RankFailure("RuntimeError", report.CLOSED)
    victim = RankRecord(0, 3, "error", counts={(*key, "recv"): 1}, failure=closed, failed_in=wait)
    sent = (event(1, "send", peer=0, line=28),)
    done = [RankRecord(r, 3, "finished", counts={(*key, "send"): 1}, events=sent[r - 1 :]) for r in (1, 2)]
    found = verdict.judge([victim, *done])
    assert (found.kind, found.culprits, found.places) == ("hang", (1,), ((TRAIN, 28),))
    assert found.headline == (
        "rank 1 finished before recv(float32[8] from rank 1) (sent in line 28 of train.py) of rank 0 was through."
    )


def test_a_connection_that_closed_while_the_program_stood_in_c():
    """DDP waits in C++, and nobody has told the recorder that its call failed."""
    ddp = waiting(0).waits[0]
    recorder = SimpleNamespace(
        failed_call=None, failed_wait=None, operations=[SimpleNamespace(wait=lambda: ddp)]
    )
    rank = SimpleNamespace(recording=SimpleNamespace(recorder=recorder))
    counted = replace(waiting(0), waits=(), phase="error")
    closed = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:57221.")
    victim = inside.Inside._failed(rank, counted, closed)
    gone = RankRecord(1, 3, "finished", counts={("0", WORLD): 3}, calls=3)
    found = verdict.judge([victim, gone, waiting(2)])
    assert found.culprits == (1,) and found.rows[1].startswith(
        "ranks 0, 2  wait in all_reduce(float32[8]) (call 4"
    )
    assert found.headline == "rank 1 finished the script without the all_reduce that ranks 0, 2 wait in."
    assert inside.Inside._failed(rank, counted, RuntimeError("shape '[3]' is invalid")).failed_in is None


def test_who_computes_while_others_wait_until_their_timeout():
    computing = RankRecord(1, 3, counts={("0", WORLD): 3}, line=5, file=TRAIN)
    gave_up = RankFailure("RuntimeError", f"all_reduce(float32[8]) waited 5 s, {errors.LATE}")
    victim = replace(waiting(0), phase="error", waits=(), failure=gave_up, failed_in=waiting(0).waits[0])
    found = verdict.judge([victim, computing, waiting(2)])
    assert found.culprits == (1,) and found.places == ((TRAIN, 5),)
    said = (
        "rank 0 of 3 failed: RuntimeError: all_reduce(float32[8]) waited 5 s, its timeout, for rank 1, which"
    )
    assert found.headline == f"{said} computes at line 5 of train.py"
    came = replace(waiting(1), waits=())  # it has come: it is not known who was late
    assert verdict.judge([victim, came, waiting(2)]).headline.endswith(errors.LATE)


def test_the_first_failure_is_to_blame():
    frames = (Frame(TRAIN, 30, "<module>", "main()"), Frame(TRAIN, 7, "main", "raise ValueError('no')"))
    raised = RankRecord(
        2, 3, "error", "ValueError: no", failure=RankFailure("ValueError", "no", frames), at=1.0
    )
    ended = RankRecord(0, 3, "lost", "was killed by SIGTERM (signal 15)", at=2.0)
    found = verdict.judge([ended, waiting(1), raised])
    assert found.kind == "error" and found.culprits == (2,) and found.places[0] == (TRAIN, 7)
    assert found.headline == "rank 2 of 3 failed: ValueError: no"
    assert "raise ValueError('no')" in found.detail
    killed = replace(ended, why="was killed by SIGKILL (signal 9)", at=0.5, line=9, file=TRAIN)
    found = verdict.judge([killed, waiting(1), raised])
    assert found.kind == "lost" and found.culprits == (0,) and found.places == ((TRAIN, 9),)
    assert found.headline == "rank 0 of 3 was killed by SIGKILL (signal 9), and rank 1 waits in all_reduce."


def test_a_mismatch_names_the_minority_and_everybodys_line():
    calls = {0: Call("all_reduce(float32[8])", 14, 2, "0", "all_reduce", TRAIN),
             1: Call("all_reduce(float32[7])", 12, 2, "0", "all_reduce", TRAIN)}  # fmt: skip
    failure = RankFailure("MismatchError", "...", mismatch=Mismatch("different shapes", calls))
    odd = RankRecord(1, 3, "error", failure=failure, events=(event(1, seq=2, shape=(7,), line=12),), at=1.0)
    rest = [replace(waiting(r), events=(event(r, seq=2, line=14),)) for r in (0, 2)]
    found = verdict.judge([rest[0], odd, rest[1]])
    assert found.kind == "mismatch" and found.culprits == (1,) and found.places == ((TRAIN, 12),)
    assert found.headline.startswith(
        "rank 1 calls all_reduce(float32[7]) where ranks 0, 2 call all_reduce(float32[8])"
    )
    assert "ranks 0, 2  all_reduce(float32[8]) at line 14 of train.py (call 2 of the world)" in found.rows


def test_where_type_and_size_differ_the_order_is_asked_for():
    """And not where a send and its receive only name each other."""
    for odd, size, asks in (("all_reduce", 9, True), ("all_reduce", 8, False)):
        calls = {0: Call("all_reduce(float32[8])", 14, 2, "0", odd, TRAIN),
                 1: Call(f"all_reduce(float64[{size}])", 14, 2, "0", odd, TRAIN)}  # fmt: skip
        failure = RankFailure("MismatchError", "...", mismatch=Mismatch("different dtypes", calls))
        found = verdict.judge([waiting(0), RankRecord(1, 3, "error", failure=failure, at=1.0), waiting(2)])
        assert ("must take the same one first" in found.advice) is asks, found
    pair = {0: Call("send(float32[4] to rank 1)", 3, 1, "0", "send", TRAIN),
            1: Call("recv(float16[4] from rank 0)", 5, 1, "0", "recv", TRAIN)}  # fmt: skip
    failure = RankFailure("MismatchError", "...", mismatch=Mismatch("different dtypes", pair))
    records = [waiting(0), RankRecord(1, 3, "error", failure=failure, at=1.0), waiting(2)]
    assert "must take the same one first" not in verdict.judge(records).advice


def test_ranks_that_only_wait_count_in_a_mismatch():
    """Two ranks have noticed; the others stand in the call that most have made."""

    def call(of):
        return Call(f"new_group({of})", 12, 1, "new_group", "new_group", TRAIN)

    failure = RankFailure(
        "E", "", mismatch=Mismatch("different lists of ranks", {0: call("a"), 2: call("b")})
    )
    wait = Wait(
        "new_group", "new_group(b)", "new_group", WORLD, ("new_group", WORLD), 1, 1, line=12, file=TRAIN
    )
    each = [
        RankRecord(0, 3, "error", failure=failure, at=1.0),
        *(RankRecord(r, 3, waits=(wait,)) for r in (1, 2)),
    ]
    found = verdict.judge(each)
    assert found.culprits == (0,)
    assert found.headline.startswith("rank 0 calls new_group(a) where ranks 1, 2 call new_group(b)")


def test_a_rank_that_stands_still_is_waited_for():
    stack = (Frame(TRAIN, 5, "load", "lock.acquire()"),)
    stuck = RankRecord(
        1, 3, "still", "still at line 5 of train.py, for 60 s", line=5, file=TRAIN, stack=stack
    )
    stuck = replace(stuck, counts={("0", WORLD): 3})
    found = verdict.judge([waiting(0), stuck, waiting(2)])
    assert found.kind == "still" and found.culprits == (1,) and found.places == ((TRAIN, 5),)
    assert found.headline == (
        "rank 1 stands still at line 5 of train.py, for 60 s, and ranks 0, 2 wait for it in all_reduce."
    )
    assert "lock.acquire()" in verdict.text(found, [waiting(0), stuck, waiting(2)])


def stands_in(rank, *names):
    """`rank` stands still in functions of torch."""
    torch = (
        Frame("/usr/lib/python3/dist-packages/torch/utils/some.py", 1, f"{n} of torch.utils") for n in names
    )
    stack = (Frame(TRAIN, 5, "load", "for x in loader:"), *torch)
    return RankRecord(rank, 3, "still", "still at line 5 of train.py, for 60 s", 5, TRAIN, stack=stack)


def test_where_a_stack_ends_in_a_library_the_function_is_named_that_the_program_has_called():
    seen = []
    threading.Thread(target=lambda: seen.extend(stacks.of_frame(sys._getframe(1)))).run()
    assert [f.name for f in stacks.below(seen)] == ["Thread.run of threading"]
    stuck = [stands_in(0, "_log.<locals>.wrapper", "FileBaton.wait", "_Poll.select"), stands_in(1, "f")]
    said = verdict.text(verdict.unclear(stuck, "."), stuck)
    assert "  (in FileBaton.wait of torch.utils, in select)\n" in said and "  (in f of torch.utils)" in said


def test_a_rank_that_waits_for_its_data_loader():
    """For a worker of it; without workers the loader computes itself."""
    loader = "_BaseDataLoaderIter.__next__"
    stuck = stands_in(1, loader, "_MultiProcessingDataLoaderIter._get_data", "select")
    found = verdict.judge([waiting(0), stuck, waiting(2)])
    assert found.advice.startswith("Rank 1 waits for a worker of the data loader. What does that wait for")
    assert verdict.judge([waiting(0), stands_in(1, loader), waiting(2)]).advice.startswith(
        "Look at that line"
    )
    assert "Ranks 0, 1 wait for a worker" in verdict.stalled([replace(stuck, rank=0), stuck], 60.0).advice


def test_where_all_stand_still_outside_torch_no_transfer_is_suspected():
    still = [stands_in(rank, "FileBaton.wait") for rank in WORLD]
    said = str(verdict.stalled(still, 60.0))
    assert (
        "nothing has moved for 60 s, and no rank waits in a communication.\n  ranks 0-2  stand still" in said
    )
    assert "a file, a lock" in said and "transfer" not in said
    assert "transfer" in str(verdict.stalled([waiting(rank) for rank in WORLD], 60.0))


def test_where_all_wait_for_others_to_join_it_is_told_as_whom_nobody_has():
    join = [waiting(rank, op="init_process_group") for rank in WORLD]
    (wait,) = join[2].waits
    join[2] = replace(join[2], waits=(replace(wait, text="init_process_group(rank=0)"),))
    said = str(verdict.stalled(join, 60.0))
    assert "rank 2      waits in init_process_group(rank=0)" in said and "transfer" not in said
    assert "Nobody calls it as rank 2. Does each call it by a number of its own" in said
    ports = [replace(wait, text=f"init_process_group(127.0.0.1:{port})") for port in (4000, 4000, 4001)]
    said = str(verdict.stalled([replace(r, waits=(w,)) for r, w in zip(join, ports, strict=True)], 60.0))
    assert (
        "rank 2      waits in init_process_group(127.0.0.1:4001)" in said and "at different addresses" in said
    )


def test_a_thread_that_outlives_the_script_is_told():
    frame = Frame("python3.11/threading.py", 1002, "Thread._bootstrap of threading")
    still = [replace(stands_in(rank, "Queue.get"), stack=(frame,)) for rank in WORLD]
    assert "make it with daemon=True" in verdict.stalled(still, 60.0).advice


def test_calls_of_one_group_that_crossed_are_told_where_nothing_moves():
    """As of two threads that use one group: nobody is known to wait in a barrier with a time limit of its own."""
    first = tuple(event(0, "monitored_barrier", seq=seq) for seq in (5, 6))
    other = (event(1, "monitored_barrier", seq=5), event(1, "all_gather", seq=6, line=30))
    still = [
        replace(stands_in(r, "monitored_barrier"), events=e) for r, e in enumerate((first, other, first))
    ]
    said = verdict.stalled(still, 20.0).advice
    assert said.startswith(
        "In one group call 6 is monitored_barrier(float32[8]) at line 12 of train.py on ranks 0, 2 "
    )
    assert (
        "and all_gather(float32[8]) at line 30 of train.py on rank 1. " in said and "do two threads" in said
    )


def test_a_backward_that_a_rank_has_not_done_names_parameters_without_a_gradient():
    step = [{"line": 12, "via": "backward"}, {"line": 14, "via": ""}] * 3
    ran = [tuple(event(r, seq=n, **e) for n, e in enumerate(step[:5], 1)) for r in range(2)]
    ran[1] = (*ran[1][:4], event(1, seq=5, shape=(), line=14))
    calls = {r: Call(e[-1].text, e[-1].line, 5, "0", "all_reduce", TRAIN) for r, e in enumerate(ran)}
    failure = RankFailure("MismatchError", "...", mismatch=Mismatch("different shapes", calls))
    records = [
        RankRecord(0, 2, "error", failure=failure, events=ran[0]),
        RankRecord(1, 2, events=ran[1], without=("b",)),
    ]
    advice = verdict.judge(records).advice
    assert "inside backward. Usual reasons:" in advice
    assert advice.endswith("Parameters of rank 1 without a gradient now: b.")


def test_the_exception_behind_a_call_in_a_finally_is_told():
    records = [waiting(0), waiting(1), waiting(2, op="barrier", handles="ValueError: label 7 is not in 0..4")]
    said = verdict.text(verdict.stalled(records, 20.0), records)
    assert (
        "Rank 2 came here after ValueError: label 7 is not in 0..4 (in an `except` or a `finally`)." in said
    )
    consequence = [replace(r, handles="MismatchError: different operations") for r in records[:2]]
    assert "Rank 0" not in verdict.text(verdict.stalled(records, 20.0), [*consequence, records[2]])
    everywhere = [replace(r, handles="ImportError: no apex") for r in records]
    assert "came here" not in verdict.text(verdict.stalled(records, 20.0), everywhere)


def test_the_stack_of_a_call_that_was_stopped_is_that_of_its_error():
    calls = {1: Call("all_to_all(float32[8])", 17), 2: Call("all_to_all(float32[7])", 17)}
    problem = Mismatch("rank 1 sends 3 to rank 2, which expects 2", calls)
    failure = RankFailure(
        "MismatchError", "m", (Frame(TRAIN, 30, "main"), Frame(TRAIN, 17, "exchange")), mismatch=problem
    )
    left = (Frame("<frozen importlib._bootstrap>", 690, "_load_unlocked"),)
    records = [waiting(0), replace(waiting(1), failure=failure, stack=left, phase="error"), waiting(2)]
    found = verdict.judge(records)
    assert found.culprits == (1, 2)
    assert found.headline.endswith("do not fit together: rank 1 sends 3 to rank 2, which expects 2.")
    said = verdict.text(found, records)
    assert f'File "{TRAIN}", line 17, in exchange' in said and "frozen" not in said


def test_of_a_circle_the_odd_rank_is_blamed():
    pair = [waiting(0, group="1", ranks=(0, 1), seq=1, line=20), waiting(1), waiting(2)]
    counts = [{("1", (0, 1)): 1, ("0", WORLD): 3}, {("1", (0, 1)): 0, ("0", WORLD): 4}, {("0", WORLD): 4}]
    found = verdict.judge([replace(r, counts=c) for r, c in zip(pair, counts, strict=True)])
    assert found.culprits == (0,) and found.places == ((TRAIN, 20),)


def test_a_call_missing_in_a_subgroup_is_blamed():
    """Rank 2 is at the barrier with one call less of its pair than those who stand there, and rank 3 waits for it."""
    world, low, high = (0, 1, 2, 3), (0, 1), (2, 3)

    def at(rank, seq, counts, **where):
        return replace(waiting(rank, seq=seq, **where), counts=counts)

    barrier = {"op": "barrier", "ranks": world, "line": 20}
    stuck = [
        at(0, 1, {("0", world): 1, ("1", low): 3}, **barrier),
        at(1, 1, {("0", world): 1, ("1", low): 3}, **barrier),
        at(2, 1, {("0", world): 1, ("2", high): 2}, **barrier),
        at(3, 3, {("0", world): 0, ("2", high): 3}, group="2", ranks=high, line=19),
    ]
    found = verdict.judge(stuck)
    assert found.culprits == (2,) and found.places == ((TRAIN, 20),)


# --- records


def test_a_record_survives_its_file(tmp_path):
    record = replace(
        waiting(1), failure=RankFailure("E", "m", (Frame("f", 1, "g"),), mismatch=Mismatch("p", {0: Call("c")})),
        events=(event(1),), stack=(Frame("f", 2, "h"),),
    )  # fmt: skip
    records.write(tmp_path, [record])
    assert records.load((tmp_path / "rank-1.pickle").read_bytes()) == record


def test_a_pickle_of_a_stranger_is_not_opened():
    class Evil:
        def __reduce__(self):
            return (print, ("opened",))

    with pytest.raises(ValueError, match=r"builtins\.print, and a report holds plain data only"):
        records.load(pickle.dumps(Evil()))


def test_a_folder_of_something_else(tmp_path, capsys):
    (tmp_path / "notes.md").write_text("nothing of this job")
    assert command.main(["explain", str(tmp_path)]) == 1
    assert "is no report of `rankcell run`" in capsys.readouterr().err
    assert command.main(["explain", str(tmp_path / "none")]) == 1


def test_what_no_proof_says_is_read_from_the_report(tmp_path, capsys):
    """For how long nothing had moved, the records do not tell."""
    said = verdict.text(verdict.stalled([RankRecord(r, 3) for r in WORLD], 20.0), [])
    records.write(tmp_path, [RankRecord(rank, 3) for rank in WORLD])
    assert command.main(["explain", str(tmp_path)]) == 1 and "verdict.txt" in capsys.readouterr().err
    (tmp_path / "verdict.txt").write_text(f"{said}\n")
    assert command.main(["explain", str(tmp_path)]) == 0 and capsys.readouterr().out == f"{said}\n"


def test_who_reads_a_report_may_stop_reading(tmp_path):
    records.write(tmp_path, [waiting(0), waiting(1), RankRecord(2, 3, "finished")])
    reader, writer = os.pipe()
    os.close(reader)  # as `head` does when it has its lines
    explain = [sys.executable, "-m", "rankcell.command", "explain", str(tmp_path)]
    assert subprocess.run(explain, stdout=writer, stderr=subprocess.PIPE).stderr == b""
    os.close(writer)
