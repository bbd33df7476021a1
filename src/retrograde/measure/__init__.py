"""Every byte that a call takes."""
