"""Retrieval: never drop, look up (METHODS.md: system 4, the recall of system 5, the table of comparisons).

One sequence, one layer. Queries [heads, t, d], keys [kv_heads, n, d]; query head h reads KV head h // g. "Joined"
vectors [t, D], D = kv_heads·d, are queries averaged within a group, or keys, concatenated over KV heads.
"""

import math
from fractions import Fraction

import numpy as np

from .common import default_scale, softmax, top


def dot(a, b):
    """Scalar product, the products summed without rounding in between: the order of the terms does not matter."""
    return math.fsum(float(x) * float(y) for x, y in zip(a, b, strict=True))


def cosine(a, b):
    """Cosine of two vectors; 0 where one of them is null."""
    lengths = math.sqrt(dot(a, a)) * math.sqrt(dot(b, b))
    return dot(a, b) / lengths if lengths > 0 else 0.0


def mean_vector(vectors):
    """[t, D] -> [D]."""
    return np.array([math.fsum(float(x) for x in column) / len(vectors) for column in zip(*vectors, strict=True)])


def joined(vectors, kv_heads):
    """[heads, t, d] -> [t, kv_heads·d]: averaged within each group, then concatenated over KV heads."""
    group = len(vectors) // kv_heads
    rows = []
    for t in range(len(vectors[0])):
        row = []
        for kh in range(kv_heads):
            row.extend(mean_vector([vectors[kh * group + i][t] for i in range(group)]))
        rows.append(row)
    return np.array(rows, dtype=np.float64)


def moments(vectors):
    """(mean, population variance) per dimension of [t, D]; a dimension that never varied has variance exactly 0."""
    mean, variance = mean_vector(vectors), []
    for c, column in enumerate(zip(*vectors, strict=True)):
        spread = math.fsum((float(x) - mean[c]) ** 2 for x in column) / len(column)
        variance.append(0.0 if min(column) == max(column) else spread)
    return mean, np.array(variance)


def running(queries_so_far):
    """(mean, variance), each [heads, d], over ALL queries so far (the current window's too). [heads, t, d]."""
    found = [moments(head) for head in queries_so_far]
    return np.array([mean for mean, _ in found]), np.array([variance for _, variance in found])


def activation(window, mean, variance):
    """‖φ_j‖₁ of every query of the window [w, D], φ_j = (q_j - z̄)²/σ²; a dimension of variance 0 adds 0."""
    dims = [c for c in range(len(mean)) if variance[c] > 0]
    return [math.fsum((float(q[c]) - mean[c]) ** 2 / variance[c] for c in dims) for q in window]


def probe(window, mean, variance):
    """Q_probe [D] of a window of (joined) vectors [w, D]; where no query stands out at all, their mean."""
    weights = activation(window, mean, variance)
    total = math.fsum(weights)
    if total == 0:
        return mean_vector(window)
    return np.array([dot(weights, column) / total for column in zip(*window, strict=True)])


def probe_per_head(window_queries, mean, variance):
    """Every query head with its own moments and weights: [heads, w, d] -> [heads, d]."""
    return np.array([probe(*head) for head in zip(window_queries, mean, variance, strict=True)])


def mean_probe(window):
    """InfLLM: the mean over the window [w, D] (Q-LLM: over the question's queries)."""
    return mean_vector(window)


