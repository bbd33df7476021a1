"""Measure the bytes of a call."""
