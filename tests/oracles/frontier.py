"""The methods of FRONTIER.md that judge a token by the context itself, and three ways to share a budget.

Shapes as in common.py: Q [Hq, n, d], K and V [Hk, n, d], float64, after RoPE; token j stands at position j. Forced
tokens have the score +inf. `inv_freq` has d/2 numbers. Ties go to the later token.
"""

import math

import numpy as np

from .common import default_scale, dots, everything, force, kept_window, pool1d, softmax, top, window_votes

# ---------------------------------------------------------------------------------------------- common ground


def norm(x):
    """L2 norm of one vector."""
    return math.sqrt(math.fsum(float(v) * float(v) for v in x))


def rotate(x, position, inv_freq):
    """One vector turned by `position` (Llama's half-split RoPE); a negative position turns it back."""
    half = len(x) // 2
    out = np.zeros(len(x))
    for i in range(half):
        angle = position * float(inv_freq[i])
        c, s = math.cos(angle), math.sin(angle)
        out[i] = x[i] * c - x[half + i] * s
        out[half + i] = x[half + i] * c + x[i] * s
    return out


def unrotate_all(x, inv_freq):
    """[n, d] of one head, row p turned back by its position p."""
    return np.array([rotate(row, -p, inv_freq) for p, row in enumerate(x)])


def guard(n, budget, sinks=0, recent=0):
    """The first `sinks` and the last `recent` tokens; over budget, the sinks yield first, then the older recent."""
    recent = max(0, min(recent, budget, n))
    sinks = max(0, min(sinks, budget - recent, n - recent))
    return list(range(sinks)) + list(range(n - recent, n))


def force_all(scores, tokens):
    """The same tokens forced in every head."""
    return np.array([force(row, tokens) for row in scores])


def keep(scores, K, budget):
    """Per KV head the best `budget` tokens; everything where n <= B."""
    if K.shape[1] <= budget:
        return everything(K)
    return [top(row, budget) for row in scores]


def zscore(x):
    """All numbers of a layer [Hk, n] made mean 0 and (population) standard deviation 1."""
    values = [float(v) for row in x for v in row]
    mean = math.fsum(values) / len(values)
    variance = math.fsum((v - mean) ** 2 for v in values) / len(values)
    return (np.asarray(x, dtype=np.float64) - mean) / max(math.sqrt(variance), 1e-12)


# ------------------------------------------------------------------------------------- random, knorm, keydiff


def scores_random(Q, K, V, budget, *, uniform):
    """[Hk, n]: the given uniform number of every KV head and token; nothing is forced."""
    out = np.zeros(K.shape[:2])
    for h in range(K.shape[0]):
        for j in range(K.shape[1]):
            out[h, j] = float(uniform[h][j])
    return out


def oracle_random(Q, K, V, budget, *, uniform):
    """The tokens with the largest numbers."""
    return keep(scores_random(Q, K, V, budget, uniform=uniform), K, budget)


def stream_keep_prompt_random(prompt, generated, budget, buffer, *, uniform):
    """What each KV head holds after a prompt and after every generated token: ascending lists. [step][head]

    A token's number is uniform[head][token]. A prompt beyond the budget loses its lowest numbers; whenever a head holds
    budget + buffer tokens, generated ones leave, lowest first, until it holds the budget, and after them the prompt's.
    The newest token stays.
    """
    heads, history = [list(range(prompt)) for _ in uniform], []
    for step in range(generated + 1):
        newest = prompt + step - 1
        for h, held in enumerate(heads):
            if step:
                held.append(newest)
            most = budget if step == 0 else budget + buffer - 1
            if len(held) <= most:
                continue
            while len(held) > budget:
                others = [j for j in held if j != newest]
                answer = [j for j in others if j >= prompt]
                held.remove(min(answer or others, key=lambda j: (float(uniform[h][j]), j)))
        history.append([list(held) for held in heads])
    return history


def scores_knorm(Q, K, V, budget):
    """[Hk, n]: minus the L2 norm of the key; nothing is forced."""
    return np.array([[-norm(k) for k in head] for head in K])


def oracle_knorm(Q, K, V, budget):
    """The tokens with the shortest keys."""
    return keep(scores_knorm(Q, K, V, budget), K, budget)


def unit(x):
    """x / |x|; a zero vector stays zero."""
    length = norm(x)
    return np.array([float(v) / length if length > 0 else 0.0 for v in x])


