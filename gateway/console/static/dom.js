// Elements are made here alone. Text becomes a text node, never markup: what tenants choose stays text.

const SVG = "http://www.w3.org/2000/svg";

// el("td", { class: "num", title: text }, "text", otherElement)
export function el(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

export function svg(name, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

function filled(element, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("$")) element.addEventListener(key.slice(1), value);
    else element.setAttribute(key, value === true ? "" : String(value));
  }
  for (const child of children.flat()) {
    if (child !== null && child !== undefined) element.append(child instanceof Node ? child : String(child));
  }
  return element;
}

// Text that fits on a line: nothing that could reorder what stands beside it.
export function shown(text, most = 300) {
  const clean = String(text ?? "").replace(/[\p{Cc}\p{Cf}\p{Zl}\p{Zp}]/gu, "\ufffd");
  return clean.length > most ? `${clean.slice(0, most)}...` : clean;
}

// Those that were asked and did not answer, as the end of a sentence; nothing where everybody has.
export function silent(answer) {
  const workers = (answer.silent_workers ?? []).map((one) => `worker ${one}`);
  const names = [...(answer.silent_gateways ?? []), ...workers];
  return names.length ? `; no answer from ${shown(names.join(", "))}` : "";
}

export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function say(text) {
  setText(document.getElementById("said"), text);
}
