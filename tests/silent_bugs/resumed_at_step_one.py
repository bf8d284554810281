"""A checkpoint has Adam's two moments and not how many steps they are made of. After it was loaded the corrections
for a beginning are made once more, on moments that are no longer young.

source: https://github.com/deepspeedai/DeepSpeed/pull/4396
mesh: dp 4
first: * parameter
side: update
"""

# %% one process
model = llama()
step = training(model, adam(model), lambda: cross_entropy(model(x), y))
for _ in range(4):
    step()

# %% ranks
import io

from torch.nn.parallel import DistributedDataParallel


def start(model):
    return model, adam(model)


def save(model, optimizer):
    file = io.BytesIO()
    moments = {}
    for name, p in model.module.named_parameters():
        state = optimizer.state[p]
        moments[name] = {"exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}
        moments[name]["step"] = state["step"]  # mended
    torch.save({"model": model.module.state_dict(), "optimizer": moments}, file)
    return file.getvalue()


def load(file, model, optimizer):
    saved = torch.load(io.BytesIO(file))
    model.module.load_state_dict(saved["model"])
    for name, p in model.module.named_parameters():
        optimizer.state[p] = {"step": torch.tensor(0.0)} | saved["optimizer"][name]


def loss():
    return cross_entropy(model(x[rank::4]), y[rank::4])


model, optimizer = start(DistributedDataParallel(llama()))
first_job = training(model, optimizer, loss)
for _ in range(4):
    first_job()
file = save(model, optimizer)

model, optimizer = start(DistributedDataParallel(llama()))
load(file, model, optimizer)
step = training(model, optimizer, loss)