def scores_keydiff(Q, K, V, budget):
    """[Hk, n]: minus the cosine of the key with the mean of the head's unit keys; nothing is forced."""
    heads, n, d = K.shape
    out = np.zeros((heads, n))
    for h in range(heads):
        units = [unit(k) for k in K[h]]
        anchor = unit([math.fsum(u[c] for u in units) / n for c in range(d)])
        for j in range(n):
            out[h, j] = -math.fsum(units[j][c] * anchor[c] for c in range(d))
    return out


def oracle_keydiff(Q, K, V, budget):
    """The tokens whose keys point least where the head's keys point on average."""
    return keep(scores_keydiff(Q, K, V, budget), K, budget)


# ------------------------------------------------------------------------------------------------------ lagkv


def lag_partitions(n, sinks, lag):
    """The whole partitions of `lag` tokens after the sinks, as (start, end)."""
    count = max(0, n - sinks) // lag
    return [(sinks + p * lag, sinks + (p + 1) * lag) for p in range(count)]


def forced_lagkv(n, budget, sinks=4, lag=128):
    """Sinks, the last whole partition and the tail; with fewer than two partitions nothing (pure recency)."""
    count = len(lag_partitions(n, sinks, lag))
    if count < 2:
        return []
    return guard(n, budget, sinks, n - sinks - lag * (count - 1))


def lag_spread(x, reference):
    """Softmax over one partition's tokens of the unbiased standard deviation over channels of
    (x - lo) / (hi - lo), lo and hi being the channel's extremes in `reference`; a flat channel gives 0."""
    rows, d = x.shape
    spread = np.zeros(rows)
    for j in range(rows):
        scaled = []
        for c in range(d):
            lo, hi = float(np.min(reference[:, c])), float(np.max(reference[:, c]))
            scaled.append((float(x[j, c]) - lo) / (hi - lo) if hi > lo else 0.0)
        mean = math.fsum(scaled) / d
        spread[j] = math.sqrt(math.fsum((y - mean) ** 2 for y in scaled) / (d - 1))
    return softmax(spread)


def lag_ranks(values):
    """Rank of every value from 0 (lowest), the later of two equal ones higher, divided by their number."""
    out = np.zeros(len(values))
    for rank, j in enumerate(sorted(range(len(values)), key=lambda j: (values[j], j))):
        out[j] = rank / len(values)
    return out


def scores_lagkv(Q, K, V, budget, *, sinks=4, lag=128):
    """[Hk, n]: rank within the partition by how the token spreads against the next partition."""
    heads, n = K.shape[:2]
    parts = lag_partitions(n, sinks, lag)
    out = np.zeros((heads, n))
    for h in range(heads):
        if len(parts) < 2:
            out[h] = np.arange(n)
        for (start, end), (after, stop) in zip(parts, parts[1:], strict=False):  # the last one has no next
            keys = lag_spread(K[h, start:end], K[h, after:stop])
            values = lag_spread(V[h, start:end], V[h, after:stop])
            out[h, start:end] = lag_ranks((keys + values) / 2)
    return force_all(out, forced_lagkv(n, budget, sinks, lag))


def oracle_lagkv(Q, K, V, budget, *, sinks=4, lag=128):
    """The forced tokens and the best of every partition alike."""
    return keep(scores_lagkv(Q, K, V, budget, sinks=sinks, lag=lag), K, budget)


# ----------------------------------------------------------------------------------------- expected attention


def mean_rotation(first, count, inv_freq):
    """[d, d]: the mean of the rotation matrices of the positions first .. first+count-1."""
    half = len(inv_freq)
    out = np.zeros((2 * half, 2 * half))
    for i in range(half):
        angles = [p * float(inv_freq[i]) for p in range(first, first + count)]
        c = math.fsum(math.cos(a) for a in angles) / count
        s = math.fsum(math.sin(a) for a in angles) / count
        out[i, i], out[i, half + i] = c, -s
        out[half + i, i], out[half + i, half + i] = s, c
    return out


def query_moments(queries):
    """Mean [d] and population covariance [d, d] of the rows of `queries`."""
    count, d = queries.shape
    mu = np.array([math.fsum(queries[:, c]) / count for c in range(d)])
    sigma = np.zeros((d, d))
    for a in range(d):
        for b in range(d):
            sigma[a, b] = math.fsum((queries[:, a] - mu[a]) * (queries[:, b] - mu[b])) / count
    return mu, sigma


