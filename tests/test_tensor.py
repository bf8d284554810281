"""Tensor parallelism on real ranks: every gradient is the dense model's, and errors say what to do."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import rankcell
from rankcell import models
from rankcell.parallel.transformer import tensor_parallel
from rankcell.parallel.vocabulary import VocabParallelEmbedding, vocab_parallel_cross_entropy

pytestmark = pytest.mark.slow

STEPS = 4


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


def assert_same_numbers(found, expected, atol=1e-12):
    assert list(found) == list(expected)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], atol=atol, rtol=0, msg=f"{name} differs")


# The six functions


def test_gradcheck_of_every_pair_across_ranks(world):
    def check():
        import torch.distributed as dist

        from rankcell.parallel import tensor as tp

        rank, n = dist.get_rank(), dist.get_world_size()
        checked = []
        for dim in (0, -1):
            own = 1.0 + rank  # every rank does something else in between
            whole = (drawn(4, 1, 2) if dim == 0 else drawn(2, 1, 4)).requires_grad_()
            pairs = {
                "copy, reduce": lambda x, own=own: tp.reduce_from_group(torch.sin(own * tp.copy_to_group(x))),
                "split, gather": lambda x, own=own, dim=dim: tp.gather_from_group(
                    torch.sin(own * tp.split_to_group(x, dim)), dim
                ),
                "split, all-gather, reduce": lambda x, own=own, dim=dim: tp.reduce_from_group(
                    torch.sin(own * tp.all_gather(tp.split_to_group(x, dim), dim))
                ),
                "copy, reduce-scatter, gather": lambda x, own=own, dim=dim: tp.gather_from_group(
                    tp.reduce_scatter(torch.sin(own * tp.copy_to_group(x)), dim), dim
                ),
            }
            for name, function in pairs.items():
                assert torch.autograd.gradcheck(function, whole), name
                if dim == 0:
                    small = whole[..., :1].detach().clone().requires_grad_()
                    assert torch.autograd.gradgradcheck(function, small), name
                checked.append(name)
        return n, len(checked)

    assert world.run(check, timeout=120).values == [(world.world_size, 8)] * world.world_size


def test_gather_of_unequal_parts(four):
    def gather():
        import torch.distributed as dist

        from rankcell.parallel import tensor as tp

        x = drawn(3, 6)
        mine = x.tensor_split(4, 1)[dist.get_rank()].clone().requires_grad_()
        out = tp.gather_from_group(mine, 1, total=6)
        (out * x).sum().backward()
        return torch.equal(out, x), torch.equal(mine.grad, x.tensor_split(4, 1)[dist.get_rank()])

    assert four.run(gather).values == [(True, True)] * 4


# Layers


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("sequence", [True, False])
def test_column_and_row_equal_the_dense_layers(world, bias, sequence):
    def run():
        import torch.distributed as dist

        from rankcell.parallel import tensor as tp

        rank, n = dist.get_rank(), dist.get_world_size()
        up, down = nn.Linear(6, 8, bias).double(), nn.Linear(8, 5, bias).double()
        for i, p in enumerate((*up.parameters(), *down.parameters())):
            p.data = drawn(*p.shape, name=i)
        x, weights = drawn(2, 4, 6).requires_grad_(), drawn(2, 4, 5, name="loss")
        (down(torch.tanh(up(x))) * weights).sum().backward()
        column = tp.ColumnParallelLinear.from_linear(up, sequence_parallel=sequence)
        row = tp.RowParallelLinear.from_linear(down, sequence_parallel=sequence)
        x2 = x.detach().clone().requires_grad_()
        y = row(torch.tanh(column(tp.split_to_group(x2, 1) if sequence else x2)))
        y = tp.gather_from_group(y, 1) if sequence else y
        (y * weights).sum().backward()
        chunks = {
            "x": (x2.grad, x.grad),
            "column": (column.weight.grad, up.weight.grad.chunk(n, 0)[rank]),
            "row": (row.weight.grad, down.weight.grad.chunk(n, 1)[rank]),
        }
        if bias:
            chunks["column bias"] = column.bias.grad, up.bias.grad.chunk(n)[rank]
            chunks["row bias"] = row.bias.grad, down.bias.grad
        return chunks, (y - down(torch.tanh(up(x)))).abs().max().item()

    for chunks, error in world.run(run).values:
        assert error < 1e-13
        assert_same_numbers({k: a for k, (a, _) in chunks.items()}, {k: b for k, (_, b) in chunks.items()})


def test_chunks_copied_in_by_hand_and_whole_inputs_and_outputs(world):
    def run():
        import torch.distributed as dist

        from rankcell.parallel.tensor import ColumnParallelLinear, RowParallelLinear

        rank, n = dist.get_rank(), dist.get_world_size()
        worst = 0.0
        for kind, dim, options in (
            (ColumnParallelLinear, 0, {"gather_output": True}),
            (RowParallelLinear, 1, {"input_is_parallel": False}),
        ):
            dense = nn.Linear(8, 4).double()
            dense.weight.data, dense.bias.data = drawn(4, 8), drawn(4)
            layer = kind(8, 4, True, **options, dtype=torch.float64)
            with torch.no_grad():
                layer.weight.copy_(dense.weight.chunk(n, dim)[rank])
                layer.bias.copy_(dense.bias.chunk(n)[rank] if dim == 0 else dense.bias)
            x, x2 = drawn(3, 8).requires_grad_(), drawn(3, 8).requires_grad_()
            dense(x).square().sum().backward()
            y = layer(x2)
            y.square().sum().backward()
            pairs = [(y, dense(x)), (x2.grad, x.grad)]
            pairs.append((layer.weight.grad, dense.weight.grad.chunk(n, dim)[rank]))
            bias = dense.bias.grad.chunk(n)[rank] if dim == 0 else dense.bias.grad
            pairs.append((layer.bias.grad, bias))
            worst = max(worst, *((a - b).abs().max().item() for a, b in pairs))
        return worst

    assert max(world.run(run).values) < 1e-12


def test_new_layers_are_drawn_whole_from_the_first_rank(four):
    def run():
        import torch.distributed as dist

        from rankcell.parallel import tensor as tp

        rank = dist.get_rank()
        torch.manual_seed(rank)  # the ranks would all draw something else
        layers = [
            tp.ColumnParallelLinear(400, 100),
            tp.RowParallelLinear(400, 100),
            VocabParallelEmbedding(100, 400),
        ]
        torch.manual_seed(0)
        whole = [nn.Linear(400, 100), nn.Linear(400, 100), nn.Embedding(100, 400)]
        same = [
            torch.equal(a.weight, b.weight.chunk(4, dim)[rank])
            for a, b, dim in zip(layers, whole, (0, 1, 0), strict=True)
        ]
        return same, layers[0].weight.std().item()

    for same, std in four.run(run).values:
        assert same == [True] * 3
        assert std == pytest.approx((1 / 3 / 400) ** 0.5, rel=0.05)  # fan-in of the whole layer


def test_frozen_weights_and_inputs_without_gradient(two):
    def run():
        from rankcell.parallel import tensor as tp

        dense = nn.Linear(4, 4)
        nn.init.ones_(dense.weight)
        dense.weight.requires_grad_(False)
        out = []
        for sequence in (False, True):
            layer = tp.ColumnParallelLinear.from_linear(dense, sequence_parallel=sequence)
            x = torch.ones(2, 4)
            layer(x).sum().backward()
            out.append((layer.weight.grad is None, layer.bias.grad.tolist()))
            x.requires_grad_()
            layer(x).sum().backward()
            out.append(x.grad.sum().item())
        return out

    a, b, c, d = two.run(run).values[0]
    assert a == (True, [2.0, 2.0]) and c == (True, [4.0, 4.0])
    assert b == d == 32


def test_a_single_vector(two):
    """Without a batch, as nn.Linear takes it too."""

    def run():
        from rankcell.parallel import tensor as tp

        up, down = nn.Linear(6, 8).double(), nn.Linear(8, 5).double()
        for i, p in enumerate((*up.parameters(), *down.parameters())):
            p.data = drawn(*p.shape, name=i)
        column = tp.ColumnParallelLinear.from_linear(up)
        row = tp.RowParallelLinear.from_linear(down)
        x, x2 = (drawn(6).requires_grad_() for _ in range(2))
        down(up(x)).square().sum().backward()
        y = row(column(x2))
        y.square().sum().backward()
        rank = 0 if column.group.rank == 0 else 1
        return [
            torch.equal(y, y.flatten()),
            *(
                torch.allclose(ours, dense, atol=1e-12, rtol=0)
                for ours, dense in (
                    (x2.grad, x.grad),
                    (column.weight.grad, up.weight.grad.chunk(2, 0)[rank]),
                    (row.weight.grad, down.weight.grad.chunk(2, 1)[rank]),
                    (row.bias.grad, down.bias.grad),
                )
            ),
        ]

    assert two.run(run).values == [[True] * 5] * 2


def test_autocast(two):
    def run():

        mlp = tensor_parallel(models.MLP(8, 16, 8))
        x = torch.ones(4, 8, requires_grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = mlp(x)
        y.float().sum().backward()
        return y.dtype, mlp.up.weight.grad.dtype, x.grad.dtype

    assert two.run(run).values[0] == (torch.bfloat16, torch.float32, torch.float32)


# The vocabulary


@pytest.mark.parametrize("vocab", [8, 7, 5])
@pytest.mark.parametrize("sequence", [True, False])
def test_embedding_equals_dense(world, vocab, sequence):
    def run():
        import torch.distributed as dist

        from rankcell.parallel import tensor as tp

        rank, n = dist.get_rank(), dist.get_world_size()
        dense = nn.Embedding(vocab, 3).double()
        dense.weight.data = drawn(vocab, 3)
        tokens = torch.arange(8).view(2, 4) * 3 % vocab
        factor = drawn(2, 4, 3, name="loss")
        (dense(tokens) * factor).sum().backward()
        layer = VocabParallelEmbedding.from_embedding(dense, sequence_parallel=sequence)
        y = layer(tokens)
        y = tp.gather_from_group(y, 1) if sequence else y
        (y * factor).sum().backward()
        gradient = dense.weight.grad.tensor_split(n)[rank]
        return torch.equal(y, dense(tokens)), torch.equal(layer.weight.grad, gradient)

    assert world.run(run).values == [(True, True)] * world.world_size


@pytest.mark.parametrize("vocab", [8, 7, 5])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy_equals_torchs(world, vocab, reduction):
    def run():
        import torch.distributed as dist

        rank, n = dist.get_rank(), dist.get_world_size()
        logits = (100 * drawn(2, 4, vocab)).requires_grad_()  # would overflow without the largest taken off
        targets = torch.arange(8).view(2, 4) * 3 % vocab
        targets[0, 1] = -100
        dense = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=reduction)
        mine = logits.detach().tensor_split(n, -1)[rank].clone().requires_grad_()
        ours = vocab_parallel_cross_entropy(mine, targets, vocab=vocab, reduction=reduction)
        factor = drawn(2, 4, name="factor") if reduction == "none" else torch.tensor(1.0)
        (dense.view(factor.shape) * factor).sum().backward()
        (ours * factor).sum().backward()
        error = (ours - dense.view(ours.shape)).abs().max().item()
        return error, (mine.grad - logits.grad.tensor_split(n, -1)[rank]).abs().max().item()

    assert max(map(max, world.run(run).values)) < 1e-12


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_gradcheck_of_cross_entropy_across_ranks(world, smoothing):
    def run(smoothing):
        from rankcell.parallel import tensor as tp

        logits, targets = drawn(3, 8).requires_grad_(), torch.tensor([7, 0, 3])
        how = {"reduction": "none", "label_smoothing": smoothing}
        return torch.autograd.gradcheck(
            lambda x: vocab_parallel_cross_entropy(tp.split_to_group(x), targets, **how), logits
        )

    assert all(world.run(run, args=(smoothing,)).values)


@pytest.mark.parametrize("smoothing", [0.1, 1.0])
@pytest.mark.parametrize("vocab", [8, 7])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_label_smoothing_equals_torchs_and_sends_one_number_more(world, vocab, reduction, smoothing):
    def run():
        import torch.distributed as dist

        rank, n = dist.get_rank(), dist.get_world_size()
        logits = (10 * drawn(2, 4, vocab)).requires_grad_()
        targets = torch.arange(8).view(2, 4) * 3 % vocab
        targets[0, 1] = -100
        how = {"reduction": reduction, "label_smoothing": smoothing}
        dense = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), **how)
        mine = logits.detach().tensor_split(n, -1)[rank].clone().requires_grad_()
        ours = vocab_parallel_cross_entropy(mine, targets, vocab=vocab, **how)
        factor = drawn(2, 4, name="factor") if reduction == "none" else torch.tensor(1.0)
        (dense.view(factor.shape) * factor).sum().backward()
        (ours * factor).sum().backward()
        error = (ours - dense.view(ours.shape)).abs().max().item()
        return error, (mine.grad - logits.grad.tensor_split(n, -1)[rank]).abs().max().item()

    result = world.run(run)
    assert max(map(max, result.values)) < 1e-12
    sent = [e.nbytes for e in result.ranks[0].events if e.op == "all_reduce"]
    assert sent == [8 * 8, 3 * 8 * 8]  # the largest; then exponentials, the target's and all logits


def test_cross_entropy_in_bfloat16_sums_in_float32(two):
    def run():

        logits = torch.zeros(1, 500, dtype=torch.bfloat16, requires_grad=True)
        loss = vocab_parallel_cross_entropy(logits, torch.tensor([3]))
        loss.backward()
        return loss.item(), logits.grad.dtype

    loss, dtype = two.run(run).values[0]
    assert loss == pytest.approx(6.907755, abs=1e-5) and dtype == torch.bfloat16  # ln 1000


# The GPT


def train_both(
    sequence_parallel,
    tied=True,
    vocab=49,
    process_group=None,
    steps=STEPS,
    clip=None,
    n_layers=2,
    n_kv_heads=None,
):
    """Largest difference of losses and gradients over some steps, and both state dicts at the end: of a GPT,
    or with `n_kv_heads` of a Llama with 8 query heads.
    """
    from rankcell.parallel import tensor as tp

    shape = dict(context=8, n_layers=n_layers, tied=tied, dtype=torch.float64)
    if n_kv_heads is None:
        dense = models.GPT(vocab, 16, n_heads=4, **shape)
    else:
        dense = models.Llama(vocab, 16, n_heads=8, n_kv_heads=n_kv_heads, **shape)
    twin = tensor_parallel(dense, process_group, sequence_parallel=sequence_parallel)
    assert (twin.head.weight is twin.token_embedding.weight) == tied
    pairs = [(m, torch.optim.AdamW(m.parameters(), lr=1e-2)) for m in (dense, twin)]
    tokens, worst = models.encode(models.text()) % vocab, 0.0
    for step in range(steps):
        x, y = models.batch(tokens, step, size=4, length=8)
        for _, optimizer in pairs:
            optimizer.zero_grad()
        expected = models.cross_entropy(dense(x), y)
        loss = twin(x, y) if step % 2 else models.cross_entropy(twin(x), y)  # by parts, or of whole logits
        expected.backward()
        loss.backward()
        gradients = tp.full_state_dict(twin, {name: p.grad for name, p in twin.named_parameters()})
        differences = [(p.grad - gradients[name]).abs().max() for name, p in dense.named_parameters()]
        worst = max(worst, abs(loss.item() - expected.item()), torch.stack(differences).max().item())
        if clip is not None:
            norms = tp.clip_grad_norm_(twin, clip), nn.utils.clip_grad_norm_(dense.parameters(), clip)
            worst = max(worst, abs(norms[0].item() - norms[1].item()))
        for _, optimizer in pairs:
            optimizer.step()
    return worst, tp.full_state_dict(twin), dense.state_dict()


@pytest.mark.alike(2)
@pytest.mark.parametrize(
    ("sequence_parallel", "tied", "vocab"),
    [(False, True, 49), (True, True, 49), (False, False, 49), (True, False, 49), (True, True, 48)],
)
def test_gpt_trains_as_the_dense_model(world, sequence_parallel, tied, vocab):
    for worst, whole, dense in world.run(train_both, args=(sequence_parallel, tied, vocab)).values:
        assert worst < 1e-12
        assert_same_numbers(whole, dense, atol=1e-6)


@pytest.mark.alike(3)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("n_kv_heads", [1, 2, 4, 8])
def test_llama_trains_as_the_dense_model(world, sequence_parallel, n_kv_heads):
    """Fewer, as many and more key/value heads than ranks; also the norm of all gradients."""
    how = {"n_kv_heads": n_kv_heads, "tied": n_kv_heads == 2, "clip": 0.1}
    for worst, whole, dense in world.run(train_both, args=(sequence_parallel,), kwargs=how).values:
        assert worst < 1e-12
        assert_same_numbers(whole, dense, atol=1e-6)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_grouped_query_attention_alone(four, bias, sequence_parallel):
    def run(bias, sequence_parallel):
        from rankcell.parallel import tensor as tp

        how = {"n_kv_heads": 2, "bias": bias, "rope_base": 100.0, "dtype": torch.float64}
        dense = models.Attention(16, 8, **how)
        twin = tensor_parallel(dense, sequence_parallel=sequence_parallel)
        x = drawn(2, 4, 16)
        dense(x).square().sum().backward()
        y = twin(tp.split_to_group(x, 1) if sequence_parallel else x)
        y = tp.gather_from_group(y, 1) if sequence_parallel else y
        y.square().sum().backward()
        found = tp.full_state_dict(twin, {name: p.grad for name, p in twin.named_parameters()})
        return found, {name: p.grad for name, p in dense.named_parameters()}, tp.sharded_dims(twin)

    for found, expected, dims in four.run(run, args=(bias, sequence_parallel)).values:
        assert_same_numbers(found, expected, atol=1e-12)
        assert dims["query.weight"] == 0 and dims["key.weight"] is None  # 2 heads, 4 ranks: all hold both


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_gpt_in_two_groups_of_two_with_clipping(four, sequence_parallel):
    def run(sequence_parallel):
        import torch.distributed as dist

        pairs = [dist.new_group([0, 2]), dist.new_group([3, 1])]
        group = pairs[dist.get_rank() % 2]
        return train_both(sequence_parallel, process_group=group, steps=4, clip=0.1, n_layers=1)

    for worst, whole, dense in four.run(run, args=(sequence_parallel,)).values:
        assert worst < 1e-12
        assert_same_numbers(whole, dense, atol=1e-6)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_group_of_one_rank_is_the_dense_model_and_sends_nothing(two, sequence_parallel):
    def run(sequence_parallel):
        import torch.distributed as dist

        alone = [dist.new_group([0]), dist.new_group([1])][dist.get_rank()]
        return train_both(sequence_parallel, process_group=alone, steps=3, clip=0.1, n_layers=1)

    result = two.run(run, args=(sequence_parallel,))
    assert not [e for e in result.events if e.kind == "comm" and e.op != "barrier"]
    for worst, whole, dense in result.values:
        assert worst < 1e-12
        assert_same_numbers(whole, dense, atol=1e-6)


def test_data_parallel_times_tensor_parallel(four):
    def run():
        import torch.distributed as dist

        from rankcell.parallel import tensor as tp
        from rankcell.parallel.ddp import DDP
        from rankcell.parallel.zero import FSDP

        rank = dist.get_rank()
        tensor_groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        data_groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        tokens = models.encode(models.text())
        dense = models.GPT(49, 16, context=8, dtype=torch.float64)
        wrapped = {}
        for kind in (DDP, FSDP):
            twin = tensor_parallel(dense, tensor_groups[rank // 2], sequence_parallel=True)
            wrapped[kind] = twin, kind(twin, process_group=data_groups[rank % 2])
        models_and = [(dense, torch.optim.AdamW(dense.parameters(), lr=1e-2))]
        models_and += [(m, torch.optim.AdamW(m.parameters(), lr=1e-2)) for _, m in wrapped.values()]
        for step in range(4):
            for model, optimizer in models_and:
                optimizer.zero_grad()
                if model is dense:
                    x, y = models.batch(tokens, step, size=4, length=8)
                    models.cross_entropy(model(x), y).backward()
                else:
                    x, y = models.batch(tokens, step, size=4, length=8, rank=rank // 2, world_size=2)
                    model(x, y).backward()
                    model.finish_gradient_synchronization()
                optimizer.step()
        (twin, _), (sharded, fsdp) = wrapped.values()
        states = [tp.full_state_dict(twin), tp.full_state_dict(sharded, fsdp.full_state_dict())]
        return states, dense.state_dict()

    for states, dense in four.run(run, timeout=120).values:
        for state in states:
            assert_same_numbers(state, dense, atol=1e-6)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_single_block_and_gradients_that_add_up(two, sequence_parallel):
    def run(sequence_parallel):
        from rankcell.parallel import tensor as tp

        dense = nn.Sequential(*models.GPT(9, 16, dtype=torch.float64).blocks)
        twin = tensor_parallel(dense, sequence_parallel=sequence_parallel)
        for step in range(2):  # two backwards before a step
            x = drawn(2, 4, 16, name=step)
            dense(x).square().sum().backward()
            y = twin(tp.split_to_group(x, 1)) if sequence_parallel else twin(x)
            y = tp.gather_from_group(y, 1) if sequence_parallel else y
            y.square().sum().backward()
        found = tp.full_state_dict(twin, {name: p.grad for name, p in twin.named_parameters()})
        return found, {name: p.grad for name, p in dense.named_parameters()}

    for found, expected in two.run(run, args=(sequence_parallel,)).values:
        assert_same_numbers(found, expected, atol=1e-10)


def test_states_go_in_and_out(two):
    def run():
        from rankcell.parallel import tensor as tp

        first, other = (models.GPT(7, 8, n_heads=2, context=4, n_layers=1, seed=seed) for seed in (0, 1))
        twin = tensor_parallel(first)
        twin.load_state_dict(tp.local_state_dict(twin, other.state_dict()))
        dims = tp.sharded_dims(twin)
        copied = copy.deepcopy(twin)  # process groups cannot be copied; modules can
        return tp.full_state_dict(copied), other.state_dict(), dims

    for found, expected, dims in two.run(run).values:
        assert_same_numbers(found, expected, atol=0)
        assert dims["token_embedding.weight"] == dims["head.weight"] == 0
        assert dims["blocks.0.attention.output.weight"] == 1
        assert dims["blocks.0.attention.output.bias"] is None and dims["norm.weight"] is None


def test_checkpointed_blocks_give_the_same_gradients(two):
    def run():
        from torch.utils.checkpoint import checkpoint

        dense = models.GPT(9, 16, n_layers=1, dropout=0.1, dtype=torch.float64)
        gradients = []
        for recompute in (False, True):
            block = tensor_parallel(dense.blocks[0], sequence_parallel=True)
            torch.manual_seed(0)
            x = drawn(2, 4, 16).requires_grad_()
            y = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
            y.square().sum().backward()
            gradients.append([x.grad, *(p.grad for p in block.parameters())])
        return [torch.equal(a, b) for a, b in zip(*gradients, strict=True)]

    assert all(map(all, two.run(run).values))


def test_dropout_is_the_ranks_own_where_they_hold_other_things_and_shared_where_not(two):
    def run():
        from rankcell.parallel import tensor as tp

        torch.manual_seed(0)
        own = tp.ParallelDropout(0.5)
        mask = own(torch.ones(64))
        gpt = tensor_parallel(models.GPT(9, 16, dropout=0.5, context=8))
        out = gpt(torch.arange(8)[None])
        own.eval()
        return mask, out.detach(), torch.equal(own(torch.ones(3)), torch.ones(3))

    (mask0, out0, untouched), (mask1, out1, _) = two.run(run).values
    assert not torch.equal(mask0, mask1) and set(mask0.tolist()) == {0.0, 2.0}
    assert torch.equal(out0, out1) and untouched


def test_sequence_parallel_keeps_a_part_of_what_a_block_saves(two):
    def run():

        dense = models.GPT(9, 32, n_heads=4, n_layers=1).blocks[0]

        def saved(sequence_parallel):
            block, seen = tensor_parallel(dense, sequence_parallel=sequence_parallel), {}
            mine = {p.untyped_storage().data_ptr() for p in block.parameters()}
            x = torch.randn(2, 8 // (2 if sequence_parallel else 1), 32, requires_grad=True)

            def keep(t):
                if t.untyped_storage().data_ptr() not in mine:
                    seen[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
                return t

            with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
                block(x)
            return sum(seen.values())

        return saved(False), saved(True)

    n = 2 * 8  # tokens
    divided = n * (3 * 32 + 32 + 8 * 32 + 4 * 8) * 4 // 2 + 8 * 8  # and the mask
    norms = n * (4 * 32 + 4) * 4
    for replicated, by_sequence in two.run(run).values:
        assert replicated == divided + norms
        assert by_sequence == divided + norms // 2


# What a step sends


def test_communication_of_a_step(two):
    prepare = """
