// Runs a file of `sigcam export` on a photograph with onnxruntime-web and draws what comes back.
"use strict";

const MODEL = "model.onnx", GLUE = "ort-wasm-simd-threaded.mjs", WASM = "ort-wasm-simd-threaded.wasm";
const PARTS = new Set(["onnx", "mjs", "wasm"]);
const SIDE = 1280; // a larger photograph is made smaller first
const HEAT = ["000004", "1b0c41", "4a0c6b", "781c6d", "a52c60", "cf4446", "ed6925", "fb9b06", "f7d13d", "fcffa4"];
const $ = (selector) => document.querySelector(selector);
const canvas = $("canvas"), pen = canvas.getContext("2d", { willReadFrequently: true });
const files = {}; // the bytes of each file, by the ending of its name
let session, facts, names, shown; // shown: the photograph's pixels and what the network says of it
let turn = Promise.resolve();

// ---------------------------------------------------------------------------------------------- messages

class Told extends Error {} // an error in words for the visitor

function fail(error) {
  $("#error").textContent = error instanceof Told ? error.message : `This did not work: ${error.message || error}`;
  $("#error").hidden = false;
  $("#status").textContent = "";
}

/** Do the work after all that was asked for before it. */
function attempt(work) {
  turn = turn.then(() => { $("#error").hidden = true; }).then(work).catch(fail);
  return turn;
}

// -------------------------------------------------------------------------------------------- the network

async function start() {
  if (typeof ort === "undefined") {
    throw new Told("ort.wasm.min.js is not beside this page: the first lines of index.html say where to get it.");
  }
  if (location.protocol !== "file:") {
    $("#status").textContent = "Loading the network …";
    $("main").hidden = false;
    await Promise.all([MODEL, GLUE, WASM].map(fetchFile));
  }
  await open();
}

async function fetchFile(name) {
  const answer = await fetch(name).catch(() => { throw new Told(`${name} could not be loaded: is the server still there?`); });
  if (answer.ok) files[ending(name)] = new Uint8Array(await answer.arrayBuffer());
}

function ending(name) {
  return name.slice(name.lastIndexOf(".") + 1).toLowerCase();
}

/** Take files that the visitor chose: those that are missing, or another model. */
async function take(chosen) {
  for (const file of chosen) files[ending(file.name)] = new Uint8Array(await file.arrayBuffer());
  await open();
}

/** Open the network, or ask for the files that are not there. */
async function open() {
  const missing = [MODEL, GLUE, WASM].filter((name) => !files[ending(name)]);
  $("#files").hidden = !missing.length;
  $("main").hidden = Boolean(missing.length);
  if (missing.length) {
    const why = location.protocol === "file:"
      ? "A page that is opened from disk may read no file until you choose it. From the page's folder it needs"
      : "What is not beside this page, or of no use, can be chosen here:";
    $("#files p").textContent = `${why} ${missing.join(", ")}.`;
    return;
  }
  $("#status").textContent = "Opening the network …";
  ort.env.wasm.numThreads = 1; // more would need headers that not every server sends
  ort.env.wasm.wasmBinary = files.wasm;
  ort.env.wasm.wasmPaths = { mjs: URL.createObjectURL(new Blob([files.mjs], { type: "text/javascript" })) };
  try {
    facts = metadata(files.onnx);
    names = JSON.parse(facts.class_names);
    session = await ort.InferenceSession.create(files.onnx, { executionProviders: ["wasm"] });
  } catch (error) {
    session = null;
    delete files.onnx; // another one can be chosen
    await open();
    throw error instanceof Told ? error : new Told(`The network could not be opened: ${error.message || error}`);
  }
  const absolute = facts.scale === "probability";
  $("#unit").textContent = absolute ? "probability that the place shows the class" : "share of this map's maximum";
  $("#status").textContent = "Ready.";
}

/** The metadata of an ONNX file, which is field 14 of its protocol buffer. */
function metadata(bytes) {
  const found = {}, text = new TextDecoder();
  try {
    for (const [field, entry] of fields(bytes)) {
      if (field !== 14) continue;
      const [key, value] = [...fields(entry)].map(([, part]) => text.decode(part));
      found[key] = value;
    }
  } catch {
    throw new Told("This is not a whole ONNX file: write it again with sigcam export.");
  }
  if (found.preprocessing !== "inside") throw new Told("This file was not written by sigcam export, or does not take photographs.");
  return found;
}

