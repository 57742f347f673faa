// The queue of stored jobs as the router pushes it, and what states mean. Pure, but for the stores.

import { Store } from "./store.js";

/** `page`: the newest summary, or null. `round` grows when a list of jobs shows something else than before. */
export const jobQueue = new Store({ page: null, round: 0 });

const STATES = {
  queued: { tone: "busy", text: "Queued" },
  running: { tone: "busy", text: "Running" },
  succeeded: { tone: "ok", text: "Succeeded" },
  failed: { tone: "bad", text: "Failed" },
  cancelled: { tone: "quiet", text: "Cancelled" },
  expired: { tone: "warn", text: "Expired" },
};

/** `[state, title]` of all states, in the order of a job's life. */
export const JOB_STATES = Object.entries(STATES).map(([name, { text }]) => [name, text]);

/** `{ tone, text }` of a job's state. */
export const stateOf = (job) => job.is_held ? { tone: "warn", text: "Running, held" }
  : STATES[job.state] ?? { tone: "quiet", text: String(job.state) };

/** Whether a job can still be cancelled. */
export const isLive = (job) => job.state === "queued" || job.state === "running";

/** What changes when a row of a list does. The age and the rate change with the clock alone. */
const rowsOf = (page) => JSON.stringify([page?.has_database, page?.unavailable, page?.counts, page?.running_tokens]);

/** Take a summary that was pushed. */
export function takeJobs(page) {
  const { page: before, round } = jobQueue.state;
  jobQueue.set({ page, round: before !== null && rowsOf(before) !== rowsOf(page) ? round + 1 : round });
}
