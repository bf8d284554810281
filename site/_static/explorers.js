/* The explorers: ring and tree, memory. Plain script, so they work from file:// without a
   kernel. `window.courseExplorers` has the arithmetic alone: tests/test_site.py compares it with the library's. */
window.courseExplorers = (() => {
  /* All-reduces in seconds, as rankcell.costs computes them; alpha in seconds, beta in seconds per byte */
  const doublings = (n) => Math.ceil(Math.log2(n));
  const RINGS = {
    ring: (s, n, a, b) => 2 * (n - 1) * (a + (b * s) / n),
    tree: (s, n, a, b) => 2 * doublings(n) * (a + b * s),
    "two pipelined trees": (s, n, a, b) => 2 * doublings(n) * a + 2 * b * s,
  };

  /* Bytes on one GPU. States: rankcell.planner.memory.zero_states; activations: 34 s b h per layer, or 2 s b h */
  const memory = ({ billions, stage, dp, tp, pp, layers, hidden, sequence, batch, again }) => {
    const mine = (billions * 1e9) / (tp * pp);
    const shard = (from) => (stage >= from ? dp : 1);
    const held = again ? 2 : 34;
    return {
      parameters: (2 * mine) / shard(3),
      gradients: (2 * mine) / shard(2),
      optimizer: (12 * mine) / shard(1),
      activations: (held * sequence * batch * hidden * (layers / pp) * pp) / tp,
    };
  };
  return { RINGS, memory };
})();

