# SPDX-License-Identifier: Apache-2.0
"""The reader of R's data files, on small files made here byte by byte."""

import struct
import sys
import zlib
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

from r_data import RDataError, read_strings

UTF8, LATIN1, ASCII = 1 << 3, 1 << 2, 1 << 6


def block(item, version=3, mark=b"X\n"):
    """One object as it lies in an rdb."""
    head = mark + struct.pack(">3i", version, 0x040201, 0x030500)
    if version == 3:
        head += struct.pack(">i", 5) + b"UTF-8"
    return struct.pack(">i", len(head + item)) + zlib.compress(head + item)


def string(text, level=UTF8):
    return struct.pack(">2i", level << 12 | 9, len(text)) + text


def vector(*items, kind=16):
    return struct.pack(">2i", kind, len(items)) + b"".join(items)


def test_vectors_come_in_the_order_of_the_file():
    content = block(vector(string(b"one", ASCII), string(b""))) + block(vector()) + block(vector(string(b"three")), 2)
    assert read_strings(content) == [["one", ""], [], ["three"]]


def test_each_string_has_its_own_encoding():
    missing = struct.pack(">2i", 9, -1)
    content = block(vector(string("caf\u00e9".encode(), UTF8), string("caf\u00e9".encode("latin-1"), LATIN1), missing))
    assert read_strings(content) == [["caf\u00e9", "caf\u00e9", None]]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (block(vector(kind=14)), "type 14 where a character vector"),
        (block(vector(struct.pack(">2i", 254, 0))), "type 254 where a string"),
        (block(vector(), version=4), "version 4"),
        (block(vector(), mark=b"A\n"), "begins with b'A"),
        (block(vector(string(b"whole"))[:-2]), "ends in the middle"),
        (block(vector(string(b"whole")))[:-6], "where 44 were announced"),
        (b"\0\0\0\1" + b"not zlib", "block 0 is no zlib stream"),
    ],
)
def test_what_cannot_be_read_is_named(content, words):
    with pytest.raises(RDataError, match=words):
        read_strings(content)
