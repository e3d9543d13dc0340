"""Collective buffers: each holds the data of one collective as numpy arrays.

The core decides where each payload is added, stored or merged, and which payload is sent.  A buffer executes
these decisions, and checks each payload before using it.

- `collective_buffers`: the interface, and the buffers of the ring, the all-gather and the butterfly.
- `direct_buffer`, `star_buffers`: the buffers of the direct exchange, the star and the tree; `SPARSE_BUFFERS`
  maps each topology to its sparse buffer.
- `rounded_buffers`: the dense buffers whose payloads hold bf16 or int8 values; `DENSE_BUFFERS` maps
  each topology to its dense buffers.
- `buckets`: the buffers of one vector that is divided into buckets, each with its own channel.
"""
