#!/usr/bin/env node
/*
 * What users of the official ollama package for Node.js see. test_openai.py runs it with its server, and NODE_PATH is the folder
 * of the package: `node tests/clients/ollama_node.js URL`.
 */

"use strict";

const assert = require("node:assert/strict");
const { setTimeout: sleep } = require("node:timers/promises");
const { Ollama } = require("ollama");
const scenario = require("./scenario.json");
const { run } = require("./session.js");

const url = process.argv[2];
const client = new Ollama({ host: url });
const GREEDY = { temperature: 0, num_predict: 60 };
// How long an unload may take.
const UNLOAD_MS = 30_000;
// The length of an answer that is left.
const WITHOUT_END = 400;
let model;

const body = (fields = {}) => ({ model, messages: scenario.france, options: GREEDY, ...fields });
const chat = (fields) => client.chat(body(fields));

async function collect(stream) {
  const parts = [];
  for await (const part of await stream) parts.push(part);
  return parts;
}

/* What every line of a stream has, and what only the last one has. */
function areLines(parts) {
  for (const part of parts) {
    assert.equal(part.model, model);
    assert.ok(Date.parse(part.created_at) > 0, part.created_at);
  }
  assert.deepEqual(parts.map((part) => part.done), [...parts.slice(1).map(() => false), true]);
  for (const name of ["total_duration", "load_duration", "prompt_eval_count", "prompt_eval_duration", "eval_count", "eval_duration"]) {
    assert.ok(Number.isInteger(parts.at(-1)[name]), `${name} is ${parts.at(-1)[name]}`);
    for (const part of parts.slice(0, -1)) assert.ok(!(name in part), name);
  }
}

function theCall(message) {
  assert.equal(message.content, "");
  assert.equal(message.tool_calls.length, 1);
  const { function: called } = message.tool_calls[0];
  assert.deepEqual([called.name, called.arguments], ["get_weather", { city: "Paris" }]);
}

async function refused(ask, status, words) {
  const error = await ask().then(() => assert.fail("no error"), (error) => error);
  assert.equal(error.name, "ResponseError", `${error.message}`);
  assert.ok([status].flat().includes(error.status_code), `${error.status_code}: ${error.error}`);
  assert.match(error.error, words);
}

async function becomesUnloaded() {
  const until = Date.now() + UNLOAD_MS;
  while ((await client.ps()).models.length) {
    assert.ok(Date.now() < until, "the model is not unloaded");
    await sleep(50);
  }
}

