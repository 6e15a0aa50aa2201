"""A row of the pool has all the room its layers and heads need."""

import pytest
import tiny_chat
from conftest import make_llama

import kvkeep

TEXT = "".join(chr(97 + i * i % 23) + (". " if i % 29 == 0 else "") for i in range(300))
OTHER = "".join(chr(97 + i * 7 % 19) + ("! " if i % 17 == 0 else "") for i in range(280))


@pytest.mark.parametrize("spec", ["cake", "snapkv+cake", "snapkv+entropy", "snapkv+cake+adakv", "pyramidkv"])
@pytest.mark.parametrize("storage", [None, "int8"])
def test_a_layer_may_get_far_more_than_its_share(spec, storage):
    model = make_llama(vocab_size=258, num_hidden_layers=8, eos_token_id=1)
    for layer in model.model.layers[1:]:
        layer.self_attn.q_proj.weight.data /= 5
    one = kvkeep.Engine(model, tiny_chat.tokenizer(), spec, 40, storage=storage)
    alone = [one.generate(text, max_new_tokens=4) for text in (TEXT, OTHER)]
    if spec == "cake":
        assert max(max(heads[0]) for heads in one.cache.report().tokens) > 2 * 40 + 4
    assert one.generate([TEXT, OTHER, TEXT], max_new_tokens=4) == [*alone, alone[0]]
