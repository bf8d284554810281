"""Pipeline parallelism: one engine that executes a schedule of `rankcell.schedules` on a process group.

Activations and gradients travel in asynchronous sends and receives, which are posted in an order that both ends share,
so that nothing can stand still whatever the schedule.

What it does not do: evaluate, mix dtypes, halve backwards (torch's ScheduleZBVZeroBubble does), or run ahead with old
weights. A stage takes one tensor and gives one tensor, each with the samples in its first dim.
"""

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import models
from ..schedules import Action, Schedule, rounds


class Pipeline:
    """The stages of this rank, and the engine that trains them with the other ranks of a group.

    Where stages are in a `DDP`, call `step` inside its `no_sync`: it would average after every micro-batch.

    `stages` are all stages of the model in order; this rank's are on their device, in their dtype. Rank r of the group
    runs `schedule.actions[r]`, with whole backwards. `loss` is called on the last stage with its output and the targets
    of a micro-batch, and gives their mean. `between` is the shape of what one stage sends to the next for one sample,
    for example (length, d_model); its dtype is that of this rank's first parameter.

    >>> pipeline = Pipeline(split_gpt(model, 4), one_f_one_b(4, 8), cross_entropy, between=(32, 64))
    >>> optimizer = torch.optim.AdamW(pipeline.parameters())
    >>> loss = pipeline.step(x, y)  # gradients are in .grad
    >>> optimizer.step()
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        schedule: Schedule,
        loss: Callable[[Tensor, Tensor], Tensor],
        *,
        between: Sequence[int],
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.group = process_group or dist.group.WORLD
        self.schedule, self.loss, self.between = schedule, loss, tuple(between)
        if (size := dist.get_world_size(self.group)) != schedule.n_ranks:
            said = f"The schedule is for {schedule.n_ranks} ranks, and the process group has {size}."
            raise ValueError(f"{said} Make one of them fit the other.")
        if len(stages) != schedule.n_stages:
            raise ValueError(f"The schedule has {schedule.n_stages} stages, and {len(stages)} modules came.")
        if schedule.split:
            raise ValueError(f"{schedule.name} has backwards in halves. Give a schedule with whole ones (B).")
        self.rank, self.homes = dist.get_rank(self.group), schedule.homes
        self.stages = {stage: stages[stage] for stage in sorted(self.homes) if self.homes[stage] == self.rank}
        self.rounds = rounds(schedule)  # raises if the schedule cannot run
        # what one stage computes for another: its action by the one that takes it, and the other way round
        pairs = [(user, p) for user in self.rounds for p in schedule.needs(user) if p.stage != user.stage]
        self.producers, self.users = dict(pairs), {producer: user for user, producer in pairs}
        # What comes from other ranks. Both ends post what they exchange in this one order: also where a backend, as
        # nccl does, works through it strictly, every wait is for something earlier. So none is for ever.
        mine = (p for user, p in pairs if self.homes[user.stage] == self.rank != self.homes[p.stage])
        self.messages = sorted(mine, key=self.key)
        first = next(self.parameters(), torch.empty(0))
        self.dtype, self.device = first.dtype, first.device
        # Posted early, a message moves as soon as it is there. Only gloo allows it: nccl keeps the order.
        self.ahead = 2 if dist.get_backend(self.group) == "gloo" else 0

    def key(self, action: Action) -> tuple[int, int]:
        """A place in one order of all actions that respects what each needs, and that all ranks know."""
        return self.rounds[action], self.homes[action.stage]

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of this rank's stages."""
        return (p for stage in self.stages.values() for p in stage.parameters())

    def state_dict(self) -> dict[str, Tensor]:
        """The state of this rank's stages. Stages of `split_gpt` have the names of the whole model."""
        return {name: value for stage in self.stages.values() for name, value in stage.state_dict().items()}

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor | None:
        """The loss of the batch, on the rank of the last stage, None on the others; adds its gradient to each `.grad`.

        Every rank gives the whole batch; all but the first and the last stage look at its size only. Micro-batches
        differ by at most one sample, and each counts by its samples, so loss and gradients are those of one process
        that computes the mean over the batch.
        """
        if not torch.is_grad_enabled():
            raise RuntimeError("`step` finds gradients, and they are switched off here. Leave torch.no_grad.")
        m = self.schedule.n_microbatches
        if len(inputs) < m or len(targets) != len(inputs):
            raise ValueError(f"{len(inputs)} inputs and {len(targets)} targets cannot be cut into {m} micro-batches.")
        return _Execution(self, inputs.tensor_split(m), targets.tensor_split(m)).run()


