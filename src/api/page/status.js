// The server as it is now: asked every second or two while the page is visible, never by a page in the background. A figure that
// the server does not tell is left out; none is made up.

import { getJson, postJson } from "./api.js";
import { rate } from "./chat.js";
import { say } from "./notice.js";

const EVERY_MS = 1500;
const AWAY_MS = 3000;
const PATIENCE_MS = 5000;
/** Points of the curve. */
const POINTS = 60;
/** Those that take the most of the device's time. */
const KERNELS = 6;

const $ = (selector) => document.querySelector(selector);

const STATES = {
  ok: "Ready",
  unloaded: "Model unloaded",
  loading: "Loading the model",
  recovering: "Recovering",
  draining: "Shutting down",
  lost: "GPU lost",
  failed: "Failed",
  away: "Unreachable",
  locked: "API key needed",
  unknown: "Status unknown",
};
const TROUBLES = {
  unloaded: "No model is in memory. The next question loads one.",
  loading: "The model is loading. Questions are answered as soon as it is ready.",
  recovering: "The GPU or the NPU failed. The server is loading the model again; answers in progress then continue.",
  draining: "The server is shutting down. It finishes the answers in progress and accepts no new questions.",
  lost: "The server has lost its GPU. It answers no questions until it is restarted.",
  failed: "The server has stopped because of a bug. It answers no questions until it is restarted.",
  away: "The server does not respond. This page tries again every few seconds.",
  locked: "The server shows its status only with an API key.",
  unknown: "The server does not report its status.",
};

let timer;
let asking;
let state;
/** The state with the names of the models. */
let served;
let before;
let onReachable = () => {};
const curve = [];

/** `reachable` is called when the server can be reached, again whenever its state or its models change: it may be another one. */
export function start(reachable) {
  onReachable = reachable;
  document.addEventListener("visibilitychange", look);
  look();
}

/** Asks now, and then regularly, if the page is visible. */
export async function look() {
  clearTimeout(timer);
  asking?.abort();
  if (document.hidden) return;
  const own = (asking = new AbortController());
  let seen;
  try {
    const body = await getJson("status", AbortSignal.any([own.signal, AbortSignal.timeout(PATIENCE_MS)]));
    seen = { state: body.status, message: body.message, body };
  } catch (error) {
    if (own.signal.aborted) return;
    seen = { state: { 0: "away", 401: "locked" }[error.status] ?? "unknown" };
  }
  if (own.signal.aborted) return;
  showState(seen);
  $("#status").classList.toggle("stale", !seen.body); // it shows the last answer
  timer = setTimeout(look, state === "away" ? AWAY_MS : EVERY_MS);
  if (seen.body) showFigures(seen.body);
}

function showState({ state: now, message, body }) {
  const was = state;
  state = now in STATES ? now : "unknown";
  $("#state").dataset.state = state;
  // A live region: it is not said again while nothing changes.
  if (state !== was) $("#state").textContent = STATES[state];
  $("#trouble").hidden = state === "ok";
  $("#trouble").textContent = message ?? TROUBLES[state] ?? "";
  const names = JSON.stringify([state, body?.model?.id, body?.models?.map(({ id }) => id)]);
  if (names !== served && state !== "away" && state !== "locked") onReachable();
  served = names;
  if (state === "away") before = undefined; // another server may answer next
}

// --- figures --------------------------------------------------------------------------------------------

function showFigures({ tokens = {}, requests = {}, kv = {}, memory = {}, kernels = [], model = {}, device = {}, ...server }) {
  showSpeed(tokens.generated);
  showModels(server.models ?? []);
  rows($("#requests"), [
    ["Requests running", sum(server.models, "running") ?? requests.running],
    ["Requests waiting", sum(server.models, "waiting") ?? requests.waiting],
  ]);

  const pools = [["Full attention", kv.full], ["Sliding window", kv.sliding]];
  bars($("#pools"), pools.flatMap(([name, { held, cached, free } = {}]) => {
    const all = held + cached + free;
    if (!all) return [];
    const below = `${count(held)} of ${count(all)} blocks in use, ${count(cached)} cached`;
    return { name, said: `${percent(held, all)} in use`, parts: [held / all, cached / all], below };
  }));

  const heaps = Map.groupBy(memory.placed ?? [], ({ heap }) => heap);
  const sums = [...heaps].map(([name, parts]) => [name, parts.reduce((sum, part) => sum + part.bytes, 0), parts]);
  const told = new Map((memory.heaps ?? []).map((heap) => [heap.heap, heap]));
  const largest = Math.max(...sums.map(([, all]) => all));
  bars($("#placed"), sums.map(([name, all, parts]) => {
    parts.sort((a, b) => b.bytes - a.bytes);
    const below = parts.map((part) => `${part.class} ${bytes(part.bytes)}`);
    const { size_bytes: size, free_bytes: free, read_bytes_per_s: read } = told.get(name) ?? {};
    if (size) below.push(`${bytes(free)} free`);
    if (read) below.push(`read at ${(read / 1e9).toFixed(1)} GB/s`);
    const said = size ? `${bytes(all)} of ${bytes(size)}` : bytes(all);
    return { name, said, parts: parts.map((part) => part.bytes / (size || largest)), below: below.join(", ") };
  }));
  const held = [["VRAM in use", memory.vram_bytes], ["GTT in use", memory.gtt_bytes], ["Host memory in use", memory.resident_bytes]];
  rows($("#held"), held.filter(([, n]) => n).map(([name, n]) => [name, bytes(n)]));

  const guesses = (what) => Object.values(server.guesses ?? {}).reduce((sum, guesser) => sum + guesser[what], 0);
  bars($("#saved"), [
    ["Prompt tokens found in the cache", tokens.cached, tokens.prompt],
    ["Draft tokens accepted", guesses("accepted"), guesses("proposed")],
  ].filter(([, , all]) => all).map(([name, part, all]) => (
    { name, said: percent(part, all), parts: [part / all], below: `${count(part)} of ${count(all)} tokens` }
  )));

  const busy = kernels.reduce((sum, { seconds }) => sum + seconds, 0);
  const longest = [...kernels].sort((a, b) => b.seconds - a.seconds).slice(0, KERNELS);
  bars($("#kernels"), longest.map(({ kernel, seconds }) => ({ name: kernel, said: percent(seconds, busy), parts: [seconds / busy] })));

  rows($("#facts"), [
    ["Model", model.id],
    ["Context", model.context && `${count(model.context)} tokens`],
    ["Weights", model.weights],
    ["Device", device.name],
    ["Driver", device.driver],
    ["Running for", server.uptime_s !== undefined && time(server.uptime_s)],
    ["Version", server.version],
    ["Last error", server.last_error?.message],
  ]);
}

