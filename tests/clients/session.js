/* Runs the tests of a client for Node.js, and prints the same lines as session.py. */

"use strict";

async function session(name, tests) {
  let [passed, failed] = [0, 0];
  for (const [title, test] of Object.entries(tests)) {
    try {
      await test();
      passed += 1;
      console.log(`ok ${title}`);
    } catch (error) {
      failed += 1;
      console.log(`FAILED ${title}: ${`${error.message}`.replace(/\s+/g, " ").slice(0, 600)}`);
    }
  }
  console.log(`${name}: ${passed} passed, ${failed} failed, 0 skipped`);
  process.exitCode = failed ? 1 : 0;
}

/* Calls `start` with the id of the server's model, and runs the tests that it returns. */
exports.run = (name, url, start) => {
  const ask = async () => (await (await fetch(`${url}/v1/models`)).json()).data[0].id;
  ask().then((model) => session(name, start(model))).catch((error) => {
    console.error(`${name}: ${error.message.split("\n")[0]}`);
    process.exitCode = 1;
  });
};
