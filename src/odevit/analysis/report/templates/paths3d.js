// Paths in three dimensions on a canvas. Drag or arrow keys turn them, the legend hides and shows.
for (const root of document.querySelectorAll(".paths3d")) {
  const { paths, axes } = JSON.parse(root.querySelector("script").textContent);
  const canvas = root.querySelector("canvas");
  const context = canvas.getContext("2d");
  const hidden = new Set();
  let yaw = -0.6;
  let pitch = 0.35;

  const all = paths.flatMap((path) => path.points);
  const low = [0, 1, 2].map((k) => all.reduce((least, p) => Math.min(least, p[k]), Infinity));
  const high = [0, 1, 2].map((k) => all.reduce((most, p) => Math.max(most, p[k]), -Infinity));
  const centre = low.map((value, k) => (value + high[k]) / 2);
  const radius = Math.hypot(...low.map((value, k) => (high[k] - value) / 2)) || 1;

  function project(point) {  // orthographic: x to the right, y away from the reader, z up, turned by yaw and pitch
    const [x, y, z] = point.map((value, k) => (value - centre[k]) / radius);
    const across = x * Math.cos(yaw) - y * Math.sin(yaw);
    const away = x * Math.sin(yaw) + y * Math.cos(yaw);
    const up = z * Math.cos(pitch) + away * Math.sin(pitch);
    const scale = Math.min(canvas.clientWidth * 0.48, canvas.clientHeight * 0.6);
    return {
      x: canvas.clientWidth / 2 + across * scale,
      y: canvas.clientHeight / 2 - up * scale,
      depth: away * Math.cos(pitch) - z * Math.sin(pitch),
    };
  }

  function drawBox(theme) {  // the edges of the bounding box; each axis is named at its outermost, lowest edge
    context.strokeStyle = theme("--rule");
    context.fillStyle = theme("--muted");
    context.font = `12px ${theme("--sans")}`;
    context.textAlign = "center";
    context.lineWidth = 1;
    const middle = { x: canvas.clientWidth / 2, y: canvas.clientHeight / 2 };
    for (let k = 0; k < 3; k++) {
      let outermost = { reach: -1 };
      for (const corner of [0, 1, 2, 3]) {
        const from = [...low];
        [1, 2].forEach((step, bit) => { if (corner & (1 << bit)) from[(k + step) % 3] = high[(k + step) % 3]; });
        const to = [...from];
        to[k] = high[k];
        const [a, b] = [project(from), project(to)];
        context.beginPath();
        context.moveTo(a.x, a.y);
        context.lineTo(b.x, b.y);
        context.stroke();
        const [x, y] = [(a.x + b.x) / 2 - middle.x, (a.y + b.y) / 2 - middle.y];
        const reach = Math.hypot(x, y) + 0.1 * y;
        if (reach > outermost.reach) outermost = { x, y, reach };
      }
      const outwards = 1 + 20 / (Math.hypot(outermost.x, outermost.y) || 1);
      context.fillText(axes[k], middle.x + outermost.x * outwards, middle.y + outermost.y * outwards + 4);
    }
  }

  function shapes() {  // segments and end marks of the visible paths, farthest first
    const list = [];
    for (const path of paths.filter((p) => !hidden.has(p.label))) {
      const points = path.points.map(project);
      let run = 0;  // length so far, so that dashes continue over the joints
      for (let i = 1; i < points.length; i++) {
        const [a, b] = [points[i - 1], points[i]];
        list.push({ path, a, b, run, depth: (a.depth + b.depth) / 2 });
        run += Math.hypot(b.x - a.x, b.y - a.y);
      }
      if (points.length > 1) list.push({ path, ring: points[0], depth: points[0].depth });
      list.push({ path, dot: points[points.length - 1], depth: points[points.length - 1].depth });
    }
    return list.sort((one, other) => other.depth - one.depth);
  }

  function draw() {
    const density = window.devicePixelRatio || 1;
    const style = getComputedStyle(root);
    const theme = (name) => style.getPropertyValue(name).trim();
    canvas.width = canvas.clientWidth * density;
    canvas.height = canvas.clientHeight * density;
    context.scale(density, density);
    drawBox(theme);
    for (const { path, a, b, run, ring, dot, depth } of shapes()) {
      context.globalAlpha = 0.75 - 0.25 * depth;  // what is far away is fainter
      context.strokeStyle = context.fillStyle = theme(`--c${path.color}`);
      context.lineWidth = 1.8;
      context.setLineDash(path.dashed && a ? [5, 5] : []);
      context.lineDashOffset = run || 0;
      context.beginPath();
      if (a) { context.moveTo(a.x, a.y); context.lineTo(b.x, b.y); }
      if (ring) context.arc(ring.x, ring.y, 3, 0, 7);
      if (dot) context.arc(dot.x, dot.y, 3.6, 0, 7);
      if (dot) context.fill(); else context.stroke();
    }
    context.globalAlpha = 1;
  }

  function turn(across, up) {
    yaw += across;
    pitch = Math.max(-1.57, Math.min(1.57, pitch + up));
    draw();
  }

  for (const label of new Set(paths.map((path) => path.label))) {
    const members = paths.filter((path) => path.label === label);
    const color = members.every((path) => path.color === members[0].color) ? `--c${members[0].color}` : "--muted";
    const button = document.createElement("button");
    const swatch = document.createElement("span");
    swatch.style.borderTop = `2px ${members[0].dashed ? "dashed" : "solid"} var(${color})`;
    button.append(swatch, label);
    button.setAttribute("aria-pressed", "true");
    button.addEventListener("click", () => {
      const shown = hidden.delete(label) || !hidden.add(label);
      button.setAttribute("aria-pressed", String(shown));
      draw();
    });
    root.querySelector(".legend").append(button);
  }

  let last = null;  // where the pointer was, while it is held down
  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    last = event;
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!last) return;
    turn((event.clientX - last.clientX) * 0.01, (event.clientY - last.clientY) * 0.01);
    last = event;
  });
  for (const end of ["pointerup", "pointercancel"]) canvas.addEventListener(end, () => { last = null; });
  canvas.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: [-0.1, 0], ArrowRight: [0.1, 0], ArrowUp: [0, -0.1], ArrowDown: [0, 0.1] }[event.key];
    if (step) { event.preventDefault(); turn(...step); }
  });
  new ResizeObserver(draw).observe(canvas);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
}
