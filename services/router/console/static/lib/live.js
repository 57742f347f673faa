// What the router pushes: the fleet, the rates and the requests, and how well the connection does.

import { access, call, getJson } from "./api.js";
import { takeJobs } from "./jobs.js";
import { backoff_ms, readEvents } from "./server_events.js";
import { Store } from "./store.js";

export const KEPT_REQUESTS = 2000;
const PAGE_REQUESTS = 500;
const KEPT_RATES = 300; // seconds
const SILENCE_MS = 10_000; // the fleet comes each second
const PUBLISH_MS = 200; // lists of requests come up to 20 times a second

/** `state`: connecting, live, waiting (for the next attempt) or locked (until the user gives a key). */
export const connection = new Store({ state: "connecting", error: null, retry_at_ms: null, since_ms: null });
export const fleet = new Store({ page: null, received_ms: null, skew_ms: 0 });
export const rates = new Store({ points: [] });
export const requests = new Store({ rows: [], total: 0, dropped: 0, loaded: false, error: null });

/** The router's clock, by which its times are shown. */
export const serverNow = () => Date.now() + fleet.state.skew_ms;

/** Take a page of the fleet: one that was pushed, or one that an action loads at once. */
export function takeFleet(page) {
  fleet.set({ page, received_ms: Date.now(), skew_ms: page.time_ms - Date.now() });
}

/** Load the fleet now, for example after a drain. */
export const reloadFleet = async () => takeFleet(await getJson("fleet"));

/** The newest rows of both lists by descending seq; of two with the same seq the later list's. */
export function mergeRequests(rows, changed, kept = KEPT_REQUESTS) {
  if (!changed.length) return rows;
  const bySeq = new Map(rows.map((row) => [row.seq, row]));
  for (const row of changed) bySeq.set(row.seq, row);
  return [...bySeq.values()].sort((a, b) => b.seq - a.seq).slice(0, kept);
}

let waiting = [];
let publishing = null;

function takeRequests(list) {
  waiting.push(...list);
  publishing ??= setTimeout(publishRequests, PUBLISH_MS);
}

function publishRequests() {
  publishing = null;
  const changed = waiting;
  waiting = [];
  const newest = requests.state.rows[0]?.seq ?? -1;
  const added = new Set(changed.map((row) => row.seq).filter((seq) => seq > newest)).size;
  requests.set({ rows: mergeRequests(requests.state.rows, changed), total: requests.state.total + added });
}

/** Load the kept requests page by page: what happened while the connection was unavailable is among them. */
export async function reloadRequests(signal) {
  try {
    let rows = [];
    let before = null;
    for (let page = 0; page < KEPT_REQUESTS / PAGE_REQUESTS; page++) {
      const answer = await getJson("requests", { limit: PAGE_REQUESTS, before }, signal);
      rows = rows.concat(answer.requests);
      requests.set({ total: answer.total, dropped: answer.dropped });
      before = answer.next_before;
      if (before === null || before === undefined) break;
    }
    // A restarted router counts from the start: its rows replace all, but those pushed meanwhile.
    requests.set({ rows: mergeRequests(rows, waiting), loaded: true, error: null });
  } catch (error) {
    if (error.name !== "AbortError") requests.set({ error });
  }
}

function takeRates(point) {
  const recent = rates.state.points.filter((old) => old.time_ms < point.time_ms);
  rates.set({ points: [...recent, point].slice(-KEPT_RATES) });
}

function take({ event, data }) {
  const content = JSON.parse(data);
  if (event === "fleet") takeFleet(content);
  else if (event === "rates") takeRates(content);
  else if (event === "request") takeRequests(content);
  else if (event === "jobs") takeJobs(content);
}

/** Read one stream until it ends, is silent or fails. Returns whether it brought anything. */
async function readStream(outer) {
  const abort = new AbortController();
  outer.addEventListener("abort", () => abort.abort());
  let alarm;
  const rearm = () => {
    clearTimeout(alarm);
    // While the user looks for a key the router is not silent.
    alarm = setTimeout(() => (access.state.needed === null ? abort.abort() : rearm()), SILENCE_MS);
  };
  let any = false;
  try {
    rearm();
    const response = await call("events", { signal: abort.signal });
    reloadRequests(abort.signal);
    for await (const event of readEvents(response)) {
      rearm();
      if (!any) connection.set({ state: "live", error: null, retry_at_ms: null, since_ms: Date.now() });
      any = true;
      take(event);
    }
    throw new Error("The router closed the stream of events.");
  } catch (error) {
    if (outer.aborted) return any;
    connection.set({ error: error.name === "AbortError" ? new Error("The router is silent.") : error });
    return any;
  } finally {
    clearTimeout(alarm);
    abort.abort();
  }
}

/** Resolve after the wait (null: none), or as soon as the network is back or the page is visible again. */
function pause(wait_ms) {
  return new Promise((resolve) => {
    const done = () => {
      clearTimeout(timer);
      window.removeEventListener("online", done);
      document.removeEventListener("visibilitychange", seen);
      document.removeEventListener("retrynow", done);
      resolve();
    };
    const seen = () => document.hidden || done();
    const timer = wait_ms === null ? undefined : setTimeout(done, wait_ms);
    window.addEventListener("online", done);
    document.addEventListener("visibilitychange", seen);
    document.addEventListener("retrynow", done);
  });
}

/** Try again at once instead of after the wait. */
export const retryNow = () => document.dispatchEvent(new Event("retrynow"));

/** Follow the router for as long as the page is open. */
export async function follow(signal) {
  let attempt = 0;
  while (!signal.aborted) {
    if (await readStream(signal)) attempt = 0;
    const wait_ms = backoff_ms(attempt++);
    const refused = [401, 403].includes(connection.state.error?.status); // only the user changes that
    connection.set({ state: refused ? "locked" : "waiting", retry_at_ms: refused ? null : Date.now() + wait_ms });
    await pause(refused ? null : wait_ms);
    connection.set({ state: "connecting", retry_at_ms: null });
  }
}
