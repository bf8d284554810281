"""What the notebook 12_precision says is right, and wrong answers to its exercises; tests/judge.py runs them."""

# after: formats
below_one = torch.tensor(1.0).bfloat16().nextafter(torch.tensor(0.0).bfloat16()).item()
assert 1 - below_one == 2**-8, "as the text says of the spacing below 1"
assert (torch.tensor(2.0**-25).half(), torch.tensor(1.01 * 2.0**-25).half()) == (0, 2.0**-24)

# after: standstill
assert [after(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)] == [0.9, 1.0, 0.9023]
assert after(torch.bfloat16, update=2**-9) == 1.0 != after(torch.bfloat16, update=1.01 * 2**-9)
between = torch.tensor([1.0078125, 1.5, 1.9921875]).bfloat16()  # 2^e < w < 2^(e+1), for e = 0
assert all((between + sign * 0.99 * 2**-8 == between).all() for sign in (1, -1))
assert all((between + sign * 1.01 * 2**-8 != between).all() for sign in (1, -1))

# after: pure
e = -6
assert 2 ** (e - 8) < 1e-4 < 2 ** (e + 1 - 8), "up to e = -6"
assert round(moved["below 2^-5"], 2) == 0.14 and moved["float32"] > 0.999
weights = fresh().bfloat16().requires_grad_()
x, y = batch()
mse_loss(network(weights, x), y).backward()
without = (weights.grad == 0) & (fresh().abs() < 2**-5)
assert abs(moved["bfloat16"] + without.float().mean() - moved["below 2^-5"]) < 1e-3, "a few have no gradient"

# after: losses-picture
last = {name: curve[-1] for name, curve in curves.items()}
assert abs(last["bfloat16 with your masters"] / last["float32 only"] - 1) < 0.05
assert last["bfloat16 only"] > 1.2 * last["float32 only"]

# after: losses-picture
with torch.autocast("cpu", dtype=torch.bfloat16):
    product = torch.ones(4, 4, requires_grad=True) @ torch.ones(4, 4)
    assert (product.dtype, mse_loss(product, product).dtype) == (torch.bfloat16, torch.float32)

# after: underflow
assert [row[1] == "0.00%" for row in rows] == [False, True, True, False], "2^16 loses none at either end"
assert [row[2] == "0.00%" for row in rows] == [True, True, True, False] and rows[3][1] == rows[3][2]
assert float(rows[0][1][:-1]) > 0.1 and 9 < float(rows[3][2][:-1]) < 11, "a tenth overflows"
keys = [p.grad.abs().max() for name, p in gpt.named_parameters() if "key.bias" in name]
assert len(keys) == 2 and max(keys) < 1e-8, "softmax does not see what is added to all scores"

# after: sum-picture
rates = {name: [error(2**k, *way) for k in range(1, 11)] for name, way in ways.items()}
assert max(rates["tree, bfloat16"]) < 0.003 and max(rates["added in float32"]) < 0.002
assert 3 < rates["ring, bfloat16"][7] / rates["ring, bfloat16"][1] < 9, "about 8 = sqrt(256 / 4)"
assert rates["ring, bfloat16"][9] > 5 * rates["ring, bfloat16"][8], "it leaps"
assert abs(rates["ring, bfloat16"][9] - (1 - 0.63) * 512 / 1024) < 0.01, "a gradient adds 0.63 above 512"

# after: blocks
lost = {block: (four_bits(x, block) == 0).float().mean().item() for block in (4096, 32, 16)}
assert lost[4096] > 0.95 and max(lost[32], lost[16]) < 0.1
near = torch.tensor([0.0, 0.2, 0.3, 2.4, 2.6, 5.1, 6.0, -6.0])
assert four_bits(near, 8).tolist() == [0, 0, 0.5, 2, 3, 6, 6, -6]

# after: float8
# %%ranks 4 --device cpu -o _refused
try:
    dist.all_gather_single(torch.empty(8).to(torch.float8_e4m3fn), torch.empty(2).to(torch.float8_e4m3fn))
except RuntimeError:
    _knows_float8 = False
_knows_float8

# after: float8
assert _refused.values == [False] * 4, "gloo does not know float8"

# after: real-number-run
assert [round(100 * (gib / card[name][2] - 1), 1) for name, gib in sizes.items()] == [-0.2, 0.1]
assert [round(4.25 * mlp / (4.25 * mlp + 16 * rest), 2) for mlp, rest, _ in card.values()] == [0.93, 0.74]

