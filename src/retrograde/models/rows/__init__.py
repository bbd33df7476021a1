"""Layers that a model calls one after the other: how each call is kept, and run again."""
