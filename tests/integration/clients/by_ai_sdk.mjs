// The AI SDK with its provider for compatible servers: node by_ai_sdk.mjs URL MODEL.
// Runs beside its own node_modules (`make clients`). Throws where it is not content.
// The last stream is left after its first piece: who runs this sees the request end.
import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, embedMany, generateText, Output, streamText, tool } from "ai";
import { z } from "zod";

const [baseURL, name] = process.argv.slice(2);
const provider = createOpenAICompatible({
  name: "local",
  baseURL,
  apiKey: "none",
  includeUsage: true,
  supportsStructuredOutputs: true,
  transformRequestBody: (body) => ({ ...body, ...extra }),
});
let extra = {};
const model = provider(name);
const asked = { model, prompt: "Say something.", temperature: 0, maxOutputTokens: 12, maxRetries: 0 };
const clock = tool({
  description: "The time of a city",
  inputSchema: z.object({ utc: z.boolean() }),
  execute: async ({ utc }) => (utc ? "noon" : "midnight"),
});

async function texts() {
  const whole = await generateText(asked);
  const stream = streamText(asked);
  let text = "";
  for await (const piece of stream.textStream) text += piece;
  assert(text.length > 0);
  assert.equal(text, whole.text);
  const counted = ({ inputTokens, outputTokens }) => [inputTokens, outputTokens];
  assert.deepEqual(counted(await stream.usage), counted(whole.usage));
  assert(whole.usage.outputTokens > 0);
  assert.equal(await stream.finishReason, whole.finishReason);
}

async function forms() {
  const output = Output.object({ schema: z.object({ hour: z.enum(["noon", "midnight"]) }) });
  const made = await generateText({ ...asked, maxOutputTokens: 100, output });
  assert(["noon", "midnight"].includes(made.output.hour));
}

async function calls() {
  extra = { parallel_tool_calls: false }; // else the model calls until it is cut off
  const calling = { ...asked, maxOutputTokens: 200, tools: { clock }, toolChoice: "required" };
  const whole = await generateText(calling);
  assert.equal(whole.finishReason, "tool-calls");
  assert.equal(typeof whole.toolCalls[0].input.utc, "boolean");
  assert(["noon", "midnight"].includes(whole.toolResults[0].output));
  const stream = streamText(calling);
  await stream.consumeStream();
  assert.deepEqual((await stream.toolCalls)[0].input, whole.toolCalls[0].input);
  const messages = [{ role: "user", content: asked.prompt }, ...whole.response.messages];
  const { prompt, ...rest } = asked;
  assert((await generateText({ ...rest, messages, tools: { clock } })).usage.inputTokens > 0);
}

async function vectors() {
  extra = {};
  const { embeddings } = await embedMany({
    model: provider.embeddingModel(name),
    values: ["a", "b"],
    maxRetries: 0,
  });
  assert.equal(embeddings.length, 2);
  assert(embeddings[0].length > 0 && embeddings.flat().every(Number.isFinite));
}

async function refusals() {
  await assert.rejects(generateText({ ...asked, temperature: -5 }), (error) => {
    assert(APICallError.isInstance(error));
    assert.equal(error.statusCode, 400);
    assert.match(error.message, /temperature/);
    return true;
  });
}

async function leave() {
  extra = { ignore_eos: true }; // ours: it shall not end by itself
  const controller = new AbortController();
  let wasAborted = false;
  const stream = streamText({
    ...asked,
    maxOutputTokens: 2000,
    abortSignal: controller.signal,
    onAbort: () => (wasAborted = true),
  });
  for await (const _ of stream.textStream) controller.abort();
  assert(wasAborted);
}

await texts();
await forms();
await calls();
await vectors();
await refusals();
await leave();
