"""Plans for equal steps: HSM, ISM, MSM, their bounds, and common baselines."""
