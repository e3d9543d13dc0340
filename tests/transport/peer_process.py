"""A peer in a process of its own, for tests that kill it.

python peer_process.py dial ADDRESS   greets the test's transport
python peer_process.py listen         prints its address, is greeted
"""

import sys

from gridtrain.transport.zeromq import ZeroMQTransport

transport = ZeroMQTransport(b"bert".ljust(32, b"."), "gridtrain test")
if sys.argv[1] == "dial":
    transport.dial(None, sys.argv[2])
else:
    print(transport.listen("tcp://127.0.0.1:0"), flush=True)
for _ in range(600):  # a minute at most, should the test forget it
    transport.poll(0.1)
