"""`openai`, Python: every call of it that Octavo serves. Run by `run.py`; needs OCTAVO_URL."""

import io
import json
import os
import time

import openai

client = openai.OpenAI(base_url=os.environ["OCTAVO_URL"] + "/v1", api_key="none", max_retries=0)
model = client.models.list().data[0].id
assert client.models.retrieve(model).id == model

# Chat: whole, streamed, with log-probabilities, several choices.
messages = [{"role": "user", "content": "Name the capital of France."}]
greedy = {"model": model, "temperature": 0, "max_tokens": 16}
whole = client.chat.completions.create(messages=messages, logprobs=True, top_logprobs=2, **greedy)
assert "Paris" in whole.choices[0].message.content
assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens
stream = client.chat.completions.create(
    messages=messages, stream=True, stream_options={"include_usage": True}, **greedy
)
chunks = list(stream)
text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
assert text == whole.choices[0].message.content
assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
several = client.chat.completions.create(model=model, messages=messages, n=2, seed=7, max_tokens=8)
assert [choice.index for choice in several.choices] == [0, 1]

# Text completions, with what OpenAI's own API has not.
done = client.completions.create(prompt="Once upon a time", extra_body={"min_p": 0.1, "top_k": 5}, **greedy)
parts = client.completions.create(prompt="Once upon a time", stream=True, extra_body={"min_p": 0.1}, **greedy)
assert "".join(part.choices[0].text for part in parts) == done.choices[0].text

# Responses.
asked = {"model": model, "input": "Name the capital of France.", "temperature": 0, "max_output_tokens": 64}
reply = client.responses.create(**asked)
assert "Paris" in reply.output_text
with client.responses.stream(**asked) as events:
    for _ in events:
        pass
    assert events.get_final_response().output_text == reply.output_text

# Mistakes are typed.
for wrong, kind, param in (
    ({"temperature": 9}, openai.BadRequestError, "temperature"),
    ({"model": "no-such-model"}, openai.NotFoundError, "model"),
):
    caught = None
    try:
        client.chat.completions.create(**{"model": model, "messages": messages, **wrong})
    except kind as error:
        caught = error
    assert caught is not None, f"{wrong} was accepted"
    assert caught.param == param

# A batch.
lines = [
    {
        "custom_id": str(number),
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"messages": [{"role": "user", "content": f"Count to {number}."}], "max_tokens": 4},
    }
    for number in range(3)
]
content = io.BytesIO("".join(json.dumps(line) + "\n" for line in lines).encode())
file = client.files.create(file=("in.jsonl", content), purpose="batch")
batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
deadline = time.monotonic() + 120
while batch.status not in ("completed", "failed", "expired", "cancelled"):
    assert time.monotonic() < deadline, batch.status
    time.sleep(0.1)
    batch = client.batches.retrieve(batch.id)
assert batch.status == "completed", batch
answers = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
assert [answer["custom_id"] for answer in answers] == ["0", "1", "2"]
assert batch.id in [one.id for one in client.batches.list()]
client.files.delete(batch.output_file_id)
print(f"openai {openai.__version__}: chat, completions, responses, streams, errors, files and a batch")
