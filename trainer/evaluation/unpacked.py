"""Computes how large the data of Parquet and Arrow files is once it is unpacked, because a small file may hold much
data. Pages and buffers are compressed, a dictionary holds a text once for all its rows, and several views may show the
same text.

The size of a Parquet row group or an Arrow message is read from the file, before memory is needed for its data. A
message never unpacks to more than it says, but a row group may. Therefore the sizes of arrays are also computed, from
their values: a value counts as often as a row reads it.
"""

from __future__ import annotations

import struct

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import types

#: bytes that the Python object of a value takes beside its contents, including the reference to it; further bytes that
#: a dict takes
_OBJECT, _DICT = 64, 192


class UnknownSize(Exception):
    """Raised for a column whose layout may show the same values any number of times, so that its size cannot be
    computed."""


def group_size(group: pq.RowGroupMetaData) -> int:
    """Return the size in bytes of a Parquet row group after decompression, as the footer of the file says, plus
    `_OBJECT` bytes for each row of each column. A text that a dictionary holds for many rows is counted once, and a
    list as one value. The metadata of single columns is not read, because pyarrow crashes the process if it is
    damaged."""
    return int(group.total_byte_size + _OBJECT * group.num_rows * group.num_columns)


def message_size(message: pa.ipc.Message) -> int:
    """Return the total size in bytes of the buffers of an Arrow message after decompression. pyarrow does not tell the
    size, so it is read from the beginnings of the compressed buffers. Raises struct.error when a buffer is outside the
    message."""
    if message.body is None or not message.body.size:
        return 0
    data, body = bytes(message.metadata), memoryview(message.body)
    (root,) = struct.unpack_from("<I", data)
    header = _target(data, root, 2)
    if message.type == "dictionary":                             # holds its values like a record batch
        header = _target(data, header, 1)
    if not _field(data, header, 3):                              # not compressed
        return len(body)
    buffers = _target(data, header, 2)
    (count,) = struct.unpack_from("<I", data, buffers)
    size = 0
    for offset, length in struct.iter_unpack("<qq", data[buffers + 4:buffers + 4 + 16 * count]):
        if length:
            (unpacked,) = struct.unpack_from("<q", body, offset)
            size += unpacked if unpacked >= 0 else length        # -1: this buffer is stored as it is
    return size


def _field(data: bytes, table: int, number: int) -> int:
    """Return the offset at which field `number` of a table begins in the flatbuffer `data`; 0 if the table lacks the
    field. `table` is the offset of the table."""
    vtable = table - struct.unpack_from("<i", data, table)[0]
    slot = 4 + 2 * number
    if slot >= struct.unpack_from("<H", data, vtable)[0]:
        return 0
    (offset,) = struct.unpack_from("<H", data, vtable + slot)
    return table + offset if offset else 0


def _target(data: bytes, table: int, number: int) -> int:
    """Return the offset of the table or vector to which field `number` of a table refers in the flatbuffer `data`.
    `table` is the offset of the table."""
    field = _field(data, table, number)
    return int(field + struct.unpack_from("<I", data, field)[0])


def array_size(array: pa.Array) -> int:
    """Return the size in bytes of the values of an array, plus what the Python objects for them take. A text of a
    dictionary or view is counted for every row that reads it. Raises UnknownSize for run-end-encoded arrays, list views
    and other layouts that may show the same values any number of times."""
    kind = array.type
    size = _OBJECT * len(array)
    if isinstance(kind, pa.BaseExtensionType):
        return array_size(array.storage)
    if types.is_struct(kind):
        return size + _DICT * len(array) + sum(map(array_size, array.flatten()))
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return size + array_size(array.flatten())
    if types.is_map(kind):
        return size + array_size(array.keys) + array_size(array.items)
    if types.is_dictionary(kind):
        values = array.dictionary
        if types.is_nested(values.type):
            raise UnknownSize(str(kind))
        if not types.is_primitive(values.type):
            lengths = pc.binary_length(values.cast(pa.large_binary()))
            size += pc.sum(pc.take(lengths, array.indices)).as_py() or 0
        return size
    if types.is_string_view(kind) or types.is_binary_view(kind):
        views = np.frombuffer(array.buffers()[1], np.int32)[4 * array.offset:4 * (array.offset + len(array))]
        return size + int(views[::4][array.is_valid().to_numpy(zero_copy_only=False)].sum(dtype=np.int64))
    if types.is_nested(kind):
        raise UnknownSize(str(kind))
    return size + array.nbytes
