"""Ranks are real processes with names that persist; what they say and return comes back by rank."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch

import rankcell
from rankcell import errors
from rankcell.engine import devices, forks, system
from rankcell.results import NotSent


def scaled(factor):
    """Needs `rank` and `dist` as a rank cell has them."""
    import torch.distributed as dist

    return dist.get_rank() * factor


def test_every_rank_is_a_process_of_its_own(four):
    pids = four.run("import os; os.getpid()").values
    assert len(set(pids)) == 4 and os.getpid() not in pids and pids == four.pids


def test_the_process_group_is_there(four):
    run = four.run("x = torch.ones(3, device=device) * rank\ndist.all_reduce(x)\nx")
    assert all(torch.equal(v, torch.full((3,), 6.0)) for v in run.values)
    assert (run.backend, run.device, run.world_size) == ("gloo", "cpu", 4)


def test_names_persist_from_cell_to_cell(four):
    four.run("kept = rank + 10")
    assert four.run("kept").values == [10, 11, 12, 13]


def test_stdout_stderr_and_value_come_back_by_rank(four):
    run = four.run("import sys\nprint('out', rank)\nprint('err', rank, file=sys.stderr)\nrank ** 2")
    assert (
        run.ranks[2].stdout == "out 2\n" and run.ranks[3].stderr == "err 3\n" and run.values == [0, 1, 4, 9]
    )


def test_output_of_c_code_and_of_subprocesses_is_caught(four):
    run = four.run(
        "import os\nprint('a', flush=True)\nos.system('echo from a shell')\nos.write(1, b'raw\\n');"
    )
    assert run.ranks[1].stdout == "a\nfrom a shell\nraw\n"


def test_a_semicolon_hides_the_value(four):
    assert four.run("1 + 1;").values == [None] * 4


def test_a_subset_of_the_ranks(four):
    run = four.run("rank", only=[1, 3])
    assert run.values == [1, 3] and run.ranks[0].state == "skipped" and run.ranks[3].value == 3


def test_push_and_pull(four):
    run = four.run("there = here * rank", push={"here": torch.arange(2)}, pull=["there"])
    assert [t.tolist() for t in run.pulled["there"]] == [[0, 0], [0, 1], [0, 2], [0, 3]]


def test_a_pulled_slice_does_not_carry_its_whole_tensor(four):
    run = four.run("big = torch.zeros(1000, 1000); row = big[0]", pull=["row"])
    assert run.pulled["row"][0].untyped_storage().nbytes() == 4000


def test_a_value_with_a_graph_comes_back_as_plain_numbers(four):
    run = four.run("w = torch.ones(2, requires_grad=True); w * 2")
    assert not run.values[0].requires_grad and run.values[0].tolist() == [2.0, 2.0]


def test_a_value_that_cannot_travel_says_why(four):
    value = four.run("import threading; threading.Lock()").values[0]
    assert isinstance(value, NotSent) and "cannot be sent" in value.reason and "lock" in repr(value)


def test_a_value_too_large_to_travel_says_so_and_can_be_pulled(four):
    run = four.run("large = torch.zeros(5 << 20); large", only=[0], pull=["large"])
    assert "larger than 16 MiB" in run.ranks[0].value.reason and run.pulled["large"][0].numel() == 5 << 20


def test_a_function_of_a_module_and_a_local_function(four):
    assert four.run(scaled, args=(3,)).values == [0, 3, 6, 9]

    class Net(torch.nn.Linear):
        pass

    def local(width):
        return rank, Net(width, 1).in_features  # noqa: F821 - lent by the rank

    assert four.run(local, kwargs={"width": 5}).values == [(r, 5) for r in range(4)]


def test_run_makes_a_world_for_one_call():
    assert rankcell.run(scaled, world_size=2, args=(2,)).values == [0, 2]


def test_a_script_needs_no_main_guard_and_its_functions_travel(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import torch.distributed as dist
        import rankcell
        print("script runs")
        def total():
            return sum([dist.get_rank()] * 2)
        print(rankcell.run(total, world_size=2).values)
        """)
    )
    out = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert out.stdout == "script runs\n[0, 2]\n", out.stderr


def test_environment_variables_are_those_of_torchrun(four):
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"]
    run = four.run(f"import os; [os.environ[n] for n in {names}]")
    assert run.values[2] == ["2", "4", "2", "4", "127.0.0.1"]


