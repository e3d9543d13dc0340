"""Who may come in, who violated the protocol, who is banned.  Pure."""
