// Puts the page together: conversations, chat, status, settings, the API key, and which view a phone shows.

import { getJson, setKey, whenKeyIsWanted } from "./api.js";
import * as chat from "./chat.js";
import { whenChanged } from "./conversations.js";
import { offer } from "./export.js";
import * as list from "./list.js";
import * as pictures from "./pictures.js";
import * as status from "./status.js";
import { forget, recall, remember } from "./store.js";

const $ = (selector) => document.querySelector(selector);

// --- the API key ----------------------------------------------------------------------------------------

whenKeyIsWanted((refused) => {
  if (refused) setKey("");
  if ($("#key-form").hidden) $("#key").value = "";
  $("#key-form").hidden = false;
  if (!$("#input").value) $("#key").focus();
  $("#key-form label").textContent = refused ? "The server does not accept this API key." : "This server needs an API key.";
});

$("#key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const wrong = $("#key").value.trim().match(/[^!-~]/u)?.[0];
  if (wrong) {
    // A browser does not send it.
    const code = wrong.codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
    $("#key-form label").textContent = `This is no API key: it has the character U+${code}, and a key is letters, digits and signs of ASCII, without blanks.`;
    return;
  }
  setKey($("#key").value);
  $("#key").value = "";
  $("#key-form").hidden = true; // it comes back if the server says so
  tryToNameModel();
  status.look();
  $("#input").focus();
});

// --- settings -------------------------------------------------------------------------------------------

const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];
const parameters = $("#parameters form");

/** What was set, ready for a request. */
function set() {
  const fields = {};
  if (parameters.elements.system.value.trim()) fields.system = parameters.elements.system.value;
  for (const name of NUMBERS) {
    const { valueAsNumber, validity } = parameters.elements[name];
    if (validity.valid && !Number.isNaN(valueAsNumber)) fields[name] = valueAsNumber;
  }
  return fields;
}

function showWhetherSet() {
  const n = Object.keys(set()).length;
  $("#open-parameters").textContent = n ? `Settings (${n})` : "Settings";
}

function recallParameters() {
  const saved = recall("local", "parameters") ?? {};
  for (const name of ["system", ...NUMBERS]) parameters.elements[name].value = saved[name] ?? "";
  showWhetherSet();
}

$("#open-parameters").addEventListener("click", () => $("#parameters").showModal());
$("#reset-parameters").addEventListener("click", () => {
  forget("local", "parameters");
  recallParameters();
});
$("#parameters").addEventListener("close", () => {
  remember("local", "parameters", set());
  recallParameters(); // without what was not valid
});

// --- views ----------------------------------------------------------------------------------------------

const tabs = [$("#tab-history"), $("#tab-chat"), $("#tab-status")];

function view(tab) {
  document.body.dataset.view = tab.getAttribute("aria-controls");
  for (const other of tabs) {
    other.setAttribute("aria-selected", other === tab);
    other.tabIndex = other === tab ? 0 : -1;
  }
}

for (const tab of tabs) {
  tab.addEventListener("click", () => view(tab));
  tab.addEventListener("keydown", (event) => {
    if (!["ArrowLeft", "ArrowRight"].includes(event.key)) return;
    // Tabs that this width does not need are not there.
    const there = tabs.filter((one) => one.offsetParent);
    const next = there.at((there.indexOf(tab) + (event.key === "ArrowRight" ? 1 : -1)) % there.length);
    view(next);
    next.focus();
  });
}

// --- begin ----------------------------------------------------------------------------------------------

/** The models that read pictures. */
let readers = new Set();
/** The model that this tab asks. */
let used;

/** Asks for the names of the models, which are there while a model loads. A new tab asks the model that was chosen last. */
async function nameModel(signal) {
  const { data } = await getJson("v1/models", signal);
  // An alias is listed too, with the id of its model.
  const ids = data.filter(({ id, display_name: own }) => (own ?? id) === id).map(({ id }) => id);
  readers = new Set(data.filter((one) => one.architecture?.input_modalities?.includes("image")).map(({ id }) => id));
  const id = [used, recall("local", "model")].find((one) => ids.includes(one)) ?? ids[0];
  const several = ids.length > 1;
  $("#model").textContent = several ? "" : id;
  $("#models").hidden = !several;
  $("#models").replaceChildren(...(several ? ids.map((one) => new Option(one, one, false, one === id)) : []));
  useModel(id);
  return id;
}

function useModel(id) {
  used = id;
  document.title = `${id} · Unicorn`;
  chat.setModel(id);
  pictures.allow(readers.has(id));
}

$("#models").addEventListener("change", ({ target }) => {
  remember("local", "model", target.value);
  useModel(target.value);
});

// Where it fails, the status says what is wrong; once that is over, this is asked again.
const tryToNameModel = () => nameModel().catch(() => {});

$("#new-chat").addEventListener("click", () => {
  view($("#tab-chat"));
  chat.startNew();
});
recallParameters();
whenChanged((change, own) => {
  chat.hear(change, own);
  list.draw();
});
pictures.start();
chat.start(set, nameModel, list.draw, offer);
list.start(() => view($("#tab-chat")));
status.start(tryToNameModel);
