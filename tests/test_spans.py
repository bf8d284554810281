"""Forward and backward of modules as spans: the right names, order and nesting, and nothing left behind."""

import itertools
import textwrap

import pytest
import torch

from rankcell import models
from rankcell.engine import spans as modules


def spans_of(model, x, names=(), loss=lambda y: y.sum()):
    """(name, begin, end) in order of begin, of one forward and backward."""
    found = []
    with modules.watched(modules.chosen(model, names), lambda *span: found.append(span)):
        loss(model(x)).backward()
    return sorted(found, key=lambda span: span[1])


def test_modules_are_the_parts_of_the_model_with_lists_entered():
    names = list(modules.chosen(models.GPT(49, n_layers=3)))
    assert [n for n in names if n.startswith("blocks")] == ["blocks.0", "blocks.1", "blocks.2"]
    wrapped = torch.nn.Module()
    wrapped.module = models.MLP(2, 3, 4)
    assert list(modules.chosen(wrapped)) == list(modules.chosen(wrapped.module))
    assert list(modules.chosen(models.GPT(49), ["blocks.0.mlp"])) == ["blocks.0.mlp"]
    with pytest.raises(AttributeError, match="nowhere"):
        modules.chosen(models.GPT(49), ["nowhere"])


def test_backward_runs_the_modules_from_the_last_to_the_first_without_overlap():
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4))
    spans = spans_of(net, torch.ones(2, 4))
    forward, backward = [f"forward {i}" for i in range(3)], [f"backward {i}" for i in (2, 1, 0)]
    assert [name for name, *_ in spans] == forward + backward
    assert all(a[2] <= b[1] for a, b in itertools.pairwise(spans))
    assert all(begin < end for _, begin, end in spans)


def test_modules_that_read_the_same_input_do_not_overlap():
    class Three(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v = (torch.nn.Linear(4, 4) for _ in range(3))

        def forward(self, x):
            x = x * 1
            return torch.nn.functional.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x))

    spans = spans_of(Three(), torch.ones(1, 2, 4, requires_grad=True))
    assert [name for name, *_ in spans][3:] == ["backward v", "backward k", "backward q"]
    assert all(a[2] <= b[1] for a, b in itertools.pairwise(spans))


def test_a_module_inside_another_has_its_span_inside():
    gpt = models.GPT(49)
    x, y = models.batch(models.encode(models.text()), 0, size=2)
    names = ["blocks.0", "blocks.0.mlp"]
    spans = {n: s for n, *s in spans_of(gpt, x, names, lambda z: models.cross_entropy(z, y))}
    for way in ("forward", "backward"):
        outer, inner = spans[f"{way} blocks.0"], spans[f"{way} blocks.0.mlp"]
        assert outer[0] < inner[0] < inner[1] < outer[1]


def test_an_embedding_has_a_backward_although_its_input_has_no_gradient():
    gpt = models.GPT(49)
    x, y = models.batch(models.encode(models.text()), 0, size=2)
    name = next(n for n, m in gpt.named_modules() if isinstance(m, torch.nn.Embedding))
    spans = spans_of(gpt, x, [name, "blocks.0"], lambda z: models.cross_entropy(z, y))
    assert [n for n, *_ in spans][-2:] == ["backward blocks.0", f"backward {name}"]


def test_a_module_called_twice_has_two_spans():
    layer = torch.nn.Linear(4, 4)
    net = torch.nn.Sequential(layer, torch.nn.Tanh(), layer)
    assert [n for n, *_ in spans_of(net, torch.ones(2, 4), ["0"])] == ["forward 0"] * 2 + ["backward 0"] * 2


def test_no_hook_stays_behind():
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    with pytest.raises(RuntimeError):
        spans_of(net, torch.ones(2, 5))
    for module in net.modules():
        kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        assert not any(getattr(module, kind) for kind in kinds)
    assert not any(p._post_accumulate_grad_hooks for p in net.parameters())


def test_on_a_rank_they_are_events_of_the_run(four):
    source = """
    import rankcell
    from rankcell.parallel.ddp import DDP
    net = DDP(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)))
    with rankcell.spans(net):
        net(torch.ones(2, 4)).sum().backward()
        net.finish_gradient_synchronization()
    net(torch.ones(2, 4)).sum().backward()
    """
    events = [e for e in four.run(textwrap.dedent(source)).ranks[3].events if e.kind == "compute"]
    events.sort(key=lambda e: e.start)
    assert [e.op for e in events] == ["forward 0", "forward 1", "backward 1", "backward 0"]
