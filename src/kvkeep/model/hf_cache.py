"""A transformers Cache whose full-attention layers are ours; sliding-window and linear layers stay stock."""

from __future__ import annotations

import copy
import hashlib
import json
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache as TransformersCache
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from kvkeep.errors import CacheMisuse, UnsupportedModel
from kvkeep.model.hf_attention import Handover, OurLength, enable, is_enabled, mark
from kvkeep.model.hf_layers import Watched

ENDLESS = 2**31  # tokens of a window that no model has
MIXED = (LinearAttentionAndFullAttentionLayer,)  # attention that would grow beside a linear state, unseen


class OwnedLayer(CacheLayerMixin):
    """The face a layer of ours shows transformers: it counts the tokens seen, and hands everything else over."""

    is_sliding = False

    def __init__(self, cache: AdaptedCache, index: int):
        super().__init__()
        self.owner, self.index = weakref.ref(cache), index  # weak: a cache nobody holds is freed at once
        self.waiting = False  # keys were returned, but no attention call has brought them back yet

    @property
    def cache(self) -> AdaptedCache:
        owner = self.owner()
        assert owner is not None  # whoever uses a layer holds its cache
        return owner

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.cache.check_ready(self)
        self.waiting = True
        return mark(key_states, self), value_states

    def check(self, module: Any) -> None:
        """Our keys are back: refuse an attention call that is not the one they were meant for."""
        waiting, self.waiting = self.waiting, False
        if not self.cache.is_of(module):
            raise CacheMisuse(
                f"this cache was made for another {self.cache.name}; a cache serves the model it was made with."
            )
        if not waiting:
            raise UnsupportedModel(
                f"{self.cache.name} calls attention more than once on the same keys; it is not supported."
            )

    def attend(self, new: Handover) -> tuple[Tensor, Tensor | None]:
        return self.cache.attend(self.index, new)

    @property
    def seen(self) -> int:
        """Tokens per row, padding included: where the next token stands."""
        return self.cache.seen

    @property
    def is_initialized(self) -> bool:
        return self.seen > 0

    @is_initialized.setter
    def is_initialized(self, value: bool) -> None:
        """transformers sets it; the tokens seen say it already."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Storage is made when there is something to store."""

    @torch.compiler.disable
    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        if isinstance(query_length, Tensor):  # transformers < 5.4 passed the positions
            query_length = query_length.shape[0]
        self.cache.begin()
        return OurLength(self.seen + query_length, self.cache), 0

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

    # a compiled model calls these as they are: what a cache holds changes with every pass, and no graph may rely on it
    update = torch.compiler.disable(TransformersCache.update)
    get_seq_length = torch.compiler.disable(TransformersCache.get_seq_length)
    get_mask_sizes = torch.compiler.disable(TransformersCache.get_mask_sizes)

    def __init__(self, model: PreTrainedModel):
        model = uncompiled(model)
        refuse_unobservable(model)
        enable(model)
        self.model, self.name = model, type(model).__name__
        self.mask: Callable[[], Tensor | None] = lambda: None  # the one our mask function made for the pass under way
        self.config = model.config.get_text_config(decoder=True)
        self.parts: set[int] = set()  # ids of the model's modules, as far as they were looked up
        super().__init__(layers=self.fresh_layers())
        self.owned = [i for i, layer in enumerate(self.layers) if isinstance(layer, OwnedLayer)]

    def fresh_layers(self) -> list:
        stock = DynamicCache(config=self.config).layers
        for layer in stock:
            if not isinstance(layer, (DynamicLayer, LinearAttentionLayer)) or isinstance(layer, MIXED):
                raise UnsupportedModel(
                    f"{self.name} has layers of kind {type(layer).__name__}, which kvkeep does not know."
                )
        if not any(isinstance(layer, DynamicLayer) for layer in stock):
            raise UnsupportedModel(f"{self.name} has no attention layers, so there are no keys to keep.")
        layers = [OwnedLayer(self, i) if type(layer) is DynamicLayer else layer for i, layer in enumerate(stock)]
        for i in reversed(range(len(layers))):  # behind our last layer, nothing else tells that a pass was cut short
            if isinstance(layers[i], OwnedLayer):
                break
            if type(layers[i]) is LinearAttentionLayer:
                layers[i] = Watched.like(layers[i])
        return layers

    @property
    def stock_layers(self) -> list:
        """Those left to transformers."""
        return [layer for layer in self.layers if not isinstance(layer, OwnedLayer)]

    def copy_stock(self, other: AdaptedCache) -> None:
        """Take over what another cache's layers that are left to transformers have read."""
        for theirs, mine in zip(other.layers, self.layers, strict=True):
            if not isinstance(theirs, OwnedLayer):
                mine.__dict__.update(copy.deepcopy(theirs.__dict__))

    def begin(self) -> None:
        """A forward pass makes its mask; none of its layers has run yet."""

    def attend(self, index: int, new: Handover) -> tuple[Tensor, Tensor | None]:
        """The output of one attention call of layer `index`, in the form attention functions return it."""
        raise NotImplementedError

    def is_of(self, module: Any) -> bool:
        """Whether an attention module is one of our model's: two models may share a config."""
        if id(module) not in self.parts:
            self.parts = {id(part) for part in self.model.modules()}  # others may have come since
        return id(module) in self.parts and getattr(module, "config", self.config) is self.config

    def check_ready(self, layer: OwnedLayer) -> None:
        """Refuse to go on if keys handed out did not come back through attention, or would not."""
        if not is_enabled(self.config):
            raise CacheMisuse(
                f"the attention of this {self.name} was changed after the cache was made; make a new cache."
            )
        if any(self.layers[i].waiting for i in self.owned):
            raise UnsupportedModel(
                f"keys this cache handed out did not come back through attention: {self.name} changes them on the way "
                "and is not supported, or the cache is used with a model it was not made for."
            )

    @property
    def seen(self) -> int:
        """Tokens per row so far, padding included."""
        raise NotImplementedError


