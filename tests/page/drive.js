/*
 * Shared code of browser tests: programs on free ports, Debian's Chromium, waits with limits, and counts.
 */

"use strict";

const { spawn } = require("node:child_process");
const fs = require("node:fs");
const net = require("node:net");
const path = require("node:path");
const { chromium } = require("playwright-core");

const ROOT = path.resolve(__dirname, "../..");
const BINARY = process.env.UNICORN_BINARY ?? path.join(process.env.CARGO_TARGET_DIR ?? path.join(ROOT, "target"), "debug/unicorn");
/** A trained model (tools/fetch_smollm2.sh). */
const SMOLLM2 = path.join(ROOT, ".cache/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf");
// Generous limits, because the first start on a machine compiles every shader. They detect hangs, and measure no speed.
const START_MS = 600_000;
const WAIT_MS = 30_000;
const END_MS = 30_000;

// Chromium must not check for updates or contact its vendor's hosts. It cannot use its sandbox as root.
const FLAGS = [
  "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update",
  "--disable-sync",
];

const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

function check(holds, what) {
  if (!holds) throw new Error(what);
}

function same(found, expected, what) {
  const [a, b] = [JSON.stringify(found), JSON.stringify(expected)];
  check(a === b, `${what}: expected ${b}, found ${a}`);
}

async function until(holds, what, ms = WAIT_MS) {
  for (const end = Date.now() + ms; Date.now() < end; await sleep(20)) if (await holds()) return;
  throw new Error(`did not happen in time: ${what}`);
}

/** A program that serves HTTP on a free port, logs to .cache/test/NAME.log, and answers 200 at /health when it is ready. */
class Server {
  /** `command` returns, for a port, what to run: the program, its arguments, and additional environment variables. */
  static async onFreePort(name, command) {
    const server = new Server();
    const probe = net.createServer().listen(0, "127.0.0.1");
    await new Promise((resolve) => probe.once("listening", resolve));
    server.port = probe.address().port;
    server.url = `http://127.0.0.1:${server.port}/`;
    await new Promise((resolve) => probe.close(resolve));
    server.log = path.join(ROOT, `.cache/test/${name}.log`);
    server.command = command;
    fs.mkdirSync(path.dirname(server.log), { recursive: true });
    fs.rmSync(server.log, { force: true });
    return server;
  }

  start() {
    const log = fs.openSync(this.log, "a");
    const [program, args, environment] = this.command(this.port);
    this.process = spawn(program, args, { stdio: ["ignore", log, log], env: { ...process.env, ...environment } });
    this.ended = new Promise((resolve) => {
      this.process.once("exit", resolve);
      this.process.once("error", (error) => { this.failure = error.message; resolve(); });
    });
    fs.closeSync(log);
  }

  get runs() {
    return this.process !== undefined && this.failure === undefined && this.process.exitCode === null && this.process.signalCode === null;
  }

  async ready() {
    for (const end = Date.now() + START_MS; Date.now() < end; await sleep(50)) {
      check(this.runs, `${this.command(this.port)[0]} ended (${this.failure ?? this.process.exitCode ?? this.process.signalCode}); see ${this.log}`);
      const response = await fetch(`${this.url}health`, { signal: AbortSignal.timeout(WAIT_MS) }).catch(() => null);
      if (response?.status === 200) return;
    }
    throw new Error(`the server was not ready in time; see ${this.log}`);
  }

  /** Stops the program, with SIGKILL if it takes too long. */
  async end(signal) {
    if (!this.runs) return;
    this.process.kill(signal);
    const timer = setTimeout(() => this.process.kill("SIGKILL"), END_MS);
    await this.ended;
    clearTimeout(timer);
  }
}

/** `unicorn serve` with the demo model, or with what `options` name. */
const unicorn = (name, ...options) => Server.onFreePort(name, (port) => [BINARY, ["serve", "--allow-software-vulkan", "--port", port, ...options], {}]);

/** An empty folder in target/ for pictures. */
function emptyFolder(name) {
  const folder = path.join(ROOT, "target", name);
  fs.rmSync(folder, { recursive: true, force: true });
  fs.mkdirSync(folder, { recursive: true });
  return folder;
}

/**
 * Starts `servers`, runs the `tests` that the command line names, or all of them, with a browser, and stops everything. Prints
 * one line per test and at the end `NAME: N passed, N failed`. `began` is called with the browser. Pages are closed after each
 * test, unless the tests run `together`. `look` is called after a failed test.
 */
async function run(name, servers, tests, { began, look = async () => {}, together = false }) {
  const wanted = process.argv.slice(2);
  let [browser, passed] = [undefined, 0];
  const failed = [];
  try {
    browser = await chromium.launch({ executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium", args: FLAGS });
    for (const server of servers) {
      server.start();
      await server.ready();
    }
    await began(browser);
    for (const [test, body] of Object.entries(tests)) {
      if (wanted.length && !wanted.some((part) => test.includes(part))) continue;
      const since = Date.now();
      try {
        await body();
        passed += 1;
        console.log(`ok ${test} (${((Date.now() - since) / 1000).toFixed(1)} s)`);
      } catch (error) {
        failed.push(test);
        console.log(`FAILED ${test}: ${error.message.split("\n")[0]}`);
        await look(test).catch((error) => console.log(`   and no picture: ${error.message.split("\n")[0]}`));
      }
      if (!together) for (const context of browser.contexts()) await context.close();
    }
  } finally {
    await browser?.close();
    for (const server of servers) await server.end("SIGTERM");
  }
  console.log(`${name}: ${passed} passed, ${failed.length} failed`);
  process.exitCode = failed.length ? 1 : 0;
}

/** An error that prevents all tests is reported in one line too. */
const fails = (name) => (error) => {
  console.error(`${name}: ${error.message.split("\n")[0]}`);
  process.exitCode = 1;
};

/** Removes the test `name` of the program `program` and says so, if the trained model is missing. */
function needsTrained(program, tests, name) {
  if (fs.existsSync(SMOLLM2)) return;
  delete tests[name];
  console.log(`SKIP smollm2: tests/${program} ${name}`);
}

module.exports = { ROOT, SMOLLM2, WAIT_MS, Server, check, emptyFolder, fails, needsTrained, run, same, sleep, unicorn, until };
