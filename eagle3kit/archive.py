"""The zip that torch.save writes: records stored as they are, found through the directory at the file's end.

Written out here because the standard library's reader takes three times as long, believes what a directory says of sizes,
and unpacks compressed records, which torch never writes. Source: PKWARE's APPNOTE.TXT, sections 4.3.7 to 4.3.16 and 4.5.3.
"""

import os
import struct

MOST_DIRECTORY = 16 << 20
MOST_RECORDS = 200_000
CENTRAL = struct.Struct("<4s6H3L5H2L")
END = struct.Struct("<4s4H2LH")
END64 = struct.Struct("<4sQ2H2L4Q")


class NotAnArchive(Exception):
    """Cut short, compressed, overlapping, or a zip of something else; the message says which."""


class Archive:
    """The records of one file. `records`: name without the archive's own folder -> (offset of its header, bytes)."""

    def __init__(self, descriptor: int, size: int):
        self._file, self._size = descriptor, size
        self._head = os.pread(descriptor, 4096, 0)  # the description of a sample lies here
        self.records: dict[str, tuple[int, int]] = {}
        self._list(*self._directory())

    def _directory(self) -> tuple[int, bytes]:
        """(number of records, the directory's bytes)."""
        reach = min(self._size, 4096)
        tail = os.pread(self._file, reach, self._size - reach)
        if len(tail) < END.size or tail[-END.size :][:4] != b"PK\5\6":
            raise NotAnArchive(f"{self._size:,} bytes without the directory that ends an archive")
        _, _, _, _, count, length, start, _ = END.unpack(tail[-END.size :])
        close = self._size - END.size
        locator = tail[-END.size - 20 : -END.size]
        if locator[:4] == b"PK\6\7":  # sizes beyond 32 bits; torch always writes it
            (place,) = struct.unpack_from("<Q", locator, 8)
            if place + END64.size > close:
                raise NotAnArchive("a directory that lies outside the file")
            whole = END64.unpack(os.pread(self._file, END64.size, place))
            if whole[0] != b"PK\6\6":
                raise NotAnArchive("a directory whose end is not where it says")
            count, length, start = whole[7:10]
            close = place
        if length > MOST_DIRECTORY or count > MOST_RECORDS:
            raise NotAnArchive(f"a directory of {count:,} records in {length:,} bytes")
        if start + length > close:
            raise NotAnArchive("a directory that lies outside the file")
        begin = start - (self._size - reach)
        return count, tail[begin : begin + length] if begin >= 0 else os.pread(self._file, length, start)

    def _bytes(self, offset: int, length: int) -> bytes:
        if offset + length <= len(self._head):
            return self._head[offset : offset + length]
        return os.pread(self._file, length, offset)

    def _list(self, count: int, directory: bytes) -> None:
        position, total, root = 0, 0, b""
        records, most, unpack = self.records, self._size, CENTRAL.unpack_from
        try:
            for _ in range(count):
                signature, _, _, flags, method, _, _, _, packed, size, named, extra, said, _, _, _, offset = unpack(
                    directory, position)  # fmt: skip
                position += 46
                name = directory[position : position + named]
                if size == 0xFFFFFFFF or packed == 0xFFFFFFFF or offset == 0xFFFFFFFF:
                    field = directory[position + named : position + named + extra]
                    size, packed, offset = self._wide(field, size, packed, offset)
                position += named + extra + said
                start, _, inner_name = name.partition(b"/")
                inner = inner_name.decode()
                if signature != b"PK\1\2" or position > len(directory) or not inner:
                    raise NotAnArchive("a directory that is not torch's (a zip of something else?)")
                if method or packed != size:
                    raise NotAnArchive(f"record {inner} is compressed ({packed:,} bytes for {size:,}), as torch.save never does")
                if flags & 1:
                    raise NotAnArchive(f"record {inner} is encrypted")
                if inner in records:
                    raise NotAnArchive(f"record {inner} stands twice")
                if offset + 30 + named + size > most:
                    raise NotAnArchive(f"record {inner} reaches beyond the end of the file")
                if root and start != root:
                    raise NotAnArchive("more than one archive in a file")
                records[inner] = offset, size
                total += size
                root = start
        except (struct.error, UnicodeDecodeError):
            raise NotAnArchive("a directory that makes no sense") from None
        if total > most:
            raise NotAnArchive("records that overlap")

    @staticmethod
    def _wide(extra: bytes, size: int, packed: int, offset: int) -> tuple[int, int, int]:
        """The 64-bit values of those of the three that say 0xFFFFFFFF, in this order, from extra field 1."""
        position = 0
        while position + 4 <= len(extra):
            kind, length = struct.unpack_from("<2H", extra, position)
            if kind == 1:
                values = iter(struct.unpack_from(f"<{length // 8}Q", extra, position + 4))
                wide = [next(values, value) if value == 0xFFFFFFFF else value for value in (size, packed, offset)]
                return wide[0], wide[1], wide[2]
            position += 4 + length
        return size, packed, offset

    def text(self, name: str, most: int) -> bytes:
        """The bytes of a small record; NotAnArchive when it is missing or larger than `most`."""
        if name not in self.records:
            raise NotAnArchive(f"an archive without {name} (a zip of something else?)")
        offset, size = self.records[name]
        if size > most:
            raise NotAnArchive(f"{name} of {size:,} bytes, at most {most:,} are read")
        head = self._bytes(offset, 30)
        if len(head) < 30 or head[:4] != b"PK\3\4":
            raise NotAnArchive(f"record {name} is not where the directory says")
        named, extra = struct.unpack_from("<2H", head, 26)
        found = self._bytes(offset + 30 + named + extra, size)
        if len(found) < size:
            raise NotAnArchive(f"record {name} is cut short")
        return found
