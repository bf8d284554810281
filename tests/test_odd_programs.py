"""Odd but right programs run as they would under torchrun, and odd wrong ones are explained: one case each.

All cases share a world of two ranks, one after the other: whatever a case does, the next cell must work.
"""

import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

import rankcell
from rankcell import Deadlock, RankError, RankLost, RankMismatch, RanksInterrupted
from rankcell.engine.messages import Question


@pytest.fixture(scope="module")
def two():
    with rankcell.Ranks(2, device="cpu") as ranks:
        yield ranks


def works(ranks):
    n = ranks.world_size
    run = ranks.run("probe = torch.full((3,), float(rank)); dist.all_reduce(probe); probe.tolist()")
    assert run.values == [[n * (n - 1) / 2] * 3] * n


def fails(ranks, source, error=RankError, **options):
    with pytest.raises(error) as caught:
        ranks.run(textwrap.dedent(source), **options)
    works(ranks)
    return caught.value


def runs(ranks, source, **options):
    run = ranks.run(textwrap.dedent(source), **options)
    works(ranks)
    return run


def wait_for(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.02)


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"


# --- slow is not stuck ---


def test_a_rank_that_gets_no_processor_is_slow_and_not_stuck(two):
    """What it says then is about the cell before."""
    stop = threading.Event()

    def starve():
        while not stop.is_set():
            os.kill(two.pids[1], signal.SIGSTOP)
            stop.wait(0.25)
            os.kill(two.pids[1], signal.SIGCONT)
            stop.wait(0.002)

    thread = threading.Thread(target=starve)
    thread.start()
    try:
        for _ in range(8):
            run = two.run("x = torch.ones(2); dist.all_reduce(x); x.tolist()")
            assert run.values == [[2.0, 2.0]] * 2
    finally:
        stop.set()
        thread.join()
        os.kill(two.pids[1], signal.SIGCONT)


def test_the_first_cell_may_bring_much():
    big = list(range(2_000_000))
    seen = []
    with rankcell.Ranks(2, device="cpu") as ranks:
        run = ranks.run("len(big)", push={"big": big}, on_update=lambda run, doing: seen.append(doing))
    assert run.values == [2_000_000] * 2


def test_a_thread_that_answers_later_is_waited_for(two):
    runs(
        two,
        """
        import threading, time
        x = torch.ones(2)
        def later():
            time.sleep(0.8)
            dist.all_reduce(x)
        if rank == 0:
            threading.Thread(target=later).start()
        else:
            dist.all_reduce(x)
        """,
    )


def test_a_progress_bar_s_thread_is_not_waited_for(two):
    error = fails(
        two,
        """
        from tqdm import tqdm
        for _ in tqdm(range(2)): pass
        if rank == 0: dist.all_reduce(torch.ones(2))
        """,
        Deadlock,
    )
    assert "rank 1 finished the cell" in str(error)


def test_a_receive_of_what_was_sent_in_a_cell_that_other_ranks_ran(two):
    two.run("big = torch.ones(1 << 20); w = dist.isend(big, 1)", only=[0])
    run = two.run(
        "import time; time.sleep(0.5); y = torch.zeros(1 << 20); dist.recv(y, 0); y.sum().item()", only=[1]
    )
    assert run.values == [float(1 << 20)]
    two.run("w.wait()", only=[0])
    works(two)


def test_a_group_with_a_limit_of_its_own_ends_its_waits_itself(two):
    run = runs(
        two,
        """
        from datetime import timedelta
        groups_with_timeout = dist.new_group([0, 1], timeout=timedelta(seconds=1.5))
        gave_up = False
        if rank == 0:
            try:
                dist.all_reduce(torch.ones(2), group=groups_with_timeout)
            except RuntimeError:
                gave_up = True
        gave_up
        """,
    )
    assert run.values == [True, False]


@pytest.mark.parametrize("kind", ["isend", "batch_isend_irecv"])
def test_to_wait_twice_for_a_send_or_receive_is_refused(two, kind):
    """Gloo's second `wait()` waits for a completion that has been handed out: it would stand still for ever."""
    source = """
x, y, peer = torch.full((3,), float(rank)), torch.zeros(3), 1 - rank
works = (
    [dist.isend(x, peer), dist.irecv(y, peer)]
    if kind == "isend"
    else dist.batch_isend_irecv([dist.P2POp(dist.isend, x, peer), dist.P2POp(dist.irecv, y, peer)])
)
for work in works * times:
    work.wait()
y.tolist()
"""
    assert runs(two, f"kind, times = {kind!r}, 1{source}").values == [[1.0] * 3, [0.0] * 3]
    said = str(fails(two, f"kind, times = {kind!r}, 2{source}"))
    assert "wait() of send(float32[3] to rank 1) was called a second time" in said
    assert "call it once for each Work" in said


