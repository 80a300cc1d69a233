// The router's API: the key, errors as they are told, and streams of events.

const KEY = "diptych.key"; // of sessionStorage: it goes when the tab is closed

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const key = () => sessionStorage.getItem(KEY) ?? "";

/** What a header cannot carry is no part of a key. */
export function keepKey(typed) {
  const value = typed.replace(/[^\x21-\x7e]/g, "");
  if (value) sessionStorage.setItem(KEY, value);
  else sessionStorage.removeItem(KEY);
}

async function ask(path, options = {}) {
  const headers = { ...options.headers };
  if (key()) headers.authorization = `Bearer ${key()}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers, credentials: "omit", cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The router cannot be reached.");
  }
  if (!response.ok) {
    const told = await response.json().catch(() => null);
    throw new ApiError(response.status, told?.error?.message ?? `HTTP ${response.status}`);
  }
  return response;
}

export const getJson = async (path) => (await ask(path)).json();

/** The events of a streamed answer, as objects. Ends behind [DONE]; throws what the stream tells. */
export async function* stream(path, body, signal) {
  const response = await ask(path, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) throw new ApiError(0, "The answer broke off.");
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      for (const event of events) {
        if (!event.startsWith("data: ")) continue; // a comment, which only says that more will come
        const data = event.slice("data: ".length);
        if (data === "[DONE]") return;
        const told = JSON.parse(data);
        if (told.error) throw new ApiError(0, told.error.message);
        yield told;
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // whatever ended it, nobody waits for more
  }
}