def test_one_thread_per_rank_and_the_slow_parts_are_loaded(four):
    run = four.run("import sys; (torch.get_num_threads(), 'torch._dynamo' in sys.modules)")
    assert run.values == [(1, True)] * 4


def test_rich_displays_keep_their_place_between_prints(four):
    run = four.run(
        "from IPython.display import HTML, display\nprint('a')\ndisplay(HTML('<b>x</b>'))\nprint('b')"
    )
    (shown,) = run.ranks[0].displays
    assert shown.data["text/html"] == "<b>x</b>" and shown.stdout_offset == 2


def test_magics_work_inside_a_rank_cell(four):
    run = four.run("get_ipython().run_line_magic('pwd', '')")
    assert run.values == [str(Path.cwd())] * 4


def test_a_dataloader_with_workers_runs_on_a_rank(four):
    source = """
    from torch.utils.data import DataLoader, TensorDataset
    data = TensorDataset(torch.arange(6))
    [b[0].tolist() for b in DataLoader(data, batch_size=3, num_workers=1)]
    """
    assert four.run(textwrap.dedent(source), only=[0]).values == [[[0, 1, 2], [3, 4, 5]]]


def test_many_lines_are_all_kept(four):
    run = four.run("for i in range(100_000): print('line', i)")
    assert all(r.stdout.count("\n") == 100_000 and r.stdout.endswith("line 99999\n") for r in run.ranks)


def test_updates_come_while_the_cell_runs(four):
    seen = []
    source = "import time\nprint('first', flush=True)\ntime.sleep(0.8)"
    four.run(source, on_update=lambda run, doing: seen.append((run.ranks[0].stdout, doing)))
    assert ("first\n", "ranks 0-3 computing") in seen


def test_who_waits_is_shown_while_the_cell_runs(four):
    seen = []
    source = "import time\nif rank == 2: time.sleep(0.8)\ndist.barrier()"
    four.run(source, on_update=lambda run, doing: seen.append(doing))
    assert "ranks 0, 1, 3 waiting in barrier, rank 2 computing" in seen


def test_worlds_of_different_sizes_live_side_by_side(four):
    with rankcell.Ranks(2) as two:
        assert two.run("world_size").values == [2, 2] and four.run("world_size").values == [4] * 4


def test_restart_gives_fresh_ranks():
    with rankcell.Ranks(2) as ranks:
        ranks.run("x = 1")
        before = ranks.pids
        ranks.restart()
        assert not set(before) & set(ranks.pids)
        assert ranks.run("'x' in globals()").values == [False, False]
        assert ranks.run("y = torch.ones(1); dist.all_reduce(y); y.item()").values == [2.0, 2.0]


def test_a_stopped_world_says_so_and_its_processes_are_gone():
    ranks = rankcell.Ranks(2)
    pids = ranks.pids
    ranks.stop()
    ranks.stop()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    with pytest.raises(RuntimeError, match=r"this world was stopped\. Start another one"):
        ranks.run("1")


def test_rank_that_dies_between_cells_is_replaced():
    with rankcell.Ranks(2) as ranks:
        ranks.run("x = rank")
        os.kill(ranks.pids[1], signal.SIGKILL)
        time.sleep(0.2)
        run = ranks.run("y = torch.ones(1); dist.all_reduce(y); (y.item(), 'x' in globals())")
        assert run.values == [(2.0, True), (2.0, False)]
        assert ranks.notes == [
            "rank 1 ended between two cells and was replaced: names defined there are gone."
        ]


def test_completion_knows_the_names_of_rank_0(four):
    four.run("grad_norm = torch.ones(2)")
    assert "grad_norm" in four.complete("grad") and "grad_norm.shape" in four.complete("grad_norm.sh")


