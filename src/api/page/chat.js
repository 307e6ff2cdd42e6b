// The conversation that is shown, and the answers that are being written: in this one, or in others that this tab has left
// meanwhile. The server keeps nothing between requests, so every request carries all turns.
//
// A turn is {role, text}, with {images} of a question with pictures (pictures.js) and, of an answer, also {state, note, thought, model, system}: state is "writing", "done", "stopped" or
// "failed", note is said below it, thought is what the model thought before the text, which is shown and not sent again;
// model and system prompt are those that it was asked with. Whatever was written before an answer was stopped or failed
// is part of the conversation.
//
// A conversation is {id, title, version, turns}. It is saved while its answer is being written, so that a tab that is
// closed leaves what had come. A save that finds another tab's becomes a conversation of its own: neither is lost.

import { streamChat } from "./api.js";
import * as conversations from "./conversations.js";
import { render } from "./markdown.js";
import { say } from "./notice.js";
import * as pictures from "./pictures.js";

/** Pixels from the end within which a reader counts as reading along. */
const READING_ALONG = 80;
const SAVE_EVERY_MS = 500;
const ASK_WRITER_MS = 3000;
/** An answer counts as done once it is saved, and without that after this time. */
const SAVE_WITHIN_MS = 20_000;
/** Drawing an answer takes at most a quarter of the time, however long it is. */
const REST = 3;

const log = document.querySelector("#log");
const welcome = document.querySelector("#welcome");
const form = document.querySelector("#composer");
const input = document.querySelector("#input");
const send = document.querySelector("#send");
const editing = document.querySelector("#editing");
const said = document.querySelector("#said");

/** Conversations whose answers this tab writes: conversation -> what stops the answer, with its outcome until that is saved. */
const writing = new Map();
let shown = fresh();
let model = "";
let parameters = () => ({});
let nameModel = async () => "";
let onSwitch = () => {};
let onUnsaved = () => {};
/** Index of the turn that the composer holds for editing, and what the composer held before: {text, images}. */
let edited;
let draft;

function fresh(turns = []) {
  return { id: conversations.newId(), title: "", version: 0, turns };
}

/**
 * `fields` gives the request's fields in addition to model and messages, and {system}; `name` the model's, if it is not set.
 * `switched` is called when another conversation is shown, or the answer in one begins or ends; `unsaved` with a conversation that
 * the browser does not keep, when the user wants it as a file.
 */
export function start(fields, name, switched, unsaved) {
  parameters = fields;
  nameModel = name;
  onSwitch = switched;
  onUnsaved = unsaved;
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (writing.has(shown)) writing.get(shown).abort();
    else ask();
  });
  input.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || isComposing(event)) return;
    event.preventDefault();
    if (!writing.has(shown)) ask();
  });
  input.addEventListener("input", grow);
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || isComposing(event) || document.querySelector("dialog[open]")) return;
    if (writing.has(shown)) writing.get(shown).abort();
    else stopEditing();
  });
  document.querySelector("#stop-editing").addEventListener("click", stopEditing);
  log.addEventListener("click", act);
  for (const suggestion of document.querySelectorAll("#welcome button")) {
    suggestion.addEventListener("click", () => {
      input.value = suggestion.textContent;
      ask();
    });
  }
  addEventListener("hashchange", () => open(idInAddress()));
  setInterval(expectWriter, ASK_WRITER_MS);
  // A tab may be closed at any time that it is hidden.
  document.addEventListener("visibilitychange", () => document.hidden && writing.forEach((_, one) => keep(one)));
  if (idInAddress()) open(idInAddress());
}

/** Whether a key is for the input method. Safari reports its last one after the composition, with the code 229. */
export const isComposing = (event) => event.isComposing || event.keyCode === 229;

export function setModel(id) {
  model = id;
  input.placeholder = id ? `Message ${id}` : "Message";
}

// --- which conversation is shown ------------------------------------------------------------------------

// The address names the conversation, so that a page that is loaded again, a bookmark and the browser's way back find it.
const idInAddress = () => location.hash.slice(1);
const addressOfNone = () => location.pathname + location.search;

export const shownId = () => shown.id;

/** The turns as this tab has them, whether or not they could be saved; undefined where it has not opened the conversation. */
export const turnsOf = (id) => [shown, ...writing.keys()].find((one) => one.id === id)?.turns;

/** The ids of the conversations whose answers this tab writes. */
export const beingWritten = () => new Set([...writing.keys()].map((one) => one.id));

/** An empty conversation. Nothing is saved before the first question. */
export function startNew() {
  if (idInAddress()) history.pushState(null, "", addressOfNone());
  showConversation(fresh());
  input.focus();
}

