"""Models that are good for a start: the default one, and others on the hub."""

from __future__ import annotations

from dataclasses import dataclass

from kvkeep.model.default_model import CONTEXT_LENGTH, DEFAULT, default_folder


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
