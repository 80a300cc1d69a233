// The chats and the settings, kept in localStorage. Owns their form; knows nothing of the screen.

const CHAT = "diptych.chat."; // and its id: an entry each, so that tabs write over no other's chats
const SETTINGS = "diptych.settings";
const MOST_CHATS = 100; // the oldest go

function parsed(text, otherwise) {
  try {
    return JSON.parse(text) ?? otherwise;
  } catch {
    return otherwise;
  }
}

function kept(name) {
  try {
    return localStorage.getItem(name);
  } catch {
    return null; // this browser keeps nothing
  }
}

/** False where the browser keeps no more. ``null`` is not kept. */
function keep(name, text) {
  try {
    if (text === null) localStorage.removeItem(name);
    else localStorage.setItem(name, text);
    return true;
  } catch {
    return false;
  }
}

function namesOfChats() {
  try {
    return Object.keys(localStorage).filter((name) => name.startsWith(CHAT));
  } catch {
    return [];
  }
}

const isTurn = (turn) =>
  (turn?.role === "user" || turn?.role === "assistant") && typeof turn.content === "string";

/** The chat of an entry; null where it is none. */
function chatOf(name, text) {
  const told = parsed(text, null);
  const isOne = Number.isFinite(told?.made) && Array.isArray(told.turns) && told.turns.every(isTurn);
  return isOne ? { id: name.slice(CHAT.length), made: told.made, turns: told.turns } : null;
}

/** Those that are kept, and an empty one, which is not before something is said in it. */
export class Chats {
  #chats; // {id, made, turns}, the newest first

  constructor() {
    this.#chats = namesOfChats().map((name) => chatOf(name, kept(name))).filter((chat) => chat);
    this.#sort();
    if (!this.#chats.length) this.add();
    this.open = this.#chats[0];
  }

  #sort() {
    this.#chats.sort((one, other) => other.made - one.made);
  }

  get all() {
    return this.#chats;
  }

  /** A new one, opened; an empty one that is there already will do. */
  add() {
    let empty = this.#chats.find((chat) => !chat.turns.length);
    if (!empty) {
      const id = crypto.getRandomValues(new Uint32Array(2)).join("-");
      empty = { id, made: Date.now(), turns: [] };
      this.#chats.unshift(empty);
      for (const old of this.#chats.splice(MOST_CHATS)) keep(CHAT + old.id, null);
    }
    this.open = empty;
    return empty;
  }

  choose(id) {
    this.open = this.#chats.find((chat) => chat.id === id) ?? this.open;
  }

  remove(id) {
    keep(CHAT + id, null);
    this.#forget(id);
  }

  #forget(id) {
    this.#chats = this.#chats.filter((chat) => chat.id !== id);
    if (this.open.id !== id) return;
    if (this.#chats.length) this.open = this.#chats[0];
    else this.add();
  }

  clear() {
    for (const name of namesOfChats()) keep(name, null);
    this.#chats = [];
    this.add();
  }

  /** False where the browser keeps no more: the chat stays for as long as the page is open. */
  save(chat) {
    if (!this.#chats.includes(chat)) return true; // it was deleted meanwhile
    return keep(CHAT + chat.id, JSON.stringify({ made: chat.made, turns: chat.turns }));
  }

  /**
   * Another tab wrote the entry ``name``, or deleted it (null); one whose answer comes here is not
   * written over. False: nothing here changed.
   */
  follow(name, text, answered = null) {
    if (!name?.startsWith(CHAT)) return false;
    const told = text === null ? null : chatOf(name, text);
    const known = this.#chats.find((chat) => chat.id === name.slice(CHAT.length));
    if (text === null ? !known : !told || known === answered) return false;
    if (known && told) known.turns = told.turns;
    else if (known) this.#forget(known.id);
    else this.#chats.push(told);
    this.#sort();
    return true;
  }
}

export const titleOf = (chat) =>
  chat.turns[0]?.content.trim().split("\n")[0].slice(0, 60) || "New chat";

export const settings = () => parsed(kept(SETTINGS), {});

export const keepSettings = (values) => keep(SETTINGS, JSON.stringify(values));

/**
 * What the model is sent. An answer that brought no text is left out with its question, as many
 * templates demand that the two alternate. The last question is the one that is to be answered.
 */
export function messages(turns) {
  const isAnswered = (at) => turns[at + 1]?.role === "assistant" && !!turns[at + 1].content;
  const said = turns
    .filter((turn, at) => (turn.role === "assistant" ? turn.content : isAnswered(at) || at === turns.length - 1))
    .map(({ role, content }) => ({ role, content }));
  const system = settings().system?.trim();
  return system ? [{ role: "system", content: system }, ...said] : said;
}

/** The members of a request that the settings ask for. */
export function options() {
  const asked = {};
  for (const name of ["temperature", "top_p", "max_tokens", "seed"]) {
    const value = settings()[name];
    if (value !== undefined && value !== "" && Number.isFinite(Number(value))) asked[name] = Number(value);
  }
  return asked;
}
