"""Answers are drawn at temperature 0.6, and the generator tells the log-probabilities of its logits as they are. The
trainer divides its logits by the temperature, so the ratio of new and old is off before the first step.

source: https://github.com/huggingface/trl/issues/4159
mesh: dp 4
loss: of a policy
first: head grad_output | the model grad_output
side: backward
"""

# %% one process
advantages = torch.randn(8, 8, generator=generator(0, "advantages"))
with torch.no_grad():
    generated = (gpt()(x) / 0.6).log_softmax(-1).gather(-1, y[..., None])[..., 0]
model = gpt()


def policy_loss():
    new = (model(x) / 0.6).log_softmax(-1).gather(-1, y[..., None])[..., 0]
    ratio = (new.detach() - generated).exp().clamp(max=2)
    return -(ratio * advantages * new).mean()


step = training(model, adam(model), policy_loss)

# %% ranks
rows = slice(2 * rank, 2 * rank + 2)
advantages = torch.randn(8, 8, generator=generator(0, "advantages"))[rows]
temperature = 0.6
with torch.no_grad():
    logits = gpt()(x[rows])
    logits = logits  # broken
    logits = logits / temperature  # mended
    generated = logits.log_softmax(-1).gather(-1, y[rows][..., None])[..., 0]
model = gpt()
optimizer = adam(model)


def step():
    optimizer.zero_grad()
    new = (model(x[rows]) / temperature).log_softmax(-1).gather(-1, y[rows][..., None])[..., 0]
    ratio = (new.detach() - generated).exp().clamp(max=2)
    loss = -(ratio * advantages * new).mean()
    loss.backward()
    average(model)
    optimizer.step()
    return loss.item()
