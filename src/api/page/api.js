// Talks to the server that this page came from. Addresses are relative, so that a proxy may put it under a path.

import { forget, recall, remember } from "./store.js";

/** A stream whose line is longer is none of ours. */
const MAX_LINE = 1 << 22;

/** What the server said instead of an answer; status 0 without an answer. */
export class ApiError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

let key = recall("session", "key");
let onKeyWanted = () => {};

/** `wanted(refused)` is called when the server asks for a key, or refused the one it got. */
export function whenKeyIsWanted(wanted) {
  onKeyWanted = wanted;
}

export function setKey(value) {
  key = value.trim() || undefined;
  if (key) remember("session", "key", key);
  else forget("session", "key");
}

/** A response below 400; everything else is an ApiError. An abort stays what it is. */
async function call(path, options = {}) {
  const sent = key;
  const headers = { ...options.headers, ...(sent && { Authorization: `Bearer ${sent}` }) };
  let response;
  try {
    response = await fetch(path, { cache: "no-store", ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached.");
  }
  if (response.ok) return response;
  if (response.status === 401 && sent === key) onKeyWanted(Boolean(sent));
  const body = await response.json().catch(() => null);
  throw new ApiError(body?.error?.message ?? `The server answered with HTTP status ${response.status}.`, response.status);
}

export async function getJson(path, signal) {
  const response = await call(path, { signal });
  return response.json().catch(() => {
    throw new ApiError(`The server's answer to ${path} is not JSON.`);
  });
}

/** Sends an object, and returns the object that the server answers. */
export async function postJson(path, body) {
  const headers = { "Content-Type": "application/json" };
  const response = await call(path, { method: "POST", headers, body: JSON.stringify(body) });
  return response.json();
}

/** The chunks of a streamed chat completion, as objects. Throws where it ends before its `[DONE]`. */
export async function* streamChat(body, signal) {
  const response = await call("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  const events = new Events();
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) throw new ApiError("The connection was closed before the answer was complete.");
      for (const data of events.push(value)) {
        if (data === "[DONE]") return;
        const chunk = parse(data);
        if (chunk.error) throw new ApiError(chunk.error.message ?? "The server reported an error without a message.");
        yield chunk;
      }
    }
  } catch (error) {
    if (error instanceof ApiError || error.name === "AbortError") throw error;
    throw new ApiError("The connection was lost in the middle of the answer.");
  } finally {
    reader.cancel().catch(() => {}); // the rest is not read
  }
}

function parse(data) {
  try {
    return JSON.parse(data);
  } catch {
    throw new ApiError("The server sent a line that is not JSON.");
  }
}

/** Server-sent events from text in pieces of any size: comments and other fields are skipped, data lines joined. */
export class Events {
  #rest = "";
  #data = [];

  /** The data of the events that end in `text`. */
  push(text) {
    this.#rest += text;
    // A CR at the very end may be half of CR LF: it waits for what comes.
    const lines = this.#rest.split(/\r\n|\n|\r(?!$)/);
    this.#rest = lines.pop();
    if (this.#rest.length > MAX_LINE) throw new ApiError("The server sent a line that is too long.");
    const whole = [];
    for (const line of lines) {
      if (line.startsWith("data:")) this.#data.push(line.slice(line[5] === " " ? 6 : 5));
      if (line !== "" || this.#data.length === 0) continue;
      whole.push(this.#data.join("\n"));
      this.#data = [];
    }
    return whole;
  }
}
