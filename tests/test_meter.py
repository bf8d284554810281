"""What is measured in a block of code: memory, equal to what can be counted, by kind; modules, as spans of time."""

import itertools
import textwrap
import weakref

import pytest
import torch

import rankcell
from rankcell import models
from rankcell.draw import memory
from rankcell.observers import meter
from rankcell.observers import spans as modules


@pytest.fixture(scope="module")
def steps():
    """Two training steps of the GPT, measured, with their phases."""
    gpt = models.GPT(49)
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=3e-3)
    x, y = models.batch(models.encode(models.text()), 0, size=2)
    with rankcell.memory(gpt, optimizer) as held:
        for _ in range(2):
            held.phase = "forward"
            loss = models.cross_entropy(gpt(x), y)
            held.phase = "backward"
            loss.backward()
            held.phase = "step"
            optimizer.step()
            optimizer.zero_grad()
    return held


def test_states_and_activations_are_the_formulas_to_the_byte(steps):
    n, tensors = models.gpt_parameters(49), len(list(models.GPT(49).parameters()))
    last = {s.phase: s for s in steps.samples}
    at, after = last["forward"], last["backward"]
    assert (at.parameters, at.gradients, at.optimizer) == (4 * n, 0, 8 * n + 4 * tensors)
    assert at.activations == models.gpt_saved_bytes(49, size=2, length=32)
    assert after.gradients == 4 * n and after.activations == 2 * 2 * 32 * 8  # x and y stay: we hold them
    assert steps.samples[-1].gradients == 0  # zero_grad freed them
    assert steps.peak.phase == "backward" and steps.peak.total == max(s.total for s in steps.samples)
    assert steps.peak.total == sum(steps.peak.by_kind.values())
    times = [s.at for s in steps.samples]
    assert times == sorted(times) and 0 <= times[0] < times[-1]
    assert "highest in backward" in memory.over_time(steps.samples).alt


def test_only_memory_that_somebody_holds_is_counted():
    """A view owns nothing, without a graph nothing is kept for backward, and measuring keeps nothing alive."""
    weight, x = torch.ones(1000), torch.ones(1)
    with rankcell.memory(weight) as held:
        weight[:50].add_(1)
        x.add_(1)
        weight.untyped_storage().resize_(0)
        x.add_(1)
    assert {s.total for s in held.samples if s.parameters} == {4000, 4004}
    assert (held.samples[0].parameters, held.samples[-1].parameters) == (4000, 0)
    net, x = torch.nn.Linear(8, 8), torch.zeros(4, 8)
    with rankcell.memory(net) as held, torch.no_grad():
        net(net(x))
    assert {s.activations for s in held.samples} == {0}
    assert held.peak.rest == 3 * 4 * 8 * 4  # x and two outputs
    with rankcell.memory(net) as held:
        reference = weakref.ref(net(x))
        assert reference() is None
        net(x).sum().backward()
    assert held.samples[-1].activations == 4 * 8 * 4  # x


UNIT, UNITS = 64 * 64 * 4, 16  # bytes of a layer, layers


def test_a_storage_may_be_freed_while_it_looks():
    class Frees(dict):
        """The sizes at the last look; whoever asks for one frees a storage, as the collector may."""

        def get(self, *args):
            held._changed[-1 - len(held._changed)] = 0
            return super().get(*args)

    with rankcell.memory() as held:
        held._nbytes = Frees(held._nbytes)
        kept = [torch.ones(n) for n in range(1, 5)]
        assert held._changed, "what was freed meanwhile is told by the next look"
        held._nbytes = dict(held._nbytes)
    del kept


def test_of_many_samples_the_highest_is_kept(monkeypatch):
    monkeypatch.setattr(meter, "MAX_SAMPLES", 6)
    for high in range(8):  # one of them is a sample that goes where only every second is kept
        with meter.Meter() as held:
            for i in range(8):
                torch.ones(1000 if i == high else 10).add(1)
        assert held.peak.rest == 2 * 4000


