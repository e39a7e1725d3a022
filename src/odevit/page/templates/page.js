"use strict";
// The interface: an image goes in, a Worker runs flow.js on it, and every state of the flow is shown at its time.
for (const root of document.querySelectorAll(".live")) {
  const $ = (selector) => root.querySelector(selector);
  const payload = JSON.parse($(".payload").textContent), { config, classes, plane, teacher, examples } = payload;
  const side = config.image_size, channels = config.num_channels, horizon = config.horizon;
  const bright = payload.mean[0] < 0.5; // ink is bright on dark, as in most sets of digits
  const still = matchMedia("(prefers-reduced-motion: reduce)"), dark = matchMedia("(prefers-color-scheme: dark)");
  let image = null; // {pixels: Uint8Array (c, S, S), label, example, source} as the model sees it
  let strokes = []; // what was drawn: lists of [x, y] in 0…1
  let runs = [], time = horizon, playing = null, inverted = false, shown = [];

  const element = (tag, text, attributes = {}) => {
    const made = tag.startsWith("svg:") ? document.createElementNS("http://www.w3.org/2000/svg", tag.slice(4)) : document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    if (text != null) made.textContent = text; // texts stay texts, whatever a class is called
    return made;
  };
  const bytes = (base64) => Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
  const percent = (p) => `${(100 * p).toFixed(p > 0.9995 || p < 0.0005 ? 0 : 1)} %`;
  const say = (text) => { $(".status").textContent = text; };

  // --- the Worker: one question at a time, a newer one replaces those that wait ------------------------------------------

  const worker = new Worker(URL.createObjectURL(new Blob([$(".flow").textContent], { type: "text/javascript" })));
  const waiting = new Map();
  let asked = 0, busy = false, again = null;
  worker.onmessage = ({ data }) => {
    const [resolve, reject] = waiting.get(data.id);
    waiting.delete(data.id);
    if (data.error) reject(new Error(data.error)); else resolve(data.result);
  };
  worker.postMessage({ payload: { config, plane, weights: payload.weights, data: payload.data } });
  payload.data = null; // the Worker has it
  root.run = (pixels, options) => new Promise((resolve, reject) => { // pixels: (c, S, S) of 0…255
    const input = new Float32Array(side * side * channels); // (S², c), normalised
    for (let c = 0; c < channels; c++) for (let i = 0; i < side * side; i++)
      input[i * channels + c] = (pixels[c * side * side + i] / 255 - payload.mean[c]) / payload.std[c];
    waiting.set(++asked, [resolve, reject]);
    worker.postMessage({ id: asked, pixels: input, options });
  });

  async function compute(then = () => {}) {
    if (busy) { again = then; return; }
    busy = true;
    const stopAt = $(".adaptive").checked ? Number($(".threshold").value) : null;
    const wanted = [{ solver: $(".solver").value, steps: Number($(".steps").value), stopAt }];
    if ($(".other").value) wanted.push({ solver: $(".other").value, steps: Number($(".other-steps").value), stopAt: null });
    try {
      const results = [];
      for (const options of wanted) results.push({ ...(await root.run(image.pixels, options)), options });
      runs = results;
      chooseBars();
      drawCost();
      then();
      draw();
      report();
    } catch (error) {
      say(error.message);
    }
    busy = false;
    if (again) { const next = again; again = null; compute(next); }
  }

  // --- a run at a time: read off linearly between its steps ---------------------------------------------------------------

  function probabilities(logits) {
    const top = logits.reduce((a, b) => Math.max(a, b)), e = Array.from(logits, (z) => Math.exp(z - top)), sum = e.reduce((a, b) => a + b);
    return e.map((value) => value / sum);
  }

  function at(run, t) { // {step, logits, point, attention}
    const { frames } = run, last = frames.length - 1;
    let i = frames.findIndex((frame) => frame.t > t + 1e-9) - 1;
    if (i < 0) i = last;
    if (i === last) return { step: last, ...frames[last] };
    const a = frames[i], b = frames[i + 1], u = (t - a.t) / (b.t - a.t), mix = (p, q) => Array.from(p, (value, k) => value + u * (q[k] - value));
    return { step: i, logits: mix(a.logits, b.logits), point: mix(a.point, b.point), attention: a.attention.map((map, h) => mix(map, b.attention[h])) };
  }

  const best = (values) => values.indexOf(values.reduce((a, b) => Math.max(a, b)));

  function report() {
    const run = runs[0], p = probabilities(run.frames.at(-1).logits), answer = best(p);
    const truth = image.label == null ? "" : image.label === answer ? ", which is right" : `; the label is ${classes[image.label]}`;
    const early = run.stopped == null ? "" : ` It stopped at t = ${run.stopped.toFixed(2)}.`;
    say(`Answer: ${classes[answer]}, ${percent(p[answer])}${truth}.${early}${image.note ? ` ${image.note}` : ""}`);
  }

  // --- pictures -----------------------------------------------------------------------------------------------------------

  const theme = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const rgb = (hex) => [1, 3, 5].map((k) => parseInt(hex.slice(k, k + 2), 16));

  function tile(pixels) { // the image at its own size; of a drawing, ink on paper in the reader's theme
    const canvas = element("canvas", null, { width: side, height: side }), context = canvas.getContext("2d");
    const data = context.createImageData(side, side), ink = rgb(theme("--ink")), paper = rgb(theme("--pad")), area = side * side;
    for (let i = 0; i < area; i++) {
      const level = (bright ? pixels[i] : 255 - pixels[i]) / 255;
      for (let c = 0; c < 3; c++)
        data.data[4 * i + c] = payload.drawable ? paper[c] + level * (ink[c] - paper[c]) : pixels[(channels === 3 ? c : 0) * area + i];
      data.data[4 * i + 3] = 255;
    }
    context.putImageData(data, 0, 0);
    return canvas;
  }

  function paint(canvas, picture) {
    const context = canvas.getContext("2d");
    context.imageSmoothingEnabled = side > 64;
    context.drawImage(picture, 0, 0, canvas.width, canvas.height);
    return context;
  }

  function drawPad() {
    const canvas = $(".picture"), size = canvas.width;
    $(".invite").textContent = payload.drawable && !strokes.length && image.source !== "file" ? "draw here" : "";
    canvas.setAttribute("aria-label", strokes.length ? "Your drawing" : image.label == null ? "Your image" : `Example: ${classes[image.label]}`);
    if (!strokes.length) { paint(canvas, tile(image.pixels)); return; }
    const context = canvas.getContext("2d");
    context.fillStyle = theme("--pad");
    context.fillRect(0, 0, size, size);
    trace(context, strokes.map((stroke) => stroke.map(([x, y]) => [x * size, y * size])), size / 11, theme("--ink"));
  }

  function trace(context, lines, width, colour) {
    Object.assign(context, { lineWidth: width, lineCap: "round", lineJoin: "round", strokeStyle: colour });
    for (const line of lines) {
      context.beginPath();
      line.forEach(([x, y], i) => (i ? context.lineTo(x, y) : context.moveTo(x, y)));
      if (line.length === 1) context.lineTo(line[0][0] + 0.01, line[0][1]);
      context.stroke();
    }
  }

  function drawHeads(state) {
    const picture = tile(image.pixels), accent = rgb(theme("--accent")), grid = side / config.patch_size;
    root.querySelectorAll(".heads canvas").forEach((canvas, head) => {
      const context = paint(canvas, picture), map = state.attention[head], top = map.reduce((a, b) => Math.max(a, b)), cell = canvas.width / grid;
      map.forEach((share, i) => {
        context.fillStyle = `rgba(${accent.join()},${(0.78 * share) / top})`;
        context.fillRect((i % grid) * cell, Math.floor(i / grid) * cell, cell, cell);
      });
    });
  }

  // --- the plane of the class means ----------------------------------------------------------------------------------------

  function drawPlane() {
    const svg = $(".plane svg"), paths = runs.map((run) => run.frames.map((frame) => frame.point)), width = 340, height = 300;
    const lesson = teacher && image.example != null ? teacher.paths[image.example] : null;
    const points = [...plane.classes.map(([, x, y]) => [x, y]), ...paths.flat(), ...(lesson || [])];
    const [low, high] = [Math.min, Math.max].map((pick) => [0, 1].map((k) => points.reduce((a, p) => pick(a, p[k]), points[0][k])));
    const scale = Math.min((width - 56) / (high[0] - low[0] || 1), (height - 40) / (high[1] - low[1] || 1));
    const place = (p) => [width / 2 + (p[0] - (low[0] + high[0]) / 2) * scale, height / 2 - (p[1] - (low[1] + high[1]) / 2) * scale];
    const line = (list, kind) => element("svg:polyline", null, { class: kind, points: list.map((p) => place(p).map((v) => v.toFixed(1)).join()).join(" ") });
    const dot = (p, radius, kind) => { const [cx, cy] = place(p); return element("svg:circle", null, { class: kind, cx, cy, r: radius }); };
    const now = at(runs[0], time), p = probabilities(now.logits), answer = best(p);
    const named = new Set(plane.classes.length <= 12 ? classes.keys() : shown);
    svg.replaceChildren();
    for (const [label, x, y] of plane.classes) {
      svg.append(dot([x, y], 3, label === answer ? "mean chosen" : "mean"));
      if (!named.has(label)) continue;
      const [left, top] = place([x, y]), end = left > width - 60;
      svg.append(element("svg:text", classes[label].slice(0, 16), { x: left + (end ? -7 : 7), y: top + 4, "text-anchor": end ? "end" : "start", class: label === answer ? "chosen" : "" }));
    }
    if (lesson) svg.append(line(lesson, "teacher"), ...lesson.slice(1).map((q) => dot(q, 2, "teacher")));
    paths.forEach((path, r) => svg.append(line(path, r ? "beside" : "path"), ...path.map((q) => dot(q, 2.2, r ? "beside" : "step"))));
    svg.append(dot(paths[0][0], 4.5, "start"));
    runs.slice(1).forEach((run) => svg.append(dot(at(run, time).point, 5, "beside now")));
    svg.append(dot(now.point, 6.5, "now"));
    svg.setAttribute("aria-label", `Path of CLS among the class means; at this time it answers ${classes[answer]}`);
    const kinds = [["path", runs[0].options.solver], ...(runs[1] ? [["beside", runs[1].options.solver]] : []), ...(lesson ? [["teacher", "teacher"]] : [])];
    $(".legend").replaceChildren(...kinds.map(([kind, name]) => { const item = element("span", name.replace("_", "–"), { class: kind }); return item; }));
  }

  // --- bars, clock, cost ----------------------------------------------------------------------------------------------------

  function chooseBars() { // every class, or the ten likeliest at the end
    const p = runs.map((run) => probabilities(run.frames.at(-1).logits)), most = classes.map((_, k) => Math.max(...p.map((q) => q[k])));
    const next = classes.length <= 12 ? [...classes.keys()] : [...classes.keys()].sort((a, b) => most[b] - most[a]).slice(0, 10);
    const kinds = runs.map((_, r) => (r ? "beside" : "path"));
    if (String(next) === String(shown) && $(".bars i")?.childElementCount === kinds.length) return;
    shown = next;
    $(".bars").replaceChildren(...shown.map((label) => {
      const row = element("li"), track = element("i");
      track.append(...kinds.map((kind) => element("b", null, { class: kind })));
      row.append(element("span", classes[label], { title: classes[label] }), track, element("em"));
      return row;
    }));
  }

  function drawBars() {
    const p = runs.map((run) => probabilities(at(run, time).logits)), answer = best(p[0]);
    [...$(".bars").children].forEach((row, i) => {
      row.querySelectorAll("b").forEach((bar, r) => { bar.style.width = `${100 * p[r][shown[i]]}%`; });
      row.querySelector("em").textContent = percent(p[0][shown[i]]);
      row.classList.toggle("chosen", shown[i] === answer);
    });
  }

  function drawClock() {
    const run = runs[0], { step } = at(run, time), slider = $(".slider");
    const halted = run.stopped != null && time >= run.stopped - 1e-9;
    slider.value = time;
    const text = `t = ${time.toFixed(2)}, step ${step} of ${run.options.steps}${halted ? ", stopped" : ""}`;
    $(".clock").textContent = text;
    slider.setAttribute("aria-valuetext", text);
    slider.style.setProperty("--done", `${(100 * time) / horizon}%`);
    slider.style.setProperty("--stop", run.stopped == null ? "200%" : `${(100 * run.stopped) / horizon}%`);
  }

  function drawCost() {
    const columns = runs.map((run) => {
      const p = probabilities(run.frames.at(-1).logits), answer = best(p), { F, G } = run.evaluations;
      const stop = run.options.stopAt == null ? "no early stop" : run.stopped == null ? "ran to the end" : `t = ${run.stopped.toFixed(2)}, step ${run.frames.length - 1} of ${run.options.steps}`;
      return [`${run.options.solver.replace("_", "–")}, ${run.options.steps} steps`, `${classes[answer]}, ${percent(p[answer])}`, F === G ? `${F}` : `${F} of F, ${G} of G`, run.milliseconds.toFixed(1), stop];
    });
    const rows = ["", "Answer", "Evaluations", "Milliseconds", "Stopped"].map((name, i) => {
      const row = element("tr");
      row.append(element(i ? "th" : "td", name, i ? { scope: "row" } : {}), ...columns.map((column) => element(i ? "td" : "th", column[i], i ? {} : { scope: "col" })));
      return row;
    });
    $(".cost thead").replaceChildren(rows[0]);
    $(".cost tbody").replaceChildren(...rows.slice(1));
  }

  function draw() { drawPad(); drawPlane(); drawBars(); drawClock(); drawHeads(at(runs[0], time)); }
  function show(t) { time = Math.min(Math.max(t, 0), horizon); if (runs.length) { drawPlane(); drawBars(); drawClock(); drawHeads(at(runs[0], time)); } }

  // --- time -------------------------------------------------------------------------------------------------------------------

  function pause() {
    cancelAnimationFrame(playing);
    playing = null;
    $(".play").textContent = "▶";
    $(".play").setAttribute("aria-label", "Play");
  }
  function play() {
    pause();
    if (still.matches) { show(horizon); return; }
    $(".play").textContent = "❚❚";
    $(".play").setAttribute("aria-label", "Pause");
    const from = time >= horizon ? 0 : time;
    let start = null;
    const tick = (now) => {
      start ??= now;
      show(from + ((now - start) / 2600) * horizon);
      if (time < horizon) playing = requestAnimationFrame(tick); else pause();
    };
    show(from);
    playing = requestAnimationFrame(tick);
  }
  $(".play").onclick = () => (playing === null ? play() : pause());
  $(".slider").max = horizon;
  $(".slider").oninput = (event) => { pause(); show(Number(event.target.value)); };
  $(".slider").onkeydown = (event) => { // arrow keys go from step to step
    const way = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1 }[event.key];
    if (!way || !runs.length) return;
    event.preventDefault();
    pause();
    const times = [...runs[0].frames.map((frame) => frame.t), horizon];
    show(way > 0 ? times.find((t) => t > time + 1e-6) ?? horizon : times.findLast((t) => t < time - 1e-6) ?? 0);
  };

  // --- images: examples, files, the clipboard, drawing --------------------------------------------------------------------------

  function take(next, then = play) {
    if (next.source !== "drawing") strokes = [];
    image = next;
    inverted = false;
    $(".invert").setAttribute("aria-pressed", "false");
    $(".clear").hidden = !payload.drawable;
    root.querySelectorAll(".examples button").forEach((button, i) => button.setAttribute("aria-pressed", String(i === next.example)));
    pause();
    compute(then);
  }

  examples.forEach((example, i) => {
    const pixels = bytes(example.pixels), button = element("button", null, { type: "button", "aria-label": `Example: ${classes[example.label]}`, "aria-pressed": "false" });
    const canvas = element("canvas", null, { width: Math.max(side, 32), height: Math.max(side, 32) });
    button.append(canvas);
    button.onclick = () => take({ pixels, label: example.label, example: i, source: "example" }, () => { time = still.matches ? horizon : 0; play(); });
    button.redraw = () => paint(canvas, tile(pixels));
    button.redraw();
    $(".examples").append(button);
  });

  async function open(file) {
    if (!file) return;
    try {
      if (file.size > 64e6) throw new Error("too large");
      const bitmap = await createImageBitmap(file), cut = Math.min(bitmap.width, bitmap.height);
      let canvas = element("canvas"), context = null;
      for (let size = Math.min(2 ** Math.ceil(Math.log2(side / cut) - 1) * cut, 2048), from = bitmap; ; size = Math.max(side, size / 2)) {
        size = Math.max(side, Math.round(size)); // halving keeps every pixel's say
        const next = element("canvas", null, { width: size, height: size }), crop = from === bitmap ? [(bitmap.width - cut) / 2, (bitmap.height - cut) / 2, cut, cut] : [0, 0, from.width, from.height];
        context = next.getContext("2d");
        context.fillStyle = "#fff";
        context.fillRect(0, 0, size, size);
        context.imageSmoothingQuality = "high";
        context.drawImage(from, ...crop, 0, 0, size, size);
        from = canvas = next;
        if (size === side) break;
      }
      const { data } = context.getImageData(0, 0, side, side), area = side * side, pixels = new Uint8Array(area * channels);
      for (let i = 0; i < area; i++) {
        const [r, g, b] = data.subarray(4 * i, 4 * i + 3);
        if (channels === 3) [pixels[i], pixels[area + i], pixels[2 * area + i]] = [r, g, b];
        else pixels.fill(Math.round(0.299 * r + 0.587 * g + 0.114 * b), i, i + 1); // luma, as PIL's "L"
      }
      const edge = Array.from({ length: side }, (_, i) => [pixels[i], pixels[area - 1 - i], pixels[i * side], pixels[i * side + side - 1]]).flat();
      const flip = payload.drawable && edge.reduce((a, b) => a + b) / edge.length > 127.5 === bright;
      take({ pixels: flip ? pixels.map((v) => 255 - v) : pixels, source: "file", note: flip ? "The image was inverted, as this model knows its digits." : "" }, () => { time = 0; play(); });
    } catch {
      say("This file is no image that the browser can read.");
    }
  }

  $("input[type=file]").onchange = (event) => { open(event.target.files[0]); event.target.value = ""; };
  root.addEventListener("dragover", (event) => { event.preventDefault(); root.classList.add("over"); });
  root.addEventListener("dragleave", () => root.classList.remove("over"));
  root.addEventListener("drop", (event) => { event.preventDefault(); root.classList.remove("over"); open(event.dataTransfer.files[0]); });
  document.addEventListener("paste", (event) => open([...event.clipboardData.files].find((file) => file.type.startsWith("image/"))));

  function rasterise() { // strokes fill the box as the digits of the training set do, whatever their size and place
    const fine = 16, size = side * fine, brush = size / 8, canvas = element("canvas", null, { width: size, height: size });
    const context = canvas.getContext("2d", { willReadFrequently: true }), points = strokes.flat();
    const [low, high] = [Math.min, Math.max].map((pick) => [0, 1].map((k) => points.reduce((a, p) => pick(a, p[k]), points[0][k])));
    const scale = (size - brush) / Math.max(high[0] - low[0], high[1] - low[1], 0.1), middle = [0, 1].map((k) => (low[k] + high[k]) / 2);
    trace(context, strokes.map((stroke) => stroke.map((p) => p.map((v, k) => size / 2 + (v - middle[k]) * scale))), brush, "#000");
    const { data } = context.getImageData(0, 0, size, size), sums = new Float64Array(side * side);
    for (let y = 0; y < size; y++) for (let x = 0; x < size; x++) sums[Math.floor(y / fine) * side + Math.floor(x / fine)] += data[4 * (y * size + x) + 3];
    return Uint8Array.from(sums, (sum) => { const level = Math.round(sum / fine ** 2); return bright ? level : 255 - level; });
  }

  if (payload.drawable) {
    const pad = $(".picture");
    const where = (event) => { const box = pad.getBoundingClientRect(); return [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height]; };
    const update = () => take({ pixels: rasterise(), source: "drawing" }, () => { time = horizon; });
    pad.classList.add("drawable");
    pad.onpointerdown = (event) => {
      event.preventDefault();
      pad.setPointerCapture(event.pointerId);
      strokes.push([where(event)]);
      update();
      drawPad();
    };
    pad.onpointermove = (event) => {
      if (!pad.hasPointerCapture(event.pointerId)) return;
      for (const part of event.getCoalescedEvents?.() ?? [event]) strokes.at(-1).push(where(part));
      update();
      drawPad();
    };
    pad.onpointerup = () => compute(() => { time = still.matches ? horizon : 0; play(); });
    $(".clear").hidden = false;
    $(".clear").onclick = () => {
      strokes = [];
      take({ pixels: new Uint8Array(side * side).fill(bright ? 0 : 255), source: "drawing" }, () => { time = horizon; });
    };
    $(".invert").hidden = false;
  }
  $(".invert").onclick = () => {
    image = { ...image, pixels: image.pixels.map((v) => 255 - v) };
    inverted = !inverted;
    strokes = [];
    $(".invert").setAttribute("aria-pressed", String(inverted));
    compute();
  };

  // --- controls --------------------------------------------------------------------------------------------------------------------

  const label = (name) => `${name.replace("_", "–")} (order ${payload.solvers[name].order})`;
  for (const name of Object.keys(payload.solvers)) {
    $(".solver").append(element("option", label(name), { value: name }));
    $(".other").append(element("option", label(name), { value: name }));
  }
  $(".other").prepend(element("option", "nothing", { value: "" }));
  $(".solver").value = config.solver;
  $(".other").value = "";
  for (const [solver, steps, count] of [[".solver", ".steps", ".count"], [".other", ".other-steps", ".other-count"]]) {
    const bound = () => { // as many steps as the browser computes in about two seconds
      const cost = payload.limits.step_macs * (payload.solvers[$(solver).value]?.F ?? 1);
      $(steps).min = config.num_fields;
      $(steps).max = Math.max(config.num_fields, Math.min(payload.limits.steps, Math.floor(payload.limits.macs / cost)));
      $(count).textContent = $(steps).value;
    };
    bound();
    $(steps).value = config.num_steps;
    $(solver).onchange = () => { bound(); $(".beside").hidden = !$(".other").value; compute(); };
    $(steps).oninput = () => { bound(); compute(); };
    bound();
  }
  const lead = () => { $(".lead").textContent = percent(Number($(".threshold").value)); };
  if (payload.halting?.threshold) $(".threshold").value = payload.halting.threshold;
  lead();
  $(".adaptive").onchange = () => { $(".sure").hidden = !$(".adaptive").checked; compute(); };
  $(".threshold").oninput = () => { lead(); compute(); };
  for (let head = 0; head < config.num_attention_heads; head++) {
    const figure = element("figure");
    figure.append(element("canvas", null, { width: 160, height: 160, role: "img", "aria-label": `Attention of CLS in head ${head + 1}` }), element("figcaption", `head ${head + 1}`));
    $(".heads").append(figure);
  }
  dark.addEventListener("change", () => { root.querySelectorAll(".examples button").forEach((button) => button.redraw()); if (runs.length) draw(); });

  if (examples.length) $(".examples button").click();
  else take({ pixels: Uint8Array.from({ length: channels * side * side }, (_, i) => 255 * payload.mean[Math.floor(i / side ** 2)]), source: "file" });
}
