// What the scripts of all Node clients share; the counterpart of ../python/harness.py, with the same report.

import { readFileSync } from "node:fs";

export const ADDRESS = process.env.SLIPSTREAM_HTTP ?? "127.0.0.1:8000";
export const BASE_URL = `http://${ADDRESS}/v1`;
export const MODEL = "slipstream-mini";
const SCENARIOS = ["chat", "stream", "tools", "structured", "errors", "usage"];

export const SYSTEM =
  "You answer the customers of Blue Harbor. Be warm and polite. The warranty lasts 12 months. " +
  "Returns are possible within 30 days. The store is in Lisbon.";
export const QUESTION = "How long is the warranty?";
export const ANSWER = "12 months";
export const ORDER = "482135";
export const ORDER_QUESTION = `Where is my order ${ORDER}?`;
export const ETA = "2026-12-04";
export const ORDER_STATUS = { status: "shipped", eta: ETA, carrier: "DHL" };
export const READING = "Please read this. ".repeat(60);
// Longer than the context of the shipped model, which has 16,384 tokens.
export const TOO_LONG = "overflow ".repeat(40_000);
export const TOOL = {
  type: "function",
  function: {
    name: "get_order_status",
    description: "Look up the status of an order.",
    parameters: {
      type: "object",
      properties: { order_id: { type: "string" } },
      required: ["order_id"],
    },
  },
};
export const MESSAGES = [
  { role: "system", content: SYSTEM },
  { role: "user", content: QUESTION },
];

export class NotOffered extends Error {}

/** Fail the scenario unless the condition holds. `what` says what arrived. */
export function expect(condition, what) {
  if (!condition) throw new Error(`unexpected: ${typeof what === "string" ? what : JSON.stringify(what)}`);
}

/** The error of the class that the call rejects with. */
export async function expectError(kind, call) {
  let answer;
  try {
    answer = await call();
  } catch (error) {
    expect(kind.isInstance?.(error) ?? error instanceof kind, `${error?.constructor?.name}: ${error?.message}`);
    return error;
  }
  throw new Error(`no ${kind.name}: ${JSON.stringify(answer)}`);
}

/** Run the scenarios in order and print the report. `path`: of the endpoint that the client calls. */
export async function run(name, packageName, scenarios, path = "/v1/chat/completions") {
  const served = await isServed(path);
  const results = {};
  for (const scenario of SCENARIOS) {
    if (!served) results[scenario] = { status: "not served", detail: `404 for ${path}` };
    else if (!scenarios[scenario]) results[scenario] = { status: "not offered", detail: "" };
    else results[scenario] = await outcome(scenarios[scenario]);
  }
  console.log(JSON.stringify({ client: name, version: versionOf(packageName), endpoint: path, results }));
}

async function outcome(scenario) {
  try {
    await scenario();
    return { status: "works", detail: "" };
  } catch (error) {
    if (error instanceof NotOffered) return { status: "not offered", detail: error.message };
    return { status: "fails", detail: `${error?.constructor?.name}: ${error?.message}`.slice(0, 600) };
  }
}

function versionOf(packageName) {
  const url = new URL(`node_modules/${packageName}/package.json`, import.meta.url);
  return JSON.parse(readFileSync(url)).version;
}

/** Whether the router has the endpoint: it refuses an empty body, and a missing path by its path. */
async function isServed(path) {
  const headers = { "content-type": "application/json" };
  const answer = await fetch(`http://${ADDRESS}${path}`, { method: "POST", headers, body: "{}" });
  return !(answer.status === 404 && (await answer.text()).includes("unknown_url"));
}
