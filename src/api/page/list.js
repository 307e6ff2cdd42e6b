// The list of conversations: to open, pin, rename, export and delete them, and to take a deletion back.

import * as chat from "./chat.js";
import * as conversations from "./conversations.js";
import { offer, saveAll } from "./export.js";
import { say } from "./notice.js";

const $ = (selector) => document.querySelector(selector);
const list = $("#conversations");

const BETWEEN_MS = 50;
const NOT_READ = "The browser refused to read what it stores for this page.";

/** The id of the conversation whose title is being edited. Meanwhile the list stays as it is. */
let renamed;
let onOpen = () => {};
let drawing = false;
let again = false;

/** `opened` is called when the user chose a conversation. */
export async function start(opened) {
  onOpen = opened;
  list.addEventListener("click", act);
  list.addEventListener("keydown", (event) => {
    const { target, key } = event;
    if (target.localName !== "input" || !["Enter", "Escape"].includes(key) || chat.isComposing(event)) return;
    event.preventDefault(); // Enter would press the button that gets the focus
    event.stopPropagation(); // and Escape stops no answer
    const row = target.closest("li");
    if (key === "Escape") target.value = "";
    target.blur();
    row.querySelector("[data-act=rename]").focus();
  });
  list.addEventListener("focusout", (event) => event.target.localName === "input" && endRenaming(event.target));
  $("#export-all").addEventListener("click", exportAll);
  draw();
  $("#not-kept").hidden = await conversations.areKept();
}

/** Draws the list anew: once for all that changed within `BETWEEN_MS`. */
export async function draw() {
  again = true;
  if (drawing) return;
  drawing = true;
  while (again) {
    again = false;
    show(await conversations.list().catch(() => []));
    await new Promise((resolve) => setTimeout(resolve, BETWEEN_MS));
  }
  drawing = false;
}

function show(all) {
  if (renamed) return;
  const writing = chat.beingWritten();
  const rows = new Map([...list.children].map((row) => [row.dataset.id, row]));
  const ordered = all.map((one) => {
    const row = rows.get(one.id) ?? $("#conversation").content.cloneNode(true).firstElementChild;
    const isShown = one.id === chat.shownId();
    const open = row.querySelector("[data-act=open]");
    Object.assign(row.dataset, { id: one.id, state: writing.has(one.id) ? "writing" : "" });
    open.querySelector("span").textContent = one.title;
    open.title = `${one.title}\nLast changed ${new Date(one.changed_ms).toLocaleString("en", { dateStyle: "medium", timeStyle: "short" })}`;
    if (isShown) open.setAttribute("aria-current", "page");
    else open.removeAttribute("aria-current");
    row.classList.toggle("pinned", Boolean(one.pinned));
    row.querySelector("[data-act=pin]").textContent = one.pinned ? "Unpin" : "Pin";
    row.querySelector("div").hidden = !isShown;
    return row;
  });
  // Rows that are moved lose the focus, and a click that has begun on them.
  const isInOrder = ordered.length === list.children.length && ordered.every((row, i) => row === list.children[i]);
  const focused = document.activeElement;
  if (!isInOrder) list.replaceChildren(...ordered);
  if (focused !== document.activeElement && list.contains(focused)) focused.focus();
  $("#no-conversations").hidden = all.length > 0;
  $("#export-all").hidden = all.length === 0;
}

async function act({ target }) {
  const button = target.closest("button");
  const row = button?.closest("li");
  const { id } = row?.dataset ?? {};
  try {
    if (button?.dataset.act === "open") {
      await chat.open(id);
      onOpen();
    }
    if (button?.dataset.act === "pin") await conversations.change(id, { pinned: button.textContent === "Pin" });
    if (button?.dataset.act === "rename") rename(row);
    if (button?.dataset.act === "export") await exportOne(id);
    if (button?.dataset.act === "delete") await remove(id);
  } catch {
    say("The browser refused to change what it stores for this page.");
  }
}

function rename(row) {
  const open = row.querySelector("[data-act=open]");
  const input = $("#title-input").content.cloneNode(true).firstElementChild;
  input.value = open.textContent.trim();
  renamed = row.dataset.id;
  open.hidden = true;
  row.prepend(input);
  row.querySelector("div").hidden = true;
  input.focus();
  input.select();
}

async function endRenaming(input) {
  const row = input.closest("li");
  if (!row || row.dataset.id !== renamed) return;
  renamed = undefined;
  const title = input.value.trim();
  row.querySelector("[data-act=open]").hidden = false;
  row.querySelector("div").hidden = row.dataset.id !== chat.shownId();
  input.remove();
  if (title) await conversations.change(row.dataset.id, { title }).catch(() => say("The browser refused to save the title."));
  draw();
}

async function exportOne(id) {
  const saved = await conversations.load(id).catch(() => undefined);
  if (saved) offer({ ...saved, turns: chat.turnsOf(id) ?? saved.turns });
  else say(NOT_READ);
}

async function exportAll() {
  try {
    const all = await conversations.loadAll();
    saveAll(all.map((one) => ({ ...one, turns: chat.turnsOf(one.id) ?? one.turns })));
  } catch {
    say(NOT_READ);
  }
}

async function remove(id) {
  await chat.leave(id);
  const removed = await conversations.remove(id);
  if (!removed) return;
  say(`“${removed.about.title}” was deleted.`, "Undo", async () => {
    try {
      await conversations.restore(removed);
    } catch {
      return say("The browser refused to store the conversation again.");
    }
    await chat.open(id);
  });
}
