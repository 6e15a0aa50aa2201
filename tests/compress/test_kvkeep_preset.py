"""The preset `kvkeep` and the modifier `+values` against float64 loops written from their specification alone."""

import math
import random

import pytest
import torch

import kvkeep

DEFAULTS = dict(window=32, pool=7, block=16, sinks=4, alpha=0.5)
OTHER = dict(window=8, pool=5, block=4, sinks=2, alpha=0.25)
GROUPS = [(4, 4), (2, 2), (4, 2), (6, 2), (8, 2), (6, 3), (4, 1), (3, 1), (1, 1)]  # query heads, KV heads
SLACK = 1e-5  # float32 sums are off by about 1e-6: rivals this close, relative to the better one, may swap places


def votes_of(queries, keys, w):
    """Per KV head and token: attention of the last w queries, summed over them, averaged over the head's group."""
    n, d, group = len(keys[0]), len(keys[0][0]), len(queries) // len(keys)
    votes = [[0.0] * n for _ in keys]
    for head, rows in enumerate(queries):
        for i in range(n - w, n):
            logits = [sum(a * b for a, b in zip(rows[i], keys[head // group][j], strict=True)) for j in range(i + 1)]
            top = max(logits)
            weights = [math.exp((logit - top) / math.sqrt(d)) for logit in logits]
            total = sum(weights)
            for j, weight in enumerate(weights):
                votes[head // group][j] += weight / total / group
    return votes


def pooled(votes, pool, end, how):
    """Each of the first `end` votes becomes `how` of its neighbours among them; the window's own do not matter."""
    half = pool // 2
    return [how(votes[max(0, j - half) : min(end, j + half + 1)]) for j in range(end)] + [0.0] * (len(votes) - end)


def mean(numbers):
    return sum(numbers) / len(numbers)


def weights_of(values):
    """Squared length of each value, averaged over the two neighbours on either side, against the head's largest."""
    squares = [sum(x * x for x in row) for row in values]
    smooth = [mean(squares[max(0, j - 2) : j + 3]) for j in range(len(squares))]
    return [s / max(smooth) for s in smooth]


def sure_of(forced, budget, alpha):
    return len(forced) + math.floor(alpha * max(0, budget - len(forced)))


def blocks_of(score, forced, block):
    """(worth, start, its tokens that are not forced) of every block."""
    for start in range(0, len(score), block):
        loose = [j for j in range(start, min(start + block, len(score))) if j not in forced]
        yield sum(score[j] for j in loose), start, loose


def in_order(score, forced, block):
    """(worth of its block, own score, token) of what is not forced, as a head keeps them: best block, best token."""
    for worth, _, loose in sorted(blocks_of(score, forced, block), reverse=True):
        yield from sorted(((worth, score[j], j) for j in loose), reverse=True)


def quotas_of(scores, forced, budget, alpha, block):
    """Each head is sure of its first tokens; all others compete by worth of their block, own score, late, low head."""
    quotas, rivals = [], []
    for head, score in enumerate(scores):
        quotas.append(sure_of(forced, budget, alpha))
        for worth, own, j in list(in_order(score, forced, block))[quotas[head] - len(forced) :]:
            rivals.append((-worth, -own, -j, head))
    for *_, head in sorted(rivals)[: len(scores) * budget - sum(quotas)]:
        quotas[head] += 1
    return quotas


def by_blocks(score, forced, quota, block):
    kept = set(forced)
    for _, _, loose in sorted(blocks_of(score, forced, block), reverse=True):
        loose = sorted(loose, key=lambda j: (score[j], j), reverse=True)
        kept.update(loose[: quota - len(kept)])
        if len(kept) == quota:
            break
    return sorted(kept)


def choose(scores, forced, budget, block, alpha):
    if len(scores[0]) <= budget:
        return [list(range(len(score))) for score in scores]
    quotas = quotas_of(scores, forced, budget, alpha, block)
    return [by_blocks(score, forced, quota, block) for score, quota in zip(scores, quotas, strict=True)]


def scored(queries, keys, values, budget, window, pool, sinks, how=max, power=1.0):
    """Scores per KV head, and the tokens that stay whatever their score."""
    queries, keys, values = queries.tolist(), keys.tolist(), values.tolist()
    n = len(keys[0])
    w = min(max(1, min(window, budget // 2)), n)
    scores = [
        [vote * weight**power for vote, weight in zip(pooled(votes, pool, n - w, how), weights_of(rows), strict=True)]
        for votes, rows in zip(votes_of(queries, keys, w), values, strict=True)
    ]
    return scores, set(range(min(sinks, n))) | set(range(n - w, n))


def unbeaten(winners, losers):
    """No loser is better than a winner by more than SLACK."""
    return not winners or not losers or min(winners) >= max(losers) * (1 - SLACK)


def excused(kept, scores, forced, budget, block, alpha):
    """Whether every decision behind `kept` agrees with the oracle's scores but for rivals within SLACK of each other.

    The decisions: which tokens win the shared pool (so each head's quota), which blocks are whole, which are left out,
    and which tokens stay in the one block that is cut.
    """
    if len(scores[0]) <= budget or sum(map(len, kept)) != len(scores) * budget:
        return False
    taken, left = [], []
    for positions, score in zip(kept, scores, strict=True):
        sure, order = sure_of(forced, budget, alpha) - len(forced), list(in_order(score, forced, block))
        quota = len(positions) - len(forced)
        if quota < sure or not forced <= set(positions) or positions != sorted(set(positions)):
            return False
        taken += [worth for worth, *_ in order[sure:quota]]
        left += [worth for worth, *_ in order[quota:]]
        whole, cut, out = [], [], []
        for worth, _, loose in blocks_of(score, forced, block):
            inside = [score[j] for j in loose if j in positions]
            outside = [score[j] for j in loose if j not in positions]
            if inside and outside:
                cut.append(worth)
                if not unbeaten(inside, outside):
                    return False
            elif loose:
                (whole if inside else out).append(worth)
        if len(cut) > 1 or not unbeaten(whole, cut + out) or not unbeaten(cut, out):
            return False
    return unbeaten(taken, left)


def tensors(seed, heads, key_heads, n, d):
    torch.manual_seed(seed)
    values = torch.randn(key_heads, n, d) * (0.2 + torch.rand(key_heads, n, 1))
    return 2 * torch.randn(heads, n, d), torch.randn(key_heads, n, d), values


def spec_of(changes):
    return ":".join(["kvkeep", *(f"{name}={value}" for name, value in changes.items())])


def random_cases(count):
    draw = random.Random(7)
    for seed in range(count):
        n = draw.choice([draw.randint(1, 40), draw.randint(20, 150), draw.randint(60, 300)])
        budget = draw.randint(8, max(8, min(n, 140)))
        changes = draw.choice([{}, {}, OTHER, dict(block=5, alpha=0.75), dict(window=16, pool=3, sinks=0)])
        yield pytest.param(
            (seed, *draw.choice(GROUPS), n, draw.randint(4, 32)), budget, changes, id=f"{seed}-{n}-{budget}"
        )


CORNERS = [  # few tokens; forced tokens fill the budget; one token dropped; several whole blocks; n equal to the budget
    pytest.param((101, 2, 2, 1, 4), 8, {}, id="one token"),
    pytest.param((102, 4, 2, 30, 8), 8, {}, id="forced fill the budget"),
    pytest.param((103, 4, 2, 90, 8), 89, {}, id="one dropped"),
    pytest.param((104, 6, 3, 300, 16), 131, {}, id="whole blocks"),
    pytest.param((105, 4, 1, 64, 8), 64, {}, id="n is the budget"),
    pytest.param((106, 4, 4, 120, 8), 41, dict(alpha=0.0), id="all shared"),
    pytest.param((107, 4, 4, 120, 8), 41, dict(alpha=1.0), id="nothing shared"),
]


@pytest.mark.parametrize("shape, budget, changes", [*random_cases(40), *CORNERS])
def test_the_preset_keeps_what_its_specification_says(shape, budget, changes):
    told = {**DEFAULTS, **changes}
    data = tensors(*shape)
    scores, forced = scored(*data, budget, told["window"], told["pool"], told["sinks"])
    kept = kvkeep.select(spec_of(changes), *data, budget).tolist()
    assert sum(map(len, kept)) == len(scores) * min(budget, len(scores[0]))  # spent to the last token
    rule = scores, forced, budget, told["block"], told["alpha"]
    assert kept == choose(*rule) or excused(kept, *rule)


@pytest.mark.parametrize("changes", [{}, OTHER], ids=["defaults", "other"])
@pytest.mark.parametrize("wrong", [dict(block=8), dict(alpha=1.0), dict(pool=1), dict(sinks=1), dict(window=12)])
def test_another_rule_is_noticed(changes, wrong):
    """The comparison above can fail: one parameter off, and neither equality nor the excuse holds."""
    told = {**DEFAULTS, **changes}
    budget, data = 61, tensors(3, 6, 3, 200, 8)
    kept = kvkeep.select(spec_of(changes), *data, budget).tolist()
    told.update(wrong)
    rule = *scored(*data, budget, told["window"], told["pool"], told["sinks"]), budget, told["block"], told["alpha"]
    assert kept != choose(*rule) and not excused(kept, *rule)


def test_the_excuse_covers_near_ties_only():
    """One head, ten tokens in blocks of two, the last two forced: only a swap within SLACK passes."""
    score = [1.0, 1.0, 5.0, 5.0, 3.0, 2.0, 1.0, 1.0 + 3e-6, 0.0, 0.0]
    rule = [score], {8, 9}, 5, 2, 1.0
    assert choose(*rule) == [[2, 3, 4, 8, 9]]
    assert excused([[2, 3, 4, 8, 9]], *rule)
    assert not excused([[2, 3, 5, 8, 9]], *rule)  # the worse token of the cut block
    assert not excused([[2, 3, 6, 8, 9]], *rule)  # a worse block
    assert not excused([[2, 4, 5, 8, 9]], *rule)  # the best block cut, a worse one whole
    assert not excused([[2, 3, 4, 5, 9]], *rule)  # a forced token lost
    assert not excused([[2, 3, 8, 9]], *rule)  # less than the budget
    rule = [score], {8, 9}, 7, 2, 1.0
    assert choose(*rule) == [[2, 3, 4, 5, 7, 8, 9]]
    assert all(excused([sorted([2, 3, 4, 5, j, 8, 9])], *rule) for j in (0, 1, 6, 7))  # blocks and tokens 3e-6 apart
    shared = [[4.0, 3.0, 2.0, 0.0], [4.0, 3.0 + 3e-6, 2.0, 0.0]], {3}, 3, 1, 0.5  # each sure of 2, two more to share
    assert choose(*shared) == [[0, 1, 3], [0, 1, 3]] and excused([[0, 1, 3], [0, 1, 3]], *shared)
    assert not excused([[0, 3], [0, 1, 2, 3]], *shared)  # a quota that a worse token won


def test_exact_ties_go_to_the_later_token_and_the_lower_head():
    """Queries of zero and values of one make every score equal; head 2 has little to offer beyond its sure tokens."""
    n, budget = 200, 60  # an odd token is left to share between heads 0 and 1
    queries, keys, values = torch.zeros(3, n, 4), torch.zeros(3, n, 4), torch.ones(3, n, 4)
    values[2, :150] = 0
    scores, forced = scored(queries, keys, values, budget, 32, 7, 4)
    quotas = quotas_of(scores, forced, budget, 0.5, 16)
    kept = kvkeep.select("kvkeep", queries, keys, values, budget).tolist()
    assert kept == choose(scores, forced, budget, 16, 0.5)
    assert quotas[0] == quotas[1] + 1 > budget > quotas[2]


@pytest.mark.parametrize("seed, n, budget", [(1, 150, 33), (2, 70, 21), (3, 90, 9), (4, 20, 25), (5, 200, 77)])
def test_values_multiply_the_votes_of_snapkv(seed, n, budget):
    data = tensors(seed, *GROUPS[seed], n, 8)
    kept = kvkeep.select("snapkv:window=8+values:power=0.5", *data, budget).tolist()
    rule = *scored(*data, budget, 8, 5, 0, mean, 0.5), budget, 1, 1.0  # blocks of one token, nothing shared
    assert kept == choose(*rule) or excused(kept, *rule)
    assert all(len(positions) == min(n, budget) for positions in kept)
    plain = *scored(*data, budget, 8, 5, 0, mean, 0.0), budget, 1, 1.0
    assert n <= budget or (kept != choose(*plain) and not excused(kept, *plain))  # the values do matter here
