"""A text that is fed again before it is evicted from: what is kept is what the model's own attention says it is.

The expected scores come from transformers alone: the text in a DynamicCache, each part fed after it with eager
attention, its weights renormalized over the keys that count (tests/oracles/kvzip.py).
"""

import copy
import dataclasses
from threading import Thread

import families
import numpy as np
import pytest
import tiny_chat
import torch
from conftest import make_llama
from oracles import frontier
from oracles import kvzip as oracle
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel

import kvkeep
from kvkeep.cache import replay
from kvkeep.cache.evictor import Evictor
from kvkeep.compress.parse import parse
from kvkeep.compress.scorers.repetition import FIRST, LATER
from kvkeep.engine.sequence import SequenceConfig
from kvkeep.errors import CacheMisuse, UnsupportedModel
from kvkeep.evaluate.prefill import prefill_shared
from kvkeep.kernels.dispatch import appended_attention
from kvkeep.model.hf_attention import AttentionCall
from kvkeep.model.projections import hidden_norms, output_weight
from kvkeep.model.user_text import ids_of

IDS = torch.randperm(128, generator=torch.Generator().manual_seed(7))[None, :90]
TOKENIZER = tiny_chat.tokenizer()
WORDS = ids_of(TOKENIZER, FIRST), ids_of(TOKENIZER, LATER), ids_of(TOKENIZER, "</s><s>")
SILENT = [], [], []


def sharp(**changes):
    return make_llama(num_hidden_layers=3, vocab_size=258, **changes).double()


def kept(cache, row=0):
    return [cache.kept(layer)[row] for layer in cache.compressed_layers]


def read(model, spec="kvzip", budget=20, ids=IDS, **how):
    cache = kvkeep.Cache(model, spec, budget, **how)
    model(ids, past_key_values=cache)
    return cache


