// The chats and the settings, kept in localStorage. Owns their form; knows nothing of the screen.

const CHATS = "diptych.chats";
const SETTINGS = "diptych.settings";
const MOST_CHATS = 100; // the oldest go

function read(name, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(name)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

const isTurn = (turn) =>
  (turn?.role === "user" || turn?.role === "assistant") && typeof turn.content === "string";
const isChat = (chat) =>
  typeof chat?.id === "string" && Array.isArray(chat.turns) && chat.turns.every(isTurn);

export class Chats {
  #chats;

  constructor() {
    const kept = read(CHATS, []);
    this.#chats = Array.isArray(kept) ? kept.filter(isChat) : [];
    if (!this.#chats.length) this.add();
    this.open = this.#chats[0];
  }

  get all() {
    return this.#chats;
  }

  /** A new one, opened; an empty one that is there already will do. */
  add() {
    let empty = this.#chats.find((chat) => !chat.turns.length);
    if (!empty) {
      empty = { id: crypto.getRandomValues(new Uint32Array(2)).join("-"), turns: [] };
      this.#chats = [empty, ...this.#chats].slice(0, MOST_CHATS);
    }
    this.open = empty;
    return empty;
  }

  choose(id) {
    this.open = this.#chats.find((chat) => chat.id === id) ?? this.open;
  }

  remove(id) {
    this.#chats = this.#chats.filter((chat) => chat.id !== id);
    if (this.open.id === id) {
      if (this.#chats.length) this.open = this.#chats[0];
      else this.add();
    }
    this.save();
  }

  clear() {
    this.#chats = [];
    this.add();
    this.save();
  }

  /** False where the browser keeps no more: the chats stay for as long as the page is open. */
  save() {
    try {
      localStorage.setItem(CHATS, JSON.stringify(this.#chats));
      return true;
    } catch {
      return false;
    }
  }
}

export const titleOf = (chat) =>
  chat.turns[0]?.content.trim().split("\n")[0].slice(0, 60) || "New chat";

export const settings = () => read(SETTINGS, {});

export function keepSettings(values) {
  try {
    localStorage.setItem(SETTINGS, JSON.stringify(values));
  } catch {
    // they stay as they were
  }
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