def representative_scores(queries, chunk_keys, scale, softmax_over_chunk=False):
    """[kv_heads, c]: scaled dot product (or softmax over the chunk) from the following local window's queries,
    averaged over those queries and over the query heads of the group."""
    kv_heads, size = len(chunk_keys), len(chunk_keys[0])
    group, rows = len(queries) // kv_heads, len(queries[0])
    scale = default_scale(scale, len(chunk_keys[0][0]))
    out = np.zeros((kv_heads, size))
    for h, head in enumerate(queries):
        for q in head:
            logits = np.array([dot(q, k) * scale for k in chunk_keys[h // group]])
            out[h // group] += (softmax(logits) if softmax_over_chunk else logits) / (group * rows)
    return out


def representatives(queries_of_following_local, chunk_keys, scale, count, softmax=False):
    """The chunk's `count` tokens of highest mean attention, one choice for the layer (mean over KV heads)."""
    scores = representative_scores(queries_of_following_local, chunk_keys, scale, softmax)
    return top(mean_vector(scores), count)


def representatives_per_head(queries_of_following_local, chunk_keys, scale, count, softmax=False):
    """The same with a choice per KV head."""
    return [top(row, count) for row in representative_scores(queries_of_following_local, chunk_keys, scale, softmax)]


def chunk_scores_cosine(probe, representative_keys):
    """[chunks]: the probe's cosine with each representative's joined key, mean over the chunk's representatives."""
    return [math.fsum(cosine(probe, k) for k in keys) / len(keys) for keys in representative_keys]


def chunk_scores_dot(probe, representative_keys):
    """[chunks]: InfLLM's, with dot products."""
    return [math.fsum(dot(probe, k) for k in keys) / len(keys) for keys in representative_keys]


def best_chunks(scores, count):
    """The best chunks, ties to the later, ascending."""
    return top(scores, count)


def entropy(cosines):
    """Θ in nats of softmax(cosines)."""
    return math.fsum(-p * math.log(p) for p in softmax(np.array(cosines, dtype=np.float64)).tolist() if p > 0)


def layer_budgets(entropies_now, later_means, total, chunk):
    """Tokens of each layer, whole chunks: B_l = Θ_l/(Θ_l + Σ_{j>l} Θ̄_j) · left, rounded down; left -= B_l.

    later_means[j] is Θ̄_j of layer j (its first entry is never used). Exact fractions, so that equal densities share
    equally. No density at all from l on: equal parts. What rounding leaves goes on to the later layers.
    """
    now, later = [Fraction(float(x)) for x in entropies_now], [Fraction(float(x)) for x in later_means]
    budgets, left = [], total
    for layer in range(len(now)):
        ahead = now[layer] + sum(later[layer + 1 :])
        share = now[layer] / ahead if ahead > 0 else Fraction(1, len(now) - layer)
        budgets.append(math.floor(share * left / chunk) * chunk)
        left -= budgets[-1]
    return budgets


def quest_bounds(query, page_keys):
    """Quest, [heads]: Σ_c max(q_c·min_c, q_c·max_c) over one page. query [heads, d], page_keys [kv_heads, p, d]."""
    group, bounds = len(query) // len(page_keys), []
    for h, q in enumerate(query):
        columns = list(zip(*page_keys[h // group], strict=True))
        bounds.append(math.fsum(max(float(x * min(c)), float(x * max(c))) for x, c in zip(q, columns, strict=True)))
    return bounds


def quest_maxima(query, page_keys):
    """[heads]: the true largest q·k in the page, which the bound is never below."""
    group = len(query) // len(page_keys)
    return [max(dot(q, k) for k in page_keys[h // group]) for h, q in enumerate(query)]


def over_group(per_head, kv_heads):
    """[heads] -> [kv_heads]: mean over the query heads that share a KV head."""
    group = len(per_head) // kv_heads
    return [math.fsum(per_head[kh * group : (kh + 1) * group]) / group for kh in range(kv_heads)]


def quest_scores(query, keys, page):
    """[kv_heads, pages]: group means of the bounds; the last page may be short."""
    starts = range(0, len(keys[0]), page)
    pages = [over_group(quest_bounds(query, [head[s : s + page] for head in keys]), len(keys)) for s in starts]
    return np.array(pages).T


def tokenselect_votes(queries, keys, scale):
    """TokenSelect, [n]: each head's softmax over all far tokens, of its mean query of the window, summed over heads."""
    group, votes = len(queries) // len(keys), np.zeros(len(keys[0]))
    scale = default_scale(scale, len(keys[0][0]))
    for h, head in enumerate(queries):
        q = mean_vector(head)
        votes += softmax(np.array([dot(q, k) * scale for k in keys[h // group]]))
    return votes


def assign(keys, centroids, metric="cosine"):
    """The most alike centroid of every key, by "cosine" or "dot", ties to the lowest index."""
    out = []
    for k in keys:
        alike = [{"cosine": cosine, "dot": dot}[metric](k, c) for c in centroids]
        out.append(alike.index(max(alike)))
    return out


def kmeans(keys, clusters, iterations, init_indices, metric="cosine"):
    """ClusterKV: (assignment [n], centroids [clusters, d]) after Lloyd's rounds (assign, then move; empty ones stay).

    The centroids are the means of the returned assignment: nothing is assigned again after the last move. With no
    rounds, the assignment to the initial keys.
    """
    assert len(init_indices) == clusters, "one initial key per cluster"
    centroids = np.array([keys[i] for i in init_indices], dtype=np.float64)
    assignment = assign(keys, centroids, metric)
    for turn in range(iterations):
        if turn > 0:
            assignment = assign(keys, centroids, metric)
        for c in range(clusters):
            members = [k for k, a in zip(keys, assignment, strict=True) if a == c]
            if members:
                centroids[c] = mean_vector(members)
    return assignment, centroids


def clusters_until(scores, sizes, budget, last=None):
    """Tokens taken of each cluster: whole clusters best first, the last one cut, min(budget, n) in all.

    Ties go to the cluster that ends later (`last[c]`, its last token), without `last` to the higher number."""
    last = range(len(sizes)) if last is None else last
    taken, left = [0] * len(sizes), budget
    for c in sorted(range(len(sizes)), key=lambda c: (-scores[c], -last[c])):
        taken[c] = min(sizes[c], max(0, left))
        left -= taken[c]
    return taken


def tokens_until(scores, members, budget):
    """The tokens themselves, ascending. members[c]: cluster c's tokens in the order a cut keeps them, best first."""
    last = [max(tokens, default=-1) for tokens in members]
    taken = clusters_until(scores, [len(tokens) for tokens in members], budget, last)
    return sorted(j for tokens, count in zip(members, taken, strict=True) for j in tokens[:count])


def squeezed_scores(query, centroids, sizes, scale):
    """Squeezed Attention: S_i = exp(q·C_i) / Σ_j N_j exp(q·C_j), logits scaled."""
    scale = default_scale(scale, len(query))
    logits = [dot(query, c) * scale for c in centroids]
    weights = [math.exp(x - max(logits)) for x in logits]
    return [w / dot(sizes, weights) for w in weights]


def squeezed_kept(scores, threshold):
    """The clusters whose S_i is above the threshold (not equal), ascending."""
    return [c for c, s in enumerate(scores) if s > threshold]


def sentence_scores(query, sentence_mean_keys, use_cosine=False):
    """SentenceKV, [sentences]: similarity of the query with each sentence's mean key."""
    return [cosine(query, k) if use_cosine else dot(query, k) for k in sentence_mean_keys]


def emllm_boundaries(surprise, gamma, window):
    """EM-LLM (arXiv 2407.09450), the first token of each event: 0, and t where surprise_t > mean + gamma·std of the
    (up to) `window` surprises before it."""
    found = [0]
    for t in range(1, len(surprise)):
        before = [[float(x)] for x in surprise[max(0, t - window) : t]]
        mean, variance = moments(before)
        if surprise[t] > mean[0] + gamma * math.sqrt(variance[0]):
            found.append(t)
    return found if len(surprise) > 0 else []


def similarity(keys):
    """The graph A [n, n]: dot products of (joined) keys [n, D], each with itself included; so its sum is never < 0."""
    return np.array([[dot(a, b) for b in keys] for a in keys])


def modularity(adjacency, communities):
    """1/(4m) Σ_ij (A_ij - k_i·k_j/(2m)) [c_i = c_j], 2m the sum of A (the paper's factor: half of Newman's).

    communities[i] is node i's community. A is symmetric. A graph whose weights sum to 0 has modularity 0."""
    n, total = len(adjacency), math.fsum(float(x) for row in adjacency for x in row)
    if total == 0:
        return 0.0
    degree = [math.fsum(float(x) for x in row) for row in adjacency]
    same = [(i, j) for i in range(n) for j in range(n) if communities[i] == communities[j]]
    return math.fsum(float(adjacency[i][j]) - degree[i] * degree[j] / total for i, j in same) / (2 * total)


def refine(boundaries, adjacency):
    """EM-LLM's Algorithm 1: for consecutive boundaries α < β, β moves to the β̂ in (α, β] of highest modularity.

    What is printed as f(A, {α, β̂}) is read as: the graph of the tokens from α to the next boundary after β (or the
    end), cut in two at β̂. From left to right, in place: α is already refined, the next boundary not yet. Ties go to
    the later β̂. The first boundary never moves; the number of boundaries stays.
    """
    refined = list(boundaries)
    for i in range(len(refined) - 1):
        start, before = refined[i], refined[i + 1]
        end = refined[i + 2] if i + 2 < len(refined) else len(adjacency)
        graph = [list(adjacency[a][start:end]) for a in range(start, end)]
        quality = {
            cut: modularity(graph, [a >= cut for a in range(start, end)]) for cut in range(start + 1, before + 1)
        }
        refined[i + 1] = max(quality, key=lambda cut: (quality[cut], cut))
    return refined


def rotate(vector, position, inv_freq):
    """RoPE, half-split: dimension i turns with i + half, half = len(inv_freq); dimensions from 2·half on stay."""
    half, out = len(inv_freq), [float(x) for x in vector]
    for i in range(half):
        cos, sin = math.cos(position * inv_freq[i]), math.sin(position * inv_freq[i])
        out[i] = float(vector[i]) * cos - float(vector[i + half]) * sin
        out[i + half] = float(vector[i + half]) * cos + float(vector[i]) * sin
    return out


def retrieved_attention(
    q, q_position, far_keys, far_values, near_keys, near_values, near_positions, edge, inv_freq, scale
):
    """Output [d] of one head's query: one softmax over far tokens, all `edge` away, and near ones where they are.

    q and keys are [d] vectors without rotation. far: sinks and retrieved tokens, never turned; near: the local window
    and the query's own; those after the query are not seen.
    """
    scale = default_scale(scale, len(q))
    at_edge, at_home = rotate(q, edge, inv_freq), rotate(q, q_position, inv_freq)
    logits = [dot(at_edge, k) * scale for k in far_keys]
    values = list(far_values)
    for k, v, position in zip(near_keys, near_values, near_positions, strict=True):
        if position <= q_position:
            logits.append(dot(at_home, rotate(k, position, inv_freq)) * scale)
            values.append(v)
    weights = softmax(np.array(logits))
    return np.array([dot(weights, column) for column in zip(*values, strict=True)])
