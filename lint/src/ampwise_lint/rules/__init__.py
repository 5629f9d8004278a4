"""The rules, one file each. A file that is here is a rule; nothing else lists them."""
