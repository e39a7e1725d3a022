// An image goes in, a Worker runs flow.js on it, and every state of the flow is shown at its time.

for (const root of document.querySelectorAll(".live")) {
  const $ = (selector) => root.querySelector(selector), payload = JSON.parse($(".payload").textContent);
  const { config, classes, examples } = payload, { image_size: side, num_channels: channels, horizon } = config;
  const still = matchMedia("(prefers-reduced-motion: reduce)"), dark = matchMedia("(prefers-color-scheme: dark)");
  const pictures = makePictures(root, payload), say = (text) => { $(".status").textContent = text; };
  // the calibrated rule for stopping early, or a guess; the slider is even in log-odds, or in the logarithm of a size
  const halting = payload.halting ?? { score: "margin", threshold: 0.9 }, share = ["margin", "confidence"].includes(halting.score);
  let runs = [], time = horizon, playing = null, moved = false;
  const threshold = () => {
    const x = Number($(".threshold").value);
    return !moved ? halting.threshold : share ? 1 / (1 + Math.exp(-x / 10)) : -(10 ** (x / 20));
  };
  root.image = null; // {pixels, label, example, strokes, note}: what the model sees, and where it is from

  // --- the Worker: one image at a time, a newer one replaces those that wait ----------------------------------------------

  const worker = new Worker(URL.createObjectURL(new Blob([$(".flow").textContent], { type: "text/javascript" })));
  const waiting = new Map();
  let asked = 0, busy = false, again = null;
  worker.onmessage = ({ data }) => {
    const [resolve, reject] = waiting.get(data.id);
    waiting.delete(data.id);
    if (data.error) reject(new Error(data.error)); else resolve(data.result);
  };
  worker.onerror = (event) => say(`The model could not be started: ${event.message ?? "this browser allows no Worker here"}.`);
  worker.postMessage({ payload: { config, plane: payload.plane, weights: payload.weights, data: payload.data } });
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
    const stop = $(".adaptive").checked ? { score: halting.score, threshold: threshold() } : null;
    const wanted = [{ solver: $(".solver").value, steps: Number($(".steps").value), stop }];
    if ($(".other").value) wanted.push({ solver: $(".other").value, steps: Number($(".other-steps").value), stop: null });
    try {
      const results = [];
      for (const options of wanted) results.push({ ...(await root.run(root.image.pixels, options)), options });
      runs = results;
      pictures.chooseBars(runs);
      pictures.cost(runs);
      $(".promise").textContent = promise(runs[0]);
      report();
      then();
      show(time);
    } catch (error) {
      say(error.message);
    }
    busy = false;
    if (again) { const next = again; again = null; compute(next); }
  }

  function promise({ options }) { // what the calibration proved, where it holds: these weights, solver, steps and threshold
    const own = payload.halting && !moved && options.solver === halting.solver && options.steps === halting.num_steps;
    if (!own) return "Not calibrated for this setting: a guess.";
    const [most, sure] = [halting.alpha, 1 - halting.delta].map((p) => `${Number((100 * p).toPrecision(3))} %`);
    return `Calibrated: at most ${most} of all answers differ from those of all ${options.steps} steps (confidence ${sure}).`;
  }

  function report() {
    const run = runs[0], { label, note } = root.image, p = probabilities(run.frames.at(-1).logits), answer = best(p);
    const truth = label == null ? "." : label === answer ? ", which is right." : `; the label is ${classes[label]}.`;
    const early = run.stopped == null ? "" : ` It stopped at t = ${run.stopped.toFixed(2)}.`;
    say(`Answer: ${classes[answer]}, ${percent(p[answer])}${truth}${early} ${note ?? ""}`.trim());
  }

  // --- time ---------------------------------------------------------------------------------------------------------------

  function show(t) {
    time = Math.min(Math.max(t, 0), horizon);
    if (!runs.length) return;
    pictures.all(runs, root.image, time);
    const run = runs[0], halted = run.stopped != null && time >= run.stopped - 1e-9, slider = $(".slider");
    const text = `t = ${time.toFixed(2)}, step ${at(run, time).step} of ${run.options.steps}${halted ? ", stopped" : ""}`;
    slider.value = time;
    $(".clock").textContent = text;
    slider.setAttribute("aria-valuetext", text);
    slider.style.setProperty("--stop", run.stopped == null ? "200%" : `${(100 * run.stopped) / horizon}%`);
  }

  function pause() {
    cancelAnimationFrame(playing);
    playing = null;
    $(".play").textContent = "▶";
    $(".play").setAttribute("aria-label", "Play");
  }

  function play(from) {
    pause();
    if (still.matches) { show(horizon); return; }
    $(".play").textContent = "❚❚";
    $(".play").setAttribute("aria-label", "Pause");
    let start = null;
    const tick = (now) => {
      start ??= now;
      show(from + ((now - start) / 2600) * horizon);
      if (time < horizon) playing = requestAnimationFrame(tick); else pause();
    };
    show(from);
    playing = requestAnimationFrame(tick);
  }

  $(".play").onclick = () => (playing === null ? play(time >= horizon ? 0 : time) : pause());
  $(".slider").max = horizon;
  $(".slider").oninput = (event) => { pause(); show(Number(event.target.value)); };
  $(".slider").onkeydown = (event) => { // arrow keys go from step to step
    const way = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1 }[event.key];
    if (!way || !runs.length) return;
    event.preventDefault();
    pause();
    const times = [...runs[0].frames.map((frame) => frame.t), horizon];
    const next = way > 0 ? times.find((t) => t > time + 1e-6) : times.findLast((t) => t < time - 1e-6);
    show(next ?? (way > 0 ? horizon : 0));
  };

  // --- images and controls -------------------------------------------------------------------------------------------------

  function take(image) { // shown at once; while it is being drawn at the end of time, else played from the start
    root.image = image;
    const buttons = [...root.querySelectorAll(".examples button")];
    buttons.forEach((button, i) => button.setAttribute("aria-pressed", String(i === image.example)));
    pause();
    pictures.pad(image, image.strokes ?? []);
    compute(image.drawing ? () => { time = horizon; } : () => play(0));
  }
  makeInput(root, payload, { take, say });

  for (const [i, example] of examples.entries()) {
    const pixels = bytes(example.pixels), name = `Example: ${classes[example.label]}`, size = Math.max(side, 32);
    const button = element("button", null, { type: "button", "aria-label": name, "aria-pressed": "false" });
    const canvas = button.appendChild(element("canvas", null, { width: size, height: size }));
    button.onclick = () => take({ pixels, label: example.label, example: i });
    button.redraw = () => pictures.paint(canvas, pictures.tile(pixels));
    button.redraw();
    $(".examples").append(button);
  }
  dark.addEventListener("change", () => {
    root.querySelectorAll(".examples button").forEach((button) => button.redraw());
    pictures.pad(root.image, root.image.strokes ?? []);
    show(time);
  });

  const names = Object.entries(payload.solvers);
  for (const list of [$(".solver"), $(".other")])
    list.append(...names.map(([name, { order }]) => element("option", `${spoken(name)} (order ${order})`, { value: name })));
  $(".other").prepend(element("option", "nothing", { value: "" }));
  $(".solver").value = config.solver;
  $(".other").value = "";
  for (const [solver, steps, count] of [[".solver", ".steps", ".count"], [".other", ".other-steps", ".other-count"]]) {
    const bound = () => { // as many steps as a browser computes in seconds
      const { F, least } = payload.solvers[$(solver).value || config.solver], cost = payload.limits.step_macs * F;
      $(steps).min = least;
      $(steps).max = Math.max(least, Math.min(payload.limits.steps, Math.floor(payload.limits.macs / cost)));
      $(count).textContent = $(steps).value;
    };
    bound();
    $(steps).value = config.num_steps;
    bound();
    $(solver).onchange = () => { bound(); $(".beside").hidden = !$(".other").value; compute(); };
    $(steps).oninput = () => { bound(); compute(); };
  }
  const rules = { margin: "when ahead by", confidence: "when sure to", change: "logits move under", velocity: "it moves under" };
  $(".sure label").textContent = rules[halting.score];
  const odds = (p) => 10 * Math.log(p / (1 - p));
  $(".threshold").value = Math.round(share ? odds(halting.threshold) : 20 * Math.log10(-halting.threshold));
  const lead = () => { $(".lead").textContent = share ? percent(threshold()) : (-threshold()).toPrecision(2); };
  lead();
  $(".adaptive").onchange = () => { $(".sure").hidden = $(".promise").hidden = !$(".adaptive").checked; compute(); };
  $(".threshold").oninput = () => { moved = true; lead(); compute(); };
  for (let head = 1; head <= config.num_attention_heads; head++) {
    const figure = $(".heads").appendChild(element("figure"));
    figure.append(element("canvas", null, { width: 160, height: 160, role: "img", "aria-label": `Attention of CLS, head ${head}` }));
    figure.append(element("figcaption", `head ${head}`));
  }

  const grey = Uint8Array.from({ length: channels * side * side }, (_, i) => 255 * payload.mean[Math.floor(i / side ** 2)]);
  if (examples.length) $(".examples button").click(); else take({ pixels: grey, note: "Drop an image here." });
}
