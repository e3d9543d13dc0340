"""Messages as bytes.  `codec` for the messages, `sparse` for the payload of a sparse exchange.

PROTOCOL.md beside this file is normative; its examples are run by a test.
"""
