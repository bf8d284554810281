"""Several documents are in a sequence. A hook that prepares attention for context parallelism replaces every mask by
"causal", and documents see those before them.

source: https://github.com/huggingface/trl/pull/6843
mesh: cp 4
first: blocks.0.attention.output output
side: forward
"""

# %% one process
documents = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2]]).expand(8, -1)
model = gpt()
step = training(model, adam(model), lambda: cross_entropy(model(x, documents=documents), y))

# %% ranks
from rankcell.parallel.context import ContextParallel

documents = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2]]).expand(8, -1)
model = ContextParallel(gpt(), layout="contiguous")
optimizer = adam(model)


def prepare(module, args, kwargs):
    kwargs = {**kwargs, "documents": None}  # broken
    return args, kwargs


for block in model.module.blocks:
    block.attention.attend = by_heads
    block.attention.register_forward_pre_hook(prepare, with_kwargs=True)


def step():
    optimizer.zero_grad()
    logits = model(model.split(x), documents=model.split(documents))
    loss = model.share_of_mean(cross_entropy(logits, model.split(y), reduction="none"))
    loss.backward()
    model.finish_gradient_synchronization()
    optimizer.step()
    return 4 * loss.item()
