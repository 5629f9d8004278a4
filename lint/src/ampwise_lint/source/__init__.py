"""Files as they are written: their text, syntax tree, imports, and how names are used."""
