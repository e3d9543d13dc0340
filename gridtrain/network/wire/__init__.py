"""Messages as bytes: PROTOCOL.md beside this file is normative, and its tables and examples are tested.

- `schema` derives the encoding of each message from its declaration in `gridtrain.core.messages`.
- `codec` turns messages into frames and back, and refuses everything out of bounds.
- `sparse_payload` is the payload of a sparse exchange: `elias_fano` for indices, `value_encoding` for values.
"""
