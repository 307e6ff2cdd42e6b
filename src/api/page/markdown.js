// The Markdown that models write, as DOM nodes. Text becomes text nodes and nothing else: no markup is ever parsed, and
// no address is loaded. What is not understood stays as it was written.

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^\s`]*)/;
const HEADING = /^(#{1,6})\s+(.*?)\s*#*$/;
const RULE = /^ {0,3}([-*_])(\s*\1){2,}\s*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const QUOTE = /^ {0,3}>\s?/;
const TABLE_RULE = /^\s*\|?(\s*:?-+:?\s*\|)+\s*(:?-+:?)?\s*$/;
/** Deeper lists and quotes stay text. */
const MAX_DEPTH = 6;

/** Shows `text` in `parent`, and leaves what is there of it already: the beginning of an answer does not change. */
export function render(parent, text) {
  const blocks = split(text);
  blocks.forEach((lines, i) => {
    const source = lines.join("\n");
    const there = parent.children[i];
    if (there?.source === source) return;
    const node = block(lines, 0);
    node.source = source;
    if (there) there.replaceWith(node);
    else parent.append(node);
  });
  while (parent.children.length > blocks.length) parent.lastElementChild.remove();
}

/** Lines of each block: a fence, a list, a quote or a table to its end, or a paragraph. */
function split(text) {
  const blocks = [];
  let lines = [];
  let kind = "";
  let fence = "";
  const end = () => {
    while (lines.length && lines.at(-1).trim() === "") lines.pop();
    if (lines.length) blocks.push(lines);
    [lines, kind] = [[], ""];
  };
  for (const line of text.split(/\r?\n/)) {
    if (fence) {
      lines.push(line);
      if (line.trim().startsWith(fence) && line.trim().replaceAll(fence[0], "") === "") {
        fence = "";
        blocks.push(lines); // with the empty lines in it
        [lines, kind] = [[], ""];
      }
      continue;
    }
    const now = kindOf(line);
    const inList = kind === "list" && /^\s/.test(line);
    if (now === "fence" && !inList) {
      end();
      [lines, fence] = [[line], line.match(FENCE)[1]];
      continue;
    }
    // An empty line ends what is not a list; a list goes on behind it with items and what is indented.
    const emptyBefore = lines.length > 0 && lines.at(-1).trim() === "";
    const goesOn = kind === "list"
      ? now === "list" || now === "empty" || inList || (now === "text" && !emptyBefore)
      : now === kind;
    if (!goesOn) end();
    if (now === "empty" && kind !== "list") continue;
    if (lines.length === 0) kind = now;
    lines.push(line);
    if (now === "heading" || (now === "rule" && lines.length === 1)) end();
  }
  if (fence) blocks.push(lines);
  else end();
  return blocks;
}

function kindOf(line) {
  if (line.trim() === "") return "empty";
  if (FENCE.test(line)) return "fence";
  if (HEADING.test(line)) return "heading";
  if (RULE.test(line)) return "rule";
  if (ITEM.test(line)) return "list";
  if (QUOTE.test(line)) return "quote";
  return "text";
}

function block(lines, depth) {
  const kind = depth > MAX_DEPTH ? "text" : kindOf(lines[0]);
  if (kind === "fence") return code(lines);
  if (kind === "rule" && lines.length === 1) return element("hr");
  if (kind === "list") return list(lines, depth);
  if (kind === "heading") {
    const [, marks, title] = lines[0].match(HEADING);
    return element(`h${Math.min(6, marks.length + 2)}`, inline(title)); // below the page's own
  }
  if (kind === "quote") {
    const quote = element("blockquote");
    for (const inner of split(lines.map((line) => line.replace(QUOTE, "")).join("\n"))) quote.append(block(inner, depth + 1));
    return quote;
  }
  if (lines.length > 1 && lines[0].includes("|") && TABLE_RULE.test(lines[1])) return table(lines);
  return element("p", inline(lines.join("\n")));
}

function code(lines) {
  const [, fence, language] = lines[0].match(FENCE);
  const closed = lines.length > 1 && lines.at(-1).trim().startsWith(fence);
  const text = lines.slice(1, closed ? -1 : undefined).join("\n");
  const copy = element("button", "Copy");
  copy.type = "button";
  copy.dataset.copy = "code";
  const pre = element("pre", element("code", text));
  pre.tabIndex = 0; // it scrolls sideways, and a keyboard must reach that
  const box = element("div", element("div", element("span", language || "text"), copy), pre);
  box.className = "code";
  return box;
}

function list(lines, depth) {
  const [, margin, mark] = lines[0].match(ITEM);
  const node = element(/\d/.test(mark) ? "ol" : "ul");
  if (/\d/.test(mark)) node.start = parseInt(mark, 10);
  const items = [];
  for (const line of lines) {
    const found = line.match(ITEM);
    if (found && found[1].length <= margin.length + 1) items.push([found[3]]);
    else items.at(-1).push(line.replace(/^\s{1,4}/, ""));
  }
  for (const item of items) {
    const [first, ...rest] = split(item.join("\n")).map((inner) => block(inner, depth + 1));
    // A plain item's text stands without a paragraph around it.
    node.append(element("li", ...(first?.tagName === "P" ? first.childNodes : [first ?? ""]), ...rest));
  }
  return node;
}

function table(lines) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());
  const row = (line, tag) => element("tr", ...cells(line).map((cell) => element(tag, inline(cell))));
  const head = element("thead", row(lines[0], "th"));
  const body = element("tbody", ...lines.slice(2).map((line) => row(line, "td")));
  const box = element("div", element("table", head, body));
  box.className = "table";
  box.tabIndex = 0;
  return box;
}

/** Code before all else, then links, bold, italic. Each tries a place once, so that a model in a loop costs no minutes. */
const INLINE = /(?<!`)(`+)(?!`)([^]*?[^`])\1(?!`)|\[([^[\]\n]+)\]\((https?:\/\/[^\s)]+)\)|(\*\*|__)(?=\S)([^]+?)\5|(?<![\w*])\*(?=[^\s*])([^*\n]+?)\*(?!\w)|(?<!\w)_(?=\S)([^_\n]+?)_(?!\w)/g;

function inline(text) {
  const out = document.createDocumentFragment();
  let at = 0;
  for (const match of text.matchAll(INLINE)) {
    out.append(text.slice(at, match.index));
    const [whole, ticks, coded, label, address, , bold, italic, slanted] = match;
    if (ticks) out.append(element("code", coded));
    else if (address) out.append(link(label, address));
    else if (bold) out.append(element("strong", inline(bold)));
    else out.append(element("em", inline(italic ?? slanted)));
    at = match.index + whole.length;
  }
  out.append(text.slice(at));
  return out;
}

/** Where it leads is shown, since a model wrote it. */
function link(label, address) {
  const node = element("a", label);
  node.href = address;
  node.title = address;
  node.target = "_blank";
  node.rel = "noopener noreferrer";
  return node;
}

function element(tag, ...children) {
  const node = document.createElement(tag);
  node.append(...children);
  return node;
}
