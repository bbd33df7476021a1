"""Plans for equal steps: HSM, ISM, MSM and the least that any schedule takes."""
