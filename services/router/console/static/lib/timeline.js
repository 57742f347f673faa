// The timeline of a request as bars. Pure.

export const PHASES = {
  queue: "Queue",
  encode: "Text to tokens",
  placement: "Placement",
  dispatch: "To the worker",
  restore: "Restore of KV",
  prefill: "Prefill",
  transfer: "Transfer to decode",
  tokens: "Tokens",
  suspended: "Client does not read",
};
/** What each phase is, for people who see it for the first time. */
export const PHASE_NOTES = {
  queue: "waits until the router admits it",
  encode: "the router makes tokens of the text",
  placement: "the router chooses the workers",
  dispatch: "the prompt is on its way to the chosen workers",
  restore: "KV of an earlier request is read from a kvstore or another worker instead of being computed",
  prefill: "a prefill worker, or the decode worker itself, computes the KV of the prompt and the first token",
  transfer: "the decode worker reads the prompt's KV from the prefill worker; it overlaps with the prefill's end",
  tokens: "the decode worker generates the answer",
  suspended: "the client reads too slowly, so the request gave its place back",
};
// What the request as a whole does from an event on, until the next one or until an attempt begins.
const REQUEST_PHASES = {
  received: "queue",
  admitted: "encode",
  encoded: "placement",
  moved: "placement",
  preempted: "queue",
  suspended: "suspended",
  resumed: "placement",
};
// What an attempt does from an event on. Two attempts overlap while one hedges the other.
const ATTEMPT_PHASES = {
  placed: "dispatch",
  hedged: "dispatch",
  prefill_started: "prefill",
  restored: "prefill",
  first_token: "tokens",
  tokens: "tokens",
};
const END_ALL = new Set(["preempted", "suspended", "finished", "failed"]);
const END_ATTEMPT = new Set(["moved", "dropped"]);
const MARKS = new Set(["hedged", "moved", "dropped", "preempted", "suspended", "resumed", "failed"]);
const REQUEST = 0; // the lane of the request itself, beside the numbers of attempts

/** Bars `{ phase, start_ms, end_ms, worker, attempt }` in order; what still runs ends at `now_ms`. */
export function barsOf(timeline, now_ms) {
  const bars = [];
  const open = new Map();
  const close = (lane, at_ms) => {
    const bar = open.get(lane);
    if (bar !== undefined) bars.push({ ...bar, end_ms: Math.max(bar.start_ms, at_ms) });
    open.delete(lane);
  };
  const begin = (lane, phase, entry) => {
    close(lane, entry.at_ms);
    open.set(lane, { phase, start_ms: entry.at_ms, worker: lane === REQUEST ? "" : entry.worker ?? "", attempt: lane });
  };
  for (const entry of timeline) {
    const attempt = entry.attempt || 1;
    if (END_ALL.has(entry.kind)) for (const lane of [...open.keys()]) close(lane, entry.at_ms);
    if (END_ATTEMPT.has(entry.kind)) close(attempt, entry.at_ms);
    if (entry.kind in REQUEST_PHASES) begin(REQUEST, REQUEST_PHASES[entry.kind], entry);
    const phase = ATTEMPT_PHASES[entry.kind];
    if (phase === undefined) continue;
    if (entry.kind === "placed") close(REQUEST, entry.at_ms);
    const before = open.get(attempt);
    if (entry.kind === "restored" && before?.phase === "prefill") before.phase = "restore";
    // The decode worker goes on with the tokens that the prefill worker began.
    if (before?.phase !== "tokens" || phase !== "tokens") begin(attempt, phase, entry);
    else before.worker = entry.worker || before.worker;
  }
  for (const lane of [...open.keys()]) close(lane, now_ms);
  return [...bars, ...transfers(timeline)].sort((a, b) => a.start_ms - b.start_ms || a.end_ms - b.end_ms);
}

/** The way of KV to the decode worker: from when it may read until it sends tokens. */
function transfers(timeline) {
  const same = (entry, other) => (entry.attempt || 1) === (other.attempt || 1);
  return timeline
    .filter((entry) => entry.kind === "handoff")
    .flatMap((entry) => {
      const end = timeline.find((other) => other.kind === "tokens" && same(entry, other) && other.at_ms >= entry.at_ms);
      if (end === undefined) return [];
      return [{ phase: "transfer", start_ms: entry.at_ms, end_ms: end.at_ms, worker: end.worker ?? "", attempt: entry.attempt || 1 }];
    });
}

/** Moments that are drawn as lines over all bars. */
export const marksOf = (timeline) => timeline.filter((entry) => MARKS.has(entry.kind));

/** When the first token came, or null. */
export const firstTokenMs = (timeline) => timeline.find((entry) => entry.kind === "first_token")?.at_ms ?? null;

/** Round steps of an axis from 0 to `end_ms`: at most about six. */
export function ticks(end_ms) {
  if (!(end_ms > 0)) return [0];
  const power = 10 ** Math.floor(Math.log10(end_ms / 5));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => end_ms / size <= 6);
  return Array.from({ length: Math.floor(end_ms / step) + 1 }, (_, n) => n * step);
}
