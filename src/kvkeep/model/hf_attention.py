"""Attention and mask functions, registered beside transformers' own, that pass queries and keys to our caches.

A `CompressedLayer` returns just the new keys, tagged. The registered attention function sees the tag and gives the call
to the cache; any other call goes to the function the model was using, with its own mask, bit for bit.
A compiled model breaks its graph for tagged calls, and for nothing else.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface, PreTrainedModel

from kvkeep.errors import CacheMisuse, UnsupportedModel
from kvkeep.kernels.dispatch import attention_and_lse, chunk_attention
from kvkeep.types import Softmax

PREFIX = "kvkeep_"
IMPLEMENTATIONS = ("sdpa", "eager")


class TaggedLength(int):
    """The length of a `CompressedLayer`. transformers passes it to the mask function, which so knows the cache."""

    cache: Any

    def __new__(cls, length: int, cache: Any) -> TaggedLength:
        tagged = super().__new__(cls, length)
        tagged.cache = cache
        return tagged


class TaggedName(str):
    """The attention implementation in an enabled model's config; a copy or a pickle of it is transformers' own name.

    So a used model that is copied, pickled or sent elsewhere is what it was, and needs no kvkeep there.
    """

    def __reduce_ex__(self, protocol: Any) -> Any:
        return str, (self.removeprefix(PREFIX),)


@dataclass(frozen=True)
class AttentionCall:
    """One attention call of a `CompressedLayer`. query [rows, heads, q, dim], key and value [rows, kv_heads, q, dim]"""

    query: Tensor
    key: Tensor
    value: Tensor
    padding: Tensor | None  # [rows, seen + q] bool, False for padding; None where there is none
    hf_attention: Callable[..., tuple[Tensor, Tensor | None]]  # the model's own: among the new tokens, or over others
    scale: float
    softcap: float | None
    sink_logits: Tensor | None
    is_sdpa: bool = False  # `hf_attention` is torch's, and no other cache shares its output
    memo: dict[Any, Tensor] | None = None  # results shared by caches that share a prefill
    mask: Tensor | None = None  # of the new tokens, as `hf_attention` takes it

    def tokens(self, span: slice) -> AttentionCall:
        """The call of some of the tokens alone."""
        query, key, value = (t[:, :, span] for t in (self.query, self.key, self.value))
        mask = None if self.mask is None or self.mask.ndim == 2 else self.mask[..., span, span]

        def hf_attention(query=query, key=key, value=value, mask=mask):
            return self.hf_attention(query, key, value, mask)

        return replace(self, query=query, key=key, value=value, mask=mask, hf_attention=hf_attention)

    def split(self, guesses: int) -> tuple[AttentionCall, AttentionCall]:
        """The calls of the known tokens and of the guesses behind them, which are never padding."""
        known, guessed = self.tokens(slice(None, -guesses)), self.tokens(slice(-guesses, None))
        padding = None if self.padding is None else self.padding[:, :-guesses]
        return replace(known, padding=padding), replace(guessed, padding=None)

    @property
    def how(self) -> Softmax:
        return self.scale, self.softcap, self.sink_logits

    def to_hf_output(self, output: Tensor) -> tuple[Tensor, Tensor | None]:
        """An output [rows, heads, q, dim] in the layout of transformers' attention functions."""
        return output.transpose(1, 2).contiguous(), None


def attention_modules(model: PreTrainedModel) -> list[nn.Module]:
    return [module for layer in model.modules() for module in layer.children() if hasattr(module, "layer_idx")]


def attend_with_lse(call: AttentionCall) -> tuple[tuple[Tensor, Tensor | None], Tensor] | None:
    """The model's own attention among new tokens, and each query's log-sum-exp [rows, heads, q].

    None where torch would not use one of its kernels that return it.
    """
    supported = call.is_sdpa and call.softcap is None and call.sink_logits is None and call.padding is None
    if not supported or call.query.shape[-1] > 256 or call.query.shape[-1] % 8:
        return None
    found = attention_and_lse(call.query, call.key, call.value, call.scale)
    return found and (call.to_hf_output(found[0]), found[1])


def text_config(model: PreTrainedModel) -> Any:
    """The config of the model's language part."""
    return model.config.get_text_config(decoder=True)


def enable(model: PreTrainedModel) -> None:
    """Register this model's attention with our caches. Calls without a kvkeep cache behave exactly as before."""
    config = text_config(model)
    implementation = config._attn_implementation
    if is_enabled(config):
        return
    name = type(model).__name__
    if implementation not in IMPLEMENTATIONS:
        raise UnsupportedModel(
            f"{name} uses attention '{implementation}'; load it with attn_implementation='sdpa' or 'eager'."
        )
    if not model._can_set_attn_implementation():
        raise UnsupportedModel(
            f"{name} does not use transformers' attention interface, so its queries cannot be observed."
        )
    owner = next((key for key in model.config.sub_configs if getattr(model.config, key, None) is config), "")
    model.set_attn_implementation({owner: PREFIX + implementation})
    config._attn_implementation_internal = TaggedName(PREFIX + implementation)


