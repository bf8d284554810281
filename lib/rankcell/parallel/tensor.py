"""Tensor parallelism: every rank holds a part of each layer and all ranks compute on the same batch.

The six functions at the top move activations between ranks and know their own backward. On them stand the
linear layers, by columns and by rows, and in `parallel.vocabulary` an embedding and a cross-entropy. Every
layer takes its part of a weight that was drawn whole, so together they compute what the dense layers compute.
`parallel.transformer` builds the GPT and the Llama from them.

With `sequence_parallel` the activations between the layers are divided along the sequence instead of being
held whole by every rank. What a rank then holds is `(batch, length / ranks, features)`.

What it does not do: it does not give each rank its batch (all ranks of the group must get the same one), it
does not split layers unevenly (only a vocabulary). It sets no seeds: with dropout all ranks of a group must
be seeded alike. Gradients of gradients go through the six functions, not through the layers.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from . import group

FEATURES, SEQUENCE = -1, -2  # the dims of an activation (..., length, features)


class Group:
    """The ranks that share a layer: a process group, this rank's place in it, and their number.

    It stands for the group when a module is copied: `copy.deepcopy` cannot copy a process group.
    """

    def __init__(self, process_group: "dist.ProcessGroup | Group | None" = None) -> None:
        if isinstance(process_group, Group):
            process_group = process_group.process_group
        self.process_group = process_group or dist.group.WORLD
        self.rank, self.size = group.place(self.process_group, "this layer", use="build it")

    def __deepcopy__(self, _: dict) -> "Group":
        return self

    def part(self, total: int) -> slice:
        """This rank's part of `total` things; the first parts are longer by one where it must be."""
        return slice(*_bounds(total, self.rank, self.size))

    def all_reduce(self, x: Tensor, *, op: Any = dist.ReduceOp.SUM, async_op: bool = False) -> Any:
        """Sum `x`, which must be contiguous, over the ranks in place."""
        if self.size > 1:
            return dist.all_reduce(x, op=op, group=self.process_group, async_op=async_op)
        return None

    def all_gather(self, x: Tensor, dim: int, total: int | None = None) -> Tensor:
        """The parts of all ranks in a row along `dim`; `total` is their sum where they are not equal."""
        start, finish = self.start_all_gather(x, dim, total)
        if start is not None:
            start.wait()
        return finish()

    def start_all_gather(self, x: Tensor, dim: int, total: int | None = None) -> tuple[Any, Any]:
        """An all-gather on its way, and what to call for its result once it was waited for."""
        dim = _checked(dim, x)
        if self.size == 1:
            return None, lambda: x
        total = total or x.shape[dim] * self.size
        longest = -(-total // self.size)
        if x.shape[dim] < longest:  # all ranks must send equally much
            x = torch.cat([x, x.narrow(dim, 0, 1)], dim)
        x = x.contiguous()
        parts = x.new_empty(self.size, *x.shape)
        work = dist.all_gather_single(parts.flatten(0, 1), x, group=self.process_group, async_op=True)

        def finish() -> Tensor:
            if total == longest * self.size:
                return parts.movedim(0, dim).flatten(dim, dim + 1)
            lengths = [b - a for a, b in (_bounds(total, r, self.size) for r in range(self.size))]
            return torch.cat([p.narrow(dim, 0, n) for p, n in zip(parts, lengths, strict=True)], dim)

        return work, finish

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part, along `dim`, of the sum over the ranks."""
        work, mine = self.start_reduce_scatter(x, dim)
        if work is not None:
            work.wait()
        return mine

    def start_reduce_scatter(self, x: Tensor, dim: int) -> tuple[Any, Tensor]:
        """A reduce-scatter on its way, and the tensor that holds its result once it was waited for."""
        dim = _checked(dim, x)
        if self.size == 1:
            return None, x
        self.check_divides(x.shape[dim], f"dim {dim} of a tensor of shape {tuple(x.shape)}")
        parts = x.unflatten(dim, (self.size, -1)).movedim(dim, 0).contiguous()
        mine = torch.empty_like(parts[0])
        parts = parts.flatten(0, 1)
        return dist.reduce_scatter_single(mine, parts, group=self.process_group, async_op=True), mine

    def check_divides(self, n: int, what: str) -> None:
        """Raise an error that says what to do where `n` cannot be shared evenly."""
        if n % self.size:
            raise ValueError(
                f"{n} ({what}) cannot be shared evenly by {self.size} ranks. Choose a multiple of "
                f"{self.size}, or a group whose size divides {n}."
            )


def _bounds(total: int, rank: int, size: int) -> tuple[int, int]:
    """Where the part of `rank` begins and ends, as `torch.tensor_split` cuts."""
    small, longer = divmod(total, size)
    return rank * small + min(rank, longer), (rank + 1) * small + min(rank + 1, longer)


def _checked(dim: int, x: Tensor) -> int:
    """`dim` counted from the front, if `x` has it."""
    if not -x.dim() <= dim < x.dim():
        raise IndexError(
            f"A tensor of shape {tuple(x.shape)} has no dim {dim} that ranks could share. "
            f"Sequence parallelism shares the dim before the last: give it (length, features) or more."
        )
    return dim % x.dim()


# Six functions in three pairs: the backward of each is the forward of the other one


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        return _Reduce.apply(grad, ctx.group, False), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, in_place: bool) -> Tensor:
        ctx.group = group
        if in_place:
            ctx.mark_dirty(x)
        else:
            x = x.clone(memory_format=torch.contiguous_format)
        group.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        return _Copy.apply(grad, ctx.group), None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.group, ctx.total = dim, group, x.shape[dim]
        start, stop = _bounds(ctx.total, group.rank, group.size)
        return x.narrow(dim, start, stop - start).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        return _Gather.apply(grad, ctx.dim, ctx.group, ctx.total), None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group, total: int | None) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return group.all_gather(x, dim, total)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        return _Split.apply(grad, ctx.dim, ctx.group), None, None, None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return group.all_gather(x, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        return _ReduceScatter.apply(grad, ctx.dim, ctx.group), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return group.reduce_scatter(x, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        return _AllGather.apply(grad, ctx.dim, ctx.group), None, None


ProcessGroup = dist.ProcessGroup | Group | None


def copy_to_group(x: Tensor, *, process_group: ProcessGroup = None) -> Tensor:
    """`x`, which every rank holds whole, for ranks that will do different things with it.

    Backward sums what the ranks found: forward nothing, backward an all-reduce.
    """
    return _Copy.apply(x, Group(process_group))


def reduce_from_group(x: Tensor, *, in_place: bool = False, process_group: ProcessGroup = None) -> Tensor:
    """The sum of all ranks' `x`, on every rank. Forward an all-reduce, backward nothing.

    The ranks must do the same with it afterwards, so that their gradients are one and the same. `in_place`
    writes over `x`, which must be contiguous.
    """
    return _Reduce.apply(x, Group(process_group), in_place)


def split_to_group(x: Tensor, dim: int = FEATURES, *, process_group: ProcessGroup = None) -> Tensor:
    """This rank's part along `dim` of `x`, which every rank holds whole. Backward an all-gather."""
    group = Group(process_group)
    group.check_divides(x.shape[dim], f"dim {dim} of a tensor of shape {tuple(x.shape)}")
    return _Split.apply(x, dim, group)


def gather_from_group(
    x: Tensor, dim: int = FEATURES, *, total: int | None = None, process_group: ProcessGroup = None
) -> Tensor:
    """All ranks' parts in a row along `dim`, on every rank. Backward keeps this rank's part of the gradient.

    The ranks must do the same with it afterwards; where they do different things, use `all_gather`. `total`
    is the length of the whole where the parts are not equally long.
    """
    return _Gather.apply(x, dim, Group(process_group), total)


def all_gather(x: Tensor, dim: int = SEQUENCE, *, process_group: ProcessGroup = None) -> Tensor:
    """All ranks' parts in a row along `dim`, for ranks that will do different things with them.

    Backward a reduce-scatter.
    """
    return _AllGather.apply(x, dim, Group(process_group))


def reduce_scatter(x: Tensor, dim: int = SEQUENCE, *, process_group: ProcessGroup = None) -> Tensor:
    """This rank's part along `dim` of the sum of all ranks' `x`. Backward an all-gather."""
    return _ReduceScatter.apply(x, dim, Group(process_group))


class _CopyParameters(torch.autograd.Function):
    """`copy_to_group` for several tensors at once: their gradients travel in one all-reduce."""

    @staticmethod
    def forward(ctx: Any, group: Group, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(t.view_as(t) for t in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        flat = torch.cat([g.flatten() for g in grads])
        ctx.group.all_reduce(flat)
        pieces = flat.split([g.numel() for g in grads])
        return None, *(piece.view(g.shape) for piece, g in zip(pieces, grads, strict=True))


# The layers


class _Columns(torch.autograd.Function):
    """Several linear layers on one input, each with its rows of weight: the input travels once for all.

    `x` is what every rank holds, or with `gathers` this rank's part of the sequence. Then the whole is not
    kept for backward but gathered again, and that is what makes sequence parallelism save memory. Backward
    finds the gradient of the weights while the gradient of the input is on its way.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: Group, gathers: bool, *layers: Tensor | None
    ) -> tuple[Tensor, ...]:
        ctx.group, ctx.gathers, ctx.n = group, gathers, len(layers) // 2
        ctx.save_for_backward(x, *layers)
        whole = group.all_gather(x, SEQUENCE) if gathers else x
        return tuple(F.linear(whole, w, b) for w, b in zip(layers[: ctx.n], layers[ctx.n :], strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        group, n = ctx.group, ctx.n
        x, *layers = ctx.saved_tensors
        needs_x, _, _, *needs = ctx.needs_input_grad
        gathering = sending = grad_x = None
        if ctx.gathers and any(needs[:n]):  # only gradients of weights need the whole input again
            gathering, gathered = group.start_all_gather(x, SEQUENCE)
        if needs_x:  # meanwhile, this rank's share of the gradient of the input, added over the layers
            grad_x = grads[0] @ layers[0]
            for grad, weight in zip(grads[1:], layers[1:n], strict=True):
                grad_x = _add_product(grad_x, grad, weight)
        if gathering is not None:
            gathering.wait()
            x = gathered()
        if needs_x and ctx.gathers:
            sending, grad_x = group.start_reduce_scatter(grad_x, SEQUENCE)
        elif needs_x:
            sending = group.all_reduce(grad_x, async_op=True)
        rows, *flat = (t.reshape(-1, t.shape[-1]) for t in (x, *grads))  # meanwhile, the weights
        weights = [grad.t() @ rows if need else None for grad, need in zip(flat, needs[:n], strict=True)]
        biases = [grad.sum(0) if need else None for grad, need in zip(flat, needs[n:], strict=True)]
        if sending is not None:
            sending.wait()
        return grad_x, None, None, *weights, *biases


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """`total + a @ b`, in place."""
    total.view(-1, total.shape[-1]).addmm_(a.reshape(-1, a.shape[-1]), b)
    return total


def columns(x: Tensor, layers: "Sequence[ColumnParallelLinear | SlicedLinear]") -> tuple[Tensor, ...]:
    """What several layers that divide their outputs compute from the same input, with one communication."""
    weights, biases = zip(*(layer.own() for layer in layers), strict=True)
    tensors = *weights, *biases
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, *tensors = (t if t is None else t.to(dtype) for t in (x, *tensors))
    first = layers[0]
    return _Columns.apply(x, first.group, first.sequence_parallel, *tensors)


class ParallelLayer(nn.Module):
    """A layer of which each rank holds a part. `sharded` says along which dim each parameter is divided."""

    sharded: ClassVar[Mapping[str, int]] = {}

    def __init__(self, process_group: ProcessGroup, sequence_parallel: bool) -> None:
        super().__init__()
        self.group, self.sequence_parallel = Group(process_group), sequence_parallel

    def take(self, dense: nn.Module) -> None:
        """Copy this rank's part of the parameters of a dense layer."""
        for name, parameter in dense.named_parameters(recurse=False):
            part = self.part_of(name, parameter.detach())
            mine = nn.Parameter(part.clone(memory_format=torch.contiguous_format), parameter.requires_grad)
            setattr(self, name, mine)

    def part_of(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of a parameter of the dense layer, as a view."""
        if (dim := self.sharded.get(name)) is None:
            return whole
        mine = self.group.part(whole.shape[dim])
        return whole.narrow(dim, mine.start, mine.stop - mine.start)

    def take_first(self, dense: nn.Module) -> None:
        """The same of the layer that the group's first rank drew, whatever the others drew."""
        for parameter in dense.parameters():
            if not parameter.is_meta and self.group.size > 1:
                dist.broadcast(parameter.detach(), group_src=0, group=self.group.process_group)
        self.take(dense)


class _ParallelLinear(ParallelLayer):
    """What column and row have in common: made of a dense layer, or drawn whole."""

    in_features: int
    out_features: int

    @classmethod
    def from_linear(cls, dense: nn.Linear, **options: Any) -> Self:
        """A layer with this rank's part of `dense`, which must be the same on all ranks. The options are
        those of the class.
        """
        layer = cls(dense.in_features, dense.out_features, dense.bias is not None, device="meta", **options)
        layer.take(dense)
        return layer


class ColumnParallelLinear(_ParallelLinear):
    """A linear layer of which each rank holds some outputs: `(..., in)` -> `(..., out / ranks)`.

    `weight` is `dense.weight.chunk(ranks, 0)[rank]`: in y = x A the dense layer's weight is A transposed, so
    these are columns of A. A new layer draws its weights whole, as `nn.Linear` does, and every rank keeps its
    part of what the group's first rank drew.

    Args:
        bias: each rank holds the bias of its outputs.
        gather_output: return all outputs on every rank, `(..., out)`.
        process_group: the ranks that share the layer, by default all.
        sequence_parallel: the input is this rank's part of the sequence, `(..., length / ranks, in)`.
        uneven: let the first ranks have one output more where the number of ranks does not divide them.

    >>> up, down = ColumnParallelLinear(64, 256), RowParallelLinear(256, 64)
    >>> y = down(torch.relu(up(x)))  # x: the same on all ranks, and so is y
    """

    sharded: ClassVar[Mapping[str, int]] = {"weight": 0, "bias": 0}

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        gather_output: bool = False,
        process_group: ProcessGroup = None,
        sequence_parallel: bool = False,
        uneven: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(process_group, sequence_parallel)
        if not uneven:
            self.group.check_divides(out_features, "output features of a column-parallel layer")
        self.in_features, self.out_features, self.gather_output = in_features, out_features, gather_output
        self.register_parameter("weight", None)
        self.register_parameter("bias", None)
        self.take_first(nn.Linear(in_features, out_features, bias, device=device, dtype=dtype))

    def own(self) -> tuple[Tensor, Tensor | None]:
        """The weight and bias that this rank computes with."""
        return self.weight, self.bias

    def forward(self, x: Tensor) -> Tensor:
        """This rank's outputs, or all of them with `gather_output`."""
        (y,) = columns(x, [self])
        if self.gather_output:
            y = _Gather.apply(y, FEATURES, self.group, self.out_features)
        return y

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features} / {self.group.size} ranks"


class RowParallelLinear(_ParallelLinear):
    """A linear layer of which each rank holds some inputs: `(..., in / ranks)` -> `(..., out)`, summed.

    `weight` is `dense.weight.chunk(ranks, 1)[rank]`. Every rank holds the whole bias, which is added once,
    after the sum.

    Args:
        input_is_parallel: the input holds this rank's features, as a column-parallel layer returns them. If
            not, it is the whole input and the layer takes its part.
        process_group: the ranks that share the layer, by default all.
        sequence_parallel: return this rank's part of the sequence, `(..., length / ranks, out)`.
    """

    sharded: ClassVar[Mapping[str, int]] = {"weight": 1}

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        input_is_parallel: bool = True,
        process_group: ProcessGroup = None,
        sequence_parallel: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(process_group, sequence_parallel)
        self.group.check_divides(in_features, "input features of a row-parallel layer")
        self.in_features, self.out_features = in_features, out_features
        self.input_is_parallel = input_is_parallel
        self.register_parameter("weight", None)
        self.register_parameter("bias", None)
        self.take_first(nn.Linear(in_features, out_features, bias, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """The whole sum, or this rank's part of the sequence."""
        if not self.input_is_parallel:
            x = split_to_group(x, process_group=self.group)
        if x.shape[-1] != self.weight.shape[1]:
            raise ValueError(
                f"This row-parallel layer expects {self.weight.shape[1]} of its {self.in_features} input "
                f"features on each of {self.group.size} ranks and got {x.shape[-1]}. Give it the output of a "
                f"column-parallel layer, or set input_is_parallel=False and give it the whole input."
            )
        y = F.linear(x, self.weight)
        if not self.sequence_parallel:
            y = _Reduce.apply(y, self.group, True)  # in place: the product's backward does not need y
            return y if self.bias is None else y + self.bias.to(y.dtype)
        y = _ReduceScatter.apply(y, SEQUENCE, self.group)
        if self.bias is not None:  # each rank adds it to other tokens: its gradient is a sum over ranks
            y = y + _Copy.apply(self.bias, self.group).to(y.dtype)
        return y

    def extra_repr(self) -> str:
        return f"{self.in_features} / {self.group.size} ranks, {self.out_features}"


class SlicedLinear(ParallelLayer):
    """A linear layer that every rank holds whole and of which it computes some outputs, perhaps the same as
    other ranks: `(..., in)` -> `(..., outputs of this rank)`.

    It stands where there are fewer things to share than ranks, such as key/value heads. The gradient is
    summed over all ranks, each with zeros for what it did not compute.

    Args:
        outputs: which of the outputs of `dense` this rank computes.
    """

    def __init__(
        self,
        dense: nn.Linear,
        outputs: slice,
        *,
        process_group: ProcessGroup = None,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__(process_group, sequence_parallel)
        self.outputs = outputs
        self.register_parameter("weight", None)
        self.register_parameter("bias", None)
        self.take(dense)

    def own(self) -> tuple[Tensor, Tensor | None]:
        """The weight and bias that this rank computes with."""
        have = [p for p in (self.weight, self.bias) if p is not None]
        parts = [whole[self.outputs] for whole in _CopyParameters.apply(self.group, *have)]
        return parts[0], parts[1] if len(parts) > 1 else None

    def forward(self, x: Tensor) -> Tensor:
        """This rank's outputs."""
        (y,) = columns(x, [self])
        return y


class ReplicatedNorm(ParallelLayer):
    """A LayerNorm or RMSNorm whose weights every rank holds and applies to other tokens: their gradient is a
    sum over the ranks. `(..., length / ranks, features)` -> the same.
    """

    def __init__(self, dense: nn.LayerNorm | nn.RMSNorm, process_group: ProcessGroup = None) -> None:
        super().__init__(process_group, True)
        self.normalized_shape, self.eps = dense.normalized_shape, dense.eps
        self.norm = F.layer_norm if isinstance(dense, nn.LayerNorm) else F.rms_norm
        self.register_parameter("weight", None)
        self.register_parameter("bias", None)
        self.take(dense)

    def forward(self, x: Tensor) -> Tensor:
        have = [p for p in (self.weight, self.bias) if p is not None]
        copies = _CopyParameters.apply(self.group, *have) if have else ()
        return self.norm(x, self.normalized_shape, *copies, eps=self.eps)


class ParallelDropout(nn.Module):
    """Dropout whose mask every rank draws for itself: for other heads, or other tokens, another mask.

    The mask depends on torch's global random numbers and the rank, and every rank takes equally many of
    them. So if all ranks of a group were seeded alike, ordinary dropout on what they all hold stays the same.
    """

    def __init__(self, p: float, process_group: ProcessGroup = None) -> None:
        super().__init__()
        self.p, self.group = p, Group(process_group)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        seed = int(torch.randint(1 << 62, (), device="cpu")) + self.group.rank
        random = torch.Generator(x.device).manual_seed(seed)
        kept = torch.empty_like(x).bernoulli_(1 - self.p, generator=random)
        return x * kept.div_(1 - self.p) if self.p < 1 else x * kept


# States


def sharded_dims(model: nn.Module) -> dict[str, int | None]:
    """The dim along which each entry of `model.state_dict()` is divided, None where all ranks hold it."""
    dims: dict[str, int | None] = dict.fromkeys(model.state_dict())
    for path, part in model.named_modules():
        if isinstance(part, ParallelLayer):
            dims |= {".".join(filter(None, (path, name))): dim for name, dim in part.sharded.items()}
    return {name: dims[name] for name in model.state_dict()}


def full_state_dict(model: nn.Module, state: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The state dict of the dense model, whole on every rank. All ranks of the group must call it.

    `state` is this rank's, by default that of `model`. It can be anything with the same names and shapes,
    such as gradients: `{name: p.grad for name, p in model.named_parameters()}`.
    """
    state = model.state_dict() if state is None else state
    dims, wholes, seen = sharded_dims(model), {}, {}
    for name, mine in state.items():
        mine = mine.detach()
        key = (mine.untyped_storage()._cdata, mine.storage_offset(), mine.shape)
        if key not in seen:
            seen[key] = mine.clone() if dims[name] is None else _whole(model, name, mine, dims[name])
        wholes[name] = seen[key]
    return wholes


def _whole(model: nn.Module, name: str, mine: Tensor, dim: int) -> Tensor:
    layer = model.get_submodule(name.rpartition(".")[0])
    total = torch.tensor([mine.shape[dim]], device=mine.device)
    layer.group.all_reduce(total)
    return layer.group.all_gather(mine, dim, int(total)).clone()


def local_state_dict(model: nn.Module, full: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """This rank's part of a state dict of the dense model, to give to `model.load_state_dict`.

    No communication.
    """
    layers = {name: model.get_submodule(name.rpartition(".")[0]) for name in full}
    return {
        name: (
            layer.part_of(name.rpartition(".")[2], whole) if isinstance(layer, ParallelLayer) else whole
        ).clone()
        for (name, whole), layer in zip(full.items(), layers.values(), strict=True)
    }


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float) -> Tensor:
    """The norm of all gradients of the whole model, which are scaled down if it is above `max_norm`.

    The squares of divided gradients are summed over the ranks; those that every rank holds count once. All
    ranks of the group must call it.
    """
    dims = sharded_dims(model)
    groups = [part.group for part in model.modules() if isinstance(part, ParallelLayer)]
    named = [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]
    counts_all = not groups or groups[0].rank == 0  # one rank counts what every rank holds
    return group.clip_grad_norm_(
        [grad for _, grad in named],
        max_norm,
        counted=[grad for name, grad in named if counts_all or dims[name] is not None],
        process_groups=[groups[0].process_group] if groups and groups[0].size > 1 else [],
        device=next(model.parameters()).device,
    )