def test_a_sharded_model_is_seen_shard_by_shard(four):
    """In the second step: the order of the units is known, and the optimizer has its states."""
    source = f"""
    import rankcell
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    model, x = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range({UNITS})]), torch.ones(2, 64)
    for layer in model: fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(x).sum().backward(); optimizer.step(); optimizer.zero_grad()
    with rankcell.memory(model, optimizer):
        with rankcell.span("forward"): loss = model(x).sum()
        with rankcell.span("backward"): loss.backward()
    """
    for rank in four.run(textwrap.dedent(source)).ranks:
        first, peak = rank.memory[0], rank.peak
        (forward,) = (e for e in rank.events if e.op == "forward")
        assert [
            m for m in rank.memory if m.phase == "forward" and not forward.start <= m.at <= forward.end
        ] == []
        assert first.parameters == UNIT * UNITS / 4 and first.gradients == 0
        assert first.optimizer == pytest.approx(2 * UNIT * UNITS / 4, abs=4 * UNITS)
        assert peak.phase == "backward"
        # the formula: 16 bytes per parameter shared by 4, and two units gathered with their gradients
        assert peak.total <= 1.10 * (16 / 4 * UNIT / 4 * UNITS + 2 * 2 * UNIT)
    assert four.run("x").ranks[1].memory == ()


def spans_of(model, x, names=(), loss=lambda y: y.sum()):
    """(name, begin, end) in order of begin, of one forward and backward."""
    found = []
    parts = {name: model.get_submodule(name) for name in names} or modules.parts_of(model)
    with modules.watched(parts, lambda *span: found.append(span)):
        loss(model(x)).backward()
    return sorted(found, key=lambda span: span[1])


def test_modules_are_the_parts_of_the_model_with_lists_entered():
    names = list(modules.parts_of(models.GPT(49, n_layers=3)))
    assert [n for n in names if n.startswith("blocks")] == ["blocks.0", "blocks.1", "blocks.2"]


def test_backward_spans_come_last_to_first_without_overlap():
    class Three(torch.nn.Module):
        """All read the same input."""

        def __init__(self):
            super().__init__()
            self.q, self.k, self.v = (torch.nn.Linear(4, 4) for _ in range(3))

        def forward(self, x):
            x = x * 1
            return torch.nn.functional.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x))

    row = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4))
    for net, names in ((row, "012"), (Three(), "qkv")):
        spans = spans_of(net, torch.ones(1, 2, 4, requires_grad=True))
        wanted = [f"forward {n}" for n in names] + [f"backward {n}" for n in reversed(names)]
        assert [name for name, *_ in spans] == wanted
        assert all(a[2] <= b[1] for a, b in itertools.pairwise(spans))
        assert all(begin < end for _, begin, end in spans)


def test_an_embedding_has_a_backward_although_its_input_has_no_gradient():
    gpt = models.GPT(49)
    x, y = models.batch(models.encode(models.text()), 0, size=2)
    name = next(n for n, m in gpt.named_modules() if isinstance(m, torch.nn.Embedding))
    spans = spans_of(gpt, x, [name, "blocks.0", "blocks.0.mlp"], lambda z: models.cross_entropy(z, y))
    assert [n for n, *_ in spans][-3:] == ["backward blocks.0", "backward blocks.0.mlp", f"backward {name}"]
    spans = {n: s for n, *s in spans}
    for way in ("forward", "backward"):  # a module inside another has its span inside
        outer, inner = spans[f"{way} blocks.0"], spans[f"{way} blocks.0.mlp"]
        assert outer[0] < inner[0] < inner[1] < outer[1]


def test_no_hook_stays_behind():
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    with pytest.raises(RuntimeError):
        spans_of(net, torch.ones(2, 5))
    for module in net.modules():
        kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        assert not any(getattr(module, kind) for kind in kinds)
    assert not any(p._post_accumulate_grad_hooks for p in net.parameters())