def is_enabled(config: Any) -> bool:
    return str(config._attn_implementation).startswith(PREFIX)


def tag_keys(keys: Tensor, layer: Any) -> Tensor:
    """A view of the keys that carries the cache layer they came from."""
    view: Any = keys.view_as(keys)
    view._kvkeep_layer = layer
    return view


def _attention(implementation: str) -> Callable:
    def kvkeep_attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
    ):
        layer = getattr(key, "_kvkeep_layer", None)
        if layer is None:
            return hf_attention_function(implementation, module)(module, query, key, value, attention_mask, **kwargs)
        return call_cache(layer, module, query, key, value, attention_mask, kwargs)

    @torch.compiler.disable
    def call_cache(layer: Any, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, kwargs: dict):
        def hf_attention(query=query, key=key, value=value, mask=mask):
            plain = implementation == "sdpa" and _is_plain_prefill(module, query, key, mask, kwargs)
            if plain and chunk_attention.uses_kernel(query, key, value, scale):
                return chunk_attention(query, key, value, scale).transpose(1, 2).contiguous(), None
            return hf_attention_function(implementation, module)(module, query, key, value, mask, **kwargs)

        scale = kwargs.get("scaling") or getattr(module, "scaling", None) or query.shape[-1] ** -0.5
        layer.check_call(module)
        if kwargs.get("dropout"):
            raise CacheMisuse("a kvkeep cache is for inference; call model.eval() first.")
        capped = implementation == "eager"  # sdpa knows neither soft-capping nor sink logits, here or without kvkeep
        return layer.attend(
            AttentionCall(
                query, key, value, _padding(mask, layer.cache), hf_attention, scale,
                kwargs.get("softcap") if capped else None, kwargs.get("s_aux") if capped else None, not capped,
                mask=mask,
            )
        )  # fmt: skip

    return kvkeep_attention


def _is_plain_prefill(module: nn.Module, query: Tensor, key: Tensor, mask: Any, options: dict[str, Any]) -> bool:
    """Causal attention of a whole text, without a mask."""
    causal = options.get("is_causal", getattr(module, "is_causal", True)) is not False
    return causal and mask is None and options.get("position_bias") is None and query.shape[2] == key.shape[2] > 1


def hf_attention_function(implementation: str, module: nn.Module) -> Callable:
    """The attention function the model would use without kvkeep; eager ones live beside the model's own code."""
    if implementation != "eager":
        return ALL_ATTENTION_FUNCTIONS[implementation]
    for kind in type(module).__mro__:
        if eager := getattr(sys.modules[kind.__module__], "eager_attention_forward", None):
            return eager
    raise UnsupportedModel(
        f"{type(module).__name__} has no eager_attention_forward; load the model with sdpa attention."
    )


def _mask(implementation: str) -> Callable:
    def kvkeep_mask(*args: Any, **kwargs: Any) -> Tensor | None:
        if isinstance(kwargs.get("kv_length"), TaggedLength):
            return compressed_mask(*args, **kwargs)
        return ALL_MASK_ATTENTION_FUNCTIONS[implementation](*args, **kwargs)

    @torch.compiler.disable
    def compressed_mask(*args: Any, **kwargs: Any) -> Tensor | None:
        padding = kwargs.get("attention_mask")
        if padding is not None and bool(padding.all()):
            padding = None
        if kwargs["kv_length"] > kwargs["q_length"]:  # with cached tokens, the cache masks by itself
            return padding
        mask = ALL_MASK_ATTENTION_FUNCTIONS[implementation](*args, **kwargs)
        if mask is not None:
            mask._kvkeep_padding = padding
            kwargs["kv_length"].cache.mask = weakref.ref(mask)  # lives as long as the forward pass it was made for
        return mask

    return kvkeep_mask


def _padding(mask: Tensor | None, cache: Any) -> Tensor | None:
    """The 2-D padding mask behind what `compressed_mask` returned, or behind a copy of it on another device."""
    if mask is None or mask.ndim == 2:
        return mask
    made: Any = mask if hasattr(mask, "_kvkeep_padding") else cache.mask()
    if made is None or (made is not mask and not torch.equal(made.to(mask.device), mask)):
        raise CacheMisuse(
            f"a custom attention mask of shape {tuple(mask.shape)} came with a kvkeep cache, which cannot tell what "
            "it hides from evicted tokens; pass a 2-D padding mask or none."
        )
    return made._kvkeep_padding


for _name in IMPLEMENTATIONS:
    AttentionInterface.register(PREFIX + _name, _attention(_name))
    AttentionMaskInterface.register(PREFIX + _name, _mask(_name))
