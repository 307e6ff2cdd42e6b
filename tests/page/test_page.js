#!/usr/bin/env node
/*
 * What somebody with a browser sees: Debian's Chromium, headless, at the page of a real `unicorn serve` with the demo model.
 *
 * tools/test.py starts it with NODE_PATH at the pinned playwright-core, after `cargo build`. Prints one line per test and
 * at the end `page: N passed, N failed`. What the demo model would not say or do (markup, errors, a key) is put into
 * the browser's way instead of the server's answer. Pictures go to target/page, for people to look at.
 */

"use strict";

const path = require("node:path");
const { WAIT_MS, check, emptyFolder, fails, run, same, sleep, unicorn, until } = require("./drive.js");

const PICTURES = emptyFolder("page");
const SEED = 20261121;

// --- the browser ----------------------------------------------------------------------------------------

let browser;
let server;

/** A page of its own browser profile at the server's address, and what went wrong in it. */
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

/** The text of the last answer, once it has come to its end in `state`. */
async function answered(page, state = "done") {
  const last = page.locator(".turn").last();
  await until(async () => (await last.getAttribute("data-state")) === state, `the last answer is ${state}`);
  return last.locator(".text").innerText();
}

const status = async () => (await fetch(`${server.url}status`)).json();

const isState = (page, state) => until(async () => (await page.getAttribute("#state", "data-state")) === state, `the page says ${state}`);

/** Answers chats with these chunks instead of the server. */
async function script(page, ...chunks) {
  const lines = chunks.map((chunk) => `data: ${typeof chunk === "string" ? chunk : JSON.stringify(chunk)}\n\n`);
  const reply = { headers: { "content-type": "text/event-stream" }, body: `: a comment\n\n${lines.join("")}` };
  await page.route("**/v1/chat/completions", (route) => route.fulfill(reply));
}

const says = (content) => ({ choices: [{ index: 0, delta: { content }, finish_reason: null }] });
const STOP = { choices: [{ index: 0, delta: {}, finish_reason: "stop" }] };
const DONE = "[DONE]";

/** Tokens of an answer that nobody waits for. */
const WITHOUT_END = 6000;

/** Has the server write on and on: the demo model's answers are short. */
const withoutEnd = (page) => page.route("**/v1/chat/completions", (route) => {
  const body = JSON.stringify({ ...route.request().postDataJSON(), ignore_eos: true, max_tokens: WITHOUT_END });
  return route.continue({ postData: body });
});

const picture = (page, name) => page.screenshot({ path: path.join(PICTURES, `${name}.png`) });

// --- the tests ------------------------------------------------------------------------------------------

