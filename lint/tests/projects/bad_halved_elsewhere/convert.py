"""Parameters that are cast one by one, and back."""


def to_half(model):
    def cast(layer):
        if hasattr(layer, "weight"):
            layer.weight.data = layer.weight.data.half()

    model.apply(cast)


def each_to_half(model):
    for p in model.parameters():
        p.data = p.data.half()


def to_float(model):
    for p in model.parameters():
        p.data = p.data.float()
