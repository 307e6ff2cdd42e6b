// The Markdown that models write, as DOM nodes. markdown-it says what the text consists of, and this file makes the
// nodes: text becomes text nodes and nothing else, no markup is ever parsed, and no address is loaded. What is not
// understood stays as it was written.

import { MarkdownIt, lowlight } from "./libraries.js";
import { addMath, formula } from "./math.js";

/** Deeper lists and quotes stay text. */
const MAX_DEPTH = 24;
/** What a model wrote beyond this many characters stays text. */
const MAX_TEXT = 200_000;
/** Characters of one block of code that get colours, and of all code of an answer: a grammar may take a square of the length. */
const MAX_COLOURED = 10_000;
const MAX_COLOURED_IN_ALL = 60_000;
/** Formulas of an answer that are set. */
const MAX_FORMULAS = 1000;

const ADDRESS = /^(https?:\/\/|mailto:)\S+$/i;
const TASK = /^\[([ xX])\]\s/;
const LINE_BREAK = /^<br *\/?>/i;

const markdown = new MarkdownIt({ html: false, linkify: true });
markdown.validateLink = (address) => ADDRESS.test(address);
markdown.linkify.set({ fuzzyLink: false, fuzzyEmail: false, fuzzyIP: false });
// A line of dashes is a rule and makes no heading of what stands above it, where a list may be about to begin. A
// definition of a link's address stays to be seen, and so no block depends on another.
markdown.disable(["lheading", "reference", "html_block"]);
markdown.block.ruler.before("table", "deep", deep);
markdown.inline.ruler.before("autolink", "line_break", lineBreak);
markdown.inline.ruler.before("emphasis", "product", product);
addMath(markdown);

function deep(state, start, end, silent) {
  if (silent || state.level < MAX_DEPTH) return false;
  let line = start + 1;
  while (line < end && (state.isEmpty(line) || state.sCount[line] >= state.blkIndent)) line += 1;
  const token = state.push("plain", "p", 0);
  Object.assign(token, { content: state.getLines(start, line, state.blkIndent, false), map: [start, line] });
  state.line = line;
  return true;
}

/** The one piece of HTML that models write where Markdown has nothing else: in tables. */
function lineBreak(state, silent) {
  const found = state.src[state.pos] === "<" && state.src.slice(state.pos, state.pos + 12).match(LINE_BREAK);
  if (!found) return false;
  if (!silent) state.push("hardbreak", "br", 0);
  state.pos += found[0].length;
  return true;
}

/** A single star between letters or digits multiplies. */
function product(state, silent) {
  const { src, pos } = state;
  if (src[pos] !== "*" || !/^[a-z0-9]\*[a-z0-9]$/i.test(src.slice(Math.max(0, pos - 1), pos + 2))) return false;
  if (!silent) state.pending += "*";
  state.pos += 1;
  return true;
}

// --- what is shown already ------------------------------------------------------------------------------

/** What `render` showed in a node: {text, blocks: [{start, source, unfinished, spent, node}]}. */
const shown = new WeakMap();

/**
 * Shows `text` in `parent`. If it continues the text there, only its last block is read again: with text that is
 * added at the end, all before stays as it is. `unfinished` says that more is to come.
 */
export function render(parent, text, unfinished = false) {
  const now = text.slice(0, MAX_TEXT).replace(/\r\n?/g, "\n");
  const before = shown.get(parent) ?? { text: "", blocks: [] };
  const kept = now.startsWith(before.text) ? unchanged(before) : [];
  const rest = before.blocks.slice(kept.length);
  const start = rest.length && kept.length ? rest[0].start : 0;
  let spent = kept.at(-1)?.spent ?? { coloured: 0, formulas: 0 };
  const blocks = [...kept];
  for (const [i, block] of split(now, start, unfinished).entries()) {
    const old = rest[i];
    const same = old && old.source === block.source && !old.unfinished && !block.unfinished;
    if (same) block.node = old.node;
    else {
      spent = { ...spent };
      block.node = nodesOf(block.tokens, spent);
    }
    spent = block.spent = same ? old.spent : spent;
    delete block.tokens;
    blocks.push(block);
    const there = parent.children[blocks.length - 1];
    if (there === block.node) continue;
    if (there) there.replaceWith(block.node);
    else parent.append(block.node);
  }
  let count = blocks.length;
  if (text.length > MAX_TEXT) {
    const plain = element("p", text.slice(MAX_TEXT));
    const there = parent.children[count];
    if (there) there.replaceWith(plain);
    else parent.append(plain);
    count += 1;
  }
  while (parent.children.length > count) parent.lastElementChild.remove();
  shown.set(parent, { text: now, blocks });
}

/** `text` with an end of the block of code in which it stops, if it does: what is written after it is no part of that block. */
export function closed(text) {
  const tokens = [];
  markdown.block.parse(`${text.replace(/\r\n?/g, "\n")}\n\n---`, markdown, {}, tokens);
  const { type, level, markup } = tokens.at(-1);
  return type === "fence" && level === 0 ? `${text}\n${markup}` : text;
}

/**
 * The blocks that no further text can change: those before the last one that had begun before the last line did. A formula that is
 * unfinished may turn out to be the end of the paragraph above it.
 */
function unchanged({ text, blocks }) {
  const lastLine = text.lastIndexOf("\n") + 1;
  const last = blocks.findLastIndex((block) => block.start < lastLine && !block.unfinished);
  return blocks.slice(0, Math.max(0, last));
}