@pytest.mark.parametrize(
    "call", ["dist.batch_isend_irecv([dist.P2POp(dist.isend, x, rank)])", "dist.irecv(x, rank)"]
)
def test_a_message_to_the_rank_itself_is_refused(two, call):
    said = str(fails(two, f"x = torch.ones(2)\n{call}"))
    assert "names this rank itself" in said and "copy the tensor" in said


def test_sums_that_were_freed_may_hold_parts_and_it_is_said():
    with rankcell.Ranks(3, device="cpu") as ranks:
        source = "x = torch.full((1000,), 1.0)\nif rank != 2: dist.all_reduce(x)"
        said = str(fails(ranks, source, Deadlock))
        assert "The tensors that ranks 0, 1 were summing may hold parts of the sum: make them anew." in said
        assert ranks.run("x.max().item()").values == [2.0, 1.0, 1.0]
        for other in ("if rank == 0: dist.all_reduce(x)", "if rank != 2: dist.barrier()"):
            assert "may hold" not in str(fails(ranks, other, Deadlock))


def test_to_wait_twice_for_a_collective_is_fine(two):
    source = (
        "x = torch.ones(3)\nwork = dist.all_reduce(x, async_op=True)\nwork.wait()\nwork.wait()\nx.tolist()"
    )
    assert runs(two, source).values == [[2.0] * 3] * 2


# --- calls that match, and calls that do not ---


@pytest.mark.parametrize(
    "call",
    [
        "dist.all_reduce(torch.zeros(1) if rank else torch.tensor(1.0))",
        "dist.all_reduce(torch.ones(2, 3) if rank else torch.ones(3, 2))",
        "dist.broadcast(torch.ones(6) if rank else torch.ones(2, 3), 0)",
    ],
)
def test_equally_many_numbers_in_other_shapes_match(two, call):
    runs(two, call)


def test_a_group_of_its_members_alone(two):
    runs(
        two,
        """
        if rank == 0:
            mine = dist.new_group([0], use_local_synchronization=True)
            dist.all_reduce(torch.ones(2), group=mine)
        """,
    )


def test_halves_that_make_their_own_groups_are_told_both_lists():
    with rankcell.Ranks(4, device="cpu") as ranks:
        for _ in range(3):
            error = fails(ranks, "g = dist.new_group([0, 1] if rank < 2 else [2, 3])", RankMismatch)
            assert "new_group([0, 1])" in str(error) and "new_group([2, 3])" in str(error)
            assert "different lists of ranks" in str(error)


def test_a_mismatch_that_the_program_catches_cannot_do_harm(two):
    error = fails(
        two,
        """
        x = torch.ones(2 + rank)
        try:
            dist.all_reduce(x)
        except RuntimeError:
            pass
        y = torch.ones(3)
        dist.all_reduce(y)
        y.tolist()
        """,
        RankMismatch,
    )
    assert "different shapes" in str(error)


def test_other_dtypes_that_the_program_catches_abort_nobody(two):
    pids = two.pids
    error = fails(
        two,
        """
        x = torch.ones(2, dtype=torch.float64 if rank else torch.float32)
        try:
            dist.all_reduce(x)
        except RuntimeError:
            dist.all_reduce(torch.ones(2))
        """,
        RankMismatch,
    )
    assert "different dtypes" in str(error) and two.pids == pids


def test_signatures_are_never_cut():
    """Splits of seven digits for many ranks took more bytes than a slot had."""
    from rankcell.engine.match import Signature, SignatureTable, difference

    n = 128
    rows = tuple(1_000_000 + i for i in range(n))
    mine = Signature(
        "all_to_all(float32[9])", "all_to_all", (("float32", 0),), sends=rows, expects=rows
    ).packed()
    assert len(mine) <= SignatureTable.layout(n)[0] - SignatureTable._HEAD.size
    assert difference(mine, mine, range(n), 5, 5)[0] == ""
    less = Signature(
        "all_to_all(float32[9])", "all_to_all", (("float32", 0),), sends=rows, expects=(7,) * n
    ).packed()
    assert difference(mine, less, range(n), 0, 1)[0] == "rank 0 sends 1000001 to rank 1, which expects 7"


def test_an_asynchronous_call_that_others_skip_keeps_everybody(two):
    two.run("kept = rank + 5")
    pids = two.pids
    start = time.monotonic()
    error = fails(two, "if rank == 0: work = dist.all_reduce(torch.ones(1 << 20), async_op=True)", Deadlock)
    assert "1 collective more" in str(error)
    assert two.pids == pids and two.run("kept").values == [5, 6]
    assert time.monotonic() - start < 15  # destroying the group first waited 20 s for the operation


def test_an_asynchronous_call_of_a_cell_for_some_ranks_is_found_in_that_cell(two):
    error = fails(two, "work = dist.all_reduce(torch.ones(2), async_op=True)", Deadlock, only=[0])
    assert "rank 1 (rank 1 did not run this cell)" in str(error)


