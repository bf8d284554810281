"""What the groups of a layout send: bytes per step by group, the link each crosses, and the seconds it takes.

Seconds by the latency-bandwidth model of `rankcell.costs`. A group of g ranks, s apart, lies inside one NVLink domain
of `node` GPUs when s g <= node. Otherwise k = max(1, node / s) of its ranks share a domain; every rank has a network
port, so a ring goes out of a domain through k ports at once, and no faster than NVLink.
"""

from typing import Any, NamedTuple

import numpy as np

from .layout import FULL, Job, Layout
from .memory import params_on

PORT = 0.95  # of a port's rate: 382 of 8 x 50 GB/s (ml-engineering@744d01e, network, B200)


class Traffic(NamedTuple):
    """One kind of communication: bytes a rank sends per step, and their seconds if nothing hides them."""

    nbytes: Any
    seconds: Any


def _rings(
    job: Job, nbytes: Any, ranks: Any, stride: Any, times: Any, *, halves: Any = False, network: float = 1.0
) -> Traffic:
    """`times` all-gathers or reduce-scatters of `nbytes` in groups of `ranks` ranks, `stride` apart: each takes
    (n-1) alpha + (n-1)/n beta S, half of `costs.ring_all_reduce`.

    `halves`: two at a time are one all-reduce, which the switches of a domain may sum up. `network`: the share of a
    port's rate that they reach.
    """
    chip = job.chip
    inside = np.where(halves, chip.bus, chip.ring)
    crosses = np.logical_and(stride * ranks > chip.node, np.asarray(ranks) > 1)
    ports = np.maximum(1, np.minimum(ranks, chip.node / stride))
    bandwidth = np.where(crosses, np.minimum(inside, ports * chip.network * PORT) * network, inside)
    latency = np.where(crosses, chip.alpha_across, chip.alpha)
    sent = times * (ranks - 1) / ranks * nbytes
    return Traffic(sent, times * (ranks - 1) * latency + sent / bandwidth)


def tensor(job: Job, layout: Layout) -> Traffic:
    """Two all-reduces forward and two backward per layer and micro-batch, of the activations (2 bytes each).

    With sequence parallelism each is a reduce-scatter and an all-gather of the same bytes, and both inputs are
    gathered once more in the backward, unless the stack keeps them whole. A whole recomputed layer adds two
    all-reduces. Shoeybi et al., https://arxiv.org/abs/1909.08053, section 3; Korthikanti et al., section 4.2.2.
    """
    layers = job.shape.layers / layout.pp
    nbytes = 2 * layout.tokens(job) * job.shape.hidden
    again = np.where(layout.recompute == FULL, 4, 0)
    again = again + np.where(np.logical_and(layout.sequence_parallel, job.stack.kept_whole == 0), 2, 0)
    whole = np.logical_not(layout.sequence_parallel)
    return _rings(job, nbytes, layout.tp, 1, (8 + again) * layers * layout.microbatches(job), halves=whole)


def context(job: Job, layout: Layout) -> Traffic:
    """Keys and values go round the ring: once forward, with their gradients twice backward. 2 bytes each."""
    layers = job.shape.layers / layout.pp
    nbytes = 2 * 2 * layout.micro_batch * job.seq * job.shape.kv_width / layout.tp
    return _rings(job, nbytes, layout.cp, layout.tp, 3 * layers * layout.microbatches(job))


def expert(job: Job, layout: Layout) -> Traffic:
    """Two all-to-alls forward and two backward per layer of experts: each token goes to top_k experts and back.

    Inside a domain top_k copies of a token travel, 2 bytes an element; to another domain one, which is copied there:
    of N domains with the experts spread evenly, (N-1) (1 - (1 - 1/N)^top_k) others are met. See `Stack.one_copy`.
    """
    s, chip = job.shape, job.chip
    times = 4 * s.moe_layers / layout.pp * layout.microbatches(job)
    token = 2 * layout.tokens(job) / layout.shard() * s.hidden
    ranks = layout.ep * layout.etp
    domains = np.maximum(1, ranks * layout.tp / layout.etp / chip.node)
    local = token * s.top_k * (1 - 1 / np.maximum(1, ranks / domains)) / domains
    copies = 1 - (1 - 1 / domains) ** s.top_k if job.stack.one_copy else s.top_k / domains
    away = token * (domains - 1) * copies
    latency = np.where(domains > 1, chip.alpha_across, chip.alpha) * (np.asarray(ranks) > 1)
    return Traffic(times * (local + away), times * (local / chip.ring + away / (chip.network * PORT) + latency))


def data(job: Job, layout: Layout) -> Traffic:
    """Gradients are summed and parameters gathered: once per step, or more often where they are not kept.

    Plain: an all-reduce of the gradients. ZeRO-1: a reduce-scatter of them and an all-gather of 16-bit weights.
    ZeRO-2: the same, with the reduce-scatter in every micro-batch. ZeRO-3: two all-gathers and a reduce-scatter in
    every micro-batch. Section 7 of arXiv 1910.02054 counts one.
    """
    dense, experts = params_on(job, layout, 0 * layout.pp)
    ranks, stride = layout.dp * layout.cp, layout.tp
    each, network = job.stack.reduce_bytes, job.stack.network
    gathers = np.where(layout.zero >= 3, 2 * layout.microbatches(job), np.where(layout.zero >= 1, 1, 0))
    reduces = np.where(layout.zero >= 2, layout.microbatches(job), np.where(layout.zero >= 1, 1, 2))
    replicas = np.maximum(1, ranks * layout.tp / (layout.ep * layout.etp))
    nbytes = seconds = 0
    for params, group, apart in ((dense, ranks, stride), (experts, replicas, stride * layout.ep)):
        for bytes_each, times in ((2, gathers), (each, reduces)):
            times = times * (np.asarray(params) > 0)  # without experts nothing is sent for them
            part = _rings(job, bytes_each * params, group, apart, times, halves=layout.zero == 0, network=network)
            nbytes, seconds = nbytes + part.nbytes, seconds + part.seconds
    return Traffic(nbytes, seconds)


def pipeline(job: Job, layout: Layout) -> Traffic:
    """Activations of a micro-batch to the next stage and their gradients back, once per chunk. 2 bytes each."""
    nbytes = 2 * layout.tokens(job) * job.shape.hidden / layout.shard()
    crosses = np.logical_and(job.n_gpus > job.chip.node, np.asarray(layout.pp) > 1)
    bandwidth = np.where(crosses, PORT * job.chip.network, job.chip.ring)
    times = 2 * layout.chunks * layout.microbatches(job) * (np.asarray(layout.pp) > 1)
    seconds = times * (nbytes / bandwidth + np.where(crosses, job.chip.alpha_across, job.chip.alpha))
    return Traffic(times * nbytes, seconds)


KINDS = {"tensor": tensor, "context": context, "expert": expert, "data": data, "pipeline": pipeline}
