// The forward pass of an ODE-ViT: embed, evolve, classify. The same mathematics as odevit.model, checked against it.
// States are Float32Arrays (n, d) with tokens [CLS | patches | registers]. Runs in a Worker (see the end), after layers.js.

function loadModel(payload) { // {config, weights: {name: [start, length]}, data: base64, …} → {config, get(name), fields, plane}
  const numbers = halfPrecision(payload.data), { config, plane } = payload;
  const get = (name) => {
    const at = payload.weights[name];
    return at ? numbers.subarray(at[0], at[0] + at[1]) : null;
  };
  const fields = Array.from({ length: config.num_fields }, (_, i) => FIELDS[config.field](config, (name) => get(`fields.${i}.${name}`)));
  return { config, get, fields, plane };
}

// --- fields: F and G take a state to a velocity, map(x, rows) is the attention (h, rows, n), that of CLS in its first row --

const FIELDS = {
  softmax(config, get) { // F = s (W2 GELU(C W1 norm(X)) − ρ X), C the identity or a mixing of neighbouring patches; G = s MHSA(norm(X))
    const d = config.hidden_size, heads = config.num_attention_heads, e = d / heads, scale = config.depth / config.horizon;
    const patches = (config.image_size / config.patch_size) ** 2, mixing = get("mlp.mixing.weight");
    const attention = { heads, d, kind: config.attention };
    for (const name of ["query", "key", "value", "out"]) {
      attention[name] = get(`attention.${name}.weight`);
      attention[`${name}Bias`] = get(`attention.${name}.bias`);
    }
    const normed = (name, x) => normalise(x, config.norm, config.layer_norm_eps, get(`${name}.weight`), get(`${name}.bias`));
    return {
      F(x) {
        const n = x.length / d;
        let hidden = linear(normed("norm_f", x), n, get("mlp.w1.weight"), get("mlp.w1.bias"));
        if (mixing) hidden = mixNeighbours(hidden, mixing, patches);
        for (let i = 0; i < hidden.length; i++) hidden[i] = GELU(hidden[i]);
        const y = linear(hidden, n, get("mlp.w2.weight"), get("mlp.w2.bias"));
        return scaled(config.damping ? plus(y, -config.damping, x) : y, scale);
      },
      G(x) {
        const n = x.length / d, z = normed("norm_g", x), p = attentionMap(attention, z, n, n), v = values(attention, z, n);
        const mixed = new Float32Array(n * d);
        for (let head = 0; head < heads; head++) for (let i = 0; i < n; i++) for (let j = 0; j < n; j++) {
          const share = p[(head * n + i) * n + j];
          for (let u = head * e; u < head * e + e; u++) mixed[i * d + u] += share * v[j * d + u];
        }
        return scaled(linear(mixed, n, attention.out, attention.outBias), scale);
      },
      map: (x, rows) => attentionMap(attention, normed("norm_g", x), x.length / d, rows),
    };
  },

  contractive(config, get) { // minus the gradient of a convex energy: F = -s Wᵀ Cᵀ σ(C W x + b), G pulls tokens together
    const d = config.hidden_size, heads = config.num_attention_heads, e = d / heads, scale = config.depth / config.horizon;
    const patches = (config.image_size / config.patch_size) ** 2, [w, a, bias] = ["w.weight", "a.weight", "bias"].map(get);
    const [down, back] = [transposed(w, d), transposed(a, d)], c = Array.from(get("log_c"), Math.exp);
    const kernel = unitKernel(get("mixing.weight")), turned = kernel && turnKernel(kernel);
    const softplus = (x) => (4 * x > 20 ? x : Math.log1p(Math.exp(4 * x)) / 4); // within 0.17 of ReLU
    const pairs = (x, rows) => { // A x, and w_ij = 1/√(1 + c_h |A_h (x_i - x_j)|²), (h, rows, n)
      const n = x.length / d, q = linear(x, n, a, null), near = new Float32Array(heads * rows * n);
      for (let head = 0; head < heads; head++) for (let i = 0; i < rows; i++) for (let j = 0; j < n; j++) {
        let square = 0;
        for (let u = head * e; u < head * e + e; u++) square += (q[i * d + u] - q[j * d + u]) ** 2;
        near[(head * rows + i) * n + j] = 1 / Math.sqrt(1 + c[head] * square);
      }
      return { q, near };
    };
    return {
      F(x) {
        const n = x.length / d;
        let hidden = linear(x, n, w, null);
        if (kernel) hidden = mixNeighbours(hidden, kernel, patches);
        for (let i = 0; i < hidden.length; i++) hidden[i] = softplus(hidden[i] + bias[i % bias.length]);
        if (kernel) hidden = mixNeighbours(hidden, turned, patches);
        return scaled(linear(hidden, n, down, null), -scale);
      },
      G(x) {
        const n = x.length / d, { q, near } = pairs(x, n), pull = new Float32Array(n * d);
        for (let head = 0; head < heads; head++) for (let i = 0; i < n; i++) for (let j = 0; j < n; j++) {
          const share = near[(head * n + i) * n + j];
          for (let u = head * e; u < head * e + e; u++) pull[i * d + u] += share * (q[i * d + u] - q[j * d + u]);
        }
        return scaled(linear(pull, n, back, null), -scale / n);
      },
      map(x, rows) { // w with rows that sum to one
        const n = x.length / d, { near } = pairs(x, rows);
        for (let start = 0; start < near.length; start += n) {
          const row = near.subarray(start, start + n);
          scaled(row, 1 / row.reduce((sum, v) => sum + v, 0));
        }
        return near;
      },
    };
  },
};

