// The conversation: turns as data, one view of them, and the answer that is being written. The server keeps nothing
// between requests, so every request carries all turns.
//
// A turn is {role, text} and, of an answer, also {state, note}: state is "done", "stopped" or "failed", note what is said
// below it. Whatever was written before an answer was stopped or failed is part of the conversation.

import { streamChat } from "./api.js";
import { render } from "./markdown.js";
import { forget, recall, remember } from "./store.js";

/** Characters of a conversation that a tab remembers; of a longer one, nothing. */
const MAX_REMEMBERED = 1 << 20;
/** Pixels from the end within which a reader counts as reading along. */
const READING_ALONG = 80;

const log = document.querySelector("#log");
const welcome = document.querySelector("#welcome");
const form = document.querySelector("#composer");
const input = document.querySelector("#input");
const send = document.querySelector("#send");
const editing = document.querySelector("#editing");
const said = document.querySelector("#said");

let turns = remembered();
let model = "";
let parameters = () => ({});
let nameModel = async () => "";
/** What stops the answer under way. */
let writing;
/** Index of the turn that the composer holds for editing. */
let edited;

/** `fields` gives the request's fields beside model and messages, and {system}; `name` the model's, where nobody has set it. */
export function start(fields, name) {
  parameters = fields;
  nameModel = name;
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (writing) writing.abort();
    else ask();
  });
  input.addEventListener("keydown", (event) => {
    // While an input method composes, Enter chooses a word.
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!writing) ask();
  });
  input.addEventListener("input", grow);
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
    if (writing) writing.abort();
    else if (edited !== undefined) edit();
  });
  document.querySelector("#stop-editing").addEventListener("click", () => edit());
  log.addEventListener("click", act);
  for (const suggestion of document.querySelectorAll("#welcome button")) {
    suggestion.addEventListener("click", () => {
      input.value = suggestion.textContent;
      ask();
    });
  }
  turns.forEach(show);
}

export function setModel(id) {
  model = id;
  input.placeholder = id ? `Message ${id}` : "Message";
}

export function clear() {
  writing?.abort();
  cut(0);
  edit();
  forget("session", "turns");
  input.focus();
}

function ask() {
  const text = input.value.trim();
  if (!text || writing) return;
  if (edited !== undefined) cut(edited);
  edit();
  add({ role: "user", text });
  keep(); // a page that is loaded again in the middle of the answer has the question
  answer();
}

/** Has the last user turn answered. */
async function answer() {
  const { system, ...fields } = parameters();
  const messages = turns.filter((turn) => turn.text).map(({ role, text }) => ({ role, content: text }));
  if (system) messages.unshift({ role: "system", content: system });
  const turn = { role: "assistant", text: "" };
  const view = add(turn);
  const draw = onFrames(() => follow(() => fill(view, turn)));
  const own = new AbortController();
  setWriting(own);
  follow(() => {}, true);

  const began = performance.now();
  const seen = {};
  try {
    // A question may come before the page has heard the model's name.
    const named = model || (await nameModel());
    for await (const chunk of streamChat({ model: named, messages, ...fields }, own.signal)) {
      const choice = chunk.choices?.[0];
      seen.reason = choice?.finish_reason ?? seen.reason;
      seen.timings = chunk.timings ?? seen.timings;
      seen.usage = chunk.usage ?? seen.usage;
      const text = choice?.delta?.content;
      if (!text) continue;
      seen.first ??= performance.now() - began;
      turn.text += text;
      draw();
    }
    turn.state = "done";
    turn.note = summary(seen);
  } catch (error) {
    const stopped = error.name === "AbortError";
    turn.state = stopped ? "stopped" : "failed";
    turn.note = stopped ? `Stopped after ${duration(performance.now() - began)}` : error.message;
  }
  draw.end();
  if (writing === own) setWriting(undefined);
  if (!turns.includes(turn)) return; // another conversation began meanwhile
  keep();
  said.textContent = turn.state === "done" ? turn.text : `${turn.text} ${turn.note}`;
}

