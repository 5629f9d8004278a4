"""What updates make of parameters and state: inf and NaN, and changes that rounding lost."""