def expected_scores(model, ids, chunk, words, sinks=4, plus=False, begun=0, near=None, local=False):
    """Of every layer, from transformers' own attention weights. local: the rest of the text is masked"""
    model, text, n = copy.deepcopy(model), ids[0].tolist(), ids.shape[1]
    model.set_attn_implementation("eager")
    full = DynamicCache()
    model(ids, past_key_values=full)
    heads, kv_heads = model.config.num_attention_heads, model.config.num_key_value_heads
    group, scores = heads // kv_heads, [np.zeros((kv_heads, n)) for _ in model.model.layers]
    for start, end, fed in oracle.parts(n, chunk, words, text, begun=begun):
        allowed = torch.ones(len(fed), n + len(fed), dtype=torch.bool).tril(n)
        allowed[:, sinks:start] = allowed[:, end:n] = not local
        mask = torch.zeros(1, 1, *allowed.shape).double().masked_fill(~allowed, -torch.inf)
        out = model(torch.tensor([fed]), past_key_values=copy.deepcopy(full), output_attentions=True,
                    output_hidden_states=True, attention_mask=mask)  # fmt: skip
        for i, layer in enumerate(model.model.layers):
            weights = None
            if plus:
                wo = layer.self_attn.o_proj.weight.numpy().reshape(-1, heads, 64 // heads).transpose(1, 0, 2)
                weights = oracle.worth(full.layers[i].values[0].numpy(), wo, out.hidden_states[i][0].numpy(), group)
            logits = out.attentions[i][0].clamp_min(1e-300).log().numpy()
            scores[i][:, start:end] = oracle.scores_from_logits(logits, start, end, n, sinks, group, weights, near)
    return scores


@pytest.mark.parametrize("spec", ["kvzip", "kvzip_plus"])
@pytest.mark.parametrize(("chunk", "tokenizer"), [(90, None), (40, TOKENIZER), (13, TOKENIZER), (200, TOKENIZER)])
def test_the_best_of_all_layers_are_kept(spec, chunk, tokenizer):
    model = sharp()
    words = WORDS if tokenizer else SILENT
    scores = expected_scores(model, IDS, chunk, words, plus=spec == "kvzip_plus")
    forced = [[[0, 1, 2, 3]] * 4] * 3
    cache = read(model, spec, chunk=chunk, tokenizer=tokenizer)
    assert kept(cache) == frontier.shared(scores, forced, 20)
    assert cache.report().kept_per_head == 20
    layerwise = read(model, spec, chunk=chunk, tokenizer=tokenizer, layerwise=True)
    assert kept(layerwise) == [frontier.shared([scores[i]], forced[:1], 20)[0] for i in range(3)]
    whole = read(model, spec, budget=100, chunk=chunk, tokenizer=tokenizer)
    for i in range(3):
        state = whole.backend.store[i].dense(0).token_state[..., 0].numpy()
        np.testing.assert_allclose(state, scores[i], rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("chunk", [13, 40])
@pytest.mark.parametrize("how", [{"near": 2}, {"local": True}, {"near": 0, "local": True}], ids=str)
def test_near_queries_and_a_part_by_itself(how, chunk):
    model = sharp()
    scores = expected_scores(model, IDS, chunk, WORDS, **how)
    cache = read(model, chunk=chunk, tokenizer=TOKENIZER, **how)
    assert kept(cache) == frontier.shared(scores, [[[0, 1, 2, 3]] * 4] * 3, 20)
    assert kept(cache) != kept(read(model, chunk=chunk, tokenizer=TOKENIZER))


@pytest.mark.parametrize("chunk", [5, 40, 200])
def test_the_beginning_of_the_chat_template_is_scored_but_not_repeated(chunk):
    """As the authors' code feeds it: the text alone, its softmax over the template's keys, too."""
    model, chat = sharp(), tiny_chat.tokenizer("Be brief." + tiny_chat.TEMPLATE)
    begun = ids_of(chat, "Be brief.<s>")
    ids = torch.cat([torch.tensor([begun]), IDS[:, : 90 - len(begun)]], 1)
    scores = expected_scores(model, ids, chunk, WORDS, begun=len(begun))
    forced = [[[0, 1, 2, 3]] * 4] * 3
    assert kept(read(model, ids=ids, chunk=chunk, tokenizer=chat)) == frontier.shared(scores, forced, 20)
    alone = torch.tensor([begun])  # nothing follows the template's beginning: it is the text
    whole = frontier.shared(expected_scores(model, alone, 2048, WORDS), forced, 8)
    assert kept(read(model, budget=8, ids=alone, tokenizer=chat)) == whole


def test_what_is_said_changes_what_is_kept():
    model = sharp()
    assert kept(read(model, chunk=40)) != kept(read(model, chunk=40, tokenizer=TOKENIZER))


@pytest.mark.parametrize("spec", ["kvzip", "kvzip_plus", "kvzip+adakv", "kvzip+blocks", "kvzip:layerwise=true+cake"])
def test_a_prompt_in_chunks_keeps_what_it_keeps_at_once(spec):
    model = sharp()
    in_chunks = kvkeep.Cache(model, spec, 20, chunk=40)
    in_chunks.defer_eviction(90)
    for part in IDS.split([33, 20, 37], 1):
        assert in_chunks.report().kept_per_head == in_chunks.seen
        model(part, past_key_values=in_chunks)
    assert kept(in_chunks) == kept(read(model, spec, chunk=40))


def test_every_turn_is_fed_again_by_itself():
    """What is held competes with what is new; generated tokens are not scored."""
    model = sharp()
    cache = read(model, chunk=40)
    for _ in range(3):
        for token in range(5):
            model(IDS[:, token : token + 1], past_key_values=cache)
        model(IDS[:, :30], past_key_values=cache)
        assert cache.report().kept_per_head == 20
        assert all(head[:4] == [0, 1, 2, 3] for layer in kept(cache) for head in layer)
    generated = {*range(90, 95), *range(125, 130), *range(160, 165)}
    assert all(generated <= set(head) for layer in kept(cache) for head in layer)


def test_rows_stand_where_the_model_put_them():
    """Left padding, with and without position ids, and right padding: a row is what it is alone."""
    model = sharp()
    short, before, after = IDS[:, :60], torch.zeros(1, 90, dtype=torch.long), torch.zeros(1, 90, dtype=torch.long)
    before[:, 30:], after[:, :60] = short, short
    alone = [kept(read(model, ids=ids, chunk=25)) for ids in (IDS, short)]
    for padded in (before, after):
        mask = torch.ones(2, 90, dtype=torch.long)
        mask[1] = (torch.arange(90) >= 30) if padded is before else (torch.arange(90) < 60)
        for more in ({}, {"position_ids": (mask.cumsum(1) - 1).clamp_min(0)}):
            cache = kvkeep.Cache(model, "kvzip", 20, chunk=25)
            model(torch.cat([IDS, padded]), attention_mask=mask, past_key_values=cache, **more)
            assert [kept(cache, row) for row in range(2)] == alone


@pytest.mark.parametrize("failing", ["replay", "eviction"])
def test_cut_short_the_text_is_whole_and_the_next_pass_goes_on(failing, monkeypatch):
    model = sharp()
    want, plain = read(model, chunk=30), DynamicCache()
    where, name, fails_at = {
        "replay": (replay.ReplayForward, "_feed", 2),
        "eviction": (Evictor, "evict", 2),
    }[failing]
    calls, own = [], getattr(where, name)

    def fail(*args, **kwargs):
        calls.append(args)
        if len(calls) == fails_at:
            raise KeyboardInterrupt
        return own(*args, **kwargs)

    monkeypatch.setattr(where, name, fail)
    cache = kvkeep.Cache(model, "kvzip", 20, chunk=30)
    with pytest.raises(KeyboardInterrupt):
        model(IDS, past_key_values=cache)
    model(IDS, past_key_values=plain)
    assert cache.report().kept_per_head == cache.seen == 90
    for i in range(3):
        assert cache.backend.store[i].dense(0).keys.equal(plain.layers[i].keys[0])
    with pytest.raises(CacheMisuse, match="that is not done"):
        cache.save("nowhere")
    steps = [model(IDS[:, :1], past_key_values=each).logits for each in (cache, want)]
    torch.testing.assert_close(*steps)
    assert kept(cache) == kept(want)


def test_a_prefill_cut_short_leaves_the_cache_as_it_was(monkeypatch):
    model = sharp()
    cache, own = read(model, chunk=40), model.model.layers[1].forward
    before = kept(cache)

    def fail(*_, **__):
        raise KeyboardInterrupt

    model.model.layers[1].forward = fail
    with pytest.raises(KeyboardInterrupt):
        model(IDS[:, :30], past_key_values=cache)
    model.model.layers[1].forward = own
    assert cache.in_forward
    again, want = (model(IDS[:, :30], past_key_values=each) for each in (cache, read(model, chunk=40)))
    torch.testing.assert_close(again.logits, want.logits)
    assert before != kept(cache)


@pytest.mark.parametrize("storage", ["int8", "int4"])
def test_quantized_after_the_choice(storage, tmp_path):
    """The text is held in the model's dtype until it is evicted from: the same is kept."""
    model = make_llama(num_hidden_layers=3, head_dim=16, vocab_size=258)
    ids = torch.randint(0, 128, (1, 400), generator=torch.Generator().manual_seed(1))
    plain, cache = (read(model, budget=200, ids=ids, chunk=150, storage=each) for each in (None, storage))
    assert kept(plain) == kept(cache) and cache.nbytes < 0.6 * plain.nbytes
    exact, codes = plain.backend.store[1].dense(0), cache.backend.store[1].dense(0)
    off = (exact.values - codes.values).abs().max() / exact.values.abs().max()
    assert 0 < off < (0.01 if storage == "int8" else 0.1)
    cache.save(tmp_path / "saved")
    forks = [cache, cache.fork(), kvkeep.Cache.load(tmp_path / "saved", model, tokenizer=TOKENIZER)]
    assert forks[2].tokenizer is TOKENIZER
    for ids in (*IDS[:, :3].split(1, 1), IDS[:, :30]):
        logits = [model(ids, past_key_values=each).logits for each in forks]
        torch.testing.assert_close(logits[1], logits[0])
        torch.testing.assert_close(logits[2], logits[0])


def test_the_engine_feeds_the_text_again_with_words(monkeypatch):
    """A text by itself, a prompt, several packed into one forward pass, and caches that share a prefill."""
    said, own = [], replay.ReplayForward._feed

    def record(self, text, part):
        said.append(part.instruction)
        assert self._say(FIRST) == WORDS[0] and self._end == WORDS[2]
        return own(self, text, part)

    monkeypatch.setattr(replay.ReplayForward, "_feed", record)
    model, text = tiny_chat.model().double(), "".join(chr(97 + i * i % 23) for i in range(150))
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.data *= 5
    engine = kvkeep.Engine(model, TOKENIZER, "kvzip", 40, chunk=64, history=None)
    context = engine.read(text)
    assert said == [FIRST, LATER, LATER] and context.report().kept_per_head == 40
    ids = torch.tensor([context.sequence.token_ids])
    assert kept(context.sequence.cache) == kept(read(model, budget=40, ids=ids, chunk=64, tokenizer=TOKENIZER))
    prompts = [text, text[::-1], text[40:]]
    alone = [engine.generate(each, max_new_tokens=5) for each in prompts]
    assert engine.generate(prompts, max_new_tokens=5) == alone
    sequences = [SequenceConfig(model, TOKENIZER, parse(spec, chunk=64), 40).new_sequence()
                 for spec in ("kvzip", "kvzip_plus", "echo")]  # fmt: skip
    sequences += [SequenceConfig(model, TOKENIZER, parse("kvzip", chunk=64), 60).new_sequence()]
    said.clear()
    prefill_shared(model, ids, [each.cache for each in sequences])
    assert said == [FIRST, LATER, LATER] * 2  # once for both budgets of kvzip
    for each in sequences:
        spec, budget = each.config.method, each.cache.budget
        assert kept(each.cache) == kept(read(model, spec, budget, ids, tokenizer=TOKENIZER))
    assert context.ask("Why?", max_new_tokens=4) == context.fork().ask("Why?", max_new_tokens=4)


def test_parts_are_shorter_at_the_end_of_the_context_length():
    model = sharp(max_position_embeddings=200)
    assert kept(read(model)) == kept(read(model, chunk=70)) != kept(read(model, chunk=60))


AGAIN = ["kvzip", "kvzip_plus", "kvkeep_context", "lookahead", "kvkeep_lookahead"]


@pytest.mark.parametrize("spec", AGAIN)
@pytest.mark.parametrize("n", [30, 60])
def test_learned_positions_end_with_the_context_length(spec, n):
    """Old: IndexError."""
    sizes = dict(vocab_size=128, n_positions=64, n_embd=32, n_layer=2, n_head=4, eos_token_id=None, bos_token_id=None)
    model, given = GPT2LMHeadModel(GPT2Config(**sizes)).eval(), []
    model.transformer.wpe.register_forward_pre_hook(lambda module, args: given.append(int(args[0].max())))
    cache = kvkeep.Cache(model, spec, 20)
    model.generate(IDS[:, :n], past_key_values=cache, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert cache.report().kept_per_head == 23 and n < max(given) <= 63 and len(given) > 4


@pytest.mark.parametrize("n", [50, 80])  # of 64: the model's own frequencies, and those of 80 tokens
@pytest.mark.parametrize("spec", ["kvzip", "kvkeep_context"])
def test_frequencies_that_change_with_length_do_not_in_a_replay(spec, n):
    """Old: after the replay, decode went on with frequencies of a longer text."""
    rope, found = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}, []
    for method in ("full", spec):
        model = make_llama(max_position_embeddings=64, rope_parameters=rope)
        model(IDS[:, :n], past_key_values=(cache := kvkeep.Cache(model, method, n)))
        frequencies = model.model.rotary_emb.inv_freq.clone()
        found.append((frequencies, model(IDS[:, :1], past_key_values=cache).logits))
    assert all(map(torch.equal, *found))


def test_a_long_context_does_not_begin_in_a_replay():
    half = {"short_factor": [1.0] * 4, "long_factor": [4.0, 8.0, 16.0, 32.0], "original_max_position_embeddings": 64}
    model, given = make_llama(rope_parameters={"rope_type": "longrope", "rope_theta": 10000.0, **half}), []
    model.model.rotary_emb.register_forward_pre_hook(
        lambda module, args, how: given.append(int(how.get("position_ids", args[-1]).max())), with_kwargs=True
    )
    for n, within in ((60, True), (70, False)):  # a text of the long context is repeated after it
        given.clear()
        model(IDS[:, :n], past_key_values=kvkeep.Cache(model, "kvkeep_context", 20))
        prefilled, repeated = given
        assert prefilled == n - 1 and (repeated == 63 if within else repeated > n)


def test_a_thread_sees_its_own_hidden_states():
    """Old: a forward pass of another thread was scored with."""
    model = make_llama()
    with torch.no_grad(), hidden_norms(model, [0, 3]) as found:
        other = Thread(target=lambda: model(IDS[:, :7]))
        other.start(), other.join()
        assert not found
        model(IDS[:, :5])
        assert {index: norms.shape for index, norms in found.items()} == {0: (1, 5), 3: (1, 5)}


def test_generate_is_the_same_with_hooks_gone():
    model = sharp()
    prompt, cache = IDS[:, :80], kvkeep.Cache(model, "kvzip_plus", 20, chunk=30)
    tokens = model.generate(prompt, past_key_values=cache, max_new_tokens=6, do_sample=False)
    by_hand, ids = kvkeep.Cache(model, "kvzip_plus", 20, chunk=30), prompt
    for _ in range(6):
        logits = model(ids if by_hand.seen == 0 else ids[:, -1:], past_key_values=by_hand).logits
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], 1)
    assert tokens.equal(ids)
    assert not any(module._forward_pre_hooks for module in model.modules())
    other = kvkeep.Cache(model, "snapkv", 40)  # an ordinary cache of the same model
    assert model.generate(prompt, past_key_values=other, max_new_tokens=3, do_sample=False).shape == (1, 83)


