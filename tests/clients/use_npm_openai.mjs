// `openai`, JavaScript: run by `run.py`; needs OCTAVO_URL.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import OpenAI, { toFile } from "openai";

const { version } = JSON.parse(readFileSync(new URL("node_modules/openai/package.json", import.meta.url)));
const client = new OpenAI({ baseURL: process.env.OCTAVO_URL + "/v1", apiKey: "none", maxRetries: 0 });
const model = (await client.models.list()).data[0].id;
const messages = [{ role: "user", content: "Name the capital of France." }];
const greedy = { model, messages, temperature: 0, max_tokens: 16 };

const whole = await client.chat.completions.create(greedy);
assert.match(whole.choices[0].message.content, /Paris/);
let text = "", usage = null;
for await (const chunk of await client.chat.completions.create({
  ...greedy, stream: true, stream_options: { include_usage: true },
})) {
  text += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
assert.equal(text, whole.choices[0].message.content);
assert.equal(usage.completion_tokens, whole.usage.completion_tokens);

// The helper that collects a stream again.
const runner = client.chat.completions.stream(greedy);
assert.equal(await runner.finalContent(), text);

const done = await client.completions.create({ model, prompt: "Once upon a time", temperature: 0, max_tokens: 8 });
assert.ok(done.choices[0].text);
const reply = await client.responses.create({ model, input: "Say hi.", temperature: 0, max_output_tokens: 8 });
assert.ok(reply.output_text);

await assert.rejects(client.chat.completions.create({ ...greedy, temperature: 9 }), (error) => {
  assert.ok(error instanceof OpenAI.BadRequestError);
  assert.equal(error.param, "temperature");
  return true;
});
await assert.rejects(client.chat.completions.create({ ...greedy, model: "none" }), OpenAI.NotFoundError);

const line = { custom_id: "a", method: "POST", url: "/v1/chat/completions", body: { messages, max_tokens: 4 } };
const file = await client.files.create({
  file: await toFile(Buffer.from(JSON.stringify(line) + "\n"), "in.jsonl"), purpose: "batch",
});
let batch = await client.batches.create({
  input_file_id: file.id, endpoint: "/v1/chat/completions", completion_window: "24h",
});
for (let tries = 0; batch.status !== "completed"; tries++) {
  assert.ok(tries < 600 && !["failed", "expired", "cancelled"].includes(batch.status), batch.status);
  await new Promise((resolve) => setTimeout(resolve, 200));
  batch = await client.batches.retrieve(batch.id);
}
const answers = await (await client.files.content(batch.output_file_id)).text();
assert.equal(JSON.parse(answers.trim()).custom_id, "a");
console.log(`openai ${version} on node ${process.version}: chat, completions, responses, streams, errors, files, a batch`);
