"""A real Slurm, two nodes of it: what is left of a job, and of a cluster, when somebody ends it.

That arrays, restarts, preempted jobs, lost nodes and exported lessons end as they should is checked by
lessons 16 and 17, which run on the same cluster with `make test`.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import mini_slurm
from rankcell.cluster import scripts
from rankcell.cluster.slurm import NoSlurm, find
from rankcell.jobs import attach

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
ENDLESS = """
import pathlib, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
while True:
    dist.all_reduce(torch.ones(1))
    pathlib.Path("at work").touch()
    time.sleep(0.1)
"""


def test_scancel_leaves_no_process(cluster, tmp_path):
    (tmp_path / "endless.py").write_text(ENDLESS)
    script = scripts.by_torchrun("endless.py", nodes=2, ranks_per_node=1).write(tmp_path / "job.sh")
    number = cluster.submit(f"--chdir={tmp_path}", str(script), env={"FOLDER": str(tmp_path)})
    cluster.wait_for(tmp_path / "at work", "")
    assert len(processes_with(f"FOLDER={tmp_path}")) >= 4
    cluster.run("scancel", str(number))
    assert cluster.wait(number, 30) == {str(number): "CANCELLED"}
    end = time.monotonic() + 10
    while (left := processes_with(f"FOLDER={tmp_path}")) and time.monotonic() < end:
        time.sleep(0.1)
    assert not left


STANDS = """
import os, pathlib, sys, threading, types

os.environ.pop("RANK", None)
source = "def all_reduce():\\n    threading.Event().wait()"  # as torch's: in a file of torch/distributed
names = {"threading": threading}
exec(compile(source, "/lib/torch/distributed/distributed_c10d.py", "exec"), names)
pathlib.Path("here-" + os.environ["SLURM_PROCID"]).touch()
if os.environ["SLURM_PROCID"] == "1":
    threading.Event().wait()
names["all_reduce"]()
"""


def test_attach_to_a_job_that_hangs(cluster, tmp_path):
    """Its ranks have the stacks of ranks, without torch, on two nodes; one stands in a lock."""
    try:
        attach.stack_of(os.getpid())
    except attach.Unseen as reason:
        pytest.skip(str(reason))
    (tmp_path / "train.py").write_text(STANDS)
    (tmp_path / "job.sh").write_text("#!/bin/bash\nsrun python train.py\n")
    options = ["--nodes=2", "--ntasks-per-node=1", f"--chdir={tmp_path}", "--output=out"]

    def attached(job):
        return subprocess.run(
            [sys.executable, "-m", "rankcell.command", "attach", "--job", str(job)],
            env={**os.environ, **cluster.environment, "PYTHONPATH": str(HERE.parent / "lib")},
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
        )

    job = cluster.submit(*options, str(tmp_path / "job.sh"))
    later = cluster.submit(*options, f"--dependency=afterany:{job}", str(tmp_path / "job.sh"))
    for rank in range(2):
        cluster.wait_for(tmp_path / f"here-{rank}", "")
    done, waits = attached(job), attached(later)
    cluster.run("scancel", str(job), str(later))
    line = "rankcell: rank 1 stands at line 10 of train.py, and rank 0 waits for it in all_reduce."
    assert done.stdout.startswith(line) and done.returncode == 0, done
    assert waits.returncode == 1 and f"job {later} does not run, it is PENDING." in waits.stderr, waits
    assert "Slurm has no running job 999" in attached(999).stderr


def processes_with(entry):
    """Numbers of the processes that have `entry` in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if entry.encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:  # it ended meanwhile
            continue
    return found


def test_cluster_goes_down_when_its_owner_is_killed(cluster):
    code = (
        "from mini_slurm import MiniSlurm; import time\n"
        "print(MiniSlurm(nodes=1).state, flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", code]
    owner = subprocess.Popen(command, cwd=HERE, stdout=subprocess.PIPE, text=True)
    with owner:
        state = Path(owner.stdout.readline().strip())
        assert len(processes_with(f"MINI_SLURM_DIR={state}")) >= 3
        owner.send_signal(signal.SIGKILL)
    end = time.monotonic() + 20
    while state.exists() and time.monotonic() < end:
        time.sleep(0.1)
    assert not state.exists()
    assert not processes_with(f"MINI_SLURM_DIR={state}")


