/* The planner's panel on a page without a kernel: the formulas of lib/rankcell/planner for one layout at a time, in
   16 bits and for one software stack. Models, GPUs and the stack's numbers come from Python, in window.PLANNER.
   tests/test_panel.py compares every number with Python's planner. */
const planner = (() => {
  const FULL = 2;
  const divisors = (n) => Array.from({length: n}, (_, k) => k + 1).filter((d) => n % d === 0);

  /* shapes.py */
  function sized(model) {
    const s = {...model}, share = s.layers ? s.moe_layers / s.layers : 0;
    s.width = s.heads * (s.head_dim || s.hidden / s.heads);
    s.kv_width = s.width * s.kv_heads / s.heads;
    const matrices = s.gated ? 3 : 2;
    s.attention_params = s.attention || s.hidden * (2 * s.width + 2 * s.kv_width);
    const shared = s.hidden * (matrices * s.shared_ffn + s.experts);
    s.embedding = s.vocab * s.hidden;
    s.dense_layer = s.attention_params + (1 - share) * matrices * s.hidden * s.ffn + share * shared;
    s.expert_layer = share * s.experts * matrices * s.hidden * s.expert_ffn;
    s.active_layer = s.dense_layer + share * s.top_k * matrices * s.hidden * s.expert_ffn;
    s.active = s.layers * s.active_layer + s.embedding;
    s.params = s.layers * (s.dense_layer + s.expert_layer) + s.embedding * (2 - s.tied);
    s.share = share;
    return s;
  }

  const tokens = (job, l) => l.micro_batch * job.seq / l.cp;
  const microbatches = (job, l) => Math.max(1, job.batch / (l.dp * l.micro_batch));

  /* memory.py */
  function kept(job, tp, recompute) {
    const s = job.shape;
    if (recompute === FULL) return 2 * s.hidden / tp;
    const inner = (1 - s.share) * s.ffn + s.share * (s.top_k * s.expert_ffn + s.shared_ffn);
    const attention = 2 * (s.width + 2 * s.kv_width) + 2 * s.width;
    return (8 * s.hidden + attention + inner * (s.gated ? 6 : 4)) / tp + s.share * s.top_k * 4 * s.hidden;
  }

  function inFlight(job, l, stage) {
    const held = l.chunks > 1 ? (2 * (l.pp - stage - 1) + (l.chunks - 1) * l.pp + 1) / l.chunks : l.pp - stage;
    return Math.min(held, microbatches(job, l));
  }

  function paramsOn(job, l, stage) {
    const s = job.shape, first = stage === 0, last = stage === l.pp - 1, layers = Math.ceil(s.layers / l.pp);
    const tables = (first && last ? 2 - s.tied : first || last ? 1 : 0) * s.embedding;
    return [(layers * s.dense_layer + tables) / l.tp, layers * s.expert_layer / l.ep];
  }

  function memory(job, l, stage) {
    const k = job.stack, [dense, experts] = paramsOn(job, l, stage), all = dense + experts;
    const ranks = l.dp * l.cp, replicas = Math.max(1, ranks * l.tp / l.ep);
    const spread = (nbytes, from) => nbytes * (l.zero >= from ? dense / ranks + experts / replicas : all);
    const layers = Math.ceil(job.shape.layers / l.pp), t = tokens(job, l);
    const again = l.recompute === FULL ? kept(job, l.tp, 0) : 0;
    return {
      parameters: l.zero >= 3 ? 2 * all * Math.min(1, 3 / Math.max(1, layers)) : k.weight_bytes * all,
      gradients: spread(l.zero >= 3 ? 4 : k.gradient_bytes, 2),
      optimizer: spread(k.optimizer_bytes, 1),
      activations: t * (layers * inFlight(job, l, stage) * kept(job, l.tp, l.recompute) + again),
      logits: stage === l.pp - 1 ? k.logit_bytes * t * job.shape.vocab / l.tp : 0,
      workspace: k.workspace,
    };
  }

  const sum = (parts) => Object.values(parts).reduce((a, b) => a + b, 0);
  const limit = (job) => job.chip.memory_bytes * (1 - job.stack.headroom);
  const fullest = (job, l) =>
    Math.max(...[0, Math.min(1, l.pp - 1), l.pp - 1].map((stage) => sum(memory(job, l, stage))));

  /* communication.py: seconds if nothing hides them */
  function rings(job, nbytes, ranks, stride, times, {halves = false, network = 1} = {}) {
    const c = job.chip, crosses = stride * ranks > c.node && ranks > 1;
    const ports = Math.max(1, Math.min(ranks, c.node / stride)), inside = halves ? c.bus : c.ring;
    const rate = crosses ? Math.min(inside, ports * c.network * job.port) * network : inside;
    return times * ((ranks - 1) * (crosses ? c.alpha_across : c.alpha) + (ranks - 1) / ranks * nbytes / rate);
  }

  function communication(job, l) {
    const s = job.shape, c = job.chip, k = job.stack, m = microbatches(job, l), t = tokens(job, l);
    const layers = s.layers / l.pp, found = {};
    const collectives = 8 + (l.recompute === FULL ? 4 : 0) + 2;
    found.tensor = rings(job, 2 * t * s.hidden, l.tp, 1, collectives * layers * m);
    found.context = rings(job, 4 * l.micro_batch * job.seq * s.kv_width / l.tp, l.cp, l.tp, 3 * layers * m);
    const domains = Math.max(1, l.ep * l.tp / c.node), token = 2 * t / l.tp * s.hidden;
    const local = token * s.top_k * (1 - 1 / Math.max(1, l.ep / domains)) / domains;
    const away = token * (domains - 1) * (1 - (1 - 1 / domains) ** s.top_k);
    const start = l.ep > 1 ? (domains > 1 ? c.alpha_across : c.alpha) : 0;
    found.expert = 4 * s.moe_layers / l.pp * m * (local / c.ring + away / (c.network * job.port) + start);
    const [dense, experts] = paramsOn(job, l, 0), ranks = l.dp * l.cp;
    const replicas = Math.max(1, ranks * l.tp / l.ep);
    const gathers = l.zero >= 3 ? 2 * m : l.zero >= 1 ? 1 : 0, reduces = l.zero >= 2 ? m : l.zero >= 1 ? 1 : 2;
    found.data = 0;
    for (const [params, group, apart] of [[dense, ranks, l.tp], [experts, replicas, l.tp * l.ep]])
      for (const [each, times] of [[2, gathers], [k.reduce_bytes, reduces]])
        if (params > 0)  // without experts nothing is sent for them
          found.data += rings(job, each * params, group, apart, times, {halves: l.zero === 0, network: k.network});
    const crosses = job.n_gpus > c.node && l.pp > 1;
    const message = 2 * t * s.hidden / l.tp / (crosses ? job.port * c.network : c.ring);
    found.pipeline = l.pp > 1 ? 2 * l.chunks * m * (message + (crosses ? c.alpha_across : c.alpha)) : 0;
    return found;
  }

  /* seconds.py */
  function layer(job, l) {
    const s = job.shape, k = job.stack, c = job.chip, t = tokens(job, l);
    const own = s.dense_layer / l.tp + s.expert_layer / l.ep;
    const matmul = 6 * s.active_layer * t / l.tp / c.rate + (4 + k.gradient_bytes) * own / c.hbm;
    const share = k.attention * (k.ampere_attention && c.fp8 ? 0.5 : 1);
    const inside = 4 * job.seq * s.width * t / l.tp / c.peak * 0.5 / share, attention = 3.5 * inside;
    const elementwise = k.passes * kept(job, l.tp, 0) * t / c.hbm;
    const recomputed = l.recompute === FULL ? matmul / 3 + inside + elementwise / 3 : 0;
    const busy = {matmul, attention, elementwise, recomputed};
    for (const name of Object.keys(busy)) busy[name] *= k.slowdown;
    return {...busy, launch: waiting(job, l, sum(busy))};
  }

  function waiting(job, l, busy) {
    const again = l.recompute === FULL, forward = busy / (again ? 4 : 3);
    const half = job.stack.floor / 2 * (job.shape.moe_layers > 0 ? job.stack.moe_launches : 1);
    return Math.max(0, half - forward) + Math.max(0, half * (again ? 2 : 1) - (busy - forward));
  }

  function step(job, l) {
    const s = job.shape, k = job.stack, m = microbatches(job, l), one = layer(job, l), whole = sum(one);
    const logits = tokens(job, l) * s.vocab / l.tp;
    let head = k.slowdown * (6 * s.hidden * logits / job.chip.rate + k.passes * k.logit_bytes / 2 * logits / job.chip.hbm);
    const layers = Math.ceil(s.layers / l.pp), sent = communication(job, l);
    if (layers * whole > layers * whole + head) head = 0;
    const tensor = (1 - k.overlap_tp) * sent.tensor;
    const context = Math.max(0, sent.context - one.attention * m * s.layers / l.pp);
    const expert = (1 - k.overlap_ep) * sent.expert;
    const pipeline = sent.pipeline * (l.chunks > 1 ? 0.5 : 1);
    const busy = m * (layers * whole + head) + tensor + context + expert + pipeline;
    const bubble = (l.pp - 1) * busy / m / l.chunks;
    const data = sent.data - Math.min(k.overlap_dp * sent.data, l.zero >= 2 ? busy : busy / m);
    const [dense, experts] = paramsOn(job, l, 0), shards = l.zero >= 1 ? l.dp * l.cp : 1;
    const replicas = l.zero >= 1 ? Math.max(1, shards * l.tp / l.ep) : 1;
    const optimizer = 34 * (dense / shards + experts / replicas) / job.chip.hbm, n = m * layers;
    return {
      matmul: n * one.matmul, attention: n * one.attention, elementwise: n * one.elementwise, head: m * head,
      recomputed: n * one.recomputed, launch: n * one.launch, tensor, context, expert, pipeline, bubble, data, optimizer,
    };
  }

  const rate = (job, l) => job.batch * job.seq / job.n_gpus / sum(step(job, l));
  const mfu = (job, speed) =>
    speed * (6 * job.shape.active + 6 * job.shape.layers * job.seq * job.shape.width) / job.chip.peak;

  /* search.py: why a layout is rejected, "" for a possible one */
  function reason(job, l) {
    const s = job.shape, m = job.batch / (l.dp * l.micro_batch), cut = l.pp * l.chunks;
    const keys = Math.max(s.kv_heads, l.tp) % Math.min(s.kv_heads, l.tp) !== 0;
    if (l.dp !== Math.floor(l.dp)) return `tp ${l.tp} x pp ${l.pp} x cp ${l.cp} does not divide ${job.n_gpus} GPUs`;
    if (s.heads % l.tp || keys) return `tensor parallelism ${l.tp} does not divide ${s.heads} heads or ${s.kv_heads} heads of keys`;
    if (l.tp > job.chip.node) return `tensor parallelism ${l.tp} is wider than the ${job.chip.node} GPUs that NVLink joins`;
    if (cut > s.layers) return `${l.pp} stages of ${l.chunks} chunks are more than the ${s.layers} layers`;
    if (l.chunks > 1 && s.layers % cut) return `${l.pp} stages of ${l.chunks} chunks do not divide the ${s.layers} layers`;
    if (l.ep > 1 && (Math.max(1, s.experts) % l.ep || l.dp * l.cp * l.tp % l.ep))
      return `expert parallelism ${l.ep} does not divide the ${s.experts} experts, or the ranks it is taken from`;
    if (m < 1 || m !== Math.floor(m))
      return `the batch of ${job.batch} sequences is not a multiple of ${l.dp} data-parallel ranks x ${l.micro_batch} sequences`;
    if (l.chunks > 1 && m % l.pp) return `${m} micro-batches are not a multiple of the ${l.pp} stages, which chunks ask for`;
    const need = fullest(job, l);
    if (need > limit(job)) return `it needs ${(need / 1e9).toFixed(0)} GB and a rank has ${(limit(job) / 1e9).toFixed(0)} GB`;
    return "";
  }

  function* layouts(job) {
    const n = job.n_gpus;
    for (const tp of divisors(n)) for (const pp of divisors(n / tp))
      for (const cp of divisors(n / tp / pp).filter((d) => d <= 16))
        for (const ep of job.shape.experts ? divisors(n / tp / pp) : [1])
          for (const micro_batch of [1, 2, 4, 8]) for (const zero of pp > 1 ? [0, 1] : [0, 1, 2, 3])
            for (const recompute of [0, FULL]) for (const chunks of pp > 1 ? [1, 2, 4] : [1]) {
              const dp = n / tp / pp / cp;
              if (zero === 1 || pp > 1 || dp * cp > 1) yield {tp, pp, dp, cp, ep, chunks, micro_batch, zero, recompute};
            }
  }

  function best(job, count = 5) {
    const kinds = (l) => (l.tp > 1) + (l.pp > 1) + (l.cp > 1) + (l.ep > 1);
    const found = [];
    for (const l of layouts(job))
      if (!reason(job, l)) found.push({layout: l, rate: rate(job, l), need: fullest(job, l), kinds: kinds(l)});
    for (const f of found) f.band = Math.floor(Math.log(f.rate) / 0.005);
    found.sort((a, b) => b.band - a.band || a.kinds - b.kinds || a.need - b.need);
    const chosen = new Map();
    for (const f of found) {
      const cut = [f.layout.tp, f.layout.pp, f.layout.ep].join();
      if (!chosen.has(cut)) chosen.set(cut, f);
      if (chosen.size === count) break;
    }
    return {possible: found.length, best: [...chosen.values()]};
  }

  function job(data, {model, gpu, gpus, network, seq, batch}) {
    const chip = {...data.chips[gpu]};
    if (network) chip.network = network;
    return {shape: sized(data.models[model]), chip, n_gpus: gpus, seq, batch, stack: data.stack, port: data.port};
  }

  return {job, memory, fullest, limit, step, rate, mfu, reason, best, sum};
})();

