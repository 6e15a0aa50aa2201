"""/tokenize and /detokenize, in vLLM's words."""

from __future__ import annotations

from typing import Any

from kvkeep.engine.prompts import check_ids, prompt_ids
from kvkeep.serve.chat_schemas import TokenizeRequest
from kvkeep.serve.job import Job
from kvkeep.serve.schemas import DetokenizeRequest
from kvkeep.serve.server import Server


def tokenize(server: Server, asked: TokenizeRequest) -> dict[str, Any]:
    """A prompt's tokens; those of messages as the chat template puts them."""
    tokenizer = server.engine.tokenizer
    if asked.messages is None:
        assert asked.prompt is not None
        server.check_characters(asked.prompt, Job(server.name, []))
        ids = tokenizer(asked.prompt, add_special_tokens=asked.add_special_tokens, verbose=False).input_ids
    else:
        messages = [message.as_template() for message in asked.messages]
        server.check_characters(messages, Job(server.name, []))
        tools = [tool.function.as_template() for tool in asked.tools or ()]
        ids = prompt_ids(server.engine.config, messages, tools=tools or None).tolist()
    texts = tokenizer.convert_ids_to_tokens(ids) if asked.return_token_strs else None
    return {"count": len(ids), "max_model_len": server.max_model_len, "tokens": ids, "token_strs": texts}


def detokenize(server: Server, asked: DetokenizeRequest) -> dict[str, Any]:
    return {"prompt": server.engine.tokenizer.decode(check_ids(server.engine.model, asked.tokens).tolist())}
