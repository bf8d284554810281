"""The course's models: their weights, their data, and what they cost, by formula and as torch counts it."""

import inspect
import math
import re
from typing import ClassVar

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from rankcell import models
from rankcell.models import GPT, MLP

DIMS = {"vocab": 29, "d_model": 16, "n_heads": 2, "n_layers": 3, "context": 12}


@pytest.fixture(autouse=True)
def global_generator_is_left_alone():
    """Building, drawing and sampling anything here must not touch torch's global random numbers."""
    before = torch.get_rng_state()
    yield
    assert torch.equal(before, torch.get_rng_state())


def parameters(model):
    return sum(p.numel() for p in model.parameters())


# Weights


@pytest.mark.parametrize("build", [lambda s: MLP(6, 32, 3, seed=s), lambda s: GPT(**DIMS, seed=s)])
def test_the_same_seed_gives_the_same_weights_and_another_seed_others(build):
    first, again, other = build(0).state_dict(), build(0).state_dict(), build(1).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[n], other[n]) for n in first if "norm" not in n)


def test_no_two_layers_are_alike():
    blocks = GPT(**DIMS).blocks
    assert not torch.equal(blocks[0].attention.query.weight, blocks[1].attention.query.weight)
    assert not torch.equal(blocks[0].attention.query.weight, blocks[0].attention.key.weight)


def test_weights_are_scaled_by_fan_in():
    model = MLP(400, 900, 100)
    assert model.up.weight.std().item() == pytest.approx(1 / 20, rel=0.02)
    assert model.down.weight.std().item() == pytest.approx(1 / 30, rel=0.02)
    assert model.up.bias.abs().min() > 0  # a bias added twice must show


def test_a_part_gets_the_weights_it_has_in_the_whole():
    whole, part = GPT(**DIMS, seed=5), GPT(**DIMS, seed=6).blocks[1]
    models.initialise(part, seed=5, prefix="blocks.1.")
    theirs = dict(whole.blocks[1].named_parameters())
    assert all(torch.equal(p, theirs[name]) for name, p in part.named_parameters())


def test_a_model_built_on_meta_gets_its_weights_later():
    with torch.device("meta"):
        model = MLP(6, 8, 3)
    model = models.initialise(model.to_empty(device="cpu"), seed=2)
    assert torch.equal(model.up.weight, MLP(6, 8, 3, seed=2).up.weight)


def test_float64_holds_the_same_numbers():
    model = GPT(**DIMS, dtype=torch.float64)
    assert torch.equal(model.position_embedding.weight.float(), GPT(**DIMS).position_embedding.weight)
    assert {p.dtype for p in model.parameters()} == {torch.float64}


def test_initialise_refuses_what_it_does_not_know():
    with pytest.raises(TypeError, match="not the Conv1d at inner"):
        models.initialise(torch.nn.ModuleDict({"inner": torch.nn.Conv1d(1, 1, 1, device="meta")}))


# The MLP


def test_mlp_is_two_affine_maps_and_an_activation():
    model, x = MLP(6, 5, 3), torch.arange(12.0).view(2, 6) / 6 - 1
    hidden = (x @ model.up.weight.T + model.up.bias).clamp(min=0)
    assert torch.allclose(model(x), hidden @ model.down.weight.T + model.down.bias, atol=1e-6)


def test_mlp_without_activation_is_one_affine_map():
    model, (x, _) = MLP(6, 32, 3, activation="none"), models.regression(10)
    weight = model.down.weight @ model.up.weight
    bias = model.down.weight @ model.up.bias + model.down.bias
    assert torch.allclose(model(x), x @ weight.T + bias, atol=1e-5)
    assert not torch.allclose(MLP(6, 32, 3)(x), x @ weight.T + bias, atol=1e-2)


def test_unknown_activation():
    with pytest.raises(ValueError, match=r"no activation 'tanh'\. Choose one of relu, gelu, none\."):
        MLP(2, 2, 2, activation="tanh")


