"""Cores, each of which runs ranges of steps: any cell, recurrent layers, or a chain of layers."""