def test_a_repr_that_communicates_is_part_of_the_cell(two):
    error = fails(
        two,
        """
        class Sums:
            def __repr__(self):
                x = torch.ones(2); dist.all_reduce(x)
                return "sum"
        Sums() if rank == 0 else None
        """,
        Deadlock,
    )
    assert "rank 1 finished the cell without the all_reduce that rank 0 waits in" in str(error)
    run = runs(
        two,
        """
        class Sums:
            def __repr__(self):
                x = torch.ones(2); dist.all_reduce(x)
                return f"sum {x.tolist()}"
        Sums()
        """,
    )
    assert [r.data["text/plain"] for r in run.ranks] == ["sum [2.0, 2.0]"] * 2


def test_a_receive_from_anyone_names_who_sent(two):
    run = runs(
        two,
        """
        x = torch.ones(2)
        if rank == 0:
            dist.recv(x)
        else:
            dist.send(x, 0)
        """,
    )
    (received,) = [e for e in run.events if e.op == "recv"]
    assert received.peer == 1


def test_a_receive_from_anyone_that_nobody_answers_announces_what_is_lost(two):
    two.run("kept = rank")
    error = fails(two, "if rank == 0: dist.recv(torch.ones(2))", Deadlock)
    assert "rank 0 did not react and was replaced: names defined there are gone" in str(error)
    assert two.run("'kept' in globals()").values == [False, True]


def test_polling_a_receive_on_gloo_is_explained(two):
    with pytest.raises(rankcell.RankTimeout) as caught:
        two.run(
            "if rank == 0:\n    work = dist.irecv(torch.ones(2), 1)\n    while not work.is_completed(): pass\n"
            "else: dist.send(torch.ones(2), 0)",
            timeout=4,
        )
    assert "completed only by `wait()`" in caught.value.run.ranks[0].stderr
    works(two)


# --- process groups of pasted scripts ---


def test_a_script_may_end_with_destroy_process_group(two):
    two.run("kept = rank")
    pids = two.pids
    runs(two, "dist.destroy_process_group()")
    assert any("destroyed the process group" in note for note in two.notes)
    assert two.pids == pids and two.run("kept").values == [0, 1]


def test_a_script_may_begin_with_init_process_group(two):
    two.notes.clear()
    runs(two, "dist.init_process_group('gloo'); dist.barrier()")
    assert any("init_process_group did nothing here" in note for note in two.notes)


def test_a_message_that_nobody_took_is_not_the_next_one(two):
    """Rank 0 raises before it receives; the next cell sends again, and gets what it sends."""
    fails(two, "if rank == 1: dist.isend(torch.zeros(2), 0)\nelse: 1 / 0")
    run = two.run(
        "x = torch.full((2,), 5.0)\nif rank == 1: dist.isend(x, 0).wait()\n"
        "else: dist.recv(x := torch.zeros(2), 1)\nx.tolist()"
    )
    assert run.values == [[5.0, 5.0]] * 2
    two.run("if rank == 1: kept = dist.isend(torch.ones(2), 0)")  # a message may go on from cell to cell
    assert two.run("if rank == 0: dist.recv(x, 1)\nx.tolist()").values[0] == [1.0, 1.0]


def test_a_group_may_go_with_the_model_that_used_it(two):
    """As in a pasted `main`: the group is destroyed, and then the model is freed, with the last hold on the group."""
    source = """
        from torch.nn.parallel import DistributedDataParallel

        def main():
            dist.init_process_group("gloo")
            model = DistributedDataParallel(torch.nn.Linear(4, 4))
            model(torch.ones(2, 4)).sum().backward()
            dist.destroy_process_group()

        dist.destroy_process_group()
        for _ in range(40): main()
        """
    runs(two, source, timeout=300)


def test_where_ranks_meet_outlives_a_group_that_all_have_destroyed(two, tmp_path):
    """One may set its group up again, and have written there, when the last of the others destroys its own."""
    source = """
        import os, pathlib, time
        store = dist.distributed_c10d._get_default_store()
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        path = store.path
        del store
        dist.destroy_process_group()
        pathlib.Path(f"{folder}/{rank}").touch()
        while len(os.listdir(folder)) < 2:
            time.sleep(0.01)
        os.path.exists(path)
        """
    assert two.run(textwrap.dedent(source), push={"folder": str(tmp_path)}).values == [True, True]


def test_a_script_may_destroy_and_set_up_its_group_again(two):
    pids = two.pids
    run = runs(
        two,
        """
        def main():
            dist.init_process_group("gloo", rank=rank, world_size=world_size)
            x = torch.ones(2) * rank
            dist.all_reduce(x)
            dist.destroy_process_group()
            return x.tolist()
        dist.destroy_process_group()
        first = main()
        second = main()
        dist.init_process_group("gloo")
        first, second
        """,
    )
    assert run.values == [([1.0, 1.0], [1.0, 1.0])] * 2 and two.pids == pids


def test_init_process_group_with_other_numbers_says_what_to_do(two):
    error = fails(two, "dist.init_process_group('gloo', rank=rank, world_size=8)")
    assert "a rank cell has its ranks already" in str(error)


