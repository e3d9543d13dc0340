"""Decides which keys may connect and which members are removed (access control), without I/O.

Enrol, operator's commands -----> authorization --> replies, journal entries, members to remove
                                       |   uses authorization_limits: bounds, limits, refusals
violations -------------------> accusations: which accusations are counted
joins, bundle requests -------> request_rate: how many are allowed per key

`gridtrain_coordinator.access_handler` carries out what this package decides.
"""
