"""Tensor parallelism on real ranks: every gradient is the dense model's, and errors say what to do."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import rankcell
from mixtures import split_to_group
from rankcell import models
from rankcell.parallel import tensor as tp
from rankcell.parallel.transformer import ParallelDropout, tensor_parallel
from rankcell.parallel.vocabulary import VocabParallelEmbedding, vocab_parallel_cross_entropy

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def two():
    with rankcell.Ranks(2, device="cpu") as ranks:
        yield ranks


@pytest.fixture(params=[2, 4])
def world(request, four, two):
    """Two ranks, then four."""
    return two if request.param == 2 else four


def drawn(*shape, name="x"):
    """The same float64 numbers on every rank."""
    return torch.randn(shape, generator=models.generator(0, "test", name, shape), dtype=torch.float64)


def assert_all_close(run, atol=1e-12):
    """Each value is pairs by name: what a rank has, and what it should."""
    for value in run.values:
        for name, (found, expected) in value.items():
            torch.testing.assert_close(
                found, expected, atol=atol, rtol=0, msg=lambda m, name=name: f"{name}: {m}"
            )


# The six functions


def pairs(x, dim):
    """Each function before one that undoes it, with something else on every rank in between."""
    act = lambda x: torch.sin((1.0 + dist.get_rank()) * x)
    yield tp.reduce_from_group(act(tp.copy_to_group(x)))
    yield tp.gather_from_group(act(split_to_group(x, dim)), dim)
    yield tp.reduce_from_group(act(tp.all_gather(split_to_group(x, dim), dim)))
    yield tp.gather_from_group(tp.reduce_scatter(act(tp.copy_to_group(x)), dim), dim)


def test_gradcheck_of_every_pair_across_ranks(world):
    def check():
        for dim, shape in ((0, (4, 1, 2)), (-1, (2, 1, 4))):
            x = drawn(*shape).requires_grad_()
            assert torch.autograd.gradcheck(lambda x, dim=dim: tuple(pairs(x, dim)), x)
        x, rank, n = drawn(3, 6), dist.get_rank(), dist.get_world_size()
        mine = x.tensor_split(n, 1)[rank].clone().requires_grad_()
        out = tp.gather_from_group(mine, 1, total=6)  # of unequal parts
        (out * x).sum().backward()
        return {"out": (out, x), "grad": (mine.grad, x.tensor_split(n, 1)[rank])}

    assert_all_close(world.run(check, timeout=120), atol=0)


# Layers


def layers(bias, sequence):
    """A column and a row layer, one behind the other, beside dense ones."""
    rank, n = dist.get_rank(), dist.get_world_size()
    up, down = nn.Linear(8, 16, bias).double(), nn.Linear(16, 5, bias).double()
    for i, p in enumerate((*up.parameters(), *down.parameters())):
        p.data = drawn(*p.shape, name=i)
    how = {"sequence_parallel": sequence}
    column = tp.ColumnParallelLinear.from_linear(up, **how)
    row = tp.RowParallelLinear.from_linear(down, **how)
    x = drawn(2, 4, 8) if sequence else drawn(8)  # a vector will do, too
    x, x2 = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected = down(torch.tanh(up(x)))
    weights = drawn(*expected.shape, name="loss")
    (expected * weights).sum().backward()
    y = row(torch.tanh(column(split_to_group(x2, 1) if sequence else x2)))
    y = tp.gather_from_group(y, 1) if sequence else y
    (y * weights).sum().backward()
    found = {
        "y": (y, expected),
        "x": (x2.grad, x.grad),
        "column": (column.weight.grad, up.weight.grad.chunk(n, 0)[rank]),
        "row": (row.weight.grad, down.weight.grad.chunk(n, 1)[rank]),
    }
    if bias:
        found["column bias"] = column.bias.grad, up.bias.grad.chunk(n)[rank]
        found["row bias"] = row.bias.grad, down.bias.grad
    return found


@pytest.mark.parametrize(("bias", "sequence"), [(True, False), (True, True), (False, True)])
def test_column_and_row_equal_the_dense_layers(world, bias, sequence):
    assert_all_close(world.run(layers, args=(bias, sequence)))


def test_frozen_weights_get_no_gradient(two):
    def run():
        dense, x = nn.Linear(4, 4), torch.ones(2, 4)
        nn.init.ones_(dense.weight).requires_grad_(False)
        layer = tp.ColumnParallelLinear.from_linear(dense, sequence_parallel=True)
        layer(x).sum().backward()
        layer(x.requires_grad_()).sum().backward()
        return layer.weight.grad, layer.bias.grad.tolist(), x.grad.sum().item()

    assert two.run(run).values == [(None, [8.0, 8.0], 32)] * 2


# The vocabulary


@pytest.mark.parametrize(("vocab", "sequence"), [(8, False), (7, True), (5, False)])
def test_embedding_equals_dense(world, vocab, sequence):
    def run():
        dense = nn.Embedding(vocab, 3, _weight=drawn(vocab, 3))
        tokens, factor = torch.arange(8).view(2, 4) * 3 % vocab, drawn(2, 4, 3, name="loss")
        (dense(tokens) * factor).sum().backward()
        layer = VocabParallelEmbedding(dense, sequence_parallel=sequence)
        y = layer(tokens)
        y = tp.gather_from_group(y, 1) if sequence else y
        (y * factor).sum().backward()
        mine = dense.weight.grad.tensor_split(dist.get_world_size())[dist.get_rank()]
        return {"y": (y, dense(tokens)), "grad": (layer.weight.grad, mine)}

    assert_all_close(world.run(run), atol=0)


@pytest.mark.parametrize("vocab", [8, 7, 5])
def test_cross_entropy_equals_torchs(world, vocab):
    def run():
        rank, n = dist.get_rank(), dist.get_world_size()
        logits = (100 * drawn(2, 4, vocab)).requires_grad_()  # would overflow without the largest taken off
        targets = torch.arange(8).view(2, 4) * 3 % vocab
        dense = models.cross_entropy(logits, targets)
        mine = logits.detach().tensor_split(n, -1)[rank].clone().requires_grad_()
        ours = vocab_parallel_cross_entropy(mine, targets, vocab=vocab)
        dense.backward()
        ours.backward()
        return {"loss": (ours, dense), "grad": (mine.grad, logits.grad.tensor_split(n, -1)[rank])}

    result = world.run(run)
    assert_all_close(result)
    sent = [e.nbytes for e in result.ranks[0].events if e.op == "all_reduce"]
    assert sent == [8 * 8, 2 * 8 * 8]  # the largest; then the sums and the target's


def test_states_go_in_and_out_and_checkpoints(two):
    """A copy has the weights that were put in; a checkpoint draws the same dropout again."""

    def run():
        first, other = (models.GPT(7, 8, n_heads=2, context=4, n_layers=1, seed=seed) for seed in (0, 1))
        twin = tensor_parallel(first)
        twin.load_state_dict(tensor_parallel(other).state_dict())
        copied = tp.full_state_dict(copy.deepcopy(twin))  # process groups cannot be copied; modules can
        found = {name: (copied[name], value) for name, value in other.state_dict().items()}
        dims = tp.sharded_dims(twin)
        names = (
            "token_embedding.weight",
            "blocks.0.attention.output.weight",
            "blocks.0.mlp.down.bias",
            "norm.weight",
        )
        assert [dims[name] for name in names] == [0, 1, None, None]
        blocks = models.GPT(9, 16, dropout=0.1, dtype=torch.float64).blocks
        blocks = nn.Sequential(*(tensor_parallel(block, sequence_parallel=True) for block in blocks))
        for call in (blocks, lambda x: checkpoint(blocks, x, use_reentrant=False)):
            torch.manual_seed(0)
            blocks.zero_grad()
            call(drawn(2, 4, 16).requires_grad_()).square().sum().backward()
            for name, p in blocks.named_parameters():
                found[f"checkpoint {name}"] = found.get(f"checkpoint {name}", (p.grad,))[0], p.grad
        return found

    assert_all_close(two.run(run), atol=0)


def test_dropout_masks_differ_only_on_divided_activations(two):
    def run():
        torch.manual_seed(0)
        own = ParallelDropout(0.5)
        mask = own(torch.ones(64))
        out = tensor_parallel(models.GPT(9, 16, dropout=0.5, context=8))(torch.arange(8)[None])
        own.eval()
        return mask, out.detach(), torch.equal(own(torch.ones(3)), torch.ones(3))

    (mask0, out0, untouched), (mask1, out1, _) = two.run(run).values
    assert not torch.equal(mask0, mask1) and set(mask0.tolist()) == {0.0, 2.0}
    assert torch.equal(out0, out1) and untouched


def test_ranks_with_one_key_head_take_that_of_their_query_heads(four):
    def losses():
        dense = models.Llama(49, 16, n_heads=4, n_kv_heads=2, context=8, n_layers=1, dtype=torch.float64)
        x, y = models.batch(models.encode(models.text()), 0, size=2, length=8)
        wanted = models.cross_entropy(dense(x), y).detach()
        return {"loss": (tensor_parallel(dense)(x, y).detach(), wanted)}

    assert_all_close(four.run(losses))


# What a step sends


def test_communication_of_a_step(two):
    prepare = """