def test_init_process_group_on_one_rank_is_explained(two):
    error = fails(
        two, "dist.destroy_process_group()\nif rank == 0: dist.init_process_group('gloo')", Deadlock
    )
    assert "init_process_group" in str(error)


def test_groups_that_are_destroyed_give_their_descriptors_back(two):
    count = "import os; len(os.listdir('/proc/self/fd'))"
    make = (
        "g = dist.new_group([0, 1]); dist.all_reduce(torch.ones(2), group=g); dist.destroy_process_group(g)"
    )
    two.run(make)
    before = two.run(count).values
    for _ in range(8):
        two.run(make)
    assert two.run(count).values == before


def test_mp_spawn_of_a_cell_s_function_says_what_to_do(two):
    error = fails(two, "import torch.multiprocessing as mp\ndef main(r): pass\nmp.spawn(main, nprocs=2)")
    assert "call `main(rank, ...)` directly" in str(error)


# --- processes and threads of a cell ---


def test_a_dataloader_s_workers_know_what_cells_define(two):
    run = runs(
        two,
        """
        from torch.utils.data import DataLoader, Dataset
        class Squares(Dataset):
            def __len__(self): return 6
            def __getitem__(self, i): return torch.tensor(i * i)
        loader = DataLoader(Squares(), batch_size=3, num_workers=2, collate_fn=lambda rows: sum(rows))
        [int(x) for x in loader]
        """,
    )
    assert run.values == [[5, 50]] * 2


def test_an_error_in_a_dataloader_s_worker_is_shown(two):
    error = fails(
        two,
        """
        from torch.utils.data import DataLoader, Dataset
        class Broken(Dataset):
            def __len__(self): return 4
            def __getitem__(self, i): return 1 // (i - 2)
        list(DataLoader(Broken(), num_workers=1))
        """,
    )
    assert "ZeroDivisionError" in str(error)


def test_a_pool_by_spawn_runs_what_can_be_imported(two):
    source = (
        "import multiprocessing as mp, math\n"
        "with mp.get_context('spawn').Pool(1) as p: r = p.map(math.sqrt, [4])\nr"
    )
    assert runs(two, source).values == [[2.0]] * 2


@pytest.mark.parametrize(
    "source",
    [
        "with mp.get_context('spawn').Pool(1) as p: p.map(of_cell, [1])",
        "with mp.get_context('spawn').Pool(1) as p: p.map(len, [OfCell()])",
        "with ProcessPoolExecutor(1, mp_context=mp.get_context('spawn')) as p: list(p.map(of_cell, [1]))",
        "mp.get_context('spawn').Process(target=of_cell, args=(1,)).start()",
        "list(DataLoader(OfCell(), num_workers=1, multiprocessing_context='forkserver'))",
        "with mp.Pool(1) as p:\n    def of_cell_later(x): pass\n    p.map(of_cell_later, [1])",
    ],
)
def test_what_a_cell_defines_and_other_processes_lack_is_named(two, source):
    """A Pool would start a new process for each that ends while it reads its task, for ever."""
    head = """
import multiprocessing as mp
from concurrent.futures import ProcessPoolExecutor
from torch.utils.data import DataLoader
def of_cell(x): return x
class OfCell:
    def __len__(self): return 1
    def __getitem__(self, i): return i
"""
    said = str(fails(two, head + source))
    name = next(name for name in ("of_cell_later", "OfCell", "of_cell") if name in source)
    assert f"SpawnError: `{name}` was defined in a cell" in said and f"from mine import {name}" in said
    assert "RemoteTraceback" not in said


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("p.map(lambda x: x, [1])", "use `def` at the left margin"),
        (
            "old = Thing()\n    class Thing: pass\n    p.map(id, [old])",
            "make anew what was made with the old one",
        ),
    ],
)
def test_what_has_no_name_for_another_process_is_named(two, source, says):
    head = "import multiprocessing as mp\nclass Thing: pass\nwith mp.Pool(1) as p:\n    "
    said = str(fails(two, head + source))
    assert "cannot be sent to another process" in said and says in said and "0x" not in said


def test_processes_that_live_on_print_when_they_print(two):
    run = two.run(
        "from concurrent.futures import ProcessPoolExecutor\n"
        "def work(x): print('works on', x)\n"
        "pool = ProcessPoolExecutor(1)\nlist(pool.map(work, [rank]))"
    )
    assert [r.stdout for r in run.ranks] == ["works on 0\n", "works on 1\n"]
    two.run("pool.shutdown()")
    # what the rank has printed before is not printed by the fork once more
    forks = "import os\nprint('once')\nif (pid := os.fork()) == 0: os._exit(0)\nos.waitpid(pid, 0)\nprint('after')"
    assert [r.stdout for r in runs(two, forks).ranks] == ["once\nafter\n"] * 2


