"""An agent as a model through the official Python SDK and the OpenAI Agents SDK; prints one JSON object.

Arguments: base URL, key, name of the agent.
"""

import asyncio
import json
import sys

import openai
from agents import Agent, HostedMCPTool, OpenAIResponsesModel, RunConfig, Runner, set_tracing_disabled
from openai import AsyncOpenAI, OpenAI

base_url, key, agent = sys.argv[1:4]
MODEL = f"agent:{agent}"
client = OpenAI(base_url=base_url, api_key=key, max_retries=0, timeout=30)
set_tracing_disabled(True)


def requests_of(response):
    return [item for item in response.output if item.type == "mcp_approval_request"]


def decisions(response, approve, **more):
    return [{"type": "mcp_approval_response", "approval_request_id": item.id, "approve": approve, **more}
            for item in requests_of(response)]


def shown(response):
    return {"status": response.status, "text": response.output_text, "model": response.model,
            "run": response.metadata["iop_run_id"],
            "asked": [[item.name, item.arguments, item.server_label] for item in requests_of(response)]}


def models():
    return [MODEL in [model.id for model in client.models.list()], client.models.retrieve(MODEL).id]


def chat():
    answer = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "sdk chat"}])
    chunks = list(client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "sdk chat"}], stream=True,
        stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    return [answer.choices[0].message.content, answer.usage.total_tokens, text, chunks[-1].usage.total_tokens]


def responses():
    """Streamed through the SDK's own accumulator, which checks the identity and the order of every event."""
    with client.responses.stream(model=MODEL, input="sdk responses", metadata={"team": "a"}) as stream:
        kinds = [event.type for event in stream]
        first = stream.get_final_response()
    read = client.responses.retrieve(first.id)
    with client.responses.stream(model=MODEL, previous_response_id=first.id,
                                 input=decisions(first, True)) as stream:
        kinds += [event.type for event in stream]
        second = stream.get_final_response()
    items = client.responses.input_items.list(second.id).data
    return {"first": shown(first), "read": shown(read), "second": shown(second),
            "previous": second.previous_response_id == first.id, "team": first.metadata["team"],
            "sent": [[item.type, item.approve] for item in items], "kinds": sorted(set(kinds))}


def denied():
    first = client.responses.create(model=MODEL, input="sdk denied")
    second = client.responses.create(model=MODEL, previous_response_id=first.id,
                                     input=decisions(first, False, reason="not today"))
    return [shown(first), shown(second)]


def failed():
    try:
        client.responses.create(model="agent:nobody", input="x")
    except openai.NotFoundError as error:
        return [error.status_code, error.code, error.param]
    return None


def hosted(approval, approve=None):
    """The agent's own tools stand in the client's declaration under the agent's name."""
    config = {"type": "mcp", "server_label": agent, "server_url": base_url, "require_approval": "always"}
    tool = HostedMCPTool(tool_config=config, on_approval_request=approve) if approve else HostedMCPTool(
        tool_config=config)
    model = OpenAIResponsesModel(model=MODEL, openai_client=AsyncOpenAI(
        base_url=base_url, api_key=key, max_retries=0, timeout=30))
    return Agent(name=approval, model=model, tools=[tool])


CONFIG = RunConfig(tracing_disabled=True)


async def by_callback():
    """The Agents SDK asks its callback and goes on by itself."""
    asked = []

    def approve(request):
        asked.append([request.data.name, request.data.arguments])
        return {"approve": True}

    result = await Runner.run(hosted("callback", approve), "agents callback", run_config=CONFIG,
                              auto_previous_response_id=True)
    return {"asked": asked, "output": result.final_output}


async def by_interruption():
    """Without a callback the run is interrupted; a person approves, and it is resumed, streamed."""
    person = hosted("interruption")
    result = await Runner.run(person, "agents interruption", run_config=CONFIG, auto_previous_response_id=True)
    asked = [item.name for item in result.interruptions]
    state = result.to_state()
    for item in result.interruptions:
        state.approve(item)
    streamed = Runner.run_streamed(person, state, run_config=CONFIG, auto_previous_response_id=True)
    kinds = [event.data.type async for event in streamed.stream_events() if event.type == "raw_response_event"]
    return {"asked": asked, "output": streamed.final_output, "completed": kinds.count("response.completed")}


seen = {test.__name__: test() for test in (models, chat, responses, denied, failed)}
for test in (by_callback, by_interruption):
    seen[test.__name__] = asyncio.run(test())
print(json.dumps(seen))