from rankcell import models
from rankcell.parallel.transformer import tensor_parallel
x, y = models.batch(models.encode(models.text()), 0, size=2, length=8)
model = tensor_parallel(models.{}, sequence_parallel={})
"""

    def sent(model, sequence=False):
        two.run(prepare.format(model, sequence))
        found = {}
        for e in two.run("model(x, y).backward()").ranks[0].events:
            found.setdefault(e.op, []).append(e.nbytes)
        return found

    whole, half, token = 2 * 8 * 16 * 4, 8 * 16 * 4, 2 * 8 * 4
    # two in each block forward and two backward; the embedding forward, the head backward; the loss
    plain = [token, 2 * token] + [whole] * (4 * 3 + 2)
    found = sent("GPT(49, 16, context=8, n_layers=3)")
    assert found.keys() == {"all_reduce"} and sorted(found["all_reduce"]) == plain
    found = sent("GPT(49, 16, context=8, n_layers=3)", True)
    # one pair in place of each
    assert found["reduce_scatter"] == [whole] * (2 * 3 + 1 + 2 * 3 + 1)
    assert found["all_gather"] == [half] * (2 * 3 + 1 + 2 * 3 + 1)
    # weights and biases of the norms; biases of the row layers; positions; the loss
    small = [16 * 4] * (2 * 7 + 6) + [8 * 16 * 4] + [token, 2 * token]
    assert sorted(found["all_reduce"]) == sorted(small)
    # gate and up travel together; two ranks with one key/value head, of 4, sum the gradients of its weights
    for n_kv_heads, shared in ((1, [4 * 16 * 4] * 2 * 3), (2, [])):
        found = sent(f"Llama(49, 16, n_kv_heads={n_kv_heads}, context=8, n_layers=3)")
        assert sorted(found.pop("all_reduce")) == sorted(plain + shared) and not found
