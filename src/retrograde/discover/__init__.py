"""What a call depends on: found, noted, put back; and a trial of it that leaves no trace."""
