"""A step with zero gradients and a learning rate of zero makes the optimizer's state, so that a checkpoint has
somewhere to go. Adam counts it, and its first real step is corrected as if it were the second.

source: https://github.com/NVIDIA/Megatron-LM/pull/5976
mesh: dp 4
first: *.weight parameter | *.bias parameter
side: update
says: its optimizer begins with `step`
"""

# %% ranks
model = gpt()
optimizer = adam(model)
optimizer.param_groups[0]["lr"] = 0.0  # broken
for p in model.parameters():  # broken
    p.grad = torch.zeros_like(p)  # broken
optimizer.step()  # broken
optimizer.param_groups[0]["lr"] = 1e-3  # broken

step = training(model, optimizer, lambda: cross_entropy(model(x[rank::4]), y[rank::4]), average)