/** What the server measured of an answer; times to the first token as this page saw them. */
function summary({ first, timings, usage, reason }) {
  const parts = [];
  const tokens = timings?.predicted_n ?? usage?.completion_tokens;
  if (tokens !== undefined) parts.push(tokens === 1 ? "1 token" : `${tokens} tokens`);
  if (timings?.predicted_per_second) parts.push(`${rate(timings.predicted_per_second)} tokens/s`);
  if (first !== undefined) parts.push(`first after ${duration(first)}`);
  const cached = timings?.cache_n ?? usage?.prompt_tokens_details?.cached_tokens;
  const prompt = usage?.prompt_tokens ?? (timings && timings.prompt_n + timings.cache_n);
  if (prompt) parts.push(`prompt of ${prompt}${cached ? `, ${cached} from the cache` : ""}`);
  if (reason === "length") parts.push("cut at the token limit");
  return parts.join(" · ");
}

export function duration(ms) {
  return ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`;
}

export function rate(perSecond) {
  return perSecond < 10 ? perSecond.toFixed(1) : Math.round(perSecond).toLocaleString("en");
}

// --- the view -------------------------------------------------------------------------------------------

/** Adds a turn to the conversation, and to the log; its node. */
function add(turn) {
  turns.push(turn);
  return show(turn);
}

function show(turn) {
  const template = document.querySelector(turn.role === "user" ? "#user-turn" : "#answer-turn");
  const node = template.content.cloneNode(true).firstElementChild;
  fill(node, turn);
  log.append(node);
  welcome.hidden = true;
  return node;
}

function fill(node, turn) {
  const text = node.querySelector(".text");
  if (turn.role === "user") {
    text.textContent = turn.text;
    return;
  }
  node.dataset.state = turn.state ?? "writing";
  render(text, turn.text);
  node.querySelector(".note").textContent = turn.note ?? "";
  node.querySelector("[data-act=copy]").hidden = !turn.text;
  node.querySelector("[data-act=again]").textContent = turn.state === "failed" ? "Try again" : "Regenerate";
}

/** Leaves the first `n` turns. */
function cut(n) {
  turns.length = n;
  while (log.children.length > n) log.lastElementChild.remove();
  welcome.hidden = n > 0;
}

function act(event) {
  const button = event.target.closest("button");
  if (button?.dataset.copy === "code") copy(button, button.closest(".code").querySelector("code").textContent);
  const index = [...log.children].indexOf(button?.closest(".turn"));
  const act = button?.dataset.act;
  if (act === "copy") copy(button, turns[index].text);
  if (act === "edit" && !writing) edit(index);
  if (act === "again" && !writing) {
    edit();
    cut(index);
    answer();
    input.focus();
  }
}

/** Puts a turn into the composer; what follows it goes when it is sent. Without an index, an empty composer. */
function edit(index) {
  edited = index;
  editing.hidden = index === undefined;
  input.value = index === undefined ? "" : turns[index].text;
  grow();
  if (index !== undefined) input.focus();
}

function setWriting(own) {
  writing = own;
  document.body.classList.toggle("writing", Boolean(own));
  send.textContent = own ? "Stop" : "Send";
}

function grow() {
  input.style.height = "auto";
  input.style.height = `${input.scrollHeight + 2}px`;
}

/** Changes the log, and keeps its end in sight of a reader who had it in sight. */
function follow(change, always = false) {
  const pane = log.parentElement;
  const along = always || pane.scrollHeight - pane.scrollTop - pane.clientHeight < READING_ALONG;
  change();
  if (along) pane.scrollTop = pane.scrollHeight;
}

/** `draw` at most once for each frame, and not at all where nobody looks; `end` draws what is left. */
function onFrames(draw) {
  let frame;
  const request = () => {
    frame ??= requestAnimationFrame(() => {
      frame = undefined;
      draw();
    });
  };
  request.end = () => {
    if (frame !== undefined) cancelAnimationFrame(frame);
    draw();
  };
  return request;
}

/** Browsers give the clipboard to secure pages alone, and http over a network is none: the old way then. */
async function copy(button, text) {
  let done = true;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = document.createElement("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    done = document.execCommand("copy");
    area.remove();
    button.focus();
  }
  const label = button.textContent;
  button.textContent = done ? "Copied" : "Not allowed";
  setTimeout(() => (button.textContent = label), 1500);
}

// --- memory ---------------------------------------------------------------------------------------------

function keep() {
  const size = turns.reduce((sum, turn) => sum + turn.text.length, 0);
  if (size <= MAX_REMEMBERED) remember("session", "turns", turns);
  else forget("session", "turns");
}

function remembered() {
  const turns = recall("session", "turns");
  const sound = (t) => ["user", "assistant"].includes(t?.role) && typeof t.text === "string";
  return Array.isArray(turns) && turns.every(sound) ? turns : [];
}
