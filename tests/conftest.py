"""What the tests share: one world of four ranks, one bare IPython shell with the extension loaded, a throw-away Slurm.

With `--sampled`, as in `make test`, a test that is marked `alike(n)` runs one in n of its cases only, and an
exercise with one of its wrong answers. `make test SAMPLED=` and pytest itself leave nothing out.
"""

import math
import os
import zlib
from collections import defaultdict

import pytest
from IPython.core.interactiveshell import InteractiveShell

import rankcell

# as `%load_ext rankcell` does: threads that spin while they wait take the cores from the ranks
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def pytest_addoption(parser):
    parser.addoption("--sampled", action="store_true", help="of cases that are alike only some")


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--sampled"):
        return
    alike = defaultdict(list)
    for item in items:
        if mark := item.get_closest_marker("alike"):
            alike[item.nodeid.split("[")[0], mark.args[0]].append(item)
    left_out = set()
    for (_, n), cases in alike.items():
        # always the same ones, and not by their order: every second case may have the same value of a parameter
        cases.sort(key=lambda item: zlib.crc32(item.nodeid.encode()))
        left_out.update(cases[math.ceil(len(cases) / n) :])
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


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
    with found:
        yield found
