"""Collective buffers: the numbers of one collective of one attempt, in numpy.

The core says which payload is added, stored or merged where, and which one is sent; a buffer does it, and
checks each payload before it is used.

- `collective_buffers`: the interface, and the buffers of ring, all-gather and butterfly.
- `direct_buffer`, `star_buffers`: those of the direct exchange, the star and the tree.
- `buckets`: one vector in several buckets, each with a buffer and a channel.
"""
