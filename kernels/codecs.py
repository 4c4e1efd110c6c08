"""All codecs, the shortest encoding of each dtype first: `next(c for c in CODECS if c.applies_to(dtype))`.

Which one is worth its kernel for which tensor is for the policy to say; none is used unasked.
"""

from __future__ import annotations

from chameleon_mm.kernels.codec import Codec
from chameleon_mm.kernels.codec_bool import BOOL_AS_BITS
from chameleon_mm.kernels.codec_narrow import FP32_AS_BF16, FP32_AS_FP16, INT64_AS_INT16, INT64_AS_INT32
from chameleon_mm.kernels.codec_pack12 import PACK12

CODECS: tuple[Codec, ...] = (BOOL_AS_BITS, INT64_AS_INT16, INT64_AS_INT32, FP32_AS_BF16, FP32_AS_FP16, PACK12)
