// What is seen of a run at a time: the image, the path in the plane, the bars, the heads, the cost.

function element(tag, text, attributes = {}) { // texts stay texts, whatever a class is called
  const svg = tag.startsWith("svg:");
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag.slice(4)) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text != null) made.textContent = text;
  return made;
}

const percent = (p) => `${(100 * p).toFixed(p > 0.9995 || p < 0.0005 ? 0 : 1)} %`;
const spoken = (solver) => solver.replace("_", "–");
const largest = (values) => values.reduce((a, b) => Math.max(a, b));
const best = (values) => values.indexOf(largest(values));

function probabilities(logits) {
  const top = largest(logits), e = Array.from(logits, (z) => Math.exp(z - top)), sum = e.reduce((a, b) => a + b);
  return e.map((value) => value / sum);
}

function at(run, t) { // the state of a run at a time, read off linearly between its steps
  const { frames } = run, last = frames.length - 1, next = frames.findIndex((frame) => frame.t > t + 1e-9);
  if (next <= 0) return { step: last, ...frames[last] };
  const a = frames[next - 1], b = frames[next], u = (t - a.t) / (b.t - a.t);
  const mix = (p, q) => Array.from(p, (value, k) => value + u * (q[k] - value));
  const attention = a.attention.map((map, head) => mix(map, b.attention[head]));
  return { step: next - 1, logits: mix(a.logits, b.logits), point: mix(a.point, b.point), attention };
}

function trace(context, lines, width, colour) { // strokes of a pen; lines: lists of [x, y]
  Object.assign(context, { lineWidth: width, lineCap: "round", lineJoin: "round", strokeStyle: colour });
  for (const line of lines) {
    context.beginPath();
    line.forEach(([x, y], i) => (i ? context.lineTo(x, y) : context.moveTo(x, y)));
    if (line.length === 1) context.lineTo(line[0][0] + 0.01, line[0][1]);
    context.stroke();
  }
}