/** Yield number and bytes of each field of a protocol buffer; numbers, which are not needed, without bytes. */
function* fields(bytes) {
  let at = 0;
  const varint = () => {
    for (let value = 0, scale = 1; ; scale *= 128) {
      if (at >= bytes.length) throw new Error("cut short");
      const byte = bytes[at++];
      value += (byte % 128) * scale;
      if (byte < 128) return value;
    }
  };
  while (at < bytes.length) {
    const tag = varint(), kind = tag % 8;
    let length = { 1: 8, 5: 4 }[kind] ?? 0;
    if (kind === 0) varint();
    else if (kind === 2) length = varint();
    else if (!length) throw new Error("no protocol buffer");
    if (at + length > bytes.length) throw new Error("cut short");
    yield [Math.floor(tag / 8), bytes.subarray(at, at + length)];
    at += length;
  }
}

// ----------------------------------------------------------------------------------------- the photograph

async function explain(file) {
  if (!session) throw new Told("There is no network yet: choose its file first.");
  const bitmap = await createImageBitmap(file).catch(() => {
    throw new Told(`${file.name} is not a picture that this browser can read.`);
  });
  const factor = Math.min(1, SIDE / Math.max(bitmap.width, bitmap.height));
  canvas.width = Math.max(1, Math.round(bitmap.width * factor));
  canvas.height = Math.max(1, Math.round(bitmap.height * factor));
  pen.fillStyle = "white"; // behind what is transparent
  pen.fillRect(0, 0, canvas.width, canvas.height);
  pen.imageSmoothingQuality = "high";
  pen.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  bitmap.close();
  const pixels = pen.getImageData(0, 0, canvas.width, canvas.height).data;
  $("#drop").hidden = true;
  $("#view").hidden = false;
  $("#status").textContent = `Looking at ${file.name} …`;
  await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
  const began = performance.now(), output = await run(pixels);
  shown = { pixels, name: file.name, classes: [...output.classes.data].map((_, rank) => answer(output, rank)) };
  list();
  draw();
  $("#status").textContent = `${file.name}, ${Math.round(performance.now() - began)} ms`;
}

async function run(pixels) {
  const image = new Uint8Array(canvas.width * canvas.height * 3); // (H, W, 3)
  for (let to = 0, from = 0; to < image.length; to += 3, from += 4) {
    image[to] = pixels[from];
    image[to + 1] = pixels[from + 1];
    image[to + 2] = pixels[from + 2];
  }
  const shape = [1, canvas.height, canvas.width, 3];
  return session.run({ image: new ort.Tensor("uint8", image, shape) });
}

/** What the network says of the class with this rank. */
function answer(output, rank) {
  const index = Number(output.classes.data[rank]), [, , rows, columns] = output.maps.dims;
  const cells = output.maps.data.slice(rows * columns * rank, rows * columns * (rank + 1));
  const peak = Math.max(1e-6, ...cells), box = output.boxes.data.slice(4 * rank, 4 * rank + 4);
  return {
    name: String(names?.[index] ?? index),
    probability: output.probability.data[index],
    evidence: output.evidence.data[index],
    here: Boolean(output.present.data[rank]),
    box: box.some(Boolean) ? box : null,
    cells: facts.scale === "probability" ? cells : cells.map((each) => Math.max(each, 0) / peak),
    rows,
    columns,
  };
}

// -------------------------------------------------------------------------------------------- the drawing

function list() {
  const rows = shown.classes.map((each, rank) => {
    const row = document.createElement("label"), choice = document.createElement("input");
    row.className = "class";
    Object.assign(choice, { type: "radio", name: "class", value: rank, checked: rank === 0 });
    const name = document.createElement("b"), said = document.createElement("small"), word = document.createElement("span");
    name.textContent = each.name;
    word.className = each.here ? "here" : "not-here";
    word.textContent = each.here ? "here" : "not here";
    said.append(word, `, evidence ${each.evidence.toFixed(3)}`, document.createElement("br"), `probability ${each.probability.toFixed(3)}`);
    row.append(choice, name, said);
    return row;
  });
  $("#classes").replaceChildren($("#classes legend"), ...rows);
}