def test_models_and_calls_that_hide_their_tokens_are_refused_by_name():
    model = sharp()
    cache = kvkeep.Cache(model, "kvzip", 20)
    model(inputs_embeds=model.model.embed_tokens(IDS), past_key_values=cache)
    with pytest.raises(CacheMisuse, match="inputs_embeds cannot be fed again"):
        model(IDS[:, :1], past_key_values=cache)
    with pytest.raises(UnsupportedModel, match="compiled, or replaced by somebody else"):
        kvkeep.Cache(torch.compile(model, backend="eager"), "kvzip", 20)
    replaced = sharp()
    replaced.forward = lambda *args, **kwargs: type(replaced).forward(replaced, *args, **kwargs)
    with pytest.raises(UnsupportedModel, match="compiled, or replaced by somebody else"):
        kvkeep.Cache(replaced, "kvzip", 20)
    with pytest.raises(UnsupportedModel, match="'kvzip' runs the model again .* sliding-window or linear layers"):
        kvkeep.Cache(families.build("gemma3_text"), "kvzip", 20)


class Doubling(torch.nn.Module):
    """A linear layer that is no nn.Linear, as quantized and adapted ones are."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) * 2 + 3


def test_the_output_projection_is_found_whatever_it_is_made_of():
    model = sharp()
    weight = model.model.layers[1].self_attn.o_proj.weight
    found = output_weight(model, 1)
    assert found.shape == (8, 64, 8) and found[2].equal(weight[:, 16:24])
    model.model.layers[1].self_attn.o_proj = Doubling(model.model.layers[1].self_attn.o_proj)
    torch.testing.assert_close(output_weight(model, 1), 2 * found)
    del model.model.layers[1].self_attn.o_proj
    with pytest.raises(UnsupportedModel, match="output projection of layer 1 of LlamaForCausalLM was not found"):
        output_weight(model, 1)


def test_heads_that_lie_one_after_the_other_are_one_tensor():
    flat = torch.arange(60.0).view(20, 3)
    even = [flat[1:5], flat[7:11], flat[13:17]]
    view = replay.stacked_view(even)
    assert view.equal(torch.stack(even)) and view.data_ptr() == even[0].data_ptr()
    assert replay.stacked_view(even[:1]).equal(flat[None, 1:5])
    assert replay.stacked_view([even[0]] * 2).equal(torch.stack([even[0]] * 2))
    others = flat[7:10], flat[8:12], flat[7:11].clone(), flat[7:15:2], flat.view(torch.int32)[7:11]
    assert all(replay.stacked_view([even[0], other, even[2]]) is None for other in others)
    assert replay.stacked_view(even[::-1]) is None


@pytest.mark.parametrize("how, used", [({}, True), ({"local": True}, False)], ids=str)
def test_a_long_text_is_attended_to_where_it_lies(how, used, monkeypatch):
    """Heads of one length, in the layer's own buffers."""
    model, calls = sharp(), []
    want = read(model, chunk=40, tokenizer=TOKENIZER, **how)
    assert not appended_attention.uses_kernel(*[torch.zeros(1, 4, 2**14, 8)] * 5, 0.3)

    def attend(queries, held_keys, held_values, *rest):
        calls.append((held_keys, held_values))
        return appended_attention.reference(queries, held_keys, held_values, *rest)

    monkeypatch.setattr(replay.appended_attention, "uses_kernel", lambda *_: True)
    monkeypatch.setattr(replay.appended_attention, "kernel", attend)
    cache = read(model, chunk=40, tokenizer=TOKENIZER, **how)
    assert kept(cache) == kept(want) and bool(calls) is used
    for held in (each for call in calls for each in call):
        assert held.shape[:3] == (1, 4, 90) and held.untyped_storage().nbytes() == held.numel() * held.element_size()


def test_soft_caps_sinks_and_heads_of_other_lengths_are_attended_to_as_ever(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(replay.appended_attention, "uses_kernel", lambda *_: pytest.fail("not for these"))
    query, new, flat = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8), torch.randn(20, 8)
    call = AttentionCall(query, new, new, None, lambda: None, 0.3, None, None)
    equal, ragged = [flat[:9], flat[9:18]], [flat[:9], flat[9:20]]
    replay._attend_appended(dataclasses.replace(call, softcap=2.0), equal, equal)
    replay._attend_appended(dataclasses.replace(call, sink_logits=torch.zeros(4)), equal, equal)
    replay._attend_appended(call, ragged, ragged)