/** Shows a conversation of the list; a new one where `id` is none. */
export async function open(id) {
  if (id === shown.id) return;
  const here = [...writing.keys()].find((one) => one.id === id);
  const found = here ?? (id ? await conversations.load(id).catch(() => undefined) : fresh());
  if (!found) {
    say("This conversation is not stored in this browser.");
    // Otherwise the way back would end here.
    if (idInAddress() === id) history.replaceState(null, "", addressOfNone());
    return startNew();
  }
  if (idInAddress() !== id) history.pushState(null, "", `#${id}`);
  if (!here) interrupt(found, false);
  showConversation(found);
  if (found.isInterrupted) conversations.askWhoWrites(id);
}

function showConversation(conversation) {
  stopEditing();
  cut(0);
  shown = conversation;
  shown.turns.forEach(show);
  showWriting();
  follow(() => {}, true);
}

/** Ends what this tab does in a conversation that is being deleted. */
export async function leave(id) {
  for (const [one, own] of writing) {
    if (one.id !== id) continue;
    own.abort();
    await own.ended;
    one.isDeleted = true;
  }
  if (shown.id !== id) return;
  shown.isDeleted = true;
  startNew();
}

/** An answer that is no longer written ends where it stopped. */
function interrupt(conversation, isBeingWritten) {
  const last = conversation.turns.at(-1);
  conversation.isWrittenElsewhere = isBeingWritten;
  if (isBeingWritten || last?.state !== "writing" || writing.has(conversation)) return;
  conversation.isInterrupted = true;
  last.state = "stopped";
  last.note = "Interrupted: the page was closed before the answer was complete";
}

/** Asks whether the tab that writes the answer is still there: without a reply to the last question, it is not. */
function expectWriter() {
  if (!shown.isWrittenElsewhere) return;
  if (shown.isWriterAsked) {
    interrupt(shown, false);
    fill(log.lastElementChild, shown.turns.at(-1));
    return;
  }
  shown.isWriterAsked = true;
  conversations.askWhoWrites(shown.id);
}

/** Follows what other tabs do. */
export async function hear({ id, version, asked, isBeingWritten }, own) {
  for (const one of writing.keys()) if (one.id === asked) conversations.tell({ id: asked, version: one.version, isBeingWritten: true });
  if (own || id === undefined || id !== shown.id || writing.has(shown) || shown.saving) return;
  shown.isWriterAsked = false;
  if (version === shown.version && (isBeingWritten ?? shown.isWrittenElsewhere) === shown.isWrittenElsewhere) return;
  if (version === undefined) {
    if (shown.version > 0) say("This conversation was deleted in another tab.");
    return leave(id);
  }
  const conversation = shown;
  const found = await conversations.load(id).catch(() => undefined);
  if (!found || shown !== conversation || writing.has(shown)) return;
  interrupt(found, isBeingWritten);
  const sameUntil = found.turns.findIndex((turn, i) => turn.text !== shown.turns[i]?.text);
  if (edited !== undefined && sameUntil >= 0 && sameUntil <= edited) stopEditing();
  follow(() => {
    cut(Math.min(log.children.length, found.turns.length));
    shown = found;
    shown.turns.forEach((turn, i) => (log.children[i] ? fill(log.children[i], turn) : show(turn)));
  });
  onSwitch();
}

// --- asking ---------------------------------------------------------------------------------------------

function ask() {
  if (writing.has(shown)) return;
  if (pictures.whenRead()) {
    const { id } = shown; // another tab may replace it
    pictures.whenRead().then((all) => all && id === shown.id && ask());
    return;
  }
  const text = input.value.trim();
  const images = pictures.held();
  if (!text && !images.length) return;
  if (images.length && pictures.areRefused()) return;
  if (shown.isWrittenElsewhere) {
    say("Another tab is writing an answer in this conversation. Your question went into a copy of it.");
    becomeOther(shown);
    fill(log.lastElementChild, shown.turns.at(-1));
  }
  if (edited === undefined) compose({ text: "" });
  else {
    forgetFrom(edited);
    stopEditing();
  }
  add({ role: "user", text, ...(images.length && { images }) });
  answer();
}

/** Has the last user turn of the conversation that is shown answered. */
function answer() {
  const own = new AbortController();
  writing.set(shown, own);
  own.ended = write(shown, own);
}