def test_bars_of_a_notebook_are_printed(two):
    run = runs(two, "import tqdm.notebook\nfor _ in tqdm.notebook.tqdm(range(3), desc='bar'): pass")
    assert all("bar: 100%" in r.stderr and not r.displays for r in run.ranks)
    run = runs(two, "from tqdm.notebook import trange\nwith trange(9) as bar: bar.update(5)")
    assert all(" 56%" in r.stderr for r in run.ranks)


def test_of_a_widget_its_text_is_shown(two):
    widget = """
class Widget:
    def _repr_mimebundle_(self, **_):
        return {"text/plain": "a slider", "application/vnd.jupyter.widget-view+json": {"model_id": "1"}}
display(Widget())
Widget()
"""
    for result in runs(two, widget).ranks:
        assert [shown.data for shown in result.displays] == [{"text/plain": "a slider"}]
        assert result.data == {"text/plain": "a slider"}


def test_what_a_cell_started_ends_with_its_rank():
    with rankcell.Ranks(2, device="cpu") as ranks:
        pids = ranks.run("import subprocess; p = subprocess.Popen(['sleep', '1000']); p.pid").values
        assert all(map(alive, pids))
    wait_for(lambda: not any(map(alive, pids)))


def test_what_a_cell_started_ends_with_a_killed_notebook(tmp_path):
    script = tmp_path / "notebook.py"
    script.write_text(
        "import os, signal, rankcell\n"
        "ranks = rankcell.Ranks(2, device='cpu')\n"
        "source = '''\n"
        "import subprocess\n"
        "from torch.utils.data import DataLoader\n"
        "p = subprocess.Popen(['sleep', '1000'])\n"
        "it = iter(DataLoader(list(range(100)), num_workers=1, persistent_workers=True)); next(it)\n"
        "[p.pid, it._workers[0].pid, os.getpid()]\n'''\n"
        "print(sum(ranks.run('import os\\n' + source).values, []), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    out = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    pids = eval(out.stdout)
    assert len(pids) == 6
    wait_for(lambda: not any(map(alive, pids)))


def test_a_rank_whose_child_holds_its_pipes_open_is_missed_at_once(two):
    source = "import os, time\nif rank == 1:\n    if os.fork(): os._exit(7)\n    else: time.sleep(1000)\ndist.barrier()"
    error = fails(two, source, RankLost)
    assert str(error).startswith("rank 1 of 2 left with exit code 7")


def test_a_real_time_signal_has_a_number(two):
    error = fails(two, "import os\nif rank == 1: os.kill(os.getpid(), 40)\ndist.barrier()", RankLost)
    assert "was ended by signal 40, for which it has no handler" in str(error)


def test_a_handler_for_interrupts_belongs_to_its_cell(two):
    two.run(
        "import signal\ndef mine(*_): raise SystemExit(3)\nsignal.signal(signal.SIGINT, mine)\nkept = rank"
    )
    pids = two.pids
    threading.Timer(0.4, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    with pytest.raises(RanksInterrupted):
        two.run("import time; time.sleep(60)")
    assert two.run("kept").values == [0, 1] and two.pids == pids


# --- exceptions ---


def test_an_exception_that_cannot_be_printed(two):
    pids = two.pids
    error = fails(two, "class Odd(Exception):\n    def __str__(self): raise ValueError\nraise Odd")
    assert "Odd" in str(error) and "__str__ failed" in str(error) and two.pids == pids


def test_a_memory_limit_of_the_cell_s_own(two):
    pids = two.pids
    error = fails(
        two,
        """
        import resource
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (1 << 20, hard))
        kept = [bytearray(1 << 20) for _ in range(1000)]
        """,
    )
    assert "MemoryError" in str(error) and two.pids == pids


def test_causes_and_members_are_shown(two):
    error = fails(two, "try:\n    {}['x']\nexcept KeyError as e:\n    raise ValueError('no x') from e")
    assert "ValueError: no x" in str(error) and "caused by: KeyError: 'x' (line 2)" in str(error)
    error = fails(two, "raise ExceptionGroup('both', [ValueError('a'), TypeError('b')])")
    assert "1 of 2: ValueError: a" in str(error) and "2 of 2: TypeError: b" in str(error)


def test_a_deep_recursion_is_short(two):
    error = fails(two, "def f(n): return f(n + 1)\nf(0)")
    assert (
        "RecursionError" in str(error) and "more calls" in str(error) and len(str(error).splitlines()) < 100
    )


def test_the_debugger_says_what_to_do_instead(two):
    for source in ("breakpoint()", "import pdb; pdb.set_trace()\nx = 1"):
        assert "Print what you want to see" in str(fails(two, source))


# --- names, sources, streams ---


def test_await_outside_a_function(two):
    run = runs(
        two, "import asyncio\nasync def f(): return rank\nx = await f()\nawait asyncio.sleep(0.01)\nx + 1"
    )
    assert run.values == [1, 2]


def test_a_semicolon_in_a_string_hides_nothing(two):
    assert two.run("'a;#b'").values == ["a;#b"] * 2
    assert two.run("1 + 1;  # quiet").values == [None] * 2


def test_a_loop_over_rank_does_not_outlive_its_cell(two):
    two.notes.clear()
    runs(two, "for rank in range(7): pass")
    assert two.run("rank").values == [0, 1]
    assert any("another value" in note and "`rank`" in note for note in two.notes)


@pytest.mark.parametrize(
    "what", ["sys.stdout = None", "sys.stdout.close()", "sys.stderr = 3", "sys.stdout = 'x'"]
)
def test_a_broken_stdout_is_mended_for_the_next_cell(two, what):
    pids = two.pids
    two.run(f"import sys; {what}")
    assert two.run("print('heard')").ranks[0].stdout == "heard\n" and two.pids == pids


def test_stdout_and_stderr_keep_their_order(two):
    from rankcell.draw import page

    run = two.run(
        "import sys\nfor i in range(3):\n    print('out', i)\n    print('err', i, file=sys.stderr)", only=[0]
    )
    text = page.as_text(run)
    assert [line.strip() for line in text.splitlines()[1:]] == [
        "out 0",
        "err 0",
        "out 1",
        "err 1",
        "out 2",
        "err 2",
    ]
    assert run.ranks[0].order and not two.run("print('of the next cell')", only=[0]).ranks[0].order


def test_output_between_two_cells_is_shown_with_the_next(two):
    two.run("import threading\ngo = threading.Event()")
    two.run(
        "t = threading.Thread(target=lambda: (go.wait(), print('late', flush=True)))\nt.start()", only=[0]
    )
    two.run("threading.Timer(0.1, go.set).start()", only=[0])
    two.run("rank", only=[1])  # what rank 0 says during a cell of others is kept too
    wait_for(lambda: (two._workers.pump(0.05), two._workers.received[0].stdout)[1])
    run = two.run("from IPython.display import HTML, display\nprint('now'); display(HTML('x'))", only=[0])
    assert run.ranks[0].stdout == "late\nnow\n" and run.ranks[0].displays[0].stdout_offset == 9


def test_a_flood_shows_its_head_and_its_tail(two):
    run = two.run("for i in range(700_000): print('line', i)", only=[0])
    text = run.ranks[0].stdout
    assert text.startswith("line 0\nline 1\n") and text.endswith("line 699999\n")
    assert "MB of output were not kept" in text and len(text) < 4 << 20


def test_an_updated_display_stays_in_its_place(two):
    run = two.run("h = display('old', display_id=True); print('then'); h.update('new')", only=[0])
    (shown,) = run.ranks[0].displays
    assert shown.data["text/plain"] == "'new'" and shown.stdout_offset == 0


def test_a_bar_of_each_rank_stands_there_once(two):
    run = two.run("from tqdm import tqdm\nfor _ in tqdm(range(2), position=rank): pass")
    assert [r.stderr.count("2/2") for r in run.ranks] == [1, 1] and "\x1b" not in run.ranks[1].stderr


def test_ranks_that_a_script_has_silenced_are_heard_in_the_next_cell(two):
    run = two.run("import os, sys\nif rank: sys.stdout = open(os.devnull, 'w')\nprint(rank)")
    assert [r.stdout for r in run.ranks] == ["0\n", ""]
    assert [r.stdout for r in two.run("print(rank)").ranks] == ["0\n", "1\n"]


def test_many_displays_keep_the_newest(two):
    run = two.run(
        "from IPython.display import display, Markdown\nfor i in range(1000): display(Markdown(str(i)))",
        only=[0],
    )
    shown = run.ranks[0].displays
    assert len(shown) <= 300 and shown[-1].data["text/markdown"] == "999"


def test_threads_that_display_do_not_mix_their_messages(two):
    pids = two.pids
    run = two.run(
        """
import threading
from IPython.display import HTML, display
threads = [threading.Thread(target=lambda i=i: display(HTML(str(i) * 300_000))) for i in range(6)]
[t.start() for t in threads]; [t.join() for t in threads];
""",
        only=[0],
    )
    assert (
        sorted(d.data["text/html"][0] for d in run.ranks[0].displays) == list("012345") and two.pids == pids
    )


def test_completion_runs_none_of_the_learner_s_code(two):
    two.run(
        "class A:\n    @property\n    def p(self): raise ValueError\n    def q(self): pass\n"
        "a = A(); net = torch.nn.Linear(2, 2)"
    )
    assert two.complete("a.p.") == [] and two.complete("a.q") == ["a.q"]
    assert "net.weight" in two.complete("net.we") and "net.weight.shape" in two.complete("net.weight.sha")
    error = fails(two, "if rank == 1: dist.barrier()", Deadlock)  # rank 0's control thread lives
    assert "rank 0 finished" in str(error)


def test_a_rank_that_does_not_read_makes_nobody_deaf(two):
    """Bytes that a stopped rank does not take wait here; Ctrl-C works meanwhile."""
    os.kill(two.pids[1], signal.SIGSTOP)
    pid = two.pids[1]
    threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    threading.Timer(2.0, lambda: os.kill(pid, signal.SIGCONT) if pid in two.pids else None).start()
    with pytest.raises(RanksInterrupted):
        two.run("len(big)", push={"big": bytes(30 << 20)})
    works(two)


def test_an_interrupt_that_is_read_late_ends_no_later_cell(two, tmp_path):
    """A rank that got no processor reads it when the cell that it was meant for is over."""
    seen = []

    def update(run, doing):
        seen.append(doing)
        if len(seen) == 1:
            for cell in ("an earlier one", "another"):
                two._host.send([1], pickle.dumps(Question(-1, "interrupt", cell)), control=True)
                two._host.send([1], pickle.dumps(Question(-1, "free", cell)), control=True)
        elif len(seen) == 3:  # ranks answer in order
            (tmp_path / "seen").touch()

    source = f"import pathlib, time\nwhile not pathlib.Path({str(tmp_path)!r}, 'seen').exists(): time.sleep(0.01)\nrank"
    assert two.run(source, on_update=update).values == [0, 1]


def test_a_stop_does_not_wait_for_a_cell_in_another_thread():
    ranks = rankcell.Ranks(2, device="cpu")
    ended = []

    def cell():
        try:
            ranks.run("import time; time.sleep(1000)")
        except BaseException as error:  # noqa: BLE001 - whatever it is, it must end
            ended.append(error)

    thread = threading.Thread(target=cell, daemon=True)
    thread.start()
    wait_for(lambda: ranks._workers.received and any(p.runs for p in ranks._workers.received.values()))
    start = time.monotonic()
    ranks.stop()
    assert time.monotonic() - start < 20
    thread.join(20)
    assert ended


# --- what a second round of odd programs found ---


def test_a_thread_that_waits_while_the_main_thread_computes_is_no_deadlock(two):
    runs(
        two,
        """
        import threading, time
        x, y = torch.zeros(2), torch.ones(2)
        if rank == 0:
            t = threading.Thread(target=lambda: dist.recv(x, 1)); t.start()
            time.sleep(1.2); dist.send(y, 1); t.join()
        else:
            dist.recv(x, 0); dist.send(y, 0)
        """,
    )


def test_a_thread_that_is_joined_and_waits_in_vain_is_a_deadlock(two):
    error = fails(
        two,
        """
        import threading
        if rank == 0:
            t = threading.Thread(target=lambda: dist.all_reduce(torch.ones(2))); t.start(); t.join()
        """,
        Deadlock,
    )
    assert "rank 1 finished the cell without the all_reduce that rank 0 waits in" in str(error)


def test_a_thread_that_serves_others_outlives_its_cell(two):
    serve = """
    import threading, time
    def serve():
        buffer = torch.zeros(2)
        for _ in range(3):
            dist.recv(buffer, 1); time.sleep(0.4)
    if rank == 0:
        server = threading.Thread(target=serve, daemon=True); server.start()
        time.sleep(0.3)  # the thread stands in recv when the cell ends
    """
    two.run(textwrap.dedent(serve))
    two.run("for _ in range(3): dist.send(torch.ones(2), 0)", only=[1])
    two.run("server.join()", only=[0])
    works(two)


@pytest.mark.parametrize("leaves", ["sys.exit(0)", "raise ValueError('child')", "print('child')"])
def test_a_forked_child_ends_where_its_cell_ends(two, leaves):
    two.run("kept = rank")
    pids = two.pids
    run = runs(
        two,
        f"import os, sys\npid = os.fork()\nif pid == 0:\n    {leaves}\nelse:\n    status = os.waitpid(pid, 0)[1]",
    )
    assert run.ranks[0].state == "ok" and two.pids == pids and two.run("kept").values == [0, 1]


def test_an_interrupt_during_a_repair_loses_nothing(two, monkeypatch):
    two.run("kept = rank")
    repair = two._repair

    def interrupted(lost):
        os.kill(os.getpid(), signal.SIGINT)
        repair(lost)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(two, "_repair", interrupted)
    fails(two, "if rank == 0: dist.barrier()", Deadlock)
    assert two.run("kept").values == [0, 1]


def test_what_held_an_earlier_group_says_so(two):
    two.run(
        "from torch.nn.parallel import DistributedDataParallel\nm = DistributedDataParallel(torch.nn.Linear(4, 4))"
    )
    fails(two, "if rank == 0: dist.barrier()", Deadlock)
    error = fails(two, "m(torch.ones(2, 4)).sum().backward()")
    assert "must be made anew" in str(error) and "127.0.0.1" not in str(error)


@pytest.mark.parametrize(
    "call",
    [
        "dist.all_reduce(torch.ones(1), group=old)",
        "dist.broadcast(torch.ones(1), 0, group=old)",
        "dist.get_rank(old)",
    ],
)
def test_an_earlier_group_says_so_on_all_ranks_alike(two, call):
    two.run("old = dist.new_group([0, 1])")
    fails(two, "if rank == 0: dist.barrier()", Deadlock)
    said = str(fails(two, call))
    assert said.startswith("ranks 0, 1 of 2 failed alike: ValueError: ")
    assert "must be made anew" in said and " at 0x" not in said and "while handling" not in said


LIKE_BEFORE = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"]
w = distribute_tensor(torch.arange(16.0).view(4, 4), mesh, [Shard(1)]).requires_grad_()
x = DTensor.from_local(torch.ones(3, 4), mesh, [Replicate()])
loss = (x @ w).redistribute(mesh, [Replicate()]).square().sum()
loss.backward()
loss.full_tensor().item()
"""


def test_a_mesh_like_one_of_an_earlier_world_has_groups_of_its_own(four):
    """DTensor keeps what it has worked out for a mesh, and takes a mesh of the same shape for the same."""
    more = (
        "more = [dist.new_group() for _ in range(3)]\n"  # so that the groups of the meshes have other names
    )
    assert four.run(more + LIKE_BEFORE).values == [11040.0] * 4
    fails(four, "if rank == 0: dist.barrier()", Deadlock)
    assert four.run(LIKE_BEFORE).values == [11040.0] * 4
    assert four.run(more + LIKE_BEFORE).values == [11040.0] * 4
    again = "dist.destroy_process_group()\ndist.init_process_group()\n"
    assert four.run(again + LIKE_BEFORE).values == [11040.0] * 4


def test_a_store_that_was_cleaned_away_is_made_again(two):
    import shutil

    shutil.rmtree(two._host._folder)
    fails(two, "if rank == 0: dist.barrier()", Deadlock)


def test_a_monitored_barrier_ends_its_wait_itself(two):
    run = runs(
        two,
        """
        from datetime import timedelta
        gave_up = False
        if rank == 0:
            try:
                dist.monitored_barrier(timeout=timedelta(seconds=1))
            except RuntimeError:
                gave_up = True
        gave_up
        """,
    )
    assert run.values == [True, False]


def test_an_interrupt_of_the_program_s_own(two):
    run = runs(
        two,
        """
        import signal
        try:
            signal.raise_signal(signal.SIGINT)
            heard = False
        except KeyboardInterrupt:
            heard = True
        heard
        """,
    )
    assert run.values == [True, True]


def test_an_alarm_belongs_to_its_cell(two):
    pids = two.pids
    two.run(
        "import signal\nsignal.signal(signal.SIGALRM, lambda *_: 1 / 0)\nsignal.setitimer(signal.ITIMER_REAL, 0.2)"
    )
    time.sleep(0.4)
    works(two)
    assert two.pids == pids


def test_ranks_that_come_later_know_the_same_port(two):
    fails(two, "import os\nif rank == 0: os._exit(1)\ndist.barrier()", RankLost)
    assert len(set(two.run("import os; os.environ['MASTER_PORT']").values)) == 1


def test_deleted_names_come_back(two):
    two.run("del rank, torch, dist")
    assert two.run("(rank, torch.ones(1).item(), dist.get_world_size())").values == [(0, 1.0, 2), (1, 1.0, 2)]


@pytest.mark.parametrize("call", ["dist.send(torch.ones(2), 5)", "dist.send(torch.ones(2), -1)"])
def test_a_rank_that_does_not_exist(two, call):
    assert "this group has the ranks [0, 1]" in str(fails(two, call)) or "nvalid" in str(fails(two, call))


def test_an_exception_with_an_odd_cause(two):
    pids = two.pids
    fails(
        two, "class Odd(Exception):\n    @property\n    def __cause__(self): raise KeyError\nraise Odd('x')"
    )
    assert two.pids == pids


def test_a_value_that_ends_its_reader(two):
    run = two.run("class Ends:\n    def __reduce__(self): return (exit, (3,))\nEnds()")
    assert "cannot be read here" in run.values[0].reason
    works(two)


def test_a_display_that_fails_ends_no_cell(two):
    def broken(run, doing):
        raise ValueError

    assert two.run("import time; time.sleep(0.5); rank", on_update=broken).values == [0, 1]


def test_values_of_sparse_tensors_are_not_asked_for(two):
    run = two.run("x = torch.eye(3).to_sparse(); dist.all_reduce(x); x.to_dense().sum().item()", values=True)
    assert run.values == [6.0, 6.0]


def test_counts_that_are_begun_anew_stay_in_step(two):
    """A program may use any number of tags; a cell for some ranks in between must not part them."""
    from rankcell.engine.workers import MANY_COUNTS

    call = "(dist.send if rank == 0 else dist.recv)(torch.ones(1), 1 - rank, tag=t)"
    many = f"for t in range({MANY_COUNTS + 1}): {call}"
    two.run(many)
    assert two._workers.can_reset_counts
    two.run("1", only=[0])
    works(two)
    two.run(many)
    works(two)  # all ranks begin anew here
    assert all(len(counts) < 10 for counts in two._workers.counts.values())
