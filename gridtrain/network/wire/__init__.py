"""Encodes messages as bytes.  PROTOCOL.md in this folder is normative; its tables and examples are tested.

- `field_encoding` derives the encoding of each message from its declaration in `gridtrain.core.messages`.
- `codec` converts messages to frames and back, and rejects messages that are out of bounds.
- `dense_payload` encodes a slice of a dense exchange with `value_encoding`.
- `sparse_payload` encodes the payload of a sparse exchange: indices with `elias_fano`, values with
  `value_encoding`, which uses `level_encoding` for 4 and 2 bits.
"""