async function write(conversation, own) {
  const { system, ...fields } = parameters();
  const messages = conversation.turns.filter((turn) => turn.text || turn.images).map((turn) => ({ role: turn.role, content: conversations.contentOf(turn) }));
  if (system) messages.unshift({ role: "system", content: system });
  const turn = { role: "assistant", text: "", state: "writing", ...(system && { system }) };
  add(turn);
  const draw = onFrames(() => shown === conversation && follow(() => fill(log.lastElementChild, turn)));
  showWriting();
  follow(() => {}, true);
  keep(conversation);

  const began = performance.now();
  const seen = {};
  // A save writes all turns: pictures make it rarer, a second for a megabyte.
  const pause = SAVE_EVERY_MS + conversations.sizeOf(conversation.turns) / 1000;
  let saving;
  try {
    // A question may come before the page has heard the model's name.
    const named = model || (await nameModel(own.signal));
    turn.model = named;
    for await (const chunk of streamChat({ model: named, messages, ...fields }, own.signal)) {
      const choice = chunk.choices?.[0];
      seen.reason = choice?.finish_reason ?? seen.reason;
      seen.timings = chunk.timings ?? seen.timings;
      seen.usage = chunk.usage ?? seen.usage;
      const { content, reasoning_content: thought } = choice?.delta ?? {};
      if (!content && !thought) continue;
      seen.first ??= performance.now() - began;
      if (thought) turn.thought = (turn.thought ?? "") + thought;
      turn.text += content ?? "";
      draw();
      saving ??= setTimeout(() => {
        saving = undefined;
        keep(conversation);
      }, pause);
    }
    own.outcome = { state: "done", note: summary(seen) };
  } catch (error) {
    const stopped = error.name === "AbortError";
    const note = stopped ? `Stopped after ${duration(performance.now() - began)}` : error.message;
    own.outcome = { state: stopped ? "stopped" : "failed", note };
  }
  draw.end();
  clearTimeout(saving);
  Object.assign(turn, own.outcome);
  // A user may reload or close the page as soon as the answer looks complete.
  await Promise.race([keep(conversation), new Promise((resolve) => setTimeout(resolve, SAVE_WITHIN_MS))]);
  writing.delete(conversation);
  showWriting();
  if (shown !== conversation) return;
  follow(() => fill(log.lastElementChild, turn));
  said.textContent = turn.state === "done" ? turn.text : `${turn.text} ${turn.note}`;
}

/** What the server measured of an answer; times to the first token as this page saw them. */
function summary({ first, timings, usage, reason }) {
  const parts = [];
  const tokens = timings?.predicted_n ?? usage?.completion_tokens;
  if (tokens !== undefined) parts.push(tokens === 1 ? "1 token" : `${tokens} tokens`);
  if (timings?.predicted_per_second) parts.push(`${rate(timings.predicted_per_second)} tokens/s`);
  if (first !== undefined) parts.push(`first token after ${duration(first)}`);
  const cached = timings?.cache_n ?? usage?.prompt_tokens_details?.cached_tokens;
  const prompt = usage?.prompt_tokens ?? (timings && timings.prompt_n + timings.cache_n);
  if (prompt) parts.push(`${prompt} prompt tokens${cached ? `, ${cached} of them cached` : ""}`);
  if (reason === "length") parts.push("stopped at the token limit");
  return parts.join(" · ");
}