if (typeof module !== "undefined") module.exports = planner;

/* The panel */
if (typeof document !== "undefined") document.querySelectorAll("div.planner").forEach((panel) => {
  const data = window.PLANNER, element = (tag, props = {}, ...children) => {
    const made = Object.assign(document.createElement(tag), props);
    made.append(...children);
    return made;
  };
  const powers = (most) => Array.from({length: Math.log2(most) + 1}, (_, k) => [String(2 ** k), 2 ** k]);
  const fields = {
    model: ["model", Object.keys(data.models).map((name) => [name, name]), "llama3-70b"],
    gpu: ["GPU", Object.keys(data.chips).map((name) => [name, name]), "H100-80"],
    gpus: ["number of GPUs", powers(2048), 64],
    network: ["GB/s per GPU between nodes", [1, 2, 5, 12.5, 25, 50, 100].map((g) => [String(g), g * 1e9]), 50e9],
    seq: ["tokens of a sequence", powers(131072).slice(10), 8192],
    batch: ["sequences per step", powers(4096), 512],
    tp: ["tensor, tp", powers(16), 8],
    pp: ["pipeline, pp", powers(32), 2],
    cp: ["context, cp", powers(16), 1],
    ep: ["experts, ep", powers(64), 1],
    chunks: ["chunks per rank", powers(4), 1],
    micro_batch: ["micro-batch", powers(8), 1],
    zero: ["ZeRO stage", [0, 1, 2, 3].map((z) => [String(z), z]), 1],
    recompute: ["recompute", [["nothing", 0], ["everything", 2]], 0],
  };
  const controls = {};
  const form = element("div", {className: "planner-form"});
  for (const [name, [text, options, start]] of Object.entries(fields)) {
    const select = element("select", {onchange: show});
    options.forEach(([word, value]) => select.append(element("option", {value: String(value), textContent: word})));
    select.value = String(start);
    controls[name] = select;
    form.append(element("label", {}, element("span", {textContent: text}), select));
  }
  const verdict = element("p", {className: "planner-verdict"}), memory = element("div"), time = element("div");
  verdict.setAttribute("aria-live", "polite");
  const table = element("div", {className: "planner-best"});
  panel.replaceChildren(form, verdict, memory, time, table);

  const COLOURS = {
    parameters: "#0072b2", gradients: "#e69f00", optimizer: "#009e73", activations: "#cc79a7", logits: "#56b4e9",
    workspace: "#d55e00", model: "#56b4e9", "memory traffic": "#d55e00", "launching kernels": "#cc79a7",
    recomputed: "#f0e442", "sent, not hidden": "#999999", bubble: "#444444",
  };
  function bar(name, parts, scale, format, limit) {
    const total = planner.sum(parts), shown = Object.entries(parts).filter(([, v]) => v > 0.004 * total);
    const strip = element("div", {className: "planner-strip"});
    for (const [kind, value] of shown) {
      const piece = element("i", {title: `${kind}: ${format(value)}`});
      piece.style.cssText = `width:${100 * value / scale}%;background:${COLOURS[kind]}`;
      strip.append(piece);
    }
    if (limit) {
      const mark = element("b", {title: `torch can use ${format(limit)}`});
      mark.style.left = `${100 * limit / scale}%`;
      strip.append(mark);
    }
    const words = element("div", {className: "planner-words"}, element("strong", {textContent: `${name}: ${format(total)}`}));
    for (const [kind, value] of shown) {
      const square = element("i");
      square.style.background = COLOURS[kind];
      words.append(element("span", {}, square, `${kind} ${format(value)}`));
    }
    return element("div", {className: "planner-bar"}, words, strip);
  }
  function described(l) {
    const kinds = ["dp", "tp", "pp", "cp", "ep"].filter((k) => l[k] > 1).map((k) => `${k} ${l[k]}`);
    if (l.chunks > 1) kinds.push(`${l.chunks} chunks`);
    return [...kinds, `micro-batch ${l.micro_batch}`, `ZeRO-${l.zero}`, ...(l.recompute ? ["recompute"] : [])].join(", ");
  }
  function show() {
    const chosen = Object.fromEntries(Object.entries(controls).map(([name, select]) =>
      [name, name === "model" || name === "gpu" ? select.value : Number(select.value)]));
    const job = planner.job(data, chosen), {tp, pp, cp, ep, chunks, micro_batch, zero, recompute} = chosen;
    const layout = {tp, pp, cp, ep, chunks: pp > 1 ? chunks : 1, micro_batch, zero: pp > 1 ? Math.min(zero, 1) : zero,
                    recompute, dp: chosen.gpus / (tp * pp * cp)};
    controls.ep.disabled = !job.shape.experts;
    if (!job.shape.experts) layout.ep = 1;
    const rejected = planner.reason(job, layout), gb = (b) => `${(b / 1e9).toFixed(b < 1e10 ? 1 : 0)} GB`;
    memory.replaceChildren();
    time.replaceChildren();
    if (layout.dp === Math.floor(layout.dp)) {
      const stages = [...new Set([0, pp - 1])].map((k) => [k, planner.memory(job, layout, k)]);
      const most = Math.max(planner.limit(job), ...stages.map(([, parts]) => planner.sum(parts)));
      stages.forEach(([k, parts]) => memory.append(bar(`stage ${k}`, parts, most, gb, planner.limit(job))));
      const s = planner.step(job, layout), total = planner.sum(s);
      const parts = {
        model: s.matmul + s.attention + s.head, "memory traffic": s.elementwise,
        "launching kernels": s.launch, recomputed: s.recomputed,
        "sent, not hidden": s.tensor + s.context + s.expert + s.pipeline + s.data, bubble: s.bubble, optimizer: s.optimizer,
      };
      time.append(bar("a step", parts, total, (x) => `${x.toPrecision(3)} s`));
      const [slowest, lost] = Object.entries(parts).slice(1).sort((a, b) => b[1] - a[1])[0];
      const speed = planner.rate(job, layout);
      const said = `${Math.round(speed).toLocaleString("en")} tokens/s/GPU, ${(100 * planner.mfu(job, speed)).toFixed(0)} % MFU`;
      verdict.textContent = `${described(layout)}. ${rejected ? `Rejected: ${rejected}.` : `${said}.`} ` +
        `Bottleneck besides the model's own operations: ${slowest}, ${(100 * lost / total).toFixed(0)} % of the step.`;
    } else verdict.textContent = `Rejected: ${rejected}.`;
    const {possible, best} = planner.best(job);
    const rows = best.map((f) => {
      const take = element("button", {type: "button", textContent: "take", onclick: () => {
        for (const name of ["tp", "pp", "cp", "ep", "chunks", "micro_batch", "zero", "recompute"])
          controls[name].value = String(f.layout[name]);
        show();
      }});
      take.setAttribute("aria-label", `take ${described(f.layout)}`);
      return element("tr", {}, element("td", {textContent: described(f.layout)}),
        element("td", {textContent: Math.round(f.rate).toLocaleString("en")}), element("td", {textContent: gb(f.need)}),
        element("td", {}, take));
    });
    const head = element("tr", {}, ...["the five best layouts", "tokens/s/GPU", "memory"].map((text) =>
      element("th", {textContent: text, scope: "col"})), element("td"));
    const none = element("p", {textContent: "No layout is possible for this model, batch and these GPUs."});
    table.replaceChildren(possible ? element("table", {className: "dataframe"}, element("thead", {}, head),
      element("tbody", {}, ...rows)) : none);
  }
  show();
});
