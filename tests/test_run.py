"""`rankcell run` on real jobs and on some of the generated ones of `hanging_jobs.py`; `rankcell attach` with py-spy."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import hanging_jobs
import nccl_stand_in
from rankcell.jobs import attach

HERE = Path(__file__).parent
LIB = str(HERE.parent / "lib")
RUN = [sys.executable, "-m", "rankcell.command", "run"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
SKIPS = """
import sys
import sitecustomize
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
x = torch.ones(8)
dist.all_reduce(x)
if rank == 1:
    sys.exit()
dist.all_reduce(x)
"""
SPAWNS = """
import os
import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def main(rank, port):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    if rank == 1:
        raise ValueError("a bad batch")
    dist.all_reduce(torch.ones(8))


if __name__ == "__main__":
    mp.spawn(main, (int(os.environ["PORT"]),), nprocs=2)
"""


def started(command, folder, **environment):
    """The command, its exit code and what it printed, in a folder of its own."""
    path = f"{folder}{os.pathsep}{LIB}"
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_an_unchanged_script_under_torchrun(tmp_path):
    """The verdict is printed once, its files are there, and the program's own sitecustomize ran."""
    (tmp_path / "train.py").write_text(SKIPS)
    (tmp_path / "sitecustomize.py").write_text("ran = True")
    done = started([*RUN, "--report", "report", "--", *TORCHRUN, "--nproc-per-node=2", "train.py"], tmp_path)
    line = "rankcell: rank 1 finished the script without the all_reduce that rank 0 waits in."
    assert done.returncode != 0 and done.stderr.count(line) == 1, done.stderr
    assert "waits in all_reduce(float32[8]) (call 2 of the world, line 13 of train.py)" in done.stderr
    assert "rank 0:\n  File" in done.stderr and "dist.all_reduce(x)" in done.stderr.partition(line)[2]
    assert sorted(p.name for p in (tmp_path / "report").iterdir()) == [
        "rank-0.json",
        "rank-1.json",
        "verdict.txt",
    ]
    again = started([sys.executable, "-m", "rankcell.command", "explain", "report"], tmp_path)
    assert line in again.stdout


ENQUEUES = """
import torch
import torch.distributed as dist

dist.init_process_group("stand_in")
rank = dist.get_rank()
x = torch.ones(8)
for step in range(3):
    if rank == 0 or step < 2:
        dist.all_reduce(x)
print("rank", rank, "has", x.tolist(), flush=True)
"""


def test_ranks_on_other_nodes_leave_no_folder_behind(tmp_path):
    """One finishes, the other one is ended: what they wrote stacks into goes with both. (The nodes are pretended.)

    Rank 1 is slow to go, so that the runner ends it, and rank 0 is slow to end, so that torchrun ends it before.
    """
    apart = (
        "import time\n"
        "from rankcell.jobs import inside\n"
        "inside.host = lambda: inside.os.environ['RANK']\n"
        "if inside.os.environ['RANK'] == '0':\n"
        "    answer = inside.Inside._answer\n"
        "    def slowly(self, question):\n"
        "        time.sleep(5 * (question.about == 'end'))\n"
        "        return answer(self, question)\n"
        "    inside.Inside._answer = slowly\n"
        "else:\n"
        "    end, inside.Inside.end = inside.Inside.end, lambda self: end(self) or time.sleep(20)\n"
    )
    (tmp_path / "train.py").write_text(apart + SKIPS.replace("import sitecustomize\n", ""))
    (tmp_path / "tmp").mkdir()
    command = [*RUN, "--", *TORCHRUN, "--nproc-per-node=2", "train.py"]
    done = started(command, tmp_path, TMPDIR=str(tmp_path / "tmp"))
    assert "rank 1 finished the script" in done.stderr, done.stderr
    assert not list((tmp_path / "tmp").glob("rankcell-*"))


