// The open chat: shows its turns, asks for answers, and lets one stop, regenerate and edit.

import { stream } from "./api.js";
import { messages, options } from "./chats.js";
import { byId, make } from "./dom.js";
import { elements } from "./markdown.js";
import { summary, waterfall } from "./waterfall.js";

export class Conversation {
  #chats;
  #served; // its model's name is asked for when it is needed: it may be known later, and change
  #changed; // told when the list of chats has to be shown anew
  #failed; // told of a failure that is not the answer's alone
  #running = null; // {chat, turn, abort} of the answer that comes
  #drawing = false; // a frame is asked for

  constructor(chats, served, changed, failed) {
    this.#chats = chats;
    this.#served = served;
    this.#changed = changed;
    this.#failed = failed;
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    byId("stop").addEventListener("click", () => this.stop());
    byId("said").addEventListener("input", fit);
    byId("said").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.#send();
      }
    });
    addEventListener("keydown", (event) => {
      if (event.key === "Escape" && !document.querySelector("dialog[open]")) this.stop();
    });
  }

  /** The chat whose answer comes now; null: none does. */
  get running() {
    return this.#running?.chat ?? null;
  }

  stop() {
    this.#running?.abort.abort();
  }

  show() {
    const { turns } = this.#chats.open;
    byId("turns").replaceChildren(...(turns.length ? turns.map((turn, at) => this.#turn(turn, at)) : [welcome()]));
    this.#showRunning();
    toEnd();
  }

  #showRunning() {
    byId("stop").hidden = !this.#running;
    byId("send").hidden = !!this.#running;
  }

  #send() {
    const field = byId("said");
    const content = field.value.trim();
    if (!content || this.#running) return;
    field.value = "";
    fit.call(field);
    this.#chats.open.turns.push({ role: "user", content });
    this.#answer();
  }

  #regenerate(at) {
    if (this.#running) return;
    this.#chats.open.turns.length = at;
    this.#answer();
  }

  #edit(at, turn, shown) {
    const field = make("textarea", { class: "edited", rows: "3", "aria-label": "Your message" });
    field.value = turn.content;
    const form = make(
      "form",
      { class: "edit" },
      field,
      make(
        "div",
        { class: "row end" },
        make("button", { type: "button", class: "quiet", onclick: () => this.show() }, "Cancel"),
        make("button", { type: "submit", class: "primary" }, "Send again"),
      ),
    );
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const content = field.value.trim();
      if (!content || this.#running) return;
      const { turns } = this.#chats.open;
      turns.length = at;
      turns.push({ role: "user", content });
      this.#answer();
    });
    shown.replaceChildren(form);
    field.focus();
  }

  async #answer() {
    const chat = this.#chats.open;
    const asked = messages(chat.turns);
    const turn = { role: "assistant", content: "" };
    const abort = new AbortController();
    chat.turns.push(turn);
    this.#running = { chat, turn, abort };
    this.#chats.save(chat); // what was asked outlives a page that is closed meanwhile
    this.#changed();
    this.show();
    try {
      const body = {
        messages: asked,
        ...options(),
        stream: true,
        stream_options: { include_usage: true },
        return_timing: true,
      };
      const ask = (model) => stream("v1/chat/completions", { model, ...body }, abort.signal);
      for await (const event of this.#served.events(ask)) {
        const delta = event.choices[0]?.delta;
        turn.content += delta?.content ?? "";
        if (delta?.reasoning_content) turn.reasoning = (turn.reasoning ?? "") + delta.reasoning_content;
        if (event.choices[0]?.finish_reason) turn.ended = event.choices[0].finish_reason;
        if (event.timing) turn.timing = event.timing;
        if (event.usage) turn.usage = event.usage;
        this.#drawSoon();
      }
    } catch (error) {
      if (error.name === "AbortError") turn.stopped = true;
      else turn.error = error.message;
      if (error.status === 401) this.#failed(error);
    }
    this.#running = null;
    if (!this.#chats.save(chat)) this.#failed(new Error("This browser keeps no more chats."));
    if (this.#chats.open === chat) {
      this.show();
      byId("spoken").textContent = turn.error ? `Failed: ${turn.error}` : turn.content.slice(0, 2000);
      byId("said").focus({ preventScroll: true });
    }
    this.#changed();
  }

  /** Shows what came of the running answer, once a frame at the most. */
  #drawSoon() {
    if (this.#drawing) return;
    this.#drawing = true;
    requestAnimationFrame(() => {
      this.#drawing = false;
      if (!this.#running || this.#chats.open !== this.#running.chat) return;
      const stays = isAtEnd();
      drawAnswer(byId("turns").lastElementChild, this.#running.turn, true);
      if (stays) toEnd();
    });
  }

  #turn(turn, at) {
    const runs = this.#running?.turn === turn;
    const shown = make("article", { class: `turn ${turn.role}`, "aria-busy": runs ? "true" : null });
    const who = turn.role === "user" ? "You" : "Answer";
    shown.append(make("h2", { class: "who" }, who));
    if (turn.role === "user") {
      shown.append(make("div", { class: "text" }, make("p", { class: "plain" }, turn.content)));
    } else {
      shown.append(reasoning(), make("div", { class: "text" }));
      drawAnswer(shown, turn, runs);
    }
    if (turn.error) shown.append(make("p", { class: "failed", role: "alert" }, turn.error));
    if (turn.stopped) shown.append(make("p", { class: "hint" }, "Stopped."));
    if (turn.ended === "length") shown.append(make("p", { class: "hint" }, "Cut off: the most tokens were reached."));
    if (!runs) shown.append(this.#tools(turn, at, shown));
    return shown;
  }

  #tools(turn, at, shown) {
    const tools = make("div", { class: "tools" });
    const button = (label, act) =>
      tools.append(make("button", { type: "button", class: "quiet", onclick: act }, label));
    if (turn.role === "user") {
      button("Edit", () => this.#running || this.#edit(at, turn, shown));
      return tools;
    }
    button("Regenerate", () => this.#regenerate(at));
    button("Copy", () => navigator.clipboard?.writeText(turn.content));
    if (turn.timing) {
      const details = make("details", { class: "timing" }, make("summary", {}, summary(turn.timing, turn.usage)));
      details.append(waterfall(turn.timing, turn.usage));
      tools.append(details);
    }
    return tools;
  }
}

/** For what the model tells itself before its answer: open until that begins. */
function reasoning() {
  return make("details", { class: "reasoning", open: true }, make("summary", {}, "Reasoning"), make("p", { class: "plain" }));
}

/** Fills in what came. The parts stay, so that they can be used while more comes. */
function drawAnswer(shown, turn, runs) {
  const details = shown.querySelector(".reasoning");
  const said = details.querySelector("p");
  details.hidden = !turn.reasoning?.trim();
  if (said.textContent !== (turn.reasoning ?? "")) said.textContent = turn.reasoning;
  const text = shown.querySelector(".text");
  if (!text.textContent && turn.content.trim()) details.open = false; // here it begins
  text.replaceChildren(...elements(turn.content));
  if (runs) text.append(make("span", { class: "caret", "aria-hidden": "true" }));
}

function welcome() {
  return make(
    "div",
    { class: "welcome" },
    make("h2", {}, "Two panels, one answer"),
    make(
      "p",
      {},
      "Your prompt is read by a prefill worker, its KV cache moves to a decode worker, and that one writes. " +
        "Under each answer you find where its time went; Pools shows the workers at work.",
    ),
  );
}

/** The field is as high as its text, within a bound. */
function fit() {
  const field = this ?? byId("said");
  field.style.height = "auto";
  field.style.height = `${Math.min(field.scrollHeight + 2, 200)}px`;
}

function isAtEnd() {
  const { scrollHeight, scrollTop, clientHeight } = byId("turns");
  return scrollHeight - scrollTop - clientHeight < 60;
}

function toEnd() {
  byId("turns").scrollTop = byId("turns").scrollHeight;
}
