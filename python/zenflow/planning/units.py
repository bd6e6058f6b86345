# SPDX-License-Identifier: Apache-2.0
"""Numbers as people write them: 24GB, 24GiB, 7B, 7e9, and back. Needs no torch."""

import math
import numbers
import re

_DECIMAL = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_BINARY = {"KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_COUNTS = {"": 1, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
_NUMBER = re.compile(r"\s*([0-9][0-9_]*\.?[0-9]*(?:e[+-]?[0-9]+)?)\s*([a-z/]*)\s*", re.IGNORECASE)


def parse_bytes(value, name):
    """Bytes, of a number or of text such as 24GB (10**9) and 24GiB (2**30)."""
    number, unit = _split(value, name, "bytes such as 24GB, 24GiB or 24e9")
    prefix = unit.upper().removesuffix("B")
    size = round(number * _factor(_DECIMAL | _BINARY, prefix, value, name, "bytes such as 24GB, 24GiB or 24e9"))
    if size < 1024:  # no memory and no link is so small: the unit is missing
        raise ValueError(f"{name} must be bytes such as 24GB, 24GiB or 24e9, got {value!r}, which lacks its unit")
    return size


def parse_rate(value, name):
    """Bytes per second, of a number or of text such as 25GB/s."""
    text = re.sub(r"/s$", "", value.strip()) if isinstance(value, str) else value
    if isinstance(text, str) and re.search("[KMGT]i?b$", text):
        raise ValueError(f"{name} must be bytes per second such as 25GB/s, got {value!r}: 8 bits are a byte")
    return float(parse_bytes(text, name))


def parse_count(value, name):
    """A count, of a number or of text such as 7B, 350M or 7e9."""
    number, unit = _split(value, name, "a number such as 7e9, 7B or 350M")
    return round(number * _factor(_COUNTS, unit.upper(), value, name, "a number such as 7e9, 7B or 350M"))


def _split(value, name, wanted):
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        number, unit = float(value), ""
    elif isinstance(value, str) and (match := _NUMBER.fullmatch(value)):
        number, unit = float(match[1]), match[2]
    else:
        raise ValueError(f"{name} must be {wanted}, got {value!r}")
    if not 0.0 < number < math.inf:
        raise ValueError(f"{name} must be more than 0, got {value!r}")
    return number, unit


def _factor(factors, unit, value, name, wanted):
    if unit not in factors:
        raise ValueError(f"{name} must be {wanted}, got {value!r}")
    return factors[unit]


def format_count(count):
    """ "6.738B" of 6.738e9."""
    for unit, factor in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= factor:
            return f"{count / factor:.4g}{unit}"
    return str(count)


def format_bytes(size):
    """ "24.6 GB" of 24.6e9."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if size >= factor:
            return f"{size / factor:.4g} {unit}"
    return f"{size / 1e3:.4g} kB"


def format_seconds(seconds):
    """ "0.62 s" or "62 ms"."""
    return f"{seconds:.3g} s" if seconds >= 0.1 or seconds == 0 else f"{1e3 * seconds:.3g} ms"
