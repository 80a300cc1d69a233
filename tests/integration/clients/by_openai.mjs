// OpenAI's client for Node: node by_openai.mjs URL MODEL; the URL ends with /v1.
// Runs beside its own node_modules (`make clients`). Throws where it is not content.
// The last stream is left after its first piece: who runs this sees the request end.
import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const [baseURL, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Say something." }];
const asked = { model, messages, temperature: 0, max_tokens: 12 };
const Hour = z.object({ hour: z.enum(["noon", "midnight"]) });
const tools = [
  {
    type: "function",
    function: {
      name: "clock",
      description: "The time of a city",
      parameters: {
        type: "object",
        properties: { utc: { type: "boolean" } },
        required: ["utc"],
        additionalProperties: false,
      },
    },
  },
];
const calling = { ...asked, max_tokens: 200, tools, tool_choice: "required", parallel_tool_calls: false };

async function all(stream) {
  const pieces = [];
  for await (const piece of stream) pieces.push(piece);
  return pieces;
}

async function models() {
  assert.deepEqual((await all(client.models.list())).map(({ id }) => id), [model]);
}

async function chats() {
  const whole = await client.chat.completions.create(asked);
  const stream = await client.chat.completions.create({
    ...asked,
    stream: true,
    stream_options: { include_usage: true },
  });
  const pieces = await all(stream);
  const last = pieces.pop();
  assert.deepEqual(last.choices, []);
  assert.deepEqual(last.usage, whole.usage);
  assert(pieces.every(({ usage }) => !usage));
  const text = pieces.map(({ choices }) => choices[0].delta.content ?? "").join("");
  assert.equal(text, whole.choices[0].message.content);
  return text;
}

async function forms() {
  const parsed = await client.chat.completions.parse({
    ...asked,
    max_tokens: 100,
    response_format: zodResponseFormat(Hour, "hour"),
  });
  assert(["noon", "midnight"].includes(parsed.choices[0].message.parsed.hour));
}

async function calls() {
  const [{ message, finish_reason }] = (await client.chat.completions.create(calling)).choices;
  assert.equal(finish_reason, "tool_calls");
  const [call] = message.tool_calls;
  assert.equal(call.function.name, "clock");
  assert.equal(typeof JSON.parse(call.function.arguments).utc, "boolean");
  const streamed = await client.chat.completions.stream(calling).finalMessage();
  assert.equal(streamed.tool_calls[0].function.arguments, call.function.arguments);
  const answer = { role: "tool", tool_call_id: call.id, content: "noon" };
  const after = await client.chat.completions.create({
    ...asked,
    tools,
    messages: [...messages, message, answer],
  });
  assert(after.usage.prompt_tokens > 0);
}

async function responses(said) {
  const request = { model, input: "Say something.", temperature: 0, max_output_tokens: 12 };
  const whole = await client.responses.create(request);
  assert.equal(whole.output_text, said);
  const stream = client.responses.stream(request);
  let text = "";
  stream.on("response.output_text.delta", ({ delta }) => (text += delta));
  assert.equal((await stream.finalResponse()).output_text, said);
  assert.equal(text, said);
}

async function vectors() {
  const [one, two] = (await client.embeddings.create({ model, input: ["a", "b"] })).data;
  assert(one.embedding.length > 0);
  assert.equal(one.embedding.length, two.embedding.length);
  assert(one.embedding.every(Number.isFinite));
}

async function refusals() {
  const wrong = client.chat.completions.create({ ...asked, temperature: -5 });
  await assert.rejects(wrong, (error) => {
    assert(error instanceof OpenAI.BadRequestError);
    assert.equal(error.param, "temperature");
    return true;
  });
  const another = client.chat.completions.create({ ...asked, model: "another" });
  await assert.rejects(another, OpenAI.NotFoundError);
}

async function leave() {
  const endless = { ...asked, max_tokens: 2000, stream: true };
  const stream = await client.chat.completions.create(
    // Ours: it shall not end by itself.
    { ...endless, ignore_eos: true },
  );
  for await (const _ of stream) break;
  assert(stream.controller.signal.aborted);
}

await models();
const said = await chats();
await forms();
await calls();
await responses(said);
await vectors();
await refusals();
await leave();
