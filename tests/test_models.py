"""The course's models: their weights, their data, and what they cost, by formula and as torch counts it."""

import math

import pytest
import torch
from torch.nn import functional as F

from rankcell import models
from rankcell.models import GPT, MLP

DIMS = {"vocab": 29, "d_model": 16, "n_heads": 2, "n_layers": 3, "context": 12}
LLAMA = {**DIMS, "n_heads": 4, "n_kv_heads": 2}


@pytest.fixture(autouse=True)
def global_generator_is_left_alone():
    """Building, drawing and sampling anything here must not touch torch's global random numbers."""
    before = torch.get_rng_state()
    yield
    assert torch.equal(before, torch.get_rng_state())


def parameters(model):
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("build", "shape"),
    [(lambda **o: MLP(16, 24, 16, **o), (3, 16)),
     (lambda **o: models.Attention(16, 2, **o), (1, 3, 16)),
     (lambda **o: models.Block(16, 2, 32, **o), (1, 3, 16)),
     (lambda **o: models.LlamaBlock(16, 4, 2, 24, **o), (1, 3, 16)),
     (lambda **o: models.SwiGLU(16, 24, **o), (1, 3, 16))],
)  # fmt: skip
def test_weights_depend_on_seed_and_name_only(build, shape):
    part = build(dtype=torch.float64)
    again = models.initialise(build(dtype=torch.float64, seed=7))
    with torch.device("meta"):
        empty = build()
    later = dict(models.initialise(empty.to_empty(device="cpu")).named_parameters())
    other = dict(build(seed=1).named_parameters())
    for (name, p), q in zip(part.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(p, q) and torch.equal(p.float(), later[name]), name
        assert "norm" in name or not torch.equal(p.float(), other[name])
    assert part(torch.ones(shape, dtype=torch.float64)).isfinite().all()
    with pytest.raises(TypeError, match="not the Conv1d at inner"):
        models.initialise(torch.nn.ModuleDict({"inner": torch.nn.Conv1d(1, 1, 1, device="meta")}))


def test_weights_scale_by_fan_in_in_every_part():
    model = MLP(400, 900, 100)
    spread = [p.std().item() for p in (model.up.weight, model.down.weight, model.up.bias)]
    assert spread == pytest.approx([1 / 20, 1 / 30, 0.02], rel=0.1) and model.up.bias.abs().min() > 0
    whole, part = GPT(**DIMS, seed=5), GPT(**DIMS, seed=6).blocks[1]
    assert whole.position_embedding.weight.std().item() == pytest.approx(0.02, rel=0.2)
    assert (whole.norm.weight == 1).all() and (whole.norm.bias == 0).all()
    models.initialise(part, seed=5, prefix="blocks.1.")
    theirs = dict(whole.blocks[1].named_parameters())
    assert all(torch.equal(p, theirs[name]) for name, p in part.named_parameters())
    assert not torch.equal(part.attention.query.weight, part.attention.key.weight)


def test_gpt_is_its_stages_in_a_row():
    model, tokens = GPT(**DIMS, dropout=0.5), torch.arange(24).view(2, 12)
    with torch.random.fork_rng():
        assert not torch.equal(model(tokens), model(tokens))
    logits = model.eval()(tokens)
    assert torch.equal(logits, GPT(**DIMS)(tokens)) and logits.shape == (2, 12, 29)
    assert models.cross_entropy(logits, tokens + 5).item() == pytest.approx(math.log(29), abs=0.02)
    x = model.embed(tokens)
    for block in model.blocks:
        x = x + block.attention(block.attention_norm(x))
        x = x + block.mlp(block.mlp_norm(x))
    torch.testing.assert_close(model.unembed(x), logits)
    shifted = model.embed(tokens[:, 3:5], torch.tensor([3, 4]))
    assert torch.equal(shifted, model.embed(tokens)[:, 3:5])


def test_attention_equals_torchs_and_heads_are_tied():
    model = GPT(**DIMS)
    attention, x = model.blocks[0].attention, torch.randn(2, 5, 16, generator=models.generator(0, "x"))
    query, key, value = (attention.heads(f(x)) for f in (attention.query, attention.key, attention.value))
    mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    torch.testing.assert_close(attention(x), attention.output(mixed.transpose(1, 2).flatten(2)))
    assert model.head.weight is model.token_embedding.weight
    untied = GPT(**DIMS, tied=False)
    assert untied.head.weight is not untied.token_embedding.weight


def by_hand(model, tokens, n_kv_heads):
    """The logits of a Llama of 4 heads, from torch's own parts and `rotate`."""
    x, places = model.token_embedding.weight[tokens], torch.arange(len(tokens))
    for block in model.blocks:
        w = dict(block.named_parameters())
        y = F.rms_norm(x, (16,), w["attention_norm.weight"], eps=1e-5)
        q, k, v = ((y @ w[f"attention.{name}.weight"].T).view(len(x), heads, 4).transpose(0, 1)[None]
                   for name, heads in (("query", 4), ("key", n_kv_heads), ("value", n_kv_heads)))  # fmt: skip
        q, k = models.rotate(q, places), models.rotate(k, places)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0]
        x = x + mixed.transpose(0, 1).flatten(1) @ w["attention.output.weight"].T
        y = F.rms_norm(x, (16,), w["mlp_norm.weight"], eps=1e-5)
        gate, up = (y @ w[f"mlp.{name}.weight"].T for name in ("gate", "up"))
        x = x + (F.silu(gate) * up) @ w["mlp.down.weight"].T
    return F.rms_norm(x, (16,), model.norm.weight, eps=1e-5) @ model.head.weight.T


