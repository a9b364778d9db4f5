"""What things cost: ratios within one run, with the memory that XLA plans."""
