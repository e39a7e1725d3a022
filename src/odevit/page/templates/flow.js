"use strict";
// The forward pass of an ODE-ViT: embed, evolve, classify. The same mathematics as odevit.model, checked against it.
// States are Float32Arrays, token by token: (n, d) with tokens [CLS | patches | registers]. Runs in a Worker (see the end).

// --- weights -----------------------------------------------------------------------------------------------------------

function halfPrecision(base64) { // IEEE 754 half-precision numbers → Float32Array
  const text = atob(base64), bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return Float32Array.from(new Uint16Array(bytes.buffer), (bits) => {
    const exponent = (bits >> 10) & 31, fraction = bits & 1023;
    return (bits >> 15 ? -1 : 1) * (exponent ? 2 ** (exponent - 25) * (1024 + fraction) : 2 ** -24 * fraction);
  });
}

function loadModel(payload) { // {config, weights: {name: [start, length]}, data: base64} → {config, get(name)}
  const numbers = halfPrecision(payload.data);
  const get = (name) => {
    const at = payload.weights[name];
    return at ? numbers.subarray(at[0], at[0] + at[1]) : null;
  };
  const model = { config: payload.config, get, halting: payload.halting, plane: payload.plane };
  model.fields = Array.from({ length: payload.config.num_fields }, (_, i) => fieldWeights(model, `fields.${i}.`));
  return model;
}

// --- layers ------------------------------------------------------------------------------------------------------------

function linear(x, n, weight, bias) { // (n, in) · (out, in)ᵀ + bias → (n, out); four tokens at a time share each weight
  const wide = x.length / n, out = weight.length / wide, y = new Float32Array(n * out);
  for (let i = 0; i < n; i += 4) {
    const a = i * wide, b = Math.min(i + 1, n - 1) * wide, c = Math.min(i + 2, n - 1) * wide, d = Math.min(i + 3, n - 1) * wide;
    for (let o = 0; o < out; o++) {
      let p = bias ? bias[o] : 0, q = p, r = p, s = p;
      for (let k = 0, w = o * wide; k < wide; k++, w++) {
        const v = weight[w];
        p += x[a + k] * v; q += x[b + k] * v; r += x[c + k] * v; s += x[d + k] * v;
      }
      y[i * out + o] = p;
      if (i + 1 < n) y[(i + 1) * out + o] = q;
      if (i + 2 < n) y[(i + 2) * out + o] = r;
      if (i + 3 < n) y[(i + 3) * out + o] = s;
    }
  }
  return y;
}

function normalise(x, kind, eps, gain, shift) { // token by token: CenterNorm, LayerNorm or nothing
  if (kind === "none") return x;
  const d = gain.length, y = new Float32Array(x.length);
  for (let start = 0; start < x.length; start += d) {
    let mean = 0, square = 0;
    for (let k = 0; k < d; k++) mean += x[start + k] / d;
    for (let k = 0; k < d; k++) square += (x[start + k] - mean) ** 2 / d;
    const scale = kind === "center" ? d / (d - 1) : 1 / Math.sqrt(square + eps);
    for (let k = 0; k < d; k++) y[start + k] = (x[start + k] - mean) * scale * gain[k] + shift[k];
  }
  return y;
}

const GELU = (() => { // x · Φ(x) on a fine table, read off linearly: error below 2e-8
  const range = 6, cells = 32768, table = new Float64Array(cells + 1);
  const erf = (z) => { // a series without cancellation: 2/√π e^(-z²) Σ 2ⁿ z^(2n+1) / (1·3·5 … (2n+1))
    let term = z, sum = z;
    for (let n = 1; Math.abs(term) > 1e-17 * Math.abs(sum); n++) sum += term *= (2 * z * z) / (2 * n + 1);
    return (2 / Math.sqrt(Math.PI)) * Math.exp(-z * z) * sum;
  };
  for (let i = 0; i <= cells; i++) {
    const x = (2 * range * i) / cells - range;
    table[i] = (x * (1 + erf(x / Math.SQRT2))) / 2;
  }
  return (x) => {
    if (!(x > -range)) return x <= -range ? 0 : x; // NaN stays NaN
    if (x >= range) return x;
    const at = ((x + range) / (2 * range)) * cells, i = Math.min(Math.floor(at), cells - 1);
    return table[i] + (at - i) * (table[i + 1] - table[i]);
  };
})();

function softmaxRow(p, start, length) {
  let top = -Infinity, sum = 0;
  for (let j = start; j < start + length; j++) top = Math.max(top, p[j]);
  for (let j = start; j < start + length; j++) sum += p[j] = Math.exp(p[j] - top);
  for (let j = start; j < start + length; j++) p[j] /= sum;
}

