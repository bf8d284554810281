"""The verdict for jobs that no notebook started, from hand-written records, dumps, stacks, logs and traces.

`test_run.py` has the jobs that are really run.
"""

import json
import pickle
from dataclasses import replace

import pytest

from rankcell import command
from rankcell.engine.messages import Wait
from rankcell.jobs import explain, flight, mismatch, records, stacks, verdict
from rankcell.jobs.records import RankRecord
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


def test_nobody_is_blamed_while_somebody_may_still_come():
    computing = RankRecord(1, 3, counts={("0", WORLD): 3}, line=5, file=TRAIN)
    assert verdict.judge([waiting(0), computing, waiting(2)]) is None


def test_an_error_of_a_closed_connection_is_a_consequence():
    """The rank that finished has closed its connections: who waits for it raises, and is not to blame."""
    gone = RankRecord(1, 3, "finished", counts={("0", WORLD): 3}, calls=3, at=1.0)
    lost = RankFailure("RuntimeError", "[.../pair.cc:553] Connection closed by peer [127.0.0.1]:4545")
    victim = replace(waiting(0), phase="error", waits=(), failure=lost, failed_in=waiting(0).waits[0], at=2.0)
    victim = replace(victim, counts={("0", WORLD): 3})
    found = verdict.judge([victim, gone, waiting(2)])
    assert found.kind == "hang" and found.culprits == (1,)
    own = replace(victim, failure=RankFailure("RuntimeError", "shape '[3]' is invalid"))
    assert verdict.judge([own, gone, waiting(2)]).culprits == (0,)


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
    calls = {0: Call("all_reduce(float32[8])", 12, 2, "0", "all_reduce"),
             1: Call("all_reduce(float32[7])", 12, 2, "0", "all_reduce")}  # fmt: skip
    failure = RankFailure("MismatchError", "...", mismatch=Mismatch("different shapes", calls))
    odd = RankRecord(1, 3, "error", failure=failure, events=(event(1, seq=2, shape=(7,), line=12),), at=1.0)
    rest = [replace(waiting(r), events=(event(r, seq=2, line=14),)) for r in (0, 2)]
    found = verdict.judge([rest[0], odd, rest[1]])
    assert found.kind == "mismatch" and found.culprits == (1,) and found.places == ((TRAIN, 12),)
    assert found.headline.startswith(
        "rank 1 calls all_reduce(float32[7]) where ranks 0, 2 call all_reduce(float32[8])"
    )
    assert "ranks 0, 2  all_reduce(float32[8]) at line 14 of train.py (call 2)" in found.rows


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


@pytest.mark.parametrize(
    ("other", "problem"),
    [
        ({"op": "barrier"}, "different operations"),
        ({"dtype": "int32"}, "different dtypes"),
        ({"shape": (2, 5)}, "different shapes"),
        ({"reduce_op": "MAX"}, "different reduce operations"),
        ({"peer": 1}, "different roots"),
        ({"shape": (2, 4)}, None),  # as many numbers: that is fine
    ],
)
def test_what_differs_in_the_last_operations(other, problem):
    plain = {"op": "all_reduce", "reduce_op": "SUM", "peer": 0}
    each = [RankRecord(r, 3, events=(event(r, **(plain | (other if r == 1 else {}))),)) for r in WORLD]
    found = mismatch.find(each)
    assert (found and found.problem) == problem


def test_a_rank_that_stands_still_is_waited_for():
    stack = (Frame(TRAIN, 5, "load", "lock.acquire()"),)
    stuck = RankRecord(1, 3, "still", "still at line 5 of train.py, for 60 s", line=5, file=TRAIN, stack=stack)
    stuck = replace(stuck, counts={("0", WORLD): 3})
    found = verdict.judge([waiting(0), stuck, waiting(2)])
    assert found.kind == "still" and found.culprits == (1,) and found.places == ((TRAIN, 5),)
    assert found.headline == (
        "rank 1 stands still at line 5 of train.py, for 60 s, and ranks 0, 2 wait for it in all_reduce."
    )
    assert "lock.acquire()" in verdict.text(found, [waiting(0), stuck, waiting(2)])


def test_of_ranks_in_a_circle_the_odd_one_is_named():
    pair = [waiting(0, group="1", ranks=(0, 1), seq=1, line=20), waiting(1), waiting(2)]
    counts = [{("1", (0, 1)): 1, ("0", WORLD): 3}, {("1", (0, 1)): 0, ("0", WORLD): 4}, {("0", WORLD): 4}]
    found = verdict.judge([replace(r, counts=c) for r, c in zip(pair, counts, strict=True)])
    assert found.culprits == (0,) and found.places == ((TRAIN, 20),)


