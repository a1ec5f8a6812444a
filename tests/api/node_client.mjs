// Drives the official client for Node. Arguments: the server's address. Prints one JSON object.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "x", maxRetries: 0 });
const messages = [{ role: "user", content: "hi" }];
const found = {};

const whole = await client.chat.completions.create({ model: "tiny", messages });
found.chat = whole.choices[0].message.content;
found.usage = whole.usage.total_tokens;

const stream = await client.chat.completions.create({
  model: "tiny",
  messages,
  stream: true,
  stream_options: { include_usage: true },
});
found.streamed = "";
for await (const chunk of stream) {
  found.streamed += chunk.choices[0]?.delta?.content ?? "";
  found.streamedUsage = chunk.usage?.total_tokens ?? null;
}

const weather = {
  type: "function",
  function: {
    name: "weather",
    parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
  },
};
const runner = client.chat.completions.stream({ model: "tiny", messages, tools: [weather] });
const called = (await runner.finalChatCompletion()).choices[0];
found.call = called.message.tool_calls[0].function;
found.finish = called.finish_reason;

const city = {
  type: "object",
  properties: { city: { type: "string" } },
  required: ["city"],
  additionalProperties: false,
};
const parsed = await client.chat.completions.parse({
  model: "tiny",
  messages,
  response_format: { type: "json_schema", json_schema: { name: "city", strict: true, schema: city } },
});
found.parsed = JSON.parse(parsed.choices[0].message.content);

const response = await client.responses.create({ model: "tiny", input: "hi" });
found.response = response.output_text;
const events = await client.responses.create({ model: "tiny", input: "hi", stream: true });
found.events = [];
for await (const event of events) found.events.push(event.type);

found.completion = (await client.completions.create({ model: "tiny", prompt: "hi" })).choices[0].text;
found.models = [];
for await (const model of client.models.list()) found.models.push(model.id);

try {
  await client.chat.completions.create({ model: "tiny", messages, temperature: 3 });
} catch (error) {
  found.error = [error.constructor.name, error.status, error.param];
}
console.log(JSON.stringify(found));
