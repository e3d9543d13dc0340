"""The real cores on a virtual network: thousands of schedules a second, each from a seed."""
