"""One attention and one mask function, registered beside the stock ones, that hand our caches what a layer computed.

A cache layer of ours returns just the new keys, marked. The registered attention function sees the mark and gives the
call to the cache; any other call goes to the stock function the model was using, with the stock mask, bit for bit.
A compiled model leaves its graph for what is ours, and for nothing else.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface, PreTrainedModel

from kvkeep.errors import CacheMisuse, UnsupportedModel

PREFIX = "kvkeep_"
STOCK = ("sdpa", "eager")


class OurLength(int):
    """The length of a layer we own. transformers passes it to the mask function, which so knows whose mask it makes."""

    def __new__(cls, length: int, cache: Any) -> OurLength:
        made = super().__new__(cls, length)
        made.cache = cache
        return made


class OurName(str):
    """What a config that speaks to our caches calls its attention; a copy of it, or a pickle, says the stock name.

    So a used model that is copied, pickled or sent elsewhere is what it was, and needs no kvkeep there.
    """

    def __reduce_ex__(self, protocol: Any) -> Any:
        return str, (self.removeprefix(PREFIX),)


@dataclass(frozen=True)
class Handover:
    """One attention call of a layer we own. query [rows, heads, q, dim], key and value [rows, kv_heads, q, dim]"""

    query: Tensor
    key: Tensor
    value: Tensor
    padding: Tensor | None  # [rows, seen + q] bool, False for padding; None where there is none
    stock: Callable[
        ..., tuple[Tensor, Tensor | None]
    ]  # the model's own attention: among the new tokens, or over others
    scale: float
    softcap: float | None
    sinks: Tensor | None
    plain: bool = False  # `stock` is torch's own attention, and nobody else waits for its outcome
    known: dict[Any, Tensor] | None = None  # what caches that share a reading found out, for each other

    def outcome(self, output: Tensor) -> tuple[Tensor, None]:
        """An output [rows, heads, q, dim] in the layout attention functions return."""
        return output.transpose(1, 2).contiguous(), None


def with_sums(new: Handover) -> tuple[tuple[Tensor, None], Tensor] | None:
    """The model's own attention among new tokens, and each query's log-sum-exp [rows, heads, q].

    None where torch would not use one of its kernels that tell it.
    """
    half = new.query.dtype in (torch.float16, torch.bfloat16) and new.query.device.type == "cuda"
    plain = new.plain and new.softcap is None and new.sinks is None and new.padding is None
    if not half or not plain or new.query.shape[-1] > 256 or new.query.shape[-1] % 8 or new.query.requires_grad:
        return None
    qkv, grouped = (new.query, new.key, new.value), new.query.shape[1] != new.key.shape[1]
    choice = torch._fused_sdp_choice(*qkv, None, 0.0, True, scale=new.scale, enable_gqa=grouped)
    if choice == SDPBackend.FLASH_ATTENTION.value:
        output, sums, *_ = torch.ops.aten._scaled_dot_product_flash_attention(*qkv, 0.0, True, scale=new.scale)
    elif choice == SDPBackend.CUDNN_ATTENTION.value:
        cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention
        output, sums, *_ = cudnn(*qkv, None, True, 0.0, True, scale=new.scale)
    else:
        return None
    return new.outcome(output), sums.reshape(new.query.shape[:3])


def enable(model: PreTrainedModel) -> None:
    """Let this model speak to our caches. Calls that carry no cache of ours behave exactly as before."""
    config = model.config.get_text_config(decoder=True)
    stock = config._attn_implementation
    if is_enabled(config):
        return
    name = type(model).__name__
    if stock not in STOCK:
        raise UnsupportedModel(f"{name} uses attention '{stock}'; load it with attn_implementation='sdpa' or 'eager'.")
    if not model._can_set_attn_implementation():
        raise UnsupportedModel(
            f"{name} does not use transformers' attention interface, so its queries cannot be observed."
        )
    owner = next((key for key in model.config.sub_configs if getattr(model.config, key, None) is config), "")
    model.set_attn_implementation({owner: PREFIX + stock})
    config._attn_implementation_internal = OurName(PREFIX + stock)


def is_enabled(config: Any) -> bool:
    return str(config._attn_implementation).startswith(PREFIX)


def mark(keys: Tensor, layer: Any) -> Tensor:
    """A view of the keys that knows which cache layer they came from."""
    view = keys.view_as(keys)
    view._kvkeep_layer = layer
    return view


def _attention(stock: str) -> Callable:
    def kvkeep_attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
    ):
        layer = getattr(key, "_kvkeep_layer", None)
        if layer is None:
            return stock_attention(stock, module)(module, query, key, value, attention_mask, **kwargs)
        return hand_over(layer, module, query, key, value, attention_mask, kwargs)

    @torch.compiler.disable
    def hand_over(layer: Any, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, kwargs: dict):
        def original(query=query, key=key, value=value, mask=mask):
            return stock_attention(stock, module)(module, query, key, value, mask, **kwargs)

        layer.check(module)
        if kwargs.get("dropout"):
            raise CacheMisuse("a kvkeep cache is for inference; call model.eval() first.")
        scale = kwargs.get("scaling") or getattr(module, "scaling", None) or query.shape[-1] ** -0.5
        capped = stock == "eager"  # sdpa knows neither soft-capping nor sink logits, here or in the stock model
        return layer.attend(
            Handover(
                query, key, value, _padding(mask, layer.cache), original, scale,
                kwargs.get("softcap") if capped else None, kwargs.get("s_aux") if capped else None, not capped,
            )
        )  # fmt: skip

    return kvkeep_attention


def stock_attention(stock: str, module: nn.Module) -> Callable:
    """The attention function the model would use without us; eager ones live beside the model's own code."""
    if stock != "eager":
        return ALL_ATTENTION_FUNCTIONS[stock]
    for kind in type(module).__mro__:
        if eager := getattr(sys.modules[kind.__module__], "eager_attention_forward", None):
            return eager
    raise UnsupportedModel(
        f"{type(module).__name__} has no eager_attention_forward; load the model with sdpa attention."
    )


