from contextlib import nullcontext


def perhaps_alone(model, enabled):
    if enabled and hasattr(model, "no_sync"):
        return model.no_sync()
    return nullcontext()
