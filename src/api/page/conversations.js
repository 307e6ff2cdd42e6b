// The conversations that this browser keeps, for all of its tabs: in IndexedDB, or for this tab alone where the browser
// keeps nothing.
//
// What the list shows of a conversation is {id, title, pinned, changed_ms, version, size}; its turns lie in a store of
// their own. A save names the version that the turns began with. If another tab has saved meanwhile, nothing is
// written, so that no tab overwrites what another one wrote.

const NAME = "unicorn";
const STORES = ["conversations", "turns"];
export const MAX_CONVERSATIONS = 500;
/** Characters of all conversations together: 60 MB at most. */
const MAX_CHARACTERS = 30_000_000;
const MAX_TITLE = 80;

/** Why a conversation was not saved: "conflict" where another tab has saved it or deleted it, "full", or "refused" by the browser. */
export class NotSaved extends Error {
  constructor(why) {
    super(why);
    this.why = why;
  }
}

export const newId = () => [...crypto.getRandomValues(new Uint8Array(8))].map((byte) => byte.toString(16).padStart(2, "0")).join("");

/** Short enough for a list. */
export function titleFrom(text) {
  const line = text.trim().split("\n")[0].replace(/\s+/g, " ");
  return line.length > MAX_TITLE ? `${line.slice(0, MAX_TITLE - 1).trimEnd()}…` : line;
}

/** Whether conversations outlive this tab. */
export const areKept = async () => (await database()) instanceof IDBDatabase;

/** What the list shows: pinned conversations first, and of each kind the one that changed last. */
export async function list() {
  const all = await transact("readonly", ({ conversations }) => conversations.getAll());
  return inOrder(all);
}

const inOrder = (all) => all.sort((a, b) => b.pinned - a.pinned || b.changed_ms - a.changed_ms);

/** What the list shows, and {turns}; or undefined. */
export async function load(id) {
  const [about, turns] = await transact("readonly", (stores) => Promise.all([stores.conversations.get(id), stores.turns.get(id)]));
  return about && areSound(turns?.turns) ? { ...about, turns: turns.turns } : undefined;
}

/** What `load` returns, for all conversations, in the order of the list. */
export async function loadAll() {
  const [all, kept] = await transact("readonly", (stores) => Promise.all(STORES.map((name) => stores[name].getAll())));
  const turns = new Map(kept.map((one) => [one.id, one.turns]));
  return inOrder(all).map((about) => ({ ...about, turns: turns.get(about.id) })).filter((one) => areSound(one.turns));
}

function areSound(turns) {
  const isPicture = (one) => typeof one?.name === "string" && /^data:image\//.test(one.url);
  const areNoneOrPictures = (images) => images === undefined || (Array.isArray(images) && images.every(isPicture));
  const isSound = (turn) => ["user", "assistant"].includes(turn?.role) && typeof turn.text === "string" && areNoneOrPictures(turn.images);
  return Array.isArray(turns) && turns.every(isSound);
}

/** Characters of turns. */
export const sizeOf = (turns) => turns.reduce((sum, { text, thought = "", system = "", images = [] }) =>
  images.reduce((sum, { url }) => sum + url.length, sum + text.length + thought.length + system.length), 0);

/** What the server reads of a turn, in OpenAI's format. */
export function contentOf({ text, images }) {
  if (!images) return text;
  const parts = images.map(({ url }) => ({ type: "image_url", image_url: { url } }));
  return text ? [...parts, { type: "text", text }] : parts;
}

/**
 * Saves the turns of a conversation, which had `version` when they were read, or 0 where it is new. Returns the new version, and
 * the titles of the oldest conversations that were deleted to make room: none that is pinned. Throws `NotSaved`.
 */
export async function save({ id, version, turns, title }, isBeingWritten) {
  const size = sizeOf(turns);
  const saved = await transact("readwrite", async (stores) => {
    const old = await stores.conversations.get(id);
    if ((old?.version ?? 0) !== version) throw new NotSaved("conflict");
    const about = { title, pinned: 0, ...old, id, changed_ms: Date.now(), version: version + 1, size };
    // In the middle of an answer there is little to gain.
    const dropped = version > 0 && isBeingWritten ? [] : await makeRoom(stores, about);
    await Promise.all([stores.conversations.put(about), stores.turns.put({ id, turns })]);
    return { version: about.version, dropped };
  });
  tell({ id, version: saved.version, isBeingWritten });
  for (const { id } of saved.dropped) tell({ id });
  return { version: saved.version, dropped: saved.dropped.map((one) => one.title) };
}

