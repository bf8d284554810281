"""What the strategies share: membership of a group, many tensors in one message, one gradient norm."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from rankcell.parallel import group

pytestmark = pytest.mark.slow


def test_a_place_is_a_number_and_a_size_or_an_error(four):
    def run():
        pair = dist.new_group([1, 3])
        if dist.get_rank() in (1, 3):
            return group.place(None, "this layer"), group.place(pair, "this layer")
        with pytest.raises(ValueError) as caught:
            group.place(pair, "this layer", use="build it")
        return str(caught.value)

    values = four.run(run).values
    assert values[3] == ((3, 4), (1, 2))
    assert values[2] == "Rank 2 is not in the process group of this layer. Only its members build it."


def test_tensors_of_one_dtype_travel_together(four):
    def run():
        rank = dist.get_rank()
        tensors = [torch.full((2, 3), float(rank)), torch.full((), rank), torch.full((3, 2), 10.0 * rank).t()]
        group.all_reduce_together(tensors)
        sums = [t.clone() for t in tensors]
        tensors[2].add_(rank)
        complex_one = torch.tensor([1j * rank])
        pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
        group.broadcast_together([*tensors, complex_one, torch.empty(0)], 1, pair)
        return sums, tensors[2], complex_one

    run = four.run(run)
    for rank, (sums, sent, complex_one) in enumerate(run.values):
        assert [t.flatten().tolist() for t in sums] == [[6.0] * 6, [6], [60.0] * 6]
        assert sums[2].shape == (2, 3) and set(sent.flatten().tolist()) == {60.0 + (1 if rank < 2 else 3)}
        assert complex_one.item() == (1j if rank < 2 else 3j)
    ops = [(e.op, e.dtype) for e in run.ranks[0].events]
    assert sorted(ops) == [
        ("all_reduce", "float32"),
        ("all_reduce", "int64"),
        ("broadcast", "float32"),
        ("broadcast", "int64"),
    ]


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_a_norm_over_two_groups_is_that_of_one_process(four, max_norm):
    """A vector of eight in four parts: over pairs, then across them; a number that all hold counts once."""

    def run(max_norm):
        rank = dist.get_rank()
        whole = nn.Parameter(torch.zeros(9))
        whole.grad = torch.arange(9.0) - 3
        mine, shared = whole.grad[2 * rank : 2 * rank + 2].clone(), whole.grad[8:].clone()
        pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
        across = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
        norm = group.clip_grad_norm_(
            [mine, shared],
            max_norm,
            counted=[mine, shared] if rank == 0 else [mine],
            process_groups=[pair, across],
            device=torch.device("cpu"),
        )
        expected = nn.utils.clip_grad_norm_([whole], max_norm)
        torch.testing.assert_close(norm.float(), expected)
        torch.testing.assert_close(mine, whole.grad[2 * rank : 2 * rank + 2])
        torch.testing.assert_close(shared, whole.grad[8:])
        return norm.item()

    assert len(set(four.run(run, args=(max_norm,)).values)) == 1