def expected_logits(queries, keys, rotation, scale, covariance):
    """log E[exp(scale q·k)] of every key for a normal q with the (mean-rotated) moments of `queries`."""
    mu, sigma = query_moments(queries)
    mu, sigma = rotation @ mu, rotation @ sigma @ rotation.T
    logits = dots(keys, mu) * scale
    if covariance:
        for j, k in enumerate(keys):
            logits[j] += float(dots([dots(sigma, k)], k)[0]) * scale * scale / 2
    return logits


def scores_expected_attention(
    Q, K, V, budget, *, inv_freq, future=512, sinks=4, epsilon=0.0, covariance=True, values=True, scale=None
):
    """[Hk, n]: the attention that the next `future` queries are expected to pay, times |v|; +inf on the sinks."""
    heads, n, d = Q.shape
    group = heads // K.shape[0]
    scale = default_scale(scale, d)
    rotation = mean_rotation(n, future, inv_freq)
    out = np.zeros(K.shape[:2])
    for h in range(heads):
        plain = unrotate_all(Q[h], inv_freq)
        plain = plain if n <= sinks else plain[sinks:]
        logits = expected_logits(plain, K[h // group][sinks:], rotation, scale, covariance)
        out[h // group, sinks:] += softmax(logits) / group
    if values:
        for h in range(K.shape[0]):
            for j in range(sinks, n):
                out[h, j] = (out[h, j] + epsilon) * norm(V[h, j])
    return force_all(out, guard(n, budget, sinks))


def oracle_expected_attention(Q, K, V, budget, **options):
    """The sinks and the best expected attention."""
    return keep(scores_expected_attention(Q, K, V, budget, **options), K, budget)


# -------------------------------------------------------------------------------------------------- compactor


def leverage(keys, gaussian, ridge, inv_freq):
    """x_j (XᵀX + ridge I)⁻¹ x_jᵀ of one head's keys: un-rotated, centred, sketched by gaussian / sqrt(columns)."""
    plain = unrotate_all(keys, inv_freq)
    n, d = plain.shape
    gaussian = np.asarray(gaussian, dtype=np.float64)
    sketch = gaussian.shape[1]
    centre = np.array([math.fsum(plain[:, c]) / n for c in range(d)])
    X = np.zeros((n, sketch))
    gram = ridge * np.eye(sketch)
    for j in range(n):
        X[j] = dots(gaussian.T, plain[j] - centre) / math.sqrt(sketch)
        gram += np.outer(X[j], X[j])
    inverse = np.linalg.inv(gram)
    return np.array([float(dots([x], dots(inverse, x))[0]) for x in X])


def chunk_columns(queries, keys, chunk):
    """[n]: column sums of softmax(q·k), unscaled and not causal, within chunks of `chunk` tokens."""
    n = len(keys)
    out = np.zeros(n)
    for start in range(0, n, chunk):
        end = min(start + chunk, n)
        for i in range(start, end):
            out[start:end] += softmax(dots(keys[start:end], queries[i]))
    return out


def compactor_attention(Q, K, V, chunk):
    """[Hk, n]: chunk columns averaged over the group, times |v|, average-pooled by 3 over the whole head."""
    heads, n = Q.shape[:2]
    group = heads // K.shape[0]
    out = np.zeros(K.shape[:2])
    for h in range(heads):
        out[h // group] += chunk_columns(Q[h], K[h // group], chunk) / group
    for h in range(K.shape[0]):
        out[h] = pool1d([out[h, j] * norm(V[h, j]) for j in range(n)], 3)
    return out


def scores_compactor(Q, K, V, budget, *, inv_freq, gaussian, chunk=256, sinks=8, recent=4, ridge=0.01):
    """[Hk, n]: (share removed)·z(leverage) + z(attention), z over the layer; +inf on first and last tokens."""
    n = K.shape[1]
    a = zscore([leverage(head, gaussian, ridge, inv_freq) for head in K])
    b = zscore(compactor_attention(Q, K, V, chunk))
    return force_all((1.0 - budget / n) * a + b, guard(n, budget, sinks, recent))


def oracle_compactor(Q, K, V, budget, **options):
    """The forced tokens and the best scores."""
    return keep(scores_compactor(Q, K, V, budget, **options), K, budget)


# ------------------------------------------------------------------------------------------------------- echo


def echo_row(query, i, start, end, keys, delta, sinks, scale, inv_freq):
    """Attention that token i's query, moved on by delta, pays to the chunk [start, end): one softmax over the
    sinks before the chunk and the chunk (moved query) and the virtual copy (the query where it stands, causal)."""
    moved = rotate(query, delta, inv_freq)
    before = min(sinks, start)
    logits = [scale * float(x) for x in dots(keys[:before], moved)]
    logits += [scale * float(x) for x in dots(keys[start:end], moved)]
    logits += [scale * float(x) for x in dots(keys[start : i + 1], query)]
    return softmax(np.array(logits))[before : before + end - start]


def scores_echo(Q, K, V, budget, *, inv_freq, scale=None, chunk=2048, sinks=4, gap=20, near=None):
    """[Hk, n]: the most that any query of the token's chunk, at most `near` tokens from it, would pay to it when
    repeating; +inf on the sinks."""
    heads, n, d = Q.shape
    group = heads // K.shape[0]
    scale = default_scale(scale, d)
    out = np.zeros(K.shape[:2])
    for h in range(heads):
        kh = h // group
        for start in range(0, n, chunk):
            end = min(start + chunk, n)
            for i in range(start, end):
                row = echo_row(Q[h, i], i, start, end, K[kh], n + gap - start, sinks, scale, inv_freq)
                for j in range(start, end):
                    if near is None or abs(i - j) <= near:
                        out[kh, j] = max(out[kh, j], row[j - start])
    return force_all(out, guard(n, budget, sinks))


def oracle_echo(Q, K, V, budget, **options):
    """The sinks and the tokens that a repetition would look at."""
    return keep(scores_echo(Q, K, V, budget, **options), K, budget)


# -------------------------------------------------------------------------------------- allocators, modifiers


def best_first(scores, stay):
    """The tokens of one head that are not in `stay`, best first, ties to the later one."""
    return sorted((j for j in range(len(scores)) if j not in stay), key=lambda j: (-scores[j], -j))


def shared(scores_by_layer, forced_by_layer, budget, floor=0.0):
    """kept[layer][head]: one budget of layers·Hk·budget tokens for all heads of all layers.

    Every head keeps its forced tokens and is filled up to floor(floor·budget) by its own best; then one ranking
    of all other tokens spends what is left. Ties: later token, lower head, lower layer.
    """
    if len(scores_by_layer[0][0]) <= budget:
        return [[list(range(len(row))) for row in layer] for layer in scores_by_layer]
    kept, pooled, left = [], [], 0
    for layer, heads in enumerate(scores_by_layer):
        kept.append([])
        for h, row in enumerate(heads):
            stay = set(forced_by_layer[layer][h])
            order = best_first(row, stay)
            sure = max(0, math.floor(floor * budget) - len(stay))
            kept[layer].append(stay | set(order[:sure]))
            left += budget - len(kept[layer][h])
            pooled += [(-float(row[j]), -j, h, layer) for j in order[sure:]]
    for _, minus_j, h, layer in sorted(pooled)[: max(0, left)]:
        kept[layer][h].add(-minus_j)
    return [[sorted(head) for head in layer] for layer in kept]


def threshold(scores, forced, budget, tau=0.001):
    """Per head: the forced tokens and, best first within the budget, those that score more than tau."""
    kept = []
    for h, row in enumerate(scores):
        if len(row) <= budget:
            kept.append(list(range(len(row))))
            continue
        stay = set(forced[h])
        above = [j for j in best_first(row, stay) if row[j] > tau]
        kept.append(sorted(stay | set(above[: max(0, budget - len(stay))])))
    return kept


def projected(values, wo, group):
    """[Hk, n]: mean over the group's query heads h of |wo[h] v|_1; wo [Hq, hidden, d]."""
    heads, n = values.shape[:2]
    out = np.zeros((heads, n))
    for h in range(heads):
        for j in range(n):
            for member in range(h * group, (h + 1) * group):
                out[h, j] += math.fsum(abs(float(x)) for x in dots(wo[member], values[h, j])) / group
    return out


def critical(scores, forced, values, wo, budget, share=0.5, epsilon=1e-4, group=1):
    """Per head: forced, then floor(share·(budget - forced)) by score, the rest by (score + epsilon)·|W_O v|_1."""
    weight = projected(values, wo, group)
    kept = []
    for h, row in enumerate(scores):
        if len(row) <= budget:
            kept.append(list(range(len(row))))
            continue
        stay = set(forced[h])
        first = max(0, math.floor(share * (budget - len(stay))))
        stay |= set(best_first(row, stay)[:first])
        second = [0.0 if j in stay else (row[j] + epsilon) * weight[h, j] for j in range(len(row))]
        kept.append(sorted(stay | set(best_first(second, stay)[: max(0, budget - len(stay))])))
    return kept


# ------------------------------------------------------------------------------------------------------- rkv


def redundancy_rkv(keys, alike):
    """[n] of one head: softmax over tokens of each key's mean cosine to the others.

    Of keys that are alike (cosine above `alike`) the most recent is spared: the alike ones before it count as 0.
    """
    units, n = [unit(k) for k in keys], len(keys)
    mean = np.zeros(n)
    for i in range(n):
        cosines = dots(units, units[i])
        newest = not any(cosines[j] > alike for j in range(i + 1, n))
        counted = [0.0 if newest and cosines[j] > alike else cosines[j] for j in range(n) if j != i]
        mean[i] = math.fsum(counted) / max(1, n - 1)
    return softmax(mean)


def scores_rkv(Q, K, V, budget, *, window=8, pool=7, importance=0.1, alike=0.5, qpos=None, kpos=None):
    """[Hk, n]: importance times the window's mean attention (pooled by maxima) less the rest times redundancy."""
    n = K.shape[1]
    rows, stay = kept_window(window, budget, n)
    votes = window_votes(Q, K, rows, None, qpos, kpos) / rows
    out = np.zeros_like(votes)
    for h in range(len(votes)):
        attended = np.array(votes[h])
        attended[: n - stay] = pool1d(votes[h, : n - stay], pool, "max")
        out[h] = importance * attended - (1 - importance) * redundancy_rkv(K[h], alike)
        out[h] = force(out[h], range(n - stay, n))
    return out


def oracle_rkv(Q, K, V, budget, **options):
    """The best tokens, and the window."""
    return keep(scores_rkv(Q, K, V, budget, **options), K, budget)


# ------------------------------------------------------------------------------------------ budget="auto"


def coverage(scores, forced, most, share, pool="head", alpha=0.0):
    """kept[layer][head], ascending: as few of the best tokens as make up `share` of the scores of what competes.

    scores[layer][head][token], forced[layer][head]: tokens that stay and count neither way. pool: a "head", the heads
    of a "layer", or "all". At most `most` tokens for each of a pool's heads, on average, forced ones included; one at
    least. alpha: each head of a pool is sure of that part of an equal share of what was found to be needed.
    Ties: the later token, then the lower head, then the lower layer.
    """
    heads = [(layer, head) for layer in range(len(scores)) for head in range(len(scores[layer]))]
    key = {"head": lambda h: h, "layer": lambda h: h[0], "all": lambda h: 0}[pool]
    kept = {}
    for name in dict.fromkeys(key(h) for h in heads):
        mine = [h for h in heads if key(h) == name]
        stay = {h: set(forced[h[0]][h[1]]) for h in mine}
        free = [(h, j) for h in mine for j in range(len(scores[h[0]][h[1]])) if j not in stay[h]]
        free.sort(key=lambda place: (-scores[place[0][0]][place[0][1]][place[1]], -place[1], place[0][1], place[0][0]))
        amount = [float(scores[layer][head][j]) for (layer, head), j in free]
        count, whole = 0, math.fsum(amount)
        while count < len(free) and math.fsum(amount[:count]) < share * whole:
            count += 1
        fixed = sum(len(tokens) for tokens in stay.values())
        total = min(max(1, fixed + count), most * len(mine))
        for h in mine:  # a floor: the head's best, beside what stays
            floor = len(stay[h]) + math.floor(alpha * max(0, total // len(mine) - len(stay[h])))
            stay[h] |= set([j for other, j in free if other == h][: floor - len(stay[h])])
        for h, j in free:
            if sum(len(tokens) for tokens in stay.values()) < total:
                stay[h].add(j)
        kept |= {h: sorted(tokens) for h, tokens in stay.items()}
    return [[kept[layer, head] for head in range(len(scores[layer]))] for layer in range(len(scores))]