def test_who_left_a_call_of_its_sub_group_out_is_named():
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
        events=(event(1),), others=(("worker process 7", (Frame("f", 2, "h"),)),),
    )  # fmt: skip
    records.write(tmp_path, [record])
    assert records.load((tmp_path / "rank-1.pickle").read_bytes()) == record


# --- torch's flight recorder


def entry(
    name,
    seq,
    *,
    sizes=((8,),),
    dtype="Float",
    state="completed",
    retired=True,
    group=("0", "default_pg"),
    **more,
):
    line = {"name": "main", "filename": TRAIN, "line": 12}
    torch = {"name": name, "filename": "/x/site-packages/torch/distributed/distributed_c10d.py", "line": 1}
    return {
        "frames": [torch, line],
        "process_group": group, "collective_seq_id": seq, "p2p_seq_id": 0, "op_id": seq, "profiling_name": name,
        "time_created_ns": 10**9 * seq, "input_sizes": [list(s) for s in sizes], "input_dtypes": [dtype] * len(sizes),
        "output_sizes": [], "output_dtypes": [], "state": state, "retired": retired, "is_p2p": False,
    } | more  # fmt: skip


def nccl(entries, ranks="[0, 1, 2]"):
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": ranks}}
    return {"version": "2.10", "pg_config": config, "nccl_version": "2.28.9", "entries": entries}


OPEN = {"state": "started", "retired": False}


def behind(op="nccl:all_reduce"):
    """Dumps of three ranks of which rank 1 has not come to the second all-reduce."""
    return {r: nccl([entry(op, 1), *([entry(op, 2, **OPEN)] if r != 1 else [])]) for r in WORLD}


@pytest.mark.parametrize("kind", ["pickle", "json"])
def test_dumps_of_the_flight_recorder(tmp_path, kind, capsys):
    for rank, dump in behind().items():
        data = pickle.dumps(dump) if kind == "pickle" else json.dumps(dump).encode()
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(data)
    found = explain.explain(explain.read(tmp_path).records)
    assert found.culprits == (1,)
    assert found.headline == (
        "rank 1 stands outside torch.distributed after all_reduce(float32[8]) (call 1), and ranks 0, 2 wait for it in "
        "all_reduce."
    )
    assert command.main(["explain", str(tmp_path)]) == 0
    assert "line 12 of train.py" in capsys.readouterr().out


def test_the_peer_of_a_message_in_a_group_is_a_rank_of_the_world():
    """The recorder counts within the group: 0->1 of ranks 1 and 2 goes from rank 1 to rank 2."""
    config = {"1": {"name": "1", "desc": "", "ranks": "[1, 2]"}}
    dumps = [
        flight.Dump(
            rank,
            nccl([entry(f"nccl:{words}", 1, group=("1", ""), is_p2p=True, **OPEN)]) | {"pg_config": config},
        )
        for rank, words in ((1, "send 0->1"), (2, "recv 1<-0"))
    ]
    assert [record.waits[0].peer for record in flight.records(dumps)] == [2, 1]


def test_dumps_that_do_not_match():
    dumps = [
        flight.Dump(r, nccl([entry("nccl:all_reduce", 1, sizes=((9 if r == 2 else 8,),), **OPEN)]))
        for r in WORLD
    ]
    found = explain.explain(flight.records(dumps))
    assert found.kind == "mismatch" and found.culprits == (2,) and found.places == ((TRAIN, 12),)


def test_a_dump_that_is_missing_is_said():
    dumps = [flight.Dump(r, d) for r, d in behind().items() if r != 1]
    found = explain.explain(flight.records(dumps))
    assert found.culprits == (1,) and "rank 1 has left nothing" in found.headline
    assert found.unknown == ("Of rank 1 there is nothing.",)
    two = [flight.Dump(r, d) for r, d in behind().items() if r != 2]
    assert explain.explain(flight.records(two)).culprits == (1,), "rank 1 is behind, whatever rank 2 does"


def test_gloos_groups_are_those_who_use_them():
    group = ("1", "undefined")
    dumps = []
    for rank in WORLD:
        calls = (
            [entry("gloo:all_reduce", 1, state="scheduled", retired=rank != 0, group=group)]
            if rank == 0
            else []
        )
        calls += [entry("gloo:barrier", 1, sizes=(), state="scheduled", retired=False)] if rank else []
        calls += [entry("gloo:broadcast", 1, state="scheduled", group=group)] if rank == 1 else []
        dumps.append(flight.Dump(rank, {"version": "2.10", "pg_config": {}, "entries": calls}))
    made = flight.records(dumps)
    assert made[0].waits[0].ranks == (0, 1) and made[1].waits[0].ranks == WORLD


