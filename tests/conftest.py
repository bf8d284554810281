"""What the tests share: a world of four ranks, a bare IPython shell with the extension loaded, a throw-away Slurm."""

import os

import pytest
from IPython.core.interactiveshell import InteractiveShell

import rankcell

# as `%load_ext rankcell` does: threads that spin while they wait take the cores from the ranks
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


@pytest.fixture(scope="module")
def four():
    """A world of four ranks that lives through a whole module: a test must leave it usable, which is a test too.

    (Through the session it would gather process groups. Each has a thread of gloo's on each rank that wakes 100 times
    a second; with the 35 groups of the training tests that takes a sixth of a core, measured.)
    """
    with rankcell.Ranks(4, device="cpu") as ranks:
        yield ranks


@pytest.fixture(scope="module")
def shell():
    """An IPython shell with `%load_ext rankcell` done, and no user in front of it."""
    InteractiveShell.clear_instance()
    ip = InteractiveShell.instance()
    ip.run_line_magic("load_ext", "rankcell")
    yield ip
    ip.run_line_magic("unload_ext", "rankcell")
    InteractiveShell.clear_instance()


@pytest.fixture(scope="session")
def cluster():
    """A throw-away Slurm of two nodes. Tests that ask for it are skipped where there can be none."""
    from mini_slurm import MiniSlurm
    from rankcell.cluster.slurm import NoSlurm

    try:
        found = MiniSlurm()
    except NoSlurm as reason:
        pytest.skip(str(reason))
    yield found
    found.down()