@pytest.mark.parametrize("n_kv_heads", [1, 2, 4])
def test_llama_is_what_its_papers_say(n_kv_heads):
    model, tokens = (
        models.Llama(**LLAMA | {"n_kv_heads": n_kv_heads}, dtype=torch.float64),
        torch.arange(12) * 7 % 29,
    )
    for p in model.parameters():  # also norms that are not 1
        torch.nn.init.normal_(p, std=0.5, generator=models.generator(0, *p.shape))
    expected = by_hand(model, tokens, n_kv_heads)
    torch.testing.assert_close(model(tokens[None])[0], expected, rtol=0, atol=1e-12)
    # by hand: embedding and head, and per layer query and output, key and value, SwiGLU, two norms
    layer = 2 * 16 * 16 + 2 * 16 * 4 * n_kv_heads + 3 * 16 * 48 + 2 * 16
    assert parameters(model) == 2 * 29 * 16 + 3 * layer + 16
    assert (
        parameters(model) - parameters(models.Llama(**LLAMA | {"n_kv_heads": n_kv_heads}, tied=True))
        == 29 * 16
    )


def test_rotations_see_only_how_far_apart_positions_are():
    query, key = torch.randn(2, 5, 8, generator=models.generator(0, "rope"), dtype=torch.float64)
    places = torch.tensor([3, 0, 7, 4, 11])
    near, far = (models.rotate(query, at) @ models.rotate(key, at).T for at in (places, places + 100))
    torch.testing.assert_close(near, far)
    # the second of two pairs turns by base^(-1/2) per position
    slow = models.rotate(torch.tensor([[0.0, 1.0, 0.0, 0.0]]), torch.tensor([3.0]), base=100.0)
    torch.testing.assert_close(slow, torch.tensor([[0.0, math.cos(0.3), 0.0, math.sin(0.3)]]))
    half = models.rotate(
        torch.tensor([[1.0, 0.0]], dtype=torch.bfloat16), torch.tensor([1001])
    )  # 1000 in 16 bits
    assert half[0, 0].item() == pytest.approx(math.cos(1001), abs=0.01)


