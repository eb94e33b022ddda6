"""A codec of values: 8 bits each, rounded at random between neighbours, with one scale for 256 values."""

import numpy as np

from sparseallreduce.streams.wire.values import ValueCodec

BLOCK = 256


class Int8(ValueCodec):
    """Whole numbers from -127 to 127, times the largest magnitude of the block divided by 127."""

    number, name = 200, "int8"

    def lengths(self, count):
        return 4 * -(-count // BLOCK), count

    def encode(self, values, key, coded):
        if not np.isfinite(values).all():
            return int(np.flatnonzero(~np.isfinite(values))[0])
        scales, levels = coded[0].view(np.float32), coded[1].view(np.int8)
        for block, start in enumerate(range(0, len(values), BLOCK)):
            part = values[start : start + BLOCK].astype(np.float64)
            scales[block] = np.float32(np.abs(part).max() / 127)
            if scales[block]:  # what is drawn for a block depends on the key and its place alone
                drawn = np.random.default_rng((key, block)).random(len(part))
                levels[start : start + BLOCK] = np.clip(np.floor(part / scales[block] + drawn), -127, 127)
            else:
                levels[start : start + BLOCK] = 0
        return -1

    def decode(self, coded, out):
        scales = np.frombuffer(coded[0].tobytes(), np.float32)
        levels = np.frombuffer(coded[1].tobytes(), np.int8)
        if not np.isfinite(scales).all():
            return False
        out[:] = levels * np.repeat(scales, BLOCK)[: len(levels)]
        return True


INT8 = Int8()