function attentionMap(field, z, n, rows) { // normed tokens → map (h, rows, n); rows = 1 asks for that of CLS alone
  const { heads, d, kind } = field, e = d / heads, scale = 1 / Math.sqrt(e), l2 = kind === "l2";
  if (kind === "sinkhorn") rows = n; // its columns need every row
  const q = linear(z.subarray(0, (l2 ? n : rows) * d), l2 ? n : rows, field.query, field.queryBias);
  const k = l2 ? q : linear(z, n, field.key, field.keyBias), p = new Float32Array(heads * rows * n);
  for (let head = 0; head < heads; head++) {
    for (let i = 0; i < rows; i++) {
      const start = (head * rows + i) * n;
      for (let j = 0; j < n; j++) {
        let dot = 0, length = 0;
        for (let u = head * e; u < head * e + e; u++) {
          dot += q[i * d + u] * k[j * d + u];
          length += k[j * d + u] ** 2;
        }
        p[start + j] = l2 ? scale * (2 * dot - length) : scale * dot; // L2: the row's own |q_i|² cancels
      }
      if (kind !== "sinkhorn") softmaxRow(p, start, n);
    }
    if (kind === "sinkhorn") sinkhorn(p.subarray(head * n * n, (head + 1) * n * n), n);
  }
  return p;
}

function sinkhorn(p, n) { // five normalisations in the logarithm: rows, columns, …, rows
  for (let turn = 0; turn < 5; turn++) {
    const [row, step] = turn % 2 ? [1, n] : [n, 1];
    for (let i = 0; i < n; i++) {
      let top = -Infinity, sum = 0;
      for (let j = 0; j < n; j++) top = Math.max(top, p[i * row + j * step]);
      for (let j = 0; j < n; j++) sum += Math.exp(p[i * row + j * step] - top);
      for (let j = 0; j < n; j++) p[i * row + j * step] -= top + Math.log(sum);
    }
  }
  for (let i = 0; i < n * n; i++) p[i] = Math.exp(p[i]);
}

// --- the field ---------------------------------------------------------------------------------------------------------

function fieldWeights(model, prefix) {
  const { config, get } = model, heads = config.num_attention_heads, d = config.hidden_size;
  const field = { heads, d, kind: config.attention, norm: config.norm, eps: config.layer_norm_eps };
  for (const name of ["query", "key", "value", "out"]) {
    field[name] = get(`${prefix}attention.${name}.weight`);
    field[`${name}Bias`] = get(`${prefix}attention.${name}.bias`);
  }
  for (const name of ["mlp.w1", "mlp.w2", "norm_f", "norm_g"]) {
    field[name] = { weight: get(`${prefix}${name}.weight`), bias: get(`${prefix}${name}.bias`) };
  }
  field.mixing = get(`${prefix}mlp.mixing.weight`);
  field.patches = (config.image_size / config.patch_size) ** 2;
  field.damping = config.damping;
  field.scale = config.depth / config.horizon;
  return field;
}

function F(field, x) { // s · (W2 GELU(C W1 norm(X)) − ρ X), C the identity or a mixing of neighbouring patches
  const n = x.length / field.d;
  let hidden = linear(normed(field, "norm_f", x), n, field["mlp.w1"].weight, field["mlp.w1"].bias);
  if (field.mixing) hidden = mixNeighbours(hidden, field.mixing, field.patches);
  for (let i = 0; i < hidden.length; i++) hidden[i] = GELU(hidden[i]);
  const y = linear(hidden, n, field["mlp.w2"].weight, field["mlp.w2"].bias);
  for (let i = 0; field.damping && i < y.length; i++) y[i] -= field.damping * x[i];
  return scaled(y, field.scale);
}

function mixNeighbours(x, kernel, patches) { // 3×3, each channel by itself, on the patches alone; zero outside the grid
  const channels = kernel.length / 9, side = Math.sqrt(patches), y = Float32Array.from(x);
  for (let row = 0; row < side; row++) for (let column = 0; column < side; column++) for (let c = 0; c < channels; c++) {
    let sum = 0;
    for (let u = -1; u <= 1; u++) for (let v = -1; v <= 1; v++) {
      const inside = row + u >= 0 && row + u < side && column + v >= 0 && column + v < side;
      if (inside) sum += kernel[c * 9 + (u + 1) * 3 + v + 1] * x[(1 + (row + u) * side + column + v) * channels + c];
    }
    y[(1 + row * side + column) * channels + c] = sum;
  }
  return y;
}

function G(field, x) { // s · MHSA(norm(X))
  const { heads, d } = field, n = x.length / d, e = d / heads, z = normed(field, "norm_g", x);
  const p = attentionMap(field, z, n, n), v = values(field, z, n), mixed = new Float32Array(n * d);
  for (let head = 0; head < heads; head++) {
    for (let i = 0; i < n; i++) {
      for (let j = 0; j < n; j++) {
        const share = p[(head * n + i) * n + j];
        for (let u = head * e; u < head * e + e; u++) mixed[i * d + u] += share * v[j * d + u];
      }
    }
  }
  return scaled(linear(mixed, n, field.out, field.outBias), field.scale);
}