@pytest.mark.parametrize("build", [GPT, models.Llama])
def test_documents_do_not_see_each_other_nor_ahead(build):
    """A sequence of two documents and padding: each Llama document as if it were alone, position apart."""
    model, tokens = (
        build(**LLAMA if build is models.Llama else DIMS, dtype=torch.float64),
        torch.arange(12)[None],
    )
    numbers = torch.tensor([[0] * 5 + [1] * 4 + [-1] * 3])
    packed = model(tokens, numbers)
    for part in (slice(0, 5), slice(5, 9)):
        alone = tokens.clone()
        alone[:, : part.start], alone[:, part.stop :] = 20, 21  # what stands around makes no difference
        torch.testing.assert_close(model(alone, numbers)[:, part], packed[:, part])
    if build is models.Llama:  # rotary positions are relative
        torch.testing.assert_close(model(tokens[:, 5:9]), packed[:, 5:9])
    other = tokens.clone()
    other[0, 7] = 20
    same = torch.isclose(model(tokens), model(other), atol=1e-12).all(-1)[0]
    assert same[:7].all() and not same[7:].any() and not torch.allclose(model(tokens)[:, 5:9], packed[:, 5:9])


def test_regression_is_a_fixed_net_and_noise():
    (x, y), (same, clean) = models.regression(), models.regression(noise=0.0)
    assert x.shape == (1024, 6) and torch.equal(x, same) and not torch.equal(x, models.regression(seed=1)[0])
    assert (y - clean).std().item() == pytest.approx(0.1, rel=0.05) and clean.std().item() > 0.4


def test_text_is_small_and_plain():
    text = models.text()
    assert 5_000 < len(text) < 20_000 and text.isascii() and len(models.vocabulary()) == 49
    assert "".join(models.vocabulary()[token] for token in models.encode(text).tolist()) == text


def test_batches_depend_on_seed_and_step_only():
    tokens = torch.arange(500)
    x, y = models.batch(tokens, 7, size=8, length=10)
    assert x.shape == (8, 10) and torch.equal(x + 1, y) and x.is_contiguous() and y.is_contiguous()
    for n in (1, 2, 4):
        parts = [models.batch(tokens, 7, size=8, length=10, rank=r, world_size=n)[0] for r in range(n)]
        assert torch.equal(torch.cat(parts), x)
    for other in (
        models.batch(tokens, 8, size=8, length=10),
        models.batch(tokens, 7, size=8, length=10, seed=1),
    ):
        assert not torch.equal(other[0], x)
    assert torch.equal([*models.batches(tokens, 8, size=8, length=10)][7][0], x)
    x, y = models.batch(torch.arange(12), 0, size=200, length=10)
    assert set(x[:, 0].tolist()) == {0, 1} and y.max() == 11  # every place can come up


@pytest.mark.parametrize(
    ("call", "says"),
    [(lambda: GPT(**DIMS)(torch.zeros(1, 13, dtype=torch.long)), "13 tokens are more than the context of 12."),
     (lambda: models.Llama(**LLAMA)(torch.zeros(1, 13, dtype=torch.long)), "13 tokens are more than the context"),
     (lambda: GPT(**{**DIMS, "n_heads": 3}), "d_model = 16 must be a multiple of the 3 heads"),
     (lambda: models.Llama(**{**LLAMA, "n_kv_heads": 3}), "and these of the 3 heads of key and value"),
     (lambda: models.encode("The 9# fox"), "The text has no '#', '9'"),
     (lambda: models.batch(torch.arange(500), 0, size=6, world_size=4), "A batch of 6 cannot be shared by 4 ranks")],
)  # fmt: skip
def test_what_does_not_fit_is_said(call, says):
    with pytest.raises(ValueError) as error:
        call()
    assert says in str(error.value)


# Formulas


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_counted_by_formula(tied):
    """Lesson 08 checks the bytes that a forward keeps, and the MLP."""
    dims = {**DIMS, "tied": tied}
    assert parameters(GPT(**dims)) == models.gpt_parameters(**dims)


def test_formulas_are_those_of_the_papers():
    # https://huggingface.co/openai-community/gpt2: 124 439 808, in the same architecture
    assert models.gpt_parameters(50257, 768, n_layers=12, context=1024) == 124_439_808
