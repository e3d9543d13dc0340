"""Converts Parquet and Arrow tables to rows of portable values in the cache's own format, and reads the rows.

    row 0 | row 1 | ...                             MessagePack of {column: value}
    the end of each row, and the number of rows     int64, little-endian

Each row is a range of bytes, like a sample in the other formats, although Parquet has no such ranges.
Numbers, strings, bytes, lists and mappings keep their types; dates, times, durations, decimal numbers and
UUIDs become strings.
"""

from __future__ import annotations

import datetime
import decimal
import uuid
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

import msgpack
import numpy as np
import numpy.typing as npt

from gridtrain.errors import describe_type
from gridtrain.extras import require

_AS_TEXT = (datetime.date, datetime.time, datetime.timedelta, decimal.Decimal, uuid.UUID)
_BATCH_ROWS = 1024


def write_rows(rows: Iterable[dict[str, Any]], file: BinaryIO) -> None:
    """Write a file of rows.  Raises `ValueError` for a value that has no portable form."""
    ends, end = [], 0
    for row in rows:
        data: bytes = msgpack.packb(row, default=_plain)
        end += len(data)
        file.write(data)
        ends.append(end)
    file.write(np.array([*ends, len(ends)], "<i8").tobytes())


def _plain(value: Any) -> Any:
    if isinstance(value, _AS_TEXT):
        return str(value)
    if isinstance(value, np.ndarray | np.generic) and value.dtype != object:
        return value.tolist()
    raise ValueError(
        f"a column has {describe_type(value)}, which has no portable form; store it as bytes, a number, a "
        "string or a list (with the datasets package: remove with_format, and cast_column(..., decode=False))"
    )


def ranges(file: BinaryIO) -> npt.NDArray[np.int64]:
    """Return an array (rows, 2): the offsets of each row's first byte and of the byte after its last one.

    Raises `ValueError` if the file was not written by `write_rows`.
    """
    size = file.seek(0, 2)
    file.seek(max(0, size - 8))
    count = int.from_bytes(file.read(8), "little", signed=True) if size >= 8 else -1
    start = size - 8 * (count + 1)
    if count < 0 or start < 0:
        raise ValueError(f"its {size} bytes do not end with the offsets of its rows")
    file.seek(start)
    ends = np.frombuffer(file.read(8 * count), "<i8").astype(np.int64)
    starts = np.concatenate([np.zeros(1, np.int64), ends])[:count]
    if (count and int(ends[-1]) != start) or (not count and start) or np.any(ends <= starts):
        raise ValueError(f"the offsets of its {count} rows do not match its size of {size} bytes")
    return np.stack([starts, ends], axis=1)


def decode(data: bytes) -> Any:
    try:
        return msgpack.unpackb(data, strict_map_key=False)
    except ValueError:
        raise
    except Exception as error:  # msgpack.exceptions.StackError and others
        raise ValueError(str(error)) from None


def convert_parquet(file: BinaryIO, rows: BinaryIO) -> None:
    """Write the rows of a Parquet file in the cache's row format."""
    require("pyarrow", "reading Parquet files")
    from pyarrow.parquet import ParquetFile

    write_rows(_rows_of(ParquetFile(file).iter_batches(_BATCH_ROWS)), rows)


def convert_arrow(file: BinaryIO, rows: BinaryIO) -> None:
    """Write the rows of an Arrow stream, as the `datasets` package stores it, or of an Arrow file."""
    require("pyarrow", "reading Arrow files")
    from pyarrow import ipc

    is_file = file.read(6) == b"ARROW1"
    file.seek(0)
    if is_file:
        opened = ipc.open_file(file)
        write_rows(_rows_of(opened.get_batch(i) for i in range(opened.num_record_batches)), rows)
    else:
        write_rows(_rows_of(ipc.open_stream(file)), rows)


def _rows_of(batches: Iterable[Any]) -> Iterator[dict[str, Any]]:
    for batch in batches:
        for start in range(0, batch.num_rows, _BATCH_ROWS):
            yield from batch.slice(start, _BATCH_ROWS).to_pylist()
