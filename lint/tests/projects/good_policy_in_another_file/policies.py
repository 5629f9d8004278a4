import torch
from torch.distributed.fsdp import MixedPrecision

half = MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float16)
brain = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
full = MixedPrecision(param_dtype=torch.float32, reduce_dtype=torch.float32)


def policy_of(cfg):
    if not cfg.mixed_precision:
        return None
    return brain if torch.cuda.is_bf16_supported() else half
