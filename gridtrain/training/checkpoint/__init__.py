"""Replicated state as bytes: serialization, checkpoint stores, merging of stages, export."""