function duration(ms) {
  return ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`;
}

export function rate(perSecond) {
  return perSecond < 10 ? perSecond.toFixed(1) : Math.round(perSecond).toLocaleString("en");
}

// --- the view -------------------------------------------------------------------------------------------

/** Adds a turn to the conversation that is shown, and to the log. */
function add(turn) {
  shown.turns.push(turn);
  show(turn);
}

function show(turn) {
  const template = document.querySelector(turn.role === "user" ? "#user-turn" : "#answer-turn");
  const node = template.content.cloneNode(true).firstElementChild;
  fill(node, turn);
  log.append(node);
  welcome.hidden = true;
}

function fill(node, turn) {
  const text = node.querySelector(".text");
  if (turn.role === "user") {
    text.textContent = turn.text;
    text.hidden = !turn.text;
    showPictures(node.querySelector(".pictures"), turn.images ?? []);
    return;
  }
  node.dataset.state = turn.state;
  showThought(node, turn);
  render(text, turn.text, turn.state === "writing");
  node.querySelector(".note").textContent = turn.note ?? "";
  node.querySelector("[data-act=copy]").hidden = !turn.text;
  node.querySelector("[data-act=again]").textContent = turn.state === "failed" ? "Try again" : "Regenerate";
}

function showPictures(box, images) {
  box.hidden = images.length === 0;
  if (box.children.length === images.length && images.every(({ url }, i) => box.children[i].src === url)) return;
  box.replaceChildren(...images.map(pictures.imageOf));
}

/** Shows what the model thought above its answer, folded. */
function showThought(node, { thought, text, state }) {
  let box = node.querySelector("details");
  if (!thought) {
    box?.remove();
    return;
  }
  if (!box) {
    box = document.createElement("details");
    box.append(document.createElement("summary"), document.createElement("div"));
    box.lastChild.dir = "auto";
    node.prepend(box);
  }
  box.firstChild.textContent = state === "writing" && !text ? "Thinking…" : "Thought";
  box.lastChild.textContent = thought;
}

/** Leaves the first `n` turns of the log. */
function cut(n) {
  while (log.children.length > n) log.lastElementChild.remove();
  welcome.hidden = n > 0;
}

function act(event) {
  const button = event.target.closest("button");
  if (button?.dataset.copy === "code") copy(button, button.closest(".code").querySelector("code").textContent);
  const index = [...log.children].indexOf(button?.closest(".turn"));
  const act = button?.dataset.act;
  if (act === "copy") copy(button, shown.turns[index].text);
  if (act === "edit" && !writing.has(shown)) edit(index);
  if (act === "again" && !writing.has(shown)) {
    stopEditing();
    forgetFrom(index);
    answer();
    input.focus();
  }
}

/** Puts a turn into the composer; what follows it goes when it is sent. */
function edit(index) {
  if (edited === undefined) draft = { text: input.value, images: pictures.held() };
  edited = index;
  compose(shown.turns[index]);
  input.focus();
}

/** Puts back what was written for a new turn before one was edited. */
function stopEditing() {
  if (edited === undefined) return;
  edited = undefined;
  compose(draft);
}

function compose({ text, images = [] }) {
  editing.hidden = edited === undefined;
  input.value = text;
  pictures.hold(images);
  grow();
}

/** Takes a turn and all that follow it from the conversation that is shown; a copy with them is offered. */
function forgetFrom(index) {
  const turns = structuredClone(shown.turns);
  const answers = turns.slice(index).filter(({ role, text }) => role === "assistant" && text).length;
  if (answers) {
    const { title } = shown;
    say(answers === 1 ? "The earlier answer is being replaced." : `${answers} earlier answers are being replaced.`, "Keep a copy", async () => {
      const copy = { ...fresh(turns), title: `${title} (copy)` };
      await keep(copy);
      if (copy.version > 0) await open(copy.id);
    });
  }
  shown.turns.length = index;
  cut(index);
}

function showWriting() {
  document.body.classList.toggle("writing", writing.has(shown));
  send.textContent = writing.has(shown) ? "Stop" : "Send";
  onSwitch();
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

/** `draw` at most once for each frame, and not at all while the page is hidden; `end` draws what is left. */
function onFrames(draw) {
  let [frame, timer, next] = [undefined, undefined, 0];
  const request = () => {
    if (frame !== undefined || timer !== undefined) return;
    timer = setTimeout(() => {
      timer = undefined;
      frame = requestAnimationFrame(() => {
        frame = undefined;
        const began = performance.now();
        draw();
        const ended = performance.now();
        next = ended + REST * (ended - began);
      });
    }, next - performance.now());
  };
  request.end = () => {
    clearTimeout(timer);
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
  button.textContent = done ? "Copied" : "Copy failed";
  setTimeout(() => (button.textContent = "Copy"), 1500);
}

// --- what is kept ---------------------------------------------------------------------------------------

const NOT_SAVED = {
  full: "This conversation is not saved: it and the pinned conversations take more space than this page uses. Unpin or delete some.",
  refused: "This conversation is not saved: the browser refuses to store more for this page. Delete some conversations, or free disk space.",
};

/** Saves a conversation as it is now. Its saves follow each other, and one that waits stands for all that came before it. */
async function keep(conversation) {
  conversation.hasChanged = true;
  while (conversation.saving) await conversation.saving;
  if (!conversation.hasChanged || conversation.isDeleted) return;
  conversation.hasChanged = false;
  conversation.saving = save(conversation).finally(() => (conversation.saving = undefined));
  await conversation.saving;
}

async function save(conversation) {
  conversation.title ||= conversations.titleFrom(conversation.turns[0].text || conversation.turns[0].images[0].name);
  try {
    const isBeingWritten = writing.has(conversation) && !writing.get(conversation).outcome;
    const { version, dropped } = await conversations.save(conversation, isBeingWritten);
    conversation.version = version;
    conversation.isUnsaved = false;
    if (dropped.length) {
      const what = dropped.length === 1 ? `the oldest conversation, “${dropped[0]}”, was` : `the ${dropped.length} oldest conversations were`;
      say(`To make room, ${what} deleted. Pin the conversations that must stay.`);
    }
    if (conversation === shown && idInAddress() !== conversation.id) history.replaceState(null, "", `#${conversation.id}`);
  } catch ({ why }) {
    if (why === "conflict") {
      if (conversation.isDeleted) return;
      say("This conversation was changed in another tab. What you see here is kept as a second one.");
      becomeOther(conversation);
      await save(conversation);
      return;
    }
    if (!conversation.isUnsaved) say(NOT_SAVED[why], "Export", () => onUnsaved(conversation)); // once, not at every save
    conversation.isUnsaved = true;
  }
}

/** From here on the conversation is another one, with the same beginning. */
function becomeOther(conversation) {
  conversation.id = conversations.newId();
  conversation.version = 0;
  interrupt(conversation, false);
}