# after: fully-shard
# %%ranks 4 --device cpu -o _low
low = fully_shard(Network(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
mse_loss(low(batch(rank, world_size)[0]), batch(rank, world_size)[1]).backward()

# after: fully-shard
assert {e.dtype for e in _low.events if e.op == "reduce_scatter"} == {"bfloat16"}, "without reduce_dtype"

# after: fully-shard
# %%ranks 4 --device cpu -o _scalers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

_mesh = init_device_mesh("cpu", (4,))


def _scale_after(wrap):
    parameter = torch.nn.Parameter(wrap(torch.zeros(4)))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    parameter.grad = wrap(torch.full((4,), torch.inf if rank == 2 else 1.0))
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale()


_scale_after(lambda part: DTensor.from_local(part, _mesh, [Shard(0)])), _scale_after(lambda part: part)

# after: fully-shard
assert _scalers.values == [(2.0**15, 2.0**15 if r == 2 else 2.0**16) for r in range(4)], "DTensors ask all ranks"


# wrong: masters: adds up in bfloat16 | 208 bytes in float32 (rank 0: 104 bytes in bfloat16)
# %%ranks 4 --device cpu
class Mixed:
    def __init__(self, weights, lr):
        self.weights = weights
        self.masters = [w.detach().chunk(world_size)[rank].float().requires_grad_() for w in weights]
        self.optimizer = torch.optim.AdamW(self.masters, lr=lr)

    def zero_grad(self):
        for weight in self.weights:
            weight.grad = None

    def step(self):
        for weight, master in zip(self.weights, self.masters):
            part = torch.empty(len(master), dtype=torch.bfloat16)
            dist.reduce_scatter_single(part, weight.grad)
            master.grad = part.float() / world_size
        self.optimizer.step()
        for weight, master in zip(self.weights, self.masters):
            dist.all_gather_single(weight.detach(), master.detach().bfloat16())


# wrong: masters: the sum over ranks, not the mean | is the gradient the mean?
# %%ranks 4 --device cpu
class Mixed:
    def __init__(self, weights, lr):
        self.weights = weights
        self.masters = [w.detach().chunk(world_size)[rank].float().requires_grad_() for w in weights]
        self.optimizer = torch.optim.AdamW(self.masters, lr=lr)

    def zero_grad(self):
        for weight in self.weights:
            weight.grad = None

    def step(self):
        for weight, master in zip(self.weights, self.masters):
            master.grad = torch.empty_like(master)
            dist.reduce_scatter_single(master.grad, weight.grad.float())
        self.optimizer.step()
        for weight, master in zip(self.weights, self.masters):
            dist.all_gather_single(weight.detach(), master.detach().bfloat16())


# wrong: masters: puts new weights into its list | step writes the new weights in place
# %%ranks 4 --device cpu
class Mixed:
    def __init__(self, weights, lr):
        self.weights = weights
        self.masters = [w.detach().chunk(world_size)[rank].float().requires_grad_() for w in weights]
        self.optimizer = torch.optim.AdamW(self.masters, lr=lr)

    def zero_grad(self):
        for weight in self.weights:
            weight.grad = None

    def step(self):
        for weight, master in zip(self.weights, self.masters):
            master.grad = torch.empty_like(master)
            dist.reduce_scatter_single(master.grad, weight.grad.float())
            master.grad /= world_size
        self.optimizer.step()
        for i, master in enumerate(self.masters):
            whole = torch.empty(world_size * len(master), dtype=torch.bfloat16)
            dist.all_gather_single(whole, master.detach().bfloat16())
            self.weights[i] = whole


# right: masters: the collectives that take lists
# %%ranks 4 --device cpu
class Mixed:
    def __init__(self, weights, lr):
        self.weights = weights
        self.masters = [torch.nn.Parameter(w.detach().float().chunk(4)[rank].clone()) for w in weights]
        self.optimizer = torch.optim.AdamW(self.masters, lr=lr)

    def zero_grad(self):
        for weight in self.weights:
            weight.grad = None

    def step(self):
        for weight, master in zip(self.weights, self.masters):
            part = torch.empty(len(master))
            dist.reduce_scatter(part, list((weight.grad.float() / world_size).chunk(world_size)))
            master.grad = part
        self.optimizer.step()
        for weight, master in zip(self.weights, self.masters):
            parts = [torch.empty(len(master), dtype=torch.bfloat16) for _ in range(world_size)]
            dist.all_gather(parts, master.detach().bfloat16())
            weight.data.copy_(torch.cat(parts))


# right: masters: all weights in one bucket
# %%ranks 4 --device cpu
class Mixed:
    def __init__(self, weights, lr):
        self.weights = weights
        self.masters = [w.detach().chunk(world_size)[rank].float().requires_grad_() for w in weights]
        self.sizes = [len(master) for master in self.masters]
        self.optimizer = torch.optim.AdamW(self.masters, lr=lr)

    def zero_grad(self):
        for weight in self.weights:
            weight.grad = None

    def step(self):
        bucket = torch.cat([w.grad.float().view(world_size, -1) for w in self.weights], dim=1)
        mine = torch.empty(bucket.shape[1])
        dist.reduce_scatter_single(mine, bucket.flatten())
        for master, part in zip(self.masters, (mine / world_size).split(self.sizes)):
            master.grad = part.clone()
        self.optimizer.step()
        rounded = torch.cat([master.detach() for master in self.masters]).to(torch.bfloat16)
        whole = torch.empty(world_size * len(rounded), dtype=torch.bfloat16)
        dist.all_gather_single(whole, rounded)
        for weight, part in zip(self.weights, whole.view(world_size, -1).split(self.sizes, dim=1)):
            weight.data.copy_(part.flatten())


# wrong: agree: every rank decides alone | the scale of one process on every rank (after step 2 rank 0 has 65536
# %%ranks 4 --device cpu
class Scaler:
    scale = 2.0**16

    def step(self, optimizer, shards):
        if not all(shard.grad.isfinite().all() for shard in shards):
            self.scale /= 2
            return
        for shard in shards:
            shard.grad /= self.scale
        optimizer.step()


# wrong: agree: looks for inf only | an overflow on rank 3 in step 1: the scale of one process on every rank
# %%ranks 4 --device cpu
class Scaler:
    scale = 2.0**16

    def step(self, optimizer, shards):
        overflow = torch.stack([shard.grad.isinf().any() for shard in shards]).any().int()
        dist.all_reduce(overflow, op=dist.ReduceOp.MAX)
        if overflow:
            self.scale /= 2
            return
        for shard in shards:
            shard.grad /= self.scale
        optimizer.step()


# wrong: agree: an all-reduce for each shard | in each step one all-reduce of one number
# %%ranks 4 --device cpu
class Scaler:
    scale = 2.0**16

    def step(self, optimizer, shards):
        overflow = False
        for shard in shards:
            bad = (~shard.grad.isfinite()).any().int()
            dist.all_reduce(bad, op=dist.ReduceOp.MAX)
            overflow = overflow or bool(bad)
        if overflow:
            self.scale /= 2
            return
        for shard in shards:
            shard.grad /= self.scale
        optimizer.step()


# right: agree: divides before it looks, as torch's GradScaler does, and counts the ranks that overflow
# %%ranks 4 --device cpu
class Scaler:
    scale = 2.0**16

    def step(self, optimizer, shards):
        for shard in shards:
            shard.grad.div_(self.scale)
        bad = torch.stack([~torch.isfinite(shard.grad).all() for shard in shards]).any().int()
        dist.all_reduce(bad)
        if bad.item() > 0:
            self.scale *= 0.5
        else:
            optimizer.step()


# right: agree: adds up the gradients, which an overflow makes infinite or nan
# %%ranks 4 --device cpu
class Scaler:
    scale = 2.0**16

    def step(self, optimizer, shards):
        total = sum((shard.grad.double() ** 2).sum() for shard in shards).view(1)
        dist.all_reduce(total)
        if not total.isfinite():
            self.scale = self.scale / 2
            return
        for shard in shards:
            shard.grad = shard.grad / self.scale
        optimizer.step()


# wrong: float8: every rank scales by its own amax | with one scale for all ranks
# %%ranks 4 --device cpu
def gather_float8(shard):
    scale = 448 / shard.abs().max()
    sent = (shard * scale).to(torch.float8_e4m3fn)
    whole = torch.empty(world_size * len(shard), dtype=torch.uint8)
    dist.all_gather_single(whole, sent.view(torch.uint8))
    return whole.view(torch.float8_e4m3fn).float() / scale


# wrong: float8: rounds, and sends bfloat16 | one byte for each of 10 numbers (rank 0: all_gather of 20 bytes (bfloat16))
# %%ranks 4 --device cpu
def gather_float8(shard):
    amax = shard.abs().max()
    dist.all_reduce(amax, op=dist.ReduceOp.MAX)
    scale = 448 / amax
    sent = (shard * scale).to(torch.float8_e4m3fn).bfloat16()
    whole = torch.empty(world_size * len(shard), dtype=torch.bfloat16)
    dist.all_gather_single(whole, sent)
    return whole.float() / scale


# wrong: float8: the largest number, not the largest absolute value | with one scale for all ranks
# %%ranks 4 --device cpu
def gather_float8(shard):
    amax = shard.max()
    dist.all_reduce(amax, op=dist.ReduceOp.MAX)
    scale = 448 / amax
    sent = (shard * scale).to(torch.float8_e4m3fn)
    whole = torch.empty(world_size * len(shard), dtype=torch.uint8)
    dist.all_gather_single(whole, sent.view(torch.uint8))
    return whole.view(torch.float8_e4m3fn).float() / scale


# wrong: float8: divides by an amax of zero | the weight of 8 zeros on rank 0
# %%ranks 4 --device cpu
def gather_float8(shard):
    amax = shard.abs().max()
    dist.all_reduce(amax, op=dist.ReduceOp.MAX)
    sent = (shard * (448 / amax)).to(torch.float8_e4m3fn)
    whole = torch.empty(world_size * len(shard), dtype=torch.uint8)
    dist.all_gather_single(whole, sent.view(torch.uint8))
    return whole.view(torch.float8_e4m3fn).float() / (448 / amax)


# right: float8: gathers the four maxima, and lists of parts
# %%ranks 4 --device cpu
def gather_float8(shard):
    largest = [torch.zeros(1) for _ in range(world_size)]
    dist.all_gather(largest, shard.abs().max().view(1))
    step = torch.cat(largest).max().clamp(min=1e-9) / 448  # what the largest code stands for, in parts of 448
    parts = [torch.empty(len(shard), dtype=torch.uint8) for _ in range(world_size)]
    dist.all_gather(parts, (shard / step).to(torch.float8_e4m3fn).view(torch.uint8))
    return torch.cat(parts).view(torch.float8_e4m3fn).float() * step


# right: float8: the amax in float64, the bytes as int8
# %%ranks 4 --device cpu
def gather_float8(shard):
    amax = torch.tensor([shard.min().neg(), shard.max()]).max().double()
    dist.all_reduce(amax, op=dist.ReduceOp.MAX)
    amax = max(amax.item(), 1e-30)
    sent = shard.mul(448 / amax).to(torch.float8_e4m3fn).view(torch.int8)
    whole = sent.new_empty(world_size, len(shard))
    dist.all_gather_single(whole.view(-1), sent)
    return whole.view(-1).view(torch.float8_e4m3fn).to(torch.float32) * (amax / 448)


# wrong: round-once: a reduce-scatter, which rounds at every rank | one all-to-all of
# %%ranks 4 --device cpu
def reduce_scatter_once(whole):
    part = whole.new_empty(len(whole) // world_size)
    dist.reduce_scatter_single(part, whole)
    return part.float()


# wrong: round-once: adds in bfloat16 what has come | unrounded
# %%ranks 4 --device cpu
def reduce_scatter_once(whole):
    came = torch.empty_like(whole)
    dist.all_to_all_single(came, whole)
    return came.view(world_size, -1).sum(0).float()


# wrong: round-once: sends float16, which ends before | unrounded
# %%ranks 4 --device cpu
def reduce_scatter_once(whole):
    came = torch.empty_like(whole, dtype=torch.float16)
    dist.all_to_all_single(came, whole.half())
    return came.view(world_size, -1).float().sum(0)


# right: round-once: lists of parts
# %%ranks 4 --device cpu
def reduce_scatter_once(whole):
    came = [torch.empty(len(whole) // world_size, dtype=whole.dtype) for _ in range(world_size)]
    dist.all_to_all(came, list(whole.chunk(world_size)))
    return sum(part.float() for part in came)
