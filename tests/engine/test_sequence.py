"""Streams and chats taken in turns do not mix."""

import itertools

import pytest
import tiny_chat
import torch

import kvkeep

TEXT = "".join(chr(97 + i * i % 23) + (". " if i % 29 == 0 else "") for i in range(300))
OTHER = "".join(chr(97 + i * 7 % 19) + ("! " if i % 17 == 0 else "") for i in range(280))


@pytest.fixture(scope="module")
def chat():
    return tiny_chat.sharp()


def turns(text, answer, more):
    roles = ("user", "assistant", "user")
    return [{"role": role, "content": each} for role, each in zip(roles, (text, answer, more), strict=True)]


@pytest.mark.parametrize("spec", ["snapkv", "h2o", "infllm", "emllm"])
def test_streams_taken_in_turns_do_not_mix(chat, spec):
    one = kvkeep.Engine(*chat, spec, 64, prefill_chunk_size=64)
    alone = [one.generate(text, max_new_tokens=12) for text in (TEXT, OTHER)]
    both = [one.stream(text, max_new_tokens=12) for text in (TEXT, OTHER)]
    pieces = list(itertools.zip_longest(*both, fillvalue=""))
    assert ["".join(each) for each in zip(*pieces, strict=True)] == alone
    assert one.answer.text in alone


def test_a_chat_between_two_pieces_leaves_the_stream_alone(chat):
    one, fresh = (kvkeep.Engine(*chat, "snapkv", 4000) for _ in range(2))
    alone = fresh.generate(TEXT, max_new_tokens=12)
    stream = one.stream(TEXT, max_new_tokens=12)
    begun = next(stream)
    asked = turns(TEXT, begun, "And?")  # goes on with what the stream has read
    said = one.chat(asked, max_new_tokens=3)
    mine = one.cache
    assert begun + "".join(stream) == alone
    assert said == fresh.chat(asked, max_new_tokens=3)
    assert one.cache is mine and mine.seen == len(one.token_ids)


def test_a_stream_that_is_over_can_be_gone_on_with(chat):
    one = kvkeep.Engine(*chat, "snapkv", 4000)
    stream = one.stream(TEXT, max_new_tokens=12)
    next(stream)
    assert one.cache.seen and one.answer.prompt_tokens == one.length(TEXT)
    stream.close()
    assert len(one.token_ids) == one.cache.seen


@pytest.mark.parametrize("part", ["lm_head", "model.norm"])
def test_a_chat_that_failed_is_read_again(chat, part):
    """The cache has counted a pass that never came back, so the turn would be fed twice."""
    model, _ = chat
    one, fresh = (kvkeep.Engine(*chat, "snapkv", 4000) for _ in range(2))
    asked = turns(TEXT, one.chat([{"role": "user", "content": TEXT}], max_new_tokens=1), "And?")

    def fail(*_):
        raise torch.OutOfMemoryError("no room")

    hook = model.get_submodule(part).register_forward_pre_hook(fail)
    with pytest.raises(torch.OutOfMemoryError):
        one.chat(asked, max_new_tokens=4)
    hook.remove()
    assert one.chat(asked, max_new_tokens=4) == fresh.chat(asked, max_new_tokens=4)
    assert one.cache.seen == len(one.token_ids)
