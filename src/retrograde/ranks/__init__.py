"""Sequences across processes, cut along time: each process, a rank, has its own steps."""
