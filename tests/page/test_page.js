#!/usr/bin/env node
/*
 * Tests of the page in a browser: Debian's Chromium, headless, with a real `unicorn serve` and the demo model.
 *
 * tools/test.py starts it with NODE_PATH at the pinned playwright-core, after `cargo build`. Prints one line per test and
 * at the end `page: N passed, N failed`. Answers that the demo model and server would not give (markup, errors, a key) are
 * simulated in the browser instead. Pictures are written to target/page for inspection.
 */

"use strict";

const fs = require("node:fs");
const path = require("node:path");
const { SMOLLM2, WAIT_MS, check, emptyFolder, fails, needsTrained, run, same, sleep, unicorn, until } = require("./drive.js");

const PICTURES = emptyFolder("page");
const SEED = 20261121;

// --- the browser ----------------------------------------------------------------------------------------

let browser;
let server;

/** A page of `server` in a separate browser profile, which collects its errors and its requests to other hosts. */
async function open(options = {}) {
  const context = await browser.newContext({ viewport: { width: 1280, height: 800 }, ...options });
  context.setDefaultTimeout(WAIT_MS);
  const page = await openIn(context);
  return page;
}

async function openIn(context, before = async () => {}) {
  const page = await context.newPage();
  page.problems = [];
  page.foreign = [];
  page.on("console", (message) => message.type() === "error" && page.problems.push(message.text()));
  page.on("pageerror", (error) => page.problems.push(error.message));
  page.on("dialog", (dialog) => { page.problems.push(`dialog: ${dialog.message()}`); dialog.dismiss(); });
  page.on("request", (request) => request.url().startsWith(server.url) || page.foreign.push(request.url()));
  await before(page);
  await page.goto(server.url);
  return page;
}

async function ask(page, text) {
  await page.fill("#input", text);
  await page.keyboard.press("Enter");
}

/** The text of the last answer, after it has ended in `state`. */
async function answered(page, state = "done") {
  const last = page.locator(".turn").last();
  await until(async () => (await last.getAttribute("data-state")) === state, `the last answer is ${state}`);
  return last.locator(".text").innerText();
}

const status = async () => (await fetch(`${server.url}status`)).json();

const isState = (page, state) => until(async () => (await page.getAttribute("#state", "data-state")) === state, `the page says ${state}`);

/** Answers chat requests with these chunks instead of the server. */
async function script(page, ...chunks) {
  const lines = chunks.map((chunk) => `data: ${typeof chunk === "string" ? chunk : JSON.stringify(chunk)}\n\n`);
  const reply = { headers: { "content-type": "text/event-stream" }, body: `: a comment\n\n${lines.join("")}` };
  await page.route("**/v1/chat/completions", (route) => route.fulfill(reply));
}

const says = (content) => ({ choices: [{ index: 0, delta: { content }, finish_reason: null }] });
const STOP = { choices: [{ index: 0, delta: {}, finish_reason: "stop" }] };
const DONE = "[DONE]";

/** The length of an answer that is stopped. */
const WITHOUT_END = 6000;

/** Makes the server generate a long answer. The demo model's own answers are short. */
const withoutEnd = (page) => page.route("**/v1/chat/completions", (route) => {
  const body = JSON.stringify({ ...route.request().postDataJSON(), ignore_eos: true, max_tokens: WITHOUT_END });
  return route.continue({ postData: body });
});

/** Waits until the list shows exactly these titles. */
async function listed(page, titles) {
  let found;
  const isListed = async () => JSON.stringify(found = await page.locator("#conversations [data-act=open] span").allInnerTexts()) === JSON.stringify(titles);
  await until(isListed, titles.join()).catch(() => same(found, titles, "the list"));
}

/** Clicks `button`, and returns the name and the text of the file that the browser saves. */
async function saved(page, button) {
  const [download] = await Promise.all([page.waitForEvent("download"), page.click(button)]);
  return [download.suggestedFilename(), fs.readFileSync(await download.path(), "utf8")];
}

const IMAGES = path.resolve(__dirname, "../data/images");
const base64 = (name) => fs.readFileSync(path.join(IMAGES, name)).toString("base64");

/** Gives the page files as the event `kind` does, "paste" or "drop". */
const give = (page, kind, files) => page.evaluate(async ([kind, files]) => {
  const data = new DataTransfer();
  for (const { name, url } of files) {
    const [, type, bytes] = /^data:(.*);base64,(.*)$/.exec(url);
    data.items.add(new File([Uint8Array.from(atob(bytes), (character) => character.charCodeAt(0))], name, { type }));
  }
  const event = kind === "paste" ? new ClipboardEvent(kind, { clipboardData: data, bubbles: true, cancelable: true })
    : new DragEvent(kind, { dataTransfer: data, bubbles: true, cancelable: true });
  document.querySelector("#input").dispatchEvent(event);
  if (!event.defaultPrevented) throw new Error("the browser would open the file");
}, [kind, files]);

const picture = (page, name) => page.screenshot({ path: path.join(PICTURES, `${name}.png`) });

// --- the tests ------------------------------------------------------------------------------------------

