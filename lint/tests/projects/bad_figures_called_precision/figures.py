def precision_of(predicted, wanted):
    """The precision at 1."""
    precision = sum(predicted == wanted)
    return precision / len(wanted)
