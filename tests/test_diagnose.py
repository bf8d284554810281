"""Who waits for whom: proofs and words from hand-written states, no processes."""

from dataclasses import replace

from rankcell.engine.diagnose import State, diagnose, from_status, standings, summary, unmatched
from rankcell.engine.messages import Status, Wait

WORLD = (0, 1, 2)


def collective(rank, *, op="all_reduce", group="0", ranks=WORLD, seq=1, line=2):
    """`rank` stands in a collective of its group."""
    wait = Wait(op, f"{op}(float32[4])", group, ranks, (group, ranks), seq, seq, line=line)
    return State(rank, "running", (wait,), {(group, ranks): seq}, calls=seq)


def transfer(rank, op, peer, *, seq=1, ranks=WORLD):
    """`rank` stands in a send to `peer`, or a receive from it (None: from anyone)."""
    pair = (rank, peer) if op == "send" else (peer, rank)
    key = ("0", "p2p", *pair, 0, op)
    return State(rank, "running", (Wait(op, op, "0", ranks, key, seq, seq, peer),), {key: seq}, calls=1)


def test_everybody_has_called_it_so_it_goes_on():
    assert diagnose([collective(r) for r in WORLD]) is None


def test_a_computing_rank_may_still_come():
    assert diagnose([collective(0), collective(1), State(2, "running")]) is None


def test_a_rank_that_finished_never_comes():
    found = diagnose([collective(0), collective(1), State(2, "finished")])
    assert found.blame == 2
    assert found.headline == "rank 2 finished the cell without the all_reduce that ranks 0, 1 wait in."
    assert found.lines[0] == "rank 0  waits in all_reduce(float32[4]) (call 1 of the world, line 2)"


def test_whoever_waits_for_a_stuck_rank_is_stuck_too():
    chain = [transfer(0, "recv", 1), transfer(1, "recv", 2), State(2, "finished")]
    assert diagnose(chain).blame == 2


def test_a_chain_that_ends_at_a_computing_rank_is_not_stuck():
    assert diagnose([transfer(0, "recv", 1), transfer(1, "recv", 2), State(2, "running")]) is None


def test_a_cycle_of_sends():
    found = diagnose([transfer(0, "send", 1), transfer(1, "send", 0), State(2, "running")])
    assert found.headline == "ranks 0, 1 all send first, and nobody receives."


def test_a_send_whose_receive_has_just_come_goes_on():
    assert diagnose([transfer(0, "send", 1), transfer(1, "recv", 0), State(2, "finished")]) is None
    second = transfer(0, "send", 1, seq=2)
    assert diagnose([second, transfer(1, "recv", 0, seq=2), State(2, "finished")]) is None
    once = replace(transfer(1, "recv", 0), phase="finished", waits=())
    assert diagnose([transfer(0, "send", 1), once, State(2, "finished")]) is None
    assert diagnose([second, once, State(2, "finished")]).blame == 1


def test_a_receive_from_anyone_needs_only_one_free_rank():
    assert diagnose([transfer(0, "recv", None), State(1, "running"), State(2, "finished")]) is None
    assert diagnose([transfer(0, "recv", None), State(1, "finished"), State(2, "finished")]) is not None


def test_an_operation_that_nobody_stands_in_blocks_nobody():
    wait = Wait("all_reduce", "all_reduce()", "0", WORLD, ("0", WORLD), 1, 1, waiting=False)
    open_only = State(0, "running", (wait,), {("0", WORLD): 1})
    assert diagnose([open_only, State(1, "finished"), State(2, "finished")]) is None
    held = State(0, "running", (wait,), {("0", WORLD): 1}, blocked_in_torch=True)
    assert diagnose([held, State(1, "finished"), State(2, "finished")]) is not None


def test_a_thread_of_the_learner_may_still_answer():
    busy = State(1, "running", collective(1).waits, {}, other_threads=True)
    assert diagnose([transfer(0, "recv", 1), busy, State(2, "finished")]) is None


def test_an_error_is_blamed_before_a_rank_that_finished():
    states = [collective(0), State(1, "finished"), State(2, "error", why="ValueError: no")]
    assert (
        diagnose(states).headline == "rank 2 failed (ValueError: no), and rank 0 waits for it in all_reduce."
    )


def test_groups_in_opposite_order():
    def first(rank, group):
        return collective(rank, group=group, ranks=(0, 1))

    found = diagnose([first(0, "a"), first(1, "b"), State(2, "finished")])
    assert found.headline == (
        "ranks 0, 1 take their process groups in different order, and each waits for the other."
    )
    assert found.lines[-1] == "rank 1 takes group 'b' of ranks 0, 1 first"


def test_calls_that_nobody_waited_for_are_counted_at_the_end():
    key = ("0", (0, 1))
    assert unmatched({0: {key: 2}, 1: {key: 2}}, [0, 1]) is None
    more = unmatched({0: {key: 3}, 1: {key: 2}}, [0, 1])
    assert more.startswith("rank 0 called 1 collective more than rank 1, and did not wait")
    absent = unmatched({0: {key: 3}, 1: {key: 2}}, [0])
    assert absent.startswith(
        "rank 0 called 1 collective more than rank 1 (rank 1 did not run this cell), and"
    )


def test_the_live_line_groups_ranks_by_what_they_do():
    states = [collective(0), collective(1), State(2, "running"), State(3, "absent")]
    assert summary(states) == "ranks 0, 1 waiting in all_reduce, rank 2 computing"


def test_standings_say_who_is_waited_for():
    found = standings([collective(0), collective(1), State(2, "finished", calls=3)])
    assert found[0].waits_for == (2,) and found[0].line == 2
    assert found[2].doing == "finished the cell after 3 calls" and found[2].waits_for == ()


def test_a_sentence_on_a_missing_receive_names_no_rank_that_waits_for_a_send():
    """Of a ring of batches: rank 0 sends to the rank that has finished, rank 2 waits for what it sends."""
    states = [transfer(0, "send", 1), State(1, "finished", counts={}), transfer(2, "recv", 1)]
    assert diagnose(states).headline == "rank 1 finished without receiving what rank 0 sends."


def test_a_thread_that_wakes_up_does_not_stand_still():
    """Who waits for its turn in Python uses next to no CPU time, and leaves its core again and again."""
    before = Status(0, "1", "running", in_torch=True, cpu=1.0, switches=70)
    for later, still in (
        (replace(before, cpu=1.00005), True),
        (replace(before, cpu=1.2), False),
        (replace(before, switches=72), False),
        (replace(before, in_torch=False), False),
    ):
        assert from_status(later, before).blocked_in_torch is still
    assert not from_status(before, None).blocked_in_torch