/** The sum of a figure of several models; undefined if there is one model. */
const sum = (models, figure) => models?.reduce((all, model) => all + (model[figure] ?? 0), 0);

const ACTIONS = { loaded: "Unload", unloaded: "Load" };

/** Several models: what each does and holds, with a button that loads or unloads it. */
function showModels(models) {
  const list = $("#library ul");
  $("#library").hidden = models.length === 0;
  // Rows stay, so that a button keeps the focus.
  while (list.children.length > models.length) list.lastElementChild.remove();
  while (list.children.length < models.length) {
    const row = $("#library-model").content.cloneNode(true).firstElementChild;
    row.querySelector("button").addEventListener("click", () => act(row));
    list.append(row);
  }
  models.forEach(({ id, state, bytes: held, loading }, i) => {
    const row = list.children[i];
    const [name, what] = row.querySelectorAll("span");
    name.textContent = id;
    what.textContent = state === "loading" && loading ? loading : held ? `${state}, ${bytes(held)}` : state;
    row.dataset.model = id;
    row.dataset.state = state;
    const button = row.querySelector("button");
    // While the model loads, the button stays, because it may have the focus.
    button.textContent = ACTIONS[state] ?? "Loading";
    button.setAttribute("aria-label", `${button.textContent} ${id}`);
  });
}

/** Loads or unloads the model of a row. A load may take minutes, in which the button does nothing. */
async function act(row) {
  const { model, state: was } = row.dataset;
  const button = row.querySelector("button");
  if (button.ariaDisabled === "true") return;
  button.ariaDisabled = "true";
  try {
    await postJson(was === "loaded" ? "models/unload" : "models/load", { model });
  } catch (error) {
    say(error.message);
  }
  button.ariaDisabled = "false";
  look();
}

function showSpeed(tokens) {
  $("#speed").hidden = tokens === undefined;
  const now = { at: performance.now(), tokens };
  // Who comes back to the page asks at once. So short a time tells no rate.
  if (now.at - before?.at < EVERY_MS / 2) return;
  // A count that is smaller than before is another server's.
  const perSecond = tokens >= before?.tokens ? ((tokens - before.tokens) / (now.at - before.at)) * 1000 : undefined;
  before = now;
  $("#rate").textContent = perSecond === undefined ? "–" : rate(perSecond);
  if (perSecond === undefined) return;
  curve.push(perSecond);
  if (curve.length > POINTS) curve.shift();
  const most = Math.max(1, ...curve);
  const x = (i) => (120 * (POINTS - curve.length + i)) / (POINTS - 1);
  $("#curve").setAttribute("points", curve.map((y, i) => `${x(i).toFixed(1)},${(31 - (29 * y) / most).toFixed(1)}`).join(" "));
}

/** Bars: {name, said, parts: shares of the whole track, each paler than the one before, below}. */
function bars(parent, bars) {
  parent.replaceChildren(...bars.map(({ name, said, parts, below }) => {
    const track = node("div", { className: "track" }, ...parts.map((share, i) => {
      const part = node("i", {});
      part.style.flexBasis = `${100 * share}%`;
      part.style.opacity = Math.max(0.2, 0.55 ** i);
      return part;
    }));
    const lines = [node("p", {}, node("span", {}, name), node("span", {}, said)), track];
    if (below) lines.push(node("p", { className: "parts" }, below));
    return node("div", { className: "bar" }, ...lines);
  }));
  parent.closest("section").hidden = bars.length === 0;
}

/** Rows of a list of terms: those whose value is not known are left out. */
function rows(parent, rows) {
  const known = rows.filter(([, value]) => value !== undefined && value !== null && value !== false);
  parent.replaceChildren(...known.flatMap(([term, value]) => [node("dt", {}, term), node("dd", {}, String(value))]));
  if (parent.id === "facts") parent.closest("section").hidden = known.length === 0;
}

function node(tag, properties, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

const UNITS = [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]];

function bytes(n) {
  const [unit, name] = UNITS.find(([unit]) => n >= unit) ?? [1, "B"];
  return `${(n / unit).toFixed(n < 100 * unit && unit > 1 ? 1 : 0)} ${name}`;
}

const count = (n) => n.toLocaleString("en");
const percent = (part, whole) => `${((100 * part) / whole).toFixed(0)} %`;

function time(seconds) {
  const [d, h, m] = [Math.floor(seconds / 86400), Math.floor(seconds / 3600) % 24, Math.floor(seconds / 60) % 60];
  if (d) return `${d} d ${h} h`;
  return h ? `${h} h ${m} min` : m ? `${m} min` : `${Math.floor(seconds)} s`;
}
