"""What torch does, as far as a rule may ask: tables of functions, methods and operations."""
