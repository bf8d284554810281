"""Tensor parallelism: every rank holds a part of each layer and all ranks compute on the same batch.

The five functions at the top move activations between ranks and know their own backward. On them stand the linear
layers, by columns and by rows, and in `parallel.vocabulary` an embedding and a cross-entropy. Every layer takes its
part of a dense layer, which must be the same on all ranks. With `sequence_parallel` the activations between the layers
are divided along the sequence: a rank holds `(batch, length / ranks, features)`.

What it does not do: uneven parts (only of a vocabulary), automatic mixed precision, gradients of gradients, gathering
a sequence anew in the backward, as Megatron-LM does, in place of keeping it. It sets no seeds: with dropout all ranks
of a group must be seeded alike, as they must get the same batch.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from . import group as groups

FEATURES, SEQUENCE = -1, -2  # the dims of an activation (..., length, features)


class Group:
    """The ranks that share a layer. It stands for the process group, which `copy.deepcopy` cannot copy."""

    def __init__(self, process_group: "dist.ProcessGroup | Group | None" = None) -> None:
        given = process_group.process_group if isinstance(process_group, Group) else process_group
        self.process_group: dist.ProcessGroup | None = given or dist.group.WORLD
        self.rank, self.size = groups.place(self.process_group, "this layer", use="build it")

    def __deepcopy__(self, _: dict) -> "Group":
        return self

    def part(self, total: int, rank: int | None = None) -> slice:
        """A rank's part of `total` things, by default this one's; the first parts may be longer by one."""
        rank = self.rank if rank is None else rank
        small, longer = divmod(total, self.size)
        return slice(rank * small + min(rank, longer), (rank + 1) * small + min(rank + 1, longer))

    def own(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part of `x` along `dim`, as a tensor of its own."""
        mine = self.part(x.shape[dim])
        return x.narrow(dim, mine.start, mine.stop - mine.start).clone(memory_format=torch.contiguous_format)

    def sum(self, x: Tensor) -> Tensor:
        """The sum of all ranks' `x`, which stays as it is."""
        x = x.clone(memory_format=torch.contiguous_format)
        self.all_reduce(x)
        return x

    def all_reduce(self, x: Tensor, *, op: Any = dist.ReduceOp.SUM) -> None:
        """Sum `x`, which must be contiguous, over the ranks in place."""
        dist.all_reduce(x, op=op, group=self.process_group)

    def all_gather(self, x: Tensor, dim: int, total: int | None = None) -> Tensor:
        """The parts of all ranks in a row along `dim`; `total` is their sum where they are not equal."""
        dim = dim % x.dim()
        total = total or x.shape[dim] * self.size
        longest = -(-total // self.size)
        if x.shape[dim] < longest:  # all ranks must send equally much
            x = torch.cat([x, x.narrow(dim, 0, 1)], dim)
        parts = x.new_empty(self.size, *x.shape)
        dist.all_gather_single(parts.flatten(0, 1), x.contiguous(), group=self.process_group)
        if total == longest * self.size:
            return parts.movedim(0, dim).flatten(dim, dim + 1)
        lengths = [part.stop - part.start for part in (self.part(total, r) for r in range(self.size))]
        return torch.cat([p.narrow(dim, 0, n) for p, n in zip(parts, lengths, strict=True)], dim)

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part, along `dim`, of the sum over the ranks."""
        dim = dim % x.dim()
        self.check_divides(x.shape[dim], f"dim {dim} of a tensor of shape {tuple(x.shape)}")
        parts = x.unflatten(dim, (self.size, -1)).movedim(dim, 0).contiguous()
        mine = torch.empty_like(parts[0])
        dist.reduce_scatter_single(mine, parts.flatten(0, 1), group=self.process_group)
        return mine

    def check_divides(self, n: int, what: str) -> None:
        """Raise an error that says what to do where `n` cannot be shared evenly."""
        if n % self.size:
            how = f"Choose a multiple of {self.size}, or a group whose size divides {n}."
            raise ValueError(f"{n} ({what}) cannot be shared evenly by {self.size} ranks. {how}")


ProcessGroup = dist.ProcessGroup | Group | None
Move = Callable[[Tensor], Tensor]


class _Pair(torch.autograd.Function):
    """`forth(x)`, and `back` of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forth: Move, back: Move) -> Tensor:
        ctx.back = back
        return forth(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.back(grad), None, None


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)


