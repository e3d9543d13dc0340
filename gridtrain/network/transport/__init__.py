"""How messages travel between peers: see `base` for the contract, `memory` and `zeromq` for the two ways."""
