"""What a chunk or an event is known by: its representative tokens, chosen per query head or once for all
(METHODS.md, system 4; infllm, qllm, emllm).

keys [kv_heads, N, d] without rotation; mass [heads, N], the mean attention token j got from the queries of the local
window that follows it, per query head; query head h reads KV head h // g. A probe is joined, [kv_heads·d]: queries
averaged within a group, concatenated over KV heads. `tokens` are the tokens of one unit, of any number.
"""

import math

import numpy as np

from .retrieval import cosine, dot, mean_vector


def ranked(mass, tokens, count):
    """The `count` tokens of highest mass[token] (fewer if there are fewer), best first, ties to the later."""
    return sorted(tokens, key=lambda j: (-float(mass[j]), -j))[:count]


def representatives(mass, tokens, count, per_head=True, mix_all=False):
    """[R][heads]: the token that speaks for query head h in representative r, R = min(count, tokens).

    per_head: every head ranks by its own mass, so representative r holds the heads' r-th choices. Otherwise, and where
    every token represents (count >= tokens: there is nothing to choose), the same token for all heads, ranked by the
    mean mass. mix_all=True ranks per head even then (it matters to the cosine only: other tokens share a length).
    """
    heads = len(mass)
    if not per_head or (count >= len(tokens) and not mix_all):
        mean = {j: math.fsum(float(row[j]) for row in mass) / heads for j in tokens}
        return [[j] * heads for j in ranked(mean, tokens, count)]
    each = [ranked(row, tokens, count) for row in mass]
    return [[choice[r] for choice in each] for r in range(min(count, len(tokens)))]


def representative_keys(keys, chosen):
    """[R, heads·d]: for each representative the keys of its tokens, one per query head, concatenated."""
    group = len(chosen[0]) // len(keys)
    return [np.concatenate([keys[h // group][j] for h, j in enumerate(tokens)]) for tokens in chosen]


def repeated(probe, kv_heads, heads):
    """[kv_heads·d] -> [heads·d]: each KV head's part once for every query head of its group."""
    parts, group = np.split(np.asarray(probe, dtype=np.float64), kv_heads), heads // kv_heads
    return np.concatenate([parts[h // group] for h in range(heads)])


def unit_score(probe, keys, chosen, use_cosine):
    """Mean over the representatives of the probe's cosine with each, or of its dot product, averaged over the group."""
    heads = len(chosen[0])
    asked = repeated(probe, len(keys), heads)
    if use_cosine:
        each = [cosine(asked, k) for k in representative_keys(keys, chosen)]
    else:
        each = [dot(asked, k) / (heads // len(keys)) for k in representative_keys(keys, chosen)]
    return math.fsum(each) / len(each)


def description(keys, chosen, use_cosine):
    """[kv_heads·d]: the same as one vector D: the score is D·probe, or with cosines D·probe/‖probe‖.

    D is the mean over representatives of the group means of the keys; with cosines each is divided by the length of
    its representative over √g (a null representative adds nothing).
    """
    kv_heads, group = len(keys), len(chosen[0]) // len(keys)
    vectors = []
    for tokens in chosen:
        one = np.concatenate(
            [mean_vector([keys[kh][tokens[kh * group + i]] for i in range(group)]) for kh in range(kv_heads)]
        )
        length = math.sqrt(math.fsum(dot(keys[h // group][j], keys[h // group][j]) for h, j in enumerate(tokens)))
        if use_cosine:
            one = one / (length / math.sqrt(group)) if length > 0 else one * 0.0
        vectors.append(one)
    return mean_vector(vectors)


def unit_scores(probe, keys, chosen, use_cosine, question=None, question_weight=0.0, question_match="representatives"):
    """[units]; chosen[b] are the representatives of unit b. question [x, kv_heads·d], joined.

    question_weight: the mean question query's cosine is added so many times. It is matched as the probe is (mean over
    the representatives of its cosine with each) or, question_match="description", with the description as one vector.
    """
    assert question_match in ("representatives", "description")
    scores = [unit_score(probe, keys, one, use_cosine) for one in chosen]
    if question is None or len(question) == 0 or question_weight == 0:
        return scores
    asked, out = mean_vector(question), []
    for score, one in zip(scores, chosen, strict=True):
        if question_match == "representatives":
            match = unit_score(asked, keys, one, True)
        else:
            match = cosine(asked, description(keys, one, use_cosine))
        out.append(score + question_weight * match)
    return out
