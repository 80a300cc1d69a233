// A model's text as elements: paragraphs, headings, lists, code, emphasis. What is none of these
// is shown as it is; links are not made, so that no answer leads anywhere.

import { make } from "./dom.js";

const INLINE = /(`[^`\n]+`)|(\*\*[^*\n]+\*\*)|(\*[^*\s][^*\n]*\*)/;

function inline(text) {
  const parts = [];
  let rest = text;
  for (let found; (found = INLINE.exec(rest)); rest = rest.slice(found.index + found[0].length)) {
    if (found.index) parts.push(rest.slice(0, found.index));
    if (found[1]) parts.push(make("code", {}, found[1].slice(1, -1)));
    else if (found[2]) parts.push(make("strong", {}, found[2].slice(2, -2)));
    else parts.push(make("em", {}, found[3].slice(1, -1)));
  }
  return [...parts, rest];
}

function lined(lines) {
  return lines.flatMap((line, index) => (index ? [make("br"), ...inline(line)] : inline(line)));
}

const LINE_END = /\r\n|[\r\n\u2028\u2029]/; // all that "." does not match: so "$" is where a line ends
const ITEM = /^\s*(?:[-*+]|(\d{1,9})[.)])\s+(\S.*)?$/;
const HEADING = /^#{1,6}\s+(\S.*)?$/;
const FENCE = /^\s*(`{3,}|~{3,})\s*([\w+#.-]*)/;

function codeBlock(lines, language) {
  const copy = make("button", { type: "button", class: "quiet copy" }, "Copy");
  const text = lines.join("\n");
  copy.addEventListener("click", async () => {
    await navigator.clipboard?.writeText(text);
    copy.textContent = "Copied";
  });
  const head = make("div", { class: "code-head" }, make("span", {}, language || "code"), copy);
  return make("div", { class: "code" }, head, make("pre", { tabindex: "0" }, make("code", {}, text)));
}

/** The elements of ``text``. */
export function elements(text) {
  const made = [];
  const lines = text.split(LINE_END);
  let at = 0;
  const while_ = (fits) => {
    const start = at;
    while (at < lines.length && fits(lines[at])) at += 1;
    return lines.slice(start, at);
  };
  while (at < lines.length) {
    const line = lines[at];
    const fence = FENCE.exec(line);
    const item = ITEM.exec(line);
    if (!line.trim()) {
      at += 1;
    } else if (fence) {
      at += 1;
      const code = while_((each) => !each.trim().startsWith(fence[1]));
      at += 1; // its end, or that of the text
      made.push(codeBlock(code, fence[2]));
    } else if (HEADING.test(line)) {
      made.push(make("h3", {}, ...inline(HEADING.exec(line)[1] ?? "")));
      at += 1;
    } else if (item) {
      const items = while_((each) => ITEM.test(each) && !!ITEM.exec(each)[1] === !!item[1]);
      const list = items.map((each) => make("li", {}, ...inline(ITEM.exec(each)[2] ?? "")));
      made.push(item[1] ? make("ol", { start: item[1] }, ...list) : make("ul", {}, ...list));
    } else {
      const plain = while_((each) => each.trim() && !FENCE.test(each) && !HEADING.test(each) && !ITEM.test(each));
      made.push(make("p", {}, ...lined(plain)));
    }
  }
  return made;
}
