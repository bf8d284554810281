"""In the backward of ring attention keys and values go round again, but the gradients of each block are computed from
what was saved in the forward: this rank's own keys and values, whoever's turn it is.

source: https://github.com/huggingface/diffusers/issues/14265
mesh: cp 4
first: blocks.1.attention.query grad_output | blocks.1.attention.key grad_output | blocks.1.attention.value grad_output
side: backward
"""

# %% ranks
from rankcell.parallel.context import ContextParallel, OnlineSoftmax, block_backward


def pass_on(sent):
    received = torch.empty_like(sent)
    to, source = (rank + 1) % 4, (rank - 1) % 4
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, sent, to), dist.P2POp(dist.irecv, received, source)]
    )
    for work in works:
        work.wait()
    return received


class Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value):
        state, block = OnlineSoftmax(query), torch.stack([key, value])
        for turn in range(4):
            source = (rank - turn) % 4
            if source <= rank:
                state.add(*block, triangle=source == rank)
            block = pass_on(block)
        ctx.save_for_backward(query, key, value, state.output(), state.log_sum_exp())
        return state.output()

    @staticmethod
    def backward(ctx, grad):
        query, key, value, output, log_sum_exp = ctx.saved_tensors
        correction = (grad * output).sum(-1, keepdim=True)
        block, grad_query = torch.stack([key, value]), torch.zeros_like(query)
        grad_block = torch.zeros_like(block)
        for turn in range(4):
            source = (rank - turn) % 4
            if source <= rank:
                key, value = block  # mended
                given = query, key, value, grad, log_sum_exp, correction
                of_query, *of_block = block_backward(*given, triangle=source == rank)
                grad_query += of_query
                grad_block += torch.stack(of_block)
            block, grad_block = pass_on(block), pass_on(grad_block)
        return grad_query, *grad_block


model = ContextParallel(gpt(), layout="contiguous")
for block in model.module.blocks:
    block.attention.attend = lambda query, key, value, documents: Ring.apply(query, key, value)
optimizer = adam(model)


def step():
    optimizer.zero_grad()
    loss = model.share_of_mean(cross_entropy(model(model.split(x)), model.split(y), reduction="none"))
    loss.backward()
    model.finish_gradient_synchronization()
    optimizer.step()
    return 4 * loss.item()
