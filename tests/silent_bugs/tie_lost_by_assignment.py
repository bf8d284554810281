"""A checkpoint is assigned to a model on the meta device, and its head, tied before, is a weight of its own then.

source: https://github.com/verl-project/verl/issues/7834
mesh: dp 4
first: head.weight grad | token_embedding.weight grad
side: backward
"""

# %% one process
model = gpt(tied=True)
step = training(model, adam(model), lambda: cross_entropy(model(x), y))

# %% ranks
from torch.distributed.fsdp import fully_shard

saved = {name: value.clone() for name, value in gpt(tied=True).state_dict().items()}
model = gpt(tied=True, device="meta")
model.load_state_dict(saved, assign=True)
model.head.weight = model.token_embedding.weight  # mended
fully_shard(model)
step = training(model, adam(model), lambda: cross_entropy(model(x[rank::4]), y[rank::4]))
