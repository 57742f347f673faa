// Calls of the console's API with the operator's key, which this tab alone keeps.

import { Store } from "./store.js";

const BASE = new URL("../../", import.meta.url); // where /console/ is, also below a proxy's path
const KEY = "slipstream.key";
// These refusals are about the page's address; no key changes them.
const NOT_ABOUT_KEYS = new Set(["host_not_allowed", "origin_not_allowed"]);

/** `needed`: the refusal that a key may lift, or null. `round` grows with each answer of the user. */
export const access = new Store({ needed: null, round: 0 });

/** A refusal or a failure of the router, or a network that is unavailable (`status` 0). */
export class ApiError extends Error {
  constructor(message, { status = 0, code = "" } = {}) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/** The address of a path of the API. */
export const apiUrl = (path) => new URL(`api/${path}`, BASE);

/** Whether this tab has a key. */
export const hasKey = () => sessionStorage.getItem(KEY) !== null;

/** Keep a key in this tab; the calls that wait for one go on. */
export function rememberKey(key) {
  sessionStorage.setItem(KEY, key);
  access.set({ needed: null, round: access.state.round + 1 });
}

/** Give no key: the calls that wait for one fail. A key that was refused is forgotten. */
export function refuseKey() {
  sessionStorage.removeItem(KEY);
  access.set({ needed: null, round: access.state.round + 1 });
}

/** Resolve when the user gave a key or refused to. */
function answered(signal) {
  const { round } = access.state;
  return new Promise((resolve, reject) => {
    const stop = access.subscribe(() => {
      if (access.state.round === round) return;
      stop();
      resolve();
    });
    signal?.addEventListener("abort", () => {
      stop();
      reject(signal.reason);
    });
  });
}

/** A response with status 2xx. Raises ApiError; where the router wants a key, it asks the user and repeats. */
export async function call(path, { method = "GET", body, headers = {}, signal } = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const response = await send(path, { method, body, headers: withKey(headers, key, method), signal });
    if (response.ok) return response;
    const failure = await refusal(response);
    if (!isAboutKeys(failure)) throw failure;
    // Another call may have got a key meanwhile.
    if (sessionStorage.getItem(KEY) === key) {
      if (access.state.needed === null) access.set({ needed: failure });
      await answered(signal);
      if (!hasKey()) throw failure;
    }
  }
}

const isAboutKeys = ({ status, code }) => status === 401 || (status === 403 && !NOT_ABOUT_KEYS.has(code));

function withKey(headers, key, method) {
  const sent = { ...headers };
  if (key !== null) sent.Authorization = `Bearer ${key}`;
  if (method !== "GET") {
    sent["Content-Type"] = "application/json";
    sent["x-slipstream-console"] = "1";
  }
  return sent;
}

async function send(path, options) {
  try {
    return await fetch(apiUrl(path), { ...options, cache: "no-store", redirect: "error" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The router does not answer.");
  }
}

async function refusal(response) {
  const details = { status: response.status };
  try {
    const { error } = await response.json();
    return new ApiError(String(error.message), { ...details, code: String(error.code ?? "") });
  } catch {
    return new ApiError(`The router answered with status ${response.status}.`, details);
  }
}

/** The JSON of a GET. `query`: values that are null, undefined or "" are left out. */
export async function getJson(path, query = {}, signal) {
  const stated = Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const text = new URLSearchParams(stated).toString();
  return (await call(text ? `${path}?${text}` : path, { signal })).json();
}

/** The JSON of a POST. */
export async function postJson(path, body, signal) {
  return (await call(path, { method: "POST", body: JSON.stringify(body), signal })).json();
}
