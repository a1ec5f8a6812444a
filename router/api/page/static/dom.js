// Elements made of text alone: nothing that a model or a client wrote ever becomes markup.

export const $ = (id) => document.getElementById(id);

export function element(tag, { text, className, attributes = {}, children = [] } = {}) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/** Keeps what screen readers and selections hold on to when nothing has changed. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** One child of `parent` per item, made once per key and kept in the items' order. */
export function reconcile(parent, items, { key, make, update }) {
  const old = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  items.forEach((item, i) => {
    const id = String(key(item));
    let child = old.get(id);
    if (child) old.delete(id);
    else {
      child = make(item);
      child.dataset.key = id;
    }
    update(child, item);
    if (parent.children[i] !== child) parent.insertBefore(child, parent.children[i] ?? null);
  });
  for (const child of old.values()) child.remove();
}

const whole = new Intl.NumberFormat("en");
export const count = (n) => whole.format(Math.round(n));

const short = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });
export const compact = (n) => (n < 1e6 ? count(n) : short.format(n));

export function rate(n) {
  return n >= 100 || n === 0 ? count(n) : n.toFixed(1);
}

export function percent(part, all) {
  return all > 0 ? `${Math.round((100 * part) / all)}%` : "–";
}

export function seconds(s) {
  if (s < 1) return `${Math.round(s * 1000)} ms`;
  return s < 100 ? `${s.toFixed(s < 10 ? 2 : 1)} s` : `${Math.round(s)} s`;
}
