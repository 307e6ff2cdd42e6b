#!/usr/bin/env node
/*
 * What users of the official openai package for Node.js see. test_openai.py runs it with its server, and NODE_PATH is the folder
 * of the package: `node tests/clients/openai_node.js URL`.
 */

"use strict";

const assert = require("node:assert/strict");
const OpenAI = require("openai");
const scenario = require("./scenario.json");
const { run } = require("./session.js");

const ANSWER_MS = 300_000;
const url = process.argv[2];
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "unused", timeout: ANSWER_MS, maxRetries: 0 });
let model;

const body = (fields = {}) => ({ model, messages: scenario.france, temperature: 0, max_tokens: 60, ...fields });
const ask = (fields) => client.chat.completions.create(body(fields));
const wanted = { type: "json_schema", json_schema: { name: "person", schema: scenario.person, strict: true } };

function theCall(message) {
  assert.equal(message.tool_calls.length, 1);
  const [call] = message.tool_calls;
  assert.ok(call.id);
  assert.deepEqual([call.function.name, JSON.parse(call.function.arguments)], ["get_weather", { city: "Paris" }]);
  return call;
}

const tests = {
  async node_lists_the_model() {
    const ids = [];
    for await (const one of client.models.list()) ids.push(one.id);
    assert.deepEqual(ids, [model]);
    assert.equal((await client.models.retrieve(model)).id, model);
  },

  async node_answers_paris() {
    const { choices, usage } = await ask();
    assert.match(choices[0].message.content, /Paris/);
    assert.equal(choices[0].finish_reason, "stop");
    assert.ok(usage.prompt_tokens > 5 && usage.total_tokens === usage.prompt_tokens + usage.completion_tokens);
  },

  async node_streams_the_same_answer() {
    const whole = await ask();
    const chunks = [];
    for await (const chunk of await ask({ stream: true, stream_options: { include_usage: true } })) chunks.push(chunk);
    assert.equal(chunks.map((chunk) => chunk.choices[0]?.delta.content ?? "").join(""), whole.choices[0].message.content);
    const { prompt_tokens, completion_tokens } = chunks.at(-1).usage;
    assert.deepEqual([prompt_tokens, completion_tokens], [whole.usage.prompt_tokens, whole.usage.completion_tokens]);
    const stream = client.chat.completions.stream(body());
    let text = "";
    stream.on("content", (delta) => (text += delta));
    assert.deepEqual([await stream.finalContent(), text], [whole.choices[0].message.content, whole.choices[0].message.content]);
    assert.equal((await stream.finalChatCompletion()).choices[0].finish_reason, "stop");
  },

  async node_leaves_a_stream_and_goes_on() {
    const stream = await ask({ messages: [{ role: "user", content: "Tell me a short story." }], max_tokens: 400, stream: true });
    for await (const chunk of stream) if (chunk.choices[0].delta.content) break;
    assert.ok(stream.controller.signal.aborted);
    assert.match((await ask()).choices[0].message.content, /Paris/);
  },

  async node_calls_a_tool_and_reads_its_result() {
    const { tools, weather: messages, result } = scenario;
    for (const tool_choice of ["auto", "required", { type: "function", function: { name: "get_weather" } }]) {
      const { message, finish_reason } = (await ask({ messages, tools, tool_choice })).choices[0];
      assert.equal(finish_reason, "tool_calls");
      const turns = [...messages, message, { role: "tool", tool_call_id: theCall(message).id, content: result }];
      const answer = (await ask({ messages: turns, tools })).choices[0].message;
      assert.ok(answer.content.includes(result) && !answer.tool_calls);
      const streamed = await client.chat.completions.stream(body({ messages, tools, tool_choice })).finalMessage();
      theCall(streamed);
    }
  },

  async node_runs_tools_by_itself() {
    const asked = [];
    const { name, description, parameters } = scenario.tools[0].function;
    const get_weather = (given) => (asked.push(given), scenario.result);
    const tools = [{ type: "function", function: { name, description, parameters, parse: JSON.parse, function: get_weather } }];
    for (const stream of [false, true]) {
      const runner = client.chat.completions.runTools(body({ messages: scenario.weather, tools, stream }));
      assert.ok((await runner.finalContent()).includes(scenario.result));
    }
    assert.deepEqual(asked, [{ city: "Paris" }, { city: "Paris" }]);
  },

  async node_answers_by_a_schema() {
    const fields = { messages: scenario.leo, response_format: wanted };
    const { parsed, content } = (await client.chat.completions.parse(body(fields))).choices[0].message;
    assert.deepEqual([JSON.parse(content), parsed], [scenario.answer, scenario.answer]);
    assert.deepEqual(JSON.parse(await client.chat.completions.stream(body(fields)).finalContent()), scenario.answer);
  },

  async node_goes_by_way_of_responses() {
    const asked = { model, input: scenario.france, temperature: 0, max_output_tokens: 60 };
    const response = await client.responses.create(asked);
    assert.match(response.output_text, /Paris/);
    assert.equal((await client.responses.stream(asked).finalResponse()).output_text, response.output_text);
    assert.deepEqual((await client.responses.retrieve(response.id)).output, response.output);
  },

  async node_goes_on_from_a_text() {
    const asked = { model, prompt: "The capital of France", temperature: 0, max_tokens: 8 };
    const { text } = (await client.completions.create(asked)).choices[0];
    let streamed = "";
    for await (const chunk of await client.completions.create({ ...asked, stream: true })) streamed += chunk.choices[0].text;
    assert.ok(text);
    assert.equal(streamed, text);
  },

  async node_errors_are_of_their_class() {
    const long = [{ role: "user", content: scenario.too_long.repeat(4000) }];
    for (const [fields, kind, status, param, code] of [
      [{ model: "gpt-none" }, OpenAI.NotFoundError, 404, "model", "model_not_found"],
      [{ temperature: 3 }, OpenAI.BadRequestError, 400, "temperature", "invalid_value"],
      [{ messages: long }, OpenAI.BadRequestError, 400, "messages", "context_length_exceeded"],
    ]) for (const stream of [false, true]) {
      const error = await ask({ ...fields, stream }).then(() => assert.fail("no error"), (error) => error);
      assert.ok(error instanceof kind, `${error}`);
      assert.deepEqual([error.status, error.type, error.param, error.code], [status, "invalid_request_error", param, code]);
      assert.ok(error.requestID, "an id of the request");
    }
  },
};

run("openai_node", url, (id) => {
  model = id;
  return tests;
});
