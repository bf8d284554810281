"""What is measured in memory equals what can be counted: by kind, at every moment, sharded models too."""

import gc
import textwrap

import pytest
import torch

import rankcell
from rankcell import models
from rankcell.draw import memory
from rankcell.engine import meter


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


def last(held, phase):
    """The last sample of a phase."""
    return [s for s in held.samples if s.phase == phase][-1]


def test_states_and_activations_are_the_formulas_to_the_byte(steps):
    n, tensors = models.gpt_parameters(49), len(list(models.GPT(49).parameters()))
    at = last(steps, "forward")
    assert (at.parameters, at.gradients, at.optimizer) == (4 * n, 0, 8 * n + 4 * tensors)
    assert at.activations == models.gpt_saved_bytes(49, size=2, length=32)


def test_backward_turns_activations_into_gradients(steps):
    after, inputs = last(steps, "backward"), 2 * 2 * 32 * 8  # x and y stay: we hold them
    assert after.gradients == 4 * models.gpt_parameters(49) and after.activations == inputs
    assert steps.samples[-1].gradients == 0  # zero_grad freed them


def test_the_peak_is_where_forward_turns_into_backward(steps):
    assert steps.peak.phase == "backward" and steps.peak.total == max(s.total for s in steps.samples)
    assert steps.peak.total == sum(steps.peak.by_kind.values())


def test_times_rise_from_zero(steps):
    times = [s.at for s in steps.samples]
    assert times == sorted(times) and 0 <= times[0] < times[-1]


def test_a_view_is_no_memory_of_its_own():
    weight = torch.zeros(100)
    with rankcell.memory(weight) as held:
        weight[:50].add_(1)
        other = weight.reshape(10, 10).t()
    assert held.samples[-1].total == 400 and other.shape == (10, 10)


def test_without_a_graph_nothing_is_kept_for_backward():
    net, x = torch.nn.Linear(8, 8), torch.zeros(4, 8)
    with rankcell.memory(net) as held, torch.no_grad():
        net(net(x))
    assert {s.activations for s in held.samples} == {0}
    assert held.peak.rest == 3 * 4 * 8 * 4  # x and two outputs


def test_memory_that_is_taken_from_a_tensor_is_seen():
    weight, x = torch.ones(1000), torch.ones(1)
    with rankcell.memory(weight) as held:
        weight.untyped_storage().resize_(0)
        x.add_(1)
    assert (held.samples[0].parameters, held.samples[-1].parameters) == (4000, 0)


def test_measuring_keeps_nothing_alive():
    import weakref

    net, x = torch.nn.Linear(8, 8), torch.zeros(4, 8)
    with rankcell.memory(net) as held:
        reference = weakref.ref(net(x))
        assert reference() is None
        loss = net(x).sum()
        loss.backward()
    assert held.samples[-1].activations == 4 * 8 * 4  # x
    gc.collect()
    assert torch.ones(2).add(1).sum() == 4  # and nobody listens any more


def test_the_gradients_are_those_without_a_meter():
    gpt, (x, y) = models.GPT(49), models.batch(models.encode(models.text()), 0, size=2)
    models.cross_entropy(gpt(x), y).backward()
    expected = [p.grad.clone() for p in gpt.parameters()]
    gpt.zero_grad()
    with rankcell.memory(gpt):
        models.cross_entropy(gpt(x), y).backward()
    assert all(torch.equal(p.grad, e) for p, e in zip(gpt.parameters(), expected, strict=True))


def test_many_parameters_are_told_apart_as_few_are(monkeypatch):
    """Of many, those are asked that are new: a weight that is there for one forward, gradients for one backward."""
    found = []
    for many in (10**6, 0):
        monkeypatch.setattr(meter, "MANY", many)
        gpt, (x, y) = models.GPT(49, tied=False), models.batch(models.encode(models.text()), 0, size=2)
        with rankcell.memory(gpt) as held:
            for _ in range(2):
                models.cross_entropy(gpt(x), y).backward()
                torch.zeros(8)  # an operation: gradients are noted after the next one
                gpt.zero_grad()
                own, gpt.head.weight = gpt.head.weight, torch.nn.Parameter(torch.zeros(49, 64))
                with torch.no_grad():
                    gpt.head(torch.zeros(2, 64))
                gpt.head.weight = own
        found.append([sample.by_kind for sample in held.samples])
    assert found[0] == found[1]
    n = models.gpt_parameters(49, tied=False)
    assert max(kinds["parameters"] for kinds in found[1]) == 4 * (n + 49 * 64)
    assert max(kinds["gradients"] for kinds in found[1]) == 4 * n


