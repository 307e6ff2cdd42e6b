// Conversations as files that the browser saves: one as Markdown for reading or as JSON, or all of them as JSON.
//
// JSON has all that the page keeps of a conversation, with messages that `/v1/chat/completions` accepts as they are.

import { contentOf } from "./conversations.js";
import { closed } from "./markdown.js";

/** Characters of a file's name before its ending: at most 240 bytes, and file systems have 255. */
const MAX_NAME = 60;
const FREE_MS = 60_000;

const dialog = document.querySelector("#export");
let offered;

/** Asks for a format, and saves the conversation {title, turns} and, once it is stored, {pinned, changed_ms}. */
export function offer(conversation) {
  offered = conversation;
  dialog.returnValue = "";
  dialog.showModal();
}

dialog.addEventListener("close", () => {
  const name = fileName(offered.title);
  if (dialog.returnValue === "markdown") download(`${name}.md`, "text/markdown", asMarkdown(offered));
  if (dialog.returnValue === "json") download(`${name}.json`, "application/json", asJson(asObject(offered)));
});

export function saveAll(all) {
  const [day] = new Date().toISOString().split("T");
  download(`unicorn-conversations-${day}.json`, "application/json", asJson({ conversations: all.map(asObject) }));
}

/** A name for every file system: without separators, control characters, and characters that change the direction. */
export function fileName(title) {
  const safe = title.replace(/[\p{Cc}\p{Cs}\p{Zl}\p{Zp}\p{Bidi_Control}\\/:*?"<>|]+/gu, "-").replace(/^[-.\s]+|[-.\s]+$/g, "");
  return [...safe].slice(0, MAX_NAME).join("").replace(/[-.\s]+$/, "") || "conversation";
}

/** The system prompt at the beginning is that of the last answer; an earlier answer with another one names its own. */
export function asObject({ title, pinned, changed_ms: changed, turns }) {
  const { model, system } = lastAnswer(turns);
  const messages = turns.map((turn) => {
    if (turn.role === "user") return { role: "user", content: contentOf(turn) };
    const message = { role: "assistant", content: turn.text, reasoning_content: turn.thought, model: turn.model };
    if (turn.model && turn.system !== system) message.system = turn.system ?? "";
    return { ...message, state: turn.state, note: turn.note };
  });
  if (system) messages.unshift({ role: "system", content: system });
  return { title, model, changed: changed && new Date(changed).toISOString(), pinned: Boolean(pinned), messages };
}

export function asMarkdown({ title, changed_ms: changed, turns }) {
  const { system } = lastAnswer(turns);
  const parts = [`# ${plain(title)}`];
  if (changed) parts.push(`Last changed ${new Date(changed).toLocaleString("en", { dateStyle: "medium", timeStyle: "short" })}`);
  if (system) parts.push("## System prompt", closed(system.trimEnd()));
  for (const { role, text, images = [], model, thought, state, note } of turns) {
    parts.push(role === "user" ? "## You" : `## Answer${model ? ` (${plain(model)})` : ""}`);
    if (thought) parts.push("**Thought**", thought.trim().split(/\r\n?|\n/).map((line) => `> ${line}`).join("\n"));
    for (const { name } of images) parts.push(`*Picture: ${plain(name)}*`);
    if (text) parts.push(closed(text.trimEnd()));
    if (role !== "user" && state !== "done" && note) parts.push(`*${plain(note)}*`);
  }
  return `${parts.join("\n\n")}\n`;
}

/** The last answer whose model is known. */
const lastAnswer = (turns) => turns.findLast(({ model }) => model) ?? {};

/** One line in which no character is markup. */
const plain = (text) => text.trim().replace(/\s+/g, " ").replace(/[\\`*_[\]<>#|~$&]/g, "\\$&");

const asJson = (value) => `${JSON.stringify(value, null, 2)}\n`;

function download(name, type, text) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), FREE_MS); // the browser may still be reading it
}