// --- solvers: (field, x, h) → x one step later; field has F, G and drift = F + G, which count their calls ----------------

const heunStep = (f, x, h) => { const a = f(x), b = f(plus(x, h, a)); return plus(plus(x, h / 2, a), h / 2, b); };
const SOLVERS = {
  euler: (f, x, h) => plus(x, h, f.drift(x)),
  lie_trotter: (f, x, h) => { const y = plus(x, h, f.F(x)); return plus(y, h, f.G(y)); },
  strang: (f, x, h) => heunStep(f.F, heunStep(f.G, heunStep(f.F, x, h / 2), h), h / 2),
  heun: (f, x, h) => heunStep(f.drift, x, h),
  midpoint: (f, x, h) => plus(x, h, f.drift(plus(x, h / 2, f.drift(x)))),
  rk4: (f, x, h) => {
    const a = f.drift(x), b = f.drift(plus(x, h / 2, a)), c = f.drift(plus(x, h / 2, b)), d = f.drift(plus(x, h, c));
    return plus(plus(x, h / 6, a), h / 6, plus(plus(d, 2, b), 2, c));
  },
};

function gridSteps(steps, horizon, phases) { // [{phase, h, t}]: equal phases, each divided evenly into its steps
  const list = [], length = horizon / phases;
  for (let phase = 0; phase < phases; phase++) {
    const count = Math.floor(steps / phases) + (phase < steps % phases ? 1 : 0);
    for (let i = 0; i < count; i++) list.push({ phase, h: length / count, t: phase * length + (length * i) / count });
  }
  return list;
}

// --- embed, classify, run ----------------------------------------------------------------------------------------------

function tokenize({ config, get }, pixels) { // (S², c) → (patches, d)
  const { tokenizer, patch_size: patch, image_size: size } = config;
  if (tokenizer === "patch") return convolve(pixels, size, get, "tokenizer.projection", patch, 0);
  let x = pixels;
  for (let i = 0, side = size; side > size / patch; i++, side /= 2) { // every stage halves the side
    const name = `tokenizer.layers.${3 * i}`; // between two convolutions stand two layers without weights of their own
    if (tokenizer === "conv") x = convolve(i ? x.map(GELU) : x, side, get, name, 2, 1);
    else x = maxPool(convolve(x, side, get, name, 1, 1), side);
  }
  return x;
}

function embed(model, pixels) { // [CLS | patches | registers], normed behind a tower; registers have no position
  const { config, get } = model, d = config.hidden_size, patches = tokenize(model, pixels), registers = get("registers");
  const x = new Float32Array(d + patches.length + config.num_registers * d);
  x.set(get("cls_token"));
  x.set(patches, d);
  get("positions").forEach((position, i) => { x[i] += position; });
  if (registers) x.set(registers, d + patches.length);
  return normalise(x, config.embedding_norm, config.layer_norm_eps, get("embedding_norm.weight"), get("embedding_norm.bias"));
}

function features({ config, get }, x) { // (d): CLS, the mean or a learned weighting of the tokens, or all, after the final norm
  const { pool, hidden_size: d, num_registers } = config, n = pool === "cls" ? 1 : x.length / d - num_registers;
  const z = normalise(x.subarray(0, n * d), config.final_norm, config.layer_norm_eps, get("norm.weight"), get("norm.bias"));
  if (pool === "cls" || pool === "flatten") return z;
  const share = pool === "sequence" ? linear(z, n, get("pool.score.weight"), get("pool.score.bias")) : new Float32Array(n);
  softmaxRow(share, 0, n); // of zeros: a mean
  if (pool === "sqrt_mean") scaled(share, Math.sqrt(n));
  return Float32Array.from({ length: d }, (_, k) => share.reduce((sum, p, i) => sum + p * z[i * d + k], 0));
}