def test_a_long_measurement_stays_small_and_keeps_its_peak(monkeypatch):
    monkeypatch.setattr(meter, "MAX_SAMPLES", 50)
    x = torch.zeros(1)
    with rankcell.memory(x) as held:
        for i in range(300):
            y = x.expand(1000 if i == 150 else i % 7 + 1).clone()
    assert len(held.samples) <= 51 and held.peak.rest >= 4000 and len(y) == 6


def test_what_owns_no_memory_is_refused():
    with pytest.raises(TypeError, match="cannot tell what a str holds"):
        rankcell.memory("model")


def test_samples_are_drawn_with_their_phases(steps):
    figure = memory.over_time(steps.samples)
    assert "highest in backward" in figure.alt and "end of step" in repr(figure)
    assert "time in ms" in memory.over_time(steps.samples, by="time").svg
    with pytest.raises(ValueError, match="by='size'"):
        memory.over_time(steps.samples, by="size")
    assert "Rank 0 holds" in memory.by_rank([steps.peak]).alt


MAKE = """
import rankcell
from rankcell.parallel.fsdp import FSDP
from torch import nn
from torch.distributed.fsdp import fully_shard

def forward_backward(model):
    with rankcell.span("forward"): loss = model(x).float().sum()
    with rankcell.span("backward"):
        loss.backward()
        if hasattr(model, "finish_gradient_synchronization"): model.finish_gradient_synchronization()

def measured(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    forward_backward(model); optimizer.step(); optimizer.zero_grad()
    # the second step: the order of the units is known, and the optimizer has its states
    with rankcell.memory(model, optimizer): forward_backward(model)
"""
UNIT, UNITS = 64 * 64 * 4, 16  # bytes of a layer, layers


def test_a_rank_sends_what_it_measured(four):
    source = "from rankcell import memory, span\nw = torch.zeros(10)\nwith memory(w), span('a'): w + 1"
    run = four.run(source)
    assert {s.phase for s in run.ranks[1].memory} == {"", "a"} and run.ranks[1].peak.total == 80
    assert four.run("w + 1").ranks[1].memory == () and four.run("w").ranks[1].peak is None


@pytest.mark.parametrize("kind", ["FSDP", "fully_shard"])
def test_sharded_models_are_seen_shard_by_shard(four, kind):
    source = MAKE + textwrap.dedent(f"""
    model, x = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range({UNITS})]), torch.ones(2, 64)
    if "{kind}" == "fully_shard":
        for layer in model: fully_shard(layer)
    measured({kind}(model))
    """)
    for rank in four.run(source).ranks:
        first, peak = rank.memory[0], rank.peak
        assert first.parameters == UNIT * UNITS / 4 and first.gradients == 0
        assert first.optimizer == pytest.approx(2 * UNIT * UNITS / 4, abs=4 * UNITS)
        assert peak.phase == "backward"
        # the formula: 16 bytes per parameter shared by 4, and two units gathered with their gradients
        assert peak.total <= 1.10 * (16 / 4 * UNIT / 4 * UNITS + 2 * 2 * UNIT)


def test_zero_3_peaks_at_the_formula_on_a_gpt(four):
    """The formula: shards of all, the root's unit whole with its gradient, and two blocks with theirs."""
    run = four.run(
        MAKE
        + textwrap.dedent("""
    from rankcell import models
    gpt, x = models.GPT(49, n_layers=4), torch.ones(1, 4, dtype=torch.int64)
    block = sum(p.numel() for p in gpt.blocks[0].parameters())
    whole = sum(p.numel() for p in gpt.parameters())
    measured(FSDP(gpt, shard_vectors=True))
    whole, block
    """)
    )
    for rank in run.ranks:
        whole, block = rank.value
        formula = 16 * whole / 4 + 8 * (whole - 4 * block) + 2 * 8 * block
        assert rank.peak.total - rank.peak.activations <= 1.10 * formula
