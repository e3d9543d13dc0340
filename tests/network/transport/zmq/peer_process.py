"""A peer in a process of its own, for tests that kill it.

python peer_process.py SECRET dial ADDRESS KEY   greets the test's transport
python peer_process.py SECRET listen             prints its address, is greeted
python peer_process.py SECRET both ADDRESS KEY   does both

The keys are hexadecimal, and worth nothing: they are a test's.
"""

import sys

from gridtrain.network.transport.identity import Identity
from gridtrain.network.transport.interface import allow_all
from gridtrain.network.transport.zmq.zeromq_transport import ZeroMQTransport

identity = Identity.from_secret(bytes.fromhex(sys.argv[1]))
transport = ZeroMQTransport(identity, "gridtrain test", gate=allow_all)
if sys.argv[2] in ("dial", "both"):
    transport.dial(bytes.fromhex(sys.argv[4]), sys.argv[3])
if sys.argv[2] in ("listen", "both"):
    print(transport.listen("tcp://127.0.0.1:0"), flush=True)
for _ in range(600):  # a minute at most, should the test forget it
    transport.poll(0.1)
