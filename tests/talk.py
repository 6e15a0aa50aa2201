"""Conversations with an engine, turn by turn."""

TALK = ["".join(chr(97 + i * i * (k + 2) % 23) for i in range(90 + 31 * k)) for k in range(4)]
SHORT = {"max_new_tokens": 6}


def say(*texts):
    return [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]


def answered(one, messages, **how):
    handle = one.submit(messages, **{**SHORT, **how})
    handle.result()
    return handle.request


def turns(one, texts=TALK[:3], **how):
    """Every turn of a chat, its answers included. -> the messages up to each turn, and what became of it"""
    said, found = [], []
    for text in texts:
        said = [*said, text]
        request = answered(one, say(*said), **how)
        found.append((list(said), request))
        said.append(request.text)
    return found
