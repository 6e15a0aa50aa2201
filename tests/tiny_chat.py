"""A random two-layer Llama that chats in bytes: no download, made in milliseconds."""

import torch
from conftest import copied
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEMPLATE = "{% for m in messages %}<s>{{ m['content'] }}</s>{% endfor %}{% if add_generation_prompt %}<s>{% endif %}"


def tokenizer(template=TEMPLATE):
    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = Tokenizer(models.BPE(vocab={each: i for i, each in enumerate(["<s>", "</s>", *bytes_])}, merges=[]))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="<s>", eos_token="</s>", pad_token="</s>", chat_template=template
    )


@copied
def model(window=1024, layers=2):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=258, hidden_size=32, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=window, bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def sharp():
    """Both, with heads that attend to something: what is chosen differs."""
    made = model()
    for layer in made.model.layers:
        layer.self_attn.q_proj.weight.data *= 20
    return made, tokenizer()


def retrieving():
    """In float64, where a batch rounds too little to change what is retrieved; and what is retrieved matters."""
    made = model().double()
    for layer in made.model.layers:
        layer.self_attn.q_proj.weight.data *= 20
    return made, tokenizer()


def held_after_steps(engine):
    """A list that the engine's scheduler adds to after every step: the bytes it holds."""
    scheduler, held = engine._driver.scheduler, []
    step = scheduler.step

    def watched():
        step()
        held.append(scheduler.memory.held_bytes)

    scheduler.step = watched
    return held