@pytest.mark.slow
def test_regression_can_be_learnt_down_to_its_noise():
    x, y = models.regression()
    assert x.shape == (1024, 6) and y.shape == (1024, 3)
    assert torch.equal(x, models.regression()[0]) and not torch.equal(x, models.regression(seed=1)[0])
    model = MLP(6, 32, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(300):
        loss = torch.nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 0.5 and 0.01 < losses[-1] < 0.05


# The GPT


def test_gpt_shapes_and_first_loss():
    model = GPT(**DIMS)
    logits = model(torch.zeros(2, 12, dtype=torch.long))
    assert logits.shape == (2, 12, 29)
    targets = torch.arange(24).view(2, 12)
    assert models.cross_entropy(logits, targets).item() == pytest.approx(math.log(29), abs=0.02)


def test_gpt_does_not_look_ahead():
    model, tokens = GPT(**DIMS), torch.arange(12)[None]
    other = tokens.clone()
    other[0, 7] = 20
    same = torch.isclose(model(tokens), model(other), atol=1e-7).all(-1)[0]
    assert same[:7].all() and not same[7:].any()


def test_attention_is_what_torch_computes_and_splits_by_heads():
    attention = GPT(**DIMS).blocks[0].attention
    x = torch.randn(2, 5, 16, generator=models.generator(0, "x"))
    query, key, value = (attention.heads(f(x)) for f in (attention.query, attention.key, attention.value))
    mixed = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    assert torch.allclose(attention(x), attention.output(mixed.transpose(1, 2).flatten(2)), atol=1e-6)

    parts = []  # each half of the columns, computed by the same code, adds up to the whole
    for half in range(2):
        columns = slice(8 * half, 8 * half + 8)
        part = GPT(**DIMS).blocks[0].attention
        for layer in (part.query, part.key, part.value):
            layer.weight = torch.nn.Parameter(layer.weight[columns])
            layer.bias = torch.nn.Parameter(layer.bias[columns])
        part.output.weight = torch.nn.Parameter(part.output.weight[:, columns])
        part.output.bias = torch.nn.Parameter(part.output.bias / 2)
        parts.append(part(x))
    assert torch.allclose(attention(x), sum(parts), atol=1e-6)


def test_tied_head_is_the_embedding_and_gets_both_gradients():
    tied, untied = GPT(**DIMS, dtype=torch.float64), GPT(**DIMS, tied=False, dtype=torch.float64)
    assert tied.head.weight is tied.token_embedding.weight
    assert untied.head.weight is not untied.token_embedding.weight
    assert torch.equal(tied.token_embedding.weight, untied.token_embedding.weight)
    untied.load_state_dict(tied.state_dict())
    tokens = torch.arange(12)[None]
    for model in (tied, untied):
        models.cross_entropy(model(tokens), tokens + 1).backward()
    both = untied.token_embedding.weight.grad + untied.head.weight.grad
    assert torch.allclose(tied.head.weight.grad, both, atol=1e-12)


def test_stages_give_the_whole():
    model, tokens = GPT(**DIMS), torch.arange(12)[None]
    x = model.embed(tokens)
    for block in model.blocks:
        x = block(x)
    assert torch.equal(model.unembed(x), model(tokens))


def test_dropout_is_off_unless_asked_for():
    model = GPT(**DIMS, dropout=0.5)
    tokens = torch.arange(12)[None]
    with torch.random.fork_rng():
        assert not torch.equal(model(tokens), model(tokens))
    assert torch.equal(model.eval()(tokens), GPT(**DIMS)(tokens))


def test_gpt_says_what_does_not_fit():
    with pytest.raises(ValueError, match=r"13 tokens are more than the context of 12\."):
        GPT(**DIMS)(torch.zeros(1, 13, dtype=torch.long))
    with pytest.raises(ValueError, match=r"3 heads do not divide d_model = 16\."):
        GPT(**{**DIMS, "n_heads": 3})


@pytest.mark.slow
def test_gpt_learns_in_seconds():
    tokens = models.encode(models.text())
    model = GPT(len(models.vocabulary()), 32, n_layers=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    losses = []
    for x, y in models.batches(tokens, 150, size=8):
        loss = models.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(math.log(49), abs=0.05)
    assert sum(losses[-10:]) / 10 < 2.5
    words = models.sample(model, "The fox", characters=60)
    assert words.startswith("The fox") and len(words) == 67
    assert words == models.sample(model, "The fox", characters=60) != models.sample(model, "The fox", seed=1)
    assert model.training


def test_what_is_written_goes_on_from_the_last_tokens():
    """Of a text that is longer than the model can see."""

    class Seen(torch.nn.Module):
        context = 4
        tokens: ClassVar = []

        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def forward(self, tokens):
            self.tokens.append(models.decode(tokens[0].cpu()))
            return torch.zeros(1, tokens.shape[1], 49)

    text = models.sample(Seen(), "The fox", characters=3)
    assert Seen.tokens == [text[n - 4 : n] for n in (7, 8, 9)] and Seen.tokens[0] == " fox"


# The text and its batches


def test_text_is_small_and_plain():
    assert 5_000 < len(models.text()) < 20_000
    assert models.text().isascii() and len(models.vocabulary()) == 49
    assert max(len(line) for line in models.text().splitlines()) <= 82
    assert models.decode(models.encode(models.text())) == models.text()


def test_encode_names_what_it_does_not_know():
    with pytest.raises(ValueError, match="The text has no '#', '9'"):
        models.encode("The 9# fox")


def test_targets_are_the_inputs_one_later():
    tokens = torch.arange(500)
    x, y = models.batch(tokens, 3, size=4, length=10)
    assert x.shape == y.shape == (4, 10) and torch.equal(x + 1, y)
    assert x.is_contiguous() and y.is_contiguous()


def test_batches_depend_on_seed_and_step_only():
    tokens = torch.arange(500)
    first = models.batch(tokens, 7)[0]
    models.batch(tokens, 3)
    assert torch.equal(first, models.batch(tokens, 7)[0])
    assert not torch.equal(first, models.batch(tokens, 8)[0])
    assert not torch.equal(first, models.batch(tokens, 7, seed=1)[0])
    assert torch.equal(first, list(models.batches(tokens, 8))[7][0])


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_parts_of_all_ranks_are_the_global_batch(world_size):
    tokens = torch.arange(500)
    parts = [models.batch(tokens, 7, size=8, rank=r, world_size=world_size)[0] for r in range(world_size)]
    assert torch.equal(torch.cat(parts), models.batch(tokens, 7, size=8)[0])


def test_every_place_of_the_text_can_come_up():
    tokens = torch.arange(12)
    x, y = models.batch(tokens, 0, size=200, length=10)
    assert set(x[:, 0].tolist()) == {0, 1} and y.max() == 11


def test_a_batch_that_cannot_be_shared():
    with pytest.raises(ValueError, match="A batch of 6 cannot be shared by 4 ranks"):
        models.batch(torch.arange(500), 0, size=6, world_size=4)


# Formulas


def kept(model, loss):
    """Bytes autograd keeps from `loss()`, each storage once, parameters left out."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    seen = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = (storage.nbytes(), tensor.detach())
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss()
    return sum(nbytes for nbytes, _ in seen.values())


def counted(loss):
    """Operations of the matrix products, forward and backward, as torch counts them."""
    with FlopCounterMode(display=False) as forward:
        value = loss()
    with FlopCounterMode(display=False) as backward:
        value.backward()
    return {"forward": forward.get_total_flops(), "backward": backward.get_total_flops()}


def test_mlp_parameters():
    assert models.mlp_parameters(6, 32, 3) == 323 == parameters(MLP(6, 32, 3))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("d_hidden", [None, 40])
def test_gpt_parameters(tied, d_hidden):
    dims = {**DIMS, "tied": tied, "d_hidden": d_hidden}
    assert models.gpt_parameters(**dims) == parameters(GPT(**dims))


def test_gpt_parameters_of_gpt2():
    # https://huggingface.co/openai-community/gpt2: 124 439 808, in the same architecture
    assert models.gpt_parameters(50257, 768, n_layers=12, context=1024) == 124_439_808


def test_mlp_flops():
    model, (x, y) = MLP(6, 32, 3), models.regression(50)
    loss = lambda: torch.nn.functional.mse_loss(model(x), y)
    assert counted(loss) == models.mlp_flops(50, 6, 32, 3) == {"forward": 28800, "backward": 38400}


@pytest.mark.parametrize("tied", [True, False])
def test_gpt_flops(tied):
    model = GPT(**DIMS, tied=tied)
    x, y = models.batch(torch.arange(29), 0, size=5, length=9)
    loss = lambda: models.cross_entropy(model(x), y)
    assert counted(loss) == models.gpt_flops(**DIMS, tied=tied, size=5, length=9)


def test_six_n_d_is_the_formula_without_attention():
    flops = sum(models.gpt_flops(50257, 768, n_layers=12, size=1, length=1024).values())
    products = models.gpt_parameters(50257, 768, n_layers=12, context=0)
    attention = 3 * 4 * 1024 * 768 * 12 * 1024
    assert models.training_flops(products, 1024) == pytest.approx(flops - attention, rel=0.002)
    assert models.training_flops(7e9, 2e12) == 8.4e22


@pytest.mark.parametrize("activation", ["relu", "gelu", "none"])
def test_an_mlp_keeps_input_hidden_units_output_and_target(activation):
    """ReLU's backward needs only its result, which the next layer keeps anyway; GELU's its input as well."""
    model, (x, y) = MLP(6, 32, 3, activation=activation), models.regression(50)
    measured = kept(model, lambda: torch.nn.functional.mse_loss(model(x), y))
    hidden = {"relu": 32, "gelu": 2 * 32, "none": 32}[activation]
    assert measured == 50 * (6 + hidden + 3 + 3) * 4


@pytest.mark.parametrize(("size", "length"), [(2, 12), (7, 5)])
def test_gpt_saved_bytes(size, length):
    model = GPT(**DIMS)
    x, y = models.batch(torch.arange(29), 0, size=size, length=length)
    measured = kept(model, lambda: models.cross_entropy(model(x), y))
    assert measured == models.gpt_saved_bytes(**DIMS, size=size, length=length)


def test_saved_bytes_are_those_of_the_paper():
    """Korthikanti's 34·s·b·h + 5·a·s²·b without its dropout masks: 32·s·b·h + 2·a·s²·b in 2 bytes."""
    one, two = (
        models.gpt_saved_bytes(1, 64, size=2, length=32, n_layers=n, n_heads=4, itemsize=2) for n in (1, 2)
    )
    extras = 2 * 32 * 4 * 2 + 32 * 32  # statistics of the norms, the mask
    assert two - one - extras == 32 * 32 * 2 * 64 + 2 * 4 * 32**2 * 2


def test_formulas_take_the_dimensions_of_the_model():
    built = set(inspect.signature(GPT).parameters) - {"dropout", "seed", "device", "dtype"}
    for formula in (models.gpt_parameters, models.gpt_flops, models.gpt_saved_bytes):
        assert built <= set(inspect.signature(formula).parameters)


def test_the_package_ships_the_text():
    pyproject = (models.files("rankcell").joinpath("../../pyproject.toml")).read_text("utf-8")
    assert re.search(r'\[tool\.setuptools\.package-data\]\nrankcell = \[.*"data/\*\.txt"', pyproject)


# Built alone


@pytest.mark.parametrize(
    ("build", "n_heads"),
    [
        (lambda **o: models.Attention(16, 2, **o), 2),
        (lambda **o: models.Block(16, 2, 32, **o), 2),
        (lambda **o: models.LlamaBlock(16, 4, 2, 24, **o), 4),
        (lambda **o: models.SwiGLU(16, 24, **o), 0),
    ],
)
def test_a_part_built_alone_is_initialised(build, n_heads):
    part = build(dtype=torch.float64)
    again = models.initialise(build(dtype=torch.float64, seed=7))
    for (name, p), q in zip(part.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(p, q), name  # the numbers of seed 0, whatever was in the memory before
        assert not torch.equal(p, dict(build(seed=1).named_parameters())[name].double()) or "norm" in name
    assert part(torch.ones(1, 3, 16, dtype=torch.float64)).isfinite().all()


# The Llama

LLAMA = {"vocab": 29, "d_model": 16, "n_heads": 4, "n_kv_heads": 2, "n_layers": 3, "context": 12}


def by_hand(state, tokens, *, n_heads, n_kv_heads, base=10000.0):
    """The logits of a Llama, written with complex rotations and loops over heads."""

    def norm(x, weight):
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight

    def turned(x):  # one head: (length, d_head)
        half = x.shape[-1] // 2
        angles = torch.arange(len(x)).double()[:, None] / base ** (torch.arange(half).double() / half)
        z = torch.complex(x[:, :half], x[:, half:]) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([z.real, z.imag], -1)

    x = state["token_embedding.weight"][tokens]  # (length, d_model)
    for n in range(1 + max(int(k.split(".")[1]) for k in state if k.startswith("blocks"))):
        w = {k.removeprefix(f"blocks.{n}."): v for k, v in state.items() if k.startswith(f"blocks.{n}.")}
        y = norm(x, w["attention_norm.weight"])
        query, key, value = (y @ w[f"attention.{k}.weight"].T for k in ("query", "key", "value"))
        d, mixed = query.shape[-1] // n_heads, []
        for h in range(n_heads):
            g = h * n_kv_heads // n_heads
            q, k = turned(query[:, h * d : h * d + d]), turned(key[:, g * d : g * d + d])
            scores = (q @ k.T / d**0.5).masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -math.inf)
            mixed.append(scores.softmax(-1) @ value[:, g * d : g * d + d])
        x = x + torch.cat(mixed, -1) @ w["attention.output.weight"].T
        y = norm(x, w["mlp_norm.weight"])
        gate = y @ w["mlp.gate.weight"].T
        x = x + (gate * gate.sigmoid() * (y @ w["mlp.up.weight"].T)) @ w["mlp.down.weight"].T
    return norm(x, state["norm.weight"]) @ state["head.weight"].T


@pytest.mark.parametrize("n_kv_heads", [1, 2, 4])
def test_llama_is_what_its_papers_say(n_kv_heads):
    dims = {**LLAMA, "n_kv_heads": n_kv_heads}
    model, tokens = models.Llama(**dims, dtype=torch.float64), torch.arange(12) * 7 % 29
    for p in model.parameters():  # also norms that are not 1
        torch.nn.init.normal_(p, std=0.5, generator=models.generator(0, *p.shape))
    expected = by_hand(model.state_dict(), tokens, n_heads=4, n_kv_heads=n_kv_heads)
    torch.testing.assert_close(model(tokens[None])[0], expected, rtol=0, atol=1e-12)
    assert not [name for name, _ in model.named_parameters() if "bias" in name]


def test_llama_starts_as_the_gpt_does_and_does_not_look_ahead():
    model = models.Llama(**LLAMA)
    tokens = torch.arange(24).view(2, 12)
    assert models.cross_entropy(model(tokens), tokens).item() == pytest.approx(math.log(29), abs=0.02)
    other = tokens.clone()
    other[0, 7] = 28
    same = torch.isclose(model(tokens), model(other), atol=1e-7).all(-1)
    assert same[0, :7].all() and not same[0, 7:].any() and same[1].all()
    assert models.Llama(**LLAMA, tied=True).head.weight is not model.head.weight
    assert parameters(model) - parameters(models.Llama(**LLAMA, tied=True)) == 29 * 16
    # by hand: embedding and head, and per layer query and output, key and value, SwiGLU, two norms
    layer = 2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 48 + 2 * 16
    assert parameters(model) == 2 * 29 * 16 + 3 * layer + 16


def test_rotations_see_only_how_far_apart_positions_are():
    query, key = torch.randn(2, 5, 8, generator=models.generator(0, "rope"), dtype=torch.float64)
    places = torch.tensor([3, 0, 7, 4, 11])
    near = models.rotate(query, places) @ models.rotate(key, places).T
    far = models.rotate(query, places + 100) @ models.rotate(key, places + 100).T
    torch.testing.assert_close(near, far)
    assert torch.equal(models.rotate(query, torch.zeros(5)), query)
    quarter = models.rotate(torch.tensor([[1.0, 2.0]]), torch.tensor([math.pi / 2]))  # (1, 2) turned left
    torch.testing.assert_close(quarter, torch.tensor([[-2.0, 1.0]]))
    # the second of two pairs turns by base^(-1/2) per position
    slow = models.rotate(torch.tensor([[0.0, 1.0, 0.0, 0.0]]), torch.tensor([3.0]), base=100.0)
    torch.testing.assert_close(slow, torch.tensor([[0.0, math.cos(0.3), 0.0, math.sin(0.3)]]))


@pytest.mark.parametrize("build", [GPT, models.Llama])
def test_documents_do_not_see_each_other(build):
    """A sequence of two documents and padding: each Llama document as if it were alone, position apart."""
    dims = LLAMA if build is models.Llama else DIMS
    model, tokens = build(**dims, dtype=torch.float64), torch.arange(12)[None]
    numbers = torch.tensor([[0] * 5 + [1] * 4 + [-1] * 3])
    packed = model(tokens, numbers)
    for part in (slice(0, 5), slice(5, 9)):
        alone = tokens.clone()
        alone[:, : part.start], alone[:, part.stop :] = 20, 21  # what stands around makes no difference
        torch.testing.assert_close(model(alone, numbers)[:, part], packed[:, part])
    if build is models.Llama:  # rotary positions are relative
        torch.testing.assert_close(model(tokens[:, 5:9]), packed[:, 5:9])
    assert not torch.allclose(model(tokens)[:, 5:9], packed[:, 5:9])


def test_heads_that_do_not_fit():
    with pytest.raises(
        ValueError, match=r"4 query heads cannot share 3 key/value heads evenly\. Choose a div"
    ):
        models.Llama(**{**LLAMA, "n_kv_heads": 3})
    with pytest.raises(ValueError, match=r"Rotary positions turn pairs of numbers, and a head has 3\."):
        models.Llama(9, 12, n_heads=4)


def test_a_llama_writes():
    model = models.Llama(49, 16, n_layers=1, context=8)
    assert len(models.sample(model, "The fox", characters=5)) == 12
    with pytest.raises(ValueError, match=r"13 tokens are more than the context of 12\."):
        models.Llama(**LLAMA)(torch.zeros(1, 13, dtype=torch.long))
