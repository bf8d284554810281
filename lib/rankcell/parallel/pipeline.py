"""Pipeline parallelism: one engine that executes any schedule of `rankcell.schedules` on a process group.

`Pipeline` holds the stages of this rank and runs its list of actions. Activations and gradients travel in
asynchronous sends and receives, which are posted in an order that both ends share, so that nothing can stand
still whatever the schedule. `split_gpt` cuts a GPT or Llama into stages.

What it does not do: a stage takes one tensor and gives one tensor, each with the samples in its first dim.
Where a stage does not pass the gradient on, those before it get zeros, not None. There is no automatic mixed
precision, and no running ahead with old weights (no weight stashing): all micro-batches of a step see the
same weights. Tested with gloo.
"""

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ..schedules import Action, Schedule, forward_only, needs, rounds

Shape = Sequence[int] | Callable[[int, Tensor], Sequence[int]]


class Pipeline:
    """The stages of this rank, and the engine that trains them with the other ranks of a group.

    Data parallelism averages after `step`, or stage by stage in `on_gradients`. A stage in a `DDP` would
    average after every micro-batch, and in a split backward before the weights have their gradients.

    Args:
        stages: all stages of the model in order, of which this rank's are taken; or only this rank's, by
            number. They are on their device and in their dtype already.
        schedule: who does what in which order, for as many ranks as the group has.
        loss: called on the last stage with its output and the targets of a micro-batch, gives their mean.
        between: shape of what one stage sends to the next for one sample, for example (length, d_model).
            If it is not always the same: a function of the receiving stage and the first stage's inputs of
            the micro-batch, that gives the whole shape.
        dtype: of what is sent, by default that of this rank's first parameter, or torch's default dtype if it
            has none. All ranks need the same.
        process_group: the ranks of the pipeline, by default all. Rank r of the group runs `actions[r]`.
        span: called with the name of each action around its computing, for example `rankcell.span`.
        on_gradients: called with the number of a stage as soon as its gradients are complete, so that
            another average can start while other stages still compute.

    >>> pipeline = Pipeline(split_gpt(model, 4), one_f_one_b(4, 8), cross_entropy, between=(32, 64))
    >>> optimizer = torch.optim.AdamW(pipeline.parameters())
    >>> loss = pipeline.step(x, y)  # gradients are in .grad
    >>> optimizer.step()
    >>> pipeline.evaluate(x, y)  # the loss without gradients
    """

    def __init__(
        self,
        stages: Sequence[nn.Module] | Mapping[int, nn.Module],
        schedule: Schedule,
        loss: Callable[[Tensor, Tensor], Tensor],
        *,
        between: Shape,
        dtype: torch.dtype | None = None,
        process_group: dist.ProcessGroup | None = None,
        span: Callable[[str], AbstractContextManager[Any]] = nullcontext,
        on_gradients: Callable[[int], None] | None = None,
    ) -> None:
        self.group = process_group or dist.group.WORLD
        self.schedule, self.loss, self.between = schedule, loss, between
        self.span, self.on_gradients = span, on_gradients
        if dist.get_world_size(self.group) != schedule.n_ranks:
            raise ValueError(
                f"The schedule is for {schedule.n_ranks} ranks, and the process group has "
                f"{dist.get_world_size(self.group)}. Make one of them fit the other."
            )
        self.route = _Route(schedule, dist.get_rank(self.group))  # raises if the schedule cannot run
        self.stages = self._own(stages)
        first = next(self.parameters(), None)
        self.dtype = dtype or (torch.get_default_dtype() if first is None else first.dtype)
        self.device = None if first is None else first.device
        # Posted early, a message moves as soon as it is there. Only gloo allows it: see `_Route.messages`.
        self._ahead = 2 if dist.get_backend(self.group) == "gloo" else 0
        self.peak = 0  # micro-batches whose activations this rank held at most in the last step
        self._evaluations: dict[int, _Route] = {}  # by number of micro-batches

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of this rank's stages."""
        return (p for stage in self.stages.values() for p in stage.parameters())

    def state_dict(self) -> dict[str, Tensor]:
        """The state of this rank's stages. Stages of `split_gpt` have the names of the whole model."""
        return {name: value for stage in self.stages.values() for name, value in stage.state_dict().items()}

    def zero_grad(self) -> None:
        """Forget the gradients of this rank's stages."""
        for stage in self.stages.values():
            stage.zero_grad()

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor | None:
        """The loss of the batch, on the rank of the last stage, None on the others; adds to each `.grad` the
        gradient of that loss.

        Every rank gives the whole batch of the pipeline; all but the first and the last stage look at its
        size only. It is cut into micro-batches whose sizes differ by at most one, and each counts by its
        number of samples, so loss and gradients are those of one process that computes the mean over the
        batch. No optimizer step.

        Raises:
            ValueError: the batch has fewer samples than the schedule has micro-batches.
            RuntimeError: gradients are switched off.
        """
        if not torch.is_grad_enabled():
            raise RuntimeError(
                "`step` finds gradients, and they are switched off here. Leave torch.no_grad, or call "
                "`evaluate`."
            )
        m = self.schedule.n_microbatches
        if len(inputs) < m or len(targets) != len(inputs):
            raise ValueError(
                f"{len(inputs)} inputs and {len(targets)} targets cannot be cut into {m} micro-batches. "
                f"Give at least one sample to each, and one target for each input."
            )
        if not self.schedule.trains:
            raise ValueError(
                "This schedule has forwards only, and `step` trains. Call `evaluate`, or give the pipeline a "
                "schedule with backwards."
            )
        return _Step(self, self.route, inputs.tensor_split(m), targets.tensor_split(m)).run()

    @torch.no_grad()
    def evaluate(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor | None:
        """The loss of the batch without training, or without targets the outputs of the last stage for it,
        in order. On the rank of the last stage; None on the others.

        Forwards only, in the order of the schedule (`schedules.forward_only`): nothing is kept for a backward
        and gradients stay as they are. The stages are in evaluation mode meanwhile, so there is no dropout.
        The batch may be smaller than the number of micro-batches: then each sample is one.

        Raises:
            ValueError: there are no inputs, or another number of targets.
        """
        if not len(inputs) or (targets is not None and len(targets) != len(inputs)):
            raise ValueError(
                f"{len(inputs)} inputs cannot be evaluated with "
                f"{'no' if targets is None else len(targets)} targets. Give at least one input, and one "
                f"target for each or none at all."
            )
        m = min(self.schedule.n_microbatches, len(inputs))
        if m not in self._evaluations:
            self._evaluations[m] = _Route(forward_only(self.schedule, m), self.route.rank)
        before = [(part, part.training) for module in self.stages.values() for part in module.modules()]
        try:
            for module in self.stages.values():
                module.eval()
            cut = None if targets is None else targets.tensor_split(m)
            return _Step(self, self._evaluations[m], inputs.tensor_split(m), cut).run()
        finally:
            for part, training in before:
                part.training = training

    def shape(self, stage: int, inputs: Tensor) -> tuple[int, ...]:
        """The shape of what `stage` receives for the micro-batch of the first stage's `inputs`."""
        if callable(self.between):
            return tuple(self.between(stage, inputs))
        return (len(inputs), *self.between)

    def _own(self, stages: Sequence[nn.Module] | Mapping[int, nn.Module]) -> dict[int, nn.Module]:
        mine = self.route.stages
        if not isinstance(stages, Mapping):
            if len(stages) != self.schedule.n_stages:
                raise ValueError(
                    f"The schedule has {self.schedule.n_stages} stages, and {len(stages)} modules came. Give "
                    f"them all in order, or this rank's by number: {{{mine[0]}: module}}."
                )
            return {stage: stages[stage] for stage in mine}
        if sorted(stages) != mine:
            raise ValueError(f"Rank {self.route.rank} runs the stages {mine} and got {sorted(stages)}.")
        return {stage: stages[stage] for stage in mine}


class _Route:
    """A schedule as one rank sees it: where each action runs, when, and what comes here from others.

    Raises:
        ScheduleError: the schedule cannot run.
    """

    def __init__(self, schedule: Schedule, rank: int) -> None:
        self.rank, self.actions, self.n_stages = rank, schedule.actions[rank], schedule.n_stages
        self.trains = schedule.trains
        self.rounds = rounds(schedule)
        self.homes = {a.stage: rank for rank, actions in enumerate(schedule.actions) for a in actions}
        self.stages = sorted(stage for stage, home in self.homes.items() if home == rank)
        self.split = {(a.stage, a.microbatch) for a in self.rounds if a.kind == "I"}
        self.last = {s: [a for a in self.actions if a.stage == s][-1] for s in self.stages}
        self.messages = self._messages()

    def user(self, action: Action) -> Action | None:
        """The action of another stage that takes what `action` computes; None if its own stage keeps it."""
        stage, kind, j = action
        if kind == "F" and stage + 1 < self.n_stages:
            return Action(stage + 1, "F", j)
        if kind in "BI" and stage:
            return Action(stage - 1, "I" if (stage - 1, j) in self.split else "B", j)
        return None

    def key(self, action: Action) -> tuple[int, int]:
        """A place in one order of all actions that respects what each needs, and that all ranks know."""
        return self.rounds[action], self.homes[action.stage]

    def _messages(self) -> list[Action]:
        """The actions on other ranks whose results come here, in the order in which they are sent.

        Both ends of a pair post what they exchange in this one order: also where a backend, as nccl does,
        works through it strictly one after the other, every wait is for something earlier. So none is for
        ever.
        """
        found = []
        for action in self.rounds:
            user = self.user(action)
            if user is not None and self.homes[user.stage] == self.rank != self.homes[action.stage]:
                found.append(action)
        return sorted(found, key=self.key)


class _Step:
    """One batch on its way through the pipeline: what has arrived, what is kept, what is on its way."""

    def __init__(
        self,
        pipeline: Pipeline,
        route: _Route,
        inputs: Sequence[Tensor],
        targets: Sequence[Tensor] | None,
    ) -> None:
        self.pipeline, self.route, self.inputs, self.targets = pipeline, route, inputs, targets
        self.samples = sum(map(len, inputs))
        self.coming = deque(route.messages)
        self.posted: dict[Action, tuple[dist.Work, Tensor]] = {}  # receives, with their buffers
        self.here: dict[Action, Tensor] = {}  # what stages of this same rank computed
        self.sent: dict[Action, tuple[dist.Work, Tensor]] = {}  # a buffer lives until its send is waited for
        self.kept: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}  # input and output of a forward
        self.later: dict[tuple[int, int], _WeightsLater] = {}  # weight gradients put off
        # of the last stage, by micro-batch: shares of the loss, or outputs
        self.results: dict[int, Tensor] = {}
        self.peak = 0

    def run(self) -> Tensor | None:
        """Execute this rank's list of actions."""
        pipeline, route = self.pipeline, self.route
        before = self._set_shared_aside() if route.trains else []
        compute = {"F": self._forward, "B": self._backward, "I": self._backward, "W": self._weights}
        for action in route.actions:
            self._ask_for_what_comes(action)
            arrived = self._take(action)
            with pipeline.span(str(action)):
                result = compute[action.kind](action, arrived)
            self.peak = max(self.peak, len(self.kept.keys() | self.later.keys()))
            self._pass_on(action, result)
            ends = route.trains and route.last[action.stage] == action
            if ends and not _shared(pipeline.stages[action.stage]):
                self._complete(action.stage)
        for work, _ in self.sent.values():
            work.wait()
        if route.trains:
            self._add_shared(before)
            pipeline.peak = self.peak
        return self._result()

    def _result(self) -> Tensor | None:
        in_order = [result for _, result in sorted(self.results.items())]
        if not in_order:
            return None
        return torch.cat(in_order) if self.targets is None else torch.stack(in_order).sum()

    # Messages

    def _ask_for_what_comes(self, action: Action) -> None:
        """Post the receive of each message that is earlier in the order of all ranks than this action, and of
        a few later ones where the backend allows it.
        """
        pipeline, route = self.pipeline, self.route
        turn, rank = route.key(action)
        until = turn + pipeline._ahead, rank
        while self.coming and route.key(self.coming[0]) < until:
            producer = self.coming.popleft()
            boundary = producer.stage + (producer.kind == "F")  # the later of the two stages
            shape = pipeline.shape(boundary, self.inputs[producer.microbatch])
            device = pipeline.device or self.inputs[0].device
            buffer = torch.empty(shape, dtype=pipeline.dtype, device=device)
            source = route.homes[producer.stage]
            work = dist.irecv(buffer, group=pipeline.group, group_src=source)
            self.posted[producer] = work, buffer

    def _take(self, action: Action) -> Tensor | None:
        """What another stage computed for this action; waits until it is here. None if it needs nothing."""
        stage, _, j = action
        split = (stage + 1, j) in self.route.split
        for producer in needs(action, self.route.n_stages, split=split):
            if producer.stage == stage:
                continue
            if producer.stage > stage and (old := self.sent.pop(Action(stage, "F", j), None)):
                old[0].wait()  # it went out long ago: its gradient is on the way back
            if producer in self.here:
                return self.here.pop(producer)
            work, buffer = self.posted.pop(producer)
            work.wait()
            return buffer
        return None

    def _pass_on(self, action: Action, result: Tensor | None) -> None:
        """Start to send the result to the stage that needs it, and go on."""
        pipeline, route, user = self.pipeline, self.route, self.route.user(action)
        if user is None or result is None:
            return
        if route.homes[user.stage] == route.rank:
            self.here[action] = result
            return
        shape = pipeline.shape(max(action.stage, user.stage), self.inputs[action.microbatch])
        if tuple(result.shape) != shape or result.dtype != pipeline.dtype:
            raise ValueError(
                f"{action} computed {result.dtype} {tuple(result.shape)}, and stage {user.stage} expects "
                f"{pipeline.dtype} {shape}. Make `between` and `dtype` say what the stages do."
            )
        result = result.contiguous()
        work = dist.isend(result, group=pipeline.group, group_dst=route.homes[user.stage])
        self.sent[action] = work, result
        self._let_go(action)

    def _let_go(self, now: Action) -> None:
        """Wait for old sends, so that their buffers do not pile up over the micro-batches.

        Only for those that are used in an earlier round than `now`: waiting for a later one could be for
        ever. In training a send of activations is waited for when their gradient comes back.
        """
        route = self.route
        old = [action for action in self.sent if action.kind != "F" or not route.trains]
        for action in old[: -2 * self.pipeline.schedule.n_ranks]:
            if route.rounds[route.user(action)] < route.rounds[now]:
                self.sent.pop(action)[0].wait()

    # Computing

    def _forward(self, action: Action, arrived: Tensor | None) -> Tensor:
        stage, _, j = action
        if arrived is not None and self.route.trains:
            arrived.requires_grad_()
        if (stage, j) in self.route.split:
            self.later[stage, j] = _WeightsLater()
        with self.later.get((stage, j), nullcontext()):
            out = self.pipeline.stages[stage](self.inputs[j] if arrived is None else arrived)
        if not isinstance(out, Tensor):
            raise TypeError(
                f"Stage {stage} gave a {type(out).__name__}, and a stage gives one tensor. Let it return "
                f"one, for example the values joined with torch.cat."
            )
        if stage == self.route.n_stages - 1:
            if self.targets is not None:
                # the mean over the batch is the mean of the micro-batches' means, each counted by its samples
                share = len(self.inputs[j]) / self.samples
                out = self.pipeline.loss(out, self.targets[j]) * share
            self.results[j] = out.detach()
        if self.route.trains:
            self.kept[stage, j] = arrived, out
        return out.detach()

    def _backward(self, action: Action, arrived: Tensor | None) -> Tensor | None:
        """Both halves, or for "I" all but the products that only a weight's gradient needs."""
        place = action.stage, action.microbatch
        x, out = self.kept.pop(place)
        later = self.later.get(place)
        if out.requires_grad:  # not where all that led to it is frozen
            grad = torch.ones_like(out) if arrived is None else arrived  # the loss has none
            if later is None:
                torch.autograd.backward(out, grad)
            else:
                later.run_backward([out], [grad])
        if x is None:
            return None
        return torch.zeros_like(x) if x.grad is None else x.grad  # the stage before waits for it

    def _weights(self, action: Action, arrived: None) -> None:
        self.later.pop((action.stage, action.microbatch)).run()

    def _complete(self, stage: int) -> None:
        if self.pipeline.on_gradients is not None:
            self.pipeline.on_gradients(stage)

    # A parameter that two stages share

    def _set_shared_aside(self) -> list[tuple[nn.Parameter, Tensor | None]]:
        """Gradients of earlier steps of the shared parameters: they were added up then."""
        found = []
        for stage in self.pipeline.stages.values():
            for parameter in _shared(stage).values():
                found.append((parameter, parameter.grad))
                parameter.grad = None
        return found

    @torch.no_grad()
    def _add_shared(self, before: Sequence[tuple[nn.Parameter, Tensor | None]]) -> None:
        """Give both copies of a shared parameter the sum of their gradients: an all-reduce between two ranks.

        It is an exchange and an addition, so no process group of the two has to be made.
        """
        pipeline = self.pipeline
        pairs = sorted(
            (min(stage, other), max(stage, other), stage, parameter)
            for stage, module in pipeline.stages.items()
            for other, parameter in _shared(module).items()
        )
        for low, high, stage, parameter in pairs:
            mine = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.contiguous()
            parameter.grad = mine
            other = self.route.homes[high if stage == low else low]
            if other != self.route.rank:
                theirs = torch.empty_like(mine)
                ends = [(dist.isend, mine, "group_dst"), (dist.irecv, theirs, "group_src")]
                ends = ends if self.route.rank < other else ends[::-1]  # one order for both
                works = [post(x, group=pipeline.group, **{end: other}) for post, x, end in ends]
                for work in works:
                    work.wait()
                parameter.grad = mine + theirs
            elif stage == high:
                twin = _shared(pipeline.stages[low])[high]
                parameter.grad = mine + twin.grad
                twin.grad = parameter.grad.clone()
        for parameter, grad in before:
            if grad is not None:
                parameter.grad.add_(grad)
        for stage in sorted({stage for *_, stage, _ in pairs}):
            self._complete(stage)


