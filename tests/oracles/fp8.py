"""8-bit floats one at a time, in float64, from the definition of e4m3: 1 bit of sign, 4 of exponent, 3 of mantissa."""

import math
from bisect import bisect_left

LARGEST = 448.0


def value(code):
    """What the bits 0 to 126 mean; 127 is NaN."""
    exponent, mantissa = code >> 3, code & 7
    return mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)


VALUES = [value(code) for code in range(127)]


def nearest(x):
    """The nearest e4m3, of two as near as each other the even one; beyond the largest, that."""
    size = min(abs(x), LARGEST)
    above = bisect_left(VALUES, size)
    below = max(0, above - 1)
    first, second = size - VALUES[below], VALUES[above] - size
    code = below if first < second or (first == second and below % 2 == 0) else above
    return math.copysign(VALUES[code], x)


def quantize(row):
    """A list of numbers -> e4m3 numbers, and their scale."""
    scale = max(max(map(abs, row)), LARGEST * 2.0**-100) / LARGEST
    return [nearest(x / scale) for x in row], scale


def is_rounded(number, exact, slack):
    """Whether e4m3 is the nearest one to a number that is known but for a relative error."""
    ends = sorted(nearest(exact * (1 + sign * slack)) for sign in (1, -1))
    return ends[0] <= number <= ends[1]


def linear(rows, weight, bias=None):
    """Products of quantized rows, each a pair of numbers and scale. -> [rows][out]"""
    result = []
    for numbers, scale in rows:
        products = [sum(map(float.__mul__, numbers, other)) * scale * factor for other, factor in weight]
        result.append([p + b for p, b in zip(products, bias or [0.0] * len(products), strict=True)])
    return result