function makePictures(root, payload) {
  const $ = (selector) => root.querySelector(selector), { config, classes, plane, teacher } = payload;
  const side = config.image_size, channels = config.num_channels, bright = payload.mean[0] < 0.5;
  const theme = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const rgb = (hex) => [1, 3, 5].map((k) => parseInt(hex.slice(k, k + 2), 16));
  let shown = []; // the classes that have a bar

  function tile(pixels) { // the image at its own size; what can be drawn is shown as ink on paper, in the reader's theme
    const canvas = element("canvas", null, { width: side, height: side }), context = canvas.getContext("2d");
    const { data } = context.createImageData(side, side), ink = rgb(theme("--ink")), paper = rgb(theme("--pad")), area = side ** 2;
    for (let i = 0; i < area; i++) {
      const level = (bright ? pixels[i] : 255 - pixels[i]) / 255;
      for (let c = 0; c < 3; c++) {
        const plain = pixels[(channels === 3 ? c : 0) * area + i];
        data[4 * i + c] = payload.drawable ? paper[c] + level * (ink[c] - paper[c]) : plain;
      }
      data[4 * i + 3] = 255;
    }
    context.putImageData(new ImageData(data, side, side), 0, 0);
    return canvas;
  }

  function paint(canvas, picture, strength = 1) {
    const context = canvas.getContext("2d");
    context.fillStyle = theme("--pad");
    context.fillRect(0, 0, canvas.width, canvas.height);
    context.imageSmoothingEnabled = side > 64;
    context.globalAlpha = strength;
    context.drawImage(picture, 0, 0, canvas.width, canvas.height);
    context.globalAlpha = 1;
    return context;
  }

  function pad(image, strokes) {
    const canvas = $(".picture"), size = canvas.width;
    const what = strokes.length ? "Your drawing" : image.label == null ? "Your image" : `Example: ${classes[image.label]}`;
    canvas.setAttribute("aria-label", what);
    const context = paint(canvas, tile(image.pixels), strokes.length ? 0 : 1);
    trace(context, strokes.map((stroke) => stroke.map(([x, y]) => [x * size, y * size])), size / 11, theme("--ink"));
  }

  function heads(image, state) { // the image faint, each patch in the accent as far as CLS attends to it
    const picture = tile(image.pixels), accent = rgb(theme("--accent")), grid = side / config.patch_size;
    root.querySelectorAll(".heads canvas").forEach((canvas, head) => {
      const context = paint(canvas, picture, 0.55), map = state.attention[head], top = largest(map), cell = canvas.width / grid;
      map.forEach((share, i) => {
        context.fillStyle = `rgba(${accent.join()},${(0.8 * share) / top})`;
        context.fillRect((i % grid) * cell, Math.floor(i / grid) * cell, cell, cell);
      });
    });
  }

  function path(runs, image, time) { // CLS in the plane of the class means, every run, and the teacher's on an example
    const svg = $(".plane svg"), [width, height] = [340, 300], lesson = (teacher && teacher.paths[image.example]) || null;
    const paths = runs.map((run) => run.frames.map((frame) => frame.point));
    const points = [...plane.classes.map(([, x, y]) => [x, y]), ...paths.flat(), ...(lesson ?? [])];
    const bound = (pick) => [0, 1].map((k) => points.reduce((a, p) => pick(a, p[k]), points[0][k]));
    const low = bound(Math.min), high = bound(Math.max);
    const scale = Math.min((width - 56) / (high[0] - low[0] || 1), (height - 30) / (high[1] - low[1] || 1));
    const place = (p) => [width / 2 + (p[0] - (low[0] + high[0]) / 2) * scale, height / 2 - (p[1] - (low[1] + high[1]) / 2) * scale];
    const line = (list, kind) => {
      const corners = list.map((p) => place(p).map((v) => v.toFixed(1)).join()).join(" ");
      return element("svg:polyline", null, { class: kind, points: corners });
    };
    const dot = (p, r, kind) => { const [cx, cy] = place(p); return element("svg:circle", null, { class: kind, cx, cy, r }); };
    const now = at(runs[0], time), answer = best(probabilities(now.logits));
    const named = new Set(plane.classes.length <= 12 ? classes.keys() : [answer, ...shown.slice(0, 5)]);
    const means = plane.classes.map(([, x, y]) => place([x, y]));
    svg.replaceChildren();
    for (const [label, x, y] of plane.classes) {
      const kind = label === answer ? "chosen" : "", [left, top] = place([x, y]), room = 9 + 8 * Math.min(16, classes[label].length);
      const taken = (side) => means.some(([l, t]) => Math.abs(t - top) < 9 && (l - left) * side > 0 && (l - left) * side < room);
      const end = left > width - 60 || (left > room && taken(1) && !taken(-1)); // its name stands to the left
      svg.append(dot([x, y], 3, `mean ${kind}`));
      if (!named.has(label)) continue;
      const where = { x: left + (end ? -7 : 7), y: top + 4, "text-anchor": end ? "end" : "start", class: kind };
      svg.append(element("svg:text", classes[label].slice(0, 16), where));
    }
    if (lesson) svg.append(line(lesson, "teacher"), ...lesson.slice(1).map((q) => dot(q, 2, "teacher")));
    paths.forEach((list, r) => svg.append(line(list, r ? "beside" : "path"), ...list.map((q) => dot(q, 2.2, r ? "beside" : "step"))));
    svg.append(dot(paths[0][0], 4.5, "start"), ...runs.slice(1).map((run) => dot(at(run, time).point, 5, "beside now")), dot(now.point, 6.5, "now"));
    svg.setAttribute("aria-label", `Path among the class means; at this time it answers ${classes[answer]}`);
    const kinds = runs.map((run, r) => [r ? "beside" : "path", spoken(run.options.solver)]);
    if (lesson) kinds.push(["teacher", "teacher"]);
    $(".legend").replaceChildren(...kinds.map(([kind, name]) => element("span", name, { class: kind })));
  }

  function chooseBars(runs) { // every class, or the ten likeliest at the end
    const p = runs.map((run) => probabilities(run.frames.at(-1).logits)), all = [...classes.keys()];
    const most = all.map((k) => largest(p.map((q) => q[k])));
    shown = classes.length <= 12 ? all : all.sort((a, b) => most[b] - most[a]).slice(0, 10);
    $(".bars").replaceChildren(...shown.map((label) => {
      const row = element("li"), track = element("i");
      track.append(...runs.map((_, r) => element("b", null, { class: r ? "beside" : "path" })));
      row.append(element("span", classes[label], { title: classes[label] }), track, element("em"));
      return row;
    }));
  }

  function bars(runs, time) {
    const p = runs.map((run) => probabilities(at(run, time).logits)), answer = best(p[0]);
    [...$(".bars").children].forEach((row, i) => {
      row.querySelectorAll("b").forEach((bar, r) => { bar.style.width = `${100 * p[r][shown[i]]}%`; });
      row.querySelector("em").textContent = percent(p[0][shown[i]]);
      row.classList.toggle("chosen", shown[i] === answer);
    });
  }

  function cost(runs) {
    const columns = runs.map(({ options, frames, evaluations: { F, G }, milliseconds, stopped }) => {
      const p = probabilities(frames.at(-1).logits), answer = best(p);
      const early = stopped == null ? "at the end" : `t = ${stopped.toFixed(2)}, step ${frames.length - 1} of ${options.steps}`;
      return {
        "": `${spoken(options.solver)}, ${options.steps} steps`, Answer: `${classes[answer]}, ${percent(p[answer])}`,
        Evaluations: F === G ? `${F}` : `${F} of F, ${G} of G`, Milliseconds: milliseconds.toFixed(1), Stopped: early,
      };
    });
    const [head, ...rows] = Object.keys(columns[0]).map((name) => {
      const row = element("tr");
      row.append(element(name ? "th" : "td", name, name ? { scope: "row" } : {}));
      row.append(...columns.map((column) => element(name ? "td" : "th", column[name], name ? {} : { scope: "col" })));
      return row;
    });
    $(".cost thead").replaceChildren(head);
    $(".cost tbody").replaceChildren(...rows);
  }

  function all(runs, image, time) { path(runs, image, time); bars(runs, time); heads(image, at(runs[0], time)); }

  return { tile, paint, pad, chooseBars, cost, all };
}
