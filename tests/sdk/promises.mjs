// What an application sees through the official Node SDK; prints one JSON object.
// Arguments: base URL, key, URL of the provider's control surface.

import OpenAI from 'openai';
import { zodResponseFormat, zodTextFormat } from 'openai/helpers/zod';
import { z } from 'zod';

const [baseURL, apiKey, control] = process.argv.slice(2);
const model = 'gpt-test';
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0, timeout: 20_000 });
const says = (content) => [{ role: 'user', content }];
const parameters = { type: 'object', properties: { city: { type: 'string' } } };
const tools = [{ type: 'function', function: { name: 'get_weather', parameters } }];
const responseTools = [{ type: 'function', name: 'get_weather', strict: false, parameters }];
const Person = z.object({ name: z.string(), age: z.number() });
const headers = ['x-request-id', 'openai-processing-ms', 'x-ratelimit-remaining-requests'];

const closed = async (tag) => (await (await fetch(`${control}/closed/${tag}`)).json()).closed;
const collect = async (stream) => {
  const seen = [];
  for await (const event of stream) seen.push(event);
  return seen;
};
const raw = (response) => ({ status: response.status, headers: headers.map((name) => response.headers.get(name)) });

/** The class, status, code and headers of the error that a call ends in. */
const failing = async (call, message = false) => {
  try {
    await call();
  } catch (e) {
    const seen = { class: e.constructor.name };
    if (e.status !== undefined) {
      Object.assign(seen, { status: e.status, code: e.code, retryAfter: e.headers.get('retry-after'), hasId: !!e.requestID });
      if (message) Object.assign(seen, { message: e.message, type: e.type, param: e.param, id: e.requestID });
    }
    return seen;
  }
  return 'no error';
};

/** The same failure on both APIs, streaming and not. */
const both = async (c, text, message) => [
  await failing(() => c.chat.completions.create({ model, messages: says(text) }), message),
  await failing(async () => collect(await c.chat.completions.create({ model, messages: says(text), stream: true })), message),
  await failing(() => c.responses.create({ model, input: text }), message),
  await failing(async () => collect(await c.responses.create({ model, input: text, stream: true })), message),
];

const promises = {
  chat: () => client.chat.completions.create({ model, messages: says('hello') }),
  chatStream: async () => collect(await client.chat.completions.create({ model, messages: says('hello'), stream: true })),
  chatStreamUsage: async () =>
    collect(await client.chat.completions.create({
      model, messages: says('hello'), stream: true, stream_options: { include_usage: true },
    })),
  chatTools: async () => {
    const first = await client.chat.completions.create({ model, messages: says('weather'), tools });
    const message = first.choices[0].message;
    const history = [...says('weather'), message, { role: 'tool', tool_call_id: message.tool_calls[0].id, content: 'sunny' }];
    return [first, await client.chat.completions.create({ model, messages: history, tools })];
  },
  chatToolsStream: async () => {
    const stream = client.chat.completions.stream({ model, messages: says('weather'), tools });
    return stream.finalChatCompletion();
  },
  chatParse: async () => {
    const answer = await client.chat.completions.parse({
      model, messages: says('json'), response_format: zodResponseFormat(Person, 'person'),
    });
    return answer.choices[0].message.parsed;
  },
  chatWithResponse: async () => {
    const { data, response, request_id } =
      await client.chat.completions.create({ model, messages: says('hello') }).withResponse();
    return [data, raw(response), request_id, data._request_id];
  },
  chatStreamWithResponse: async () => {
    const { data, response } =
      await client.chat.completions.create({ model, messages: says('hello'), stream: true }).withResponse();
    return [raw(response), await collect(data)];
  },
  responses: () => client.responses.create({ model, input: 'hello' }),
  responsesStream: async () => collect(await client.responses.create({ model, input: 'hello', stream: true })),
  responsesHelper: async () => {
    const stream = client.responses.stream({ model, input: 'hello' });
    const kinds = (await collect(stream)).map((event) => event.type);
    return [kinds, (await stream.finalResponse()).output_text];
  },
  responsesTools: async () => {
    const first = await client.responses.create({ model, input: 'weather', tools: responseTools });
    const history = [
      ...says('weather'), first.output[0],
      { type: 'function_call_output', call_id: first.output[0].call_id, output: 'sunny' },
    ];
    return [first, (await client.responses.create({ model, input: history, tools: responseTools })).output_text];
  },
  responsesToolsStream: async () =>
    collect(await client.responses.create({ model, input: 'weather', tools: responseTools, stream: true })),
  responsesParse: async () =>
    (await client.responses.parse({ model, input: 'json', text: { format: zodTextFormat(Person, 'person') } })).output_parsed,
  embeddings: async () => (await client.embeddings.create({ model, input: 'hello' })).data,
  error401: () => both(client.withOptions({ apiKey: 'sk-wrong' }), 'hello'),
  error404: async () => [
    await failing(() => client.chat.completions.create({ model: 'no-such-model', messages: says('hello') })),
    await failing(() => client.responses.create({ model: 'no-such-model', input: 'hello', stream: true })),
  ],
  error413: () => both(client, 'x'.repeat(3 * 1024 * 1024)),
  error429: () => both(client, '429', true),
  error500: () => both(client, '500', true),
  errorContext: () => both(client, 'context', true),
  timeouts: async () => {
    const quick = client.withOptions({ timeout: 500 });
    const calls = [
      (text) => quick.chat.completions.create({ model, messages: says(text) }),
      (text) => quick.chat.completions.create({ model, messages: says(text), stream: true }),
      (text) => quick.responses.create({ model, input: text }),
      (text) => quick.responses.create({ model, input: text, stream: true }),
    ];
    const seen = [];
    for (const [n, call] of calls.entries()) {
      const tag = `node-timeout-${n}-${baseURL}`.replaceAll('/', '_');
      seen.push([await failing(() => call(`stall:${tag}`)), await closed(tag)]);
    }
    return seen;
  },
  earlyClose: async () => {
    const seen = [];
    const first = async (tag, stream, count) => {
      const events = [];
      for await (const event of stream) {
        events.push(event.type ?? event.choices[0].delta.content);
        if (events.length === count) break;
      }
      seen.push([events, await closed(tag)]);
    };
    const chatTag = `node-chat-${baseURL}`.replaceAll('/', '_');
    await first(chatTag, await client.chat.completions.create({ model, messages: says(`endless:${chatTag}`), stream: true }), 3);
    const responsesTag = `node-resp-${baseURL}`.replaceAll('/', '_');
    await first(responsesTag, await client.responses.create({ model, input: `endless:${responsesTag}`, stream: true }), 6);
    return seen;
  },
};

const results = {};
for (const [name, promise] of Object.entries(promises)) {
  try {
    results[name] = await promise();
  } catch (e) {
    // The comparison with the provider itself says what is wrong.
    results[name] = { unexpected: `${e.constructor.name}: ${e.message}` };
  }
}
console.log(JSON.stringify(results));