from rankcell import models
from rankcell.parallel.transformer import tensor_parallel
x, y = models.batch(models.encode(models.text()), 0, size=2, length=8)
model = tensor_parallel(models.GPT(49, 16, context=8, n_layers=3), sequence_parallel={})
"""
    counts = {}
    for sequence_parallel in (False, True):
        two.run(prepare.format(sequence_parallel))
        events = two.run("model(x, y).backward()").ranks[0].events
        counts[sequence_parallel] = {}
        for e in events:
            sent = counts[sequence_parallel].setdefault(e.op, [])
            sent.append(e.nbytes)
    whole, half, token = 2 * 8 * 16 * 4, 8 * 16 * 4, 2 * 8 * 4
    # two in each block forward and two backward; the embedding forward, the head backward; the loss
    assert sorted(counts[False].pop("all_reduce")) == [token, 2 * token] + [whole] * (4 * 3 + 2)
    assert not counts[False]
    # one pair in place of each, and once more to have the input of each column layer again
    assert counts[True]["reduce_scatter"] == [whole] * (2 * 3 + 1 + 2 * 3 + 1)
    assert counts[True]["all_gather"] == [half] * (2 * 3 + 1 + 2 * (2 * 3) + 1 + 1)
    # norms: weight and bias, one all-reduce each; biases of the row layers; positions; the loss
    small = [2 * 16 * 4] * 7 + [16 * 4] * 6 + [8 * 16 * 4] + [token, 2 * token]
    assert sorted(counts[True]["all_reduce"]) == sorted(small)


@pytest.mark.parametrize("n_kv_heads", [1, 2])
def test_a_llama_sends_no_more_than_the_gpt_but_for_shared_key_value_heads(two, n_kv_heads):
    """Gate and up travel together. Two ranks with one key/value head sum the gradients of its weights."""
    two.run(f"""