def test_a_hang_where_calls_only_enqueue(tmp_path):
    """On the stand-in for nccl: rank 0 hangs where it reads the numbers, and is told of the call that is missed."""
    (tmp_path / "train.py").write_text(ENQUEUES)
    path = os.pathsep.join([nccl_stand_in.install(tmp_path / "stand_in"), str(tmp_path), LIB])
    command = [*RUN, "--", *TORCHRUN, "--nproc-per-node=2", "train.py"]
    done = started(command, tmp_path, PYTHONPATH=path, RANKCELL_STAND_IN=str(tmp_path / "meet"))
    line = "rankcell: rank 1 finished the script without the all_reduce that rank 0 waits in."
    assert done.returncode != 0 and done.stderr.count(line) == 1, done.stderr
    assert "rank 0  waits in all_reduce(float32[8]) (call 3 of the world, line 10 of train.py)" in done.stderr
    assert "rank 1 has [4.0" in done.stdout and "rank 0 has" not in done.stdout


def test_a_rank_whose_connection_broke_is_shown_where_it_waited(tmp_path):
    """Who has left may be gone before the verdict: then the others' operation fails, and they wait no more.

    How it ended is known until torchrun has asked the kernel for it, which on a busy machine may come first.
    """
    (tmp_path / "train.py").write_text(SKIPS.replace("    sys.exit()", "    import os; os._exit(0)"))
    (tmp_path / "sitecustomize.py").write_text("ran = True")
    done = started([*RUN, "--", *TORCHRUN, "--nproc-per-node=2", "train.py"], tmp_path)
    verdict = done.stderr.partition("rankcell: ")[2].partition("[rank0]")[0]  # without torch's own traceback
    assert verdict.startswith(
        (
            "rank 1 finished the script without the all_reduce that rank 0 waits in.",
            "rank 1 of 2 ended without a word: it was killed, or called os._exit, and rank 0 waits in all_reduce.",
        )
    ), verdict
    assert "rank 0:\n  File" in verdict and "line 13, in <module>\n    dist.all_reduce(x)" in verdict


def test_ranks_that_a_program_spawns_itself(tmp_path):
    (tmp_path / "train.py").write_text(SPAWNS)
    port = hanging_jobs.free_port()
    done = started([*RUN, "--", sys.executable, "train.py"], tmp_path, PORT=str(port))
    assert done.returncode != 0
    assert done.stderr.count("rankcell: rank 1 of 2 failed: ValueError: a bad batch") == 1, done.stderr
    assert 'raise ValueError("a bad batch")' in done.stderr


def test_each_rank_may_have_a_runner_of_its_own(tmp_path):
    """As in `srun rankcell run -- python train.py`: the runner of task 0 speaks for all."""
    (tmp_path / "train.py").write_text(SKIPS)
    (tmp_path / "sitecustomize.py").touch()
    step = {"SLURM_JOB_ID": f"test{os.getpid()}", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(hanging_jobs.free_port())}
    with ThreadPoolExecutor() as pool:
        both = [
            pool.submit(
                started,
                [*RUN, "--", sys.executable, "train.py"],
                tmp_path,
                **step,
                **place,
                RANK=str(r),
                SLURM_PROCID=str(r),
            )
            for r in range(2)
        ]
        first, second = (one.result() for one in both)
    line = "rankcell: rank 1 finished the script without the all_reduce that rank 0 waits in."
    assert first.stderr.count(line) == 1 and line not in second.stderr, (first, second)
    assert first.returncode != 0 and second.returncode == 0


def test_a_program_without_torch_is_left_alone(tmp_path):
    source = "import sys; print([m for m in sys.modules if m.startswith(('rankcell', 'torch', 'json'))])"
    done = started([*RUN, "--", sys.executable, "-c", source], tmp_path)
    assert done.returncode == 0 and done.stdout == "[]\n"
    assert "no rank has reported" in done.stderr
    assert started([*RUN, "--", sys.executable, "-c", "raise SystemExit(7)"], tmp_path).returncode == 7
    assert started([*RUN, "--", "no-such-program"], tmp_path).returncode == 127
    assert started(RUN, tmp_path).returncode == 2


def test_the_runner_imports_no_more_than_it_needs(tmp_path):
    """It takes a core from the ranks for as long as it starts."""
    source = (
        "import sys\nfrom rankcell.command import main\nmain(['run', '--', 'true'])\n"
        "print([m for m in ('torch', 'numpy', 'IPython', 'rankcell.engine.record') if m in sys.modules])"
    )
    assert started([sys.executable, "-c", source], tmp_path).stdout == "[]\n"


