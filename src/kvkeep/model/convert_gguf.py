"""Converts a Llama in a GGUF file to a folder that transformers loads: with `gguf` and torch alone.

transformers loads GGUF files too, but only with accelerate installed, and drops their pre-tokenizer. The weights are
bit for bit the same, in a quarter of the time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvkeep.errors import ModelUnavailable

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
SPECIAL = 3  # GGUF's type of control tokens


def convert(gguf: Path, folder: Path) -> Path:
    """Writes config, generation config, tokenizer and float32 weights."""
    from gguf import GGUFReader
    from safetensors.torch import save_file

    reader = GGUFReader(gguf)
    facts = {name: field.contents() for name, field in reader.fields.items()}
    kind = facts["general.architecture"], facts["tokenizer.ggml.pre"]
    if kind != ("llama", "smollm"):
        raise ModelUnavailable(f"{gguf.name} is a {kind[0]} with a {kind[1]} tokenizer; only SmolLM2's are converted.")
    config, generation = _configs(facts, tied=all(each.name != "output.weight" for each in reader.tensors))
    for each in (config, generation, _tokenizer(facts)):
        each.save_pretrained(folder)
    weights = dict(_weight(each, config.head_dim) for each in reader.tensors)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _weight(found: Any, head_dim: int) -> tuple[str, Any]:
    """A tensor with transformers' name. llama.cpp stores the rows of q and k in pairs, transformers in halves."""
    import torch
    from gguf.quants import dequantize

    *block, name, kind = found.name.split(".")
    weight = dequantize(found.data, found.tensor_type)
    if name in ("attn_q", "attn_k"):
        paired = weight.reshape(-1, head_dim // 2, 2, weight.shape[-1])
        weight = paired.swapaxes(1, 2).reshape(weight.shape)
    place = f"model.layers.{block[1]}." if block else ""
    return f"{place}{NAMES[name]}.{kind}", torch.from_numpy(weight.copy())  # a copy: the file's memory is read-only


def _configs(facts: dict[str, Any], tied: bool) -> tuple[Any, Any]:
    """The model's config, and its generation config."""
    from transformers import GenerationConfig, LlamaConfig

    special = {f"{short}_token_id": facts[f"tokenizer.ggml.{long}_token_id"]
               for short, long in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))}  # fmt: skip
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype="float32",
        vocab_size=len(facts["tokenizer.ggml.tokens"]),
        hidden_size=facts["llama.embedding_length"],
        intermediate_size=facts["llama.feed_forward_length"],
        num_hidden_layers=facts["llama.block_count"],
        num_attention_heads=facts["llama.attention.head_count"],
        num_key_value_heads=facts["llama.attention.head_count_kv"],
        head_dim=facts["llama.rope.dimension_count"],
        max_position_embeddings=facts["llama.context_length"],
        rms_norm_eps=facts["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": facts["llama.rope.freq_base"]},
        tie_word_embeddings=tied,
        **special,
    )
    return config, GenerationConfig(**special)


def _tokenizer(facts: dict[str, Any]) -> Any:
    """SmolLM2's own: byte-level BPE, digits separately, vocabulary and chat template of the file."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens, kinds = facts["tokenizer.ggml.tokens"], facts["tokenizer.ggml.token_type"]
    merges = [tuple(pair.split(" ")) for pair in facts["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == SPECIAL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    named = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **{f"{short}_token": tokens[facts[f"tokenizer.ggml.{long}_token_id"]] for short, long in named.items()},
        model_max_length=facts["llama.context_length"],
        clean_up_tokenization_spaces=False,
        chat_template=facts["tokenizer.chat_template"],
    )
