"""Find what a call depends on, note it and restore it; and try a call without leaving a trace."""
