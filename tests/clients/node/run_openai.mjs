// openai (JavaScript): Chat Completions, and with the argument `responses` the Responses API.

import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";
import {
  ANSWER, BASE_URL, ETA, MESSAGES, MODEL, ORDER, ORDER_QUESTION, ORDER_STATUS, QUESTION, READING, SYSTEM,
  TOOL, TOO_LONG, expect, expectError, run,
} from "./harness.mjs";

const client = new OpenAI({ baseURL: BASE_URL, apiKey: "none", maxRetries: 0 });
const Ticket = z.object({
  subject: z.enum(["order", "refund", "warranty"]),
  urgent: z.boolean(),
  days: z.int().min(0).max(30),
});
const options = { model: MODEL, temperature: 0 };

const chats = {
  async chat() {
    const answer = await client.chat.completions.create({ ...options, messages: MESSAGES, max_tokens: 60 });
    expect(answer.choices[0].message.content.includes(ANSWER), answer);
    expect((await client.models.retrieve(MODEL)).id === MODEL, "models.retrieve");
  },
  async stream() {
    const stream = client.chat.completions.stream({ ...options, messages: MESSAGES, max_tokens: 60 });
    const pieces = [];
    stream.on("content", (delta) => pieces.push(delta));
    const text = await stream.finalContent();
    expect(pieces.length > 1 && pieces.join("") === text && text.includes(ANSWER), pieces);
  },
  // The client's own tool loop, whole and streamed.
  async tools() {
    for (const stream of [false, true]) {
      const asked = [];
      const look = ({ order_id }) => (asked.push(order_id), JSON.stringify(ORDER_STATUS));
      const tool = { ...TOOL, function: { ...TOOL.function, function: look, parse: JSON.parse } };
      const messages = [{ role: "system", content: SYSTEM }, { role: "user", content: ORDER_QUESTION }];
      const loop = client.chat.completions.runTools({ ...options, messages, tools: [tool], stream, max_tokens: 96 });
      const text = await loop.finalContent();
      expect(asked.join() === ORDER && text.includes(ETA), { asked, text });
    }
  },
  async structured() {
    const format = zodResponseFormat(Ticket, "ticket");
    const answer = await client.chat.completions.parse({
      ...options, messages: MESSAGES, response_format: format, max_tokens: 500,
    });
    Ticket.parse(answer.choices[0].message.parsed);
  },
  async errors() {
    const create = (more) => () => client.chat.completions.create({ ...options, messages: MESSAGES, ...more });
    const missing = await expectError(OpenAI.NotFoundError, create({ model: "gpt-4o" }));
    expect(missing.code === "model_not_found" && missing.requestID, missing);
    const bad = await expectError(OpenAI.BadRequestError, create({ temperature: 9 }));
    expect(bad.param === "temperature", bad);
    const messages = [{ role: "user", content: TOO_LONG }];
    const over = await expectError(OpenAI.BadRequestError, create({ messages }));
    expect(over.code === "context_length_exceeded", over);
  },
  async usage() {
    let counted;
    for (let turn = 0; turn < 2; turn++) {
      const stream = await client.chat.completions.create(
        {
          ...options, messages: [{ role: "user", content: READING }], max_tokens: 8, stream: true,
          stream_options: { include_usage: true },
        },
        { headers: { "x-session-affinity": "openai-js" } },
      );
      for await (const chunk of stream) counted = chunk.usage ?? counted;
    }
    expect(counted.prompt_tokens > 64 && counted.completion_tokens > 0, counted);
    expect(counted.prompt_tokens_details.cached_tokens > 0, counted);
  },
};

const responses = {
  async chat() {
    const answer = await client.responses.create({ ...options, instructions: SYSTEM, input: QUESTION });
    expect(answer.output_text.includes(ANSWER), answer);
  },
  async stream() {
    const stream = client.responses.stream({ ...options, instructions: SYSTEM, input: QUESTION });
    const pieces = [];
    stream.on("response.output_text.delta", (event) => pieces.push(event.delta));
    const final = await stream.finalResponse();
    expect(pieces.length > 1 && pieces.join("") === final.output_text, pieces);
    expect(final.output_text.includes(ANSWER), final);
  },
  async tools() {
    const input = [{ role: "user", content: ORDER_QUESTION }];
    const tools = [{ type: "function", strict: false, ...TOOL.function }];
    const ask = () => client.responses.create({ ...options, instructions: SYSTEM, input, tools, store: false });
    const first = await ask();
    const call = first.output.find((item) => item.type === "function_call");
    expect(JSON.parse(call.arguments).order_id === ORDER, call);
    const output = JSON.stringify(ORDER_STATUS);
    input.push(...first.output, { type: "function_call_output", call_id: call.call_id, output });
    const last = await ask();
    expect(last.output_text.includes(ETA), last);
  },
  async structured() {
    const text = { format: zodTextFormat(Ticket, "ticket") };
    const answer = await client.responses.parse({ ...options, input: QUESTION, text, max_output_tokens: 500 });
    Ticket.parse(answer.output_parsed);
  },
  async errors() {
    const create = (more) => () => client.responses.create({ ...options, input: QUESTION, ...more });
    const missing = await expectError(OpenAI.NotFoundError, create({ model: "gpt-4o" }));
    expect(missing.code === "model_not_found" && missing.requestID, missing);
    const bad = await expectError(OpenAI.BadRequestError, create({ temperature: 9 }));
    expect(bad.param === "temperature", bad);
    const over = await expectError(OpenAI.BadRequestError, create({ input: TOO_LONG }));
    expect(over.code === "context_length_exceeded", over);
  },
  async usage() {
    let counted;
    for (let turn = 0; turn < 2; turn++) {
      const body = { ...options, input: READING, max_output_tokens: 16, prompt_cache_key: "responses-js" };
      counted = (await client.responses.create({ ...body, store: false })).usage;
    }
    expect(counted.input_tokens > 64 && counted.output_tokens > 0, counted);
    expect(counted.input_tokens_details.cached_tokens > 0, counted);
  },
};

if (process.argv[2] === "responses") await run("openai (JS), Responses", "openai", responses, "/v1/responses");
else await run("openai (JS)", "openai", chats);
