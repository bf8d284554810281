"""Gradients go out in buckets while the backward runs. The reducer remembers one handle, that of the bucket it sent
last, waits for that and copies that bucket back; nobody waits for the others.

source: https://github.com/OpenNMT/OpenNMT-py/issues/2295
mesh: dp 4
first: head.weight grad
side: backward
"""

# %% ranks
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors


class Reducer:
    def __init__(self, model, size=8000):
        self.size, self.bucket, self.pending = size, [], []
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(self.ready)

    def ready(self, p):
        self.bucket.append(p.grad)
        if sum(grad.numel() for grad in self.bucket) > self.size:
            self.send()

    def send(self):
        flat = _flatten_dense_tensors(self.bucket)
        handle = dist.all_reduce(flat, async_op=True)
        self.pending = [(handle, flat, self.bucket)]  # broken
        self.pending.append((handle, flat, self.bucket))  # mended
        self.bucket = []

    def finish(self):
        if self.bucket:
            self.send()
        for handle, flat, bucket in self.pending:
            handle.wait()
            for grad, mean in zip(bucket, _unflatten_dense_tensors(flat / 4, bucket), strict=True):
                grad.copy_(mean)
        self.pending = []


model = gpt()
reducer, optimizer = Reducer(model), adam(model)


def step():
    optimizer.zero_grad()
    loss = cross_entropy(model(x[rank::4]), y[rank::4])
    loss.backward()
    reducer.finish()
    optimizer.step()
    return loss.item()