def copy_to_group(x: Tensor, *, process_group: ProcessGroup = None) -> Tensor:
    """`x`, which every rank holds whole, for ranks that will do different things with it. Backward an all-reduce."""
    return _Pair.apply(x, _same, Group(process_group).sum)


def reduce_from_group(x: Tensor, *, process_group: ProcessGroup = None) -> Tensor:
    """The sum of all ranks' `x`, for ranks that will do the same with it. Forward an all-reduce, backward nothing."""
    return _Pair.apply(x, Group(process_group).sum, _same)


def gather_from_group(
    x: Tensor, dim: int = FEATURES, *, total: int | None = None, process_group: ProcessGroup = None
) -> Tensor:
    """All ranks' parts in a row along `dim`, for ranks that will do the same with it (else: `all_gather`).

    Backward keeps this rank's part of the gradient. `total` is the whole's length where parts are not equally long.
    """
    group = Group(process_group)
    return _Pair.apply(x, lambda x: group.all_gather(x, dim, total), lambda grad: group.own(grad, dim))


def all_gather(x: Tensor, dim: int = SEQUENCE, *, process_group: ProcessGroup = None) -> Tensor:
    """All ranks' parts in a row along `dim`, for ranks that will do different things. Backward a reduce-scatter."""
    group = Group(process_group)
    return _Pair.apply(x, lambda x: group.all_gather(x, dim), lambda grad: group.reduce_scatter(grad, dim))


def reduce_scatter(x: Tensor, dim: int = SEQUENCE, *, process_group: ProcessGroup = None) -> Tensor:
    """This rank's part along `dim` of the sum of all ranks' `x`. Backward an all-gather."""
    group = Group(process_group)
    return _Pair.apply(x, lambda x: group.reduce_scatter(x, dim), lambda grad: group.all_gather(grad, dim))


def columns(x: Tensor, layers: "Sequence[ColumnParallelLinear | SlicedLinear]") -> list[Tensor]:
    """What several layers that divide their outputs compute from the same input, with one communication."""
    enter = all_gather if layers[0].sequence_parallel else copy_to_group
    whole = enter(x, process_group=layers[0].group)
    return [F.linear(whole, *layer.own()) for layer in layers]


class ParallelLayer(nn.Module):
    """A layer of which each rank holds a part of `dense`; `sharded` says along which dim each parameter is divided."""

    sharded: ClassVar[Mapping[str, int]] = {}
    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, dense: nn.Module, process_group: ProcessGroup, *, sequence_parallel: bool = False) -> None:
        super().__init__()
        self.group, self.sequence_parallel = Group(process_group), sequence_parallel
        self.register_parameter("weight", None)
        self.register_parameter("bias", None)
        for name, parameter in dense.named_parameters(recurse=False):
            whole = parameter.detach()
            mine = self.group.own(whole, self.sharded[name]) if name in self.sharded else whole.clone()
            setattr(self, name, nn.Parameter(mine, parameter.requires_grad))


class ColumnParallelLinear(ParallelLayer):
    """A linear layer of which each rank holds some outputs: `(..., in)` -> `(..., out / ranks)`.

    `weight` is `dense.weight.chunk(ranks, 0)[rank]`: in y = x A the dense layer's weight is A transposed, so these are
    columns of A. `uneven` lets the first ranks have one output more where they must.
    """

    sharded: ClassVar[Mapping[str, int]] = {"weight": 0, "bias": 0}
    out_features: int

    @classmethod
    def from_linear(
        cls, dense: nn.Linear, process_group: ProcessGroup = None, *, uneven: bool = False, **options: Any
    ) -> "ColumnParallelLinear":
        """This rank's part of `dense`, which must be the same on all ranks."""
        if not uneven:
            Group(process_group).check_divides(dense.out_features, "output features of a column-parallel layer")
        layer = cls(dense, process_group, **options)
        layer.out_features = dense.out_features
        return layer

    def own(self) -> tuple[Tensor, Tensor | None]:
        """The weight and bias that this rank computes with."""
        return self.weight, self.bias

    def forward(self, x: Tensor) -> Tensor:
        return columns(x, [self])[0]


