"""Several kinds of parallelism at once: a GPT over a device mesh with the axes "pp", "dp" and "tp".

Each layer is divided over "tp" (`parallel.tensor`), the layers are cut into stages over "pp"
(`parallel.pipeline`), and the batch is divided over "dp", with gradients averaged (`parallel.ddp`) or
parameters sharded (`parallel.fsdp`). What belongs to no axis alone is here: the mean loss of uneven batches,
one gradient norm, whole states that any other layout can load.

What it does not do: divide the batch; context and expert axes; buffers. It makes states whole in memory, which is for
small models: `torch.distributed.checkpoint` does not.
"""

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .. import models
from ..schedules import one_f_one_b
from . import tensor, transformer
from .ddp import DDP
from .fsdp import FSDP
from .group import clip_grad_norm_
from .pipeline import Pipeline, split_gpt

AXES = ("pp", "dp", "tp")


class MeshParallel:
    """This rank's part of a GPT on a device mesh.

    Ranks that differ in their place on "dp" give `step` different rows of the batch, the others the same.

    Args:
        model: the course's GPT, the same on all ranks. It is taken apart: use it for nothing else.
        mesh: torch's, with some of the axes "pp", "dp", "tp" in any order.
        n_microbatches: into how many each rank's batch is cut for the pipeline, by default twice its stages.
        zero: shard the parameters over "dp" (ZeRO stage 3) where they would be copies. Without pipeline only.
        sequence_parallel: divide what lies between the layers over "tp" too.

    >>> mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    >>> model = MeshParallel(GPT(49), mesh)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> loss = model.step(x, y)  # of the global batch, the same on all ranks; gradients are in .grad
    >>> model.clip_grad_norm_(1.0)
    >>> optimizer.step()
    """

    def __init__(
        self,
        model: models.Decoder,
        mesh: DeviceMesh,
        *,
        n_microbatches: int | None = None,
        zero: bool = False,
        sequence_parallel: bool = False,
    ) -> None:
        names = mesh.mesh_dim_names or ()
        unknown = sorted(set(names) - set(AXES)) if names else ["axes without names"]
        if unknown:
            raise ValueError(
                f"MeshParallel knows the axes {', '.join(AXES)}, not {', '.join(unknown)}. "
                f"Name the mesh's axes with `mesh_dim_names`."
            )
        self.groups = {name: mesh.get_group(name) for name in names}
        self.pipeline: Pipeline | None = None
        self.fsdp: FSDP | None = None
        self.ddp: DDP | None = None
        degree = self.degree("pp")
        if zero and degree > 1:
            raise ValueError(
                "ZeRO stage 3 would gather each stage once per micro-batch. With a pipeline use zero=False, "
                "and ShardedOptimizer (stage 1) over the group of the dp axis."
            )
        width, share, mine = model.token_embedding.embedding_dim, 1, model
        if "tp" in names:
            mine = transformer.tensor_parallel(model, self.groups["tp"], sequence_parallel=sequence_parallel)
            share = self.degree("tp") if sequence_parallel else 1
        self._weight = 1.0
        self.modules: Mapping[int, nn.Module] = {0: mine}  # by stage
        if degree > 1:
            self.pipeline = Pipeline(
                split_gpt(mine, degree),
                one_f_one_b(degree, n_microbatches or 2 * degree),
                lambda logits, targets: self._weight * models.cross_entropy(logits, targets),
                between=lambda _, tokens: (len(tokens), tokens.shape[1] // share, width),
                process_group=self.groups["pp"],
            )
            self.modules = self.pipeline.stages
        if zero and "dp" in names:
            self.fsdp = FSDP(mine, process_group=self.groups["dp"])
        elif "dp" in names:
            self.ddp = DDP(nn.ModuleList(self.modules.values()), None, process_group=self.groups["dp"])

    def degree(self, axis: str) -> int:
        """How many ranks an axis has, 1 if the mesh has no such axis."""
        return dist.get_world_size(self.groups[axis]) if axis in self.groups else 1

    def place(self, axis: str) -> int:
        """This rank's place on an axis: `place("dp")` says which rows of the batch are its."""
        return dist.get_rank(self.groups[axis]) if axis in self.groups else 0

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters under their names in the dense model, a tied one under the first."""
        return (named for module in self.modules.values() for named in module.named_parameters())

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's parameters, for an optimizer."""
        return (parameter for _, parameter in self.named_parameters())

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The mean loss over the global batch, the same on all ranks; adds to each `.grad` its gradient.

        The rows of this rank's place on "dp" may be more than those of another: every token counts alike.
        """
        total = torch.tensor(float(targets.numel()), dtype=torch.float64, device=targets.device)
        self._sum(total, "dp")
        self._weight = targets.numel() * self.degree("dp") / total.item()  # "dp" averages gradients later
        if self.pipeline is not None:
            with self.ddp.no_sync() if self.ddp else nullcontext():
                loss = self.pipeline.step(inputs, targets)
        else:
            loss = self._weight * self._loss(inputs, targets)
            loss.backward()
        if average := self.ddp or self.fsdp:
            average.finish_gradient_synchronization()  # with a pipeline once, after all micro-batches
        loss = torch.zeros_like(total) if loss is None else loss.detach().double()  # on the last stage only
        self._sum(loss, "pp", "dp")
        return loss / self.degree("dp")

    def _loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        (module,) = self.modules.values()
        call = self.fsdp or module
        if isinstance(module, transformer.ParallelDecoder):
            return call(inputs, targets)  # no rank holds all logits
        return models.cross_entropy(call(inputs), targets)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """The norm of all gradients of the whole model, which are scaled down if it is above `max_norm`."""
        axes = ("tp", "pp", "dp") if self.fsdp else ("tp", "pp")  # those that divide the model
        return clip_grad_norm_(
            [p.grad for p in self.parameters() if p.grad is not None],
            max_norm,
            counted=[p.grad for p in self._counted() if p.grad is not None],
            process_groups=[self.groups[axis] for axis in axes if self.degree(axis) > 1],
            device=next(self.parameters()).device,
        )

    def full_gradients(self) -> dict[str, Tensor]:
        """Every gradient as one process has it, on every rank, on the CPU. All ranks must call it."""
        return self._gather({name: p.grad for name, p in self._all_named() if p.grad is not None})

    def full_state_dict(self, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
        """The weights, and with an optimizer its states, as one process has them, on every rank, on the CPU:
        {"model": {name: weight}, "optimizer": {"exp_avg": {name: average}, ...}}. All ranks must call it.
        """
        state: dict[str, Any] = {"model": self._gather({n: p.detach() for n, p in self._all_named()})}
        if optimizer is not None:
            by_key = self._by_key(optimizer)
            state["optimizer"] = {key: self._gather(entries) for key, entries in by_key.items()}
        return state

    def load_full_state_dict(self, state: Mapping[str, Any], optimizer: torch.optim.Optimizer | None = None) -> None:
        """Take this rank's part of what `full_state_dict` of any layout returned; hyper-parameters stay."""
        if self.fsdp:
            raise ValueError("A model that `zero` shards takes no state. Load it into another layout.")
        with torch.no_grad():
            parts = self._cut(state["model"])
            for name, parameter in self.named_parameters():
                parameter.copy_(parts[name])
        if optimizer is None:
            return
        for key, values in state["optimizer"].items():
            parts = self._cut(values)
            for name, parameter in self.named_parameters():
                if name in parts:
                    optimizer.state[parameter][key] = parts[name]

    # What is divided over what

    def _sum(self, x: Tensor, *axes: str) -> None:
        for axis in axes:
            if self.degree(axis) > 1:
                dist.all_reduce(x, group=self.groups[axis])

    def _counted(self) -> Iterator[nn.Parameter]:
        """This rank's parameters whose gradients it adds to the norm: over all ranks, each number once."""
        for stage, module in self.modules.items():
            divided = tensor.sharded_dims(module)
            copies = {id(p) for other, p in getattr(module, "shared", {}).items() if other < stage}
            for name, parameter in module.named_parameters():
                first_of_tp = divided[name] is not None or self.place("tp") == 0
                if first_of_tp and id(parameter) not in copies:
                    yield parameter

    # From this rank's parts to the whole and back, for anything that is shaped as the parameters

    def _all_named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """As `named_parameters`, a tied one under all its names."""
        modules = self.modules.values()
        return (n for module in modules for n in module.named_parameters(remove_duplicate=False))

    def _by_key(self, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
        """The optimizer's states by their own name and then the parameter's."""
        found = dict[str, dict[str, Tensor]]()
        for name, parameter in self._all_named():
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    found.setdefault(key, {})[name] = value
        return found

    def _gather(self, mine: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The wholes of which this rank has parts; numbers, as a count of steps, are wholes already."""
        whole = {name: value.cpu() for name, value in mine.items() if not value.dim()}
        mine = {name: value for name, value in mine.items() if value.dim()}
        if self.fsdp and mine:
            mine = self.fsdp.wholes_of(mine)
        for module in self.modules.values():
            parts = {name: mine[name] for name in tensor.sharded_dims(module) if name in mine}
            whole |= {name: value.cpu() for name, value in tensor.full_state_dict(module, parts).items()}
        if self.degree("pp") > 1:
            stages: list[Any] = [None] * self.degree("pp")
            dist.all_gather_object(stages, whole, group=self.groups["pp"])
            whole = {name: value for stage in stages for name, value in stage.items()}
        return whole

    def _cut(self, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's parts of wholes."""
        names = [name for name, _ in self._all_named() if name in whole]
        numbers = {name: whole[name].clone() for name in names if not whole[name].dim()}
        parts: dict[str, Tensor] = {}
        for module in self.modules.values():
            own = {name: whole[name] for name in tensor.sharded_dims(module) if name in whole}
            own = {name: value for name, value in own.items() if value.dim()}
            parts |= tensor.local_state_dict(module, own)
        return parts | numbers
