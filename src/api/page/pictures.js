// The pictures of the message in the composer: chosen, dropped or pasted. Large ones are made smaller here: requests and
// stored conversations stay small, and the model would see no more of them.
//
// A picture is {name, url, width, height}. Its url is a data: URI, so that it is sent and stored as it is.

import { say } from "./notice.js";

/** Pixels of the longest side: twice the square that a model takes, so that a part of a long picture stays readable. */
const MAX_SIDE = 1792;
/** Files of these formats, which the server reads, are sent as they are up to this size; others are drawn anew. */
const KEPT = ["image/png", "image/jpeg", "image/webp", "image/gif"];
const MAX_KEPT_BYTES = 1 << 20;
const QUALITY = 0.85;
/** Bytes of a file that the browser is asked to decode. */
const MAX_BYTES = 64 << 20;
const MAX_PICTURES = 8;

const box = document.querySelector("#pictures");
const attach = document.querySelector("#attach");
const files = document.querySelector("#files");
const input = document.querySelector("#input");

let all = [];
/** Undefined until the model is known. */
let isRead;
/** While files are read: whether all could be. */
let reading;

export function start() {
  attach.addEventListener("click", () => files.click());
  files.addEventListener("change", () => {
    add([...files.files]);
    files.value = ""; // the same file may be chosen again
  });
  document.addEventListener("paste", (event) => {
    // What an office program copies is text, with a picture of it.
    const { files: pasted, types } = event.clipboardData;
    if (pasted.length === 0 || types.includes("text/plain") || document.querySelector("dialog[open]")) return;
    event.preventDefault();
    add([...pasted]);
  });
  document.addEventListener("dragover", (event) => drag(event, true));
  document.addEventListener("dragleave", (event) => event.relatedTarget || drag(event, false));
  document.addEventListener("drop", (event) => {
    if (!drag(event, false) || document.querySelector("dialog[open]")) return;
    add([...event.dataTransfer.files]);
  });
  box.addEventListener("click", ({ target }) => {
    const button = target.closest("button");
    if (!button) return;
    const index = [...box.children].indexOf(button.closest("li"));
    hold(all.filter((_, i) => i !== index));
    (box.children[Math.min(index, all.length - 1)]?.querySelector("button") ?? input).focus();
  });
}

/** Whether files are dragged. The browser would leave the page for a dropped file. */
function drag(event, isOver) {
  if (!event.dataTransfer?.types.includes("Files")) return false;
  event.preventDefault();
  document.body.classList.toggle("dragging", isOver);
  return true;
}

/** Whether the model reads pictures. */
export function allow(value) {
  isRead = value;
  attach.hidden = !value;
}

/** Says why pictures cannot be sent, and returns whether that is so. */
export function areRefused() {
  if (isRead === undefined) say("The page does not know the model yet, nor whether it reads pictures.");
  else if (!isRead) say("This model reads text only, and no pictures.");
  return !isRead;
}

export const held = () => all;

export function hold(pictures) {
  all = pictures;
  box.hidden = all.length === 0;
  box.replaceChildren(...all.map((one) => {
    const row = document.querySelector("#picture").content.cloneNode(true).firstElementChild;
    row.prepend(imageOf(one));
    row.querySelector("button").ariaLabel = `Remove ${one.name}`;
    return row;
  }));
}

export function imageOf({ name, url, width, height }) {
  return Object.assign(new Image(width, height), { src: url, alt: name, title: name });
}

/** While files are read: a promise of whether all could be. */
export const whenRead = () => reading;

const isDocument = ({ type }) => !type.startsWith("image/");

function sayUnreadable(file) {
  const then = isDocument(file) ? " Copy the text of a document into the message." : "";
  say(`“${file.name || "picture"}” is not a picture that this browser can read.${then}`);
}

function add(added) {
  // "This model reads text only" would be no reason.
  const other = isRead === false && added.find(isDocument);
  if (other) return sayUnreadable(other);
  if (areRefused()) return;
  input.focus();
  const before = reading;
  const own = (async () => {
    let done = (await before) ?? true;
    for (const file of added) done = (await addOne(file)) && done; // one at a time: each takes memory
    if (reading === own) reading = undefined;
    return done;
  })();
  reading = own;
}

async function addOne(file) {
  const name = file.name || "picture";
  if (all.length >= MAX_PICTURES) {
    say(`A message has at most ${MAX_PICTURES} pictures.`);
    return false;
  }
  try {
    hold([...all, { name, ...(await read(file)) }]);
    return true;
  } catch {
    sayUnreadable(file);
    return false;
  }
}

async function read(file) {
  if (file.size > MAX_BYTES) throw new RangeError("too large");
  const bitmap = await createImageBitmap(file);
  try {
    const scale = Math.min(1, MAX_SIDE / Math.max(bitmap.width, bitmap.height));
    const [width, height] = [bitmap.width, bitmap.height].map((side) => Math.max(1, Math.round(side * scale)));
    const isKept = scale === 1 && file.size <= MAX_KEPT_BYTES && KEPT.includes(file.type);
    return { url: isKept ? await asUrl(file) : drawn(bitmap, width, height), width, height };
  } finally {
    bitmap.close();
  }
}

function asUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

/** A JPEG, on white where the picture is transparent, as the server has it. */
function drawn(bitmap, width, height) {
  const canvas = Object.assign(document.createElement("canvas"), { width, height });
  const context = canvas.getContext("2d");
  context.fillStyle = "#fff";
  context.fillRect(0, 0, width, height);
  context.imageSmoothingQuality = "high";
  context.drawImage(bitmap, 0, 0, width, height);
  return canvas.toDataURL("image/jpeg", QUALITY);
}
