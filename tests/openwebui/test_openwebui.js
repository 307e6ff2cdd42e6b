#!/usr/bin/env node
/*
 * Open WebUI itself, headless, in front of a real `unicorn serve` with the demo model, and Debian's Chromium in front of Open WebUI.
 *
 * tools/test.py starts it (`make test-openwebui`) with NODE_PATH at the pinned playwright-core and OPEN_WEBUI at the pinned Open WebUI's
 * program. Prints one line per test and at the end `openwebui: N passed, N failed`. Pictures go to target/openwebui, for people to look at.
 * Each test continues where the one before ended, in one browser.
 */

"use strict";

const { spawnSync } = require("node:child_process");
const fs = require("node:fs");
const http = require("node:http");
const path = require("node:path");
const { ROOT, SMOLLM2, WAIT_MS, Server, check, emptyFolder, fails, needsTrained, run, same, unicorn, until } = require("../page/drive.js");

const PICTURES = emptyFolder("openwebui");
const DATA = path.join(ROOT, ".cache/test/openwebui-data");
const IMAGES = path.join(ROOT, "tests/data/images");
/** Random weights, so its answers mean nothing. */
const VISION_MODEL = path.join(ROOT, "tests/data/gemma4-vision/vis4-a");
const MODEL = "unicorn-demo";
const HARBOUR = "The harbour had been quiet since the lamps went out along the northern wall. ";
/** What the model of tests/clients/scripted_model.py answers after the result of its call. */
const SUNNY = "The tool says: it is sunny.";
const THOUGHT = "The user asks for something that a tool knows. I call it.";
const STORY = "Tell me a short story about a dragon.";
/** Has the demo model, whose stories are short, tell more of them: seconds on a software GPU. */
const LONG = { min_tokens: "600", max_tokens: "600" };

// What its background tasks, at one a time, and a software GPU may take together.
const SLOW_MS = 180_000;

let engine;
let webui;
let page;

/** Open WebUI at the server's address, for one user without a password, with nothing that it would fetch from elsewhere. */
const openWebui = () => Server.onFreePort("openwebui", (port) => [process.env.OPEN_WEBUI, ["serve", "--host", "127.0.0.1", "--port", port], {
  DATA_DIR: DATA,
  WEBUI_AUTH: "False",
  WEBUI_SECRET_KEY: "of a test",
  OPENAI_API_BASE_URL: `${engine.url}v1`,
  OPENAI_API_KEY: "",
  ENABLE_OLLAMA_API: "False",
  // The descriptions of its own tools are more than the demo model's context.
  DEFAULT_MODEL_METADATA: JSON.stringify({ capabilities: { builtin_tools: false } }),
  OFFLINE_MODE: "True",
  HF_HUB_OFFLINE: "1",
  RAG_EMBEDDING_ENGINE: "openai",
  ANONYMIZED_TELEMETRY: "False",
  DO_NOT_TRACK: "True",
  SCARF_NO_ANALYTICS: "True",
  NO_PROXY: "127.0.0.1,localhost",
}]);

// --- both servers ---------------------------------------------------------------------------------------

const status = async () => (await fetch(`${engine.url}status`)).json();

/** The sum of a server's metric, of all its labels or of those with `what` in them. */
async function metric(server, name, what = "") {
  const text = await (await fetch(`${server.url}metrics`)).text();
  const lines = text.split("\n").filter((line) => line.startsWith(`${name}{`) && line.includes(what));
  return lines.reduce((sum, line) => sum + Number(line.split(" ").at(-1)), 0);
}

/** How many requests for a task, or of that class, the server has taken. */
const taken = (what) => metric(engine, "unicorn_requests_total", what);

const isQuiet = async (server = engine) => {
  const { requests, kv } = await (await fetch(`${server.url}status`)).json();
  return requests.running === 0 && requests.waiting === 0 && kv.full.held === 0 && kv.sliding.held === 0;
};