const tests = {
  async ollama_node_lists_the_model() {
    const [listed, ...others] = (await client.list()).models;
    assert.deepEqual(others, []);
    assert.deepEqual([listed.name, listed.model], [model, model]);
    assert.ok(listed.size > 0 && Date.parse(listed.modified_at) >= 0);
    assert.match(listed.digest, /^[0-9a-f]{64}$/);
    for (const name of ["format", "family", "parameter_size", "quantization_level"]) assert.ok(listed.details[name], name);
    assert.ok(Array.isArray(listed.details.families));
  },

  async ollama_node_shows_the_model() {
    const { model_info, capabilities, details, parameters, template, modified_at } = await client.show({ model });
    const context = model_info[`${model_info["general.architecture"]}.context_length`];
    assert.ok(Number.isInteger(context) && context > 0);
    assert.ok(capabilities.includes("completion") && capabilities.includes("tools") && !capabilities.includes("vision"));
    assert.deepEqual(details, (await client.list()).models[0].details);
    assert.match(parameters, new RegExp(`^num_ctx +${context}$`, "m"));
    assert.ok(template && Date.parse(modified_at) >= 0);
    assert.match((await client.version()).version, /^\d+\.\d+\.\d+$/);
  },

  async ollama_node_reports_the_loaded_model() {
    await chat({ keep_alive: "10m" });
    const [running] = (await client.ps()).models;
    assert.deepEqual([running.name, running.model], [model, model]);
    assert.ok(running.size_vram > 0 && running.size > 0 && running.context_length > 0);
    const seconds = (Date.parse(running.expires_at) - Date.now()) / 1000;
    assert.ok(seconds > 500 && seconds <= 600, running.expires_at);
  },

  async ollama_node_answers_and_streams_the_same() {
    const whole = await chat();
    areLines([whole]);
    assert.match(whole.message.content, /Paris/);
    assert.deepEqual([whole.message.role, whole.done_reason], ["assistant", "stop"]);
    assert.ok(whole.prompt_eval_count > 5 && whole.eval_count > 2 && whole.total_duration >= whole.eval_duration);
    const parts = await collect(chat({ stream: true }));
    areLines(parts);
    assert.equal(parts.map((part) => part.message.content).join(""), whole.message.content);
    assert.ok(parts.length > 3 && parts.every((part) => part.message.role === "assistant"));
    assert.deepEqual([parts.at(-1).done_reason, parts.at(-1).eval_count], ["stop", whole.eval_count]);
  },

  async ollama_node_generates() {
    const ask = { model, prompt: scenario.france[0].content, options: GREEDY };
    const whole = await client.generate(ask);
    areLines([whole]);
    assert.match(whole.response, /Paris/);
    const parts = await collect(client.generate({ ...ask, stream: true }));
    areLines(parts);
    assert.equal(parts.map((part) => part.response).join(""), whole.response);
    const more = await client.generate({ ...ask, context: whole.context });
    assert.ok(more.prompt_eval_count > whole.context.length, "the context comes before the prompt");
    const short = await client.generate({ ...ask, options: { num_predict: 2 } });
    assert.deepEqual([short.done_reason, short.eval_count], ["length", 2]);
    const raw = await client.generate({ ...ask, raw: true });
    assert.ok(raw.prompt_eval_count < whole.prompt_eval_count && !("context" in raw), "no template");
  },

  async ollama_node_embeds() {
    const input = [scenario.france[0].content, scenario.weather[0].content];
    const { embeddings, prompt_eval_count, model: named } = await client.embed({ model, input });
    assert.equal(named, model);
    assert.ok(prompt_eval_count > 10 && embeddings.length === 2 && embeddings[0].length === embeddings[1].length);
    for (const one of embeddings) assert.ok(Math.abs(one.reduce((sum, x) => sum + x * x, 0) - 1) < 1e-3);
    assert.deepEqual((await client.embed({ model, input: input[1] })).embeddings.length, 1);
    assert.equal((await client.embeddings({ model, prompt: input[0] })).embedding.length, embeddings[0].length);
    await refused(() => client.embed({ model, input, dimensions: 8 }), 400, /dimensions/);
  },

  async ollama_node_calls_a_tool_and_reads_its_result() {
    const { tools, weather: messages, result } = scenario;
    const whole = await chat({ messages, tools });
    assert.equal(whole.done_reason, "stop");
    theCall(whole.message);
    // A streamed call comes whole, in one line.
    const parts = await collect(chat({ messages, tools, stream: true }));
    const called = parts.filter((part) => part.message.tool_calls);
    assert.equal(called.length, 1);
    theCall(called[0].message);
    for (const named of [{}, { tool_name: "get_weather" }, { tool_call_id: whole.message.tool_calls[0].id }]) {
      const turns = [...messages, whole.message, { role: "tool", content: result, ...named }];
      const answer = (await chat({ messages: turns, tools })).message;
      assert.ok(answer.content.includes(result) && !answer.tool_calls, `${answer.content}`);
    }
  },

  async ollama_node_answers_by_a_schema() {
    const fields = { messages: scenario.leo, format: scenario.person };
    assert.deepEqual(JSON.parse((await chat(fields)).message.content), scenario.answer);
    const parts = await collect(chat({ ...fields, stream: true }));
    assert.deepEqual(JSON.parse(parts.map((part) => part.message.content).join("")), scenario.answer);
    const { response } = await client.generate({ model, prompt: scenario.leo[0].content, format: "json", options: GREEDY });
    assert.equal(typeof JSON.parse(response), "object");
  },

  async ollama_node_leaves_a_stream_and_goes_on() {
    const story = { messages: [{ role: "user", content: "Tell me a short story." }], options: { num_predict: WITHOUT_END }, stream: true };
    for (const abort of [(stream) => stream.abort(), () => client.abort()]) {
      const stream = await chat(story);
      const left = async () => {
        for await (const part of stream) if (part.message.content) abort(stream);
      };
      await assert.rejects(left, { name: "AbortError" });
      assert.match((await chat()).message.content, /Paris/);
    }
  },

  async ollama_node_unloads_and_loads_the_model() {
    assert.equal((await client.generate({ model, prompt: "", keep_alive: 0 })).done_reason, "unload");
    await becomesUnloaded();
    assert.equal((await chat({ messages: [], keep_alive: "5m" })).done_reason, "load");
    const [running] = (await client.ps()).models;
    const seconds = (Date.parse(running.expires_at) - Date.now()) / 1000;
    assert.ok(seconds > 200 && seconds <= 300, running.expires_at);
    assert.match((await chat({ keep_alive: 0 })).message.content, /Paris/);
    await becomesUnloaded();
    assert.match((await chat({ keep_alive: -1 })).message.content, /Paris/);
    assert.ok(Date.parse((await client.ps()).models[0].expires_at) > Date.now() + 1e12);
  },

  async ollama_node_pulls_the_served_model() {
    assert.deepEqual(await client.pull({ model }), { status: "success" });
    const lines = await collect(client.pull({ model, stream: true }));
    assert.equal(lines.at(-1).status, "success");
    for (const { status, digest, total, completed } of lines) {
      assert.equal(typeof status, "string");
      // A program that shows a bar divides these two.
      if (total !== undefined) assert.ok(digest && Number.isInteger(total) && (completed ?? 0) <= total, status);
    }
  },

  async ollama_node_errors_say_what_is_wrong() {
    for (const stream of [false, true]) {
      await refused(() => chat({ model: "llama3.2", stream }), 404, /model 'llama3\.2' not found/);
      await refused(() => client.pull({ model: "llama3.2", stream }), 404, /unicorn pull/);
      await refused(() => client.generate({ model, prompt: "a", suffix: "b", stream }), 400, /suffix/);
      await refused(() => chat({ think: true, stream }), 400, /does not support thinking/);
      await refused(() => chat({ options: { temperature: "hot" }, stream }), 400, /temperature/);
      await refused(() => chat({ messages: [{ role: "user", content: "a", images: ["AAAA"] }], stream }), 400, /images/);
    }
    await refused(() => client.show({ model: "llama3.2" }), 404, /not found/);
    await refused(() => client.copy({ source: model, destination: "b" }), 501, /./);
    await refused(() => client.delete({ model }), 409, /unicorn models rm/);
    await refused(() => client.create({ model: "b", from: model }), 501, /./);
    await refused(() => client.push({ model }), 501, /./);
  },
};

run("ollama_node", url, (id) => {
  model = `${id}:latest`;
  return tests;
});
