"""A real Slurm, two nodes of it: what the course's job scripts start, survives and leaves behind."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from rankcell.cluster import export, scripts
from rankcell.cluster.slurm import MiniSlurm, NoSlurm

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
TRAINING = HERE / "training.py"


@pytest.fixture
def job(cluster, tmp_path):
    """Writes a script, submits it, and ends what is left of it after the test."""
    numbers = []

    def submit(script, *options, **environment):
        path = script.write(tmp_path / "job.sh")
        environment.setdefault("FOLDER", str(tmp_path))
        numbers.append(cluster.submit(f"--chdir={tmp_path}", *options, str(path), env=environment))
        return numbers[-1]

    yield submit
    for number in numbers:
        cluster.run("scancel", str(number))
        cluster.wait(number, 30)


def output(tmp_path):
    """What the job said, for a failed assertion."""
    return "\n".join(p.read_text() for p in sorted(tmp_path.glob("*.out")))


def log(tmp_path):
    """Step, loss and world size of each line that the training wrote."""
    lines = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    return [(int(step), float(loss), int(size)) for step, loss, size in lines]


@pytest.fixture(scope="module")
def undisturbed(cluster, tmp_path_factory):
    """The weights and losses of the training that nobody stops, on 2 x 2 ranks by srun."""
    folder = tmp_path_factory.mktemp("undisturbed")
    script = scripts.by_srun(f"python {TRAINING}", nodes=2, ranks_per_node=2)
    number = cluster.submit(
        f"--chdir={folder}", str(script.write(folder / "job.sh")), env={"FOLDER": str(folder)}
    )
    assert cluster.wait(number, 200) == {str(number): "COMPLETED"}, output(folder)
    return torch.load(folder / "weights.pt"), log(folder), output(folder)


def test_array_of_12_with_throttle_2_runs_each_task_once(cluster, job, tmp_path):
    script = scripts.array(
        'echo "$SLURM_ARRAY_TASK_ID start $(date +%s.%N)" >>tasks; sleep 0.3; '
        'echo "$SLURM_ARRAY_TASK_ID end $(date +%s.%N)" >>tasks',
        tasks=12,
        at_once=2,
    )
    number = job(script)
    assert cluster.wait(number) == {f"{number}_{k}": "COMPLETED" for k in range(12)}
    lines = [line.split() for line in (tmp_path / "tasks").read_text().splitlines()]
    assert sorted(int(task) for task, what, _ in lines if what == "start") == list(range(12))
    running = most = 0
    for _, what, _ in sorted(lines, key=lambda line: float(line[2])):
        running += 1 if what == "start" else -1
        most = max(most, running)
    assert most == 2
    assert {p.name for p in tmp_path.glob("*.out")} == {f"sweep-{number}_{k}.out" for k in range(12)}


def test_srun_gives_each_rank_its_place(undisturbed):
    _, _, said = undisturbed
    found = sorted(re.findall(r"rank (\d) of 4, local rank (\d)", said))
    assert found == [("0", "0"), ("1", "1"), ("2", "0"), ("3", "1")]


def test_killed_rank_ends_with_the_same_weights(cluster, job, tmp_path, undisturbed):
    script = scripts.by_torchrun(str(TRAINING), nodes=2, ranks_per_node=2, max_restarts=2)
    number = job(script, DIES="3:10")
    assert cluster.wait(number, 200) == {str(number): "COMPLETED"}, output(tmp_path)
    weights, losses, _ = undisturbed
    assert (tmp_path / "died").exists()
    assert re.findall(r"rank (\d) of 4, local rank \d, from step 8", output(tmp_path))
    steps = log(tmp_path)
    assert [step for step, _, _ in steps] == [*range(1, 11), *range(9, 25)]
    assert dict((s, loss) for s, loss, _ in steps) == dict((s, loss) for s, loss, _ in losses)
    assert all(map(torch.equal, torch.load(tmp_path / "weights.pt"), weights))


def test_preempted_job_saves_and_goes_on(cluster, job, tmp_path, undisturbed):
    script = scripts.by_srun(
        f"python {TRAINING}", nodes=2, ranks_per_node=2, partition="spare", signal_seconds=60
    )
    number = job(script, SECONDS="0.2")
    cluster.wait_for(tmp_path / "log", "\n5 ")
    important = scripts.alone("sleep 0.5", gpus=0, name="important")
    cluster.submit(
        "--nodes=2", "--exclusive", "--chdir", str(tmp_path), str(important.write(tmp_path / "b.sh"))
    )
    cluster.wait_for(tmp_path / f"train-{number}.out", "from step 0")
    assert cluster.wait(number, 200) == {str(number): "COMPLETED"}, output(tmp_path)
    steps = [step for step, _, _ in log(tmp_path)]
    assert steps == list(range(1, 25)), "no step is lost and none is repeated"
    (began,) = set(re.findall(r"from step ([1-9]\d*)", output(tmp_path)))
    assert 5 <= int(began) < 24
    assert all(map(torch.equal, torch.load(tmp_path / "weights.pt"), undisturbed[0]))


def test_lost_node_leaves_the_other_training(cluster, job, tmp_path):
    if cluster.mode != "net":
        pytest.skip("the nodes are not separate here: one cannot lose its power")
    script = scripts.by_torchrun(str(TRAINING), nodes=2, ranks_per_node=1, max_restarts=3, min_nodes=1)
    number = job(script, "--no-requeue", STEPS="40", SECONDS="0.1")
    cluster.wait_for(tmp_path / "log", "\n5 ")
    cluster.kill_node("node2")
    try:
        cluster.wait_for(tmp_path / "log", "\n40 ", 150)
    except TimeoutError as error:
        pytest.fail(f"{error}\n{output(tmp_path)}")
    finally:
        cluster.boot()
    sizes = [size for _, _, size in log(tmp_path)]
    assert [step for step, _, _ in log(tmp_path)][-1] == 40
    assert sizes == sorted(sizes, reverse=True) and set(sizes) == {2, 1}
    cluster.wait(number, 30)


def test_scancel_leaves_no_process(cluster, job, tmp_path):
    script = scripts.by_torchrun(str(TRAINING), nodes=2, ranks_per_node=1)
    number = job(script, STEPS="100000", SECONDS="0.1")
    cluster.wait_for(tmp_path / "log", "\n2 ")
    assert len(processes_with(f"FOLDER={tmp_path}")) >= 4
    cluster.run("scancel", str(number))
    assert cluster.wait(number, 30) == {str(number): "CANCELLED"}
    end = time.monotonic() + 10
    while (left := processes_with(f"FOLDER={tmp_path}")) and time.monotonic() < end:
        time.sleep(0.1)
    assert not left


def test_exported_script_gives_the_losses_of_the_notebook(cluster, four, tmp_path):
    """The first rank cells of lesson 08 as a job of 2 x 2 ranks, against the same cells on 4 ranks here."""
    cells = [c for c in export.read(HERE.parent / "notebooks" / "08_ddp.ipynb") if c.options]
    last = next(k for k, c in enumerate(cells) if "together" in c.options.pull)
    expected, sources = {}, []
    for k, cell in enumerate(cells[: last + 1], 1):
        run = four.run(cell.source, pull=cell.options.pull)
        expected[f"In [{k}]"] = {"value": run.values} | dict(run.pulled)
        pull = f" --pull {','.join(cell.options.pull)}" if cell.options.pull else ""
        sources.append({"source": f"%%ranks 4{pull}\n{cell.source}", "cell_type": "code", "metadata": {}})
    notebook = tmp_path / "losses.ipynb"
    notebook.write_text(json.dumps({"cells": sources}))
    script, path, *_ = export.export(notebook, to=tmp_path / "job", nodes=2)
    path.write_text(path.read_text().replace(script.name, f"{script.name} --save values.pt"))
    number = cluster.submit(f"--chdir={script.parent}", str(path))
    assert cluster.wait(number, 200) == {str(number): "COMPLETED"}, output(script.parent)
    found = torch.load(script.parent / "values.pt")
    assert len(found["In [4]"]["together"]) == 4
    for cell, named in found.items():
        for name, values in named.items():
            assert repr(values) == repr(list(expected[cell][name]))


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
        "from rankcell.cluster.slurm import MiniSlurm; import os, sys, time\n"
        f"print(MiniSlurm({str(HERE / 'mini-slurm')!r}, nodes=1).state, flush=True); time.sleep(60)"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    with owner:
        state = Path(owner.stdout.readline().strip())
        assert len(processes_with(f"MINI_SLURM_DIR={state}")) >= 3
        owner.send_signal(signal.SIGKILL)
    end = time.monotonic() + 20
    while state.exists() and time.monotonic() < end:
        time.sleep(0.1)
    assert not state.exists()
    assert not processes_with(f"MINI_SLURM_DIR={state}")


def test_no_slurm_says_what_is_missing(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", os.environ["PATH"])
    with pytest.raises(NoSlurm, match=r"there is no .*absent: the throw-away cluster comes with"):
        MiniSlurm(tmp_path / "absent")