/** A server that passes each request on to `server`, and the bodies of those for chats to `heard`. */
async function relay(server, heard) {
  const between = http.createServer((request, response) => {
    const pieces = [];
    request.on("data", (piece) => pieces.push(piece));
    request.on("end", () => {
      const body = Buffer.concat(pieces);
      if (request.url.endsWith("/chat/completions")) heard(JSON.parse(body));
      const { method, headers } = request;
      const onward = http.request(new URL(request.url, server.url), { method, headers }, (answer) => {
        response.writeHead(answer.statusCode, answer.headers);
        answer.pipe(response);
      });
      onward.on("error", () => response.destroy());
      response.on("close", () => onward.destroy());
      onward.end(body);
    });
  });
  await new Promise((resolve) => between.listen(0, "127.0.0.1", resolve));
  between.url = `http://127.0.0.1:${between.address().port}/`;
  return between;
}

/** Asks Open WebUI as its page does: the status, and what came. */
const api = (method, route, body) => page.evaluate(async ({ method, route, body }) => {
  const headers = { authorization: `Bearer ${localStorage.token}`, "content-type": "application/json" };
  const response = await fetch(route, { method, headers, body: body && JSON.stringify(body) });
  return [response.status, await response.json()];
}, { method, route, body });

async function ok(method, route, body) {
  const [code, json] = await api(method, route, body);
  check(code === 200, `${method} ${route}: ${code} ${JSON.stringify(json)}`);
  return json;
}

/** The messages of the chat that the page shows, as Open WebUI keeps them. */
async function kept() {
  const { chat } = await ok("GET", `/api/v1/chats/${new URL(page.url()).pathname.split("/").at(-1)}`);
  return Object.values(chat.history.messages);
}

// --- the page -------------------------------------------------------------------------------------------

const picture = (name) => page.screenshot({ path: path.join(PICTURES, `${name}.png`) });
const stop = () => page.getByRole("button", { name: "Stop", exact: true });
const answers = () => page.locator(".chat-assistant");
const title = async () => (await page.title()).replace(/ [/•|-] Open WebUI$/, "");

/** Sets what every chat sends in addition to its messages: what a user may have set, and fields that no server knows. */
async function ask(params) {
  const custom = { min_p: "0.01", repeat_penalty: "1.0", a_field: '{"of": "theirs"}', ...params };
  const config = await ok("GET", "/api/v1/configs/models");
  await ok("POST", "/api/v1/configs/models", { ...config, DEFAULT_MODEL_PARAMS: { temperature: 0, seed: 7, custom_params: custom } });
}

/** From now on chats get no title, tags and follow-ups. */
async function withoutTasks() {
  const tasks = await ok("GET", "/api/v1/tasks/config");
  const none = { ENABLE_FOLLOW_UP_GENERATION: false, ENABLE_TAGS_GENERATION: false, ENABLE_TITLE_GENERATION: false };
  await ok("POST", "/api/v1/tasks/config/update", { ...tasks, ...none });
}

async function newChat() {
  await page.goto(webui.url);
  await page.waitForSelector("#chat-input");
  await until(async () => (await page.locator("[id^=model-selector]").first().innerText()).includes(MODEL), "the model is chosen");
}

async function type(text) {
  await page.click("#chat-input");
  await page.keyboard.insertText(text);
  await page.click("#send-message-button");
}

/** The text of answer number `n` once it is whole. */
async function answered(n) {
  await until(async () => (await answers().count()) === n, `answer ${n} begins`, SLOW_MS);
  const text = () => answers().last().innerText();
  await until(async () => (await text()).trim() !== "" && (await stop().count()) === 0, `answer ${n} ends`, SLOW_MS);
  return (await text()).trim();
}

/** Starts a second server of models, and makes Open WebUI use it too, at `url`. Returns the name of its model. */
async function connect(other, url = other.url) {
  other.start();
  await other.ready();
  const [{ id }] = (await (await fetch(`${other.url}v1/models`)).json()).data;
  const config = await ok("GET", "/openai/config");
  await ok("POST", "/openai/config/update", {
    ...config, OPENAI_API_BASE_URLS: [`${engine.url}v1`, `${url}v1`], OPENAI_API_KEYS: ["", ""],
    OPENAI_API_CONFIGS: { 0: { enable: true }, 1: { enable: true } },
  });
  return id;
}

