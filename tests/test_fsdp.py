"""FSDP and ZeRO2 on real ranks: one process's weights and gradients, memory that is freed, bytes on the wire."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import rankcell
from rankcell import models
from rankcell.parallel.fsdp import FSDP
from rankcell.parallel.zero import ZeRO2

pytestmark = pytest.mark.slow

D = 6


def rows(step):
    """The global batch of a step, `(8, 3, D)`."""
    return models.regression(24, D, seed=step)[0].double().view(8, 3, D)


def mine(batch, group=None):
    """This rank's rows of a global batch."""
    return batch.chunk(dist.get_world_size(group))[dist.get_rank(group)]


def mean_square(model, x):
    return model(x).square().mean()


def tokens_of(model, x):
    tokens = (1000 * x.flatten(1)).long() % 29
    return models.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])


def optimizer_of(model):
    """AdamW that knows a matrix by its dims, also where a rank has a part of it."""
    matrices, rest = ([p for p in model.parameters() if (p.dim() > 1) == many] for many in (True, False))
    return torch.optim.AdamW([{"params": matrices, "weight_decay": 0.5}, {"params": rest}], lr=1e-2)


def apart(a, b):
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)


def gradients(module):
    return {n: p.grad for n, p in module.named_parameters() if p.grad is not None}


def largest_difference(make, kind, loss, *, clip=None, paired=False, **options):
    """Of gradients and weights from those of one process, over three steps of AdamW."""
    group = [dist.new_group([0, 1]), dist.new_group([2, 3])][dist.get_rank() // 2] if paired else None
    dense, module, worst = make(), make(), 0.0
    sharded = kind(module, process_group=group, **options)
    optimizers = [optimizer_of(m) for m in (dense, sharded)]
    for step in range(3):
        for model, optimizer in zip((dense, sharded), optimizers, strict=True):
            optimizer.zero_grad()
            loss(model, rows(step) if model is dense else mine(rows(step), group)).backward()
        if clip:
            norms = nn.utils.clip_grad_norm_(dense.parameters(), clip), sharded.clip_grad_norm_(clip)
            assert norms[0] > clip
            worst = max(worst, abs(norms[0] - norms[1]).item())
        worst = max(worst, apart(sharded.wholes_of(gradients(module)), gradients(dense)))
        for optimizer in optimizers:
            optimizer.step()
    assert kind is ZeRO2 or all(u.whole.untyped_storage().nbytes() == 0 for u in sharded._all_units)
    return max(worst, apart(sharded.full_state_dict(), dense.state_dict()))


def filled(module):
    """The module in float64 with weights that depend on their order only."""
    for i, p in enumerate(module.parameters()):
        p.data = 0.4 * torch.randn(p.shape, generator=models.generator(i, "filled"))
    return module.double()


def gpt():
    return models.GPT(29, 16, n_heads=2, n_layers=3, context=20, dtype=torch.float64)


def stack(act=nn.Tanh):
    return filled(nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(D, D), act())]))


def in_place():
    return stack(lambda: nn.ReLU(inplace=True))


class Odd(nn.Module):
    """Sizes that no world size divides, a weight tied across units, one frozen, some that nobody uses."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(D, 5), nn.Linear(5, D)
        self.three, self.unused = nn.Linear(D, 5), nn.Linear(3, 3)
        self.last = nn.Linear(5, 3, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.spare = nn.Parameter(torch.ones(3, 2))  # unused too, but in a unit that is used
        self.three.weight = self.one.weight
        self.two.weight.requires_grad_(False)

    def forward(self, x):
        return self.last(torch.tanh(self.three(torch.tanh(self.two(torch.tanh(self.one(x))))))) * self.scale


class Checkpointed(nn.Module):
    """Checkpoints around pairs of units, or "inside" them and the root, which has a tied weight."""

    def __init__(self, where):
        super().__init__()
        self.embed, self.head = nn.Linear(D, D, bias=False), nn.Linear(D, D, bias=False)
        self.head.weight = self.embed.weight
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(D, 9), nn.Tanh(), nn.Linear(9, D)) for _ in range(4)
        )
        self.where, self.again = where, lambda call: lambda x: checkpoint(call, x, use_reentrant=False)
        for block in self.blocks if where == "inside" else ():
            block.forward = self.again(block.forward)

    def forward(self, x):
        x, b = x.clone().requires_grad_(), self.blocks
        if self.where == "inside":
            return self.again(self.head)(nn.Sequential(*b)(self.again(lambda x: x @ self.embed.weight)(x)))
        return self.again(nn.Sequential(*b[2:], self.head))(self.again(nn.Sequential(*b[:2], self.embed))(x))


class Blocks(nn.Module):
    """The same blocks twice over, whose weights are used outside of their parts, too; a loss beside the output."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        return {"out": nn.Sequential(*self.blocks, *self.blocks)(x)}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.router, self.part = nn.Parameter(torch.eye(D)), nn.Linear(D, 2), nn.Linear(D, D)

    def forward(self, x):
        self.beside = self.router(x).square().mean()
        return x + torch.tanh(self.part(x @ self.weight)) @ self.weight.T


def overlapping(model, x):
    """Two calls and one backward, evaluation between, a second backward, losses beside the outputs."""
    out, other = model(x)["out"], model(2 * x)["out"]
    with torch.no_grad():
        model(3 * x)
    (out - 2 * other).square().mean().backward()
    out, other = model(x)["out"], model(2 * x)["out"]
    out.square().mean().backward()
    return other.mean() + sum(block.beside for block in getattr(model, "module", model).blocks)


