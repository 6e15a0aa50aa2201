"""Arrays of a page, as the browser reads them."""

import base64
import zlib

import numpy as np
import torch

from kvkeep.pages.html import LEVELS


def unpack(packed):
    raw = zlib.decompress(base64.b64decode(packed.data))
    if packed.kind == "bits":
        rows = np.frombuffer(raw, np.uint8).reshape(*packed.shape[:-1], (packed.shape[-1] + 7) // 8)
        found = np.unpackbits(rows, axis=-1, count=packed.shape[-1], bitorder="little").astype(bool)
    else:
        found = np.frombuffer(raw, np.uint8 if packed.kind == "levels" else "<u2").astype(np.float32)
        if packed.kind == "levels":
            found = found * (packed.high - packed.low) / LEVELS + packed.low
    return torch.from_numpy(found.reshape(packed.shape).copy())