/** Deletes the oldest conversations that are not pinned until there is room for `about`, and returns them. */
async function makeRoom(stores, about) {
  const others = (await stores.conversations.getAll()).filter((one) => one.id !== about.id);
  const droppable = others.filter((one) => !one.pinned).sort((a, b) => a.changed_ms - b.changed_ms);
  const dropped = [];
  let characters = others.reduce((sum, one) => sum + one.size, about.size);
  while (others.length - dropped.length + 1 > MAX_CONVERSATIONS || characters > MAX_CHARACTERS) {
    const oldest = droppable.shift();
    if (!oldest) throw new NotSaved("full");
    characters -= oldest.size;
    dropped.push(oldest);
    await Promise.all(STORES.map((name) => stores[name].delete(oldest.id)));
  }
  return dropped;
}

/** Changes the title, or whether it is pinned. The version is that of the turns, and stays. */
export async function change(id, { title, pinned }) {
  const version = await transact("readwrite", async ({ conversations }) => {
    const about = await conversations.get(id);
    if (!about) return undefined;
    if (title !== undefined) about.title = titleFrom(title) || about.title;
    if (pinned !== undefined) about.pinned = Number(pinned);
    await conversations.put(about);
    return about.version;
  });
  tell({ id, version });
}

/** Deletes a conversation, and returns what `restore` needs to put it back; undefined where it was not there. */
export async function remove(id) {
  const removed = await transact("readwrite", async (stores) => {
    const [about, turns] = await Promise.all([stores.conversations.get(id), stores.turns.get(id)]);
    await Promise.all(STORES.map((name) => stores[name].delete(id)));
    return about && { about, turns };
  });
  tell({ id });
  return removed;
}

export async function restore({ about, turns }) {
  await transact("readwrite", (stores) => Promise.all([stores.conversations.put(about), stores.turns.put(turns)]));
  tell({ id: about.id, version: about.version });
}

// --- other tabs -----------------------------------------------------------------------------------------

const channel = new BroadcastChannel(NAME);
let heard = () => {};

/** `hear` is called with each change, from whichever tab: {id, version, isBeingWritten}, without a version where it was deleted. */
export function whenChanged(hear) {
  heard = hear;
}

/** Asks the tab in which an answer in this conversation is being written, if there is one, to tell of it. */
export const askWhoWrites = (id) => channel.postMessage({ asked: id });

export function tell(change) {
  channel.postMessage(change);
  heard(change, true);
}

channel.onmessage = ({ data }) => heard(data, false);

// --- the browser's storage ------------------------------------------------------------------------------

let opened;

/** The database, or maps that live as long as this tab. */
function database() {
  opened ??= new Promise((resolve) => {
    const instead = () => resolve(new Map(STORES.map((name) => [name, new Map()])));
    try {
      const request = indexedDB.open(NAME, 1);
      request.onupgradeneeded = () => STORES.forEach((name) => request.result.createObjectStore(name, { keyPath: "id" }));
      request.onerror = request.onblocked = instead;
      request.onsuccess = () => {
        request.result.onversionchange = () => request.result.close();
        request.result.onclose = () => (opened = undefined); // the storage was emptied: it is made again
        resolve(request.result);
      };
    } catch {
      instead();
    }
  });
  return opened;
}

/** Runs `work` with both stores: all that it does is written, or nothing is. */
async function transact(mode, work) {
  const there = await database();
  if (there instanceof Map) return work(Object.fromEntries(STORES.map((name) => [name, inMemory(there.get(name))])));
  let transaction;
  try {
    transaction = there.transaction(STORES, mode);
    const done = new Promise((resolve, reject) => {
      transaction.oncomplete = resolve;
      transaction.onabort = () => reject(transaction.error);
    });
    done.catch(() => {}); // it is awaited below, unless `work` fails first
    const value = await work(Object.fromEntries(STORES.map((name) => [name, inDatabase(transaction.objectStore(name))])));
    await done;
    return value;
  } catch (error) {
    try {
      transaction?.abort();
    } catch {
      // It has ended.
    }
    throw error instanceof NotSaved ? error : new NotSaved("refused");
  }
}

function inDatabase(store) {
  const promised = (request) => new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
  const call = (name) => (...args) => promised(store[name](...args));
  return { get: call("get"), getAll: call("getAll"), put: call("put"), delete: call("delete") };
}

const inMemory = (map) => ({
  get: async (id) => structuredClone(map.get(id)),
  getAll: async () => structuredClone([...map.values()]),
  put: async (value) => map.set(value.id, structuredClone(value)),
  delete: async (id) => map.delete(id),
});
