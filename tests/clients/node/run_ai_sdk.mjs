// Vercel's ai, with the provider that the argument names.

import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, Output, generateText, stepCountIs, streamText, tool } from "ai";
import { createWorkersAI } from "workers-ai-provider";
import { z } from "zod";
import {
  ADDRESS, ANSWER, BASE_URL, ETA, MODEL, ORDER, ORDER_QUESTION, ORDER_STATUS, QUESTION, READING, SYSTEM,
  TOO_LONG, expect, expectError, run,
} from "./harness.mjs";

globalThis.AI_SDK_LOG_WARNINGS = false;
const RUN = "/client/v4/accounts/local/ai/run/slipstream-mini";
const openai = createOpenAI({ baseURL: BASE_URL, apiKey: "none" });
// This provider has the address of Cloudflare's API built in.
const redirected = (url, init) => fetch(String(url).replace("https://api.cloudflare.com", `http://${ADDRESS}`), init);
const workersAI = createWorkersAI({ accountId: "local", apiKey: "none", fetch: redirected });
const PROVIDERS = {
  "openai-compatible": {
    package: "@ai-sdk/openai-compatible",
    model: createOpenAICompatible({
      name: "slipstream", baseURL: BASE_URL, includeUsage: true, supportsStructuredOutputs: true,
    }),
  },
  "openai-chat": { package: "@ai-sdk/openai", model: (id) => openai.chat(id), label: "@ai-sdk/openai, chat" },
  openai: {
    package: "@ai-sdk/openai", model: (id) => openai(id), label: "@ai-sdk/openai, Responses", path: "/v1/responses",
  },
  "workers-ai": {
    package: "workers-ai-provider", model: (id) => workersAI(id, { sessionAffinity: "workers-ai" }), path: RUN,
  },
};
const provider = PROVIDERS[process.argv[2] ?? "openai-compatible"];
const headers = { "x-session-affinity": `ai-${process.argv[2]}` };
const options = {
  model: provider.model(MODEL), system: SYSTEM, temperature: 0, maxOutputTokens: 96, maxRetries: 0, headers,
};
const Ticket = z.object({
  subject: z.enum(["order", "refund", "warranty"]),
  urgent: z.boolean(),
  days: z.int().min(0).max(30),
});

const scenarios = {
  async chat() {
    const answer = await generateText({ ...options, prompt: QUESTION });
    expect(answer.text.includes(ANSWER) && answer.finishReason === "stop", answer.text);
  },
  async stream() {
    const pieces = [];
    const answer = streamText({ ...options, prompt: QUESTION, onError: ({ error }) => { throw error; } });
    for await (const piece of answer.textStream) pieces.push(piece);
    expect(pieces.length > 1 && pieces.join("").includes(ANSWER), pieces);
  },
  // The SDK's own tool loop.
  async tools() {
    const asked = [];
    const look = tool({
      description: "Look up the status of an order.",
      inputSchema: z.object({ order_id: z.string() }),
      execute: async ({ order_id }) => (asked.push(order_id), ORDER_STATUS),
    });
    const answer = await generateText({
      ...options, prompt: ORDER_QUESTION, tools: { get_order_status: look }, stopWhen: stepCountIs(4),
    });
    expect(asked.join() === ORDER && answer.text.includes(ETA), { asked, text: answer.text });
  },
  async structured() {
    const output = Output.object({ schema: Ticket });
    const answer = await generateText({ ...options, prompt: QUESTION, output, maxOutputTokens: 500 });
    Ticket.parse(answer.output);
  },
  async errors() {
    const ask = (more) => () => generateText({ ...options, prompt: QUESTION, ...more });
    const missing = await expectError(APICallError, ask({ model: provider.model("gpt-4o") }));
    expect(!missing.isRetryable && [400, 404].includes(missing.statusCode), missing.message);
    const bad = await expectError(APICallError, ask({ temperature: 9 }));
    expect(!bad.isRetryable && bad.statusCode === 400 && bad.message.includes("temperature"), bad.message);
    const over = await expectError(APICallError, ask({ prompt: TOO_LONG }));
    expect(!over.isRetryable && over.message.includes("maximum context length"), over.message);
  },
  async usage() {
    let counted;
    for (let turn = 0; turn < 2; turn++) {
      const answer = streamText({ ...options, prompt: READING, maxOutputTokens: 16 });
      await answer.consumeStream();
      counted = await answer.usage;
    }
    expect(counted.inputTokens > 64 && counted.outputTokens > 0, counted);
    expect(counted.inputTokenDetails.cacheReadTokens > 0, counted);
  },
};

const label = `ai with ${provider.label ?? provider.package}`;
await run(label, provider.package, scenarios, provider.path);