def _shared(stage: nn.Module) -> Mapping[int, nn.Parameter]:
    """Parameters of which another stage has a copy, by the number of that stage."""
    return getattr(stage, "shared", {})


# The two halves of a backward


class _WeightsLater(TorchFunctionMode):
    """Inside, the backward of each F.linear computes the gradient of its input only, and leaves a job.

    A weight that is computed, for example masked or normalised, is cut off from what it was computed from: a
    leaf stands in for it and collects its gradient, and `run` takes that further. So this object is that of
    one micro-batch, entered in its forward and in both halves of its backward, where a checkpoint computes
    the forward again.
    """

    def __init__(self) -> None:
        super().__init__()
        self.jobs: list[Callable[[], None]] = []
        self.computed: dict[int, tuple[Tensor, Tensor]] = {}  # by id: a weight, and what stands in for it

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is F.linear:
            return self._linear(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def run(self) -> None:
        """Compute the gradients that were put off."""
        while self.jobs:
            self.jobs.pop(0)()
        found = [(weight, leaf.grad) for weight, leaf in self.computed.values() if leaf.grad is not None]
        self.computed = {}
        if found:  # together: they may come from the same parameters
            self.run_backward(*zip(*found, strict=True))
            self.run()  # a layer that computed a weight has left its own job

    def run_backward(self, tensors: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        """`torch.autograd.backward`, inside this. What computed weights came from is kept for `run`."""
        with self:
            # torch.autograd.backward would leave every mode first, and then a checkpoint would compute its
            # forward again with torch's own F.linear and find that it does not save the same tensors
            torch.autograd.Variable._execution_engine.run_backward(
                tuple(tensors), tuple(grads), bool(self.computed), False, (),
                allow_unreachable=True, accumulate_grad=True,
            )  # fmt: skip

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        learnt = [t for t in (weight, bias) if t is not None and t.requires_grad]
        if not learnt or not all(map(_is_of_parameters_only, learnt)):
            return F.linear(input, weight, bias)
        return _Linear.apply(input, self._leaf(weight), None if bias is None else self._leaf(bias), self.jobs)

    def _leaf(self, weight: Tensor) -> Tensor:
        if weight.is_leaf:
            return weight
        return self.computed.setdefault(id(weight), (weight, weight.detach().requires_grad_()))[1]


def _is_of_parameters_only(tensor: Tensor) -> bool:
    """Whether a weight is a parameter or computed from parameters. If it depends on what came into the
    stage, its gradient is part of what the stage before waits for and cannot be put off.
    """
    if tensor.grad_fn is None:
        return isinstance(tensor, nn.Parameter)
    nodes, seen = [tensor.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable") and not isinstance(node.variable, nn.Parameter):
            return False
        nodes += [before for before, _ in node.next_functions if before is not None]
    return True


class _Linear(torch.autograd.Function):
    """x Wᵀ + b, whose backward gives the gradient of x and puts off those of W and b."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, jobs: list) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.leaves, ctx.jobs = (weight, bias), jobs
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None]:
        saved, weight = ctx.saved_tensors
        x = saved.detach()  # the job needs its numbers, not what it was computed from
        leaves = ctx.leaves  # a checkpoint saves copies; the gradients belong to these

        def job() -> None:
            rows = grad.reshape(-1, grad.shape[-1])  # (samples, out)
            found = []
            if leaves[0].requires_grad:
                found.append((leaves[0], rows.T @ x.reshape(-1, x.shape[-1])))
            if leaves[1] is not None and leaves[1].requires_grad:
                found.append((leaves[1], rows.sum(0)))
            # on leaves this adds to `.grad`, and calls their hooks
            torch.autograd.backward(*map(list, zip(*found, strict=True)))

        ctx.jobs.append(job)
        return (grad @ weight if ctx.needs_input_grad[0] else None), None, None, None


# Cutting a GPT into stages


def split_gpt(model: nn.Module, n_stages: int) -> list[nn.Module]:
    """The stages of a GPT or Llama in order; blocks are shared out evenly, the first stages get one more
    where it does not work out.

    Each stage is a model of the same class that has some of the model's own parts, under their names, and
    None in place of the others: the first stage embeds, the last one computes the logits. A tied head becomes
    a copy of the embedding, and the pipeline keeps both equal; `shared` of a stage says with which other
    stage. Count it once where you add up over ranks, for example in the norm of all gradients.

    Raises:
        ValueError: there are more stages than blocks.
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
        first, last = stage == 0, stage == n_stages - 1
        if not first:
            part.token_embedding = part.position_embedding = None
        if not last:
            part.norm = part.head = None
        stages.append(part)
    if n_stages > 1 and model.head.weight is model.token_embedding.weight:
        _untie(stages[0], stages[-1], n_stages)
    return stages


def _untie(first: nn.Module, last: nn.Module, n_stages: int) -> None:
    """Give the last stage a copy of the embedding as its head, and note on both who has the other one."""
    head = last.head = _shallow(last.head)
    head.weight = nn.Parameter(head.weight.detach().clone(), head.weight.requires_grad)
    first.shared = {n_stages - 1: first.token_embedding.weight}
    last.shared = {0: head.weight}


def _shallow(module: nn.Module) -> nn.Module:
    """A module of the same class with the same parts and parameters, in lists and with hooks of its own."""
    found = copy.copy(module)
    vars(found).update({name: held.copy() for name, held in vars(found).items() if isinstance(held, dict)})
    return found