(() => {
  const { RINGS, memory } = window.courseExplorers;
  const INK = "#1a1a1a";
  const svg = (tag, attributes = {}, text) => {
    const e = document.createElementNS("http://www.w3.org/2000/svg", tag);
    Object.entries(attributes).forEach(([name, value]) => e.setAttribute(name, value));
    if (text !== undefined) e.textContent = text;
    return e;
  };
  const paper = (width, height, alt) => {
    const e = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": alt,
      "font-family": "system-ui, sans-serif", "font-size": 18, fill: INK });
    e.append(svg("rect", { width: "100%", height: "100%", rx: 6, fill: "#fff" }));
    return e;
  };
  const short = (x, digits = 3) => String(+x.toPrecision(digits));
  const seconds = (t) => (t < 1e-3 ? `${short(t * 1e6)} µs` : t < 1 ? `${short(t * 1e3)} ms` : `${short(t)} s`);
  const bytes = (b) => {
    const k = Math.min(3, Math.max(0, Math.floor(Math.log2(Math.max(b, 1)) / 10)));
    return `${short(b / 2 ** (10 * k))} ${["B", "KiB", "MiB", "GiB"][k]}`;
  };

  const drawRings = ({ alpha, rate, ranks, size }) => {
    const at = (name, s) => RINGS[name](s, ranks, alpha * 1e-6, 1e-9 / rate);
    const names = Object.keys(RINGS), best = names.reduce((a, b) => (at(b, size) < at(a, size) ? b : a));
    const says = `${ranks} ranks, ${bytes(size)}: ` + names.map((n) => `${n} ${seconds(at(n, size))}`).join(", ") +
      `. The fastest is the ${best}.`;
    const left = 74, top = 12, width = 680, height = 340, right = 28, bottom = 44;
    const sizes = range(25).map((k) => 2 ** (6 + k)), times = names.flatMap((n) => sizes.map((s) => at(n, s)));
    const lo = Math.floor(Math.log10(Math.min(...times))), hi = Math.ceil(Math.log10(Math.max(...times)));
    const px = (s) => left + ((width - left - right) * (Math.log2(s) - 6)) / 24;
    const py = (t) => top + ((height - top - bottom) * (hi - Math.log10(t))) / (hi - lo);
    const picture = paper(width, height, says);
    for (let k = lo; k <= hi; k++)
      picture.append(svg("path", { d: `M${left} ${py(10 ** k)}H${width - right}`, stroke: "#dcdcdc" }),
        svg("text", { x: left - 8, y: py(10 ** k) + 6, "text-anchor": "end", "font-size": 16 }, seconds(10 ** k)));
    [6, 12, 18, 24, 30].forEach((k) =>
      picture.append(svg("text", { x: px(2 ** k), y: height - 18, "text-anchor": "middle", "font-size": 16 }, bytes(2 ** k))));
    picture.append(svg("path", { d: `M${px(size)} ${top}V${height - bottom}`, stroke: INK, "stroke-dasharray": "2 5" }));
    names.forEach((name, i) => {
      const colour = ["#0072b2", "#d55e00", "#009e73"][i], dash = ["", "9 5", "2 4"][i];
      picture.append(svg("path", { d: "M" + sizes.map((s) => `${px(s).toFixed(1)} ${py(at(name, s)).toFixed(1)}`).join("L"),
        fill: "none", stroke: colour, "stroke-width": 3, "stroke-dasharray": dash }),
        svg("path", { d: `M${left + 16} ${top + 20 + 24 * i}h34`, stroke: colour, "stroke-width": 3, "stroke-dasharray": dash }),
        svg("text", { x: left + 58, y: top + 26 + 24 * i }, name));
    });
    return [picture, says];
  };

  const KINDS = { parameters: "#56b4e9", gradients: "#e69f00", optimizer: "#009e73", activations: "#cc79a7" };
  const drawMemory = (chosen) => {
    const parts = memory({ ...chosen, again: chosen.recompute === "whole layers" });
    const total = Object.values(parts).reduce((a, b) => a + b, 0), gpu = chosen.gpu * 1e9;
    const gb = (b) => `${short(b / 1e9)} GB`;
    const says = `${gb(total)} on each of ${chosen.dp * chosen.tp * chosen.pp} GPUs, ` +
      (total <= 0.9 * gpu ? `which fits in ${chosen.gpu} GB` : total <= gpu ? `too near to ${chosen.gpu} GB` : `more than ${chosen.gpu} GB`) +
      ": " + Object.entries(parts).map(([kind, b]) => `${kind} ${gb(b)}`).join(", ") + ".";
    const width = 680, left = 12, span = width - 2 * left, most = Math.max(total, gpu) * 1.02;
    const picture = paper(width, 132, says);
    let x = left;
    Object.entries(parts).forEach(([kind, b]) => {
      const w = (span * b) / most;
      picture.append(svg("rect", { x, y: 34, width: w, height: 44, fill: KINDS[kind], stroke: "#fff" }));
      x += w;
    });
    const limit = left + (span * gpu) / most;
    picture.append(svg("path", { d: `M${limit} 26V86`, stroke: INK, "stroke-width": 3 }),
      svg("text", { x: Math.min(limit, width - 70), y: 20, "text-anchor": "middle" }, `GPU: ${chosen.gpu} GB`));
    let k = left;
    Object.keys(KINDS).forEach((kind) => {
      picture.append(svg("rect", { x: k, y: 100, width: 16, height: 16, fill: KINDS[kind] }), svg("text", { x: k + 22, y: 115 }, kind));
      k += 44 + 9.5 * kind.length;
    });
    return [picture, says];
  };

  const range = (n) => [...Array(n).keys()];
  const powers = (from, to) => range(to - from + 1).map((k) => 2 ** (from + k));
  /* name: [label, choices, the first choice, how a choice is written] */
  const PANELS = {
    rings: [drawRings, {
      alpha: ["α, start of a message", [1, 3, 10, 30, 100, 300], 30, (x) => `${x} µs`],
      rate: ["rate of a link", [1, 3, 10, 50, 100, 450], 10, (x) => `${x} GB/s`],
      ranks: ["ranks", [2, 4, 8, 16, 64, 256, 1024], 8],
      size: ["array", powers(8, 30), 2 ** 20, bytes],
    }],
    memory: [drawMemory, {
      billions: ["parameters", [0.124, 1.5, 7, 13, 34, 70, 175, 405], 7, (x) => `${x} billion`],
      stage: ["ZeRO stage", [0, 1, 2, 3], 1],
      dp: ["data parallel", powers(0, 11), 8],
      tp: ["tensor parallel", powers(0, 3), 1],
      pp: ["pipeline stages", powers(0, 4), 1],
      layers: ["layers", [12, 32, 40, 64, 80, 96, 126], 32],
      hidden: ["hidden size", [768, 2048, 4096, 5120, 8192, 12288, 16384], 4096],
      sequence: ["tokens in a sequence", powers(10, 17), 4096],
      batch: ["sequences in a micro-batch", [1, 2, 4, 8], 1],
      recompute: ["computed again", ["nothing", "whole layers"], "nothing"],
      gpu: ["memory of a GPU", [24, 40, 80, 141, 192], 80, (x) => `${x} GB`],
    }],
  };

  let count = 0;
  document.querySelectorAll(".explorer").forEach((place) => {
    const [draw, controls] = PANELS[place.dataset.explorer];
    const form = document.createElement("form"), picture = document.createElement("div"), says = document.createElement("p");
    const chosen = {};
    picture.className = "picture";
    says.setAttribute("role", "status");
    const show = () => {
      const [drawn, sentence] = draw(chosen);
      picture.replaceChildren(drawn);
      says.textContent = sentence;
    };
    Object.entries(controls).forEach(([name, [text, choices, first, write = String]]) => {
      const id = `explorer-${++count}`, row = document.createElement("div");
      const label = Object.assign(document.createElement("label"), { textContent: text, htmlFor: id });
      chosen[name] = first;
      if (typeof first === "string") {
        const select = Object.assign(document.createElement("select"), { id });
        choices.forEach((choice) => select.add(new Option(choice, choice, false, choice === first)));
        select.addEventListener("input", () => { chosen[name] = select.value; show(); });
        row.append(label, select);
      } else {
        const slider = Object.assign(document.createElement("input"), { id, type: "range", min: 0, max: choices.length - 1, value: choices.indexOf(first) });
        const value = document.createElement("output");
        const move = () => {
          chosen[name] = choices[slider.value];
          value.value = slider.ariaValueText = write(chosen[name]);
        };
        slider.addEventListener("input", () => { move(); show(); });
        move();
        row.append(label, slider, value);
      }
      form.append(row);
    });
    form.addEventListener("submit", (event) => event.preventDefault());
    place.replaceChildren(form, picture, says);
    show();
  });
})();
