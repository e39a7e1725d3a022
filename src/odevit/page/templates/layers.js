"use strict";
// What flow.js is made of: matrix products, norms, attention maps, convolutions. No layer knows the model.
// Arrays are Float32Arrays, token by token: (n, d).

function halfPrecision(base64) { // IEEE 754 half-precision numbers → Float32Array
  const text = atob(base64), bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return Float32Array.from(new Uint16Array(bytes.buffer), (bits) => {
    const exponent = (bits >> 10) & 31, fraction = bits & 1023;
    return (bits >> 15 ? -1 : 1) * (exponent ? 2 ** (exponent - 25) * (1024 + fraction) : 2 ** -24 * fraction);
  });
}

const scaled = (x, s) => { for (let i = 0; i < x.length; i++) x[i] *= s; return x; };
const plus = (x, h, y) => { const z = new Float32Array(x.length); for (let i = 0; i < x.length; i++) z[i] = x[i] + h * y[i]; return z; };
const transposed = (w, columns) => Float32Array.from(w, (_, i) => w[(i % (w.length / columns)) * columns + Math.floor(i / (w.length / columns))]);

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

// --- attention -----------------------------------------------------------------------------------------------------------

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

// --- convolutions --------------------------------------------------------------------------------------------------------

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

// A contractive field divides each kernel by its ℓ₁ norm where that is above one; the transposed convolution has it turned round.
const sums = (kernel) => Float64Array.from({ length: kernel.length / 9 }, (_, c) => kernel.slice(9 * c, 9 * c + 9).reduce((sum, v) => sum + Math.abs(v), 0));
function unitKernel(kernel) {
  if (!kernel) return null;
  const norm = sums(kernel);
  return kernel.map((v, i) => v / Math.max(1, norm[Math.floor(i / 9)]));
}
const turnKernel = (kernel) => kernel.map((_, i) => kernel[9 * Math.floor(i / 9) + 8 - (i % 9)]);
