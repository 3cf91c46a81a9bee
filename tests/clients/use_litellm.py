"""`litellm`: an OpenAI-compatible endpoint behind its one interface. Run by `run.py`; needs OCTAVO_URL."""

import asyncio
import os
from importlib.metadata import version

# Its table of prices is asked for on the net otherwise.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import litellm

common = {
    "model": "openai/" + os.environ["OCTAVO_MODEL"],
    "api_base": os.environ["OCTAVO_URL"] + "/v1",
    "api_key": "none",
    "temperature": 0,
    "max_tokens": 16,
    "num_retries": 0,
}
messages = [{"role": "user", "content": "Name the capital of France."}]

whole = litellm.completion(messages=messages, **common)
assert "Paris" in whole.choices[0].message.content
assert whole.usage.completion_tokens > 0
chunks = litellm.completion(messages=messages, stream=True, **common)
assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
answer = asyncio.run(litellm.acompletion(messages=messages, **common))
assert answer.choices[0].message.content == whole.choices[0].message.content
text = litellm.text_completion(
    prompt="Once upon a time", **{**common, "model": "text-completion-" + common["model"]}
)
assert text.choices[0].text
try:
    litellm.completion(messages=messages, **{**common, "temperature": 9})
except litellm.BadRequestError as error:
    said = str(error)
else:
    said = "nothing"
assert "temperature" in said, f"temperature 9: {said}"
print(f"litellm {version('litellm')}: completion, stream, async, text completion, errors")