/** Begins a chat with a model of this name. */
async function choose(id) {
  await page.goto(`${webui.url}?models=${id}`);
  await page.waitForSelector("#chat-input");
  await until(async () => (await page.locator("[id^=model-selector]").first().innerText()).includes(id), "the model is chosen");
}

// --- the tests ------------------------------------------------------------------------------------------

const tests = {
  async its_list_has_the_model() {
    const models = await ok("GET", "/api/models");
    const mine = models.data.filter((model) => model.id === MODEL);
    same(mine.length, 1, "models of that name");
    await page.locator("[id^=model-selector]").first().click();
    await page.getByRole("option", { name: MODEL }).or(page.getByRole("listbox").getByText(MODEL)).first().waitFor();
    await picture("models");
    await page.keyboard.press("Escape");
  },

  async a_chat_streams_and_gets_its_title_in_the_background() {
    await ask(LONG);
    await newChat();
    const before = await Promise.all(["title_generation", "tags_generation", "follow_up_generation"].map(taken));
    const [background, chats] = await Promise.all([taken('class="background"'), taken('task="none"')]);
    // Lengths of the answer, as the page shows them one after the other.
    await page.evaluate(() => {
      window.lengths = [];
      new MutationObserver(() => {
        const length = [...document.querySelectorAll(".chat-assistant")].at(-1)?.innerText.length ?? 0;
        if (length !== window.lengths.at(-1)) window.lengths.push(length);
      }).observe(document.body, { childList: true, subtree: true, characterData: true });
    });
    await type(STORY);
    await until(async () => (await stop().count()) === 1, "it can be stopped");
    await until(async () => (await answers().last().innerText()).includes("Once"), "its first words", SLOW_MS);
    await picture("writing");
    const text = await answered(1);
    check(/dragon/i.test(text), `no story: ${text}`);
    const lengths = await page.evaluate(() => window.lengths);
    check(lengths.length > 5, `it came in ${lengths.length} pieces`);
    await picture("answered");
    await until(async () => (await title()) !== "New Chat" && (await title()) !== "Open WebUI", "it has a title", SLOW_MS);
    const named = await title();
    check(named !== "" && named !== STORY, `the title is ${named}, which the model did not write`);
    await until(async () => (await taken("follow_up_generation")) > before[2] && (await taken("tags_generation")) > before[1], "the other tasks", SLOW_MS);
    await until(isQuiet, "all is answered", SLOW_MS);
    same(await taken("title_generation"), before[0] + 1, "titles");
    same(await taken('class="background"'), background + 3, "requests in the background");
    same(await taken('task="none"'), chats + 1, "chats");
    console.log(`   the title is ${JSON.stringify(named)}; the answer came in ${lengths.length} pieces`);
    await page.reload();
    await answers().first().waitFor();
    await picture("titled");
  },

  async the_next_turn_starts_from_what_is_cached() {
    await ask({});
    const [first] = (await kept()).filter((message) => message.role === "assistant");
    await type("What is the capital of France?");
    const text = await answered(2);
    check(text.includes("Paris"), text);
    await until(isQuiet, "all is answered", SLOW_MS);
    const second = (await kept()).filter((message) => message.role === "assistant").at(-1);
    const [before, after] = [first.usage, second.usage];
    console.log(`   ${JSON.stringify(after)}`);
    // All of the first turn but the block at its end.
    check(after.cache_n >= before.prompt_n + before.cache_n, `${after.cache_n} tokens were cached; the first turn: ${JSON.stringify(before)}`);
    check(after.prompt_n < 64, `${after.prompt_n} tokens were computed again`);
    await picture("second-turn");
  },

  async a_second_chat_starts_from_what_both_begin_with() {
    const usage = [];
    for (const country of ["France", "Spain"]) {
      await newChat();
      await type(`${HARBOUR.repeat(12)}What is the capital of ${country}?`);
      await answered(1);
      await until(isQuiet, "all is answered", SLOW_MS);
      usage.push((await kept()).find((message) => message.role === "assistant").usage);
    }
    console.log(`   ${JSON.stringify(usage)}`);
    const [first, second] = usage;
    check(first.prompt_n > 150, `${first.prompt_n} tokens were computed for the first chat`);
    check(second.cache_n > 150 && second.prompt_n < 48, `the second chat: ${JSON.stringify(second)}`);
    await picture("second-chat");
  },

  async stop_ends_a_prompt_before_the_first_word() {
    await newChat();
    // Such a chat has no title: nothing else is under way.
    await page.click("#temporary-chat-button");
    await until(isQuiet, "nothing runs");
    const { tokens, finished } = await status();
    await type(HARBOUR.repeat(220));
    await until(async () => (await status()).requests.running === 1, "the prompt is computed");
    await picture("waiting");
    await stop().click();
    await until(isQuiet, "the server has stopped, and its blocks are free");
    const now = await status();
    await picture("stopped");
    same(now.tokens, tokens, "tokens of prompts that came to a first word, and of answers");
    same(now.finished.abort, (finished.abort ?? 0) + 1, "answers that their client left");
    // And the next one is not in its way.
    await newChat();
    await type("What is the capital of Spain?");
    check((await answered(1)).includes("Madrid"), await answers().last().innerText());
    await until(isQuiet, "all is answered", SLOW_MS);
  },

  async a_connection_to_llama_cpp_is_served() {
    const config = await ok("GET", "/openai/config");
    const connection = { enable: true, provider: "llama.cpp", connection_type: "local", headers: { "X-Unicorn-Task": "{{TASK}}" } };
    await ok("POST", "/openai/config/update", { ...config, OPENAI_API_CONFIGS: { 0: connection } });
    const catalog = async () => (await ok("GET", "/openai/models/0/catalog")).data.map((model) => [model.id, model.status.value]);
    const becomes = (state) => until(async () => JSON.stringify(await catalog()) === JSON.stringify([[MODEL, state]]), `it is ${state}`, SLOW_MS);
    same(await catalog(), [[MODEL, "loaded"]], "the catalog");
    for (const [action, state] of [["load", "loaded"], ["unload", "unloaded"], ["load", "loaded"]]) {
      same(await ok("POST", `/openai/models/0/${action}`, { model: MODEL }), { success: true }, action);
      await becomes(state);
    }
    // An answer that continues where it was cut.
    await ask(LONG);
    await newChat();
    await type(STORY);
    await until(async () => (await answers().count()) === 1 && (await answers().last().innerText()).length > 40, "text", SLOW_MS);
    await stop().click();
    await until(isQuiet, "the server has stopped too", SLOW_MS);
    const cut = (await kept()).find((message) => message.role === "assistant").content;
    await page.getByRole("button", { name: "Continue Response" }).click();
    const whole = () => kept().then((messages) => messages.find((message) => message.role === "assistant").content);
    await until(async () => (await whole()).length > cut.length && (await stop().count()) === 0, "it continues", SLOW_MS);
    check((await whole()).startsWith(cut), `${JSON.stringify(await whole())} does not continue ${JSON.stringify(cut)}`);
    await until(isQuiet, "all is answered", SLOW_MS);
    await picture("continued");
    await ask({});
  },

  async a_title_by_another_prompt_is_known_by_its_header() {
    const tasks = await ok("GET", "/api/v1/tasks/config");
    const prompt = "Name this chat, as JSON with the field title:\n{{MESSAGES:END:2}}";
    await ok("POST", "/api/v1/tasks/config/update", { ...tasks, TITLE_GENERATION_PROMPT_TEMPLATE: prompt });
    const [titles, chats] = await Promise.all([taken('class="background",task="title_generation"'), taken('task="none"')]);
    await newChat();
    await type("What is the capital of Italy?");
    check((await answered(1)).includes("Rome"), await answers().last().innerText());
    await until(async () => (await taken('class="background",task="title_generation"')) === titles + 1, "its title in the background", SLOW_MS);
    await until(isQuiet, "all is answered", SLOW_MS);
    same(await taken('task="none"'), chats + 1, "chats");
  },

  async a_model_thinks_and_calls_a_tool() {
    const checkpoint = path.join(emptyFolder("scripted"), "model");
    const wrote = spawnSync("python3", [path.join(ROOT, "tests/clients/scripted_model.py"), checkpoint, "--answer", SUNNY, "--thought", THOUGHT], { encoding: "utf8" });
    check(wrote.status === 0, wrote.stderr);
    const other = await unicorn("openwebui-caller", "--model", checkpoint, "--context", "8192");
    try {
      const id = await connect(other);
      const content = "class Tools:\n    def get_weather(self, city: str) -> str:\n        \"\"\"\n        Get the current weather in a city\n"
        + "        :param city: Name of the city\n        \"\"\"\n        return f\"It is sunny in {city}.\"\n";
      const meta = { description: "the weather", manifest: {} };
      await ok("POST", "/api/v1/tools/create", { id: "weather", name: "Weather", content, meta });
      await ok("POST", "/api/v1/models/create", {
        id, base_model_id: null, name: id, is_active: true, access_grants: null,
        meta: { toolIds: ["weather"], capabilities: { builtin_tools: false } }, params: { function_calling: "native", max_tokens: 300 },
      });
      await choose(id);
      await type("What is the weather in Paris?");
      const text = await answered(1);
      await until(() => isQuiet(other), "all is answered", SLOW_MS);
      check(text.includes(SUNNY), text);
      for (const mark of ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", '"arguments"']) {
        check(!text.includes(mark), `${mark} is in the answer: ${text}`);
      }
      await picture("tool-called");
      // What it did before the answer is in a line that can be opened, and again in this line.
      await page.getByText("Explored").click();
      const thoughts = page.locator(".chat-assistant").getByText(/^Thought/);
      await until(async () => (await thoughts.count()) === 2, "both thoughts are there");
      await thoughts.first().click();
      await page.getByText(THOUGHT).first().waitFor();
      await picture("tool-opened");
      console.log(`   ${JSON.stringify(await answers().last().innerText())}`);
    } finally {
      await other.end("SIGTERM");
    }
  },

  async a_model_answers_about_attached_and_pasted_pictures() {
    const other = await unicorn("openwebui-pictures", "--model", VISION_MODEL);
    const heard = [];
    const between = await relay(other, (body) => heard.push(body));
    try {
      const id = await connect(other, between.url);
      await ask({ min_tokens: "24", max_tokens: "24" });
      await withoutTasks();
      const file = fs.readFileSync(path.join(IMAGES, "rgb.png")).toString("base64");
      const size = [200, 150];
      /** How many images steps needed, and how many of them had been encoded before. */
      const images = async () => [await metric(other, "unicorn_mm_cache_queries_total"), await metric(other, "unicorn_mm_cache_hits_total")];
      /** Waits until the one picture there is shown, and returns its size. */
      const shown = (where) => page.locator(`${where} img`).evaluate((image) => image.decode().then(() => [image.naturalWidth, image.naturalHeight]));
      /** Sends a text, and compares answer `n` with the server's answer to the same request whose prompt is not cached. Returns `images`. */
      const asks = async (text, n) => {
        await type(text);
        const read = await answered(n);
        await until(() => isQuiet(other), "all is answered", SLOW_MS);
        const { content, usage } = (await kept()).filter((message) => message.role === "assistant").at(-1);
        const after = await images();
        const body = JSON.stringify({ ...heard.at(-1), stream: false, cache_salt: text });
        const response = await fetch(`${other.url}v1/chat/completions`, { method: "POST", headers: { "content-type": "application/json" }, body });
        const direct = await response.json();
        check(response.status === 200, `directly: ${JSON.stringify(direct)}`);
        same(direct.usage.prompt_tokens, usage.prompt_n + usage.cache_n, "tokens of the prompt");
        same(content, direct.choices[0].message.content.trim(), "the answer");
        // The page renders Markdown, which may remove other characters than letters.
        const letters = (of) => of.replace(/[^\p{L}]/gu, "");
        same(letters(read), letters(content), "the answer on the page");
        console.log(`   ${JSON.stringify([read, usage.prompt_n, usage.cache_n, after])}`);
        return after;
      };

      await choose(id);
      await page.click("#input-menu-button");
      const [chooser] = await Promise.all([page.waitForEvent("filechooser"), page.getByText("Upload Files").click()]);
      await chooser.setFiles(path.join(IMAGES, "rgb.png"));
      same(await shown("#message-input-container"), size, "the picture in the composer");
      const before = await images();
      const first = await asks("What is in this picture?", 1);
      same(heard[0].messages.at(-1).content.at(-1), { type: "image_url", image_url: { url: `data:image/png;base64,${file}` } }, "the picture as it was sent");
      same([before, first], [[0, 0], [1, 0]], "images that were needed and found");
      same(await shown(".chat-user"), size, "the picture in the conversation");
      await picture("picture-attached");

      // The keys and values of the whole image are cached with the first turn.
      const found = await images();
      const second = await asks("Which colors does it have?", 2);
      same(heard[1].messages[0], heard[0].messages[0], "the first message, sent again");
      same(second, found, "images that were needed and found, after the second turn");
      await page.reload();
      same(await shown(".chat-user"), size, "the picture after a reload");
      await picture("picture-second-turn");

      // Another prompt finds the embeddings of the image. The clipboard writes another file with the same pixels.
      await choose(id);
      await page.context().grantPermissions(["clipboard-read", "clipboard-write"]);
      await page.evaluate(async (url) => {
        const blob = await (await fetch(url)).blob();
        await navigator.clipboard.write([new ClipboardItem({ "image/png": blob })]);
      }, `data:image/png;base64,${file}`);
      await page.click("#chat-input");
      await page.keyboard.press("Control+v");
      same(await shown("#message-input-container"), size, "the pasted picture in the composer");
      const [queries, hits] = await images();
      const pasted = await asks("Describe it.", 1);
      same(pasted, [queries + 1, hits + 1], "images that were needed and found, when it was pasted");
      same(pasted[0] - pasted[1], 1, "encoded images");
      same(await shown(".chat-user"), size, "the pasted picture in the conversation");
      await picture("picture-pasted");
    } finally {
      between.close();
      await other.end("SIGTERM");
    }
  },

  async a_trained_model_of_a_second_server_holds_a_conversation() {
    const other = await unicorn("openwebui-smollm2", "--model", SMOLLM2, "--context", "2048");
    try {
      const id = await connect(other);
      await ask({ max_tokens: "60" });
      // Follow-ups would take this model minutes on a software GPU, and the page shows "Stop" until they end.
      await withoutTasks();
      const models = await ok("GET", "/api/models");
      same(models.data.map((model) => model.id).filter((name) => [MODEL, id].includes(name)).sort(), [MODEL, id].sort(), "models of both");
      await choose(id);
      await type("What is the capital of France?");
      const first = await answered(1);
      check(first.includes("The capital of France is Paris."), first);
      await type("Which river flows through it?");
      const second = await answered(2);
      check(second.length > 20 && !second.includes("<|im_"), second);
      console.log(`   ${JSON.stringify([first, second])}`);
      await picture("smollm2");
    } finally {
      await other.end("SIGTERM");
    }
  },
};

async function main() {
  check(process.env.OPEN_WEBUI, "OPEN_WEBUI names no program: run make test-openwebui");
  needsTrained("openwebui", tests, "a_trained_model_of_a_second_server_holds_a_conversation");
  fs.rmSync(DATA, { recursive: true, force: true });
  fs.mkdirSync(DATA, { recursive: true });
  engine = await unicorn("openwebui-engine");
  webui = await openWebui();
  await run("openwebui", [engine, webui], tests, {
    together: true,
    async began(browser) {
      const context = await browser.newContext({ viewport: { width: 1280, height: 800 } });
      context.setDefaultTimeout(WAIT_MS);
      page = await context.newPage();
      await newChat();
      // The news of the version.
      await page.getByRole("button", { name: "Okay, Let's Go!" }).click();
    },
    look: (test) => picture(`failed-${test}`),
  });
}

main().catch(fails("openwebui"));
