// Puts the page together: tabs, the list of chats, settings, and whether the router is well.

import { keepKey, key } from "./api.js";
import { Chats, keepSettings, settings, titleOf } from "./chats.js";
import { Conversation } from "./conversation.js";
import { byId, make } from "./dom.js";
import { Pools } from "./pools.js";
import { Served } from "./served.js";

const HEALTH_MS = 5000;
const VIEWS = ["chat", "pools"];

const chats = new Chats();
const served = new Served((model) => {
  byId("model").textContent = model.id;
  byId("model").title = `${model.max_model_len.toLocaleString()} tokens of context`;
});

function notice(error) {
  const shown = byId("notice");
  shown.hidden = !error;
  if (shown.textContent !== (error?.message ?? "")) shown.textContent = error?.message ?? "";
}

function failed(error) {
  if (error?.status === 401) {
    notice(new Error(key() ? "This router does not know the key." : "This router asks for a key."));
    openSettings();
    byId("key").focus();
  } else {
    notice(error);
  }
}

const conversation = new Conversation(chats, served, listChats, failed);
const pools = new Pools(notice);

function listChats() {
  const items = chats.all.map((chat) => {
    const title = titleOf(chat);
    const choose = () => {
      chats.choose(chat.id);
      showChats();
    };
    const remove = () => {
      if (conversation.running === chat) conversation.stop();
      chats.remove(chat.id);
      showChats();
    };
    const current = chat === chats.open ? "true" : null;
    return make(
      "li",
      {},
      make("button", { class: "chat-name", "aria-current": current, onclick: choose }, title),
      make("button", { class: "quiet remove", "aria-label": `Delete ${title}`, onclick: remove }, "×"),
    );
  });
  byId("chat-list").replaceChildren(...items);
}

function showChats() {
  listChats();
  conversation.show();
}

function show(name) {
  for (const each of VIEWS) {
    const tab = byId(`tab-${each}`);
    const isShown = each === name;
    tab.setAttribute("aria-selected", String(isShown));
    tab.tabIndex = isShown ? 0 : -1;
    byId(`view-${each}`).hidden = !isShown;
  }
  notice(null);
  pools.changed();
}

const viewOfUrl = () => (VIEWS.includes(location.hash.slice(1)) ? location.hash.slice(1) : VIEWS[0]);

function openSettings() {
  const form = byId("settings-form");
  for (const field of form.elements) if (field.name) field.value = settings()[field.name] ?? "";
  byId("key").value = key();
  if (!byId("settings").open) byId("settings").showModal();
}

function closeSettings() {
  const values = {};
  for (const field of byId("settings-form").elements)
    if (field.name && field.value !== "" && field.validity.valid) values[field.name] = field.value;
  keepSettings(values);
  if (byId("key").value.trim() !== key()) {
    keepKey(byId("key").value.trim());
    notice(null);
    served.name().catch(failed);
    pools.changed();
  }
}

async function watchHealth() {
  const shown = byId("health");
  let said = "unreachable";
  try {
    const response = await fetch("health", { cache: "no-store", credentials: "omit" });
    said = response.ok ? "ready" : "no workers";
  } catch {
    // it stays unreachable
  }
  if (shown.textContent !== said) {
    shown.textContent = said;
    shown.className = `health ${said === "ready" ? "well" : "unwell"}`;
  }
  setTimeout(watchHealth, HEALTH_MS);
}

for (const name of VIEWS) {
  byId(`tab-${name}`).addEventListener("click", () => (location.hash = name));
  byId(`tab-${name}`).addEventListener("keydown", (event) => {
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    const other = VIEWS[(VIEWS.indexOf(name) + 1) % VIEWS.length];
    location.hash = other;
    byId(`tab-${other}`).focus();
  });
}
addEventListener("hashchange", () => show(viewOfUrl()));
byId("open-settings").addEventListener("click", openSettings);
byId("settings").addEventListener("close", closeSettings);
byId("forget").addEventListener("click", () => {
  conversation.stop();
  chats.clear();
  byId("settings").close();
  showChats();
});
addEventListener("storage", ({ key: name, newValue: text }) => {
  const { open } = chats;
  const { turns } = open;
  if (!chats.follow(name, text, conversation.running)) return;
  if (!chats.all.includes(conversation.running)) conversation.stop();
  listChats();
  if (chats.open !== open || open.turns !== turns) conversation.show();
});
byId("new-chat").addEventListener("click", () => {
  chats.add();
  showChats();
  byId("said").focus();
});
showChats();
show(viewOfUrl());
watchHealth();
served.name().catch(failed);