/** The blocks of `text` from `start` on, where one begins, with their tokens. */
function split(text, start, unfinished) {
  const tokens = markdown.parse(text.slice(start), { unfinished });
  const blocks = [];
  let line = 0;
  let at = start;
  for (const token of tokens) {
    if (token.level === 0 && token.nesting >= 0) {
      for (; line < token.map[0]; line += 1) at = text.indexOf("\n", at) + 1;
      blocks.push({ start: at, unfinished: false, tokens: [] });
    }
    const block = blocks.at(-1);
    block.tokens.push(token);
    block.unfinished ||= Boolean(token.meta?.unfinished);
  }
  blocks.forEach((block, i) => {
    block.source = text.slice(block.start, blocks[i + 1]?.start);
  });
  return blocks;
}

// --- tokens to nodes ------------------------------------------------------------------------------------

/** The node of one block, whose text has the direction of its script: an answer may have blocks of both. */
function nodesOf(tokens, spent) {
  const root = document.createDocumentFragment();
  const open = [root];
  for (const token of tokens) {
    if (token.nesting < 0) {
      if (!token.hidden) open.pop();
      continue;
    }
    const parent = open.at(-1);
    if (token.type === "inline") {
      if (parent.localName === "li" && !parent.hasChildNodes()) showTask(parent, token.children);
      if (parent.localName === "p" && parent.parentNode.localName === "li" && parent.parentNode.firstChild === parent) showTask(parent, token.children);
      inlineNodes(parent, token.children, spent);
      continue;
    }
    if (token.hidden) {
      // A plain item's text stands without a paragraph around it, on a line of its own.
      if (parent.lastChild?.nodeType === Node.TEXT_NODE) parent.append("\n");
      continue;
    }
    const node = blockNode(token, spent);
    parent.append(node);
    if (token.nesting > 0) open.push(node.localName === "div" ? node.firstElementChild : node);
  }
  root.firstElementChild.dir = "auto";
  return root.firstElementChild;
}

function blockNode(token, spent) {
  const { type, tag } = token;
  if (type === "fence" || type === "code_block") return code(token, spent);
  if (type === "math") return formula(token, "div", MAX_FORMULAS - spent.formulas++);
  if (type === "plain") return element("p", token.content);
  if (type === "heading_open") return element(`h${Math.min(6, Number(tag[1]) + 2)}`); // below the page's own
  if (type === "table_open") {
    const box = element("div", element("table"));
    box.className = "table";
    box.tabIndex = 0; // it scrolls sideways, and a keyboard must reach that
    return box;
  }
  const node = element(tag);
  if (type === "ordered_list_open") node.start = Number(token.attrGet("start") ?? 1);
  const align = token.attrGet("style")?.match(/^text-align:(left|center|right)$/);
  if (align) node.style.textAlign = align[1];
  return node;
}

/** A box in place of the `[ ]` or `[x]` that an item begins with. */
function showTask(parent, children) {
  const found = children[0]?.type === "text" && children[0].content.match(TASK);
  if (!found) return;
  children[0].content = children[0].content.slice(found[0].length);
  const box = element("input");
  Object.assign(box, { type: "checkbox", disabled: true, checked: found[1] !== " " });
  box.ariaLabel = box.checked ? "Done" : "Not done";
  parent.closest("li").classList.add("task");
  parent.append(box, " ");
}

function inlineNodes(parent, tokens, spent) {
  const open = [parent];
  for (const token of tokens) {
    const { type, content } = token;
    const parent = open.at(-1);
    if (type === "text") parent.append(content);
    else if (type === "softbreak") parent.append("\n");
    else if (type === "code_inline") parent.append(element("code", content));
    else if (type === "math") parent.append(formula(token, "span", MAX_FORMULAS - spent.formulas++));
    else if (type === "image") parent.append(link(content || token.attrGet("src"), token.attrGet("src")));
    else if (token.nesting < 0) open.pop();
    else {
      const node = type === "link_open" ? link("", token.attrGet("href")) : element(token.tag);
      parent.append(node);
      if (token.nesting > 0) open.push(node);
    }
  }
}

/** Where it leads is shown, since a model wrote it. An image is a link as well: nothing is loaded from elsewhere. */
function link(label, address) {
  const node = element("a", label);
  node.href = address;
  node.title = address;
  node.target = "_blank";
  node.rel = "noopener noreferrer";
  return node;
}

function code({ info, content }, spent) {
  const language = info.trim().split(/\s/)[0];
  const text = content.replace(/\n$/, "");
  const copy = element("button", "Copy");
  copy.type = "button";
  copy.dataset.copy = "code";
  const pre = element("pre", element("code", ...coloured(text, language.toLowerCase(), spent)));
  pre.tabIndex = 0; // it scrolls sideways, and a keyboard must reach that
  const box = element("div", element("div", element("span", language || "text"), copy), pre);
  box.className = "code";
  return box;
}

/** Code with the parts that its language's grammar knows as spans; code of another language, or a long one, as it is. */
function coloured(text, language, spent) {
  if (!lowlight.registered(language) || text.length > Math.min(MAX_COLOURED, MAX_COLOURED_IN_ALL - spent.coloured)) return [text];
  spent.coloured += text.length;
  const nodeOf = ({ value, properties, children }) => {
    if (value !== undefined) return value;
    const node = element("span", ...children.map(nodeOf));
    node.className = properties.className.join(" ");
    return node;
  };
  try {
    return lowlight.highlight(language, text).children.map(nodeOf);
  } catch {
    return [text]; // a grammar that fails, or that nests deeper than the stack
  }
}

function element(tag, ...children) {
  const node = document.createElement(tag);
  node.append(...children);
  return node;
}