from rankcell import models
from rankcell.parallel.transformer import tensor_parallel
x, y = models.batch(models.encode(models.text()), 0, size=2, length=8)
model = tensor_parallel(models.Llama(49, 16, n_kv_heads={n_kv_heads}, context=8, n_layers=3))
""")
    events = two.run("model(x, y).backward()").ranks[0].events
    whole, token, shared = 2 * 8 * 16 * 4, 2 * 8 * 4, 4 * 16 * 4  # a head of 4, weights without bias
    expected = [token, 2 * token] + [whole] * (4 * 3 + 2) + [shared] * (2 * 3 if n_kv_heads == 1 else 0)
    assert {e.op for e in events} == {"all_reduce"}
    assert sorted(e.nbytes for e in events) == sorted(expected)


# Errors


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "tp.ColumnParallelLinear(4, 5)",
            r"5 \(output features of a column-parallel layer\) cannot be shared evenly by 2 ranks. Choose a "
            r"multiple of 2, or a group whose size divides 5.",
        ),
        ("tp.RowParallelLinear(5, 4)", r"5 \(input features of a row-parallel layer\) cannot be shared"),
        (
            "tensor_parallel(models.GPT(9, 9, n_heads=3, d_hidden=8))",
            r"3 \(attention heads\) cannot be shared evenly by 2 ranks",
        ),
        (
            "gpt = models.GPT(9, 8, context=8)\n"
            "tensor_parallel(gpt, sequence_parallel=True)(torch.zeros(1, 5).long())",
            r"5 \(tokens of a sequence\) cannot be shared evenly by 2 ranks",
        ),
        (
            "tensor_parallel(models.GPT(9, 8, context=8))(torch.zeros(1, 9).long())",
            "9 tokens are more than the context of 8. Cut the sequence.",
        ),
        (
            "tensor_parallel(models.Attention(24, 12, n_kv_heads=3))",
            "3 key/value heads cannot be shared by 2 ranks: neither number divides the other. Choose a group "
            "whose size divides 3, or is a multiple of it.",
        ),
        (
            "tp.ColumnParallelLinear(4, 4, sequence_parallel=True)(torch.ones(4))",
            r"A tensor of shape \(4,\) has no dim -2 that ranks could share. Sequence parallelism shares the "
            r"dim before the last: give it \(length, features\) or more.",
        ),
        (
            "tp.RowParallelLinear(8, 4, sequence_parallel=True)(torch.ones(4))",
            r"A tensor of shape \(4,\) has no dim -2 that ranks could share.",
        ),
        (
            "vocab_parallel_cross_entropy(torch.zeros(1, 4), torch.tensor([0]), label_smoothing=2)",
            "Label smoothing is a share from 0 to 1, not 2.",
        ),
        (
            "tp.RowParallelLinear(8, 4)(torch.ones(1, 8))",
            r"expects 4 of its 8 input features on each of 2 ranks and got 8. Give it the output of a "
            r"column-parallel layer, or set input_is_parallel=False",
        ),
        ("tp.split_to_group(torch.ones(3, 5), 1)", r"5 \(dim 1 of a tensor of shape \(3, 5\)\) cannot be"),
        ("tp.reduce_scatter(torch.ones(3, 5), 0)", r"3 \(dim 0 of a tensor of shape \(3, 5\)\) cannot be"),
        ("VocabParallelEmbedding(1, 5)", "A vocabulary of 1 is too small for 2 ranks. Use fewer ranks."),
        (
            "VocabParallelEmbedding(7, 5)(torch.tensor([0, 7]))",
            r"There is no token 7 in a vocabulary of 7 \(0 to 6\). Look at where the tokens come from.",
        ),
        (
            "vocab_parallel_cross_entropy(torch.zeros(2, 4), torch.tensor([0, -1]))",
            r"There is no target -1 in a vocabulary of 8",
        ),
        (
            "vocab_parallel_cross_entropy(torch.zeros(2, 4), torch.tensor([0, 1]), vocab=9)",
            r"Rank 1 of 2 holds 4 of 9 logits, but got 4|Rank 0 of 2 holds 5 of 9 logits, but got 4. Give it "
            r"its part",
        ),
        (
            "vocab_parallel_cross_entropy(torch.zeros(1, 4), torch.tensor([0]), reduction='max')",
            'There is no reduction \'max\'. Choose "mean", "sum" or "none".',
        ),
        (
            "tensor_parallel(models.GPT(9, 8, seed=rank))",
            "The ranks of this group hold different models: .* of .* parameters differ, first "
            "token_embedding.weight. Build it from the same seed on all ranks, or broadcast it first.",
        ),
        (
            "tensor_parallel(torch.nn.Conv1d(2, 2, 1).requires_grad_(False).to('meta'))",
            "tensor_parallel knows GPT and Llama of rankcell.models, their blocks, attention and MLPs, and "
            "lists of them, not Conv1d. Build it from ColumnParallelLinear and RowParallelLinear.",
        ),
        (
            "g = dist.new_group([0])\nif rank == 1: tp.ColumnParallelLinear(4, 4, process_group=g)",
            "Rank 1 is not in the process group of this layer. Only its members build it.",
        ),
    ],
)
def test_errors_say_what_to_do(two, source, message):
    with pytest.raises(rankcell.RankError, match=message):
        two.run(
            "from rankcell import models\nfrom rankcell.parallel import tensor as tp\n"
            "from rankcell.parallel.transformer import tensor_parallel\n"
            "from rankcell.parallel.vocabulary import *\n" + source
        )
