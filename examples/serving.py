"""Starts `kvkeep serve` with the default model, asks it with OpenAI's client, and stops it: python examples/serving.py

Needs kvkeep[serve] and openai. The guide: docs/guides/serving.md
"""

import subprocess
import sys
from pathlib import Path

import openai

SERVE = [sys.executable, "-m", "kvkeep", "serve", "--budget", "128", "--port", "0"]  # 0: any free port
QUESTION = "What is the serial number of the replacement lamp motor?"


def main():
    with subprocess.Popen(SERVE, stderr=subprocess.PIPE, text=True) as server:
        try:
            ready = next(line for line in server.stderr if " at http" in line)  # "… at http://127.0.0.1:41234/v1"
            ask(openai.OpenAI(base_url=ready.split(" at ")[1].strip(), api_key="any"))
        finally:
            server.terminate()  # answers under way may end


def ask(client):
    model = client.models.list().data[0].id
    text = Path(__file__).with_name("lighthouse.txt").read_text().split("\n\n")[8]

    print("A chat, piece by piece:")
    messages = [{"role": "user", "content": "What is a lighthouse for?"}]
    for event in client.chat.completions.create(model=model, messages=messages, max_tokens=12, stream=True):
        print(event.choices[0].delta.content or "", end="", flush=True)

    print("\n\nA text that is prefilled once, and a question about it:")
    context = client.post("/contexts", body={"model": model, "text": text}, cast_to=object)
    how = {"max_tokens": 18, "temperature": 0, "extra_body": {"kvkeep": {"context": context["id"]}}}
    answer = client.chat.completions.create(model=model, messages=[{"role": "user", "content": QUESTION}], **how)
    print(answer.choices[0].message.content)
    print(answer.usage.model_dump_json(exclude_none=True))


if __name__ == "__main__":
    main()