CASES = {
    "GPT, two pairs, clipped": (gpt, FSDP, tokens_of, {"paired": True, "clip": 0.1}),
    "GPT, ZeRO2, clipped": (gpt, ZeRO2, tokens_of, {"clip": 0.1}),
    "odd": (lambda: filled(Odd()), FSDP, mean_square, {"clip": 0.05}),
    "odd, ZeRO2": (lambda: filled(Odd()), ZeRO2, mean_square, {"clip": 0.05}),
    "in place": (in_place, FSDP, mean_square, {}),
    "checkpoints": (lambda: filled(Checkpointed("pairs")), FSDP, mean_square, {}),
    "checkpoints, ZeRO2": (lambda: filled(Checkpointed("pairs")), ZeRO2, mean_square, {}),
    "inner checkpoints": (lambda: filled(Checkpointed("inside")), FSDP, mean_square, {}),
    "overlapping": (lambda: filled(Blocks()), FSDP, overlapping, {}),
    "overlapping, ZeRO2": (lambda: filled(Blocks()), ZeRO2, overlapping, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_gradients_and_weights_equal_one_process(four, case):
    *args, options = CASES[case]
    assert max(four.run(largest_difference, args=args, kwargs=options).values) < 1e-9


# The start


def test_all_begin_as_rank_0(four):
    def run():
        torch.manual_seed(dist.get_rank())
        layer = nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D))
        layer[1].running_mean += dist.get_rank()
        model = FSDP(layer)
        assert layer[0].weight.shape[:2] == (1, 1)  # no matrix, for optimizers of matrices
        return model.full_state_dict()

    values = four.run(run).values
    for state in values:
        torch.testing.assert_close(state, values[0], rtol=0, atol=0)


def test_meta_model_is_never_whole(four):
    def run():
        make = lambda: nn.Sequential(*[nn.Linear(32, 32) for _ in range(8)])
        dense, x = models.initialise(make()), rows(0).float().repeat(1, 1, 6)[..., :32]
        with torch.device("meta"):
            on_meta = make()
        fill = lambda name, unit: models.initialise(unit, prefix=f"{name}.") if name else None
        with rankcell.memory(torch.empty(0)) as held:
            model = FSDP(on_meta, device="cpu", initialise=fill)
        return torch.equal(model(x), dense(x)), max(sample.total for sample in held.samples)

    block = 4 * (32 * 32 + 32)
    for equal, peak in four.run(run).values:
        assert equal and peak < 8 * block / 4 + 4 * block  # and copies of the block that is made


# Memory and bytes


def watch(kind):
    """Where a layer computes: (phase, layer, units that are whole, bytes of gradients). Whole units after forward and
    after backward, gradients left; and parameters, their gradients and states, as shares of the whole.
    """
    unit, n, seen, after = 16 * 16 * 4, 6, [], []
    sharded = kind(nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(n)]))
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-3)
    flats = sharded._units
    whole = lambda: {i for i, f in enumerate(flats) if f.whole.untyped_storage().nbytes()}
    left = lambda: [t for f in flats for t in (f.gradient, f.reducing and f.reducing[2]) if t is not None]
    look = lambda phase, i: seen.append((phase, i, whole(), sum(t.nbytes for t in left()) / unit))
    for i, layer in enumerate(sharded.module):
        layer.register_forward_pre_hook(lambda *_, i=i: look("forward", i))
        layer.register_full_backward_hook(lambda *_, i=i: look("backward", i))
    for _ in range(2):  # the first forward has to learn the order
        seen.clear()
        out = sharded(torch.ones(2, 16, requires_grad=True))
        after = [len(whole())]
        out.sum().backward()
        after += [len(whole()), len(left())]
        optimizer.step()
    states = [t for s in optimizer.state.values() for t in s.values() if t.dim()]
    shares = []
    for tensors in (sharded.parameters(), (p.grad for p in sharded.parameters()), states):
        storages = {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in tensors)}
        shares.append(sum(storages.values()) / (n * unit))
    return seen, after, shares


def test_fsdp_holds_two_units_and_its_shards(four):
    for seen, after, shares in four.run(watch, args=(FSDP,)).values:
        for phase, i, whole, left in seen:
            ahead = i + 1 if phase == "forward" else i - 1
            assert whole == {i, ahead} & set(range(6)) and left <= 2  # that is reduced, and that computes
        assert len(seen) == 12 and after == [0, 0, 0] and shares == [1 / 4, 1 / 4, 2 / 4]


def test_zero2_keeps_parameters(four):
    for seen, after, shares in four.run(watch, args=(ZeRO2,)).values:
        assert max(s[3] for s in seen) <= 2 and after == [6, 6, 0]
        assert shares == [1, 1 / 4, 2 / 4]  # the shard is inside the whole


@pytest.mark.parametrize(("kind", "gathers"), [(ZeRO2, 1), (FSDP, 2)])
def test_bytes_on_the_wire(four, kind, gathers):
    """Each collective of S bytes moves (W-1)/W of S per rank; gloo's reduce-scatter runs an all-reduce."""
    psi = 4 * 128 * 128 * 4
    source = "from torch import nn\n"
    source += "sharded = kind(nn.Sequential(*[nn.Linear(128, 128, bias=False) for _ in range(4)]))\n"
    step = "sharded(torch.ones(2, 128)).sum().backward()"
    # the last line: it may be a cell's value, though there is no memory to read of what is freed
    four.run(f"{source}{step}\nsharded", push={"kind": kind})
    run = four.run(step)
    moved = [
        sum(e.nbytes for e in run.ranks[0].events if e.op == op) for op in ("all_gather", "reduce_scatter")
    ]
    assert moved == [gathers * psi / 4, psi]  # input bytes
    if run.wire:
        assert sum(map(sum, run.wire)) / 4 / (0.75 * psi) == pytest.approx(gathers + 2, rel=0.02)
