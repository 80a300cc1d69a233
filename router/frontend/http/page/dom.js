// Making elements. Text becomes text: nothing here, or anywhere in this page, parses HTML.

export const byId = (id) => document.getElementById(id);

/** An element with attributes, and children that are elements or text. */
export function make(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "class") made.className = value;
    else if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value === true) made.setAttribute(key, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(key, value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

export function svg(name, attributes = {}) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

/** The same on one line, wherever it stands. */
export const unbroken = (text) => text.replaceAll(" ", "\u00a0");

export function time(seconds) {
  if (seconds >= 1) return unbroken(`${seconds.toFixed(2)} s`);
  const ms = seconds * 1e3;
  return unbroken(`${ms >= 100 ? ms.toFixed(0) : ms.toFixed(1)} ms`);
}

export function size(bytes) {
  if (bytes >= 1e9) return unbroken(`${(bytes / 1e9).toFixed(2)} GB`);
  if (bytes >= 1e6) return unbroken(`${(bytes / 1e6).toFixed(2)} MB`);
  return unbroken(`${(bytes / 1e3).toFixed(1)} kB`);
}