class _Execution:
    """One batch on its way through the pipeline: what has arrived, what is kept, what is on its way."""

    def __init__(self, pipeline: Pipeline, inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        self.pipeline, self.inputs, self.targets = pipeline, inputs, targets
        self.samples = sum(map(len, inputs))
        self.coming = deque(pipeline.messages)
        self.posted: dict[Action, tuple[Any, Tensor]] = {}  # Works of receives, with their buffers
        self.here: dict[Action, Tensor] = {}  # what stages of this same rank computed
        self.sent: dict[Action, tuple[Any, Tensor]] = {}  # a buffer lives until its send is waited for
        self.kept: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}  # input and output of a forward
        self.losses: dict[int, Tensor] = {}  # of the last stage, by micro-batch: shares of the loss

    def run(self) -> Tensor | None:
        shared = [p for stage in self.pipeline.stages.values() for p in _shared(stage).values()]
        before = [(p, p.grad) for p in shared]  # gradients of earlier steps: they were added up then
        for parameter in shared:
            parameter.grad = None
        compute = {"F": self._forward, "B": self._backward}
        for action in self.pipeline.schedule.actions[self.pipeline.rank]:
            self._post_receives(action)
            if (result := compute[action.kind](action, self._take(action))) is not None:
                self._pass_on(action, result)
        for work, _ in self.sent.values():
            work.wait()
        self._add_shared()
        for parameter, grad in before:
            if grad is not None and parameter.grad is not None:
                parameter.grad += grad
        losses = [loss for _, loss in sorted(self.losses.items())]
        return torch.stack(losses).sum() if losses else None

    def _post_receives(self, action: Action) -> None:
        """Post the receive of each message that is earlier in the order of all ranks, and a few where it may be."""
        pipeline = self.pipeline
        turn, rank = pipeline.key(action)
        while self.coming and pipeline.key(self.coming[0]) < (turn + pipeline.ahead, rank):
            producer = self.coming.popleft()
            buffer = torch.empty(self._shape(producer), dtype=pipeline.dtype, device=pipeline.device)
            source = pipeline.homes[producer.stage]
            self.posted[producer] = dist.irecv(buffer, group=pipeline.group, group_src=source), buffer

    def _take(self, action: Action) -> Tensor | None:
        """What another stage computed for this action; waits until it is here. None if it needs nothing."""
        stage, _, j = action
        if (producer := self.pipeline.producers.get(action)) is None:
            return None
        if producer.stage > stage and (old := self.sent.pop(Action(stage, "F", j), None)):
            old[0].wait()  # it went out long ago: its gradient is on the way back
        if producer in self.here:
            return self.here.pop(producer)
        work, buffer = self.posted.pop(producer)
        work.wait()
        return buffer

    def _pass_on(self, action: Action, result: Tensor) -> None:
        """Start to send the result to the stage that needs it, and go on."""
        pipeline, user = self.pipeline, self.pipeline.users.get(action)
        if user is None:
            return
        if pipeline.homes[user.stage] == pipeline.rank:
            self.here[action] = result
            return
        shape = self._shape(action)
        if tuple(result.shape) != shape or result.dtype != pipeline.dtype:
            expected = f"stage {user.stage} expects {pipeline.dtype} {shape}. Make `between` say what the stages do."
            raise ValueError(f"{action} computed {result.dtype} {tuple(result.shape)}, and {expected}")
        result = result.contiguous()
        self.sent[action] = dist.isend(result, group=pipeline.group, group_dst=pipeline.homes[user.stage]), result

    def _shape(self, action: Action) -> tuple[int, ...]:
        return len(self.inputs[action.microbatch]), *self.pipeline.between

    def _forward(self, action: Action, arrived: Tensor | None) -> Tensor:
        stage, _, j = action
        if arrived is not None:
            arrived.requires_grad_()
        out = self.pipeline.stages[stage](self.inputs[j] if arrived is None else arrived)
        if stage == self.pipeline.schedule.n_stages - 1:
            # the mean over the batch is the mean of the micro-batches' means, each counted by its samples
            out = self.pipeline.loss(out, self.targets[j]) * (len(self.inputs[j]) / self.samples)
            self.losses[j] = out.detach()
        self.kept[stage, j] = arrived, out
        return out.detach()

    def _backward(self, action: Action, arrived: Tensor | None) -> Tensor | None:
        x, out = self.kept.pop((action.stage, action.microbatch))
        if out.requires_grad:  # not where all that led to it is frozen
            torch.autograd.backward(out, torch.ones_like(out) if arrived is None else arrived)
        if x is None:
            return None
        return torch.zeros_like(x) if x.grad is None else x.grad  # the stage before waits for it

    @torch.no_grad()
    def _add_shared(self) -> None:
        """Give both copies of a shared parameter the sum of their gradients, without a process group of the two."""
        stages, group = self.pipeline.stages, self.pipeline.group
        for stage, module in stages.items():
            for other, parameter in _shared(module).items():
                assert parameter.grad is not None
                if other not in stages:
                    peer, theirs = self.pipeline.homes[other], torch.empty_like(parameter.grad)
                    exchange = [
                        dist.P2POp(dist.isend, parameter.grad, group=group, group_peer=peer),
                        dist.P2POp(dist.irecv, theirs, group=group, group_peer=peer),
                    ]
                    for work in dist.batch_isend_irecv(exchange):
                        work.wait()
                    parameter.grad = parameter.grad + theirs
                elif stage < other:
                    twin = _shared(stages[other])[stage]
                    assert twin.grad is not None
                    parameter.grad += twin.grad
                    twin.grad = parameter.grad.clone()


