"""Between the stages of a pipeline each tensor-parallel rank sends a slice of the activation, and the next stage
gathers the slices. That needs equal activations on all of them, and with sequence parallelism each has its own tokens.

source: https://github.com/vllm-project/vllm/pull/24021
mesh: pp 2, tp 2
first: blocks.1.attention_norm output
side: forward
"""

# %% ranks
from torch.distributed.device_mesh import init_device_mesh

from rankcell.parallel.pipeline import split_gpt
from rankcell.parallel.transformer import tensor_parallel

mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
pp, tp = mesh.get_local_rank("pp"), mesh.get_local_rank("tp")
model = split_gpt(tensor_parallel(gpt(), mesh.get_group("tp"), sequence_parallel=True), 2)[pp]
optimizer = adam(model)
partner = 2 * (1 - pp) + tp


def send(h):
    h = h.chunk(2)[tp]  # broken
    dist.send(h.detach().contiguous(), partner)


def receive():
    h = torch.empty(4, 4, 32)  # broken
    h = torch.empty(8, 4, 32)  # mended
    dist.recv(h, partner)
    slices = [torch.empty_like(h) for _ in range(2)]  # broken
    dist.all_gather(slices, h, group=mesh.get_group("tp"))  # broken
    h = torch.cat(slices)  # broken
    return h


def step():
    optimizer.zero_grad()
    if pp == 0:
        h = model(x)
        send(h)
        h.backward(receive())
        loss = None
    else:
        h = receive().requires_grad_()
        loss = cross_entropy(model(h), y)
        loss.backward()
        send(h.grad)
    optimizer.step()
    return None if loss is None else loss.item()
