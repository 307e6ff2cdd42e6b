// What a tab remembers. Storage may be switched off or full: then nothing is remembered, and nothing breaks.
//
// "session" is of this tab alone and ends with it (API key); "local" outlives it (settings). Conversations lie elsewhere:
// conversations.js.

const area = (kind) => (kind === "local" ? window.localStorage : window.sessionStorage);

/** Undefined where nothing is remembered. */
export function recall(kind, name) {
  try {
    return JSON.parse(area(kind).getItem(`unicorn.${name}`)) ?? undefined;
  } catch {
    return undefined;
  }
}

export function remember(kind, name, value) {
  try {
    area(kind).setItem(`unicorn.${name}`, JSON.stringify(value));
  } catch {
    forget(kind, name); // half a truth is none
  }
}

export function forget(kind, name) {
  try {
    area(kind).removeItem(`unicorn.${name}`);
  } catch {
    // It was not there either.
  }
}