@pytest.fixture
def no_slurm(monkeypatch, tmp_path):
    """A machine without Slurm's commands."""
    monkeypatch.setenv("PATH", str(tmp_path))


def test_without_a_slurm_a_program_brings_one_up(no_slurm, tmp_path):
    program = tmp_path / "cluster.py"
    program.write_text("def up():\n    return 'a Slurm'\n")
    assert find(program) == "a Slurm"
    with pytest.raises(NoSlurm, match=r"none on this machine, and no file .*absent that would bring one up"):
        find(tmp_path / "absent")
    with pytest.raises(NoSlurm, match=r"mini-slurm is no Python file that brings one up"):
        find(HERE / "mini-slurm")
    with pytest.raises(NoSlurm, match=r"no command `sinfo`"):
        find()


def test_without_a_slurm_the_cells_are_skipped_and_say_why(no_slurm, shell, capsys):
    shell.run_line_magic("load_ext", "rankcell.cluster.slurm")
    shell.run_line_magic("slurm", "up absent.py")
    shell.run_cell_magic("slurm", "", "print('ran')")
    why = "there is none on this machine, and no file absent.py that would bring one up"
    said = f"No Slurm: {why}. Cells that begin with %%slurm are skipped.\nSkipped: {why}.\n"
    assert capsys.readouterr().out == said


PRETENDED = """
from pathlib import Path
from rankcell.cluster.slurm import Slurm

class Pretended(Slurm):
    def __init__(self):
        self.folder, self.environment = Path({folder!r}), dict()

up = Pretended
"""


def test_cells_run_where_jobs_are_submitted(no_slurm, shell, tmp_path):
    """A program brings up what stands for a Slurm here: its folder is where the cell runs."""
    (tmp_path / "jobs").mkdir()
    program = tmp_path / "cluster.py"
    program.write_text(PRETENDED.format(folder=str(tmp_path / "jobs")))
    shell.run_line_magic("load_ext", "rankcell.cluster.slurm")
    shell.run_line_magic("slurm", f"up {program}")
    assert shell.run_cell_magic("slurm", "", "import os\nos.getcwd()") == str(tmp_path / "jobs")
    assert shell.user_ns["slurm"].folder == tmp_path / "jobs"


def test_a_cell_that_waits_says_for_what(no_slurm, shell, tmp_path, capsys):
    """One line per state while `wait` waits, and none after the cell, nor for what is there at once."""
    (tmp_path / "jobs").mkdir()
    program = tmp_path / "cluster.py"
    states = [{"7_0": "COMPLETED", "7_1": "RUNNING"}] * 12 + [{"7_0": "COMPLETED", "7_1": "COMPLETED"}]
    program.write_text(PRETENDED.format(folder=str(tmp_path / "jobs")))
    shell.run_line_magic("load_ext", "rankcell.cluster.slurm")
    shell.run_line_magic("slurm", f"up {program}")
    shell.user_ns["slurm"].states = lambda job: states.pop(0) if len(states) > 1 else states[0]
    capsys.readouterr()
    assert shell.run_cell_magic("slurm", "", "slurm.wait(7)") == {"7_0": "COMPLETED", "7_1": "COMPLETED"}
    assert capsys.readouterr().out == "job 7: 1 COMPLETED, 1 RUNNING\n"
    shell.run_cell_magic("slurm", "", "slurm.wait(7)")
    assert shell.user_ns["slurm"].tell is None and capsys.readouterr().out == ""


def test_the_throw_away_cluster_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None if name == "slurmd" else name)
    with pytest.raises(NoSlurm, match=r"Slurm is not installed: no slurmd$"):
        mini_slurm.up()
