"""What an application sees through the official Python SDK; prints one JSON object.

Arguments: base URL, key, URL of the provider's control surface.
"""

import asyncio
import json
import sys
import urllib.request

import openai
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

base_url, key, control = sys.argv[1:4]
client = OpenAI(base_url=base_url, api_key=key, max_retries=0, timeout=20)
MODEL = "gpt-test"
TOOLS = [{"type": "function", "function": {
    "name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}]
RESPONSE_TOOLS = [{"type": "function", "name": "get_weather", "strict": False,
                   "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}]
HEADERS = ["x-request-id", "openai-processing-ms", "x-ratelimit-remaining-requests"]


class Person(BaseModel):
    name: str
    age: int


def says(text):
    return [{"role": "user", "content": text}]


def closed(tag):
    with urllib.request.urlopen(f"{control}/closed/{tag}", timeout=10) as answer:
        return json.load(answer)["closed"]


def chat():
    answer = client.chat.completions.create(model=MODEL, messages=says("hello"))
    return answer.model_dump()


def chat_stream():
    chunks = client.chat.completions.create(model=MODEL, messages=says("hello"), stream=True)
    return [chunk.model_dump() for chunk in chunks]


def chat_stream_usage():
    chunks = client.chat.completions.create(
        model=MODEL, messages=says("hello"), stream=True, stream_options={"include_usage": True})
    return [chunk.model_dump() for chunk in chunks]


def chat_tools():
    first = client.chat.completions.create(model=MODEL, messages=says("weather"), tools=TOOLS)
    call = first.choices[0].message.tool_calls[0]
    history = says("weather") + [first.choices[0].message.model_dump(exclude_none=True),
                                 {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    second = client.chat.completions.create(model=MODEL, messages=history, tools=TOOLS)
    return [first.model_dump(), second.model_dump()]


def chat_tools_stream():
    with client.chat.completions.stream(model=MODEL, messages=says("weather"), tools=TOOLS) as stream:
        kinds = [event.type for event in stream]
        return [kinds, stream.get_final_completion().model_dump()]


def chat_parse():
    answer = client.chat.completions.parse(model=MODEL, messages=says("json"), response_format=Person)
    return answer.choices[0].message.parsed.model_dump()


def raw(answer):
    return {"status": answer.status_code, **{name: answer.headers.get(name) for name in HEADERS}}


def chat_raw():
    answer = client.chat.completions.with_raw_response.create(model=MODEL, messages=says("hello"))
    return [raw(answer), answer.parse().model_dump()]


def chat_raw_stream():
    with client.chat.completions.with_streaming_response.create(
            model=MODEL, messages=says("hello"), stream=True) as answer:
        return [raw(answer), [line for line in answer.iter_lines()]]


def request_id():
    return client.chat.completions.create(model=MODEL, messages=says("hello"))._request_id


def responses():
    return client.responses.create(model=MODEL, input="hello").model_dump()


def responses_stream():
    return [event.model_dump() for event in client.responses.create(model=MODEL, input="hello", stream=True)]


def responses_helper():
    with client.responses.stream(model=MODEL, input="hello") as stream:
        kinds = [event.type for event in stream]
        return [kinds, stream.get_final_response().output_text]


def responses_tools():
    first = client.responses.create(model=MODEL, input="weather", tools=RESPONSE_TOOLS)
    call = first.output[0]
    history = [{"role": "user", "content": "weather"}, call.model_dump(exclude_none=True),
               {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]
    second = client.responses.create(model=MODEL, input=history, tools=RESPONSE_TOOLS)
    return [first.model_dump(), second.output_text]


def responses_tools_stream():
    events = client.responses.create(model=MODEL, input="weather", tools=RESPONSE_TOOLS, stream=True)
    return [event.model_dump() for event in events]


def responses_parse():
    return client.responses.parse(model=MODEL, input="json", text_format=Person).output_parsed.model_dump()


def responses_raw():
    answer = client.responses.with_raw_response.create(model=MODEL, input="hello")
    return [raw(answer), answer.parse().output_text]


def embeddings():
    return client.embeddings.create(model=MODEL, input="hello").model_dump()


def asynchronous():
    async def several():
        async with AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0, timeout=20) as a:
            answers = await asyncio.gather(*(
                a.chat.completions.create(model=MODEL, messages=says("hello")) for _ in range(8)))
            stream = await a.chat.completions.create(model=MODEL, messages=says("hello"), stream=True)
            text = [c.choices[0].delta.content async for c in stream if c.choices]
            return [[answer.choices[0].message.content for answer in answers], text]
    return asyncio.run(several())


def failing(call, message=False):
    """The class, status, code and headers of the error that a call ends in."""
    try:
        call()
    except openai.APIStatusError as e:
        seen = {"class": type(e).__name__, "status": e.status_code, "code": e.code,
                "retry_after": e.response.headers.get("retry-after"), "has_id": bool(e.request_id)}
        if message:
            seen.update(message=e.message, type=e.type, param=e.param, id=e.request_id)
        return seen
    except openai.APIError as e:
        return {"class": type(e).__name__}
    return "no error"


def both(c, text, message=False, **more):
    """The same failure on both APIs, streaming and not."""
    return [failing(call, message) for call in (
        lambda: c.chat.completions.create(model=MODEL, messages=says(text), **more),
        lambda: list(c.chat.completions.create(model=MODEL, messages=says(text), stream=True, **more)),
        lambda: c.responses.create(model=MODEL, input=text, **more),
        lambda: list(c.responses.create(model=MODEL, input=text, stream=True, **more)))]


def error_401():
    return both(client.with_options(api_key="sk-wrong"), "hello")


def error_404():
    return [failing(lambda: client.chat.completions.create(model="no-such-model", messages=says("hello"))),
            failing(lambda: client.responses.create(model="no-such-model", input="hello", stream=True))]


def error_413():
    return both(client, "x" * (3 * 1024 * 1024))


def error_429():
    return both(client, "429", message=True)


def error_500():
    return both(client, "500", message=True)


def error_context():
    return both(client, "context", message=True)


def retries_429():
    """With its default retries the SDK waits as told and gives up with the same error."""
    seen = []
    patched = client.with_options(max_retries=1)
    patched._sleep_for_retry = lambda **options: seen.append(options["max_retries"] - options["retries_taken"])
    return [failing(lambda: patched.chat.completions.create(model=MODEL, messages=says("429"))), seen]


def timeouts():
    quick = client.with_options(timeout=0.5)
    seen = []
    for n, call in enumerate((
            lambda tag: quick.chat.completions.create(model=MODEL, messages=says(tag)),
            lambda tag: list(quick.chat.completions.create(model=MODEL, messages=says(tag), stream=True)),
            lambda tag: quick.responses.create(model=MODEL, input=tag),
            lambda tag: list(quick.responses.create(model=MODEL, input=tag, stream=True)))):
        tag = f"py-timeout-{n}-{base_url}".replace("/", "_")
        seen.append([failing(lambda: call(f"stall:{tag}")), closed(tag)])
    return seen


def early_close():
    seen = []
    tag = f"py-chat-{base_url}".replace("/", "_")
    stream = client.chat.completions.create(model=MODEL, messages=says(f"endless:{tag}"), stream=True)
    texts = [next(stream).choices[0].delta.content for _ in range(3)]
    stream.close()
    seen.append([texts, closed(tag)])
    tag = f"py-resp-{base_url}".replace("/", "_")
    stream = client.responses.create(model=MODEL, input=f"endless:{tag}", stream=True)
    kinds = [next(stream).type for _ in range(6)]
    stream.close()
    seen.append([kinds, closed(tag)])
    return seen


PROMISES = [chat, chat_stream, chat_stream_usage, chat_tools, chat_tools_stream, chat_parse, chat_raw, chat_raw_stream,
            request_id, responses, responses_stream, responses_helper, responses_tools, responses_tools_stream,
            responses_parse, responses_raw, embeddings, asynchronous, error_401, error_404, error_413, error_429,
            error_500, error_context, retries_429, timeouts, early_close]


def kept(promise):
    try:
        return promise()
    except Exception as e:  # the comparison with the provider itself says what is wrong
        return {"unexpected": f"{type(e).__name__}: {e}"}


print(json.dumps({promise.__name__: kept(promise) for promise in PROMISES}))
