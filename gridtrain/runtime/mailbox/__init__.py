"""Between the training thread and the I/O thread: one mailbox, and the snapshot that it publishes."""