function readOut({ config, get }, z) { // what the linear head reads: the features, for a tower projected and of length one
  const u = config.projection_size ? linear(z, 1, get("projection.weight"), null) : z.slice();
  return config.unit_features ? scaled(u, 1 / Math.max(size(u), 1e-12)) : u;
}

function look(model, x, t, field) { // what the page shows of one state
  const { config, get, plane } = model, n = x.length / config.hidden_size, heads = config.num_attention_heads;
  const read = features(model, x), place = config.pool === "cls" ? x : read;
  const logits = linear(readOut(model, read), 1, get("classifier.weight"), get("classifier.bias"));
  const map = field.map(x, 1), head = map.length / heads;
  const attention = Array.from({ length: heads }, (_, h) => map.slice(h * head + 1, h * head + n - config.num_registers));
  const point = plane.axes.map((axis) => axis.reduce((sum, a, k) => sum + a * (place[k] - plane.mean[k]), 0));
  return { t, logits, attention, point };
}

// Scores that grow as an image arrives, from a step's logits and states before and after, as odevit.model.halting has them.
const size = (x) => Math.sqrt(x.reduce((sum, v) => sum + v * v, 0));
const SCORES = {
  margin: (step) => { const [first, second] = likeliest(step.logits); return first - second; },
  confidence: (step) => likeliest(step.logits)[0],
  change: (step) => -step.logits.reduce((most, z, k) => Math.max(most, Math.abs(z - step.logitsBefore[k])), 0),
  velocity: (step) => -size(step.state.map((v, k) => v - step.before[k])) / Math.max(size(step.state), 1e-38),
};

function likeliest(logits) { // the two largest probabilities
  const p = Float64Array.from(logits);
  softmaxRow(p, 0, p.length);
  p.sort();
  return [p.at(-1), p.at(-2)];
}

function run(model, pixels, { solver, steps, stop }) { // → {frames, evaluations, milliseconds, stopped}
  const { config } = model, count = { F: 0, G: 0 }, horizon = config.horizon;
  const parts = model.fields.map((field) => {
    const part = { F: (x) => { count.F++; return field.F(x); }, G: (x) => { count.G++; return field.G(x); } };
    part.drift = (x) => plus(part.F(x), 1, part.G(x));
    return part;
  });
  const began = performance.now();
  let x = embed(model, pixels), watching = 0, stopped = null;
  const frames = [], watch = (t, phase) => {
    const since = performance.now();
    frames.push(look(model, x, t, model.fields[phase]));
    watching += performance.now() - since;
  };
  const grid = gridSteps(steps, horizon, config.num_fields);
  watch(0, 0);
  for (const [i, { phase, h, t }] of grid.entries()) {
    const before = x;
    x = SOLVERS[solver](parts[phase], x, h);
    if (!x.every(Number.isFinite)) throw new Error(`The state is not finite after step ${i + 1} of ${steps}. Take more steps or another solver.`);
    watch(i + 1 < grid.length ? t + h : horizon, (grid[i + 1] ?? grid[i]).phase);
    if (!stop || i + 1 === grid.length) continue;
    const score = SCORES[stop.score]({ before, state: x, logitsBefore: frames[i].logits, logits: frames[i + 1].logits });
    if (score >= stop.threshold) { stopped = t + h; break; }
  }
  return { frames, evaluations: count, milliseconds: performance.now() - began - watching, stopped };
}

// --- the Worker's ear --------------------------------------------------------------------------------------------------

if (typeof WorkerGlobalScope !== "undefined") {
  let model = null;
  self.onmessage = ({ data }) => {
    if (data.payload) {
      model = loadModel(data.payload);
      const blank = new Float32Array(model.config.image_size ** 2 * model.config.num_channels);
      const until = performance.now() + 150; // so that what is timed has been compiled
      do run(model, blank, { solver: "euler", steps: model.config.num_fields }); while (performance.now() < until);
      return;
    }
    try {
      self.postMessage({ id: data.id, result: run(model, data.pixels, data.options) });
    } catch (error) {
      self.postMessage({ id: data.id, error: error.message });
    }
  };
}
