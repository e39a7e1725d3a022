// How images come in: files, the clipboard, drag and drop, and a pen. `take` gets {pixels: (c, S, S) of 0…255, …}.

const bytes = (base64) => Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));

function square(bitmap, side) { // RGBA of the middle square, resized by halves so that every pixel has its say
  const cut = Math.min(bitmap.width, bitmap.height);
  let from = bitmap, corner = [(bitmap.width - cut) / 2, (bitmap.height - cut) / 2, cut, cut];
  for (let size = Math.min(cut, 4096); ; ) {
    size = size > 2 * side ? Math.ceil(size / 2) : side;
    const canvas = element("canvas", null, { width: size, height: size }), context = canvas.getContext("2d");
    context.fillStyle = "#fff";
    context.fillRect(0, 0, size, size);
    context.imageSmoothingQuality = "high";
    context.drawImage(from, ...corner, 0, 0, size, size);
    if (size === side) return context.getImageData(0, 0, side, side).data;
    [from, corner] = [canvas, [0, 0, size, size]];
  }
}

function makeInput(root, payload, { take, say }) {
  const $ = (selector) => root.querySelector(selector), { image_size: side, num_channels: channels } = payload.config;
  const bright = payload.mean[0] < 0.5, area = side ** 2; // ink is bright on dark, as in most sets of digits

  async function open(file) {
    if (!file) return;
    let rgba = null;
    try {
      rgba = square(await createImageBitmap(file), side);
    } catch {
      say("This file is no image that the browser can read.");
      return;
    }
    const pixels = new Uint8Array(area * channels);
    for (let i = 0; i < area; i++) {
      const [r, g, b] = rgba.subarray(4 * i, 4 * i + 3);
      if (channels === 1) pixels[i] = Math.round(0.299 * r + 0.587 * g + 0.114 * b); // luma, as PIL's "L"
      else [pixels[i], pixels[area + i], pixels[2 * area + i]] = [r, g, b];
    }
    const edge = Array.from({ length: side }, (_, i) => pixels[i] + pixels[area - 1 - i]).reduce((a, b) => a + b) / side / 2;
    const flip = payload.drawable && edge > 127.5 === bright;
    const note = flip ? "The image was inverted, as this model knows its digits." : "";
    take({ pixels: flip ? pixels.map((v) => 255 - v) : pixels, note });
  }

  $("input[type=file]").onchange = (event) => { open(event.target.files[0]); event.target.value = ""; };
  root.addEventListener("dragover", (event) => { event.preventDefault(); root.classList.add("over"); });
  root.addEventListener("dragleave", () => root.classList.remove("over"));
  root.addEventListener("drop", (event) => {
    event.preventDefault();
    root.classList.remove("over");
    open(event.dataTransfer.files[0]);
  });
  document.addEventListener("paste", (event) => {
    open([...event.clipboardData.files].find((file) => file.type.startsWith("image/")));
  });

  function rasterise(strokes) { // they fill the box as the digits of the training set do, whatever their size and place
    const fine = 16, size = side * fine, brush = size / 8, points = strokes.flat();
    const context = element("canvas", null, { width: size, height: size }).getContext("2d", { willReadFrequently: true });
    const bound = (pick) => [0, 1].map((k) => points.reduce((a, p) => pick(a, p[k]), points[0][k]));
    const low = bound(Math.min), high = bound(Math.max), middle = [0, 1].map((k) => (low[k] + high[k]) / 2);
    const scale = (size - brush) / Math.max(high[0] - low[0], high[1] - low[1], 0.1);
    const placed = strokes.map((stroke) => stroke.map((p) => p.map((v, k) => size / 2 + (v - middle[k]) * scale)));
    trace(context, placed, brush, "#000");
    const { data } = context.getImageData(0, 0, size, size), sums = new Float64Array(area);
    for (let y = 0; y < size; y++) for (let x = 0; x < size; x++)
      sums[Math.floor(y / fine) * side + Math.floor(x / fine)] += data[4 * (y * size + x) + 3] / fine ** 2;
    return Uint8Array.from(sums, (level) => Math.round(bright ? level : 255 - level));
  }

  function pen() {
    const pad = $(".picture");
    let strokes = [];
    const where = ({ clientX, clientY }) => {
      const box = pad.getBoundingClientRect();
      return [(clientX - box.left) / box.width, (clientY - box.top) / box.height];
    };
    const update = (done) => take({ pixels: rasterise(strokes), strokes, drawing: !done });
    pad.classList.add("drawable");
    pad.onpointerdown = (event) => {
      event.preventDefault();
      pad.setPointerCapture(event.pointerId);
      if (!root.image.strokes) strokes = [];
      strokes.push([where(event)]);
      update(false);
    };
    pad.onpointermove = (event) => {
      if (!pad.hasPointerCapture(event.pointerId)) return;
      strokes.at(-1).push(...(event.getCoalescedEvents?.() ?? [event]).map(where));
      update(false);
    };
    pad.onpointerup = () => update(true);
    $(".clear").onclick = () => {
      strokes = [];
      take({ pixels: new Uint8Array(area).fill(bright ? 0 : 255), strokes, drawing: true });
    };
    $(".invert").onclick = () => take({ ...root.image, strokes: null, pixels: root.image.pixels.map((v) => 255 - v), drawing: true });
    for (const name of [".clear", ".invert", ".invite"]) $(name).hidden = false;
  }
  if (payload.drawable) pen();
}
