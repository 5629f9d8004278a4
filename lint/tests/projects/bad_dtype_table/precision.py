import torch


def dtype_of(name):
    table = {
        "float16": torch.float16,
        "float32": torch.float32,
        "float64": torch.float64,
        "bfloat16": torch.bfloat16,
        "int8": torch.int8,
        "bool": torch.bool,
    }
    return table[name]