const COLOURS = Array.from({ length: 256 }, (_, level) => {
  const place = level / 255 * (HEAT.length - 1), low = Math.min(Math.floor(place), HEAT.length - 2);
  const channel = (code, i) => parseInt(code.slice(2 * i, 2 * i + 2), 16);
  return [0, 1, 2].map((i) => channel(HEAT[low], i) + (place - low) * (channel(HEAT[low + 1], i) - channel(HEAT[low], i)));
});

function draw() {
  const each = shown.classes[Number($("#classes :checked").value)];
  const { width, height } = canvas, strength = Number($("#strength").value);
  const mixed = new ImageData(width, height), { pixels } = shown;
  const across = places(width, each.columns), down = places(height, each.rows);
  for (let y = 0, at = 0; y < height; y++) {
    const [top, bottom, v] = down[y];
    for (let x = 0; x < width; x++, at += 4) {
      const [left, right, u] = across[x];
      const upper = each.cells[top * each.columns + left] * (1 - u) + each.cells[top * each.columns + right] * u;
      const lower = each.cells[bottom * each.columns + left] * (1 - u) + each.cells[bottom * each.columns + right] * u;
      const value = upper * (1 - v) + lower * v, alpha = value * strength;
      const colour = COLOURS[Math.round(255 * Math.min(1, Math.max(0, value)))];
      const grey = strength && (pixels[at] + pixels[at + 1] + pixels[at + 2]) / 3; // half the colour, so that the map's stands out
      for (let i = 0; i < 3; i++) {
        const base = strength ? (pixels[at + i] + grey) / 2 : pixels[at + i];
        mixed.data[at + i] = base * (1 - alpha) + colour[i] * alpha;
      }
      mixed.data[at + 3] = 255;
    }
  }
  pen.putImageData(mixed, 0, 0);
  if (each.box && $("#box").checked) outline(each.box);
  const where = each.box ? `, box from ${[...each.box].map(Math.round).join(", ")}` : ", no box";
  canvas.setAttribute("aria-label", `${shown.name} with the map of ${each.name}: ${each.here ? "here" : "not here"}${where}`);
}

/** For each pixel of a side the two cells that it lies between, and how far it is towards the second. */
function places(side, cells) {
  return Array.from({ length: side }, (_, pixel) => {
    const place = Math.min(cells - 1, Math.max(0, (pixel + 0.5) * cells / side - 0.5)), low = Math.floor(place);
    return [low, Math.min(low + 1, cells - 1), place - low];
  });
}

function outline([left, top, right, bottom]) {
  const line = Math.max(2, Math.max(canvas.width, canvas.height) / 300);
  for (const [colour, width] of [["black", 2 * line], ["#00c853", line]]) {
    pen.strokeStyle = colour;
    pen.lineWidth = width;
    pen.strokeRect(left + line, top + line, Math.max(1, right - left - 2 * line), Math.max(1, bottom - top - 2 * line));
  }
}

// ---------------------------------------------------------------------------------------------- the events

$(".legend i").style.background = `linear-gradient(to right, ${HEAT.map((code) => "#" + code)})`;
$("#files input").addEventListener("change", (event) => attempt(() => take([...event.target.files])));
for (const input of [$("#photograph"), $("#camera")]) {
  input.addEventListener("change", () => {
    const [file] = input.files;
    if (file) attempt(() => explain(file)).then(() => { input.value = ""; }); // so that the same file can be chosen again
  });
}
$("form").addEventListener("input", () => draw());
$("form").addEventListener("submit", (event) => event.preventDefault());
for (const name of ["dragover", "dragleave", "drop"]) {
  document.addEventListener(name, (event) => {
    event.preventDefault();
    document.body.classList.toggle("over", name === "dragover");
    if (name === "drop" && event.dataTransfer.files.length) {
      const dropped = [...event.dataTransfer.files], parts = dropped.filter((file) => PARTS.has(ending(file.name)));
      attempt(() => (parts.length ? take(parts) : explain(dropped[0])));
    }
  });
}
attempt(start);
