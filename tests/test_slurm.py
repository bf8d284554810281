"""What `%%slurm` cells say, with and without a Slurm.

That arrays, restarts, preempted jobs, lost nodes and exported lessons end as they should is checked by
lessons 23 and 24, which run on a real Slurm of two nodes with `make test`.
"""

from pathlib import Path
from types import SimpleNamespace

import pytest

from rankcell.cluster import slurm

PRETENDED = """
from pathlib import Path
from rankcell.cluster.slurm import Slurm

class Pretended(Slurm):
    def __init__(self):
        self.folder, self.environment = Path({folder!r}), dict()

up = Pretended
"""


@pytest.fixture
def up(monkeypatch, shell, tmp_path):
    """On a machine without Slurm's commands: `%slurm up` of what stands for one, in this folder."""
    monkeypatch.setenv("PATH", str(tmp_path))
    shell.run_line_magic("load_ext", "rankcell.cluster.slurm")
    (tmp_path / "cluster.py").write_text(PRETENDED.format(folder=str(tmp_path)))
    shell.run_line_magic("slurm", f"up {tmp_path / 'cluster.py'}")
    return shell.user_ns["slurm"]


def test_without_a_slurm_cells_are_skipped_and_say_why(up, shell, tmp_path, capsys):
    assert up.folder == slurm.find(tmp_path / "cluster.py").folder == tmp_path
    for program, says in (
        (tmp_path / "absent", r"none on this machine, and no file .*absent that would bring one up"),
        ("", r"no command `sinfo`"),
    ):
        with pytest.raises(slurm.NoSlurm, match=says):
            slurm.find(program)
    capsys.readouterr()
    shell.run_line_magic("slurm", "up absent.py")
    shell.run_cell_magic("slurm", "", "print('ran')")
    why = "there is none on this machine, and no file absent.py that would bring one up"
    said = f"No Slurm: {why}. Cells that begin with %%slurm are skipped.\nSkipped: {why}.\n"
    assert capsys.readouterr().out == said


def test_cells_run_among_the_jobs_and_say_what_they_await(up, shell, tmp_path, capsys, monkeypatch):
    """One line per state while `wait` waits, and none after the cell, nor for what is there at once."""
    here, now = Path.cwd(), [0.0]
    assert shell.run_cell_magic("slurm", "", "import os\nos.getcwd()") == str(tmp_path) and Path.cwd() == here
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda s: now.append(now.pop() + s))
    monkeypatch.setattr(slurm, "time", clock)
    states = [{"7_0": "COMPLETED", "7_1": "RUNNING"}] * 12 + [{"7_0": "COMPLETED", "7_1": "COMPLETED"}]
    up.states = lambda job: states.pop(0) if len(states) > 1 else states[0]
    capsys.readouterr()
    for said in ("job 7: 1 COMPLETED, 1 RUNNING\n", ""):
        assert shell.run_cell_magic("slurm", "", "slurm.wait(7)") == {"7_0": "COMPLETED", "7_1": "COMPLETED"}
        assert capsys.readouterr().out == said and up.told is None
    states[:] = [{"7": "RUNNING"}]
    with pytest.raises(TimeoutError, match=r"job 7 is not over after 300 s: \{'7': 'RUNNING'\}"):
        up.wait(7)
    up.run = lambda *command: "7;here\n"
    assert up.submit("job.sh") == 7
    (tmp_path / "out").write_text("one\ntwo\n")
    assert up.wait_for("out", "two") == "one\ntwo\n"
    with pytest.raises(TimeoutError, match="out has no 'three' after 5 s:\none\ntwo"):
        up.wait_for("out", "three", 5)
