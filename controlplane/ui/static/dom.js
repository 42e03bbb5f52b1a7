// Elements from data. Text is always text: nothing here makes HTML of a string.

const SVG = "http://www.w3.org/2000/svg";

/** An HTML element: attributes, listeners under `on`, styles under `style`, then children. */
export function h(tag, props = {}, ...children) {
  return fill(document.createElement(tag), props, children);
}

/** An SVG element, in the same way. */
export function svg(tag, props = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), props, children);
}

/** Text as people may see it: control, bidirectional and invisible characters as escapes. */
export function visible(text) {
  return text.replaceAll(/[\p{C}\p{Zl}\p{Zp}]/gu, (character) => `\\u${character.codePointAt(0).toString(16).padStart(4, "0")}`);
}

const shown = (child) => (typeof child === "string" ? visible(child) : child);

function fill(element, props, children) {
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "on") for (const [type, act] of Object.entries(value)) element.addEventListener(type, act);
    else if (name === "style") for (const [key, to] of Object.entries(value)) element.style.setProperty(key, to);
    else element.setAttribute(name, value === true ? "" : visible(String(value)));
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== "").map(shown));
  return element;
}

export const byId = (id) => document.getElementById(id);

/** Replace the children of `parent` only when `key` differs from the last call's. */
export function replaceIf(parent, key, make) {
  if (parent.dataset.shown === key) return;
  parent.dataset.shown = key;
  parent.replaceChildren(...[make()].flat());
}

/** Rows of a table body or list that are made again only when their data differ. */
export class Rows {
  constructor(parent, nameOf, render) {
    this.parent = parent;
    this.nameOf = nameOf;
    this.render = render;
    this.known = new Map();
  }

  /** Show `rows`, in this order, between the elements `before` and `after` if there are any. */
  show(rows, before = [], after = []) {
    const known = new Map();
    for (const row of rows) {
      const name = this.nameOf(row);
      const old = this.known.get(name);
      known.set(name, old && old.row === row ? old : { row, element: this.#made(row, name) });
    }
    const wanted = [...before, ...[...known.values()].map((one) => one.element), ...after];
    const focused = this.#focus();
    this.known = known;
    let at = this.parent.firstChild;
    for (const element of wanted) {
      if (at === element) at = at.nextSibling;
      else this.parent.insertBefore(element, at);
    }
    while (at) {
      const next = at.nextSibling;
      at.remove();
      at = next;
    }
    if (focused && document.activeElement !== focused.element) {
      known.get(focused.name)?.element.querySelector("button, summary")?.focus({ preventScroll: true });
    }
  }

  #made(row, name) {
    const element = this.render(row);
    element.dataset.row = name;
    return element;
  }

  #focus() {
    const active = document.activeElement;
    if (!active || !this.parent.contains(active) || active === this.parent) return null;
    for (const [name, one] of this.known) if (one.element.contains(active)) return { name, element: active };
    return null;
  }
}
