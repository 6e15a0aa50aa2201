"""A transformers Cache whose full-attention layers are ours; sliding-window and linear layers stay stock."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache as TransformersCache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from kvkeep.errors import CacheMisuse, UnsupportedModel
from kvkeep.model.attention import Handover, OurLength, enable, is_enabled, mark


class OwnedLayer(CacheLayerMixin):
    """The face a layer of ours shows transformers: it counts the tokens seen, and hands everything else over."""

    is_sliding = False

    def __init__(self, cache: AdaptedCache, index: int):
        super().__init__()
        self.cache, self.index = cache, index
        self.seen = 0  # tokens per row, padding included: where the next token stands
        self.waiting = False  # keys were returned, but no attention call has brought them back yet

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.cache.check_ready(self)
        self.waiting = True
        return mark(key_states, self), value_states

    def attend(self, new: Handover) -> tuple[Tensor, Tensor | None]:
        self.waiting = False
        result = self.cache.attend(self.index, new)
        self.seen += new.query.shape[2]
        self.is_initialized = True
        return result

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Storage is made when there is something to store."""

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        if isinstance(query_length, Tensor):  # transformers < 5.4 passed the positions
            query_length = query_length.shape[0]
        return OurLength(self.seen + query_length), 0

    def get_seq_length(self) -> int:
        return self.seen

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length

    def offload(self) -> None:
        raise CacheMisuse("a kvkeep cache cannot be offloaded layer by layer; use a smaller budget.")

    prefetch = offload


class AdaptedCache(TransformersCache):
    """What transformers sees. Subclasses say what happens in `attend`."""

    def __init__(self, model: PreTrainedModel):
        refuse_unobservable(model)
        enable(model)
        self.model = model
        super().__init__(layers=self.fresh_layers())
        self.owned = [i for i, layer in enumerate(self.layers) if isinstance(layer, OwnedLayer)]

    def fresh_layers(self) -> list:
        stock = DynamicCache(config=self.model.config.get_text_config(decoder=True)).layers
        return [OwnedLayer(self, i) if type(layer) is DynamicLayer else layer for i, layer in enumerate(stock)]

    def attend(self, index: int, new: Handover) -> tuple[Tensor, Tensor | None]:
        """The output of one attention call of layer `index`, in the form attention functions return it."""
        raise NotImplementedError

    def check_ready(self, layer: OwnedLayer) -> None:
        """Refuse to go on if keys handed out did not come back through attention, or would not."""
        name = type(self.model).__name__
        if not is_enabled(self.model.config.get_text_config(decoder=True)):
            raise CacheMisuse(f"the attention of this {name} was changed after the cache was made; make a new cache.")
        if any(self.layers[i].waiting for i in self.owned):
            raise UnsupportedModel(f"{name} changes keys between its cache and its attention, so they cannot be observed; it is not supported.")

    @property
    def seen(self) -> int:
        """Tokens per row so far, padding included."""
        return self.layers[self.owned[0]].seen if self.owned else self.get_seq_length()


def refuse_unobservable(model: PreTrainedModel) -> None:
    """Name the models whose attention is not what our scorers take it for."""
    config = model.config.get_text_config(decoder=True)
    reasons = {
        "latent attention (MLA) stores a compressed latent, not keys": getattr(config, "kv_lora_rank", None),
        "layers share keys with each other": getattr(config, "num_kv_shared_layers", None),
        "it has an encoder": getattr(model.config, "is_encoder_decoder", False),
        "its attention is not causal": not getattr(config, "is_causal", True),
    }
    for reason, present in reasons.items():
        if present:
            raise UnsupportedModel(f"{type(model).__name__} cannot be compressed: {reason}.")


def fingerprint(model: PreTrainedModel) -> str:
    """Tells one checkpoint from another: the model's class, its configuration, and a sample of its weights."""
    digest = hashlib.sha256(type(model).__name__.encode())
    config = model.config.get_text_config(decoder=True).to_diff_dict()
    drop = ("transformers_version", "dtype", "torch_dtype", "_name_or_path", "architectures")
    digest.update(json.dumps({k: v for k, v in config.items() if k not in drop}, sort_keys=True, default=str).encode())
    for name, weight in model.named_parameters():
        sample = weight.detach().flatten()[:64].float().cpu()
        digest.update(name.encode() + sample.numpy().tobytes())
    return digest.hexdigest()