class RowParallelLinear(ParallelLayer):
    """A linear layer of which each rank holds some inputs: `(..., in / ranks)` -> `(..., out)`, summed.

    `weight` is `dense.weight.chunk(ranks, 1)[rank]`. Every rank holds the whole bias, which is added once, after the
    sum. With `sequence_parallel` it returns this rank's part of the sequence.
    """

    sharded: ClassVar[Mapping[str, int]] = {"weight": 1}

    @classmethod
    def from_linear(cls, dense: nn.Linear, process_group: ProcessGroup = None, **options: Any) -> "RowParallelLinear":
        """This rank's part of `dense`, which must be the same on all ranks."""
        Group(process_group).check_divides(dense.in_features, "input features of a row-parallel layer")
        return cls(dense, process_group, **options)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.weight.shape[1]:
            asked = f"{self.weight.shape[1]} input features on each of {self.group.size} ranks and got {x.shape[-1]}"
            how = "Give it the output of a column-parallel layer."
            raise ValueError(f"This row-parallel layer expects {asked}. {how}")
        y = F.linear(x, self.weight)
        if not self.sequence_parallel:
            y = reduce_from_group(y, process_group=self.group)
            return y if self.bias is None else y + self.bias
        y = reduce_scatter(y, process_group=self.group)
        # each rank adds the bias to other tokens: its gradient is a sum over ranks
        return y if self.bias is None else y + copy_to_group(self.bias, process_group=self.group)


class SlicedLinear(ParallelLayer):
    """A linear layer that every rank holds whole and of which it computes some `outputs`, as other ranks may, too.

    It stands where there are fewer things to share than ranks, such as key/value heads. The gradient is summed over all
    ranks, each with zeros for what it did not compute.
    """

    def __init__(self, dense: nn.Linear, outputs: slice, process_group: ProcessGroup = None, **options: Any) -> None:
        super().__init__(dense, process_group, **options)
        self.outputs = outputs

    def own(self) -> tuple[Tensor, Tensor | None]:
        weight = copy_to_group(self.weight, process_group=self.group)[self.outputs]
        bias = None if self.bias is None else copy_to_group(self.bias, process_group=self.group)[self.outputs]
        return weight, bias


class ReplicatedNorm(ParallelLayer):
    """A LayerNorm or RMSNorm that every rank applies to other tokens: its gradient is a sum over the ranks."""

    def __init__(self, dense: nn.LayerNorm | nn.RMSNorm, process_group: ProcessGroup = None) -> None:
        super().__init__(dense, process_group, sequence_parallel=True)
        self.normalized_shape, self.eps = list(dense.normalized_shape), dense.eps
        self.norm: Any = F.layer_norm if isinstance(dense, nn.LayerNorm) else F.rms_norm

    def forward(self, x: Tensor) -> Tensor:
        have = [copy_to_group(p, process_group=self.group) for p in (self.weight, self.bias) if p is not None]
        return self.norm(x, self.normalized_shape, *have, eps=self.eps)


def sharded_dims(model: nn.Module) -> dict[str, int | None]:
    """The dim along which each entry of `model.state_dict()` is divided, None where all ranks hold it."""
    dims: dict[str, int | None] = dict.fromkeys(model.state_dict())
    for path, part in model.named_modules():
        if isinstance(part, ParallelLayer):
            dims |= {".".join(filter(None, (path, name))): dim for name, dim in part.sharded.items()}
    return {name: dims[name] for name in model.state_dict()}


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The state dict of the dense model, whole on every rank. All ranks of the group must call it."""
    state, wholes = model.state_dict(), {}
    for name, dim in sharded_dims(model).items():
        mine = state[name].detach()
        if dim is None:
            wholes[name] = mine.clone()
            continue
        layer: Any = model.get_submodule(name.rpartition(".")[0])
        total = torch.tensor([mine.shape[dim]], device=mine.device)
        layer.group.all_reduce(total)
        wholes[name] = layer.group.all_gather(mine, dim, int(total))
    return wholes