function values(field, z, n) { // (n, d); in L2 attention head h passes on X A_h Wv_h, A_h = Wq_h Wq_hᵀ / √e
  if (field.kind !== "l2") return linear(z, n, field.value, field.valueBias);
  const { heads, d } = field, e = d / heads, q = linear(z, n, field.query, null), v = new Float32Array(n * d);
  for (let head = 0; head < heads; head++) {
    const part = (w) => w.subarray(head * e * d, (head + 1) * e * d); // (e, d)
    const between = linear(part(field.value), e, part(field.query), null); // (e, e): Wv_h Wq_hᵀ
    const own = Float32Array.from({ length: n * e }, (_, i) => q[Math.floor(i / e) * d + head * e + (i % e)]);
    const passed = linear(own, n, between, null);
    for (let i = 0; i < n * e; i++) v[Math.floor(i / e) * d + head * e + (i % e)] = passed[i] / Math.sqrt(e);
  }
  return v;
}

const normed = (field, name, x) => normalise(x, field.norm, field.eps, field[name].weight, field[name].bias);
const scaled = (x, s) => { for (let i = 0; i < x.length; i++) x[i] *= s; return x; };
const plus = (x, h, y) => { const z = new Float32Array(x.length); for (let i = 0; i < x.length; i++) z[i] = x[i] + h * y[i]; return z; };

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

function convolve(x, side, get, name, stride, pad) { // (side², c) → (new side², out), as one matrix product
  const weight = get(`${name}.weight`), bias = get(`${name}.bias`), channels = x.length / side ** 2;
  const size = pad ? 3 : stride, next = Math.floor((side + 2 * pad - size) / stride) + 1;
  const columns = new Float32Array(next * next * channels * size * size);
  for (let r = 0, to = 0; r < next; r++) for (let s = 0; s < next; s++) for (let c = 0; c < channels; c++)
    for (let u = 0; u < size; u++) for (let v = 0; v < size; v++, to++) {
      const row = r * stride + u - pad, column = s * stride + v - pad;
      if (row >= 0 && row < side && column >= 0 && column < side) columns[to] = x[(row * side + column) * channels + c];
    }
  return linear(columns, next * next, weight, bias);
}

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

function maxPool(x, side) { // ReLU, then the largest of 3×3 at every second place: (side², c) → (side²/4, c)
  const channels = x.length / side ** 2, next = side / 2, y = new Float32Array(next * next * channels);
  for (let row = 0; row < side; row++) for (let column = 0; column < side; column++) for (let c = 0; c < channels; c++)
    for (let r = Math.floor(row / 2); r <= Math.min((row + 1) >> 1, next - 1); r++)
      for (let s = Math.floor(column / 2); s <= Math.min((column + 1) >> 1, next - 1); s++) {
        const to = (r * next + s) * channels + c;
        y[to] = Math.max(y[to], x[(row * side + column) * channels + c]);
      }
  return y;
}

function embed(model, pixels) { // [CLS | patches | registers]; registers have no position
  const { config, get } = model, d = config.hidden_size, patches = tokenize(model, pixels), registers = get("registers");
  const x = new Float32Array(d + patches.length + config.num_registers * d);
  x.set(get("cls_token"));
  x.set(patches, d);
  get("positions").forEach((position, i) => { x[i] += position; });
  if (registers) x.set(registers, d + patches.length);
  return x;
}

function readOut({ config, get }, x) { // what the linear head reads (d): CLS, the mean or a learned weighting of the tokens
  const { pool, hidden_size: d, num_registers } = config, n = pool === "cls" ? 1 : x.length / d - num_registers;
  const z = normalise(x.subarray(0, n * d), config.final_norm, config.layer_norm_eps, get("norm.weight"), get("norm.bias"));
  if (pool === "cls") return z;
  const share = pool === "sequence" ? linear(z, n, get("pool.score.weight"), get("pool.score.bias")) : new Float32Array(n);
  softmaxRow(share, 0, n); // of zeros: a mean
  if (pool === "sqrt_mean") scaled(share, Math.sqrt(n));
  return Float32Array.from({ length: d }, (_, k) => share.reduce((sum, p, i) => sum + p * z[i * d + k], 0));
}

function look(model, x, t, field) { // what the page shows of one state
  const { config, get, plane } = model, d = config.hidden_size, n = x.length / d, read = readOut(model, x);
  const logits = linear(read, 1, get("classifier.weight"), get("classifier.bias")), place = config.pool === "cls" ? x : read;
  const map = attentionMap(field, normed(field, "norm_g", x), n, 1), rows = map.length / field.heads / n;
  const attention = Array.from({ length: field.heads }, (_, head) => map.slice(head * rows * n + 1, head * rows * n + n - config.num_registers));
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
    const part = { F: (x) => { count.F++; return F(field, x); }, G: (x) => { count.G++; return G(field, x); } };
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
