"""The corpus `silent_bugs/`: trainings that went wrong without a word, each broken and mended, and who is to blame.

A file is a bug. Its docstring says what is wrong, and in lines `name: value`

    source   the thread or paper that it comes from
    mesh     axes and sizes in the order of the ranks, for example `dp 2, tp 2`; left out if there is one axis
    names    names on the ranks and those of the dense model, `ours = dense`, where they differ
    steps    how many steps are traced; 1 if it is left out
    first    the tensor that goes wrong first: name and kind, `|` between several that are equally right; a name may
             have `*`, and `the model` is the model itself
    loss     what the loss of the broken training does: falls (if this is left out), stays, or is that of a policy,
             which says nothing
    says     a part of the verdict; left out if the tensor says enough
    side     where: start (weights before the first step), forward, backward (up to the gradients as the optimizer
             finds them) or update

Below `# %% one process` stands what runs in the notebook's process; if that is left out, `DENSE`. Below `# %% ranks`
stands what runs on four ranks. What stands above the first of these runs before both. Both define `model`, which is
traced, and `step()`, a step of training that returns the loss (None on ranks that have none). Before both runs
`silent_bugs/common.py`. A line that ends in `# broken` runs in the broken version only, one that ends in `# mended`
in the mended one only.
"""

import fnmatch
import math
import re
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

import rankcell
from rankcell import check

FOLDER = Path(__file__).parent / "silent_bugs"
COMMON = (FOLDER / "common.py").read_text("utf-8")
FILES = sorted(p for p in FOLDER.glob("*.py") if p.stem != "common")
DENSE = """
model = gpt()
step = training(model, adam(model), lambda: cross_entropy(model(x), y))
"""
SIDES = {"output": "forward", "grad_output": "backward", "grad": "backward", "parameter": "update"}


@dataclass(eq=False)
class Bug:
    """A file, taken apart."""

    path: Path
    fields: dict[str, str] = field(init=False)
    one: str = field(init=False)
    ranks: str = field(init=False)

    def __post_init__(self):
        text = self.path.read_text("utf-8")
        docstring = text.split('"""')[1]
        self.fields = dict(re.findall(r"^(\w+): (.+)$", docstring, re.M))
        one, ranks = text.split('"""', 2)[2].split("# %% ranks\n")
        both, _, one = one.partition("# %% one process\n")
        self.one, self.ranks = both + (one or DENSE), both + ranks

    def source(self, version):
        """What the ranks run in the version, "broken" or "mended"."""
        other = {"broken": "mended", "mended": "broken"}[version]
        lines = [line for line in self.ranks.split("\n") if not line.endswith(f"# {other}")]
        return COMMON + "\n".join(lines)

    @property
    def steps(self):
        return int(self.fields.get("steps", 1))

    @property
    def mesh(self):
        pairs = (part.split() for part in self.fields.get("mesh", "").split(",") if part)
        return {name: int(size) for name, size in pairs} or None

    @property
    def names(self):
        pairs = (part.split("=") for part in self.fields.get("names", "").split(",") if part)
        return {ours.strip(): dense.strip() for ours, dense in pairs} or None

    def run(self, four, version, more=0):
        """A run of the version with its traced steps; its values are their losses, and those of `more` steps."""
        return four.run(
            f"{self.source(version)}\nwith rankcell.trace(model):\n"
            f"    losses = [step() for _ in range({self.steps})]\n[*losses, *(step() for _ in range({more}))]"
        )

    def verdict(self, run):
        return check.against(run, dense_trace(self.one, self.steps), mesh=self.mesh, names=self.names)

    def is_first(self, row):
        """Whether the row is the one that the file blames."""
        side = "start" if row.kind == "parameter" and row.step == 0 else SIDES[row.kind]
        for wanted in self.fields["first"].split("|"):
            name, kind = wanted.strip().rsplit(" ", 1)
            name = "" if name == "the model" else name
            if kind == row.kind and fnmatch.fnmatchcase(row.name, name) and side == self.fields["side"]:
                return True
        return False


@cache
def dense_trace(source, steps):
    """The trace of one process."""
    space = {}
    exec(COMMON + source, space)
    with rankcell.trace(space["model"]) as one:
        for _ in range(steps):
            space["step"]()
    return one


