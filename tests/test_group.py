"""What the strategies share: membership of a group, many tensors in one message."""

import pytest
import torch
import torch.distributed as dist

from rankcell.parallel import group

pytestmark = pytest.mark.slow


def test_a_place_is_a_number_and_a_size(four):
    def run():
        trio = dist.new_group([1, 2, 3])
        return group.place(trio if dist.get_rank() else None, "this layer")

    assert four.run(run).values == [(0, 4), (0, 3), (1, 3), (2, 3)]


def test_tensors_of_one_dtype_travel_together(four):
    def run():
        rank = dist.get_rank()
        tensors = [torch.full((2, 3), float(rank)), torch.full((), rank), torch.full((3, 2), 10.0 * rank).t()]
        group.all_reduce_together(tensors)
        sums = [t.flatten().tolist() for t in tensors]
        last = [torch.full((2,), float(rank)), torch.tensor(float(rank)), torch.empty(0)]
        group.broadcast_together(last, [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2])
        return sums, last[0].tolist(), last[1].item()

    run = four.run(run)
    for rank, value in enumerate(run.values):
        source = 0 if rank < 2 else 2
        assert value == ([[6.0] * 6, [6], [60.0] * 6], [source] * 2, source)
    ops = sorted((e.op, e.dtype) for e in run.ranks[0].events)
    assert ops == [("all_reduce", "float32"), ("all_reduce", "int64"), ("broadcast", "float32")]


def test_a_group_of_a_reused_name_has_its_own_ranks(four):
    source = """
for ranks in ([0, 1], [1, 2]):
    dist.destroy_process_group()
    dist.init_process_group("gloo")
    group = dist.new_group(ranks)  # the first one that torch numbers
    if rank in ranks: dist.all_reduce(torch.ones(1), group=group)
"""
    found = [(e.rank, e.ranks) for e in four.run(source).events if e.op == "all_reduce"]
    assert sorted(found) == [(0, (0, 1)), (1, (0, 1)), (1, (1, 2)), (2, (1, 2))]
