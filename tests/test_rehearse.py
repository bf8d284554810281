"""A rehearsed rank does what a real one does: the same operations, bytes and memory, and no computing."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import rankcell
from rankcell import models

pytestmark = pytest.mark.slow

VOCAB, WIDTH, LENGTH, ROWS = 40, 32, 8, 8


def llama(**options):
    shape = dict(n_heads=4, n_kv_heads=4, n_layers=2, context=LENGTH)
    return models.Llama(VOCAB, WIDTH, **shape | options)


def gpt(**options):
    return models.GPT(VOCAB, WIDTH, n_heads=4, n_layers=2, context=LENGTH, **options)


def batch(step, place, count):
    """The rows of `place` of `count`: places in a text that are drawn, and read as numbers."""
    tokens = torch.arange(400) * 7919 % VOCAB
    return models.batch(tokens, step, size=ROWS, length=LENGTH, rank=place, world_size=count)


def train(model, place, count, loss=None):
    """Two steps of AdamW, measured."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with rankcell.memory(model, optimizer):
        for step in range(2):
            x, y = batch(step, place, count)
            found = model(x, y) if loss is None else loss(model(x), y)
            found.backward()
            optimizer.step()
            optimizer.zero_grad()


def ddp():
    model = nn.parallel.DistributedDataParallel(gpt(), bucket_cap_mb=0.02)
    train(model, dist.get_rank(), dist.get_world_size(), models.cross_entropy)


def ddp_with_buffers():
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 1))
    model = nn.parallel.DistributedDataParallel(layers, gradient_as_bucket_view=True)
    for _ in range(3):
        model(torch.ones(ROWS, WIDTH)).sum().backward()
        model.zero_grad()


def fsdp2():
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model, policy = llama(), MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    train(model, dist.get_rank(), dist.get_world_size(), models.cross_entropy)


def fsdp2_and_tensor():
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    model = llama()
    for block in model.blocks:
        plan = {f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")}
        plan |= {"mlp.gate": ColwiseParallel(), "mlp.up": ColwiseParallel()}
        plan |= {"attention.output": RowwiseParallel(), "mlp.down": RowwiseParallel()}
        parallelize_module(block, mesh["tp"], plan)
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    train(model, mesh.get_local_rank("dp"), dist.get_world_size() // 2, models.cross_entropy)


def tensor_with_sequence():
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = nn.Sequential(nn.LayerNorm(WIDTH), models.MLP(WIDTH, 4 * WIDTH, WIDTH))
    whole = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    plan = {"0": SequenceParallel(), "1": whole, "1.up": ColwiseParallel()}
    parallelize_module(model, mesh, plan | {"1.down": RowwiseParallel(output_layouts=Shard(1))})
    model(torch.ones(2, LENGTH, WIDTH)).sum().backward()


def our_ddp():
    from rankcell.parallel.ddp import DDP

    train(DDP(gpt()), dist.get_rank(), dist.get_world_size(), models.cross_entropy)


def our_fsdp():
    from rankcell.parallel.fsdp import FSDP

    train(FSDP(gpt()), dist.get_rank(), dist.get_world_size(), models.cross_entropy)


def our_zero1():
    from rankcell.parallel.ddp import DDP
    from rankcell.parallel.zero import ShardedOptimizer

    model = DDP(gpt())
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
    for step in range(2):
        x, y = batch(step, dist.get_rank(), dist.get_world_size())
        models.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def our_tensor():
    from rankcell.parallel.transformer import tensor_parallel

    train(tensor_parallel(gpt(), sequence_parallel=True), 0, 1, models.cross_entropy)


def our_pipeline():
    from rankcell.parallel.pipeline import Pipeline, split_gpt
    from rankcell.schedules import one_f_one_b

    n = dist.get_world_size()
    stages = split_gpt(models.GPT(VOCAB, WIDTH, n_layers=n, context=LENGTH), n)
    pipeline = Pipeline(stages, one_f_one_b(n, 4), models.cross_entropy, between=(LENGTH, WIDTH))
    pipeline.step(*batch(0, 0, 1))


def our_mesh():
    from rankcell.parallel.mesh import MeshParallel

    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    model = MeshParallel(gpt(), mesh, zero=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model.step(*batch(0, model.place("dp"), model.degree("dp")))
    optimizer.step()


def by_hand():
    """Every kind of call, waited for in every way."""
    import torch.distributed._functional_collectives as functional

    rank, n = dist.get_rank(), dist.get_world_size()
    even = dist.new_group(range(0, n, 2))
    odd = dist.new_group(range(1, n, 2))
    group = odd if rank % 2 else even
    x, parts = torch.ones(n, 6), [torch.empty(6) for _ in range(n)]
    dist.all_reduce(x, op=dist.ReduceOp.MAX, group=group)
    work = dist.all_reduce(x, async_op=True)
    dist.broadcast(x, 1)
    work.wait()
    dist.reduce(x, 0)
    dist.all_gather(parts, x[0])
    dist.gather(x[0], parts if rank == 2 else None, dst=2)
    dist.scatter(x[0], parts if rank == 1 else None, src=1)
    dist.all_to_all_single(torch.empty(n, 6), x)
    dist.reduce_scatter_tensor(torch.empty(6), x.flatten())
    if rank in (0, 1):
        (dist.send if rank == 0 else dist.recv)(x, 1 - rank, tag=3)
    functional.all_reduce(x, "sum", group=group) + 1
    functional.reduce_scatter_tensor(x, "avg", 0, group=dist.group.WORLD) + 1
    dist.barrier()


CASES = [ddp, ddp_with_buffers, fsdp2, fsdp2_and_tensor, tensor_with_sequence, our_ddp, our_fsdp, our_zero1,
         our_tensor, our_pipeline, our_mesh, by_hand]  # fmt: skip


def told(result):
    """All that an operation is, but its times."""
    return [
        (
            e.op,
            e.ranks,
            e.seq,
            e.shape,
            e.dtype,
            e.nbytes,
            e.peer,
            e.tag,
            e.reduce_op,
            e.is_async,
            e.line,
            e.via,
        )
        for e in result.events
        if e.kind == "comm"
    ]