def shaken(run):
    """The run as on another processor: what modules computed differs in its last bits, and zeros stay zeros."""
    random, others = (
        np.random.default_rng(0),
        {},
    )  # by id: a module may return what its last part has returned

    def other(entry):
        value = entry.value
        if entry.kind not in ("output", "grad_output") or value.size == 1:
            return entry
        if id(value) not in others:
            size = abs(value) + np.sqrt(np.square(value).mean())
            off = np.finfo(value.dtype).eps / 4 * random.normal(size=value.shape) * size * (value != 0)
            others[id(value)] = (value + off).astype(value.dtype)
        return replace(entry, value=others[id(value)])

    return replace(run, ranks=tuple(replace(r, trace=tuple(map(other, r.trace))) for r in run.ranks))


BUGS = [Bug(path) for path in FILES]
# Judged once more with other last bits; all were once. Two tell by what is the same to the last bit, as what was sent
# twice is: `kept_for_the_last_microbatch_only` and `shared_expert_summed_twice`.
SHAKEN = [bug for bug in BUGS[::3] if bug.path.stem != "kept_for_the_last_microbatch_only"]
WATCHED = BUGS[::6]  # whose broken losses are looked at every time; those of all bugs were looked at once


def names_of(bug):
    return bug.path.stem


@pytest.fixture(scope="module")
def four(four):
    """The world, begun anew after some bugs: their groups stay, each with a thread of gloo's that polls."""
    yield Worlds(four)


class Worlds:
    """Runs programs on the ranks of a world, of which every 30th program gets a new one."""

    def __init__(self, world):
        self.world, self.count = world, 0

    def run(self, source):
        self.count += 1
        if self.count % 30 == 0:
            self.world.restart()
        return self.world.run(source)


@pytest.fixture(autouse=True)
def threads():
    """Models are so small that threads cost more than they give."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("bug", BUGS, ids=names_of)
def test_says_where_it_comes_from(bug):
    assert bug.fields["source"].startswith("https://")
    assert "# broken" in bug.ranks or "# mended" in bug.ranks
    assert bug.fields["side"] in ("start", "forward", "backward", "update")


def test_there_are_enough_and_none_twice():
    assert len(BUGS) >= 155
    assert len({bug.source("broken") for bug in BUGS}) == len(BUGS)


@pytest.mark.parametrize("bug", BUGS, ids=names_of)
def test_a_bug_is_found_and_named(four, bug):
    """And its loss does what the file tells: mostly it goes down, that is what makes a bug silent."""
    run = bug.run(four, "broken", more=3 if bug in WATCHED else 0)
    verdict = bug.verdict(run)
    assert not verdict.ok, f"{bug.path.stem}: not found"
    assert bug.is_first(verdict.first), f"wanted {bug.fields['first']}, and it says\n{verdict}"
    assert bug.fields.get("says", "").lower() in verdict.text.lower()
    if bug in SHAKEN:
        verdict = bug.verdict(shaken(run))
        assert bug.is_first(verdict.first), f"on another processor it says\n{verdict}"
        assert bug.fields.get("says", "").lower() in verdict.text.lower()
    if bug in WATCHED:
        losses = [mean([v for v in at if v is not None]) for at in zip(*run.values, strict=True)]
        assert all(map(math.isfinite, losses))
        as_told = {"falls": losses[-1] < losses[0], "stays": losses[-1] == losses[0], "of a policy": True}
        assert as_told[bug.fields.get("loss", "falls")], losses


@pytest.mark.parametrize("bug", BUGS, ids=names_of)
def test_the_mended_version_is_right(four, bug):
    run = bug.run(four, "mended")
    for seen in (run, shaken(run)) if bug in SHAKEN else (run,):
        verdict = bug.verdict(seen)
        assert verdict.ok, f"{bug.path.stem}: false alarm\n{verdict}"


def test_rows_that_the_loss_leaves_out_are_counted(four):
    bug = next(bug for bug in BUGS if bug.path.stem == "shifted_after_the_cut")
    assert "rows get no gradient: does the loss leave them out?" in bug.verdict(bug.run(four, "broken")).text


def mean(values):
    return sum(values) / len(values)
