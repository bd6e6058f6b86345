# SPDX-License-Identifier: Apache-2.0
"""Reads the character vectors of an R package's data file (Rdata.rdb) without R.

Such a file is a row of blocks: the block's size once unpacked (4 bytes, big-endian), then one zlib stream. Unpacked, a
block is one R object in XDR form: "R Internals", section "Serialization Formats". Not for objects of other kinds.
"""

import struct
import zlib

CHARACTERS, STRINGS = 9, 16  # CHARSXP, STRSXP
LATIN1 = 1 << 2  # in a CHARSXP's level


class RDataError(Exception):
    """The file is damaged, or holds what this reader does not know."""


def read_strings(content):
    """The objects of an Rdata.rdb in their order, each a list of str (None for NA)."""
    vectors = []
    while content:
        size, unpacker = int.from_bytes(content[:4], "big"), zlib.decompressobj()
        try:
            block = unpacker.decompress(content[4:])
        except zlib.error as error:
            raise RDataError(f"block {len(vectors)} is no zlib stream: {error}") from None
        if len(block) != size or not unpacker.eof:
            raise RDataError(f"block {len(vectors)} has {len(block)} bytes where {size} were announced")
        try:
            vectors.append(_Object(block).strings())
        except struct.error:
            raise RDataError(f"block {len(vectors)} ends in the middle of an object") from None
        content = unpacker.unused_data
    return vectors


class _Object:
    def __init__(self, block):
        self.block, self.position = block, 0

    def integer(self):
        (value,) = struct.unpack_from(">i", self.block, self.position)
        self.position += 4
        return value

    def bytes(self, count):
        if len(self.block) < self.position + count:
            raise struct.error
        self.position += count
        return self.block[self.position - count : self.position]

    def expect(self, kind, what):
        """The flags of the next item: its type in the low 8 bits, then marks, then its level from bit 12 on."""
        flags = self.integer()
        if flags & 0xFF != kind:
            raise RDataError(f"an object of R's type {flags & 0xFF} where {what} (type {kind}) is expected")
        return flags

    def strings(self):
        if (mark := self.bytes(2)) != b"X\n":
            raise RDataError(f"an object begins with {mark!r}: only R's XDR form (b'X\\n') can be read")
        version, _writer, _oldest_reader = (self.integer() for _ in range(3))
        if version == 3:
            self.bytes(self.integer())  # the session's encoding; each string has its own
        elif version != 2:
            raise RDataError(f"serialization version {version}; 2 and 3 can be read")
        self.expect(STRINGS, "a character vector")
        return [self.string() for _ in range(self.integer())]

    def string(self):
        flags, length = self.expect(CHARACTERS, "a string"), self.integer()
        if length == -1:
            return None
        return self.bytes(length).decode("latin-1" if flags >> 12 & LATIN1 else "utf-8")