def test_the_work_of_two_threads_is_done_one_after_the_other(four):
    results = []
    threads = [threading.Thread(target=lambda: results.append(four.run("rank").values)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert results == [[0, 1, 2, 3]] * 3


def test_nothing_listens_beyond_this_machine(four):
    if not system.LINUX:
        pytest.skip("reads /proc/net")
    inodes = {
        target[8:-1]
        for pid in [*four.pids, os.getpid()]
        for fd in Path(f"/proc/{pid}/fd").iterdir()
        if (target := _link(fd)).startswith("socket:[")
    }
    listening = []
    for name in ("tcp", "tcp6"):
        for row in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = row.split()
            if fields[3] == "0A" and fields[9] in inodes:
                listening.append(fields[1].split(":")[0])
    assert listening and set(listening) == {"0100007F"}  # 127.0.0.1


def _link(path):
    try:
        return str(path.readlink())
    except OSError:
        return ""


def test_a_gpu_world_needs_a_gpu_per_rank():
    if torch.cuda.device_count() >= 2:
        pytest.skip("this machine has GPUs")
    choice = devices.choose(2, "auto", devices.look())
    assert (choice.device, choice.backend) == ("cpu", "gloo")


def test_ranks_that_do_not_start_over_the_best_backend_take_the_next(monkeypatch):
    """nccl does not start on this machine's CPU; what stands in its place does."""
    less = devices.Choice("cpu", "gloo", "gloo instead")
    best = devices.Choice("cpu", "nccl", "nccl, as if there were GPUs", shared=2, instead=less)
    monkeypatch.setattr(devices, "choose", lambda *_: best)
    with rankcell.Ranks(2) as ranks:
        assert (ranks.backend, ranks.device_note) == ("gloo", "gloo instead")
        assert ranks.notes[0].startswith("The ranks did not start over nccl, as if there were GPUs: ")
        assert ranks.run("dist.get_backend()").values == ["gloo"] * 2


def test_the_end_of_a_world_says_nothing():
    """With a CUDA build of torch a library of triton could print what it has not freed."""
    code = "import rankcell\nwith rankcell.Ranks(2) as ranks: print(ranks.run('rank').values)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (run.stdout, run.stderr) == ("[0, 1]\n", "")


@pytest.mark.gpu
def test_ranks_start_although_cuda_was_used_here():
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    torch.ones(1, device="cuda")
    size = torch.cuda.device_count()
    with rankcell.Ranks(size) as ranks:
        run = ranks.run("x = torch.ones(1, device=device); dist.all_reduce(x); x.item()")
        assert ranks.backend == "nccl" and run.values == [float(size)] * size


@pytest.mark.skipif(os.geteuid() != 0, reason="plays another user, which only root can")
def test_another_user_is_refused(four):
    store = Path(four._host.address_for(0))
    script = f"""
import os
os.setuid(65534)
try:
    os.listdir({str(store)!r})
except PermissionError:
    print("refused")
for pid in {four.pids}:
    try:
        os.listdir(f"/proc/{{pid}}/fd")
    except PermissionError:
        print("refused")
"""
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd="/", check=False)
    assert out.stdout.split() == ["refused"] * 5, out.stderr
    assert store.stat().st_mode & 0o077 == 0


def test_the_channels_of_a_rank_have_no_name(four):
    """A rank talks over unnamed socket pairs: there is nothing that another process could connect to."""
    for member in four._host._members.values():
        assert member.work.socket.getsockname() == "" and member.control.socket.getsockname() == ""


def test_a_process_for_torch_that_ends_is_told_with_what_it_said(monkeypatch):
    """It may end before it has heard of the ranks, or after: both have the same message."""
    code = "import os, sys, time; os.read(int(sys.argv[1]), 1); time.sleep({}); sys.exit('no torch here')"
    for wait in (0, 0.5):
        monkeypatch.setattr(forks, "_CODE", code.format(wait))
        server = forks.ForkServer()
        with pytest.raises(errors.StartError, match=r"(?s)ended \(exit code 1\)\.\nno torch here"):
            server.fork([(None, [])])
        server.close()


def test_who_waits_for_torch_hears_each_second_that_it_is_imported():
    """The process says when it has imported torch; one that ends first keeps nobody waiting, `fork` says why."""
    begin = (
        "import json, socket, sys, time; sys.path[:] = json.loads(sys.argv[2]); "
        "from rankcell.engine.channel import Channel; channel = Channel(socket.socket(fileno=int(sys.argv[1]))); "
    )
    for code, least in (
        ("time.sleep(2.5); channel.send(('ready', 0, 0)); channel.receive()", 2),
        ("time.sleep(1.5); sys.exit('no torch here')", 1),
    ):
        server, heard = forks.ForkServer(), []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(forks, "_CODE", begin + code)
            server.wait(heard.append)
            assert len(heard) >= least and heard == sorted(heard) and heard[0] >= 1
            if "ready" in code:
                del heard[:]
                server.wait(heard.append)
                assert heard == []
            else:
                with pytest.raises(errors.StartError, match="no torch here"):
                    server.fork([(None, [])])
        server.close()
