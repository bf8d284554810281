"""Several kinds of parallelism at once on real ranks: the dense run's losses, gradients, norms and weights,
on every layout, and states that any layout can take over.
"""

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
TOKENS = torch.arange(400) * 7919 % VOCAB
MAX_NORM = 0.5  # below the norm of every step, so that the clipping is seen


def gpt(tied=True, seed=0, llama=False):
    shape = dict(n_heads=2, n_layers=3, context=LENGTH, tied=tied, seed=seed, dtype=torch.float64)
    if llama:  # one key/value head, which two ranks of tp share
        return models.Llama(VOCAB, WIDTH, n_kv_heads=1, **shape)
    return models.GPT(VOCAB, WIDTH, **shape)


def rows(x, model, *, uneven=False):
    """The rows of a batch that belong to this rank's place on dp."""
    n = model.degree("dp")
    cuts = [ROWS // n + (1 if uneven and r < n // 2 else -1 if uneven else 0) for r in range(n)]
    return x.split(cuts)[model.place("dp")] if n > 1 else x


def dense_run(steps, tied=True, llama=False):
    """Losses, gradients of each step, norms and, after each step, a copy of the weights."""
    model = gpt(tied, llama=llama)
    optimizer, story = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for step in range(steps):
        x, y = models.batch(TOKENS, step, size=ROWS, length=LENGTH)
        optimizer.zero_grad()
        loss = models.cross_entropy(model(x), y)
        loss.backward()
        grads = {n: p.grad.clone() for n, p in model.named_parameters(remove_duplicate=False)}
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        weights = {n: p.detach().clone() for n, p in model.named_parameters(remove_duplicate=False)}
        story.append((loss.item(), grads, norm.item(), weights))
    return story


def a_mesh(axes):
    """The mesh {name: degree} in a world that may be larger: blocks of ranks do the same."""
    size = 1
    for degree in axes.values():
        size *= degree
    shape = (dist.get_world_size() // size, *axes.values())
    return init_device_mesh("cpu", shape, mesh_dim_names=("copy", *axes))[tuple(axes)]


def build(axes, make=None, tied=True, llama=False, **options):
    if make == "zero":
        options["zero"] = True
    model = MeshParallel(gpt(tied, llama=llama), a_mesh(axes), **options)
    if make == "sharded":
        optimizer = ShardedOptimizer(
            model.parameters(), torch.optim.AdamW, lr=1e-2, process_group=model.groups["dp"]
        )
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer


def train(model, optimizer, steps, *, uneven=False):
    """Losses and norms of some steps."""
    found = []
    for step in steps:
        x, y = models.batch(TOKENS, step, size=ROWS, length=LENGTH)
        optimizer.zero_grad()
        loss = model.step(rows(x, model, uneven=uneven), rows(y, model, uneven=uneven))
        found.append((loss.item(), model.full_gradients(), model.clip_grad_norm_(MAX_NORM).item()))
        optimizer.step()
    return found


def apart(a, b):
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)


def differences(axes, make=None, tied=True, uneven=False, llama=False, **options):
    """Largest difference from the dense run: of losses, gradients and norms of three steps, last weights."""
    dense = dense_run(3, tied, llama)
    model, optimizer = build(axes, make, tied, llama, **options)
    ours = train(model, optimizer, range(3), uneven=uneven)
    worst = {"loss": 0.0, "gradient": 0.0, "norm": 0.0}
    for (loss, grads, norm), (loss_d, grads_d, norm_d, _) in zip(ours, dense, strict=True):
        assert norm_d > MAX_NORM
        worst["loss"] = max(worst["loss"], abs(loss - loss_d))
        worst["gradient"] = max(worst["gradient"], apart(grads, grads_d))
        worst["norm"] = max(worst["norm"], abs(norm - norm_d))
    worst["weight"] = apart(model.full_state_dict()["model"], dense[-1][-1])
    return worst


LAYOUTS = {
    "dp tp": ({"dp": 2, "tp": 2}, {}),
    "tp dp": ({"tp": 2, "dp": 2}, {}),
    "pp dp": ({"pp": 2, "dp": 2}, {}),
    "dp pp, odd micro-batches": ({"dp": 2, "pp": 2}, {"n_microbatches": 3}),
    "pp tp": ({"pp": 2, "tp": 2}, {}),
    "pp tp, sequence parallel": ({"pp": 2, "tp": 2}, {"sequence_parallel": True}),
    "dp tp, sequence parallel": ({"dp": 2, "tp": 2}, {"sequence_parallel": True}),
    "zero tp": ({"dp": 2, "tp": 2}, {"zero": True}),
    "zero": ({"dp": 4}, {"zero": True}),
    "sharded states, pp": ({"pp": 2, "dp": 2}, {"make": "sharded"}),
    "Llama, pp tp": ({"pp": 2, "tp": 2}, {"llama": True}),
    "Llama, not tied, pp tp, sequence parallel": (
        {"pp": 2, "tp": 2},
        {"llama": True, "tied": False, "sequence_parallel": True},
    ),
    "Llama, zero tp": ({"dp": 2, "tp": 2}, {"llama": True, "zero": True}),
    "not tied": ({"pp": 2, "tp": 2}, {"tied": False}),
    "uneven rows": ({"dp": 2, "tp": 2}, {"uneven": True}),
    "uneven rows, zero": ({"dp": 2, "tp": 2}, {"uneven": True, "zero": True}),
    "uneven rows, pp": ({"pp": 2, "dp": 2}, {"uneven": True, "n_microbatches": 2}),
    "all of degree 1": ({"pp": 1, "dp": 1, "tp": 1}, {}),
    "tp only": ({"tp": 2}, {}),
}


@pytest.mark.alike(4)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_gradients_norms_and_weights_are_those_of_the_dense_run(four, layout):
    axes, options = LAYOUTS[layout]
    for worst in four.run(differences, args=(axes,), kwargs=options).values:
        assert max(worst.values()) < 1e-9, worst


def test_three_axes_on_eight_ranks():
    with rankcell.Ranks(8, device="cpu") as eight:
        axes = {"pp": 2, "dp": 2, "tp": 2}
        for worst in eight.run(differences, args=(axes,)).values:
            assert max(worst.values()) < 1e-9, worst


def resumed(first, second):
    """Two steps in one layout, then two in another: largest difference of losses and weights from the dense
    run, and what the second layout gives back of what it took.
    """
    dense = dense_run(4)
    model, optimizer = build(*first)
    losses = [loss for loss, *_ in train(model, optimizer, (0, 1))]
    saved = model.full_state_dict(optimizer)
    other, its = build(*second)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    other.load_full_state_dict(saved, its)
    again = other.full_state_dict(its)
    back = max(
        apart(again["model"], saved["model"]),
        *(apart(again["optimizer"][key], saved["optimizer"][key]) for key in saved["optimizer"]),
    )
    losses += [loss for loss, *_ in train(other, its, (2, 3))]
    expected = [loss for loss, *_ in dense]
    worst = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
    return worst, apart(other.full_state_dict()["model"], dense[-1][-1]), back, sorted(saved["optimizer"])


ONE = ({"tp": 1}, None)
PAIRS = {
    "dp tp to pp": (({"dp": 2, "tp": 2}, None), ({"pp": 2}, None)),
    "pp dp to zero tp": (({"pp": 2, "dp": 2}, None), ({"dp": 2, "tp": 2}, "zero")),
    "zero tp to one": (({"dp": 2, "tp": 2}, "zero"), ONE),
    "one to pp tp": (ONE, ({"pp": 2, "tp": 2}, None)),
    "sharded states and back": (({"pp": 2, "dp": 2}, "sharded"), ({"dp": 4}, "sharded")),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_one_layout_resumes_another(four, pair):
    for losses, weights, back, keys in four.run(resumed, args=PAIRS[pair]).values:
        assert losses < 1e-9 and weights < 1e-9 and back == 0
        assert keys == ["exp_avg", "exp_avg_sq", "step"]


def messages():
    found = []
    for axes, options in (({"dp": 2, "ep": 2}, {}), ({"pp": 2, "dp": 2}, {"zero": True})):
        try:
            MeshParallel(gpt(), a_mesh(axes), **options)
        except ValueError as error:
            found.append(str(error))
    try:
        MeshParallel(gpt(), init_device_mesh("cpu", (4,)))
    except ValueError as error:
        found.append(str(error))
    return found


def test_what_it_does_not_know(four):
    for axis, zero, names in four.run(messages).values:
        assert names.startswith("MeshParallel knows the axes pp, dp, tp, not axes without names.")
        assert axis.startswith("MeshParallel knows the axes pp, dp, tp, not ep.")
        assert zero.endswith("ShardedOptimizer (stage 1) over the group of the dp axis.")


def without_tokens():
    """A place on dp with half the rows and one with all but half: what a step gives without an average."""
    model, _ = build({"dp": 4})
    x, y = models.batch(TOKENS, 0, size=ROWS, length=LENGTH)
    cuts = [1, 1, 1, 5]
    place = model.place("dp")
    loss = model.step(x.split(cuts)[place], y.split(cuts)[place])
    dense = gpt()
    expected = models.cross_entropy(dense(x), y)
    expected.backward()
    grads = {n: p.grad for n, p in dense.named_parameters(remove_duplicate=False)}
    mean_of_means = sum(
        models.cross_entropy(dense(a), b).item() / 4
        for a, b in zip(x.split(cuts), y.split(cuts), strict=True)
    )
    return (
        loss.item() - expected.item(),
        apart(model.full_gradients(), grads),
        mean_of_means - expected.item(),
    )


def test_every_token_counts_alike(four):
    for loss, gradient, naive in four.run(without_tokens).values:
        assert abs(loss) < 1e-12 and gradient < 1e-12
        assert abs(naive) > 1e-4  # what the mean of the ranks' means would have been off by
