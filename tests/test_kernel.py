"""Rank cells in a real notebook kernel: its death, restart and interrupt, and what they leave behind."""

import contextlib
import os
import re
import signal
import tempfile
import time
from pathlib import Path

import pytest
from jupyter_client.manager import start_new_kernel

from rankcell.engine import system

LINUX_ONLY = pytest.mark.skipif(not system.LINUX, reason="reads /proc")
pytestmark = pytest.mark.slow


class Kernel:
    """A kernel with rankcell loaded; `run` returns all text of a cell."""

    def __init__(self, temporary):
        self.temporary = temporary  # the folder of its temporary files
        self.manager, self.client = start_new_kernel(
            kernel_name="python3", env=os.environ | {"TMPDIR": temporary}
        )
        self.run("%load_ext rankcell")

    def run(self, source):
        parts = []

        def take(message):
            content = message["content"]
            plain = content.get("data", {}).get("text/plain", "")
            parts.append(content.get("text") or plain or "\n".join(content.get("traceback", [])))

        self.client.execute_interactive(source, timeout=120, output_hook=take)
        return "\n".join(parts)

    def start(self, source, folder):
        """Send a rank cell, and wait until it runs; it never ends."""
        began = folder / "began"
        self.client.execute(f"%%ranks 4\nimport re, time\nopen({str(began)!r}, 'w').close()\n{source}")
        until(began.exists)

    def files(self):
        """What lies in its folder of temporary files, but for torch's cache, which all processes share."""
        return [path for path in Path(self.temporary).iterdir() if not path.name.startswith("torchinductor_")]

    def close(self):
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture
def kernel():
    with tempfile.TemporaryDirectory() as temporary:
        kernel = Kernel(temporary)
        yield kernel
        kernel.close()


def until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def running():
    """Of each process that is no zombie: its parent, by pid."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            pid, state, parent = re.sub(r"\(.*\)", "", stat.read_text()).split()[:3]
            if state != "Z":
                found[int(pid)] = int(parent)
    return found


def family(pid):
    """The pids of `pid` and its descendants."""
    found, parents = {pid}, running()
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found


WAITS = "if rank == 1: time.sleep(1e6)\ndist.barrier()"


@LINUX_ONLY
def test_a_killed_kernel_leaves_no_process_and_no_file(kernel, tmp_path):
    """Not ranks that wait, and not one in a C loop that hears no signal."""
    kernel.run("%%ranks 4\ndist.barrier()")
    assert kernel.files()
    kernel.start("if rank == 1: re.match('(a*)*b', 'a' * 60)\ndist.barrier()", tmp_path)
    ours = family(kernel.manager.provisioner.pid)
    assert len(ours) >= 6
    os.killpg(kernel.manager.provisioner.pid, signal.SIGKILL)  # as Jupyter does: the whole process group
    until(lambda: not ours & set(running()) and not kernel.files())


@LINUX_ONLY
def test_a_restarted_kernel_leaves_nothing_and_starts_anew(kernel, tmp_path):
    kernel.run("%%ranks 4\nx = 1")
    kernel.start(WAITS, tmp_path)
    ours = family(kernel.manager.provisioner.pid)
    kernel.manager.restart_kernel(now=True)
    kernel.client.wait_for_ready(timeout=60)
    until(lambda: not ours & set(running()))
    kernel.run("%load_ext rankcell")
    assert "False" in kernel.run("%%ranks 4\n'x' in globals()")
    # the number of a cell is the one in front of it, and an extension can be loaded twice and unloaded
    assert 'File "<cell 3>", line 3' in kernel.run("%%ranks 2\nx = 1\n1 / 0")
    kernel.run("%reload_ext rankcell")
    assert "False" in kernel.run("%%ranks 2\n'x' in globals()")
    kernel.run("%unload_ext rankcell")
    assert "not found" in kernel.run("%%ranks 2\n1")


def test_an_interrupt_leaves_kernel_and_names(kernel, tmp_path):
    kernel.run("here = 'kept'")
    for n in (4, 2):
        kernel.run(f"%%ranks {n}\nthere = rank")
    kernel.run("import os\nos.environ['SET_LATER'] = '1'")
    assert "in a rank cell, or in the notebook" in " ".join(
        kernel.run("%%ranks 2\nimport os\nos.environ['SET_LATER']").split()
    )  # Python's modules are no frozen ones in a kernel
    kernel.start(WAITS, tmp_path)
    kernel.manager.interrupt_kernel()
    until(lambda: "kept" in kernel.run("here"))  # cells sent before it is through are dropped by Jupyter
    assert "ranks 0-3" in kernel.run("%%ranks 4\nthere == rank")
    assert "True" in kernel.run("%%ranks 2\nthere == rank")
