#!/usr/bin/env node
/*
 * Writes src/api/page/libraries: the libraries of the page as one script, the style of the mathematics, and the licences.
 *
 *   build.js          writes the three files
 *   build.js --check  fails where a file is not what this would write
 *
 * `make page-libraries` and tools/test.py run it with NODE_PATH at the packages of package-lock.json. The files are
 * committed, so that nothing but this needs Node.js.
 */

"use strict";

const fs = require("node:fs");
const path = require("node:path");
const esbuild = require("esbuild");

const FOLDER = path.resolve(__dirname, "../../src/api/page/libraries");
const MODULES = process.env.NODE_PATH;
const MINIFY = { minify: true, legalComments: "none", charset: "utf8" };

/** The script, and the names of the packages that are in it. */
async function script() {
  const { outputFiles, metafile } = await esbuild.build({
    entryPoints: [path.join(__dirname, "entry.js")], nodePaths: [MODULES], bundle: true, format: "esm", target: "es2022",
    write: false, metafile: true, ...MINIFY,
  });
  const inputs = Object.values(metafile.outputs)[0].inputs;
  const found = Object.keys(inputs).filter((file) => inputs[file].bytesInOutput > 0).map((file) => file.match(/.*node_modules\/((?:@[^/]+\/)?[^/]+)/)?.[1]);
  const packages = [...new Set(found.filter(Boolean))].sort();
  return { code: outputFiles[0].text, packages };
}

/** Temml's style without what the page's policy forbids to load: a font of script letters, and the arrow of \cancelto. */
async function style() {
  const source = fs.readFileSync(path.join(MODULES, "temml/dist/Temml-Local.css"), "utf8");
  const own = source
    .replace(/@font-face \{[^}]*\}/, "")
    .replace(/\.tml-cancelto \{[^}]*\}/, "")
    .replace(/font-family: "?Temml"?;/g, "");
  const { code } = await esbuild.transform(own, { loader: "css", ...MINIFY });
  if (/url\(|Temml|cancelto/.test(code)) throw new Error("Temml-Local.css is not as expected: it still names a font or an image");
  return code;
}

const described = (name) => JSON.parse(fs.readFileSync(path.join(MODULES, name, "package.json"), "utf8"));

function licences(packages) {
  const texts = packages.map((name) => {
    const file = fs.readdirSync(path.join(MODULES, name)).find((file) => /^licen[cs]e/i.test(file));
    if (!file) throw new Error(`${name} has no file with its licence`);
    const text = fs.readFileSync(path.join(MODULES, name, file), "utf8").replace(/\r\n/g, "\n").trim();
    const { version, license } = described(name);
    return `${"=".repeat(80)}\n${name} ${version} (${license})\n${"=".repeat(80)}\n\n${text}\n`;
  });
  return `The page at / contains these libraries, in /page/libraries.js and /page/libraries.css.\n\n${texts.join("\n")}`;
}

async function main() {
  const { code, packages } = await script();
  const names = packages.map((name) => `${name} ${described(name).version}`).join(", ");
  const note = `/* ${names}: built by tools/page_libraries/build.js. Their licences are in licences.txt. */\n`;
  const files = { "libraries.js": note + code, "libraries.css": note + (await style()), "licences.txt": licences(packages) };
  const check = process.argv.includes("--check");
  let same = true;
  for (const [name, text] of Object.entries(files)) {
    const file = path.join(FOLDER, name);
    if (!check) fs.writeFileSync(file, text);
    else if (!fs.existsSync(file) || fs.readFileSync(file, "utf8") !== text) {
      console.error(`src/api/page/libraries/${name} is not what tools/page_libraries/build.js writes: run \`make page-libraries\``);
      same = false;
    } else continue;
    if (!check) console.log(`${name}: ${Buffer.byteLength(text)} bytes`);
  }
  process.exitCode = same ? 0 : 1;
}

main().catch((error) => {
  console.error(`page libraries: ${error.message.split("\n")[0]}`);
  process.exitCode = 1;
});