TRAINS = """
import hashlib
import json
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from rankcell import models

torch.manual_seed(0)
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
tokens = models.encode(models.text())
model = DistributedDataParallel(models.GPT(49, d_model=32, n_layers=2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
losses = []
for x, y in models.batches(tokens, 12, size=8, rank=rank, world_size=size):
    optimizer.zero_grad()
    loss = models.cross_entropy(model(x), y)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    total = loss.detach().clone()
    dist.all_reduce(total)
    losses.append(total.item().hex())
bits = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
told = "recorded" if "rankcell.jobs.inside" in sys.modules else "plain"
with open(f"{told}-{rank}.json", "w") as file:
    json.dump([losses, hashlib.sha256(bits).hexdigest(), torch.rand(1).item()], file)
dist.destroy_process_group()
"""


def test_losses_and_weights_are_those_of_a_plain_run(tmp_path):
    """Bit by bit, on both ranks, and the random state after the training too; and what the ranks did is kept."""
    (tmp_path / "train.py").write_text(TRAINS)
    job = [*TORCHRUN, "--nproc-per-node=2", "train.py"]
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "rank-7.json").write_text("of an earlier job")
    for command in (job, [*RUN, "--report", "report", "--", *job]):
        done = started(command, tmp_path)
        assert done.returncode == 0, done.stderr
    explained = started([sys.executable, "-m", "rankcell.command", "explain", "report"], tmp_path)
    assert "\nrankcell: all 2 ranks have finished.\n" in explained.stdout, explained
    assert "ranks 0, 1  finished the script after" in explained.stdout
    for rank in range(2):
        plain, recorded = (
            json.loads((tmp_path / f"{w}-{rank}.json").read_text()) for w in ("plain", "recorded")
        )
        assert plain == recorded and len(set(plain[0])) == 12


# A few kinds that differ most in how they are found; `python tests/hanging_jobs.py` runs all hundred.
CHOSEN = (
    "hang: a lock",
    "hang: a worker of a DataLoader",
    "hang: another group first",
    "mismatch: another dtype",
    "dies: a crash in C",
    "slow: computes longer than the limit",
)


@pytest.fixture(scope="module")
def tried(tmp_path_factory):
    """Those jobs, run one after the other by a process that has imported torch once; by name."""
    names = [job.name for job in hanging_jobs.generate()]
    numbers = [str(names.index(name)) for name in CHOSEN]
    command = [sys.executable, str(HERE / "hanging_jobs.py"), "--only", *numbers]
    done = started(command, tmp_path_factory.mktemp("jobs"))
    assert done.returncode == 0, done.stderr
    return {row["name"]: row for row in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("name", CHOSEN)
def test_rank_and_line_of_generated_jobs(tried, name):
    assert tried[name]["rank"] and tried[name]["line"], tried[name]


def test_the_generated_jobs_are_the_same_each_time_and_of_every_kind():
    jobs = hanging_jobs.generate()
    assert jobs == hanging_jobs.generate() and len(jobs) == 100
    assert {j.nodes for j in jobs} == {1, 2} and {2, 16} <= {j.world_size for j in jobs}
    assert {j.name.partition(":")[0] for j in jobs} == set(hanging_jobs.KINDS)
    for job in jobs:
        assert bool(job.lines) == bool(job.culprits), job.name
        compile(job.source, "train.py", "exec")


def test_a_wrong_verdict_is_found_wrong():
    """The judge of the hundred jobs: another rank, more ranks than to blame, another line, and a false alarm count."""
    from rankcell.jobs.verdict import Verdict

    job = next(j for j in hanging_jobs.generate() if j.name == "hang: a lock")
    (culprit,), (line,) = job.culprits, job.lines

    def said(ranks, at):
        return hanging_jobs.right(job, Verdict("still", ranks, "", places=(("/x/train.py", at),)))

    assert said((culprit,), line) == (True, True)
    other = (culprit + 1) % job.world_size
    assert said((other,), line)[0] is False and said((culprit, other), line)[0] is False
    assert said((culprit,), line + 1)[1] is False and hanging_jobs.right(job, None) == (False, False)
    slow = next(j for j in hanging_jobs.generate() if j.name.startswith("slow"))
    assert hanging_jobs.right(slow, None) == (True, True)
    assert hanging_jobs.right(slow, Verdict("still", (0,), "")) == (False, False)


STANDS = """
import sys, threading

def all_reduce():  # as torch's: in a file of torch/distributed
    threading.Event().wait()
"""


def test_attach_to_processes_that_hang(tmp_path):
    """Processes with the stacks of ranks, without torch: two stand in a collective, one in a lock."""
    try:
        attach.stack_of(os.getpid())
    except attach.Unseen as reason:  # a container, or yama, may forbid it
        pytest.skip(str(reason))
    package = tmp_path / "torch" / "distributed"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package.parent / "__init__.py").touch()
    (package / "distributed_c10d.py").write_text(STANDS)
    (tmp_path / "train.py").write_text(
        "import os, threading\nfrom torch.distributed import distributed_c10d as dist\nprint('here', flush=True)\n"
        "if os.environ['RANK'] == '1':\n    threading.Event().wait()\ndist.all_reduce()\n"
    )
    ranks = [
        subprocess.Popen(
            [sys.executable, "train.py"], cwd=tmp_path, stdout=subprocess.PIPE,
            env={**os.environ, "RANK": str(r), "WORLD_SIZE": "3", "PYTHONPATH": str(tmp_path)},
        )
        for r in range(3)
    ]  # fmt: skip
    try:
        for rank in ranks:
            assert rank.stdout.readline() == b"here\n"
        time.sleep(0.5)
        command = [sys.executable, "-m", "rankcell.command", "attach", *(str(r.pid) for r in ranks)]
        done = subprocess.run(
            command, env={**os.environ, "PYTHONPATH": LIB}, capture_output=True, text=True, check=False
        )
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert "rank 1 stands at line 5 of train.py, and ranks 0, 2 wait for it in all_reduce." in done.stdout, (
        done
    )
    assert "do not number operations" in done.stdout and "flight recorder is off" in done.stdout


