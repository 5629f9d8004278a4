"""What mends a fault in the user's own source: patches, and their trial in a fresh process."""
