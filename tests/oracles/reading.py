"""Reading a long prompt in windows and retrieving what was offloaded (METHODS.md: system 4; infllm, qllm, tokenselect).

One layer, one sequence, float64. Queries [heads, N, d], keys and values [kv_heads, N, d], all WITHOUT rotation; the
first `prompt` tokens are read in windows, the others one at a time. Tokens [0, sinks) are the sinks, unit b (a chunk;
for tokenselect one token) is tokens [sinks + b·chunk, sinks + (b + 1)·chunk).
"""

from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np

from .common import default_scale, dots, softmax
from .representatives import representatives as represent
from .representatives import unit_scores
from .retrieval import (
    best_chunks,
    joined,
    layer_budgets,
    mean_probe,
    mean_vector,
    moments,
    probe,
    rotate,
    tokenselect_votes,
)

KINDS = ("actqkv", "infllm", "qllm", "tokenselect")


@dataclass
class Step:
    """What one window did. `far` and `near` are true token numbers, `near` without the window's own."""

    start: int
    size: int
    put_away: int = 0
    far: list = field(default_factory=list)
    near: list = field(default_factory=list)
    chosen: list | None = None  # units, ascending; None: nothing has been offloaded
    scores: list | None = None  # of every unit
    representatives: list | None = None  # of every chunk, true token numbers; per head [R][heads], best first


def windows(prompt, total, window):
    """[(start, size)]: the prompt in pieces of `window`, the last one shorter; then single tokens."""
    pieces = [(start, min(window, prompt - start)) for start in range(0, prompt, window)]
    return pieces + [(start, 1) for start in range(prompt, total)]


def turns_of(turns, window):
    """[(start, size, decoding)] of a conversation: a prompt and the tokens decoded after it, turn after turn."""
    pieces, start = [], 0
    for prompt, decoded in turns:
        for first, size in windows(prompt, prompt + decoded, window):
            pieces.append((start + first, size, first >= prompt))
        start += prompt + decoded
    return pieces


