"""Several kinds of parallelism at once on real ranks: the dense run's losses, gradients, norms and weights, on every
layout, and states that any layout can take over.
"""

import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import rankcell
from rankcell import models
from rankcell.parallel.mesh import MeshParallel
from rankcell.parallel.zero import ShardedOptimizer

pytestmark = pytest.mark.slow

VOCAB, WIDTH, LENGTH, ROWS = 29, 16, 8, 8
MAX_NORM = 0.5  # below the norm of every step, so that the clipping is seen


def build(axes, make=None, *, tied=True, llama=False, **options):
    """A model on the mesh {name: degree}, in a world that may be larger, and its optimizer; the dense one without
    axes.
    """
    kind, more = (
        (models.Llama, {"n_kv_heads": 1}) if llama else (models.GPT, {})
    )  # which two ranks of tp share
    dense = kind(VOCAB, WIDTH, n_heads=2, n_layers=3, context=LENGTH, tied=tied, dtype=torch.float64, **more)
    if axes is None:
        return dense, torch.optim.AdamW(dense.parameters(), lr=1e-2)
    shape = dist.get_world_size() // math.prod(axes.values()), *axes.values()
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("copy", *axes))[tuple(axes)]
    model = MeshParallel(dense, mesh, **options)
    if make == "sharded":
        how = {"lr": 1e-2, "process_group": model.groups["dp"]}
        return model, ShardedOptimizer(model.parameters(), torch.optim.AdamW, **how)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model, optimizer, steps, *, uneven=False):
    """Losses, gradients and norms of some steps; with `uneven` the first place on dp has but one row."""
    found = []
    for step in steps:
        x, y = models.batch(torch.arange(400) * 7919 % VOCAB, step, size=ROWS, length=LENGTH)
        optimizer.zero_grad()
        if isinstance(model, MeshParallel):
            n, place = model.degree("dp"), model.place("dp")
            cuts = [1, *[(ROWS - 1) // (n - 1)] * (n - 2)] if uneven else [ROWS // n] * (n - 1)
            cuts.append(ROWS - sum(cuts))
            loss = model.step(x.split(cuts)[place], y.split(cuts)[place])
            grads, norm = model.full_gradients(), model.clip_grad_norm_(MAX_NORM)
        else:
            loss = models.cross_entropy(model(x), y)
            loss.backward()
            grads = {n: p.grad.clone() for n, p in model.named_parameters(remove_duplicate=False)}
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        assert norm > MAX_NORM
        found.append((loss.item(), grads, norm.item()))
        optimizer.step()
    return found


def apart(a, b):
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)


def differences(axes, uneven=False, make=None, tied=True, llama=False, **options):
    """Largest difference from the dense run: of losses, gradients and norms of three steps, and last weights."""
    dense, ours = build(None, tied=tied, llama=llama), build(axes, make, tied=tied, llama=llama, **options)
    worst = 0.0
    for a, b in zip(train(*ours, range(3), uneven=uneven), train(*dense, range(3)), strict=True):
        worst = max(worst, abs(a[0] - b[0]), apart(a[1], b[1]), abs(a[2] - b[2]))
    return max(worst, apart(ours[0].full_state_dict()["model"], dense[0].state_dict()))


LAYOUTS = {
    "pp tp, Llama, sequence parallel": (
        {"pp": 2, "tp": 2},
        {"llama": True, "tied": False, "sequence_parallel": True},
    ),
    "dp tp, sequence parallel, uneven": ({"dp": 2, "tp": 2}, {"sequence_parallel": True, "uneven": True}),
    "tp dp, not tied": ({"tp": 2, "dp": 2}, {"tied": False}),
    "zero tp, Llama, uneven": ({"dp": 2, "tp": 2}, {"zero": True, "llama": True, "uneven": True}),
    "zero": ({"dp": 4}, {"zero": True}),
    "pp dp, sharded states, uneven": (
        {"pp": 2, "dp": 2},
        {"make": "sharded", "uneven": True, "n_microbatches": 1},
    ),
    "dp pp, odd micro-batches": ({"dp": 2, "pp": 2}, {"n_microbatches": 3}),
    "dp, uneven": ({"dp": 4}, {"uneven": True}),
    "all of degree 1": ({"pp": 1, "dp": 1, "tp": 1}, {}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_equals_the_dense_run(four, layout):
    axes, options = LAYOUTS[layout]
    assert max(four.run(differences, args=(axes,), kwargs=options).values) < 1e-9


def test_three_axes_on_eight_ranks():
    with rankcell.Ranks(8, device="cpu") as eight:
        assert max(eight.run(differences, args=({"pp": 2, "dp": 2, "tp": 2},)).values) < 1e-9


def resumed(first, second):
    """Two steps in one layout, then two in another: largest difference of losses and weights from the dense run, and
    of what the second layout gives back from what it took.
    """
    dense, one, other = build(None), build(*first[:2], **first[2]), build(*second[:2], **second[2])
    losses = train(*one, (0, 1))
    saved = one[0].full_state_dict(one[1])
    other[0].load_full_state_dict(saved, other[1])
    again = other[0].full_state_dict(other[1])
    assert sorted(saved["optimizer"]) == ["exp_avg", "exp_avg_sq", "step"]
    back = max(apart(again["optimizer"][key], saved["optimizer"][key]) for key in saved["optimizer"])
    losses += train(*other, (2, 3))
    worst = max(abs(a[0] - b[0]) for a, b in zip(losses, train(*dense, range(4)), strict=True))
    weights = apart(other[0].full_state_dict()["model"], dense[0].state_dict())
    return max(worst, weights), max(back, apart(again["model"], saved["model"]))


PAIRS = {
    "pp dp to dp tp": (({"pp": 2, "dp": 2}, None, {}), ({"dp": 2, "tp": 2}, None, {})),
    "zero tp to pp tp": (({"dp": 2, "tp": 2}, None, {"zero": True}), ({"pp": 2, "tp": 2}, None, {})),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_one_layout_resumes_another(four, pair):
    for worst, back in four.run(resumed, args=PAIRS[pair]).values:
        assert worst < 1e-9 and back == 0
