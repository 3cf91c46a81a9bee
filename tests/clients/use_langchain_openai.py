"""`langchain-openai`: chat, streams, batches of calls, async, text completions. Run by `run.py`; needs OCTAVO_URL."""

import asyncio
import os
from importlib.metadata import version

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI, OpenAI

url = os.environ["OCTAVO_URL"] + "/v1"
model = os.environ["OCTAVO_MODEL"]
chat = ChatOpenAI(base_url=url, api_key="none", model=model, temperature=0, max_tokens=16, max_retries=0)
messages = [SystemMessage("You are brief."), HumanMessage("Name the capital of France.")]

whole = chat.invoke(messages)
assert "Paris" in whole.content
assert whole.usage_metadata["output_tokens"] > 0
assert "".join(chunk.content for chunk in chat.stream(messages)) == whole.content
assert [answer.content for answer in chat.batch([messages] * 3)] == [whole.content] * 3
assert asyncio.run(chat.ainvoke(messages)).content == whole.content

chain = ChatPromptTemplate.from_messages([("user", "Name the capital of {country}.")]) | chat
assert "Paris" in chain.invoke({"country": "France"}).content

text = OpenAI(base_url=url, api_key="none", model=model, temperature=0, max_tokens=8)
assert text.invoke("Once upon a time")
assert "".join(text.stream("Once upon a time")) == text.invoke("Once upon a time")
print(
    f"langchain-openai {version('langchain-openai')}: invoke, stream, batch, async, a chain, text completions"
)