const tests = {
  async it_loads_without_a_complaint_and_asks_nobody_else() {
    const page = await open();
    await isState(page, "ok");
    // The page asks for it once it has seen the status.
    await until(async () => (await page.innerText("#model")) === "unicorn-demo", "the page names the model");
    await sleep(2000); // and asks for the status once more
    same(page.problems, [], "complaints");
    same(page.foreign, [], "requests elsewhere");
    check(await page.locator("#welcome").isVisible(), "an empty chat says nothing");
    await picture(page, "empty");
  },

  async it_streams_an_answer_and_tells_what_it_took() {
    const page = await open();
    await ask(page, "What is the capital of France?");
    check((await answered(page)).includes("Paris"), await answered(page));
    const note = await page.locator(".note").innerText();
    check(/^\d+ tokens · [\d.]+ tokens\/s · first after [\d.]+ m?s · prompt of \d+/.test(note), note);
    // The second turn needs the first, and finds its beginning in the cache.
    await ask(page, "Tell me a short story about a dragon.");
    await answered(page);
    same(await page.locator(".turn").count(), 4, "turns");
    same(await page.evaluate(() => document.activeElement.id), "input", "focus");
    same(page.problems, [], "complaints");
    await picture(page, "answered");
  },

  async a_question_may_come_before_the_model_is_named() {
    const context = await browser.newContext();
    context.setDefaultTimeout(WAIT_MS);
    let asked = 0;
    const page = await openIn(context, (page) => page.route("**/v1/models", async (route) => {
      // The page asks as soon as it has seen the status: that answer never comes. The second is for the question.
      asked += 1;
      if (asked > 1) await route.continue();
    }));
    await until(async () => asked === 1, "the page asks for the model");
    await ask(page, "What is the capital of France?");
    check((await answered(page)).includes("Paris"), await answered(page));
    same(await page.innerText("#model"), "unicorn-demo", "the model's name");
    same(page.problems, [], "complaints");
  },

  async the_status_shows_what_the_server_tells() {
    const page = await open();
    for (const question of ["What is the capital of France?", "What is the capital of Spain?"]) {
      await ask(page, question);
      await answered(page);
    }
    const told = await status();
    const shown = async () => (await page.innerText("#status")).replace(/\s+/g, " ");
    await until(async () => (await shown()).includes(`Context ${told.model.context.toLocaleString("en")} tokens`), "the context");
    for (const part of ["Model unicorn-demo", `Device ${told.device.name}`, `Version ${told.version}`, "Waiting 0", "Full layers", "Sliding layers"]) {
      check((await shown()).includes(part), `${part} is not in: ${await shown()}`);
    }
    for (const { class: kind } of told.memory.placed) check((await shown()).includes(kind), `${kind} is not in: ${await shown()}`);
    for (const { heap, size_bytes: size, free_bytes: free } of told.memory.heaps) {
      check(size > 0 && free <= size, `${heap}: ${free} of ${size} bytes free`);
    }
    check(/ of [0-9.]+ [KMG]iB/.test(await page.locator("#placed").innerText()), "the bars measure against the heaps");
    await until(async () => /^[\d.,]+$/.test(await page.innerText("#rate")), "tokens per second");
    await until(async () => (await page.getAttribute("#curve", "points")).includes(" "), "a curve");
    // Whatever a server leaves out is left out.
    for (const [body, said, trouble] of [
      [{ status: "loading" }, "Loading", "The model is loading"],
      [{ status: "lost", last_error: { message: "the device is gone" }, version: "1" }, "Device lost", "started again"],
      [{ status: "failed" }, "Failed", "met a bug"],
      [{ status: "draining", kv: {}, tokens: {}, memory: {}, kernels: [] }, "Stopping", "shutting down"],
      [{}, "No status", "does not tell"],
      [{ status: "ok", tokens: { generated: 5 } }, "Ready", ""],
    ]) {
      await page.route("**/status", (route) => route.fulfill({ json: body }));
      await until(async () => (await page.innerText("#state")) === said, said);
      check(trouble === "" ? await page.locator("#trouble").isHidden() : (await page.innerText("#trouble")).includes(trouble), `trouble of ${said}`);
      check(!(await shown()).includes("undefined") && !(await shown()).includes("NaN"), await shown());
      if (said === "Loading") await picture(page, "loading");
      await page.unroute("**/status");
    }
    same(page.problems, [], "complaints");
  },

  async it_stops_an_answer_on_the_server_too() {
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
      check(more < WITHOUT_END / 2, `it went on for ${more} tokens`);
    }
    await page.unroute("**/v1/chat/completions");
    await ask(page, "What is the capital of France?");
    await answered(page);
    same(page.problems, [], "complaints");
  },

  async it_answers_again_and_edits() {
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
    same(await page.inputValue("#input"), "What is the capital of France?", "what is edited");
    await page.keyboard.press("Escape");
    same([await page.inputValue("#input"), await page.locator(".turn").count()], ["", 4], "left as it was");
    await page.locator("[data-act=edit]").first().click();
    await ask(page, "What is the capital of Italy?");
    check((await answered(page)).includes("Rome"), "the edited question's answer");
    same(await page.locator(".turn").count(), 2, "turns");
    // A page that is loaded again has its conversation, and a new chat has none.
    await page.reload();
    same(await page.locator(".turn").count(), 2, "turns after a reload");
    await page.click("#new-chat");
    await page.reload();
    same(await page.locator(".turn").count(), 0, "turns of a new chat");
    same(page.problems, [], "complaints");
  },

  async parameters_are_sent_when_set_and_left_out_when_not() {
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
    await ask(page, "What is the capital of France?");
    await answered(page);
    same([asked.temperature, asked.max_tokens, asked.seed, asked.top_p], [0, 2, 7, undefined], "fields");
    same(asked.messages[0], { role: "system", content: "Be brief." }, "the system text");
    check((await page.locator(".note").last().innerText()).endsWith("cut at the token limit"), "why it ended");
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
      same([await one.locator(".turn").count(), one.problems], [2, []], "turns and complaints");
    }
  },

  async what_a_model_writes_stays_text() {
    const page = await open();
    const evil = [
      "<script>alert(1)</script>", "<img src=x onerror=alert(2)>", "[click](javascript:alert(3))", "![x](http://127.0.0.1:9/x.png)",
      "**<b onclick=alert(4)>bold</b>**", "`<i>code</i>`", "```html\"><script>alert(5)</script>\n<svg onload=alert(6)>\n```",
      "- <iframe srcdoc='<script>alert(7)</script>'>", "| <a href=javascript:alert(8)>a</a> | b |\n|---|---|\n| <style>*{display:none}</style> | d |",
      "> <object data=x>", "# <h1 onmouseover=alert(9)>",
    ].join("\n\n");
    await script(page, ...[...evil].map(says), STOP, DONE);
    await ask(page, "<u>mine</u>");
    const text = await answered(page);
    for (const part of ["<script>alert(1)</script>", "<img src=x onerror=alert(2)>", "javascript:alert(3)", "<iframe", "<style>"]) {
      check(text.includes(part), `${part} is not to be seen`);
    }
    const made = await page.evaluate(() => [...new Set([...document.querySelectorAll("#log *")].map((node) => node.localName))].sort());
    same(made, ["a", "article", "blockquote", "button", "code", "div", "h3", "li", "p", "pre", "span", "strong", "table", "tbody", "td", "th", "thead", "tr", "ul"], "elements");
    const links = await page.evaluate(() => [...document.querySelectorAll("#log a")].map((node) => node.href));
    same(links, ["http://127.0.0.1:9/x.png"], "links, which nobody follows");
    same(await page.locator(".user .text").innerText(), "<u>mine</u>", "the user's own");
    same([page.problems, page.foreign], [[], []], "complaints and requests elsewhere");
    // And where a browser is told to, it refuses.
    const refused = await page.evaluate(() => { try { document.body.innerHTML = "<b>x</b>"; } catch (error) { return error.name; } });
    same(refused, "TypeError", "markup from text");
  },

  async markdown_becomes_what_it_says() {
    const page = await open();
    const shown = (text) => page.evaluate(async (text) => {
      const { render } = await import("/page/markdown.js");
      const box = document.createElement("div");
      for (let n = 0; n <= text.length; n++) render(box, text.slice(0, n)); // as it streams
      return box.innerHTML.replace(/ (type|data-copy|tabindex|target|rel|title)="[^"]*"/g, "");
    }, text);
    for (const [text, expected] of [
      ["a *b* **c** `d*e*` _f_ 2*3*4 snake_case_name", "<p>a <em>b</em> <strong>c</strong> <code>d*e*</code> <em>f</em> 2*3*4 snake_case_name</p>"],
      ["one\ntwo\n\nthree", "<p>one\ntwo</p><p>three</p>"],
      ["Text:\n- a\n  - b\n- c\n\ndone", "<p>Text:</p><ul><li>a<ul><li>b</li></ul></li><li>c</li></ul><p>done</p>"],
      ["3. a\n4. b", '<ol start="3"><li>a</li><li>b</li></ol>'],
      ["```js\n\n- x **y**\n```\nafter", '<div class="code"><div><span>js</span><button>Copy</button></div><pre><code>\n- x **y**</code></pre></div><p>after</p>'],
      ["~~~\nopen", '<div class="code"><div><span>text</span><button>Copy</button></div><pre><code>open</code></pre></div>'],
      ["|a|b|\n|-|-|\n|1|2|", '<div class="table"><table><thead><tr><th>a</th><th>b</th></tr></thead><tbody><tr><td>1</td><td>2</td></tr></tbody></table></div>'],
      ["## T\n---\n> q", "<h4>T</h4><hr><blockquote><p>q</p></blockquote>"],
      ["[l](https://a.b/c) [no](ftp://x)", '<p><a href="https://a.b/c">l</a> [no](ftp://x)</p>'],
      ["**open *and `open", "<p>**open *and `open</p>"],
    ]) same(await shown(text), expected, JSON.stringify(text));
    // A model in a loop: what would take minutes in a pattern that backtracks.
    for (const part of ["[", "**", "`", "``` ", "*a", "_", "|", "> ", "- ", "[a](", "1. "]) await page.evaluate(async (text) => {
      (await import("/page/markdown.js")).render(document.createElement("div"), text);
    }, part.repeat(5000));
    same(page.problems, [], "complaints");
  },

  async streams_survive_any_cut() {
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

  async errors_are_said_and_can_be_tried_again() {
    const page = await open();
    for (const [chunks, said] of [
      [[says("It began"), { error: { message: "the device was lost" } }, DONE], "the device was lost"],
      [[says("It began")], "The connection ended before the answer did."],
      [["{no json"], "The server sent a line that is no JSON."],
    ]) {
      await script(page, ...chunks);
      await ask(page, "Hello");
      await answered(page, "failed");
      same(await page.locator(".note").last().innerText(), said, "what is said");
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

  async a_key_is_asked_for_and_kept_for_the_tab() {
    const context = await browser.newContext();
    context.setDefaultTimeout(WAIT_MS);
    const page = await openIn(context, (page) => page.route(/\/(v1\/|status$)/, (route) => {
      if (route.request().headers().authorization === "Bearer sesame") return route.continue();
      return route.fulfill({ status: 401, json: { error: { message: "an API key is needed", code: "no_key" } } });
    }));
    await isState(page, "locked");
    check((await page.innerText("#key-form")).includes("asks for an API key"), "the form");
    await picture(page, "key");
    await page.fill("#key", "wrong");
    await page.keyboard.press("Enter");
    await until(async () => (await page.innerText("#key-form")).includes("does not accept"), "the refusal");
    await page.fill("#key", "sesame");
    await page.keyboard.press("Enter");
    await isState(page, "ok");
    await ask(page, "What is the capital of France?");
    check((await answered(page)).includes("Paris"), "the answer");
    await page.reload();
    await isState(page, "ok");
    check(await page.locator("#key-form").isHidden(), "the key is asked for again");
    const kept = await page.evaluate(() => [JSON.stringify(localStorage), document.body.innerText].join());
    check(!kept.includes("sesame"), "the key stands where it outlives the tab, or can be read");
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
    for (const name of ["open-parameters", "new-chat", "edit", "copy", "again", "input", "send"]) check(reached.has(name), `${name} is not reached`);
    await page.focus("#open-parameters");
    await page.keyboard.press("Enter");
    await page.keyboard.press("Escape");
    same(await page.evaluate(() => document.activeElement.id), "open-parameters", "focus after the dialog");
    const nameless = await page.evaluate(() => [...document.querySelectorAll("input, textarea, button")]
      .filter((node) => !node.labels?.length && !node.textContent.trim() && !node.ariaLabel).map((node) => node.outerHTML));
    same(nameless, [], "controls without a name");
    same(page.problems, [], "complaints");
  },

  async it_fits_every_width() {
    for (const [width, height] of [[360, 740], [820, 1180], [1600, 900]]) {
      for (const colorScheme of ["light", "dark"]) {
        const page = await open({ viewport: { width, height }, colorScheme, reducedMotion: "reduce" });
        await isState(page, "ok");
        const long = `${"A word. ".repeat(40)}\n\n\`\`\`\n${"code ".repeat(60)}\n\`\`\`\n\n|${"cell |".repeat(20)}\n|${"-|".repeat(20)}\n\n${"x".repeat(300)}`;
        await script(page, says(long), STOP, DONE);
        await ask(page, "y".repeat(300));
        await answered(page);
        const views = width < 896 ? ["chat", "status"] : ["chat"];
        for (const view of views) {
          if (views.length > 1) await page.click(`#tab-${view}`);
          const wide = await page.evaluate(() => [document.documentElement, document.querySelector("#pane"), document.querySelector("#status")]
            .map((node) => node.scrollWidth - node.clientWidth));
          same(wide, [0, 0, 0], `pixels to scroll sideways in ${view} at ${width}`);
          await picture(page, `${width}-${colorScheme}-${view}`);
        }
        if (views.length > 1) check(await page.locator("#chat").isHidden() && await page.locator("#status").isVisible(), "one view at a time");
        else check(await page.locator("#chat").isVisible() && await page.locator("#status").isVisible(), "both views");
        await page.context().close();
      }
    }
  },

  // Last: it ends the server that the others ask.
  async it_says_when_the_server_is_gone_and_goes_on_when_it_is_back() {
    const page = await open();
    await withoutEnd(page);
    await ask(page, "Tell me a short story about a dragon.");
    await until(async () => (await page.locator(".answer .text").innerText()).length > 20, "text");
    await server.end("SIGKILL");
    check((await answered(page, "failed")).length > 20, "what was written stays");
    await isState(page, "away");
    await picture(page, "away");
    server.start();
    await isState(page, "ok");
    await page.unroute("**/v1/chat/completions");
    await page.click("[data-act=again] >> visible=true");
    await answered(page);
    await server.end("SIGTERM");
    await isState(page, "away");
  },
};

async function main() {
  server = await unicorn("page-server");
  await run("page", [server], tests, { began: (launched) => { browser = launched; } });
}

main().catch(fails("page"));