def test_sends_and_receives_of_nccl():
    send = entry("nccl:send 0->1", 0, is_p2p=True, p2p_seq_id=1, **OPEN)
    made = flight.records([flight.Dump(0, nccl([send], "[0, 1]")), flight.Dump(1, nccl([], "[0, 1]"))])
    assert made[0].waits[0].text == "send(float32[8] to rank 1)"
    found = explain.explain(made)
    assert found.culprits == (1,)


def test_a_pickle_of_a_stranger_is_not_opened(tmp_path):
    class Evil:
        def __reduce__(self):
            return (print, ("opened",))

    (tmp_path / "nccl_trace_rank_0").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(ValueError, match=r"builtins\.print; reports and dumps hold plain data only"):
        explain.read(tmp_path)


# --- stacks

SPY = '''Process 71: python train.py
Python v3.11.7 (/usr/bin/python3.11)

Thread 0x7F1 (idle): "MainThread"
    wait (torch/distributed/distributed_c10d.py:3245)
    all_reduce (torch/distributed/distributed_c10d.py:3245)
    wrapper (torch/distributed/c10d_logger.py:83)
    main (train.py:12)
    <module> (train.py:20)
Thread 0x7F2 (active): "feeder"
    run (threading.py:1)
'''  # fmt: skip
STUCK = """Process 72: python train.py
Python v3.11.7 (/usr/bin/python3.11)

Thread 72 (idle): "MainThread"
    load (data.py:7)
    main (train.py:11)
    <module> (train.py:20)
"""


def test_what_py_spy_prints(tmp_path):
    for rank in WORLD:
        (tmp_path / f"rank{rank}.txt").write_text(STUCK if rank == 2 else SPY)
    made = explain.read(tmp_path).records
    assert [f.name for f in made[0].stack[:2]] == ["<module>", "main"] and made[0].waits[0].op == "all_reduce"
    found = explain.explain(made)
    assert found.culprits == (2,) and found.places == (("data.py", 7),)
    assert found.headline == "rank 2 stands at line 7 of data.py, and ranks 0, 1 wait for it in all_reduce."
    assert "do not number operations" in found.unknown[-1]


def test_stacks_in_different_operations():
    def at(rank, op, line):
        frames = (Frame("train.py", line, "main"), Frame("/x/torch/distributed/distributed_c10d.py", 9, op))
        return explain.of_threads(rank, [stacks.ThreadStack("MainThread", frames)])

    found = explain.explain([at(0, "all_reduce", 12), at(1, "barrier", 14), at(2, "all_reduce", 12)])
    assert found.culprits == (1,) and found.places == (("train.py", 14),)
    assert found.headline == (
        "rank 1 waits in barrier at line 14 of train.py where ranks 0, 2 wait in all_reduce at line 12 of train.py."
    )
    same = [at(r, "all_reduce", 12) for r in WORLD]
    assert explain.explain(same).kind == "unclear"


def test_a_rank_that_computes_is_not_blamed():
    idle, busy = (
        explain.of_threads(0, stacks.printed(SPY)),
        explain.of_threads(1, stacks.printed(STUCK), idle=0.0),
    )
    found = explain.explain(explain.merged([idle, busy]))
    assert found.kind == "unclear" and not found.culprits
    assert (
        found.headline
        == "rank 1 computes at line 7 of data.py, and the others wait: slow, or an endless loop."
    )


def test_what_faulthandler_prints():
    text = """Thread 0x00007f11 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 1 in run

Current thread 0x00007f12 (most recent call first):
  File "train.py", line 3 in load
  File "train.py", line 9 in <module>
"""
    main, other = stacks.printed(text)
    assert [(f.name, f.lineno) for f in main.frames] == [("<module>", 9), ("load", 3)]
    assert other.frames[0].name == "run"


def test_mixed_sources_complete_each_other(tmp_path):
    """The dump numbers the operations, the stack says where the rank is that is in none."""
    for rank, dump in behind().items():
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(dump))
    (tmp_path / "rank1.txt").write_text(STUCK)
    (tmp_path / "notes.md").write_text("nothing of this job")
    found = explain.explain(explain.read(tmp_path).records)
    assert found.culprits == (1,) and found.places[0] == ("data.py", 7)
    assert found.headline.startswith("rank 1 stands still at line 7 of data.py, and ranks 0, 2 wait")


def test_a_folder_of_something_else(tmp_path, capsys):
    (tmp_path / "notes.md").write_text("nothing of this job")
    assert command.main(["explain", str(tmp_path)]) == 1
    assert "is nothing that tells of a job" in capsys.readouterr().err
    assert command.main(["explain", str(tmp_path / "none")]) == 1