def uncompiled(model: Any) -> Any:
    """The model that torch.compile was given; whatever else is returned as it is."""
    return getattr(model, "_orig_mod", model)


def refuse_unobservable(model: PreTrainedModel) -> None:
    """Name the models whose attention is not what our scorers take it for."""
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModel(f"a {type(model).__name__} is not a transformers model; load one with from_pretrained.")
    if runs_on(model).type == "meta":
        raise UnsupportedModel(
            f"the weights of this {type(model).__name__} are on the meta device, where nothing has a value; load them, "
            "with device_map if they do not fit."
        )
    config = model.config.get_text_config(decoder=True)
    reasons = {
        "latent attention (MLA) stores a compressed latent, not keys": getattr(config, "kv_lora_rank", None),
        "layers share keys with each other": getattr(config, "num_kv_shared_layers", None),
        "it has an encoder": getattr(model.config, "is_encoder_decoder", False),
        "its attention is not causal": not getattr(config, "is_causal", True)
        or any(getattr(m, "config", None) is config and not getattr(m, "is_causal", True) for m in model.modules()),
    }
    for reason, present in reasons.items():
        if present:
            raise UnsupportedModel(f"{type(model).__name__} cannot be compressed: {reason}.")


def fingerprint(model: PreTrainedModel) -> str:
    """Tells one checkpoint from another: the model's class, its configuration, and a sample of its weights."""
    model = uncompiled(model)
    digest = hashlib.sha256(type(model).__name__.encode())
    config = model.config.get_text_config(decoder=True).to_diff_dict()
    drop = ("transformers_version", "dtype", "torch_dtype", "_name_or_path", "architectures", "use_cache")
    digest.update(json.dumps({k: v for k, v in config.items() if k not in drop}, sort_keys=True, default=str).encode())
    for name, weight in weights(model):
        flat = weight.detach().flatten()
        sample = flat[:: max(1, len(flat) // 64)].float().cpu()
        digest.update(name.encode() + sample.numpy().tobytes())
    return digest.hexdigest()


def weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Every parameter once, by name; those that accelerate has put away are brought one at a time."""
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    modules = dict(model.named_modules())
    for name, weight in model.named_parameters():
        if not weight.is_meta:
            yield name, weight
        elif name not in tied:  # put away, it was made two
            owner, _, mine = name.rpartition(".")
            yield name, put_away(modules[owner], mine)


def put_away(module: Any, name: str) -> Tensor:
    """The value of a weight or buffer that is elsewhere until the module runs."""
    for hook in _hooks(module):
        if getattr(hook, "weights_map", None) is not None:
            return hook.weights_map[name]
    raise UnsupportedModel(
        f"'{name}' of {type(module).__name__} is on the meta device, where nothing has a value; load it first."
    )


def _hooks(module: Any) -> Iterator[Any]:
    """accelerate's, which bring a module's weights when it runs."""
    hook = getattr(module, "_hf_hook", None)
    yield from getattr(hook, "hooks", [hook])


def runs_on(module: Any) -> torch.device:
    """Where a module computes, which is not where its weights are if accelerate brings them."""
    for part in module.modules():
        for hook in _hooks(part):
            if (device := getattr(hook, "execution_device", None)) is not None:
                return torch.device(device)
    return next((t for all_of in (module.parameters(), module.buffers()) for t in all_of), torch.empty(0)).device


def devices(model: PreTrainedModel) -> dict[int, torch.device]:
    """Where each layer's keys are made, for models spread over several devices."""
    found = {}
    for module in model.modules():
        if (index := getattr(module, "layer_idx", None)) is not None and next(module.parameters(), None) is not None:
            found[index] = runs_on(module)
    return found


def key_shape(model: PreTrainedModel) -> tuple[int, int]:
    """Key heads of a layer, and the size of a key."""
    config = model.config.get_text_config(decoder=True)
    queries = config.num_attention_heads
    return getattr(config, "num_key_value_heads", None) or queries, getattr(
        config, "head_dim", None
    ) or config.hidden_size // queries


def key_widths(model: PreTrainedModel) -> dict[int, tuple[int, int]]:
    """Layer -> how many numbers the keys, and the values, of one token have in all heads, where its code tells."""
    made = ((getattr(part, "layer_idx", None), *(getattr(part, name, None) for name in ("k_proj", "v_proj")))
            for part in model.modules())  # fmt: skip
    widths = ((i, *(getattr(each, "out_features", None) for each in (k, v or k))) for i, k, v in made)
    return {i: (keys, values) for i, keys, values in widths if i is not None and keys and values}


def trained_window(model: PreTrainedModel) -> int:
    """How many tokens the model was made for."""
    return window_of(model.config)


def window_of(config: Any) -> int:
    return getattr(config.get_text_config(decoder=True), "max_position_embeddings", None) or ENDLESS