def test_attach_says_what_is_missing(tmp_path, monkeypatch):
    command = [sys.executable, "-m", "rankcell.command", "attach"]
    assert started(command, tmp_path).returncode == 2
    none = started([*command, "999999999"], tmp_path)
    assert none.returncode == 1 and "there is no process 999999999 on this machine." in none.stderr
    assert re.search(
        "there is no srun here|Slurm has no running job", started([*command, "--job", "7"], tmp_path).stderr
    )
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    with pytest.raises(attach.Unseen, match="`pip install py-spy`, or rankcell with its extra `attach`"):
        attach.spy()


def test_what_the_nodes_of_a_job_say_arrives_whole_or_is_asked_for_again(tmp_path, monkeypatch):
    """srun may mix the lines of two nodes, or write what is no text between them."""
    told = [{"records": [], "said": [f"node {n}: " + "x" * 2000]} for n in range(2)]
    one, two = (attach._lines(each, str(n)) for n, each in enumerate(told))
    assert max(map(len, one)) < 600
    mixed = [line for pair in zip(one, two, strict=True) for line in pair]
    assert attach._told("\n".join(["a line of srun", *mixed])) == told
    for damaged in (mixed[:-1], [line.replace("eHh4", "e\ufffdh4") for line in mixed]):
        with pytest.raises(ValueError):
            attach._told("\n".join(damaged))
    asked = tmp_path / "asked"
    for name, lines in (
        ("squeue", ["echo 7 RUNNING 2"]),
        (
            "srun",
            [
                f"echo x >> {asked}",
                f'[ "$(wc -l < {asked})" = 1 ] && printf "\\255\\n"',
                f"cat {tmp_path}/$?",
            ],
        ),
    ):
        (tmp_path / name).write_text("\n".join(["#!/bin/sh", *lines]) + "\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "0").write_text("\n".join(mixed[:-1]))  # when it is asked first
    (tmp_path / "1").write_text("\n".join(mixed))
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(attach.Unseen, match="nothing of job 7 can be seen: node 0"):
        attach.of_job("7")
    assert asked.read_text() == "x\nx\n"
    (tmp_path / "1").write_text("\n".join(mixed[:-1]))
    with pytest.raises(attach.Unseen, match="arrived damaged 3 times"):
        attach.of_job("7")
