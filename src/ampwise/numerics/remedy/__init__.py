"""What mends a fault: changes that a replay tries, and patches that a fresh process tries."""