def _mask(stock: str) -> Callable:
    def kvkeep_mask(*args: Any, **kwargs: Any) -> Tensor | None:
        if isinstance(kwargs.get("kv_length"), OurLength):
            return our_mask(*args, **kwargs)
        return ALL_MASK_ATTENTION_FUNCTIONS[stock](*args, **kwargs)

    @torch.compiler.disable
    def our_mask(*args: Any, **kwargs: Any) -> Tensor | None:
        padding = kwargs.get("attention_mask")
        if padding is not None and bool(padding.all()):
            padding = None
        if kwargs["kv_length"] > kwargs["q_length"]:  # tokens already cached: we make our own mask
            return padding
        made = ALL_MASK_ATTENTION_FUNCTIONS[stock](*args, **kwargs)
        if made is not None:
            made._kvkeep_padding = padding
            kwargs["kv_length"].cache.mask = weakref.ref(made)  # lives as long as the pass it was made for
        return made

    return kvkeep_mask


def _padding(mask: Tensor | None, cache: Any) -> Tensor | None:
    """The 2-D padding mask behind what our mask function returned, or behind a copy of it on another device."""
    if mask is None or mask.ndim == 2:
        return mask
    made = mask if hasattr(mask, "_kvkeep_padding") else cache.mask()
    if made is None or (made is not mask and not torch.equal(made.to(mask.device), mask)):
        raise CacheMisuse(
            f"a custom attention mask of shape {tuple(mask.shape)} came with a kvkeep cache, which cannot tell what "
            "it hides from tokens already dropped; pass a 2-D padding mask or none."
        )
    return made._kvkeep_padding


for _name in STOCK:
    AttentionInterface.register(PREFIX + _name, _attention(_name))
    AttentionMaskInterface.register(PREFIX + _name, _mask(_name))
