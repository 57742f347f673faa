// The address of a view in the page's fragment: #/requests/ID/SEQ.

import { Store } from "./store.js";

export const VIEWS = [
  { name: "fleet", title: "Fleet", key: "f" },
  { name: "requests", title: "Requests", key: "r" },
  { name: "why", title: "Why here", key: "w" },
  { name: "cache", title: "Cache", key: "c" },
  { name: "jobs", title: "Jobs", key: "j" },
  { name: "playground", title: "Playground", key: "p" },
];

/** `{ view, id, seq }` of a fragment; an unknown view is the fleet. `seq` distinguishes requests with one id. */
export function parseRoute(fragment) {
  const [, view = "", id = "", seq = ""] = fragment.replace(/^#/, "").split("/");
  const known = VIEWS.some((one) => one.name === view);
  if (!known) return { view: VIEWS[0].name, id: "", seq: null };
  return { view, id: decode(id), seq: /^\d{1,15}$/.test(seq) ? Number(seq) : null };
}

function decode(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return "";
  }
}

/** The fragment of a view. */
export const link = (view, id = "", seq = null) => `#/${view}${id ? `/${encodeURIComponent(id)}${seq === null ? "" : `/${seq}`}` : ""}`;

export const route = new Store(parseRoute(location.hash));

/** Open a view. `replace`: without an entry in the browser's history. */
export function open(view, id = "", { seq = null, replace = false } = {}) {
  if (!replace) location.hash = link(view, id, seq);
  else {
    history.replaceState(null, "", link(view, id, seq));
    route.set(parseRoute(location.hash));
  }
}

window.addEventListener("hashchange", () => {
  // The skip link's fragment is an element of the page and no view.
  if (location.hash.startsWith("#/") || location.hash === "") route.set(parseRoute(location.hash));
});
