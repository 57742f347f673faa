// What a worker's record says: its state, its tier and its figures. Pure.

import { ratio } from "./format.js";

export const TIERS = [
  { role: "prefill", title: "Prefill", task: "computes prompts" },
  { role: "decode", title: "Decode", task: "computes answers" },
  { role: "kvstore", title: "KV store", task: "keeps KV of prompts" },
  { role: "drafter", title: "Drafter", task: "drafts tokens ahead" },
];
const SILENT_MS = 10_000;

/** `{ name, tone, text }` of a worker. */
export function workerState(worker) {
  if (worker.draining) return { name: "draining", tone: "warn", text: "Draining" };
  if (!worker.ready) return { name: "unavailable", tone: "bad", text: "Not ready" };
  if (worker.degraded) return { name: "degraded", tone: "warn", text: "Degraded" };
  if (worker.age_ms > SILENT_MS) return { name: "unavailable", tone: "bad", text: "Silent" };
  return { name: "ready", tone: "ok", text: "Ready" };
}

/** Shares of held and of cached among a worker's KV pages, null where it has none. */
export function kvShares(load) {
  const used = ratio(load?.kv_blocks_used, load?.kv_blocks_total);
  return { used, cached: used === null ? null : (load.kv_blocks_cached ?? 0) / load.kv_blocks_total };
}

const sum = (workers, name) => workers.reduce((total, { load }) => total + (load?.[name] ?? 0), 0);

/** The figures of a tier together. */
export function tierSummary(workers) {
  const ready = workers.filter((worker) => ["ready", "degraded"].includes(workerState(worker).name)).length;
  return {
    ready,
    draining: workers.filter((worker) => worker.draining).length,
    running: sum(workers, "running_sequences"),
    tokens_per_s: sum(workers, "tokens_per_s"),
    kv_used: ratio(sum(workers, "kv_blocks_used"), sum(workers, "kv_blocks_total")),
  };
}

/** Whether a worker's names contain the text, and its state is the wanted one ("all": any). */
export function matches(worker, text, state) {
  const wanted = text.trim().toLowerCase();
  const names = [worker.instance, worker.endpoint, worker.region, worker.node].filter(Boolean);
  return (state === "all" || workerState(worker).name === state) && (!wanted || names.some((name) => name.toLowerCase().includes(wanted)));
}

/** Whether no other worker of the tier would take requests. */
export const isLastReady = (worker, workers) =>
  !workers.some((other) => other.role === worker.role && other.instance !== worker.instance && other.ready && !other.draining);
