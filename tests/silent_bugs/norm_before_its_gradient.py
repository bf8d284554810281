"""The norm of keys goes backward before the exchange of its gradient is waited for, and what arrives then passes it by.

source: https://github.com/ByteDance-Seed/VeOmni/pull/419
mesh: sp 4
first: norm grad_output
side: backward
says: attention.k.weight, attention.norm_k.weight are wrong, too, and those of attention.norm_q.weight
"""


# %% one process
def rms(h, w):
    return F.rms_norm(h, (32,), w, 1e-5)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(32, 32, bias=False) for _ in range(4))
        self.norm_q, self.norm_k = nn.RMSNorm(32, eps=1e-5), nn.RMSNorm(32, eps=1e-5)

    def forward(self, h):
        q, k, v = self.norm_q(self.q(h)), self.norm_k(self.k(h)), self.v(h)
        q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in (q, k, v))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.attention, self.head = (
            nn.Embedding(49, 32),
            nn.LayerNorm(32),
            Attention(),
            nn.Linear(32, 49),
        )

    def forward(self, t):
        h = self.embed(t)
        return self.head(h + self.attention(self.norm(h)))


torch.manual_seed(0)
model = Net()
step = training(model, adam(model), lambda: cross_entropy(model(x), y))


# %% ranks
def rms(h, w):
    return F.rms_norm(h, (32,), w, 1e-5)


def swap(t, cut, join):
    send = torch.stack([p.contiguous() for p in t.chunk(4, cut)])
    got = torch.empty_like(send)
    dist.all_to_all_single(got, send)
    return torch.cat(got.unbind(), join)


def rms_backward(grad, h, w):
    with torch.enable_grad():
        h, w = h.detach().requires_grad_(), w.detach().requires_grad_()
        return torch.autograd.grad(rms(h, w), (h, w), grad)


class QKV(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, qw, kw, vw, nq, nk):
        q, k, v = h @ qw.T, h @ kw.T, h @ vw.T
        ctx.save_for_backward(h, qw, kw, vw, nq, nk, q, k)
        return swap(rms(q, nq), 2, 1), swap(rms(k, nk), 2, 1), swap(v, 2, 1)

    @staticmethod
    def backward(ctx, gq, gk, gv):
        h, qw, kw, vw, nq, nk, q, k = ctx.saved_tensors
        gv = swap(gv, 1, 2)
        collected = swap(gk, 1, 2)
        _, gnk = rms_backward(gk.contiguous().view(k.shape), k, nk)  # broken
        gk = collected
        gk, gnk = rms_backward(gk, k, nk)  # mended
        gq, gnq = rms_backward(swap(gq, 1, 2), q, nq)

        def w(g):
            return g.flatten(0, 1).T @ h.flatten(0, 1)

        return gq @ qw + gk @ kw + gv @ vw, w(gq), w(gk), w(gv), gnq, gnk


class Out(torch.autograd.Function):
    @staticmethod
    def forward(ctx, o):
        return swap(o, 1, 2)

    @staticmethod
    def backward(ctx, g):
        return swap(g, 2, 1)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(32, 32, bias=False) for _ in range(4))
        self.norm_q, self.norm_k = nn.RMSNorm(32, eps=1e-5), nn.RMSNorm(32, eps=1e-5)

    def forward(self, h):
        q, k, v = QKV.apply(
            h, self.q.weight, self.k.weight, self.v.weight, self.norm_q.weight, self.norm_k.weight
        )
        q, k, v = (t.unflatten(-1, (-1, 8)).transpose(1, 2) for t in (q, k, v))
        return self.out(Out.apply(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.attention, self.head = (
            nn.Embedding(49, 32),
            nn.LayerNorm(32),
            Attention(),
            nn.Linear(32, 49),
        )

    def forward(self, t):
        h = self.embed(t)
        return self.head(h + self.attention(self.norm(h)))


torch.manual_seed(0)
model = Net()
optimizer = adam(model)


def step():
    optimizer.zero_grad()
    mine = slice(2 * rank, 2 * rank + 2)
    loss = cross_entropy(model(x[:, mine]), y[:, mine])
    loss.backward()
    average(model)
    optimizer.step()
    return loss.item()
