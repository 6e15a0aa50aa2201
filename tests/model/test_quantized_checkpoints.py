"""Models whose linear layers are quantized by others run on every path with the modules they came with.

Kinds whose package is missing are skipped. GPTQ, AWQ and fine-grained FP8 need a GPU: modules that are made like theirs
stand for them.
"""

import pytest
import tiny_chat
import torch
import transformers
from conftest import make_llama
from families import prompt
from torch import nn
from transformers import AutoModelForCausalLM

import kvkeep
from kvkeep.errors import UnsupportedModel
from kvkeep.model import fused
from kvkeep.model.projections import output_weight

pytestmark = pytest.mark.filterwarnings("ignore")  # of those packages
TEXT = "The first words of a text that goes on for a while, with some more words. " * 2


class BlockScaled(nn.Linear):
    """A linear layer by class, whose weight is stored in 8-bit floats: as fine-grained FP8."""

    def __init__(self, layer):
        super().__init__(layer.in_features, layer.out_features, bias=False)
        self.weight_scale_inv = nn.Parameter(layer.weight.abs().amax() / 448, requires_grad=False)
        weight = (layer.weight / self.weight_scale_inv).to(torch.float8_e4m3fn)
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x):
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.weight_scale_inv)


class Packed(nn.Module):
    """No linear layer by class, and without a weight: as GPTQ and AWQ."""

    def __init__(self, layer):
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        scales = layer.weight.abs().amax(1, keepdim=True) / 127
        self.register_buffer("scales", scales)
        self.register_buffer("qweight", (layer.weight / scales).round().to(torch.int8))

    def forward(self, x):
        return nn.functional.linear(x, (self.qweight * self.scales).to(x.dtype))


def plain():
    return make_llama(vocab_size=272, num_hidden_layers=2, intermediate_size=128, bos_token_id=0, eos_token_id=1)


def replaced(kind):
    def make(folder):
        model = plain()
        for layer in model.model.layers:
            for parent in list(layer.modules()):
                for name, child in list(parent.named_children()):
                    if type(child) is nn.Linear:
                        setattr(parent, name, kind(child))
        return model

    return make


def quantized_by(package, config):
    def make(folder):
        pytest.importorskip(package, reason=f"needs {package}")
        plain().save_pretrained(folder)
        return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config(), dtype=torch.float32)

    return make


def torchao_int8():
    from torchao.quantization import Int8WeightOnlyConfig

    return transformers.TorchAoConfig(Int8WeightOnlyConfig())


def compressed_tensors_fp8(folder):
    """Written and loaded as such checkpoints are."""
    pytest.importorskip("compressed_tensors", reason="needs compressed-tensors")
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    numbers = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**numbers, "strategy": "channel"},
        "input_activations": {**numbers, "strategy": "token", "dynamic": True},
    }
    config = QuantizationConfig.model_validate(
        {"config_groups": {"all": group}, "ignore": ["lm_head"], "format": "float-quantized"}
    )
    model = plain()
    apply_quantization_config(model, config)
    for layer in model.modules():
        if hasattr(layer, "weight_scale"):
            layer.weight_scale.data = (layer.weight.abs().amax(1, keepdim=True) / 448).to(layer.weight_scale.dtype)
    compressor = ModelCompressor(quantization_config=config)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


KINDS = {
    "like fine-grained fp8": replaced(BlockScaled),
    "like gptq and awq": replaced(Packed),
    "torchao int8": quantized_by("torchao", torchao_int8),
    "bitsandbytes int8": quantized_by(
        "bitsandbytes", lambda: transformers.BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)
    ),
    "bitsandbytes nf4": quantized_by(
        "bitsandbytes", lambda: transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    ),
    "compressed-tensors fp8": compressed_tensors_fp8,
}


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_quantized_checkpoint_runs_on_every_path_with_its_own_modules(kind, tmp_path, monkeypatch):
    model, words, ids = KINDS[kind](tmp_path).eval(), tiny_chat.tokenizer(), prompt(60)
    layers = [module for layer in model.model.layers for name, module in layer.named_modules() if name.endswith("proj")]
    assert len(layers) == 14
    want, weight = model(ids).logits, plain().model.layers[1].self_attn.o_proj.weight
    said = kvkeep.Engine(model, words, "snapkv", 48).generate(TEXT, max_new_tokens=12)
    monkeypatch.setattr(fused, "is_faster", lambda model: True)
    own = {part: vars(part).get("forward") for part in model.modules()}
    with fused.fused_ops(model):
        changed = {type(part).__name__ for part in model.modules() if vars(part).get("forward") is not own[part]}
        assert changed == (set() if own[model.model.norm] else {"LlamaRMSNorm"})  # compressed-tensors replaces all
        assert (model(ids).logits - want).abs().max() < 1e-3 * want.abs().max()
    assert kvkeep.Engine(model, words, "snapkv", 48).generate(TEXT, max_new_tokens=12) == said
    found = output_weight(model, 1).transpose(0, 1).flatten(1)
    assert (found - weight).abs().max() < 0.2 * weight.abs().max()
    for spec in ("snapkv+critical", "kvzip_plus"):
        cache = kvkeep.Cache(model, spec, 24, tokenizer=words)
        model(ids, past_key_values=cache)
        assert cache.report().kept_per_head <= 24
    with pytest.raises(UnsupportedModel, match="weights='fp8'|quantized already"):
        kvkeep.Engine(model, words, "snapkv", 48, weights="fp8")
