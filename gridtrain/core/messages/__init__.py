"""The messages of the protocol and their limits; each message is a frozen dataclass.

    types          values that several messages carry: identities, rounds, spans, members, checkpoints
    coordination   worker <-> coordinator: joining, heartbeats, generations, leaving
    round          worker <-> worker within a round: payloads, votes, decisions, averages
    transfer       state, checkpoints, catch-up and residuals; link measurements; relays
    admin          operators, `gridtrain doctor`, status, the run's bundle

`declaration` contains the decorator and the field types with their bounds, from which
`gridtrain.network.wire` derives the encoding.  PROTOCOL.md describes what each message means.  A `payload` is
opaque: one frame on the wire, any object in a simulator.
"""
# ruff: noqa: F403

from __future__ import annotations

from gridtrain.core.messages.admin import *
from gridtrain.core.messages.coordination import *
from gridtrain.core.messages.declaration import *
from gridtrain.core.messages.round import *
from gridtrain.core.messages.transfer import *
from gridtrain.core.messages.types import *