def _shared(stage: nn.Module) -> Mapping[int, nn.Parameter]:
    """Parameters of which another stage has a copy, by the number of that stage."""
    return getattr(stage, "shared", {})


def split_gpt(model: models.Decoder, n_stages: int) -> list[nn.Module]:
    """The stages of a GPT or Llama in order; the first may have one block more than the others.

    Each stage is a model of the same class that has some of the model's own parts, under their names, and None in place
    of the others. A tied head becomes a copy of the embedding, and the pipeline keeps both equal; `shared` of a stage
    says with which other stage. Count it once where you add up over ranks.
    """
    n = len(model.blocks)
    if not 1 <= n_stages <= n:
        raise ValueError(f"{n} blocks cannot be cut into {n_stages} stages. Choose from 1 to {n}.")
    stages = []
    for stage, numbers in enumerate(torch.arange(n).tensor_split(n_stages)):
        part = _shallow(model)
        part.blocks = nn.ModuleList()
        for number in numbers.tolist():
            part.blocks.add_module(str(number), model.blocks[number])
        if stage > 0:
            part.token_embedding = part.position_embedding = None
        if stage < n_stages - 1:
            part.norm = part.head = None
        stages.append(part)
    if n_stages > 1 and model.head.weight is model.token_embedding.weight:
        tied, head = model.head.weight, _shallow(model.head)
        head.weight = nn.Parameter(tied.detach().clone(), tied.requires_grad)
        stages[-1].head = head
        stages[0].shared, stages[-1].shared = {n_stages - 1: tied}, {0: head.weight}
    return stages


def _shallow(module: nn.Module) -> Any:
    """A module of the same class with the same parts and parameters, in lists and with hooks of its own."""
    found = copy.copy(module)
    vars(found).update({name: held.copy() for name, held in vars(found).items() if isinstance(held, dict)})
    return found
