"""A transformers Cache whose full-attention layers are compressed; sliding-window and linear ones are not."""

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
    StaticCache,
)

from kvkeep.errors import CacheMisuse, UnsupportedModel
from kvkeep.model.head_shards import head_shards
from kvkeep.model.hf_attention import (
    AttentionCall,
    TaggedLength,
    attention_modules,
    enable,
    is_enabled,
    tag_keys,
    text_config,
)

UNLIMITED = 2**31  # tokens: longer than any model's context
MIXED = (LinearAttentionAndFullAttentionLayer,)  # full attention beside a linear state
_modules: weakref.WeakKeyDictionary[PreTrainedModel, set[int]] = weakref.WeakKeyDictionary()  # ids, of supported models


class CompressedLayer(CacheLayerMixin):
    """What transformers sees of a compressed layer: it counts tokens, and leaves everything else to its cache."""

    is_sliding = False

    def __init__(self, cache: HFCacheAdapter, index: int):
        super().__init__()
        self.owner, self.index = weakref.ref(cache), index  # weak: an unreferenced cache is freed at once

    @property
    def cache(self) -> HFCacheAdapter:
        owner = self.owner()
        assert owner is not None  # a layer is used only through its cache
        return owner

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.cache.check_ready()
        self.cache.awaiting = self
        return tag_keys(key_states, self), value_states

    def check_call(self, module: Any) -> None:
        """Refuse an attention call that is not the one the tagged keys were returned for."""
        awaited = self.cache.awaiting is self
        if awaited:
            self.cache.awaiting = None
        if not self.cache.is_of_model(module):
            raise CacheMisuse(
                f"this cache was made for another {self.cache.name}; a cache serves the model it was made with."
            )
        if not awaited:
            raise UnsupportedModel(
                f"{self.cache.name} calls attention more than once on the same keys; it is not supported."
            )

    def attend(self, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        return self.cache.attend(self.index, call)

    @property
    def seen(self) -> int:
        """Tokens per row, padding included."""
        return self.cache.seen

    @property
    def is_initialized(self) -> bool:
        return self.seen > 0

    @is_initialized.setter
    def is_initialized(self, value: bool) -> None:
        """transformers sets it; the tokens seen tell already."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Storage is allocated with the first tokens."""

    @torch.compiler.disable
    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        if isinstance(query_length, Tensor):  # transformers < 5.4 passed the positions
            query_length = query_length.shape[0]
        self.cache.begin_forward()
        return TaggedLength(self.seen + query_length, self.cache), 0

    def get_seq_length(self) -> int:
        return self.seen

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length

    def offload(self) -> None:
        raise CacheMisuse("a kvkeep cache cannot be offloaded layer by layer; use a smaller budget.")

    prefetch = offload


def _tracked(name: str) -> property:
    def get(layer: UsageTrackedLayer) -> Any:
        layer.used = True
        return layer.__dict__[name]

    return property(get, lambda layer, value: layer.__dict__.update({name: value}))


class UsageTrackedLayer(LinearAttentionLayer):
    """A linear layer that records being used, even by kernels that write in place: its states do not tell."""

    used = True  # since it was last set to False
    conv_states, recurrent_states = _tracked("conv_states"), _tracked("recurrent_states")

    @classmethod
    def like(cls, layer: LinearAttentionLayer) -> UsageTrackedLayer:
        tracked = cls.__new__(cls)
        tracked.__dict__.update(layer.__dict__)
        return tracked


class HFCacheAdapter(TransformersCache):
    """What transformers sees. Subclasses implement `attend`."""

    # not compiled: what a cache holds changes with every forward pass, and no graph may rely on it
    update = torch.compiler.disable(TransformersCache.update)
    get_seq_length = torch.compiler.disable(TransformersCache.get_seq_length)
    get_mask_sizes = torch.compiler.disable(TransformersCache.get_mask_sizes)

    def __init__(self, model: PreTrainedModel):
        model = uncompiled(model)
        check_supported(model)
        enable(model)
        self.model, self.name = model, type(model).__name__
        self.mask: Callable[[], Tensor | None] = lambda: None  # the one made for the current forward pass
        self.config = text_config(model)
        self.guesses = 0  # tokens at the end of the next forward pass that may be taken back
        super().__init__(layers=self.new_layers())
        self.compressed_layers = [i for i, layer in enumerate(self.layers) if isinstance(layer, CompressedLayer)]

    def new_layers(self) -> list:
        self.awaiting: CompressedLayer | None = None  # its keys were returned, and no attention call brought them back
        own = DynamicCache(config=self.config).layers
        for layer in own:
            if not isinstance(layer, (DynamicLayer, LinearAttentionLayer)) or isinstance(layer, MIXED):
                raise UnsupportedModel(
                    f"{self.name} has layers of kind {type(layer).__name__}, which kvkeep does not know."
                )
        if not any(isinstance(layer, DynamicLayer) for layer in own):
            raise UnsupportedModel(f"{self.name} has no attention layers, so there are no keys to keep.")
        layers = [CompressedLayer(self, i) if type(layer) is DynamicLayer else layer for i, layer in enumerate(own)]
        for i, layer in reversed(list(enumerate(layers))):  # after our last layer, only they tell of a cut short pass
            if isinstance(layer, CompressedLayer):
                break
            if type(layer) is LinearAttentionLayer:
                layers[i] = UsageTrackedLayer.like(layer)
        return layers

    @property
    def hf_layers(self) -> list:
        """The layers left to transformers: sliding-window and linear ones."""
        return [layer for layer in self.layers if not isinstance(layer, CompressedLayer)]

    def copy_hf_layers(self, other: HFCacheAdapter) -> None:
        """Copy the state of another cache's `hf_layers`."""
        for source, target in zip(other.layers, self.layers, strict=True):
            if not isinstance(source, CompressedLayer):
                target.__dict__.update(copy.deepcopy(source.__dict__))

    def begin_forward(self) -> None:
        """Called when a forward pass makes its mask, before any of its layers runs."""

    def before_forward(self) -> None:
        """Called before a model's forward pass, if that is intercepted."""

    def after_forward(self, ids: Tensor | None, positions: Tensor | None) -> None:
        """Called after it, with what it was given. ids [rows, q], positions [1 or rows, q]"""

    def attend(self, index: int, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        """The output of one attention call of layer `index`, in the layout of transformers' attention functions."""
        raise NotImplementedError

    def is_of_model(self, module: Any) -> bool:
        """Whether an attention module is one of this cache's model: two models may share a config."""
        if id(module) not in _modules[self.model]:
            _modules[self.model] = set(map(id, self.model.modules()))  # some may have been added since
        return id(module) in _modules[self.model] and getattr(module, "config", self.config) is self.config

    def check_ready(self) -> None:
        """Raise if returned keys did not come back through attention, or would not."""
        if not is_enabled(self.config):
            raise CacheMisuse(
                f"the attention of this {self.name} was changed after the cache was made; make a new cache."
            )
        if self.awaiting is not None:
            raise UnsupportedModel(
                f"keys this cache handed out did not come back through attention: {self.name} changes them on the way "
                "and is not supported, or the cache is used with a model it was not made for."
            )

    @property
    def seen(self) -> int:
        """Tokens per row so far, padding included."""
        raise NotImplementedError


def dynamic_cache(model: Any) -> DynamicCache:
    """transformers' own cache, which keeps every token."""
    return DynamicCache(config=model.config)


def static_cache(model: Any, tokens: int) -> StaticCache:
    """transformers' cache of a fixed length."""
    return StaticCache(config=model.config, max_cache_len=tokens)


def layer_tensors(index: int, layer: Any) -> dict[str, Tensor]:
    """The tensors of a sliding-window layer, by name."""
    if not isinstance(layer, DynamicLayer):
        raise CacheMisuse(f"layer {index} is a {type(layer).__name__}, whose state cannot be saved yet.")
    return {name: getattr(layer, name) for name in ("keys", "values")} if layer.is_initialized else {}


def restore(layer: Any, keys: Tensor, values: Tensor, length: int) -> None:
    """Put a sliding-window layer back into the state it was saved in."""
    layer.lazy_initialization(keys, values)
    layer.keys, layer.values = keys, values
    if hasattr(layer, "cumulative_length"):
        layer.cumulative_length = length


def has_seen(layer: Any, seen: int, completed: bool) -> bool:
    """Whether a layer has seen exactly so many tokens. completed: the last forward pass was committed"""
    if hasattr(layer, "get_seq_length"):
        return layer.get_seq_length() == seen
    return completed and getattr(layer, "used", True)  # a linear layer cannot tell how far a cut short pass came


def uncompiled(model: Any) -> Any:
    """The model that torch.compile was given; any other object as it is."""
    return getattr(model, "_orig_mod", model)


def check_supported(model: PreTrainedModel) -> None:
    """Raise for models whose attention kvkeep cannot observe. The modules of one that passed are not asked again."""
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModel(f"a {type(model).__name__} is not a transformers model; load one with from_pretrained.")
    is_known = model in _modules
    if not is_known and execution_device(model).type == "meta":
        raise UnsupportedModel(
            f"the weights of this {type(model).__name__} are on the meta device, where nothing has a value; load them, "
            "with device_map if they do not fit."
        )
    config = text_config(model)
    reasons = {
        "latent attention (MLA) stores a compressed latent, not keys": getattr(config, "kv_lora_rank", None),
        "layers share keys with each other": getattr(config, "num_kv_shared_layers", None),
        "it has an encoder": getattr(model.config, "is_encoder_decoder", False),
        "its attention is not causal": not getattr(config, "is_causal", True)
        or not (is_known or _all_causal(model, config)),
    }
    for reason, present in reasons.items():
        if present:
            raise UnsupportedModel(f"{type(model).__name__} cannot be compressed: {reason}.")
    if not is_known:
        _modules[model] = set(map(id, model.modules()))


def _all_causal(model: PreTrainedModel, config: Any) -> bool:
    """Whether no module of this config attends to later tokens."""
    return all(getattr(m, "config", None) is not config or getattr(m, "is_causal", True) for m in model.modules())


def fingerprint(model: PreTrainedModel) -> str:
    """Tells one checkpoint from another: the model's class, its configuration, and a sample of its weights."""
    model = uncompiled(model)
    digest = hashlib.sha256(type(model).__name__.encode())
    config = text_config(model).to_diff_dict()
    drop = ("transformers_version", "dtype", "torch_dtype", "_name_or_path", "architectures", "use_cache")
    digest.update(json.dumps({k: v for k, v in config.items() if k not in drop}, sort_keys=True, default=str).encode())
    for name, weight in weights(model):
        flat = weight.detach().flatten()
        sample = flat[:: max(1, len(flat) // 64)].float().cpu()
        digest.update(name.encode() + sample.numpy().tobytes())
    return digest.hexdigest()


def weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Every parameter once, by name; those that accelerate has offloaded are loaded one at a time."""
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    modules = dict(model.named_modules())
    for name, weight in model.named_parameters():
        if not weight.is_meta:
            yield name, weight
        elif name not in tied:  # tied weights are listed twice once offloaded
            owner, _, mine = name.rpartition(".")
            yield name, offloaded_weight(modules[owner], mine)


def offloaded_weight(module: Any, name: str) -> Tensor:
    """The value of a weight or buffer that is elsewhere until the module runs."""
    for hook in _hooks(module):
        if getattr(hook, "weights_map", None) is not None:
            return hook.weights_map[name]
    raise UnsupportedModel(
        f"'{name}' of {type(module).__name__} is on the meta device, where nothing has a value; load it first."
    )


def _hooks(module: Any) -> Iterator[Any]:
    """accelerate's hooks, which load a module's weights when it runs."""
    hook = getattr(module, "_hf_hook", None)
    yield from getattr(hook, "hooks", [hook])


def execution_device(module: Any) -> torch.device:
    """Where a module computes, which is not where its weights are if accelerate loads them."""
    for part in module.modules():
        for hook in _hooks(part):
            if (device := getattr(hook, "execution_device", None)) is not None:
                return torch.device(device)
    return next((t for all_of in (module.parameters(), module.buffers()) for t in all_of), torch.empty(0)).device


def layer_devices(model: PreTrainedModel) -> dict[int, torch.device]:
    """Where each layer computes its keys, for models spread over several devices."""
    found = {}
    for module in model.modules():
        if (index := getattr(module, "layer_idx", None)) is not None and next(module.parameters(), None) is not None:
            found[index] = execution_device(module)
    return found


def single_device(model: PreTrainedModel) -> torch.device | None:
    """Where all weights are and all layers compute; None where that is more than one device."""
    devices = {weight.device for weight in model.parameters()} | set(layer_devices(model).values())
    return devices.pop() if len(devices) == 1 else None


def key_shape(model: PreTrainedModel) -> tuple[int, int]:
    """KV heads of a layer in this process, and the size of a key."""
    config = text_config(model)
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return kv_heads // _processes(model), head_dim


def query_heads(model: PreTrainedModel) -> int:
    """The query heads of a layer, in this process."""
    return text_config(model).num_attention_heads // _processes(model)


def _processes(model: PreTrainedModel) -> int:
    """How many processes share the heads of a layer."""
    shards = head_shards(uncompiled(model))
    return shards.size if shards else 1


def kv_widths(model: PreTrainedModel) -> dict[int, tuple[int, int]]:
    """Layer -> sizes of one token's keys and values in all heads, where the model's modules tell."""
    found: dict[int, tuple[int, int]] = {}
    for module in attention_modules(model):
        keys = getattr(module, "k_proj", None)
        values = getattr(module, "v_proj", None) or keys
        index: Any = module.layer_idx
        widths = getattr(keys, "out_features", 0), getattr(values, "out_features", 0)
        if index is not None and all(widths):
            found[index] = widths
    return found


def attention_cost(model: PreTrainedModel) -> float:
    """The cost of one token per token it attends to, relative to all else the model computes for it."""
    config = text_config(model)
    width = config.num_attention_heads * key_shape(model)[1]
    return 2 * width * config.num_hidden_layers / model.num_parameters()


def vocabulary_size(model: PreTrainedModel) -> int:
    """How many logits a token has."""
    return text_config(model).vocab_size


def context_length(model: PreTrainedModel) -> int:
    """How many tokens the model was trained for."""
    return config_context_length(model.config)


def config_context_length(config: Any) -> int:
    return getattr(config.get_text_config(decoder=True), "max_position_embeddings", None) or UNLIMITED
