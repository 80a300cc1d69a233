// The live view: the pools as two panels, and KV moving between them. Asks only while it is seen.

import { getJson } from "./api.js";
import { byId, make, svg, time, unbroken } from "./dom.js";

const OWNERS = ["running", "reserved", "leased", "quarantined", "cached", "free"];
const NUM_CELLS = 96;
const INTERVAL_MS = 1000;
const MOST_WIRES = 200;
const MOST_DOTS = 6; // of one pair between two looks
const NO_WORKERS = {
  prefill: "No workers: decode computes prompts itself.",
  decode: "No workers: requests wait for one, or are refused.",
};

export class Pools {
  #view = byId("view-pools");
  #failed;
  #before = null; // {report, at}
  #timer = null;
  #round = 0; // counts times of being shown or hidden: an answer to an earlier one is dropped
  #cards = { prefill: new Map(), decode: new Map() }; // those shown, by address

  constructor(failed) {
    this.#failed = failed;
    document.addEventListener("visibilitychange", () => this.#follow());
    addEventListener("resize", () => this.#before && this.#wires(this.#before.report, new Map()));
  }

  /** It was shown or hidden. */
  changed() {
    this.#follow();
  }

  #follow() {
    clearTimeout(this.#timer);
    this.#round += 1;
    byId("wire-dots").replaceChildren(); // nothing moves, or ends, where nothing is seen
    if (this.#view.hidden || document.hidden) this.#before = null;
    else this.#look();
  }

  async #look() {
    const round = this.#round;
    try {
      const report = await getJson("v1/cluster");
      if (this.#round !== round) return;
      this.#draw({ report, at: performance.now() });
      this.#failed(null);
    } catch (error) {
      if (this.#round !== round) return;
      const hidden = error.status === 501;
      byId("diptych").classList.add("stale");
      this.#failed(hidden ? new Error("This router does not show its pools.") : error);
    }
    this.#timer = setTimeout(() => this.#look(), INTERVAL_MS);
  }

  #draw(now) {
    const { report } = now;
    byId("diptych").classList.remove("stale");
    byId("numbers").replaceChildren(...numbers(now, this.#before).flat());
    this.#pool("prefill", report.prefill, report.num_prefill);
    this.#pool("decode", report.decode, report.num_decode);
    const earlier = new Map((this.#before?.report.pairs ?? []).map((each) => [idOf(each), each.num_pulls]));
    const pulls = new Map(
      report.pairs.map((each) => [idOf(each), each.num_pulls - (earlier.get(idOf(each)) ?? each.num_pulls)]),
    );
    this.#wires(report, pulls);
    byId("pairs").replaceChildren(...report.pairs.map(pairRow));
    this.#before = now;
  }

  #pool(side, workers, total) {
    const list = byId(`${side}-workers`);
    const known = this.#cards[side];
    const shown = workers.map((worker) => [worker.address, known.get(worker.address) ?? new Card(side, worker.address)]);
    this.#cards[side] = new Map(shown);
    shown.forEach(([, card], at) => card.draw(workers[at]));
    const cards = shown.map(([, card]) => card.element);
    const more = total - workers.length;
    if (more) cards.push(make("li", { class: "hint" }, `and ${more} more`));
    if (!cards.length) cards.push(make("li", { class: "hint" }, NO_WORKERS[side]));
    const same = list.children.length === cards.length && cards.every((card, at) => list.children[at] === card);
    if (!same) list.replaceChildren(...cards);
  }

  /** A line for each pair, and dots along it for the pulls since the last look. Those that still run go on. */
  #wires(report, pulls) {
    const canvas = byId("wires");
    const frame = canvas.getBoundingClientRect();
    const lines = [];
    const dots = [];
    const ways = new Map();
    for (const pair of report.pairs.slice(0, MOST_WIRES)) {
      const from = this.#cards.prefill.get(pair.prefill)?.element;
      const to = this.#cards.decode.get(pair.decode)?.element;
      if (!from?.isConnected || !to?.isConnected) continue;
      const d = curve(from, to, frame);
      ways.set(idOf(pair), d);
      lines.push(svg("path", { d, class: `wire ${pair.state === "proven" ? "proven" : "broken"}` }));
      const count = Math.max(0, Math.min(MOST_DOTS, pulls.get(idOf(pair)) ?? 0)); // less: counted anew
      for (let each = 0; each < count; each += 1) dots.push(dot(pair, d, each));
      if (count) lines.at(-1).classList.add("moving");
    }
    byId("wire-lines").replaceChildren(...lines);
    for (const each of [...byId("wire-dots").children]) moveTo(each, ways.get(each.dataset.pair));
    if (matchMedia("(prefers-reduced-motion: reduce)").matches) return;
    byId("wire-dots").append(...dots);
    for (const each of dots) each.firstElementChild.beginElementAt(Number(each.dataset.delay));
  }
}

const idOf = (pair) => `${pair.prefill} ${pair.decode}`;

/** A worker's card. Its elements stay, so that a look changes what differs and nothing else. */
class Card {
  #cells = Array.from({ length: NUM_CELLS }, () => make("i", { class: "o-free" }));
  #state = make("span", { class: "state" });
  #facts = make("p", { class: "facts" });
  #counts = make("p", { class: "counts" });
  #grid = make("div", { class: "blocks", role: "img" }, ...this.#cells);

  constructor(side, address) {
    const head = make("div", { class: "card-head" }, make("h3", {}, address), this.#state);
    this.element = make("li", { class: `worker ${side}` }, head, this.#grid, this.#counts, this.#facts);
  }

  draw(worker) {
    const unused = worker.state === "ready" && !worker.is_used;
    this.#state.textContent = unused ? "ready, not used" : worker.state;
    this.#state.className = `state state-${unused ? "starting" : worker.state}`;
    this.#state.title = worker.message;
    const { blocks } = worker;
    const owners = OWNERS.filter((owner) => blocks[owner]);
    const counts = owners.map((owner) => `${blocks[owner].toLocaleString()} ${owner}`).join(", ");
    this.#grid.setAttribute("aria-label", `${blocks.total.toLocaleString()} KV blocks: ${counts || "none"}`);
    shares(blocks).forEach((owner, at) => (this.#cells[at].className = `o-${owner}`));
    const used = blocks.total - blocks.free - blocks.cached;
    this.#counts.textContent = `${used.toLocaleString()} of ${blocks.total.toLocaleString()} blocks used, ${blocks.cached.toLocaleString()} cached`;
    this.#facts.textContent = factsOf(worker);
  }
}

function factsOf(worker) {
  const places = worker.max_num_seqs ? ` of ${worker.max_num_seqs}` : "";
  const facts = [`${worker.num_running}${places} running`];
  if (worker.num_waiting) facts.push(`${worker.num_waiting} waiting`);
  if (worker.num_pending_prefill_tokens) facts.push(`${worker.num_pending_prefill_tokens.toLocaleString()} prompt tokens to go`);
  if (worker.decode_step_s) facts.push(`${time(worker.decode_step_s)} a step`);
  else if (worker.prefill_tokens_per_s) facts.push(`${Math.round(worker.prefill_tokens_per_s).toLocaleString()} tokens/s`);
  const message = worker.state === "ready" ? "" : worker.message;
  return [...facts.map(unbroken), ...(message ? [message] : [])].join(" · ");
}

/** The owner of each cell: as the blocks are shared, and who has any has a cell. */
function shares(blocks) {
  const cells = [];
  let left = blocks.total;
  for (const owner of OWNERS) {
    const room = NUM_CELLS - cells.length;
    const count = blocks[owner] && left ? Math.min(room, Math.max(1, Math.round((room * blocks[owner]) / left))) : 0;
    cells.push(...Array(count).fill(owner));
    left -= blocks[owner];
  }
  return [...cells, ...Array(NUM_CELLS - cells.length).fill("free")];
}

/** From card to card where the panels are side by side, else across the hinge between them. */
function curve(from, to, frame) {
  const [source, sink] = [from.getBoundingClientRect(), to.getBoundingClientRect()];
  if (sink.left >= source.right) {
    const [x1, x2] = [source.right - frame.left, sink.left - frame.left];
    const [y1, y2] = [source, sink].map((each) => each.top + each.height / 2 - frame.top);
    const middle = (x1 + x2) / 2;
    return `M${x1} ${y1} C${middle} ${y1} ${middle} ${y2} ${x2} ${y2}`;
  }
  const place = (card) => {
    const cards = card.parentElement.children;
    return (frame.width * ([...cards].indexOf(card) + 1)) / (cards.length + 1);
  };
  const [x1, x2, half] = [place(from), place(to), frame.height / 2];
  return `M${x1} 0 C${x1} ${half} ${x2} ${half} ${x2} ${frame.height}`;
}

const DOT_TIME = "1.1s";

function dot(pair, path, index) {
  const made = svg("rect", { x: -4, y: -4, width: 8, height: 8, rx: 1.5, class: "dot", visibility: "hidden" });
  made.dataset.pair = idOf(pair);
  made.dataset.delay = index * 0.14;
  const motion = { path, dur: DOT_TIME, begin: "indefinite", fill: "remove", calcMode: "spline", keyTimes: "0;1", keySplines: "0.4 0 0.2 1" };
  made.append(svg("animateMotion", motion));
  made.append(svg("set", { attributeName: "visibility", to: "visible", begin: "indefinite", dur: DOT_TIME }));
  made.firstElementChild.addEventListener("beginEvent", () => made.lastElementChild.beginElement());
  made.firstElementChild.addEventListener("endEvent", () => made.remove());
  return made;
}

/** Its pair's line may lie elsewhere now, or be gone. */
function moveTo(dot, path) {
  if (!path) dot.remove();
  else dot.firstElementChild.setAttribute("path", path);
}

function numbers(now, before) {
  const { report } = now;
  const latency = (told) => (told.num_samples ? `${time(told.p50_s)}` : "–");
  const late = (told) => (told.num_samples ? `95 of 100 within ${time(told.p95_s)}` : "nothing yet");
  let rate = "–";
  if (before) {
    const count = Math.max(0, report.num_output_tokens - before.report.num_output_tokens);
    rate = (count / ((now.at - before.at) / 1000)).toFixed(1);
  }
  return [
    tile("Waiting", String(report.num_waiting), "in this router's queue"),
    tile("On workers", String(report.num_placed), "requests of this router"),
    tile("Tokens/s", rate, "written to clients"),
    tile("First token", latency(report.ttft), late(report.ttft)),
    tile("Between tokens", latency(report.itl), late(report.itl)),
  ];
}

const tile = (name, value, note) =>
  make("div", {}, make("dt", {}, name), make("dd", { class: "value" }, value), make("dd", { class: "hint" }, note));

function pairRow(pair) {
  const cells = [
    make("td", {}, pair.prefill),
    make("td", {}, pair.decode),
    make("td", {}, make("span", { class: `state state-${pair.state}` }, pair.state)),
    make("td", {}, pair.transport),
    make("td", {}, pair.way),
    make("td", { class: "n" }, pair.bytes_per_s ? (pair.bytes_per_s / 1e9).toFixed(2) : ""),
    make("td", { class: "n" }, pair.num_pulls.toLocaleString()),
  ];
  return make("tr", {}, ...cells);
}