const tests = {
  async the_page_loads_without_errors_and_contacts_no_other_host() {
    const page = await open();
    await isState(page, "ok");
    // The page requests the model's name after the status.
    await until(async () => (await page.innerText("#model")) === "unicorn-demo", "the page names the model");
    await sleep(2000); // and requests the status again
    same(page.problems, [], "complaints");
    same(page.foreign, [], "requests elsewhere");
    check(await page.locator("#welcome").isVisible(), "the welcome text of an empty chat");
    await picture(page, "empty");
  },

  async an_answer_is_streamed_and_shows_its_statistics() {
    const page = await open();
    await ask(page, "What is the capital of France?");
    check((await answered(page)).includes("Paris"), await answered(page));
    const note = await page.locator(".note").innerText();
    check(/^\d+ tokens · [\d.]+ tokens\/s · first token after [\d.]+ m?s · \d+ prompt tokens/.test(note), note);
    // The second turn includes the first one, whose prefix is in the cache.
    await ask(page, "Tell me a short story about a dragon.");
    await answered(page);
    same(await page.locator(".turn").count(), 4, "turns");
    same(await page.evaluate(() => document.activeElement.id), "input", "focus");
    same(page.problems, [], "complaints");
    await picture(page, "answered");
  },

  async a_question_can_be_sent_before_the_model_name_is_known() {
    const context = await browser.newContext();
    context.setDefaultTimeout(WAIT_MS);
    let asked = 0;
    const page = await openIn(context, (page) => page.route("**/v1/models", async (route) => {
      // The page requests the model after the status, and this request is never answered. The second one is for the question.
      asked += 1;
      if (asked > 1) await route.continue();
    }));
    await until(async () => asked === 1, "the page asks for the model");
    await ask(page, "What is the capital of France?");
    check((await answered(page)).includes("Paris"), await answered(page));
    same(await page.innerText("#model"), "unicorn-demo", "the model's name");
    same(page.problems, [], "complaints");
  },

  async a_question_is_stopped_before_the_model_name_is_known() {
    const context = await browser.newContext();
    context.setDefaultTimeout(WAIT_MS);
    const page = await openIn(context, (page) => page.route("**/v1/models", () => {})); // it is never answered
    await ask(page, "What is the capital of France?");
    await page.click("#send >> text=Stop");
    await answered(page, "stopped");
    same(page.problems, [], "complaints");
  },

  async another_model_after_a_restart_that_the_page_did_not_see_is_asked() {
    const context = await browser.newContext();
    context.setDefaultTimeout(WAIT_MS);
    let name = "before";
    const page = await openIn(context, async (page) => {
      await page.route("**/v1/models", (route) => route.fulfill({ json: { data: [{ id: name }] } }));
      await page.route("**/status", (route) => route.fulfill({ json: { status: "ok", model: { id: name } } }));
    });
    for (name of ["before", "after"]) await until(async () => (await page.innerText("#model")) === name, `the model is ${name}`);
    await script(page, says("An answer."), STOP, DONE);
    const [asked] = await Promise.all([page.waitForRequest("**/v1/chat/completions"), ask(page, "Hello")]);
    same(asked.postDataJSON().model, "after", "the model that is asked");
    same(page.problems, [], "complaints");
  },

  async a_question_that_is_sent_before_the_scripts_are_loaded_stays() {
    const context = await browser.newContext();
    context.setDefaultTimeout(WAIT_MS);
    const page = await context.newPage();
    const problems = [];
    page.on("console", (message) => message.type() === "error" && problems.push(message.text()));
    let load;
    const wanted = new Promise((resolve) => { load = resolve; });
    await page.route("**/page/libraries.js", (route) => wanted.then(() => route.fallback()));
    await page.goto(server.url, { waitUntil: "commit" });
    await page.fill("#input", "What is the capital of France?");
    await page.evaluate(() => document.querySelector("#send").click());
    await sleep(500);
    load();
    await isState(page, "ok");
    same(await page.inputValue("#input"), "What is the capital of France?", "the message");
    await page.click("#send");
    check((await answered(page)).includes("Paris"), await answered(page));
    same(problems, [], "complaints");
  },

  async the_status_shows_what_the_server_reports() {
    const page = await open();
    for (const question of ["What is the capital of France?", "What is the capital of Spain?"]) {
      await ask(page, question);
      await answered(page);
    }
    const told = await status();
    const shown = async () => (await page.innerText("#status")).replace(/\s+/g, " ");
    await until(async () => (await shown()).includes(`Context ${told.model.context.toLocaleString("en")} tokens`), "the context");
    for (const part of ["Model unicorn-demo", `Device ${told.device.name}`, `Version ${told.version}`, "Requests waiting 0", "Full attention", "Sliding window"]) {
      check((await shown()).includes(part), `${part} is not in: ${await shown()}`);
    }
    for (const { class: kind } of told.memory.placed) check((await shown()).includes(kind), `${kind} is not in: ${await shown()}`);
    for (const { heap, size_bytes: size, free_bytes: free } of told.memory.heaps) {
      check(size > 0 && free <= size, `${heap}: ${free} of ${size} bytes free`);
    }
    check(/ of [0-9.]+ [KMG]iB/.test(await page.locator("#placed").innerText()), "the bars measure against the heaps");
    await until(async () => /^[\d.,]+$/.test(await page.innerText("#rate")), "tokens per second");
    await until(async () => (await page.getAttribute("#curve", "points")).includes(" "), "a curve");
    // Fields that the server omits are not shown.
    for (const [body, said, trouble] of [
      [{ status: "loading" }, "Loading the model", "The model is loading"],
      [{ status: "unloaded" }, "Model unloaded", "No model is in memory. The next question loads one."],
      [{ status: "lost", last_error: { message: "the device is gone" }, version: "1" }, "GPU lost", "until it is restarted"],
      [{ status: "failed" }, "Failed", "because of a bug"],
      [{ status: "draining", kv: {}, tokens: {}, memory: {}, kernels: [] }, "Shutting down", "accepts no new questions"],
      [{}, "Status unknown", "does not report"],
      [{ status: "ok", tokens: { generated: 5 } }, "Ready", ""],
    ]) {
      await page.route("**/status", (route) => route.fulfill({ json: body }));
      await until(async () => (await page.innerText("#state")) === said, said);
      check(trouble === "" ? await page.locator("#trouble").isHidden() : (await page.innerText("#trouble")).includes(trouble), `trouble of ${said}`);
      check(!(await shown()).includes("undefined") && !(await shown()).includes("NaN"), await shown());
      if (said === "Loading the model") await picture(page, "loading");
      await page.unroute("**/status");
    }
    same(page.problems, [], "complaints");
  },

  async stopping_an_answer_also_stops_the_server() {
    const page = await open();
    await withoutEnd(page);
    for (const stop of [() => page.keyboard.press("Escape"), () => page.click("#send")]) {
      await ask(page, "Tell me a short story about a dragon.");
      await until(async () => (await page.locator(".turn").last().locator(".text").innerText()).length > 20, "text");
      same(await page.innerText("#send"), "Stop", "the button");
      await picture(page, "writing");
      const before = (await status()).tokens.generated;
      await stop();
      check((await answered(page, "stopped")).length > 20, "what was written stays");
      await until(async () => (await status()).requests.running === 0, "the server stops as well");
      const more = (await status()).tokens.generated - before;
      check(more < WITHOUT_END / 2, `the server generated ${more} more tokens`);
    }
    await page.unroute("**/v1/chat/completions");
    await ask(page, "What is the capital of France?");
    await answered(page);
    same(page.problems, [], "complaints");
  },

  async answers_can_be_repeated_and_questions_edited() {
    const page = await open();
    let asked = [];
    page.on("request", (request) => request.method() === "POST" && asked.push(request.postDataJSON()));
    await ask(page, "What is the capital of France?");
    await answered(page);
    await page.click("[data-act=again] >> visible=true");
    await until(() => asked.length === 2, "a second request");
    await answered(page);
    same(asked[1].messages, asked[0].messages, "the messages of the second try");
    await ask(page, "What is the capital of Spain?");
    await answered(page);
    await page.locator("[data-act=edit]").first().click();
    same(await page.inputValue("#input"), "What is the capital of France?", "the edited question");
    await page.keyboard.press("Escape");
    same([await page.inputValue("#input"), await page.locator(".turn").count()], ["", 4], "nothing changed");
    await page.locator("[data-act=edit]").first().click();
    await ask(page, "What is the capital of Italy?");
    check((await answered(page)).includes("Rome"), "the edited question's answer");
    same(await page.locator(".turn").count(), 2, "turns");
    const edited = page.url();
    await page.click("#notice >> text=Keep a copy");
    await until(async () => (await page.locator(".turn").count()) === 4, "the conversation as it was");
    check((await page.locator(".answer").first().innerText()).includes("Paris"), "the copy has its first answer");
    await listed(page, ["What is the capital of France? (copy)", "What is the capital of France?"]);
    await page.goto(edited);
    await until(async () => (await page.locator(".turn").count()) === 2, "the edited conversation");
    // A reloaded page shows its conversation. A new chat shows none.
    await page.reload();
    await until(async () => (await page.locator(".turn").count()) === 2, "two turns after a reload");
    await page.click("#new-chat");
    await page.reload();
    same(await page.locator(".turn").count(), 0, "turns of a new chat");
    same(page.problems, [], "complaints");
  },

  async keys_of_an_input_method_neither_send_nor_stop() {
    const page = await open();
    await page.route("**/v1/chat/completions", () => {}); // an answer that never begins
    await page.fill("#input", "Hello");
    const press = (key, by) => page.locator("#input").dispatchEvent("keydown", { key, ...by, bubbles: true, cancelable: true });
    const ways = [{ isComposing: true }, { keyCode: 229 }];
    for (const way of ways) await press("Enter", way);
    same(await page.locator(".turn").count(), 0, "turns while a word is composed");
    await press("Enter", {});
    await until(async () => (await page.innerText("#send")) === "Stop", "the question is sent");
    for (const way of ways) await press("Escape", way);
    await sleep(300);
    same(await page.innerText("#send"), "Stop", "the button while a word is composed");
    await press("Escape", {});
    await answered(page, "stopped");
  },

  async an_unsent_message_survives_edits_and_regeneration() {
    const page = await open();
    await script(page, says("An answer."), STOP, DONE);
    await ask(page, "First");
    await answered(page);
    const draft = "Not sent yet";
    await page.fill("#input", draft);
    await page.click("[data-act=again]");
    await answered(page);
    same(await page.inputValue("#input"), draft, "after a regeneration");
    await page.click("[data-act=edit]");
    same(await page.inputValue("#input"), "First", "the edited message");
    await page.click("#stop-editing");
    same(await page.inputValue("#input"), draft, "after Cancel");
    await page.click("[data-act=edit]");
    await page.click("[data-act=again]");
    await answered(page);
    same([await page.inputValue("#input"), await page.locator("#editing").isVisible()], [draft, false], "after a regeneration during an edit");
    await page.click("[data-act=edit]");
    await ask(page, "Changed");
    await answered(page);
    same([await page.inputValue("#input"), await page.locator(".user .text").allInnerTexts()], [draft, ["Changed"]], "after the edited message was sent");
    await page.keyboard.press("Enter");
    await answered(page);
    same([await page.inputValue("#input"), await page.locator(".user .text").allInnerTexts()], ["", ["Changed", draft]], "after it was sent");
    same(page.problems, [], "complaints");
  },

  async answers_and_code_are_copied() {
    const context = await browser.newContext({ permissions: ["clipboard-read", "clipboard-write"] });
    context.setDefaultTimeout(WAIT_MS);
    const page = await openIn(context);
    const text = "Run *this*:\n\n```sh\nls  -l\n```";
    await script(page, says(text), STOP, DONE);
    await ask(page, "Hello");
    await answered(page);
    for (const [button, copied] of [["[data-act=copy]", text], ["[data-copy=code]", "ls  -l"]]) {
      await page.click(button);
      await until(async () => (await page.innerText(button)) === "Copied", "it says so");
      same(await page.evaluate(() => navigator.clipboard.readText()), copied, button);
      // The label comes back after a second click, too.
      await page.click(button);
      await sleep(2000);
      same(await page.innerText(button), "Copy", button);
    }
    same(page.problems, [], "complaints");
  },

  async parameters_are_sent_only_if_set() {
    const page = await open();
    await isState(page, "ok");
    let asked;
    page.on("request", (request) => request.method() === "POST" && (asked = request.postDataJSON()));
    await ask(page, "Hello");
    await answered(page);
    same(Object.keys(asked).sort(), ["messages", "model", "stream", "stream_options"], "fields");
    await page.click("#open-parameters");
    await page.fill("[name=system]", "Be brief.");
    await page.fill("[name=temperature]", "0");
    await page.fill("[name=max_tokens]", "2");
    await page.fill("[name=seed]", "7");
    await page.click("dialog .primary");
    await page.reload();
    await until(async () => (await page.locator(".turn").count()) === 2, "the conversation after a reload");
    await ask(page, "What is the capital of France?");
    await answered(page);
    same([asked.temperature, asked.max_tokens, asked.seed, asked.top_p], [0, 2, 7, undefined], "fields");
    same(asked.messages[0], { role: "system", content: "Be brief." }, "the system text");
    check((await page.locator(".note").last().innerText()).endsWith("stopped at the token limit"), "why it ended");
    same(page.problems, [], "complaints");
  },

  async two_tabs_are_two_conversations() {
    const page = await open();
    const other = await openIn(page.context());
    await Promise.all([ask(page, "What is the capital of France?"), ask(other, "What is the capital of Italy?")]);
    check((await answered(page)).includes("Paris"), "the one");
    check((await answered(other)).includes("Rome"), "the other");
    for (const one of [page, other]) {
      await one.reload();
      await until(async () => (await one.locator(".turn").count()) === 2, "two turns after a reload");
      same(one.problems, [], "complaints");
    }
  },

  async conversations_survive_closing_the_tab() {
    const page = await open();
    await ask(page, "What is the capital of France?");
    await answered(page);
    const address = page.url();
    await page.click("#new-chat");
    check(await page.locator("#welcome").isVisible(), "a new chat is empty");
    await ask(page, "What is the capital of Italy?");
    await answered(page);
    await listed(page, ["What is the capital of Italy?", "What is the capital of France?"]);
    await page.reload();
    check((await answered(page)).includes("Rome"), "the conversation after a reload");
    await listed(page, ["What is the capital of Italy?", "What is the capital of France?"]);
    await page.locator("#conversations [data-act=open]").last().click();
    await until(() => page.url() === address, "the address of the conversation that was chosen");
    check((await answered(page)).includes("Paris"), "that conversation");
    await page.goBack();
    await until(async () => (await page.locator(".user .text").innerText()).includes("Italy"), "the browser's way back");
    const { problems } = page;
    await page.close();
    const other = await openIn(page.context());
    same(await other.locator(".turn").count(), 0, "turns in a new tab");
    await listed(other, ["What is the capital of Italy?", "What is the capital of France?"]);
    await other.locator("#conversations [data-act=open]").first().click();
    check((await answered(other)).includes("Rome"), "the conversation in a new tab");
    await ask(other, "What is the capital of Spain?");
    await answered(other);
    same(await other.locator(".turn").count(), 4, "turns");
    await picture(other, "conversations");
    same([problems, other.problems], [[], []], "complaints");
  },

  async an_unfinished_answer_survives_closing_the_tab() {
    const page = await open();
    await withoutEnd(page);
    await ask(page, "Tell me a short story about a dragon.");
    const text = page.locator(".answer .text");
    await until(async () => (await text.innerText()).length > 200, "text");
    // The page saves twice a second, so the current text is stored after this wait.
    const had = (await text.innerText()).slice(0, 20);
    await sleep(1500);
    const watching = await openIn(page.context());
    await watching.goto(page.url());
    await answered(watching, "writing");
    await page.close();
    await answered(watching, "stopped"); // it asks the other tab, which no longer replies
    await until(async () => (await status()).requests.running === 0, "the server stops as well");
    const other = await openIn(page.context());
    await other.click("#conversations [data-act=open]");
    const kept = await answered(other, "stopped");
    check(kept.length > 200 && kept.startsWith(had), `${kept.length} characters are kept`);
    check((await other.innerText(".note")).startsWith("Interrupted"), await other.innerText(".note"));
    await other.click("[data-act=again] >> visible=true");
    await answered(other);
    same(other.problems, [], "complaints");
  },

  async text_before_a_pause_of_the_server_is_kept() {
    const page = await open();
    await isState(page, "ok");
    // The stream of an answer whose text comes at once, and whose end does not come.
    const line = `data: ${JSON.stringify(says("These words came early."))}\n\n`;
    await page.evaluate((line) => {
      const stream = () => new ReadableStream({ start: (control) => control.enqueue(new TextEncoder().encode(line)) });
      const real = window.fetch;
      window.fetch = (url, ...rest) => String(url).includes("completions") ? Promise.resolve(new Response(stream())) : real(url, ...rest);
    }, line);
    await ask(page, "What is the capital of France?");
    const other = await openIn(page.context());
    await until(() => other.locator("#conversations [data-act=open]").isVisible(), "the list of the other tab");
    await other.click("#conversations [data-act=open]");
    await until(async () => (await other.locator(".turn").last().innerText()).includes("These words came early."), "the text in the other tab");
    same(await page.locator(".turn").last().getAttribute("data-state"), "writing", "the answer");
    same([page.problems, other.problems], [[], []], "complaints");
  },

  async an_answer_continues_while_another_conversation_is_shown() {
    const page = await open();
    await withoutEnd(page);
    await ask(page, "Tell me a short story about a dragon.");
    const length = async () => (await page.locator(".turn").last().locator(".text").innerText()).length;
    await until(async () => (await length()) > 20, "text");
    await page.click("#new-chat");
    same(await page.innerText("#send"), "Send", "the button of a new chat");
    await page.unroute("**/v1/chat/completions");
    await ask(page, "What is the capital of France?");
    check((await answered(page)).includes("Paris"), "a second answer meanwhile");
    await until(async () => (await page.locator("#conversations [data-state=writing]").count()) === 1, "the list says which is being written");
    await page.locator("#conversations [data-act=open]", { hasText: "dragon" }).click();
    const before = await length();
    await until(async () => (await length()) > before, "the answer continues");
    await page.click("#send");
    check((await answered(page, "stopped")).length > 20, "what was written stays");
    await until(async () => (await page.locator("#conversations [data-state=writing]").count()) === 0, "nothing is being written");
    same(page.problems, [], "complaints");
  },

  async conversations_are_deleted_restored_renamed_and_pinned() {
    const page = await open();
    for (const question of ["What is the capital of France?", "What is the capital of Italy?"]) {
      await page.click("#new-chat");
      await ask(page, question);
      await answered(page);
    }
    await page.click("[data-act=rename] >> visible=true");
    await page.keyboard.type("About <b>Rome</b>");
    await page.keyboard.press("Enter");
    await listed(page, ["About <b>Rome</b>", "What is the capital of France?"]);
    await page.click("[data-act=rename] >> visible=true");
    await page.keyboard.type("Never mind");
    await page.keyboard.press("Escape");
    await listed(page, ["About <b>Rome</b>", "What is the capital of France?"]);
    await page.click("[data-act=delete] >> visible=true");
    await listed(page, ["What is the capital of France?"]);
    check(await page.locator("#welcome").isVisible(), "a deleted conversation is not shown");
    await picture(page, "deleted");
    await page.click("#notice >> text=Undo");
    await listed(page, ["About <b>Rome</b>", "What is the capital of France?"]);
    check((await answered(page)).includes("Rome"), "the conversation that is back");
    await page.locator("#conversations [data-act=open]").last().click();
    await until(async () => (await page.innerText("#conversations [aria-current]")).includes("France"), "another one is shown");
    await page.click("[data-act=pin] >> visible=true");
    await listed(page, ["What is the capital of France?", "About <b>Rome</b>"]);
    await page.reload();
    await listed(page, ["What is the capital of France?", "About <b>Rome</b>"]);
    await page.click("[data-act=pin] >> visible=true");
    await listed(page, ["About <b>Rome</b>", "What is the capital of France?"]);
    await page.click("[data-act=delete] >> visible=true");
    await listed(page, ["About <b>Rome</b>"]);
    await page.reload();
    await listed(page, ["About <b>Rome</b>"]);
    // A conversation that is deleted during its answer stays deleted, and is restored with the text until then.
    await withoutEnd(page);
    await page.click("#new-chat");
    await ask(page, "Tell me a short story about a dragon.");
    await until(async () => (await page.locator(".answer .text").innerText()).length > 20, "text");
    await page.click("[data-act=delete] >> visible=true");
    await until(async () => (await status()).requests.running === 0, "the server stops");
    await listed(page, ["About <b>Rome</b>"]);
    await page.click("#notice >> text=Undo");
    check((await answered(page, "stopped")).length > 20, "what was written");
    same(page.problems, [], "complaints");
  },

  async the_way_back_passes_a_deleted_conversation() {
    const page = await open();
    await script(page, says("An answer."), STOP, DONE);
    for (const question of ["First", "Second"]) {
      await page.click("#new-chat");
      await ask(page, question);
      await answered(page);
    }
    await page.click("[data-act=delete] >> visible=true");
    await listed(page, ["First"]);
    await page.evaluate(() => history.back());
    await until(async () => (await page.innerText("#notice")).includes("is not stored"), "it says that the conversation is gone");
    await page.evaluate(() => history.back());
    await until(async () => (await page.locator(".user .text").allInnerTexts()).join() === "First", "the conversation before it");
    same(page.problems, [], "complaints");
  },

  async a_title_is_changed_with_the_keyboard_alone() {
    for (const width of [1280, 390]) {
      const page = await open({ viewport: { width, height: 800 } });
      await ask(page, "What is the capital of France?");
      await answered(page);
      if (width === 390) await page.click("#tab-history");
      const focused = () => page.evaluate(() => document.activeElement.dataset.act ?? document.activeElement.localName);
      await page.focus("[data-act=rename] >> visible=true");
      for (const [key, title] of [["Enter", "About Paris"], ["Escape", "About Paris"], ["Enter", "Paris, again"]]) {
        await page.keyboard.press("Enter");
        const box = page.getByRole("textbox", { name: "Title of the conversation" });
        same([await focused(), await box.count()], ["input", 1], "what has the focus");
        await page.keyboard.type(key === "Escape" ? "Never mind" : title);
        if (key === "Enter") await picture(page, `rename-${width}`);
        await page.keyboard.press(key);
        await listed(page, [title]);
        same([await focused(), await box.count()], ["rename", 0], `what has the focus after ${key}`);
      }
      // While an input method composes, Enter chooses a word, and an empty title changes nothing.
      await page.keyboard.press("Enter");
      await page.locator("#conversations input").dispatchEvent("keydown", { key: "Enter", isComposing: true, bubbles: true });
      same(await focused(), "input", "what has the focus while a word is composed");
      await page.fill("#conversations input", " ");
      await page.keyboard.press("Tab");
      await listed(page, ["Paris, again"]);
      await page.reload();
      await listed(page, ["Paris, again"]);
      same(page.problems, [], "complaints");
      await page.context().close();
    }
  },

  async conversations_are_exported_as_markdown_and_as_json() {
    const page = await open();
    await page.click("#open-parameters");
    await page.fill("[name=system]", "Be brief.");
    await page.click("dialog .primary");
    await ask(page, "What is the capital of France?");
    const paris = await answered(page);
    await page.click("#open-parameters");
    await page.fill("[name=system]", "Answer in *English*.\n");
    await page.click("dialog .primary");
    const thinks = { choices: [{ index: 0, delta: { reasoning_content: "It wants code.\nAnd 🦄." }, finish_reason: null }] };
    await script(page, thinks, says("Here:\n\n```js\nlet a\n"), { error: { message: "the *device* was lost" } }, DONE);
    await ask(page, "Write <b>code</b>");
    await answered(page, "failed");
    await page.unroute("**/v1/chat/completions");
    await page.click("[data-act=rename] >> visible=true");
    await page.keyboard.type('../a\\b: "*Ü 東京*" <c>?');
    await page.keyboard.press("Enter");
    await page.click("[data-act=pin] >> visible=true");
    await listed(page, ['../a\\b: "*Ü 東京*" <c>?']);

    await page.click("[data-act=export] >> visible=true");
    await until(async () => (await page.evaluate(() => document.activeElement.textContent)) === "Markdown", "the dialog has the focus");
    await picture(page, "export-1280");
    const [name, markdown] = await saved(page, "#export [value=markdown]");
    same(name, "a-b- -Ü 東京- -c.md", "the name of the file");
    const [title, changed, ...rest] = markdown.split("\n\n");
    same([title, /^Last changed \w+ \d+, \d{4}, /.test(changed)], ['# ../a\\\\b: "\\*Ü 東京\\*" \\<c\\>?', true], `the beginning of ${markdown}`);
    same(rest.join("\n\n"), [
      "## System prompt", "Answer in *English*.", "## You", "What is the capital of France?", "## Answer (unicorn-demo)", paris,
      "## You", "Write <b>code</b>", "## Answer (unicorn-demo)", "**Thought**", "> It wants code.\n> And 🦄.",
      "Here:", "```js\nlet a\n```", "*the \\*device\\* was lost*\n",
    ].join("\n\n"), "the Markdown");

    await page.click("[data-act=export] >> visible=true");
    const [jsonName, json] = await saved(page, "#export [value=json]");
    same(jsonName, "a-b- -Ü 東京- -c.json", "the name of the file");
    const one = JSON.parse(json);
    check(Math.abs(Date.parse(one.changed) - Date.now()) < 60_000 + WAIT_MS, `the date ${one.changed}`);
    const note = await page.locator(".note").first().innerText();
    same({ ...one, changed: 0 }, {
      title: '../a\\b: "*Ü 東京*" <c>?', model: "unicorn-demo", changed: 0, pinned: true,
      messages: [
        { role: "system", content: "Answer in *English*.\n" },
        { role: "user", content: "What is the capital of France?" },
        { role: "assistant", content: paris, model: "unicorn-demo", system: "Be brief.", state: "done", note },
        { role: "user", content: "Write <b>code</b>" },
        {
          role: "assistant", content: "Here:\n\n```js\nlet a\n", reasoning_content: "It wants code.\nAnd 🦄.", model: "unicorn-demo",
          state: "failed", note: "the *device* was lost",
        },
      ],
    }, "the conversation");
    // The server accepts the messages as they are.
    const body = JSON.stringify({ ...one, messages: [...one.messages, { role: "user", content: "Hello" }] });
    same((await fetch(`${server.url}v1/chat/completions/input_tokens`, { method: "POST", body })).status, 200, "status");

    // Escape exports nothing, and neither does Cancel. The conversation is not changed by any of this.
    const downloads = [];
    page.on("download", (download) => downloads.push(download));
    for (const cancel of [() => page.keyboard.press("Escape"), () => page.click("#export [value='']")]) {
      await page.click("[data-act=export] >> visible=true");
      await page.locator("#export").waitFor();
      await cancel();
      check(await page.locator("#export").isHidden(), "the dialog is closed");
      same(await page.evaluate(() => document.activeElement.dataset.act), "export", "focus after the dialog");
    }
    same(downloads.length, 0, "files");

    await page.click("#new-chat");
    await ask(page, "What is the capital of Italy?");
    await answered(page);
    const [allName, all] = await saved(page, "#export-all");
    check(/^unicorn-conversations-\d{4}-\d\d-\d\d\.json$/.test(allName), allName);
    const { conversations } = JSON.parse(all);
    same(conversations.map(({ title }) => title), [one.title, "What is the capital of Italy?"], "all conversations");
    same(conversations[0], one, "the first conversation");
    same(page.problems, [], "complaints");

    await page.setViewportSize({ width: 390, height: 800 });
    await page.click("#tab-history");
    await picture(page, "history-390");
    await page.click("[data-act=export] >> visible=true");
    await page.locator("#export").waitFor();
    await picture(page, "export-390");
    const wide = await page.evaluate(() => [document.documentElement, ...document.querySelectorAll("#history, #export")].map((node) => node.scrollWidth - node.clientWidth));
    same(wide, [0, 0, 0], "pixels to scroll sideways");
  },

  async exported_names_and_text_are_safe_whatever_the_title() {
    const page = await open();
    const names = await page.evaluate(async () => {
      const { fileName } = await import("/page/export.js");
      return ["", "..", "/etc/passwd", "a\u202egpj.exe", "a\nb\u0000c\ud800", "CON", "🦄".repeat(80), "x. . .", "%2e%2e"].map(fileName);
    });
    same(names, ["conversation", "conversation", "etc-passwd", "a-gpj.exe", "a-b-c", "CON", "🦄".repeat(60), "x", "%2e%2e"], "names");
    const found = await page.evaluate(async () => {
      const { closed } = await import("/page/markdown.js");
      const open = ["```js\nlet a", "~~~~\na\n```", "````\n```", "a\n```\na\n```\n```", "\u0060\u0060\u0060\r\na"];
      const whole = ["", "a", "```\na\n```", "- a\n\n  ```\n  b", "1. ```js\n   a\n   ```", "> ```\n> a", "    ```\na", "`` ``` ``"];
      return [open.map((text) => closed(text).slice(text.length)), whole.filter((text) => closed(text) !== text)];
    });
    same(found, [["\n```", "\n~~~~", "\n````", "\n```", "\n```"], []], "what is closed");
    same(page.problems, [], "complaints");
  },

  async two_tabs_do_not_overwrite_each_other() {
    const page = await open();
    await ask(page, "What is the capital of France?");
    await answered(page);
    const other = await openIn(page.context());
    await other.click("#conversations [data-act=open]");
    await answered(other);
    // A question in one tab is shown in the other one, with the answer while it is written.
    await withoutEnd(page);
    await ask(page, "Tell me a short story about a dragon.");
    await until(async () => (await other.locator(".turn").count()) === 4, "the other tab shows the question");
    await until(async () => (await other.locator(".turn").last().innerText()).length > 50, "and what is written");
    same(await other.locator(".turn").last().getAttribute("data-state"), "writing", "the answer in the other tab");
    // A question in the other tab makes a copy, so no tab loses its turns.
    await ask(other, "What is the capital of Italy?");
    check((await answered(other)).includes("Rome"), "the other tab's answer");
    check((await other.innerText("#notice")).includes("a copy"), "it says so");
    await page.click("#send");
    await answered(page, "stopped");
    check(page.url() !== other.url(), "two conversations");
    for (const [one, turns] of [[page, 4], [other, 6]]) {
      await until(async () => (await one.locator("#conversations li").count()) === 2, "two in the list");
      await one.reload();
      await until(async () => (await one.locator(".turn").count()) === turns, `${turns} turns`);
    }
    // A tab that does not know about changes of another tab (it gets no messages) also makes a second conversation.
    const mute = await openIn(page.context(), (one) => one.addInitScript(() => { window.BroadcastChannel = class { postMessage() {} }; }));
    await mute.goto(other.url());
    await until(async () => (await mute.locator(".turn").count()) === 6, "turns");
    await ask(other, "What is the capital of Spain?");
    await answered(other);
    await ask(mute, "What is the capital of Japan?");
    await answered(mute);
    await until(async () => (await mute.innerText("#notice")).includes("kept as a second one"), "it says so");
    await other.reload();
    check((await answered(other)).includes("Madrid"), "the turns of the first tab are kept");
    await mute.reload();
    check((await answered(mute)).includes("Tokyo"), "the turns of the second tab are kept");
    same(await mute.locator("#conversations li").count(), 3, "conversations");
    // A conversation that is deleted in one tab is not shown in another one.
    await page.goto(other.url());
    check((await answered(page)).includes("Madrid"), "the same conversation in two tabs");
    await page.click("[data-act=delete] >> visible=true");
    await until(() => other.locator("#welcome").isVisible(), "the other tab closes the conversation");
    check((await other.innerText("#notice")).includes("deleted in another tab"), "the reason is shown");
    same([page.problems, other.problems, mute.problems], [[], [], []], "complaints");
  },

  async the_oldest_conversations_are_deleted_with_a_notice() {
    const page = await open();
    const most = await page.evaluate(async () => {
      const { MAX_CONVERSATIONS, list } = await import("/page/conversations.js");
      await list(); // creates the stores
      const request = indexedDB.open("unicorn");
      await new Promise((resolve) => (request.onsuccess = resolve));
      const stores = request.result.transaction(["conversations", "turns"], "readwrite");
      for (let i = 0; i < MAX_CONVERSATIONS; i++) {
        const [id, title] = [`${i}`, `Number ${i}`];
        stores.objectStore("conversations").put({ id, title, pinned: i ? 0 : 1, changed_ms: i, version: 1, size: title.length });
        stores.objectStore("turns").put({ id, turns: [{ role: "user", text: title }] });
      }
      await new Promise((resolve) => (stores.oncomplete = resolve));
      return MAX_CONVERSATIONS;
    });
    await ask(page, "What is the capital of France?");
    await answered(page);
    await until(async () => (await page.innerText("#notice")).includes("“Number 1”"), "the notice names the deleted conversation");
    // The list is drawn after the notice.
    const rows = () => page.locator("#conversations li").allInnerTexts();
    await until(async () => !(await rows()).includes("Number 1"), "the deleted conversation leaves the list");
    const titles = await rows();
    same([titles.length, titles[0], titles.includes("Number 1"), titles.includes("Number 2")], [most, "Number 0", false, true], "conversations");
    same(page.problems, [], "complaints");
  },

  async a_full_or_missing_storage_is_shown() {
    const page = await open();
    const network = await page.context().newCDPSession(page);
    await network.send("Storage.overrideQuotaForOrigin", { origin: server.url.slice(0, -1), quotaSize: 1 });
    await ask(page, "What is the capital of France?");
    await answered(page);
    await until(async () => (await page.innerText("#notice")).startsWith("This conversation is not saved"), "it says so");
    // What cannot be stored can be exported, because the notice offers it.
    await page.click("#notice >> text=Export");
    const [name, unsaved] = await saved(page, "#export [value=json]");
    same([name, JSON.parse(unsaved).messages.length], ["What is the capital of France.json", 2], "the file");
    await network.send("Storage.overrideQuotaForOrigin", { origin: server.url.slice(0, -1) });
    await ask(page, "What is the capital of Italy?");
    await answered(page);
    await page.reload();
    await until(async () => (await page.locator(".turn").count()) === 4, "four turns that are saved later");
    const context = await browser.newContext();
    context.setDefaultTimeout(WAIT_MS);
    const without = await openIn(context, (one) => one.addInitScript(() => Object.defineProperty(window, "indexedDB", { get: () => undefined })));
    await ask(without, "What is the capital of France?");
    await answered(without);
    await listed(without, ["What is the capital of France?"]);
    check(await without.locator("#not-kept").isVisible(), "the notice that nothing is stored");
    await without.click("#new-chat");
    await without.click("#conversations [data-act=open]");
    check((await answered(without)).includes("Paris"), "the conversation of this tab");
    same(without.problems, [], "complaints");
  },

  async a_complete_answer_survives_a_reload_with_slow_storage() {
    const context = await browser.newContext();
    const page = await openIn(context, (one) => one.addInitScript(() => {
      const open = IDBFactory.prototype.open;
      IDBFactory.prototype.open = function (...args) {
        const request = open.apply(this, args);
        const set = (hear) => request.addEventListener("success", (event) => setTimeout(() => hear.call(request, event), 3000));
        return Object.defineProperty(request, "onsuccess", { set });
      };
    }));
    await ask(page, "What is the capital of France?");
    check((await answered(page)).includes("Paris"), "the answer");
    await page.reload();
    check((await answered(page)).includes("Paris"), "the answer after a reload");
    same(page.problems, [], "complaints");
    await context.close();
  },

  async a_thought_is_shown_folded_and_is_not_sent_again() {
    const page = await open();
    const thinks = (thought) => ({ choices: [{ index: 0, delta: { reasoning_content: thought, reasoning: thought }, finish_reason: null }] });
    await script(page, thinks("First <b>this</b>,"), thinks("\nthen that."), says("The **answer**"), STOP, DONE);
    await ask(page, "Think");
    same(await answered(page), "The answer", "the answer");
    const thought = page.locator(".answer details div");
    check(!(await thought.isVisible()), "the thought is folded");
    await page.locator(".answer summary").click();
    same(await thought.innerText(), "First <b>this</b>,\nthen that.", "the thought, as text");
    await picture(page, "thought");
    // It is kept with the conversation.
    await page.reload();
    same(await page.locator(".answer details div").textContent(), "First <b>this</b>,\nthen that.", "the thought after a reload");
    const asked = page.waitForRequest("**/v1/chat/completions");
    await ask(page, "Again");
    same((await asked).postDataJSON().messages.map(({ content }) => content), ["Think", "The **answer**", "Again"], "the messages");
    same(page.problems, [], "complaints");
  },

  async html_in_an_answer_stays_text() {
    const page = await open();
    const evil = [
      "<script>alert(1)</script>", "<img src=x onerror=alert(2)>", "[click](javascript:alert(3))", "![x](http://127.0.0.1:9/x.png)",
      "**<b onclick=alert(4)>bold</b>**", "`<i>code</i>`", "```html\"><script>alert(5)</script>\n<svg onload=alert(6)>\n```",
      "- <iframe srcdoc='<script>alert(7)</script>'>", "| <a href=javascript:alert(8)>a</a> | b |\n|---|---|\n| <style>*{display:none}</style> | d |",
      "> <object data=x>", "# <h1 onmouseover=alert(9)>", "$\\href{javascript:alert(10)}{x}$ $\\label{input}x$ $\\tag{status}y$",
      "$\\includegraphics{http://127.0.0.1:9/y.png}$ $\\htmlId{input}{z}$ $\\class{primary}{z}$ $\\text{<img src=x onerror=alert(11)>}$",
      "$\\htmlStyle{position:fixed}{z}$ $\\rule{9999em}{9999em}$ <http://127.0.0.1:9/a> [b](data:text/html,x) [c](//127.0.0.1:9) [d](vbscript:x)",
    ].join("\n\n");
    await script(page, ...[...evil].map(says), STOP, DONE);
    await ask(page, "<u>mine</u>");
    const text = await answered(page);
    for (const part of ["<script>alert(1)</script>", "<img src=x onerror=alert(2)>", "javascript:alert(3)", "<iframe", "<style>"]) {
      check(text.includes(part), `${part} is not visible`);
    }
    const made = await page.evaluate(() => [...new Set([...document.querySelectorAll("#log *")].map((node) => node.localName))].sort());
    same(made, ["a", "article", "blockquote", "button", "code", "div", "h3", "li", "math", "mi", "mrow", "mspace", "mtext", "p", "pre", "span", "strong", "table", "tbody", "td", "th", "thead", "tr", "ul"], "elements");
    const links = await page.evaluate(() => [...document.querySelectorAll("#log a")].map((node) => node.href));
    same(links, ["http://127.0.0.1:9/x.png", "http://127.0.0.1:9/a"], "links, which are not followed");
    const taken = await page.evaluate(() => [...document.querySelectorAll("#log [id], #log [name], #log [src], #log .primary, #log [style*=fixed]")].map((node) => node.outerHTML));
    same(taken, [], "ids, names, addresses and classes that a model chose");
    const outside = await page.evaluate(() => getComputedStyle(document.querySelector(".answer .text")).contain);
    same(outside, "paint", "the CSS containment of an answer");
    same(await page.locator(".user .text").innerText(), "<u>mine</u>", "the user's own");
    same([page.problems, page.foreign], [[], []], "complaints and requests elsewhere");
    // The browser itself refuses markup from text, too.
    const refused = await page.evaluate(() => { try { document.body.innerHTML = "<b>x</b>"; } catch (error) { return error.name; } });
    same(refused, "TypeError", "markup from text");
  },

  async markdown_is_rendered() {
    const page = await open();
    const shown = (text) => page.evaluate(async (text) => {
      const { render } = await import("/page/markdown.js");
      const box = document.createElement("div");
      for (let n = 0; n < text.length; n++) render(box, text.slice(0, n), true); // as during a stream
      render(box, text);
      return box.innerHTML.replace(/ (type|data-copy|tabindex|target|rel|title|dir)="[^"]*"/g, "");
    }, text);
    const code = (language, html) => `<div class="code"><div><span>${language}</span><button>Copy</button></div><pre><code>${html}</code></pre></div>`;
    const math = (html) => `<span class="math"><math>${html}</math></span>`;
    const display = (html) => `<math display="block" class="tml-display" style="display: block math;">${html}</math>`;
    for (const [text, expected] of [
      ["a *b* **c** `d*e*` _f_ 2*3*4 snake_case_name", "<p>a <em>b</em> <strong>c</strong> <code>d*e*</code> <em>f</em> 2*3*4 snake_case_name</p>"],
      ["one\ntwo\n\nthree", "<p>one\ntwo</p><p>three</p>"],
      ["Text:\n- a\n  - b\n- c\n\ndone", "<p>Text:</p><ul><li>a<ul><li>b</li></ul></li><li>c</li></ul><p>done</p>"],
      ["3. a\n4. b", '<ol start="3"><li>a</li><li>b</li></ol>'],
      ["1. a\n\n2. b", '<ol start="1"><li><p>a</p></li><li><p>b</p></li></ol>'],
      ["```none\n\n- x **y**\n```\nafter", `${code("none", "\n- x **y**")}<p>after</p>`],
      ["~~~\nopen", code("text", "open")],
      ["|a|b|\n|-|-|\n|1|2|", '<div class="table"><table><thead><tr><th>a</th><th>b</th></tr></thead><tbody><tr><td>1</td><td>2</td></tr></tbody></table></div>'],
      ["## T\n---\n> q", "<h4>T</h4><hr><blockquote><p>q</p></blockquote>"],
      ["[l](https://a.b/c) [no](ftp://x)", '<p><a href="https://a.b/c">l</a> [no](ftp://x)</p>'],
      ["**open *and `open", "<p>**open *and `open</p>"],
      ["~~gone~~ a<br>b", "<p><s>gone</s> a<br>b</p>"],
      ["https://a.b/c, [m](mailto:a@b.c) a.b/c", '<p><a href="https://a.b/c">https://a.b/c</a>, <a href="mailto:a@b.c">m</a> a.b/c</p>'],
      ["![a picture](https://a.b/c.png)", '<p><a href="https://a.b/c.png">a picture</a></p>'],
      ["- [x] a\n- [ ] *b*", '<ul><li class="task"><input disabled="" aria-label="Done"> a</li><li class="task"><input disabled="" aria-label="Not done"> <em>b</em></li></ul>'],
      ["|a|b|c|\n|:-|:-:|-:|\n|1|2|3|", '<div class="table"><table><thead><tr><th style="text-align: left;">a</th><th style="text-align: center;">b</th><th style="text-align: right;">c</th></tr></thead><tbody><tr><td style="text-align: left;">1</td><td style="text-align: center;">2</td><td style="text-align: right;">3</td></tr></tbody></table></div>'],
      ["```rust\nlet x = 1;\n```", code("rust", '<span class="hljs-keyword">let</span> <span class="hljs-variable">x</span> = <span class="hljs-number">1</span>;')],
      ["```py\nNone\n```", code("py", '<span class="hljs-literal">None</span>')],
      ["a $x$, \\(y\\)", `<p>a ${math("<mi>x</mi>")}, ${math("<mi>y</mi>")}</p>`],
      ["$$\nx\n$$\n\n\\[\ny\n\\]", `<div class="math display">${display("<mi>x</mi>")}</div><div class="math display">${display("<mi>y</mi>")}</div>`],
      ["a $$x$$ b", `<p>a <span class="math display">${display("<mi>x</mi>")}</span> b</p>`],
      ["- $$x$$", `<ul><li><div class="math display">${display("<mi>x</mi>")}</div></li></ul>`],
      ["$5 and $10\n5$ and 10$\n$HOME/$USER, \\$x\\$, `$x$`", "<p>$5 and $10\n5$ and 10$\n$HOME/$USER, $x$, <code>$x$</code></p>"],
      ["$5\nfor 4$ and $ x $", "<p>$5\nfor 4$ and $ x $</p>"],
      ["$\\frac{1$ $\\nonsense$", '<p><span class="math source"><code>$\\frac{1$</code></span> <span class="math source"><code>$\\nonsense$</code></span></p>'],
      ["$$\n\\frac{\n1\n$$", '<div class="math display source"><code>$$\n\\frac{\n1\n$$</code></div>'],
      ["$$\nx\n\ny", "<p>$$\nx</p><p>y</p>"],
    ]) same(await shown(text), expected, JSON.stringify(text));
    // While more text may follow, an unfinished formula is shown as its source.
    const unfinished = await page.evaluate(async () => {
      const box = document.createElement("div");
      (await import("/page/markdown.js")).render(box, "$$\n\\frac{a_1}{b_2} *c*", true);
      return box.innerHTML;
    });
    same(unfinished, '<div class="math display source" tabindex="0" dir="auto"><code>$$\n\\frac{a_1}{b_2} *c*</code></div>', "an unfinished formula");
    const link = await page.evaluate(async () => {
      const box = document.createElement("div");
      (await import("/page/markdown.js")).render(box, "[l](https://a.b/c)");
      const { target, rel, title } = box.querySelector("a");
      return [target, rel, title];
    });
    same(link, ["_blank", "noopener noreferrer", "https://a.b/c"], "a link");
    same([page.problems, page.foreign], [[], []], "complaints and requests elsewhere");
  },

  async text_has_the_direction_of_its_script() {
    const page = await open();
    const arabic = "مرحبا بالعالم `a.b()` (1)!";
    const markdown = `Hello (1)!\n\n${arabic}\n\n- ${arabic}\n- [x] ${arabic}\n\n> ${arabic}\n\n|${arabic}|${arabic}|\n|-|-|\n|1|2|\n\n\`\`\`\n# ${arabic}\n\`\`\`\n\n$$x$$`;
    await script(page, { choices: [{ index: 0, delta: { reasoning_content: arabic }, finish_reason: null }] }, says(markdown), STOP, DONE);
    await page.fill("#input", arabic);
    const directions = (selector) => page.locator(selector).evaluateAll((nodes) => nodes.map((node) => getComputedStyle(node).direction));
    same(await directions("#input"), ["rtl"], "the composer");
    await page.keyboard.press("Enter");
    await answered(page);
    same(await directions(".user .text"), ["rtl"], "the question");
    same(await directions("details div"), ["rtl"], "the thought");
    same(await directions(".answer .text > *"), ["ltr", "rtl", "rtl", "rtl", "rtl", "ltr", "ltr"], "the blocks of the answer");
    same([...new Set(await directions(".answer .text code"))], ["ltr"], "code");
    await listed(page, [arabic]);
    same(await directions("#conversations span"), ["rtl"], "the title");
    same(await page.evaluate(() => {
      const box = document.querySelector(".answer .text p + p");
      const range = document.createRange();
      range.selectNodeContents(box);
      return Math.round(range.getBoundingClientRect().right - box.getBoundingClientRect().right);
    }), 0, "pixels between the text and the right edge");
    await picture(page, "directions");
    same(page.problems, [], "complaints");
  },

  async streamed_markdown_ends_like_complete_markdown() {
    const page = await open();
    const found = await page.evaluate(async (seed) => {
      const { render } = await import("/page/markdown.js");
      const random = (n) => (seed = (seed * 48271) % 2147483647) % n;
      const pieces = ["- ", "1. ", "2. ", "  ", "    ", "> ", "```", "~~~", "\n", "\n", "\n\n", "\r\n", "---", "#", "# ", "|", "|a|b|\n|-|-|\n", "*", "**", "_", "`", "$", "$$", "\\[", "\\]",
        "\\(", "\\)", "[", "](", ")", "https://a.b", "<br>", "~~", "x", "word ", "1", "- [ ] ", "js\n", "rust\nlet a", "\\frac{1}{2}", "{", "}", "\t", "<", "&amp;", "🦄", "\\"];
      const differ = [];
      for (let round = 0; round < 400; round++) {
        const text = Array.from({ length: 2 + random(40) }, () => pieces[random(pieces.length)]).join("");
        const [streamed, whole] = [document.createElement("div"), document.createElement("div")];
        for (let at = 0; at < text.length; at += 1 + random(7)) render(streamed, text.slice(0, at), true);
        render(streamed, text);
        render(whole, text);
        if (streamed.innerHTML !== whole.innerHTML) differ.push([text, streamed.innerHTML, whole.innerHTML]);
      }
      return differ.slice(0, 1);
    }, SEED);
    same(found, [], `what differs with seed ${SEED}`);
    // Finished blocks are not replaced while more is written, so that a selection in them stays.
    const stays = await page.evaluate(async () => {
      const { render } = await import("/page/markdown.js");
      const box = document.createElement("div");
      render(box, "one $x$\n\n```js\nlet a\n```\n\ntw", true);
      const before = [...box.children];
      render(box, "one $x$\n\n```js\nlet a\n```\n\ntwo\n\nthree", true);
      return before.map((node, i) => node === box.children[i]);
    });
    same(stays, [true, true, false], "blocks that stay");
    same(page.problems, [], "complaints");
  },

  async hostile_markdown_takes_bounded_time() {
    const page = await open();
    // Output of a model in a loop. It would take minutes with a pattern that backtracks, or overflow the stack. If the page
    // hangs, the test fails.
    const parts = ["[", "**", "`", "``` ", "*a", "_", "|", "> ", "- ", "[a](", "1. ", "![", "$", "$$", "$$\n", "\\(", "\\[", "\\[\n", "\\[x\n", "$x$ ", "$a", "a$ ", "<br>", "~~", "|a|b|\n|-|-|\n", "- [ ] a\n",
      "https://a.b/c ", "  - a\n", "\\", "&", "a\n", "# a\n", "```js\nlet a\n```\n"];
    for (const part of parts) {
      await page.evaluate(async (text) => (await import("/page/markdown.js")).render(document.createElement("div"), text), part.repeat(Math.ceil(50_000 / part.length)));
    }
    const counts = await page.evaluate(async () => {
      const { render } = await import("/page/markdown.js");
      const box = document.createElement("div");
      const counted = (text, selector) => {
        render(box, text);
        return box.querySelectorAll(selector).length;
      };
      const long = `y${"x ".repeat(150_000)}`;
      return {
        formulas: counted("$x$ ".repeat(5000), "math"),
        long: counted(`$${"x".repeat(5000)}$`, "math"),
        nested: counted(`$${"{".repeat(1900)}x${"}".repeat(1900)}$ $${"\\frac{1}{".repeat(400)}x${"}".repeat(400)}$`, "p > .math"),
        macros: counted("$\\def\\a{\\a\\a}\\a$", "math"),
        coloured: counted(`\`\`\`js\n${"let a\n".repeat(5000)}\`\`\``, ".hljs-keyword"),
        inAll: counted("```js\nlet a\n```\n".repeat(12_000), ".hljs-keyword"),
        depth: counted(`${"> ".repeat(500)}x`, "blockquote"),
        cells: counted(`${"|a".repeat(2000)}|\n${"|-".repeat(2000)}|\n${"|\n".repeat(200)}`, "td"),
        rest: (counted(long, "p"), box.textContent.length === long.length),
      };
    });
    same([counts.formulas, counts.long, counts.nested, counts.macros, counts.coloured, counts.depth, counts.rest], [1000, 0, 2, 0, 0, 24, true], JSON.stringify(counts));
    check(counts.inAll > 1000 && counts.inAll <= 12_000, `${counts.inAll} coloured`);
    check(counts.cells <= 70_000, `${counts.cells} cells`);
    // As an answer, it streams completely, and the page still reacts to input.
    await script(page, ...Array.from({ length: 200 }, () => says("$\\frac{1}{2}$ **a** `b` | [c](https://a.b) ".repeat(10))), STOP, DONE);
    await ask(page, "Hello");
    await answered(page);
    same(await page.evaluate(() => document.activeElement.id), "input", "focus");
    same([page.problems, page.foreign], [[], []], "complaints and requests elsewhere");
  },

  async streams_are_parsed_for_every_split() {
    const page = await open();
    const found = await page.evaluate(async (seed) => {
      const { Events } = await import("/page/api.js");
      const random = (n) => (seed = (seed * 48271) % 2147483647) % n;
      const stream = ": ping\r\n\r\ndata: {\"a\":\"ü🦄\"}\r\n\r\ndata:two\ndata: lines\n\nevent: x\nid: 1\n\n: \n\ndata: last\r\rdata: [DONE]\n\n";
      const all = [];
      for (let round = 0; round < 500; round++) {
        const events = new Events();
        const data = [];
        for (let at = 0; at < stream.length;) {
          const next = Math.min(stream.length, at + random(9));
          data.push(...events.push(stream.slice(at, next)));
          at = next;
        }
        all.push(JSON.stringify(data));
      }
      return [...new Set(all)];
    }, SEED);
    same(found, [JSON.stringify(['{"a":"ü🦄"}', "two\nlines", "last", "[DONE]"])], `events with seed ${SEED}`);
  },

  async errors_are_shown_and_can_be_retried() {
    const page = await open();
    for (const [chunks, said] of [
      [[says("It began"), { error: { message: "the device was lost" } }, DONE], "the device was lost"],
      [[says("It began")], "The connection was closed before the answer was complete."],
      [["{no json"], "The server sent a line that is not JSON."],
    ]) {
      await script(page, ...chunks);
      await ask(page, "Hello");
      await answered(page, "failed");
      same(await page.locator(".note").last().innerText(), said, "the shown error");
      await page.unroute("**/v1/chat/completions");
    }
    await picture(page, "error");
    const refusal = { status: 429, headers: { "retry-after": "2" }, json: { error: { message: "the server is busy" } } };
    await page.route("**/v1/chat/completions", (route) => route.fulfill(refusal));
    await page.click("[data-act=again] >> visible=true");
    await until(async () => (await page.locator(".note").last().innerText()) === "the server is busy", "the refusal");
    await page.unroute("**/v1/chat/completions");
    await page.click("[data-act=again] >> visible=true");
    await answered(page);
  },

  async a_key_is_requested_and_kept_only_for_the_tab() {
    const context = await browser.newContext();
    context.setDefaultTimeout(WAIT_MS);
    const page = await openIn(context, (page) => page.route(/\/(v1\/|status$)/, (route) => {
      if (route.request().headers().authorization === "Bearer sesame") return route.continue();
      return route.fulfill({ status: 401, json: { error: { message: "an API key is needed", code: "no_key" } } });
    }));
    await isState(page, "locked");
    check((await page.innerText("#key-form")).includes("needs an API key"), "the form");
    await picture(page, "key");
    await page.fill("#key", "wrong");
    await page.keyboard.press("Enter");
    await until(async () => (await page.innerText("#key-form")).includes("does not accept"), "the refusal");
    for (const [key, code] of [["ses ame", "U+0020"], ["sesame\u200b", "U+200B"], ["ключ", "U+043A"]]) {
      await page.fill("#key", key);
      await page.keyboard.press("Enter");
      await until(async () => (await page.innerText("#key-form")).includes(code), `what is wrong with ${JSON.stringify(key)}`);
    }
    await isState(page, "locked");
    await page.fill("#key", "sesame");
    await page.keyboard.press("Enter");
    await isState(page, "ok");
    await ask(page, "What is the capital of France?");
    check((await answered(page)).includes("Paris"), "the answer");
    await page.reload();
    await isState(page, "ok");
    check(await page.locator("#key-form").isHidden(), "the form for the key is shown again");
    const kept = await page.evaluate(() => [JSON.stringify(localStorage), document.body.innerText].join());
    check(!kept.includes("sesame"), "the key is stored beyond the tab, or is readable");
  },

  async a_keyboard_is_enough() {
    const page = await open();
    await isState(page, "ok");
    await page.keyboard.type("What is the capital");
    await page.keyboard.press("Shift+Enter");
    await page.keyboard.type("of France?");
    same(await page.locator(".turn").count(), 0, "turns before Enter");
    await page.keyboard.press("Enter");
    await answered(page);
    same(await page.locator(".user .text").innerText(), "What is the capital\nof France?", "the question");
    const reached = new Set();
    for (let i = 0; i < 30; i++) {
      await page.keyboard.press("Tab");
      const [name, outline] = await page.evaluate(() => {
        const { activeElement: node } = document;
        return [node.id || node.dataset.act || node.localName, getComputedStyle(node).outlineStyle];
      });
      if (name !== "body") check(outline !== "none", `the focus on ${name} cannot be seen`);
      reached.add(name);
    }
    for (const name of ["open-parameters", "new-chat", "open", "export-all", "pin", "rename", "export", "delete", "edit", "copy", "again", "input", "send"]) check(reached.has(name), `${name} is not reached`);
    await page.focus("#open-parameters");
    await page.keyboard.press("Enter");
    await page.keyboard.press("Escape");
    same(await page.evaluate(() => document.activeElement.id), "open-parameters", "focus after the dialog");
    const nameless = await page.evaluate(() => [...document.querySelectorAll("input, textarea, button")]
      .filter((node) => !node.labels?.length && !node.textContent.trim() && !node.ariaLabel).map((node) => node.outerHTML));
    same(nameless, [], "controls without a name");
    // A screen reader says these, and not a figure that changes all the time. An `output` is a live region, too.
    const live = await page.evaluate(() => [...document.querySelectorAll("output, [role=status], [role=alert], [role=log], [aria-live]")]
      .filter((node) => node.ariaLive !== "off").map((node) => node.id));
    same(live, ["state", "notice", "said"], "live regions");
    same(page.problems, [], "complaints");
  },

  async the_page_fits_every_width() {
    for (const [width, height] of [[360, 740], [820, 1180], [1600, 900]]) {
      for (const colorScheme of ["light", "dark"]) {
        const page = await open({ viewport: { width, height }, colorScheme, reducedMotion: "reduce" });
        await isState(page, "ok");
        // A long name leaves room for the rest of the header, and the choice of a model can be seen and pressed.
        for (const names of [["n".repeat(90)], ["n".repeat(90), "bee"]]) {
          await page.route("**/v1/models", (route) => route.fulfill({ json: { data: names.map((id) => ({ id })) } }));
          await page.reload();
          const name = names.length > 1 ? "#models" : "#model";
          await page.locator(name).waitFor();
          same(await page.evaluate(() => {
            const { scrollHeight, clientHeight } = document.querySelector("#input");
            return scrollHeight - clientHeight;
          }), 0, `pixels of the composer's placeholder that are cut off at ${width}`);
          const inside = await page.evaluate((name) => [name, "#state", "#new-chat"].map((what) => {
            const { left, right, top, bottom } = document.querySelector(what).getBoundingClientRect();
            return right - left > 50 && document.elementFromPoint((left + right) / 2, (top + bottom) / 2).closest(what) !== null;
          }), name);
          same(inside, [true, true, true], `what is seen of the header at ${width}, of ${names.length} models`);
          await page.unroute("**/v1/models");
        }
        await page.reload();
        await until(async () => (await page.innerText("#model")) === "unicorn-demo", "the page names the model");
        const long = `$$${"x_1 + ".repeat(60)}x$$\n\n- [x] Done, $${"y".repeat(40)}$\n\n${"A word. ".repeat(40)}\n\n\`\`\`\n${"code ".repeat(60)}\n\`\`\`\n\n|${"cell |".repeat(20)}\n|${"-|".repeat(20)}\n\n${"x".repeat(300)}`;
        await script(page, says(long), STOP, DONE);
        await ask(page, "y".repeat(300));
        await answered(page);
        const views = width < 896 ? ["history", "chat", "status"] : ["chat"];
        for (const view of views) {
          if (views.length > 1) await page.click(`#tab-${view}`);
          const wide = await page.evaluate(() => [document.documentElement, ...document.querySelectorAll("#pane, #status, #history")]
            .map((node) => node.scrollWidth - node.clientWidth));
          same(wide, [0, 0, 0, 0], `pixels to scroll sideways in ${view} at ${width}`);
          await picture(page, `${width}-${colorScheme}-${view}`);
        }
        if (views.length > 1) check(await page.locator("#chat").isHidden() && await page.locator("#status").isVisible(), "one view at a time");
        else check(await page.locator("#chat").isVisible() && await page.locator("#status").isVisible(), "both views");
        await page.context().close();
      }
    }
  },

  async a_trained_model_holds_a_conversation() {
    const other = await unicorn("page-smollm2", "--model", SMOLLM2, "--context", "1024");
    const first = server;
    try {
      other.start();
      await other.ready();
      server = other;
      const page = await open();
      await isState(page, "ok");
      await until(async () => /smollm2/i.test(await page.innerText("#model")), "the page names the model");
      await page.click("#open-parameters");
      await page.fill("[name=temperature]", "0");
      await page.click("dialog .primary");
      await ask(page, "What is the capital of France?");
      same(await answered(page), "The capital of France is Paris.", "the answer");
      await ask(page, "And what is a capital?");
      const text = await answered(page);
      check(/capital/i.test(text) && text.length > 40 && !text.includes("<|im_"), text);
      await picture(page, "smollm2");
      same(page.problems, [], "complaints");
    } finally {
      server = first;
      await other.end("SIGTERM");
    }
  },

  async several_models_are_chosen_loaded_and_unloaded() {
    const folder = emptyFolder("page-models");
    const demo = path.resolve(__dirname, "../../models/demo");
    const entry = (name) => `[[models.serve]]\nname = "${name}"\npath = "${demo}"\ncontext = 512\n`;
    const file = path.join(folder, "config.toml");
    fs.writeFileSync(file, entry("ant") + entry("bee"));
    const other = await unicorn("page-models", "--config", file);
    const first = server;
    try {
      other.start();
      await other.ready();
      server = other;
      for (const width of [1280, 390]) {
        const page = await open({ viewport: { width, height: 800 } });
        await isState(page, width === 1280 ? "unloaded" : "ok");
        // The page requests the names of the models after the status.
        await until(async () => (await page.locator("#models option").count()) > 0, "the page names the models");
        same(await page.locator("#models option").allInnerTexts(), ["ant", "bee"], "the models");
        same(await page.evaluate(() => getComputedStyle(document.querySelector("#library")).opacity), "1", "the opacity of buttons that work");
        await page.selectOption("#models", "bee");
        await ask(page, "What is the capital of France?");
        check((await answered(page)).includes("Paris"), await answered(page));
        const models = async () => (await status()).models.map(({ state }) => state);
        const are = (...states) => until(async () => JSON.stringify(await models()) === JSON.stringify(states), states.join());
        await are("unloaded", "loaded");
        // The choice is remembered.
        await page.reload();
        await until(async () => (await page.inputValue("#models")) === "bee", "the chosen model");
        // What another tab chooses is for new tabs, and the list of models is asked for again when the state changes.
        const second = await openIn(page.context());
        await until(async () => (await second.inputValue("#models")) === "bee", "the model of the new tab");
        await second.selectOption("#models", "ant");
        await page.route("**/status", (route) => route.fulfill({ json: { status: "loading" } }));
        const [named] = await Promise.all([page.waitForResponse("**/v1/models"), isState(page, "loading")]);
        await named.finished();
        await page.unroute("**/status");
        await isState(page, "ok");
        same(await page.inputValue("#models"), "bee", "the model of the first tab");
        await second.selectOption("#models", "bee");
        await second.close();
        if (width === 390) await page.click("#tab-status");
        const rows = page.locator("#library li");
        await until(async () => (await rows.count()) === 2, "a row for each model");
        check(/^bee\s+loaded, [0-9.]+ [KMG]iB/.test(await rows.last().innerText()), await rows.last().innerText());
        await page.click("[aria-label='Load ant']");
        await are("loaded", "loaded");
        await picture(page, `models-${width}`);
        const wide = await page.evaluate(() => document.documentElement.scrollWidth - document.documentElement.clientWidth);
        same(wide, 0, "pixels to scroll sideways");
        await page.click("[aria-label='Unload ant']");
        await are("unloaded", "loaded");
        same(page.problems, [], "complaints");
        await page.context().close();
      }
    } finally {
      server = first;
      await other.end("SIGTERM");
    }
  },

  async pictures_are_added_sent_and_kept_with_their_conversation() {
    const other = await unicorn("page-pictures", "--model", path.resolve(IMAGES, "../gemma3-vision/vis-a"));
    const first = server;
    try {
      other.start();
      await other.ready();
      server = other;
      const page = await open();
      await page.locator("#attach").waitFor();
      await page.click("#open-parameters");
      await page.fill("[name=max_tokens]", "8");
      await page.click("dialog .primary");
      const asked = [];
      page.on("request", (request) => request.method() === "POST" && asked.push(request.postDataJSON()));
      const alts = (where) => page.locator(`${where} img`).evaluateAll((all) => all.map(({ alt }) => alt));
      const hold = (...names) => until(async () => JSON.stringify(await alts("#pictures")) === JSON.stringify(names), names.join());

      const [chooser] = await Promise.all([page.waitForEvent("filechooser"), page.click("#attach")]);
      await chooser.setFiles(["photo420.jpg", "rgb.png"].map((name) => path.join(IMAGES, name)));
      await hold("photo420.jpg", "rgb.png");
      await give(page, "drop", [{ name: "checker.png", url: `data:image/png;base64,${base64("checker.png")}` }]);
      await hold("photo420.jpg", "rgb.png", "checker.png");
      // A large picture becomes a smaller JPEG, and one in another format than the server's a JPEG.
      const large = await page.evaluate(() => {
        const canvas = Object.assign(document.createElement("canvas"), { width: 3000, height: 1000 });
        canvas.getContext("2d").fillRect(0, 0, 1500, 1000);
        return canvas.toDataURL("image/png");
      });
      await give(page, "paste", [{ name: "large.png", url: large }, { name: "bitmap.bmp", url: `data:image/bmp;base64,${base64("bitmap.bmp")}` }]);
      await hold("photo420.jpg", "rgb.png", "checker.png", "large.png", "bitmap.bmp");
      const size = await page.locator("#pictures img").nth(3).evaluate((image) => image.decode().then(() => [image.naturalWidth, image.naturalHeight]));
      same(size, [1792, 597], "the size of the large picture");
      await picture(page, "pictures-composer");
      await give(page, "drop", [{ name: "notes.png", url: `data:image/png;base64,${btoa("no picture")}` }]);
      await until(async () => (await page.innerText("#notice span")).includes("“notes.png” is not a picture"), "the refusal");

      // With the keyboard alone.
      const focused = () => page.evaluate(() => document.activeElement.ariaLabel ?? document.activeElement.id);
      await page.focus("[aria-label='Remove rgb.png']");
      await page.keyboard.press("Enter");
      await hold("photo420.jpg", "checker.png", "large.png", "bitmap.bmp");
      same(await focused(), "Remove checker.png", "focus");
      await page.focus("[aria-label='Remove photo420.jpg']");
      await page.keyboard.press("Enter");
      await hold("checker.png", "large.png", "bitmap.bmp");

      await ask(page, "next last command");
      await answered(page);
      await page.click("#notice >> text=Dismiss");
      const content = asked[0].messages[0].content;
      same(content.map(({ type }) => type), ["image_url", "image_url", "image_url", "text"], "the parts");
      same(content[0].image_url.url, `data:image/png;base64,${base64("checker.png")}`, "a small file as it is");
      for (const { image_url: { url } } of content.slice(1, 3)) check(url.startsWith("data:image/jpeg;base64,"), url.slice(0, 40));
      same(content[3].text, "next last command", "the text");
      same([await alts("#pictures"), await alts(".user .pictures")], [[], ["checker.png", "large.png", "bitmap.bmp"]], "where the pictures are");
      await picture(page, "pictures");
      await ask(page, "type move");
      await answered(page);
      same([asked[1].messages[0].content, asked[1].messages.at(-1).content], [content, "type move"], "the second turn's messages");

      await page.reload();
      await until(async () => (await page.locator(".turn").count()) === 4, "the conversation after a reload");
      same(await alts(".user .pictures"), ["checker.png", "large.png", "bitmap.bmp"], "the pictures after a reload");
      await page.locator("[data-act=edit]").first().click();
      await hold("checker.png", "large.png", "bitmap.bmp");
      await page.keyboard.press("Escape");
      await hold();
      await page.click("[data-act=export] >> visible=true");
      const [, json] = await saved(page, "#export [value=json]");
      const one = JSON.parse(json);
      same(one.messages[0].content, content, "the exported message");
      const body = JSON.stringify({ ...one, messages: one.messages.slice(0, 1) });
      same((await fetch(`${server.url}v1/chat/completions/input_tokens`, { method: "POST", body })).status, 200, "status");
      await page.click("[data-act=export] >> visible=true");
      check((await saved(page, "#export [value=markdown]"))[1].includes("*Picture: checker.png*\n\n*Picture: large.png*"), "the Markdown names the pictures");

      // A picture alone, sent while it is read.
      await page.click("#new-chat");
      await Promise.all([give(page, "paste", [{ name: "alone.png", url: large }]), page.keyboard.press("Enter")]);
      await until(async () => (await page.locator(".turn").count()) === 2 || (await page.keyboard.press("Enter"), false), "the picture is sent");
      await answered(page);
      same(asked.at(-1).messages[0].content.map(({ type }) => type), ["image_url"], "the parts");
      await listed(page, ["alone.png", "next last command"]);
      same([page.problems, page.foreign], [[], []], "complaints and requests elsewhere");

      // A question whose picture is still read does not go to a conversation that is opened meanwhile.
      await page.evaluate(() => {
        const decode = window.createImageBitmap;
        window.createImageBitmap = (file) => new Promise((resolve) => {
          window.goOn = () => resolve(decode(file));
          window.createImageBitmap = decode;
        });
      });
      const asks = asked.length;
      await give(page, "paste", [{ name: "slow.png", url: large }]);
      await page.keyboard.press("Enter");
      await page.click("#new-chat");
      await page.evaluate(() => window.goOn());
      await hold("slow.png");
      await sleep(300);
      same([await page.locator(".turn").count(), asked.length], [0, asks], "turns and questions");
      await page.click("#pictures button");

      await page.setViewportSize({ width: 360, height: 740 });
      await page.setInputFiles("#files", ["wide.png", "tall.png", "photo422.jpg"].map((name) => path.join(IMAGES, name)));
      await hold("wide.png", "tall.png", "photo422.jpg");
      await picture(page, "pictures-360");
      const wide = await page.evaluate(() => [document.documentElement, document.querySelector("#pane")].map((node) => node.scrollWidth - node.clientWidth));
      same(wide, [0, 0], "pixels to scroll sideways");
    } finally {
      server = first;
      await other.end("SIGTERM");
    }
  },

  async a_model_for_text_says_why_it_takes_no_pictures() {
    const page = await open();
    await until(async () => (await page.innerText("#model")) === "unicorn-demo", "the page names the model");
    check(await page.locator("#attach").isHidden(), "no button");
    for (const kind of ["paste", "drop"]) {
      await give(page, kind, [{ name: "rgb.png", url: `data:image/png;base64,${base64("rgb.png")}` }]);
      await until(async () => (await page.locator("#notice span").innerText()) === "This model reads text only, and no pictures.", kind);
      await page.click("#notice >> text=Dismiss");
    }
    await give(page, "drop", [{ name: "notes.txt", url: "data:text/plain;base64,SGVsbG8=" }]);
    await until(async () => (await page.innerText("#notice span")) === "“notes.txt” is not a picture that this browser can read. Copy the text of a document into the message.", "a document");
    same(await page.locator("#pictures img").count(), 0, "pictures");
    same(page.problems, [], "complaints");
  },

  // This must be the last test: it stops the server of the other tests.
  async the_page_reports_a_stopped_server_and_reconnects() {
    const page = await open();
    await withoutEnd(page);
    await ask(page, "Tell me a short story about a dragon.");
    await until(async () => (await page.locator(".answer .text").innerText()).length > 20, "text");
    await server.end("SIGKILL");
    check((await answered(page, "failed")).length > 20, "what was written stays");
    await isState(page, "away");
    check(await page.evaluate(() => Number(getComputedStyle(document.querySelector("#speed")).opacity) < 1), "earlier figures are pale");
    await picture(page, "away");
    server.start();
    await isState(page, "ok");
    await page.unroute("**/v1/chat/completions");
    await page.click("[data-act=again] >> visible=true");
    await answered(page);
    await server.end("SIGTERM");
    same([server.process.exitCode, server.process.signalCode], [0, null], "how the server ended while the page was open");
    await isState(page, "away");
  },
};

async function main() {
  needsTrained("page", tests, "a_trained_model_holds_a_conversation");
  server = await unicorn("page-server");
  await run("page", [server], tests, { began: (launched) => { browser = launched; } });
}

main().catch(fails("page"));
