// Formulas in Markdown: where one begins and ends, and its TeX as MathML nodes.
//
// `$...$` and `\(...\)` are formulas in a line, `$$...$$` and `\[...\]` are displayed ones. Whatever is no formula stays
// as it was written: a `$` is one only where no space, letter or digit makes it a price or a variable of a shell.

import { temml } from "./libraries.js";

const CLOSE = { "$": "$", "$$": "$$", "\\(": "\\)", "\\[": "\\]" };
const MATHML = "http://www.w3.org/1998/Math/MathML";
/** A longer formula is shown as its source: TeX macros and nested groups cost more than their length. */
const MAX_FORMULA = 4000;
/** Temml's unit is the point; a size beyond this is cut to it. */
const LIMITS = { maxExpand: 1000, maxSize: [20, 200] };

/** Teaches a markdown-it parser the formulas: tokens `math` with {content, markup, meta: {display, unfinished}}. */
export function addMath(markdown) {
  markdown.block.ruler.before("fence", "math", block, { alt: ["paragraph", "blockquote", "list"] });
  markdown.inline.ruler.before("escape", "math", inline);
}

/** A displayed formula that stands in lines of its own. While a text is being written, its end may be still to come. */
function block(state, start, end, silent) {
  const lineFrom = (line) => state.bMarks[line] + state.tShift[line];
  const from = lineFrom(start);
  const markup = state.src.slice(from, from + 2);
  if (markup !== "$$" && markup !== "\\[") return false;
  // A search that found no end would find none from the lines it passed either.
  const passed = (state.env.passed ??= {});
  const key = `${markup} ${state.blkIndent} ${state.level}`;
  if (start < passed[key]) return false;
  const pieces = [];
  let line = start;
  let closed = false;
  for (; line < end && !state.isEmpty(line) && (line === start || state.sCount[line] >= state.blkIndent); line += 1) {
    const piece = state.src.slice(line === start ? from + 2 : lineFrom(line), state.eMarks[line]);
    const at = findClose(piece, CLOSE[markup], 0, piece.length);
    pieces.push(at < 0 ? piece : piece.slice(0, at));
    if (at < 0) continue;
    if (piece.slice(at + 2).trim() === "") closed = true; // else more text follows in its line: the paragraph's affair
    break;
  }
  const unfinished = !closed && line >= state.lineMax && state.env.unfinished;
  const content = pieces.join("\n");
  if ((!closed && !unfinished) || (closed && !content.trim())) {
    passed[key] = Math.max(line, start + 1);
    return false;
  }
  if (silent) return true;
  state.line = closed ? line + 1 : line;
  const token = state.push("math", "math", 0);
  Object.assign(token, { content, markup, map: [start, state.line], block: true, meta: { display: true, unfinished } });
  return true;
}

function inline(state, silent) {
  const { src, pos, posMax } = state;
  const two = src.slice(pos, pos + 2);
  const markup = two in CLOSE ? two : src[pos] === "$" ? "$" : undefined;
  const from = pos + (markup?.length ?? 0);
  if (!markup || from >= posMax) return false;
  if (markup === "$" && (/\s/.test(src[from]) || /[\p{L}\p{N}$]/u.test(src[pos - 1] ?? ""))) return false;
  // A single `$` ends in its own line, and before any code. Where no end was found once, there is none further on.
  const passed = (state.passed ??= {});
  if (from < passed[markup]) return false;
  if (!(from <= state.stop)) state.stop = nextStop(src, from);
  const stop = markup === "$" ? Math.min(state.stop, posMax) : posMax;
  const end = findClose(src, CLOSE[markup], from, stop);
  if (end < 0) passed[markup] = stop;
  const content = end < 0 ? "" : src.slice(from, end);
  if (!content.trim()) return false;
  if (!silent) Object.assign(state.push("math", "math", 0), { content, markup, meta: { display: two in CLOSE && two !== "\\(" } });
  state.pos = end + CLOSE[markup].length;
  return true;
}

function nextStop(text, from) {
  const stop = /[`\n]/g;
  stop.lastIndex = from;
  return stop.exec(text)?.index ?? text.length;
}

/** The offset below `stop` at which a formula ends, or -1. A mark after a backslash is none. */
function findClose(text, mark, from, stop) {
  for (let at = text.indexOf(mark, from); at >= 0 && at < stop; at = text.indexOf(mark, at + 1)) {
    let backslashes = 0;
    while (at - backslashes > from && text[at - backslashes - 1] === "\\") backslashes += 1;
    if (backslashes % 2) continue;
    if (mark !== "$" || (at > from && !/\s/.test(text[at - 1]) && !/[\p{L}\p{N}$]/u.test(text[at + 1] ?? ""))) return at;
  }
  return -1;
}

/** The node of a `math` token, a `tag`: its source where it is no sound TeX, too long, or not finished, or nothing is `left` to be set. */
export function formula({ content, markup, meta: { display, unfinished } }, tag, left) {
  const node = document.createElement(tag);
  node.className = display ? "math display" : "math";
  try {
    if (unfinished || left <= 0 || content.length > MAX_FORMULA) throw new RangeError("shown as it is");
    node.append(nodeOf(temml.__renderToMathMLTree(content, { displayMode: display, throwOnError: true, ...LIMITS })));
  } catch {
    // Temml says what it does not understand by exceptions of several kinds.
    const source = document.createElement("code");
    source.textContent = markup + content + (unfinished ? "" : CLOSE[markup]);
    node.classList.add("source");
    node.replaceChildren(source);
  }
  if (display) node.tabIndex = 0; // it scrolls sideways, and a keyboard must reach that
  return node;
}

const ELEMENT = /^(math|semantics|none|m[a-z]+)$/;
/** No id, address, class list of TeX's choice or style text: the first could pass for a part of the page. */
const ATTRIBUTES = new Set([
  "accent", "columnalign", "depth", "display", "displaystyle", "fence", "form", "height", "largeop", "linebreak", "linethickness",
  "lspace", "mathbackground", "mathcolor", "mathsize", "mathvariant", "maxsize", "minsize", "movablelimits", "notation", "rowspacing",
  "rspace", "scriptlevel", "separator", "stretchy", "symmetric", "voffset", "width",
]);

/** Temml's own tree as nodes. Temml could make them itself, with ids and style attributes, of which the policy forbids the latter. */
function nodeOf(tree) {
  if (tree.text !== undefined) return document.createTextNode(tree.text);
  if (!tree.attributes) {
    const fragment = document.createDocumentFragment();
    fragment.append(...tree.children.map(nodeOf));
    return fragment;
  }
  const node = ELEMENT.test(tree.type) ? document.createElementNS(MATHML, tree.type) : document.createElement("span");
  for (const [name, value] of Object.entries(tree.attributes)) if (ATTRIBUTES.has(name)) node.setAttribute(name, value);
  const classes = (tree.classes ?? []).filter(Boolean).join(" ");
  if (classes) node.setAttribute("class", classes);
  for (const [name, value] of Object.entries(tree.style ?? {})) node.style[name] = value;
  node.append(...tree.children.map(nodeOf));
  return node;
}