def put_away(before, so_far, sinks, local, chunk):
    """Tokens after the sinks that live in chunks once `before` tokens have been read, in whole chunks."""
    return max(so_far, chunk * max(0, (before - sinks - local) // chunk))


def put_away_in_decode(token, so_far, sinks, local, chunk):
    """The same when `token` is decoded: no more than `local` tokens are near, it included, so the oldest chunks go.

    Only a chunk that is longer than the near window has to fill beside it.
    """
    if chunk > local:
        return put_away(token, so_far, sinks, local, chunk)
    away = so_far
    while token + 1 - sinks - away > local:
        away += chunk
    return away


def fetched_units(budget, sinks, near, chunk, existing):
    """How many units fit beside the sinks and the near tokens."""
    return min(existing, max(0, (budget - sinks - near) // chunk))


def turned(vectors, positions, inv_freq):
    """[heads, t, d], token i turned to positions[i]."""
    return np.array([[rotate(x, p, inv_freq) for x, p in zip(head, positions, strict=True)] for head in vectors])


def attend(q_far, q_near, far_keys, far_values, near_keys, near_values, scale):
    """(output [d], probabilities far, probabilities near) of one query: one softmax. Everything as already turned."""
    logits = np.concatenate([dots(far_keys, q_far), dots(near_keys, q_near)]) * scale
    p = softmax(logits)
    values = np.concatenate([far_values, near_values])
    return p @ values, p[: len(far_keys)], p[len(far_keys) :]


def contiguous_places(far, first_near):
    """Positions of `far` tokens that sit side by side right before the first near one."""
    return [first_near - len(far) + i for i in range(len(far))]


def window_probe(kind, queries, so_far, question, decoding):
    """[D] from a window's joined queries [w, D]; `so_far` are all joined queries up to the window's end."""
    if kind != "actqkv":
        return mean_probe(queries)
    if decoding:
        return np.array(queries[0])
    asked = [] if question is None else list(question)
    return probe(list(queries) + asked, *moments(so_far))


def chunk_scores(kind, sought, keys, chosen, question, beta=4.0, question_weight=0.0, question_match="representatives"):
    """[chunks], of the probe `sought`; chosen[b] is [R][heads], the tokens that represent chunk b.

    actqkv: cosines, and `question_weight` times the mean question's, while reading and while decoding. qllm: dot
    products, and `beta` times the mean question's dot product.
    """
    if kind == "actqkv":
        return unit_scores(sought, keys, chosen, True, question, question_weight, question_match)
    scores = unit_scores(sought, keys, chosen, False)
    if kind == "qllm" and question is not None and len(question) > 0:
        asked = unit_scores(mean_vector(question), keys, chosen, False)
        scores = [s + beta * a for s, a in zip(scores, asked, strict=True)]
    return scores


def told(chosen, per_head):
    """What a Step tells of the representatives: per chunk [R][heads] best first, or the tokens, ascending."""
    return [[list(r) for r in one] if per_head else sorted(r[0] for r in one) for one in chosen]


def replay_steps(
    kind,
    q,
    k,
    v,
    inv_freq,
    scale,
    prompt,
    budget,
    sinks,
    local,
    window,
    chunk,
    representatives,
    question=None,
    beta=4.0,
    per_head=None,
    question_weight=0.0,
    question_match="representatives",
    mix_all=False,
    pieces=None,
):
    """(outputs [heads, N, d], [Step], votes [N], or [heads, N] per head). votes[j]: the probability token j got from
    the `local` queries after it, summed over queries (in decode, a chunk goes before its tokens have had as many), per
    query head or the mean over them. per_head: True for actqkv, False for the others, unless given. pieces: those of
    `turns_of`, instead of one prompt and the tokens after it."""
    assert kind in KINDS, kind
    per_head = kind == "actqkv" if per_head is None else per_head
    q, k, v = (np.asarray(x, dtype=np.float64) for x in (q, k, v))
    heads, total, d = q.shape
    kv_heads, group = len(k), len(q) // len(k)
    scale = default_scale(scale, d)
    inv_freq = [float(x) for x in inv_freq]
    edge = local
    unit = 1 if kind == "tokenselect" else chunk

    q_home, k_home = turned(q, range(total), inv_freq), turned(k, range(total), inv_freq)
    q_edge = turned(q, [edge] * total, inv_freq)
    joined_queries = joined(q_edge, kv_heads)

    outputs, votes, steps = np.zeros((heads, total, d)), np.zeros((heads, total)), []
    away, speakers = 0, []
    for start, size, decoding in pieces or turns_of([(prompt, total - prompt)], window):
        step, end = Step(start, size), start + size
        if end > budget:
            away = (put_away_in_decode if decoding else put_away)(start, away, sinks, local, unit)
        step.put_away = away
        first_near = sinks + away if away > 0 else 0
        step.near = list(range(first_near, start))

        if away > 0:
            units = away // unit
            reserved = max(local, len(step.near) + 1) if decoding else len(step.near)  # the decoded token counts
            count = fetched_units(budget, sinks, reserved, unit, units)
            if kind == "tokenselect":
                candidates = slice(sinks, sinks + away)
                step.scores = tokenselect_votes(q_edge[:, start:end], k[:, candidates], scale).tolist()
            else:
                for b in range(len(speakers), units):  # the chunks that go away now
                    first = sinks + b * unit
                    speakers.append(represent(votes, range(first, first + unit), representatives, per_head, mix_all))
                step.representatives = told(speakers, per_head)
                sought = window_probe(kind, joined_queries[start:end], joined_queries[:end], question, decoding)
                asking = (question, beta, question_weight, question_match)
                step.scores = chunk_scores(kind, sought, k, speakers, *asking)
            step.chosen = best_chunks(step.scores, count)
            step.far = list(range(sinks))
            for b in step.chosen:
                step.far.extend(range(sinks + b * unit, sinks + (b + 1) * unit))

        if kind == "tokenselect":
            places = contiguous_places(step.far, first_near)
            far_keys, q_far = turned(k[:, step.far], places, inv_freq), q_home
        else:
            far_keys, q_far = k[:, step.far], q_edge
        for i in range(start, end):
            for h in range(heads):
                kh, seen = h // group, slice(first_near, i + 1)
                outputs[h, i], _, p = attend(
                    q_far[h, i],
                    q_home[h, i],
                    far_keys[kh].reshape(-1, d),
                    v[kh, step.far].reshape(-1, d),
                    k_home[kh, seen],
                    v[kh, seen],
                    scale,
                )
                for j in range(max(first_near, i - local), i):
                    votes[h, j] += p[j - first_near]
        steps.append(step)
    return outputs, steps, votes if per_head else votes.mean(axis=0)


def replay(
    kind,
    q,
    k,
    v,
    inv_freq,
    scale,
    prompt,
    budget,
    sinks,
    local,
    window,
    chunk,
    representatives,
    question=None,
    beta=4.0,
    **options,
):
    """(outputs [heads, N, d], chosen). chosen[w]: the units window w fetched, ascending, counted from 0 at token
    `sinks`; None where nothing has been offloaded. `question`: [x, kv_heads·d], joined, at the edge. `options`:
    per_head, question_weight, question_match, mix_all, pieces (see replay_steps and representatives.py)."""
    reading = (prompt, budget, sinks, local, window, chunk, representatives, question, beta)
    outputs, steps, _ = replay_steps(kind, q, k, v, inv_freq, scale, *reading, **options)
    return outputs, [step.chosen for step in steps]


def density_shares(thetas_per_step, first_means, total, chunk):
    """[steps][layers]: tokens of each layer at each decode step. thetas_per_step[t][l] is Θ of layer l at step t.

    Θ̄ of the layers ahead: `first_means` at the first step, then the mean of that layer's Θ over the earlier steps
    (without first_means)."""
    shares = []
    for t, now in enumerate(thetas_per_step):
        means = first_means
        if t > 0:  # exact, so that a layer that never changed has exactly that mean
            means = [float(exact_mean([step[layer] for step in thetas_per_step[:t]])) for layer in range(len(now))]
        shares.append(layer_budgets(now, means, total, chunk))
    return shares


def exact_mean(numbers):
    """The mean as an exact fraction."""
    return sum((Fraction(float(x)) for x in numbers), Fraction(0)) / len(numbers)
